"""RMS norm by XLA."""

from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Array

from detjax.contract import ACCUMULATOR

DIFFERENTIATED_BY_JAX: Final = True


def rms_norm(
    x: Array, weight: Array, residual: Array | None, *, eps: float, weight_offset: float
) -> tuple[Array, Array | None]:
    """See `detjax.ops.rms_norm`; only a residual gives a second result."""
    h = x if residual is None else x + residual
    wide = h.astype(ACCUMULATOR)
    y = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    y = (y * jnp.broadcast_to(weight.astype(ACCUMULATOR) + weight_offset, y.shape)).astype(x.dtype)
    return y, None if residual is None else h
