"""Normal inputs drawn on the device: they differ between devices, but are cheap."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped


@functools.partial(jax.jit, static_argnums=(0, 2))
def normal(shape: tuple[int, ...], seed: Any, dtype: str = "bfloat16") -> Shaped[Array, "..."]:
    """Returns normal numbers of variance 1. One program serves all seeds, arrays or integers, of a shape."""
    return jax.random.normal(jax.random.key(seed), shape, jnp.dtype(dtype))


@functools.partial(jax.jit, static_argnums=0)
def normal_weight(shape: tuple[int, ...], seed: Any) -> Shaped[Array, "..."]:
    """Returns normal bfloat16 numbers of variance 1/K, where K is the last axis."""
    bfloat16 = jnp.dtype("bfloat16")
    return jax.random.normal(jax.random.key(seed), shape, bfloat16) * jnp.asarray(shape[-1] ** -0.5, bfloat16)
