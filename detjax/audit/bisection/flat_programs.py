"""A traced function as one list of steps: calls are inlined, so that layers are in the order of computation."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import jax.numpy as jnp
from jax import lax
from jax.extend import core

from detjax.invariant import equations
from detjax.invariant.batch_axis import BatchAxisTracer, operation_places
from detjax.invariant.equations import Kind
from detjax.invariant.places import UNKNOWN, Place, Rows, Shared
from detjax.invariant.walker import walk

FORWARD: Final = -1
BACKWARD: Final = -2
"""The direction of a scan, after the scan's index in a path."""

type Key = tuple[int, int]
"""A step's number and the index of one of its results."""
type Visit = Callable[["Step", list[Any]], tuple[list[Any], dict[Key, Any]]]
"""Maps a step's results to the values that later steps read, and to arrays to return."""
type Reduction = Callable[[dict[Key, Any]], dict[Key, Any]]
"""Maps the arrays that `Visit` returned for the steps of one program to the arrays to return instead."""


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """An equation.

    Attributes:
        number: a number unique within the program.
        eqn: the equation.
        inputs: the numbers of the values that it reads, or literals.
        outputs: the numbers of its results.
        places: the places of the batch's rows in its results.
        layer: the names of its scopes.
        line: the user's line.
        path: for each surrounding scan its index and direction, then the index of the step.
        body: the body of a scan.
    """

    number: int
    eqn: core.JaxprEqn
    inputs: tuple[Any, ...]
    outputs: tuple[int, ...]
    places: tuple[Place, ...]
    layer: str
    line: str
    path: tuple[int, ...]
    body: "FlatProgram | None" = None

    @property
    def primitive(self) -> str:
        """The name of the primitive or of the operation of detjax."""
        return equations.operation(self.eqn) or self.eqn.primitive.name


@dataclasses.dataclass(frozen=True, eq=False)
class FlatProgram:
    """Steps in order, with the numbers of arguments, further values by number, and the results' numbers or literals."""

    inputs: tuple[int, ...]
    constants: dict[int, Any]
    steps: tuple[Step, ...]
    results: tuple[Any, ...]

    def all_steps(self) -> Iterator[tuple["FlatProgram", Step]]:
        """Yields all steps, including steps within scans, each with its program."""
        for step in self.steps:
            yield self, step
            if step.body is not None:
                yield from step.body.all_steps()

    def begin(self, values: Sequence[Any]) -> dict[int, Any]:
        """Returns the values of the inputs and constants, by number."""
        return dict(zip(self.inputs, values, strict=True)) | self.constants

    def run(self, values: Sequence[Any], visit: Visit, reduction: Reduction = dict) -> tuple[list[Any], dict[Key, Any]]:
        """Returns the results, and the arrays of `visit`; scans add an axis of iterations in front.

        Args:
            values: the arguments.
            visit: is called with each step's results.
            reduction: reduces the arrays of `visit`; within scans, in each iteration.
        """
        env, seen, reduced = self.begin(values), {}, {}
        for step in self.steps:
            visited, inner = run_step(step, env, visit, reduction)
            seen |= visited
            reduced |= inner
        return [_read(atom, env) for atom in self.results], reduced | reduction(seen)


def run_step(
    step: Step, env: dict[int, Any], visit: Visit, reduction: Reduction = dict
) -> tuple[dict[Key, Any], dict[Key, Any]]:
    """Computes a step's results into `env`; returns the arrays of `visit`, and the reduced ones of a scan's steps."""
    values = [_read(atom, env) for atom in step.inputs]
    if step.body is not None:
        outputs, inner = _run_scan(step, step.body, values, visit, reduction)
    else:
        outputs, inner = equations.bind(step.eqn, values), {}
    outputs, seen = visit(step, outputs)
    env.update(zip(step.outputs, outputs, strict=True))
    return seen, inner


def _run_scan(
    step: Step, body: FlatProgram, values: list[Any], visit: Visit, reduction: Reduction
) -> tuple[list[Any], dict[Key, Any]]:
    consts, carry, xs = equations.scan_arguments(step.eqn, values)

    def iteration(carry: list[Any], xs: list[Any]) -> tuple[list[Any], tuple[list[Any], dict[Key, Any]]]:
        results, seen = body.run([*consts, *carry, *xs], visit, reduction)
        return results[: len(carry)], (results[len(carry) :], seen)

    params = step.eqn.params
    carry, (ys, seen) = lax.scan(iteration, carry, xs, params["length"], params["reverse"], params["unroll"])
    return [*carry, *ys], seen


def _read(atom: Any, env: dict[int, Any]) -> Any:
    if isinstance(atom, core.Literal):
        return jnp.asarray(atom.val, equations.aval(atom).dtype)
    return env[atom]


def flatten(jaxpr: core.Jaxpr, batch: int | None, places: Sequence[Place]) -> FlatProgram:
    """Returns a jaxpr as steps, given the number of rows, None without a batch, and the place of each argument."""
    return _Flattening(batch).program(jaxpr, places, "", "", ())


class _Flattening:
    """Collects the steps of a function and of the bodies of its scans."""

    def __init__(self, batch: int | None) -> None:
        # A batch of one needs no places, because each array is one row.
        self._tracer = BatchAxisTracer(batch) if batch is not None and batch > 1 else None
        self._values = itertools.count()
        self._steps = itertools.count()

    def program(
        self, jaxpr: core.Jaxpr, places: Sequence[Place], layer: str, line: str, path: tuple[int, ...]
    ) -> FlatProgram:
        """Returns a function's steps, given its layer, the line of its call, and its path."""
        inputs = tuple(next(self._values) for _ in jaxpr.invars)
        constants: dict[int, Any] = {}
        steps: list[Step] = []
        arguments = list(zip(inputs, places, strict=True))
        results = self._inline(jaxpr, arguments, layer, line, path, steps, constants)
        return FlatProgram(inputs, constants, tuple(steps), tuple(atom for atom, _ in results))

    def _inline(
        self,
        jaxpr: core.Jaxpr,
        arguments: Sequence[tuple[Any, Place]],
        layer: str,
        line: str,
        path: tuple[int, ...],
        steps: list[Step],
        constants: dict[int, Any],
    ) -> list[tuple[Any, Place]]:
        """Appends a function's steps. Arguments and results are value numbers with their places."""

        def constant(value: Any) -> tuple[Any, Place]:
            number = next(self._values)
            constants[number] = value
            return number, Shared()

        def rule(eqn: core.JaxprEqn, operands: list[tuple[Any, Place]]) -> Iterable[tuple[Any, Place]]:
            inner = "/".join(filter(None, (layer, equations.layer(eqn))))
            here = equations.source_line(eqn) or line
            if equations.is_call(eqn):
                return self._inline(equations.body(eqn), operands, inner, here, path, steps, constants)
            step_path = (*path, len(steps))
            results, body_places = self._places(eqn, [place for _, place in operands])
            body = None
            if eqn.primitive.name == "scan":
                direction = BACKWARD if eqn.params["reverse"] else FORWARD
                body = self.program(eqn.params["jaxpr"], body_places, inner, here, (*step_path, direction))
            outputs = tuple(next(self._values) for _ in eqn.outvars)
            number, inputs = next(self._steps), tuple(atom for atom, _ in operands)
            steps.append(Step(number, eqn, inputs, outputs, tuple(results), inner, here, step_path, body))
            return zip(outputs, results, strict=True)

        known = [*map(constant, jaxpr.consts), *arguments]
        return walk(jaxpr, known, rule, lambda atom: (atom, Shared()))

    def _places(self, eqn: core.JaxprEqn, operand_places: list[Place]) -> tuple[list[Place], list[Place]]:
        """Returns the places of an equation's results, and of the arguments of a scan's body.

        Arrays that rows are combined with count as uniform: a defect may give rows numbers that depend on their
        position in the batch, but they are still rows.
        """
        if self._tracer is None:
            return [Shared()] * len(eqn.outvars), [Shared()] * len(eqn.invars)
        if equations.kind(eqn) is Kind.OPERATION:
            return operation_places(eqn, operand_places, self._tracer.batch), []
        alike: list[Place] = [
            place if isinstance(place, Rows) else Shared(frozenset(range(getattr(equations.aval(v), "ndim", 0))))
            for place, v in zip(operand_places, eqn.invars, strict=True)
        ]
        is_scan = eqn.primitive.name == "scan"
        results, body_places = self._tracer.scan(eqn, alike) if is_scan else (self._tracer.equation(eqn, alike), [])
        if UNKNOWN in operand_places:  # results of mixed rows alone are mixed too
            results = [x if isinstance(x, Rows) else UNKNOWN for x in results]
            body_places = [x if isinstance(x, Rows) else UNKNOWN for x in body_places]
        return [*results], [*body_places]


MOVES: Final = frozenset("broadcast_in_dim reshape squeeze expand_dims transpose copy copy_p".split())
"""Primitives that keep every element unchanged."""


def leaving(program: FlatProgram) -> set[int]:
    """Returns the numbers of values that are results, or are read outside of the layer that computes them."""
    makers = {number: step.layer for step in program.steps for number in step.outputs}
    out = {atom for atom in program.results if not isinstance(atom, core.Literal)}
    for step in program.steps:
        for atom in step.inputs:
            if isinstance(atom, core.Literal) or atom not in makers:
                continue
            if f"{step.layer}/".startswith(f"{makers[atom]}/") or not makers[atom]:
                continue
            out.add(atom)
    return out & set(makers)


def is_observed(step: Step) -> bool:
    """Returns whether a step's results get digests: it does not only move elements, and is not a scan."""
    return step.body is None and step.primitive not in MOVES | {"iota", "optimization_barrier"}
