"""Rotary position embedding in plain JAX."""

import math
from itertools import accumulate

import jax.numpy as jnp
from jaxtyping import Array

from detjax.contract import ACCUMULATOR
from detjax.portable import norm, pages
from detjax.portable.tiles import map_rows
from detjax.rounding import rounded


def forward(
    x: Array, cos: Array, sin: Array, *weights: Array, heads: tuple[int, ...], eps: float | None
) -> tuple[Array, ...]:
    """Groups of `heads` heads of `x [*B, T, N, K]`, first to last, rotated by their tokens' `cos, sin [*B, T, K / 2]`.

    With weights `[K]`, one for each group, the heads are RMS normalized and rounded before. Further heads are not read.
    """
    groups = jnp.split(x[..., : sum(heads), :], tuple(accumulate(heads))[:-1], axis=-2)
    if weights:
        pairs = zip(groups, weights, strict=True)
        assert eps is not None
        groups = [norm.forward(group, weight, None, eps=eps, weight_offset=0.0)[0] for group, weight in pairs]

    def tile(rows: tuple[list[Array], Array, Array], _: None) -> list[Array]:
        groups, cos, sin = rows
        return [rotated(group, cos[:, None], sin[:, None]) for group in groups]

    def rotated(x: Array, cos: Array, sin: Array) -> Array:
        first, second = jnp.split(x.astype(ACCUMULATOR), 2, axis=-1)
        return rounded(jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1), x.dtype)

    tokens = math.prod(x.shape[:-2])
    rows = [group.reshape(tokens, *group.shape[-2:]) for group in groups], *(y.reshape(tokens, -1) for y in (cos, sin))
    out = map_rows(tile, rows, None)
    return tuple(y.reshape(group.shape) for y, group in zip(out, groups, strict=True))


def append_kv(
    x: Array,
    cos: Array,
    sin: Array,
    *weights: Array,
    k_pages: Array,
    v_pages: Array,
    page_table: Array,
    q_start: Array,
    q_length: Array,
    eps: float | None,
) -> tuple[Array, Array, Array]:
    """`forward` of the queries in `x [B, T, H + 2 h, K]`, and pools `[P, h, S, K]` with its keys, turned, and values.

    Where they are written, and which of them, is `pages.append`'s to say.
    """
    kv_heads = k_pages.shape[1]
    heads = x.shape[2] - 2 * kv_heads, kv_heads
    q, k = forward(x, cos, sin, *weights, heads=heads, eps=eps)
    new = k, x[:, :, sum(heads) :]
    k_pages, v_pages = pages.append((k_pages, v_pages), new, page_table, q_start, q_length)
    return q, k_pages, v_pages
