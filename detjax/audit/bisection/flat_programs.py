"""A traced function as one list of steps: calls are opened, so that layers follow one another as they are computed."""

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
"""What stands in a path behind a scan, in place of the iteration: scans run through their steps in either direction."""

type Key = tuple[int, int]
"""A step's number and the number of one of its results."""
type Visit = Callable[["Step", list[Any]], tuple[list[Any], dict[Key, Any]]]
"""Gets a step's results; gives those that later steps read, and arrays to return."""
type Reduction = Callable[[dict[Key, Any]], dict[Key, Any]]
"""Gets all that `Visit` gave for steps of one program; gives what is returned in its place."""


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """An equation.

    Attributes:
        number: which no other step of the program has.
        eqn: the equation.
        inputs: the numbers of the values that it reads, or literals.
        outputs: the numbers of its results.
        places: where the rows of the batch are in its results.
        layer: the names of the scopes that it stands in.
        line: the user's line.
        path: the index of the step, behind those of the scans that it stands in, each with its direction.
        body: what a scan repeats.
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
        """The primitive's name, or that of the operation of detjax."""
        return equations.operation(self.eqn) or self.eqn.primitive.name


@dataclasses.dataclass(frozen=True, eq=False)
class FlatProgram:
    """Steps in their order.

    Attributes:
        inputs: the numbers of the arguments.
        constants: further values by their numbers.
        steps: the steps.
        results: the numbers of the results, or literals.
    """

    inputs: tuple[int, ...]
    constants: dict[int, Any]
    steps: tuple[Step, ...]
    results: tuple[Any, ...]

    def all_steps(self) -> Iterator[tuple["FlatProgram", Step]]:
        """Yields all steps, those within scans too, each with the program that it stands in."""
        for step in self.steps:
            yield self, step
            if step.body is not None:
                yield from step.body.all_steps()

    def begin(self, values: Sequence[Any]) -> dict[int, Any]:
        """Returns all values that are there before the first step."""
        return dict(zip(self.inputs, values, strict=True)) | self.constants

    def end(self, env: dict[int, Any]) -> list[Any]:
        """Returns the results."""
        return [_read(atom, env) for atom in self.results]

    def run(self, values: Sequence[Any], visit: Visit, reduction: Reduction = dict) -> tuple[list[Any], dict[Key, Any]]:
        """Returns the results, and what `visit` gave; for steps of scans with an axis of iterations in front.

        Args:
            values: the arguments.
            visit: what sees each step's results.
            reduction: what makes less of all that `visit` gave; in each iteration of a scan for its own steps.
        """
        env, seen, reduced = self.begin(values), {}, {}
        for step in self.steps:
            visited, inner = run_step(step, env, visit, reduction)
            seen |= visited
            reduced |= inner
        return self.end(env), reduced | reduction(seen)


def run_step(
    step: Step, env: dict[int, Any], visit: Visit, reduction: Reduction = dict
) -> tuple[dict[Key, Any], dict[Key, Any]]:
    """Computes a step's results into `env`; returns what `visit` gave for it, and what is left of a scan's steps."""
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
    """Returns a jaxpr as steps.

    Args:
        jaxpr: the function.
        batch: how many rows the batch has; None if there is none.
        places: for each argument where its rows are.
    """
    return _Flattening(batch).program(jaxpr, places, "", "", ())


class _Flattening:
    """The steps of one function, and of the bodies of its scans."""

    def __init__(self, batch: int | None) -> None:
        # A batch of one needs no places, because each of its arrays is a row as it is.
        self._tracer = BatchAxisTracer(batch) if batch is not None and batch > 1 else None
        self._values = itertools.count()
        self._steps = itertools.count()

    def program(
        self, jaxpr: core.Jaxpr, places: Sequence[Place], layer: str, line: str, path: tuple[int, ...]
    ) -> FlatProgram:
        """Returns a function's steps; it stands in this layer, was called at this line, and is found at this path."""
        inputs = tuple(next(self._values) for _ in jaxpr.invars)
        constants: dict[int, Any] = {}
        steps: list[Step] = []
        given = list(zip(inputs, places, strict=True))
        results = self._inline(jaxpr, given, layer, line, path, steps, constants)
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
        """Appends a function's steps. Its arguments and results are numbers of values, each with its place."""

        def constant(value: Any) -> tuple[Any, Place]:
            number = next(self._values)
            constants[number] = value
            return number, Shared()

        def rule(eqn: core.JaxprEqn, given: list[tuple[Any, Place]]) -> Iterable[tuple[Any, Place]]:
            inner = "/".join(filter(None, (layer, equations.layer(eqn))))
            here = equations.source_line(eqn) or line
            if equations.is_call(eqn):
                return self._inline(equations.body(eqn), given, inner, here, path, steps, constants)
            at = (*path, len(steps))
            results, body_places = self._places(eqn, [place for _, place in given])
            body = None
            if eqn.primitive.name == "scan":
                direction = BACKWARD if eqn.params["reverse"] else FORWARD
                body = self.program(eqn.params["jaxpr"], body_places, inner, here, (*at, direction))
            outputs = tuple(next(self._values) for _ in eqn.outvars)
            number, inputs = next(self._steps), tuple(atom for atom, _ in given)
            steps.append(Step(number, eqn, inputs, outputs, tuple(results), inner, here, at, body))
            return zip(outputs, results, strict=True)

        known = [*map(constant, jaxpr.consts), *arguments]
        return walk(jaxpr, known, rule, lambda atom: (atom, Shared()))

    def _places(self, eqn: core.JaxprEqn, given: list[Place]) -> tuple[list[Place], list[Place]]:
        """The places of an equation's results, and of the arguments of its body if it is a scan.

        What rows meet is taken to be alike for all of them: a defect gives rows numbers that depend on their place in
        the batch, and they are still rows.
        """
        if self._tracer is None:
            return [Shared()] * len(eqn.outvars), [Shared()] * len(eqn.invars)
        if equations.kind(eqn) is Kind.OPERATION:
            return operation_places(eqn, given, self._tracer.batch), []
        alike: list[Place] = [
            place if isinstance(place, Rows) else Shared(frozenset(range(getattr(equations.aval(v), "ndim", 0))))
            for place, v in zip(given, eqn.invars, strict=True)
        ]
        is_scan = eqn.primitive.name == "scan"
        results, body_places = self._tracer.scan(eqn, alike) if is_scan else (self._tracer.equation(eqn, alike), [])
        if UNKNOWN in given:  # what comes of mixed rows alone is mixed, too
            results = [x if isinstance(x, Rows) else UNKNOWN for x in results]
            body_places = [x if isinstance(x, Rows) else UNKNOWN for x in body_places]
        return [*results], [*body_places]


MOVES: Final = frozenset("broadcast_in_dim reshape squeeze expand_dims transpose copy copy_p".split())
"""Primitives that leave every element as it is."""


def leaving(program: FlatProgram) -> set[int]:
    """Returns the numbers of values that are read outside of the layer that made them, or are results."""
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
    """Returns whether a step's results are worth a digest: they are not only moved, and not those of a scan's body."""
    return step.body is None and step.primitive not in MOVES | {"iota", "optimization_barrier"}


def rows_of(place: Place, batch: int | None) -> int:
    """Returns how many rows an array at this place is cut into: all of the batch, or 1."""
    return batch if batch is not None and isinstance(place, Rows) else 1
