"""One way through a jaxpr: something is known of each variable, and a rule says what of an equation's results."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax.extend import core


def walk[T](
    jaxpr: core.Jaxpr,
    known: Sequence[T],
    rule: Callable[[core.JaxprEqn, list[T]], Iterable[T]],
    literal: Callable[[core.Literal], T],
) -> list[T]:
    """Returns what is known of a jaxpr's results.

    Args:
        jaxpr: a function.
        known: what is known of its constants and arguments, in the order of `all_invars`.
        rule: what is known of an equation's results, given what is known of its operands. It opens what an equation
            holds, if it wants to.
        literal: what is known of a literal.
    """
    env: dict[Any, T] = dict(zip(jaxpr.all_invars, known, strict=True))

    def read(atom: Any) -> T:
        return literal(atom) if isinstance(atom, core.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, rule(eqn, list(map(read, eqn.invars))), strict=True))
    return list(map(read, jaxpr.outvars))
