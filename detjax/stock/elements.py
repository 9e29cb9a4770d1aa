"""Elementwise arithmetic by XLA."""

from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Array

DIFFERENTIATED_BY_JAX: Final = True


def add(x: Array, y: Array, mask: Array | None = None) -> Array:
    """See `detjax.ops.add`."""
    return x + y if mask is None else jnp.where(mask[..., None], x + y, x)


def multiply(x: Array, y: Array) -> Array:
    """See `detjax.ops.multiply`."""
    return x * jnp.broadcast_to(y.astype(x.dtype), x.shape)


def scale(x: Array, *, factor: float) -> Array:
    """See `detjax.ops.scale`."""
    return (x.astype(jnp.float32) * factor).astype(x.dtype)


def sigmoid(x: Array) -> Array:
    """See `detjax.ops.sigmoid`."""
    return jax.nn.sigmoid(x)
