"""Rotary position embedding in plain JAX."""

import math

import jax.numpy as jnp
from jaxtyping import Array

from detjax.contract import ACCUMULATOR, rounded
from detjax.portable.tiles import map_rows


def forward(x: Array, positions: Array, inverse_frequencies: Array, *, scale: float) -> Array:
    """`[*B, T, H, K]` rotated by the angles `positions [*B, T] * inverse_frequencies [K / 2]`, times `scale`."""

    def tile(rows: tuple[Array, Array], inverse_frequencies: Array) -> Array:
        x, positions = rows
        angles = positions.astype(ACCUMULATOR)[:, None] * inverse_frequencies[None]
        cos, sin = jnp.cos(angles)[:, None] * scale, jnp.sin(angles)[:, None] * scale
        first, second = jnp.split(x.astype(ACCUMULATOR), 2, axis=-1)
        rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
        return rounded(rotated, x.dtype)

    tokens = math.prod(x.shape[:-2])
    rows = x.reshape(tokens, *x.shape[-2:]), positions.reshape(tokens)
    return map_rows(tile, rows, inverse_frequencies).reshape(x.shape)
