"""Rounding that compilers cannot remove, and factors of the attention contract that are rounded once."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np

from detjax.contract import LOG2_E

_by_conversion: Final = contextvars.ContextVar("by_conversion", default=False)


@contextlib.contextmanager
def rounding_by_conversion() -> Iterator[None]:
    """Makes `rounded` convert: in the body of a kernel, whose compiler keeps conversions and has nothing else."""
    token = _by_conversion.set(True)
    try:
        yield
    finally:
        _by_conversion.reset(token)


def rounded(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Returns `x` rounded to `dtype` in a way that compilers cannot remove.

    XLA may remove a pair of casts (float32 to bfloat16 and back) if excess precision is allowed. Bits would then depend
    on fusion.
    """
    dtype = jnp.dtype(dtype)
    if x.dtype == dtype:
        return x
    if _by_conversion.get():
        return x.astype(dtype)
    if dtype == jnp.bfloat16:
        return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7).astype(dtype)
    # reduce_precision would flush float16's subnormal numbers, which the hardware's conversion keeps.
    return jax.lax.optimization_barrier(x.astype(dtype))


def log2_scale(scale: float) -> np.float32:
    """Returns the attention contract's `c = log2(e) * scale`, rounded once."""
    return np.float32(np.log2(np.e) * scale)


def soft_cap_exponent(soft_cap: float) -> np.float32:
    """Returns the attention contract's factor `2 * LOG2_E / cap`, rounded once."""
    return np.float32(2 * LOG2_E / soft_cap)
