"""Walks a jaxpr: a rule maps facts about an equation's operands to facts about its results."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax.extend import core


def walk[T](
    jaxpr: core.Jaxpr,
    known: Sequence[T],
    rule: Callable[[core.JaxprEqn, list[T]], Iterable[T]],
    literal: Callable[[core.Literal], T],
) -> list[T]:
    """Returns the facts about a jaxpr's results.

    Args:
        jaxpr: a function.
        known: the facts about its constants and arguments, in the order of `all_invars`.
        rule: maps an equation and the facts about its operands to the facts about its results. Entering the jaxprs that
            an equation holds is left to the rule.
        literal: maps a literal to its fact.
    """
    env: dict[Any, T] = dict(zip(jaxpr.all_invars, known, strict=True))

    def read(atom: Any) -> T:
        return literal(atom) if isinstance(atom, core.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, rule(eqn, list(map(read, eqn.invars))), strict=True))
    return list(map(read, jaxpr.outvars))
