"""Finds the values of a program that depend on the example, and the equations where examples meet weights."""

from collections.abc import Callable, Sequence

from jax.extend import core

from detjax.invariant import equations
from detjax.invariant.walker import walk


class Dependence:
    """The values of one traced function that depend on the example, with a cache by jaxpr."""

    def __init__(self, is_shared: Callable[[core.JaxprEqn, Sequence[bool]], bool]) -> None:
        """Args:
        is_shared: whether an equation is computed for all examples at once, given which operands depend on the example.
        """
        self._is_shared = is_shared
        self._known: dict[tuple[int, tuple[bool, ...]], tuple[core.Jaxpr, list[bool], bool]] = {}

    def results(self, eqn: core.JaxprEqn, mapped: Sequence[bool]) -> list[bool]:
        """Returns which results of an equation depend on the example, given which operands do."""
        if not any(mapped):
            return [False] * len(eqn.outvars)
        name = eqn.primitive.name
        if name == "scan":
            carries = self.scan_carries(eqn, mapped)
            return [*carries, *self._jaxpr(eqn.params["jaxpr"], self._body(eqn, mapped))[0][len(carries) :]]
        if name == "while":
            return self.while_carries(eqn, mapped)
        if name == "cond":
            branches = [self._jaxpr(branch, mapped[1:])[0] for branch in eqn.params["branches"]]
            return [mapped[0] or any(flags) for flags in zip(*branches, strict=True)]
        if equations.is_call(eqn) and name not in equations.OWN_RULES:
            return self._jaxpr(equations.body(eqn), mapped)[0]
        return [True] * len(eqn.outvars)

    def holds_shared(self, eqn: core.JaxprEqn, mapped: Sequence[bool]) -> bool:
        """Returns whether an equation, or one in its body, is computed for all examples at once."""
        name = eqn.primitive.name
        if name == "scan":
            return self._jaxpr(eqn.params["jaxpr"], self._body(eqn, mapped))[1]
        if name == "while":
            _, consts, _ = equations.while_arguments(eqn, mapped)
            return self._jaxpr(eqn.params["body_jaxpr"], [*consts, *self.while_carries(eqn, mapped)])[1]
        if name == "cond":
            return any(self._jaxpr(branch, mapped[1:])[1] for branch in eqn.params["branches"])
        if equations.is_call(eqn):
            return self._jaxpr(equations.body(eqn), mapped)[1]
        return self._is_shared(eqn, mapped)

    def scan_carries(self, eqn: core.JaxprEqn, mapped: Sequence[bool]) -> list[bool]:
        """Returns which carries of a scan depend on the example, initially or after any iteration."""
        consts, carries, xs = equations.scan_arguments(eqn, mapped)
        return self._fixed(
            carries, lambda carries: self._jaxpr(eqn.params["jaxpr"], [*consts, *carries, *xs])[0][: len(carries)]
        )

    def while_carries(self, eqn: core.JaxprEqn, mapped: Sequence[bool]) -> list[bool]:
        """Returns which carries of a while loop depend on the example: all of them if the trip count does."""
        _, consts, carries = equations.while_arguments(eqn, mapped)
        carries = self._fixed(carries, lambda carries: self._jaxpr(eqn.params["body_jaxpr"], [*consts, *carries])[0])
        return [True] * len(carries) if self.trips(eqn, mapped, carries) else carries

    def trips(self, eqn: core.JaxprEqn, mapped: Sequence[bool], carries: Sequence[bool]) -> bool:
        """Returns whether the trip count of a while loop depends on the example."""
        tested, _, _ = equations.while_arguments(eqn, mapped)
        return self._jaxpr(eqn.params["cond_jaxpr"], [*tested, *carries])[0][0]

    def _body(self, eqn: core.JaxprEqn, mapped: Sequence[bool]) -> list[bool]:
        consts, _, xs = equations.scan_arguments(eqn, mapped)
        return [*consts, *self.scan_carries(eqn, mapped), *xs]

    @staticmethod
    def _fixed(carries: list[bool], step: Callable[[list[bool]], list[bool]]) -> list[bool]:
        while (joined := [x or y for x, y in zip(carries, step(carries), strict=True)]) != carries:
            carries = joined
        return carries

    def _jaxpr(self, jaxpr: core.Jaxpr, mapped: Sequence[bool]) -> tuple[list[bool], bool]:
        """Returns which results of a jaxpr depend on the example, and whether it holds an equation that all share."""
        key = id(jaxpr), tuple(mapped)
        if key not in self._known:  # the jaxpr is kept too, so that its id is not reused
            self._known[key] = jaxpr, *self._walk(jaxpr, mapped)
        return self._known[key][1:]

    def _walk(self, jaxpr: core.Jaxpr, mapped: Sequence[bool]) -> tuple[list[bool], bool]:
        holds = False

        def rule(eqn: core.JaxprEqn, flags: list[bool]) -> list[bool]:
            nonlocal holds
            holds = holds or (any(flags) and self.holds_shared(eqn, flags))
            return self.results(eqn, flags)

        return walk(jaxpr, [*[False] * len(jaxpr.consts), *mapped], rule, lambda _: False), holds
