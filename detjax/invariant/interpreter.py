"""Runs a program for one example for all of them: products with weights for all at once, the rest per example."""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core

from detjax.invariant import equations, products, segments
from detjax.invariant.control_flow import ControlFlow
from detjax.invariant.dependence import Dependence
from detjax.invariant.equations import Kind, Program, Values
from detjax.runtime import varying


def run(program: Program, values: Sequence[Any], mapped: Sequence[bool], count: int) -> tuple[list[Any], list[bool]]:
    """Returns the results of a program for one example, and which results depend on the example.

    Values that depend on the example (`mapped`) have an axis of `count` examples in front, and so do such results.
    """
    varies = varying.join([x for x, m in zip(values, mapped, strict=True) if m])
    return _Interpreter(count, Dependence(products.is_shared), varies).results(program, values, mapped)


class _Interpreter(ControlFlow):
    """The run of a function and of the functions in its equations."""

    def __init__(self, count: int, dependence: Dependence, varies: frozenset[str]) -> None:
        super().__init__(count, dependence)
        self._varies = varies

    def run(self, program: Program, values: Sequence[Any], mapped: Sequence[bool], wanted: Sequence[bool]) -> list[Any]:
        """Returns the results of a program; see `ControlFlow.run`."""
        results, flags = self.results(program, values, mapped)
        return [self.spread(x) if w and not m else x for x, m, w in zip(results, flags, wanted, strict=True)]

    def results(self, program: Program, values: Sequence[Any], mapped: Sequence[bool]) -> tuple[list[Any], list[bool]]:
        """Returns the results of a program, and which results depend on the example."""
        env, depends = Values(zip(program.inputs, values, strict=True)), Flags(zip(program.inputs, mapped, strict=True))
        env.update(program.constants)
        depends.update((var, False) for var, _ in program.constants)
        last = _last_uses(program)
        transposed: dict[core.Var, core.JaxprEqn] = {}
        shared = _Shared(env)
        # Equations wait until a product needs them, so that segments are large.
        waiting: list[core.JaxprEqn] = []
        pending: set[core.Var] = set()

        def flush(now: int) -> None:
            """Computes the waiting equations, before the equation at index `now`."""
            if waiting:
                _run_segment(waiting, env, depends, shared, lambda var: last.get(var, -1) >= now, self._varies)
                waiting.clear()
                pending.clear()

        for index, eqn in enumerate(program.eqns):
            flags = depends.read(eqn.invars)
            if not any(flags):
                env.update(zip(eqn.outvars, shared.results(eqn), strict=True))
                depends.update((var, False) for var in eqn.outvars)
                if eqn.primitive.name == "transpose":
                    transposed[eqn.outvars[0]] = eqn
            elif self._goes_through(eqn, flags):
                if not pending.isdisjoint(v for v in eqn.invars if not isinstance(v, core.Literal)):
                    flush(index)
                eqn = products.with_weight_as_stored(eqn, transposed)
                with equations.at_line(eqn):
                    results, result_flags = self._equation(eqn, env.read(eqn.invars), flags)
                env.update(zip(eqn.outvars, results, strict=True))
                depends.update(zip(eqn.outvars, result_flags, strict=True))
            else:
                waiting.append(eqn)
                pending.update(eqn.outvars)
                depends.update((var, True) for var in eqn.outvars)
        flush(len(program.eqns))
        return env.read(program.results), depends.read(program.results)

    def _goes_through(self, eqn: core.JaxprEqn, mapped: Sequence[bool]) -> bool:
        """Returns whether an equation, or one in its body, is computed for all examples at once.

        An equation with a result that does not depend on the example is opened too. Functions with their own
        derivative, and loops and branches whose control flow depends on the example, are not opened: they run for the
        examples in sequence.
        """
        name = eqn.primitive.name
        if name in equations.OWN_RULES:
            return False
        if name == "while" and self.dependence.trips(eqn, mapped, self.dependence.while_carries(eqn, mapped)):
            return False
        if name == "cond" and mapped[0]:
            return False
        return self.dependence.holds_shared(eqn, mapped) or not all(self.dependence.results(eqn, mapped))

    def _equation(self, eqn: core.JaxprEqn, values: list[Any], mapped: list[bool]) -> tuple[list[Any], list[bool]]:
        name = eqn.primitive.name
        if name in ("remat2", "checkpoint"):
            return self._checkpoint(eqn, values, mapped)
        if equations.is_call(eqn):
            return self.results(Program.from_jaxpr(equations.body(eqn)), values, mapped)
        if equations.kind(eqn) is Kind.CALL:
            results = self.loop_or_branch(eqn, values, mapped)
            assert results is not None
            return results, self.dependence.results(eqn, mapped)
        return [products.shared_product(eqn, values, mapped)], [True]

    def _checkpoint(self, eqn: core.JaxprEqn, values: list[Any], mapped: list[bool]) -> tuple[list[Any], list[bool]]:
        program = Program.from_jaxpr(equations.body(eqn))
        results = self.dependence.results(eqn, mapped)
        body = jax.checkpoint(
            lambda *operands: self.run(program, operands, mapped, results),
            policy=eqn.params["policy"],
            prevent_cse=eqn.params["prevent_cse"],
        )
        return body(*values), results


class _Shared(Values):
    """Shared values as segments read them: through barriers, so that the compiler fuses none of their computation.

    Numbers that were only moved or widened need no barrier: they have the same bits however they are compiled, and
    a kernel for each would take longer than moving them where they are read.
    """

    def __init__(self, env: Values) -> None:
        super().__init__()
        self._env, self._given = env, frozenset(env)

    def __missing__(self, var: core.Var) -> Any:
        x = self._env[var]
        self[var] = x = lax.optimization_barrier(x) if var in self._given else x
        return x

    def results(self, eqn: core.JaxprEqn) -> list[Any]:
        """Returns the results of an equation that depends on no example."""
        if equations.is_exact(eqn):
            return equations.bind(eqn, self.read(eqn.invars))
        return lax.optimization_barrier(equations.bind(eqn, self._env.read(eqn.invars)))


class Flags(dict[core.Var, bool]):
    """Maps variables to whether they depend on the example."""

    def read(self, atoms: Sequence[Any]) -> list[bool]:
        """Returns whether variables and literals depend on the example."""
        return [not isinstance(atom, core.Literal) and self[atom] for atom in atoms]


def _run_segment(
    eqns: Sequence[core.JaxprEqn],
    env: Values,
    depends: Flags,
    shared_values: _Shared,
    is_needed: Any,
    varies: frozenset[str],
) -> None:
    """Computes consecutive equations into `env`, which gets the results that are needed later."""
    made = [var for eqn in eqns for var in eqn.outvars]
    results = tuple(var for var in made if is_needed(var))
    inside = set(made)
    read = dict.fromkeys(v for eqn in eqns for v in eqn.invars if not isinstance(v, core.Literal) and v not in inside)
    rows, shared = [v for v in read if depends[v]], [v for v in read if not depends[v]]
    if not results:
        return
    program = Program((*rows, *shared), tuple(eqns), results)
    made = segments.run(program, env.read(rows), shared_values.read(shared), varies)
    env.update(zip(results, made, strict=True))


def _last_uses(program: Program) -> dict[core.Var, int]:
    """Returns the index of the last equation that reads each variable; the number of equations for a result."""
    last: dict[core.Var, int] = {}
    for index, eqn in enumerate(program.eqns):
        last.update((v, index) for v in eqn.invars if not isinstance(v, core.Literal))
    last.update((v, len(program.eqns)) for v in program.results if not isinstance(v, core.Literal))
    return last
