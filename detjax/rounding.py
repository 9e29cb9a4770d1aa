"""Rounding that no compiler may drop, and constants of the contract that are rounded once."""

import jax
import jax.numpy as jnp
import numpy as np

from detjax.contract import LOG2_E


def rounded(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """`x` in `dtype`, by a rounding that no compiler may drop.

    A bare pair of casts (float32 to bfloat16 and back) may be removed by XLA where excess precision is allowed, so that
    bits would depend on what was fused with what.
    """
    dtype = jnp.dtype(dtype)
    if x.dtype == dtype:
        return x
    if dtype == jnp.bfloat16:
        return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7).astype(dtype)
    # reduce_precision would flush float16's subnormal numbers, which the hardware's own conversion keeps.
    return jax.lax.optimization_barrier(x.astype(dtype))


def log2_scale(scale: float) -> np.float32:
    """`c = log2(e) * scale` of the attention contract, rounded once."""
    return np.float32(np.log2(np.e) * scale)


def soft_cap_exponent(soft_cap: float) -> np.float32:
    """`2 * LOG2_E / cap` of the attention contract, rounded once."""
    return np.float32(2 * LOG2_E / soft_cap)
