"""Tracks the kinds of numbers that an array may hold: signs, zeros of either sign, NaN and subnormal numbers.

IEEE 754 compares -0.0 and 0.0 as equal, so a maximum of both is either, depending on the order of comparisons. An array
whose zeros all have one sign leaves no such choice. `result` maps sets of kinds through an equation. It accounts for
known behaviour of compilers: XLA drops `x + 0`, CPUs flush subnormal numbers to zero, and the library that XLA's CPU
compiler calls for larger reductions computes fused operations in its own way.
"""

import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core

from detjax.invariant import equations
from detjax.invariant.equations import aval
from detjax.runtime import backends


class Signs(enum.IntFlag):
    """A set of kinds of numbers; `NEGATIVE` and `POSITIVE` include infinities."""

    NEGATIVE = 1
    MINUS_ZERO = 2
    PLUS_ZERO = 4
    POSITIVE = 8
    NAN = 16
    SUBNORMAL = 32


NONE: Final = Signs(0)
ZEROS: Final = Signs.MINUS_ZERO | Signs.PLUS_ZERO
NOT_NEGATIVE: Final = Signs.PLUS_ZERO | Signs.POSITIVE
NOT_POSITIVE: Final = Signs.MINUS_ZERO | Signs.NEGATIVE
NUMBERS: Final = NOT_NEGATIVE | NOT_POSITIVE
ANY: Final = NUMBERS | Signs.NAN | Signs.SUBNORMAL

_ORDERED: Final = (Signs.NEGATIVE, Signs.MINUS_ZERO, Signs.PLUS_ZERO, Signs.POSITIVE)
_MAX_CONSTANT: Final = 1 << 20
"""Maximum size of a constant that is read, in elements."""


def atom_signs(atom: Any) -> Signs:
    """Returns the kinds that a variable of its dtype may hold, or the kinds of a literal."""
    if isinstance(atom, core.Literal):
        return value_signs(atom.val)
    return _dtype_signs(getattr(aval(atom), "dtype", None))


def value_signs(value: Any) -> Signs:
    """Returns the kinds of a constant's numbers; all kinds of its dtype if it is large or not an array."""
    dtype = getattr(value, "dtype", None) or np.asarray(value).dtype
    is_concrete = not isinstance(value, Tracer) and np.size(value) <= _MAX_CONSTANT
    if not is_concrete or not jnp.issubdtype(dtype, jnp.floating):
        return _dtype_signs(dtype)
    wide = np.asarray(value).astype(np.float64)
    is_minus, is_zero = np.signbit(wide), wide == 0
    is_number = ~np.isnan(wide)
    kinds = {
        Signs.NEGATIVE: is_minus & ~is_zero & is_number,
        Signs.MINUS_ZERO: is_minus & is_zero,
        Signs.PLUS_ZERO: ~is_minus & is_zero,
        Signs.POSITIVE: ~is_minus & ~is_zero & is_number,
        Signs.NAN: ~is_number,
        Signs.SUBNORMAL: ~is_zero & (np.abs(wide) < float(jnp.finfo(dtype).tiny)),
    }
    return functools.reduce(Signs.__or__, (kind for kind, among in kinds.items() if among.any()), NONE)


def _dtype_signs(dtype: Any) -> Signs:
    if dtype is None or jnp.issubdtype(dtype, jax.dtypes.extended):
        return NUMBERS
    if jnp.issubdtype(dtype, jnp.inexact):
        return ANY
    return NOT_NEGATIVE | (Signs.NEGATIVE if jnp.issubdtype(dtype, jnp.signedinteger) else NONE)


def has_zeros_of_both_signs(signs: Signs) -> bool:
    """Returns whether numbers that compare as zeros may have either sign. CPUs compare subnormal numbers as zeros."""
    tiny = bool(signs & Signs.SUBNORMAL)
    is_minus = signs & Signs.MINUS_ZERO or (tiny and signs & Signs.NEGATIVE)
    is_plus = signs & Signs.PLUS_ZERO or (tiny and signs & Signs.POSITIVE)
    return bool(is_minus and is_plus)


def mirrored(signs: Signs) -> Signs:
    """Returns the kinds of the negated numbers by IEEE 754."""
    swapped = zip(_ORDERED, reversed(_ORDERED), strict=True)
    kept = signs & (Signs.NAN | Signs.SUBNORMAL)
    return functools.reduce(Signs.__or__, (other for one, other in swapped if one & signs), kept)


def _negated(signs: Signs) -> Signs:
    """Returns the kinds after a negation, which XLA's CPU compiler computes as `0.0 - x` before some reductions."""
    return mirrored(signs) | (Signs.PLUS_ZERO if signs & ZEROS else NONE)


def _magnitude(signs: Signs) -> Signs:
    return (signs | mirrored(signs)) & ~NOT_POSITIVE


def result(eqn: core.JaxprEqn, operands: Sequence[Signs]) -> Signs:
    """Returns the kinds of an equation's first result, given the kinds of its operands.

    Equations that only move numbers are handled elsewhere: their results have the kinds of their operands.
    """
    name, out = eqn.primitive.name, eqn.outvars[0]
    if not equations.is_inexact(out) or jnp.issubdtype(aval(out).dtype, jnp.complexfloating):
        return atom_signs(out)
    if any(jnp.issubdtype(getattr(aval(v), "dtype", jnp.int32), jnp.complexfloating) for v in eqn.invars):
        return (NOT_NEGATIVE if name == "abs" else NUMBERS) | Signs.NAN | Signs.SUBNORMAL
    if name in _BINARY and len(operands) == 2:
        if name == "mul" and eqn.invars[0] is eqn.invars[1]:
            return _square(operands[0])
        return pairs(_BINARY[name], *operands)
    if name == "iota":
        return NOT_NEGATIVE
    if name == "convert_element_type" and (not equations.is_inexact(eqn.invars[0]) or equations.is_exact(eqn)):
        return operands[0]
    if name in _UNARY:
        return _UNARY[name](operands[0])
    if name == "integer_pow":
        return _power(operands[0], eqn.params["y"])
    if name == "clamp":
        low, x, high = operands
        return pairs(_larger, low, pairs(_smaller, x, high))
    if name == "dot_general" and not (operands[0] | operands[1]) & NOT_POSITIVE:
        return NOT_NEGATIVE | Signs.NAN | Signs.SUBNORMAL
    return ANY


def maximum(operands: Signs) -> Signs:
    """Returns the kinds of a maximum or minimum: any kind of the operands, or the infinity of an empty reduction."""
    return operands | Signs.NEGATIVE | Signs.POSITIVE


# Single elements ------------------------------------------------------------------------------------------------------


def pairs(rule: Callable[[Signs, Signs], Signs], first: Signs, second: Signs) -> Signs:
    """Applies a rule for two single kinds to sets of kinds. NaN of either operand gives NaN."""
    kinds = (first | second) & Signs.NAN
    for x in _ORDERED:
        for y in _ORDERED:
            if x & first and y & second:
                kinds |= rule(x, y)
    is_chosen = rule in (_larger, _smaller) and not (first | second) & Signs.SUBNORMAL
    return kinds if is_chosen or not kinds & (Signs.NEGATIVE | Signs.POSITIVE) else kinds | Signs.SUBNORMAL


def _rounded(signs: Signs) -> Signs:
    """Returns the kinds after rounding, where numbers too small for the dtype become zeros of the same sign."""
    if signs & Signs.POSITIVE:
        signs |= Signs.PLUS_ZERO
    return signs | Signs.MINUS_ZERO if signs & Signs.NEGATIVE else signs


def _is_zero(one: Signs) -> bool:
    return bool(one & ZEROS)


def _has_minus(one: Signs) -> bool:
    return bool(one & NOT_POSITIVE)


def _product(x: Signs, y: Signs) -> Signs:
    is_minus = _has_minus(x) != _has_minus(y)
    if _is_zero(x) or _is_zero(y):
        infinite = NONE if _is_zero(x) and _is_zero(y) else Signs.NAN
        return infinite | (Signs.MINUS_ZERO if is_minus else Signs.PLUS_ZERO)
    return NOT_POSITIVE if is_minus else NOT_NEGATIVE


def _quotient(x: Signs, y: Signs) -> Signs:
    is_minus = _has_minus(x) != _has_minus(y)
    if _is_zero(y):
        return Signs.NAN if _is_zero(x) else Signs.NEGATIVE if is_minus else Signs.POSITIVE
    if _is_zero(x):
        return Signs.MINUS_ZERO if is_minus else Signs.PLUS_ZERO
    return Signs.NAN | (NOT_POSITIVE if is_minus else NOT_NEGATIVE)


def _total(x: Signs, y: Signs) -> Signs:
    if _is_zero(x) and _is_zero(y):
        return x | y  # IEEE 754 gives 0.0 for both signs; XLA drops additions of 0.0
    if _has_minus(x) == _has_minus(y) or _is_zero(x) or _is_zero(y):
        return _rounded((x | y) & ~ZEROS)
    return NUMBERS | Signs.NAN


def _difference(x: Signs, y: Signs) -> Signs:
    # XLA may replace `0 - x` by a negation.
    return _total(x, mirrored(y)) | (mirrored(y) if _is_zero(x) else NONE)


def _larger(x: Signs, y: Signs) -> Signs:
    """Implements IEEE 754's `maximum`. CPUs take the second of two zeros before some reductions; others either one."""
    if _is_zero(x) and _is_zero(y) and backends.target() != "cpu":
        return x | y
    return max(x, y, key=_ORDERED.index) | (y if _is_zero(x) and _is_zero(y) else NONE)


def _smaller(x: Signs, y: Signs) -> Signs:
    return mirrored(_larger(mirrored(x), mirrored(y)))


def _square(signs: Signs) -> Signs:
    """Returns the kinds of a square, an exponential or another function without negative results."""
    return NOT_NEGATIVE | Signs.SUBNORMAL | (signs & Signs.NAN)


def _power(signs: Signs, exponent: int) -> Signs:
    if exponent % 2 == 0:
        return _square(signs)
    inverse = _rounded(signs) if exponent > 0 else pairs(_quotient, Signs.POSITIVE, signs)
    return inverse | Signs.SUBNORMAL


def _whole(signs: Signs) -> Signs:
    """Returns the kinds after rounding to a whole number, which gives a zero of either sign for small numbers."""
    zeros = ZEROS if signs & NOT_POSITIVE else Signs.PLUS_ZERO
    return (signs | zeros) & ~Signs.SUBNORMAL


def _logarithm(signs: Signs) -> Signs:
    """Returns the kinds of a logarithm, whose only zero is 0.0, at 1.0."""
    return NUMBERS & ~Signs.MINUS_ZERO | (Signs.NAN if signs & (Signs.NAN | Signs.NEGATIVE) else NONE)


def _odd(signs: Signs) -> Signs:
    """Returns the kinds of a function through zero, whose approximation may give either sign near zero."""
    is_plus = not signs & NOT_POSITIVE
    return (NOT_NEGATIVE if is_plus else NUMBERS) | Signs.SUBNORMAL | (signs & Signs.NAN)


def _sum(signs: Signs) -> Signs:
    is_plus = not signs & NOT_POSITIVE
    return (NOT_NEGATIVE | (signs & Signs.NAN) if is_plus else ANY) | Signs.SUBNORMAL


def _root(signs: Signs) -> Signs:
    return (signs & ~Signs.NEGATIVE) | (Signs.NAN if signs & Signs.NEGATIVE else NONE)


_BINARY: Final[dict[str, Callable[[Signs, Signs], Signs]]] = {
    "add": _total,
    "add_any": _total,
    "sub": _difference,
    "mul": _product,
    "div": _quotient,
    "max": _larger,
    "min": _smaller,
}
_UNARY: Final[dict[str, Callable[[Signs], Signs]]] = {
    "neg": _negated,
    "abs": _magnitude,
    "square": _square,
    "sqrt": _root,
    "log": _logarithm,
    **dict.fromkeys(("sign", "floor", "ceil", "round"), _whole),
    **dict.fromkeys(("convert_element_type", "reduce_precision"), _rounded),
    **dict.fromkeys(("exp", "exp2", "logistic", "cosh", "erfc"), _square),
    **dict.fromkeys(("tanh", "erf", "expm1", "log1p", "asinh", "sinh", "atan"), _odd),
    **dict.fromkeys(("reduce_sum", "cumsum", "reduce_window_sum"), _sum),
}
