"""Rounding that compilers cannot remove, and factors of the attention contract that are rounded once."""

import jax
import jax.numpy as jnp
import numpy as np

from detjax.contract import LOG2_E


def rounded(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Returns `x` rounded to `dtype` in a way that compilers cannot remove.

    XLA may remove a pair of casts (float32 to bfloat16 and back) if excess precision is allowed. Bits would then depend
    on fusion.
    """
    dtype = jnp.dtype(dtype)
    if x.dtype == dtype:
        return x
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
