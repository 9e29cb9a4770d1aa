"""Loops and branches of a program for one example, run with an axis of examples in front of what depends on them."""

import abc
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.extend import core

from detjax.invariant import equations
from detjax.invariant.dependence import Dependence
from detjax.invariant.equations import Program
from detjax.runtime import varying


class ControlFlow(abc.ABC):
    """Runs programs for `count` examples. A subclass defines how it runs one without loops and branches."""

    def __init__(self, count: int, dependence: Dependence) -> None:
        self.count = count
        self.dependence = dependence

    @abc.abstractmethod
    def run(self, program: Program, values: Sequence[Any], mapped: Sequence[bool], wanted: Sequence[bool]) -> list[Any]:
        """Returns the results of a program for one example.

        Values that depend on the example (`mapped`) have an axis of examples in front, and so do the results that are
        `wanted` with it, among them all that depend on the example.
        """

    def spread(self, x: Any) -> Array:
        """Returns a value with the axis of examples broadcast in front."""
        return jnp.broadcast_to(jnp.asarray(x)[None], (self.count, *jnp.shape(x)))

    def loop_or_branch(self, eqn: core.JaxprEqn, values: list[Any], mapped: list[bool]) -> list[Any] | None:
        """Returns the results of a scan, while loop or conditional; None if control flow depends on the example."""
        name = eqn.primitive.name
        result_flags = self.dependence.results(eqn, mapped)
        if name == "scan":
            return self._scan(eqn, values, mapped, result_flags)
        if name == "while" and not self.dependence.trips(eqn, mapped, result_flags):
            return self._while(eqn, values, mapped, result_flags)
        if name == "cond" and not mapped[0]:
            programs = map(Program.from_jaxpr, eqn.params["branches"])
            branches = [functools.partial(self._branch, program, mapped[1:], result_flags) for program in programs]
            return varying.switch(values[0].astype(jnp.int32), branches, *values[1:])
        return None

    def _branch(self, program: Program, mapped: list[bool], result_flags: list[bool], *operands: Any) -> list[Any]:
        return self.run(program, operands, mapped, result_flags)

    def _scan(self, eqn: core.JaxprEqn, values: list[Any], mapped: list[bool], result_flags: list[bool]) -> list[Any]:
        program, params = Program.from_jaxpr(eqn.params["jaxpr"]), eqn.params
        consts, carry, xs = equations.scan_arguments(eqn, values)
        consts_mapped, carry_given, xs_mapped = equations.scan_arguments(eqn, mapped)
        carry_mapped = self.dependence.scan_carries(eqn, mapped)
        carry = self._carried(carry, carry_given, carry_mapped)
        xs = [jnp.moveaxis(x, 1, 0) if m else x for x, m in zip(xs, xs_mapped, strict=True)]
        inner = [*consts_mapped, *carry_mapped, *xs_mapped]

        def step(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            results = self.run(program, [*consts, *carry, *xs], inner, result_flags)
            return results[: len(carry)], results[len(carry) :]

        carry, ys = varying.scan(step, carry, xs, params["length"], params["reverse"], params["unroll"])
        ys = [jnp.moveaxis(y, 0, 1) if m else y for y, m in zip(ys, result_flags[len(carry) :], strict=True)]
        return [*carry, *ys]

    def _while(self, eqn: core.JaxprEqn, values: list[Any], mapped: list[bool], result_flags: list[bool]) -> list[Any]:
        tests, body = (Program.from_jaxpr(eqn.params[name]) for name in ("cond_jaxpr", "body_jaxpr"))
        tested, consts, carry = equations.while_arguments(eqn, values)
        tested_mapped, consts_mapped, carry_given = equations.while_arguments(eqn, mapped)

        def condition(carry: list[Any]) -> Array:
            return self.run(tests, [*tested, *carry], [*tested_mapped, *result_flags], [False])[0]

        def step(carry: list[Any]) -> list[Any]:
            return self.run(body, [*consts, *carry], [*consts_mapped, *result_flags], result_flags)

        return varying.while_loop(condition, step, self._carried(carry, carry_given, result_flags))

    def _carried(self, carry: list[Any], before: list[bool], mapped: list[bool]) -> list[Any]:
        return [self.spread(x) if m and not g else x for x, g, m in zip(carry, before, mapped, strict=True)]
