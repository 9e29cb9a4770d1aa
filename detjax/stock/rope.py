"""Rotary position embedding by XLA: alone, after RMS norms, and with the cache write."""

from typing import Any, Final

import jax.numpy as jnp
from jaxtyping import Array

from detjax.contract import ACCUMULATOR
from detjax.operands.kv_pages import KVPages, Queries, append
from detjax.stock.norm import rms_norm

DIFFERENTIATED_BY_JAX: Final = True


def rope(x: Array, positions: Array, *, embedding: Any) -> Array:
    """See `detjax.ops.rope`."""
    angles = embedding.pair_positions(positions).astype(ACCUMULATOR)[..., None, :]
    arrays = jnp.asarray(embedding.inverse_frequencies), jnp.asarray(embedding.pair_scales)
    frequencies, scales = (array.reshape((1,) * (angles.ndim - 1) + (-1,)) for array in arrays)
    angles = angles * frequencies
    cos, sin = jnp.cos(angles) * scales, jnp.sin(angles) * scales
    first, second = jnp.split(x.astype(ACCUMULATOR), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def qk_rope(qkv: Array, positions: Array, weights: tuple[Array, ...], *, rotation: Any) -> tuple[Array, Array]:
    """See `detjax.ops.qk_rope`; `rotation` is an `ops.rope.Rotation`."""
    heads, embedding = rotation.heads, rotation.embedding
    q, k = qkv[..., : heads[0], :], qkv[..., heads[0] : sum(heads), :]
    if weights:
        norm = {"eps": rotation.norm_eps, "weight_offset": rotation.norm_offset}
        q, k = (rms_norm(x, weight, None, **norm)[0] for x, weight in zip((q, k), weights, strict=True))
    return rope(q, positions, embedding=embedding), rope(k, positions, embedding=embedding)


def qk_rope_append_kv(
    qkv: Array, kv: KVPages, queries: Queries, weights: tuple[Array, ...], *, rotation: Any
) -> tuple[Array, KVPages]:
    """See `detjax.ops.qk_rope_append_kv`."""
    positions = rotation.embedding.positions_of(queries, qkv.shape[1])
    q, k = qk_rope(qkv, positions, weights, rotation=rotation)
    return q, append(kv, k, qkv[:, :, sum(rotation.heads) :], queries)
