"""Rotary position embedding in plain JAX."""

import math
from itertools import accumulate

import jax.numpy as jnp
from jaxtyping import Array

from detjax.contract import ACCUMULATOR
from detjax.operands.kv_pages import KVPages, Queries, append
from detjax.operands.rounding import rounded
from detjax.portable import norm
from detjax.portable.tiles import map_rows


def forward(
    x: Array,
    angles: tuple[Array, Array],
    *weights: Array,
    heads: tuple[int, ...],
    eps: float | None,
    norm_offset: float = 0.0,
) -> tuple[Array, ...]:
    """Returns groups of heads of `x [*B, T, N, K]`, rotated by their tokens' angles.

    Args:
        x: a projection.
        angles: cosines and sines, float32 `[*B, T, K / 2]`.
        weights: for each group, the weight `[K]` of the RMS norm before the rotation, whose results are rounded.
            Empty: no norms.
        heads: the number of heads in each group, first to last. Further heads are ignored.
        eps: added to the norm's mean square.
        norm_offset: added to the norm's weight.
    """
    groups = jnp.split(x[..., : sum(heads), :], tuple(accumulate(heads))[:-1], axis=-2)
    if weights:
        pairs = zip(groups, weights, strict=True)
        assert eps is not None
        groups = [norm.forward(group, weight, None, eps=eps, weight_offset=norm_offset)[0] for group, weight in pairs]

    def tile(rows: tuple[list[Array], Array, Array], _: None) -> list[Array]:
        groups, cos, sin = rows
        return [rotated(group, cos[:, None], sin[:, None]) for group in groups]

    def rotated(x: Array, cos: Array, sin: Array) -> Array:
        first, second = jnp.split(x.astype(ACCUMULATOR), 2, axis=-1)
        return rounded(jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1), x.dtype)

    tokens = math.prod(x.shape[:-2])
    rows = [group.reshape(tokens, *group.shape[-2:]) for group in groups], *(y.reshape(tokens, -1) for y in angles)
    out = map_rows(tile, rows, None)
    return tuple(y.reshape(group.shape) for y, group in zip(out, groups, strict=True))


def append_kv(
    x: Array,
    angles: tuple[Array, Array],
    *weights: Array,
    kv: KVPages,
    queries: Queries,
    eps: float | None,
    norm_offset: float = 0.0,
) -> tuple[Array, KVPages]:
    """Returns `forward` of the queries in `x [B, T, H + 2 h, K]`, and the pages with its rotated keys and its values.

    See `kv_pages.append` for which tokens are written, and to which pages.
    """
    heads = x.shape[2] - 2 * kv.kv_heads, kv.kv_heads
    q, k = forward(x, angles, *weights, heads=heads, eps=eps, norm_offset=norm_offset)
    return q, append(kv, k, x[:, :, sum(heads) :], queries)
