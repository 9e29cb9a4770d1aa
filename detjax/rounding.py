"""Rounding that no compiler may drop, and factors of the attention contract that are rounded once."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from detjax import backends
from detjax.contract import LOG2_E


def rounded(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Returns `x` rounded to `dtype` in a way that no compiler may drop.

    XLA may remove a bare pair of casts (float32 to bfloat16 and back) where excess precision is allowed. Bits would
    then depend on which operations were fused.
    """
    dtype = jnp.dtype(dtype)
    if x.dtype == dtype:
        return x
    if dtype == jnp.bfloat16:
        return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7).astype(dtype)
    # reduce_precision would flush float16's subnormal numbers, which the hardware's own conversion keeps.
    return jax.lax.optimization_barrier(x.astype(dtype))


def sealed[T: PyTree[jax.Array]](x: T) -> T:
    """Returns float32 arrays that no compiler may look behind: what is done to them later starts from rounded numbers.

    A compiler that fuses a product with a sum does not round in between. A barrier keeps the two apart. On GPUs it also
    puts them into kernels of their own, whose results pass through memory. So there the bits are combined with a
    number that changes none, which XLA cannot know: it is behind a barrier by itself.
    """
    if backends.target() != "gpu":
        return jax.lax.optimization_barrier(x)
    zero = jax.lax.optimization_barrier(jnp.zeros((), jnp.uint32))

    def seal(x: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(x, jnp.uint32) ^ zero, jnp.float32)

    return jax.tree.map(seal, x)


def log2_scale(scale: float) -> np.float32:
    """Returns the attention contract's `c = log2(e) * scale`, rounded once."""
    return np.float32(np.log2(np.e) * scale)


def soft_cap_exponent(soft_cap: float) -> np.float32:
    """Returns the attention contract's factor `2 * LOG2_E / cap`, rounded once."""
    return np.float32(2 * LOG2_E / soft_cap)
