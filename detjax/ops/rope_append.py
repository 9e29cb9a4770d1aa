"""Rotary position embedding that writes the KV cache: `qk_rope` and append."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from detjax.contract import KV_BLOCK
from detjax.operands.accumulated_weight import Weight, value_and_sum
from detjax.operands.kv_pages import KeyColumns, KVPages, Queries, append
from detjax.ops.checks import check_dtype, check_integers, check_not_empty, check_shape
from detjax.ops.dispatch import Operation, backend_modules, one_by_one
from detjax.ops.paged import check_kv, check_queries, with_counts
from detjax.ops.rope import (
    Rotation,
    check_head_dim,
    cos_and_sin,
    norm_and_rotate,
    norm_weights,
    qk_rope,
)
from detjax.ops.rotary import RotaryEmbedding
from detjax.runtime import compilation, fusions

_QK_ROPE_APPEND_KV = Operation("qk_rope_append_kv", backend_modules("rope", kernels=["hopper"], mma="hopper"))


@compilation.jit(static_argnames=("embedding", "norm_eps", "norm_offset"))
def qk_rope_append_kv(  # noqa: PLR0913
    qkv: Float[Array, "*T N K"],
    kv: KVPages,
    queries: Queries,
    embedding: RotaryEmbedding,
    *,
    q_norm: Weight | None = None,
    k_norm: Weight | None = None,
    norm_eps: float | None = None,
    norm_offset: float = 0.0,
) -> tuple[Float[Array, "*T H K"], KVPages]:
    """Returns the queries of `qk_rope`, and the pages with its keys and the values written to them.

    Token `t` of request `b` has the absolute position `queries.start[b] + t`, by which it rotates; with an embedding
    that has sections, it rotates by `queries.coordinates` if given. The first `queries.count[b]` tokens are written at
    their positions. Tokens after these, or after the request's row of the page table, or whose page is not in the pool,
    are dropped. All other slots keep their bytes. Donated pages are written in place.

    Args:
        qkv: a fused projection, `[B, T, N, K]` or packed, `[N, N, K]`, with H query heads, h key heads and h value
            heads; bfloat16, float16 or float32.
        kv: pages of qkv's dtype, or quantized. Quantized pages are written in separate steps, as by `quantize_kv`.
        queries: the tokens' positions in their requests, below 2^24; `length` is not read. New tokens must have
            distinct slots.
        embedding: frequencies; its head_dim is K.
        q_norm: see `qk_rope`.
        k_norm: see `qk_rope`.
        norm_eps: see `qk_rope`.
        norm_offset: see `qk_rope`.

    Raises:
        TypeError: a dtype is not under contract, or the pages' dtype is not qkv's.
        ValueError: shapes do not fit together, one of q_norm, k_norm and norm_eps is given without the others, or
            norm_offset is given without them.

    Example:
        >>> qkv, pages = jnp.ones((1, 5, 4, 8)), jnp.zeros((1, 1, 128, 8))
        >>> queries = ops.Queries(ops.contiguous_page_table(1, 5), start=jnp.array([0]), length=jnp.array([5]))
        >>> q, kv = ops.qk_rope_append_kv(qkv, ops.KVPages(pages, pages), queries, ops.RotaryEmbedding(8, 10000.0))
        >>> q.shape, kv.k.shape
        ((1, 5, 2, 8), (1, 1, 128, 8))
    """
    _check_arrays(qkv, kv, queries, embedding)
    weights = norm_weights("qk_rope_append_kv", qkv, q_norm, k_norm, norm_eps, norm_offset)
    packed = queries.first_row is not None
    if packed:
        qkv, queries = qkv[:, None], queries.row_by_row()
    queries = with_counts(queries, qkv.shape[1])
    rotation = Rotation(embedding, (qkv.shape[2] - 2 * kv.kv_heads, kv.kv_heads), norm_eps, norm_offset)
    if kv.quantized:
        q, kv = _append_quantized(qkv, kv, queries, weights, rotation)
    else:
        weights = tuple(map(_QK_ROPE_APPEND_KV.taking, weights))
        q, kv = _QK_ROPE_APPEND_KV.call(_qk_rope_append_kv, qkv, kv, queries, weights, rotation=rotation)
    return (q[:, 0] if packed else q), kv


def _check_arrays(qkv: Array, kv: KVPages, queries: Queries, embedding: RotaryEmbedding) -> None:
    operation = "qk_rope_append_kv"
    check_dtype(operation, qkv=qkv)
    check_kv(operation, qkv, kv)
    check_not_empty(operation, qkv=qkv)
    if isinstance(kv.v, KeyColumns):
        raise TypeError(f"{operation}: kv.v is {kv.v}; accepted: pages of values. Keys alone are for append_keys")
    like = (kv.num_pages, kv.kv_heads, KV_BLOCK, qkv.shape[-1])
    check_shape(operation, "kv.k", kv.k, like, f"qkv being {qkv.shape}")
    check_shape(operation, "kv.v", kv.v, like, "kv.k's shape")
    check_queries(operation, "qkv", qkv, queries, ("start", "count"))
    if queries.first_row is not None and queries.rows is None:
        raise ValueError(f"{operation}: queries.rows is None; accepted: what Queries.packed makes")
    heads = qkv.shape[-2]
    if heads <= 2 * kv.kv_heads:
        raise ValueError(
            f"{operation}: qkv has {heads} heads; accepted: at least {2 * kv.kv_heads + 1}, one query head and, "
            f"kv.k being {kv.k.shape}, {kv.kv_heads} each for keys and values"
        )
    check_head_dim(operation, "qkv", qkv, embedding)
    if embedding.sections is not None and queries.coordinates is not None:
        check_integers(operation, **{"queries.coordinates": queries.coordinates})
        like = (*qkv.shape[:-2], len(embedding.sections))
        why = f"qkv being {qkv.shape} and sections {embedding.sections}"
        check_shape(operation, "queries.coordinates", queries.coordinates, like, why)


def _append_quantized(
    qkv: Array, kv: KVPages, queries: Queries, weights: tuple[Weight, ...], rotation: Rotation
) -> tuple[Array, KVPages]:
    heads, kv_heads = rotation.heads
    norms: dict[str, Any] = dict(zip(("q_norm", "k_norm"), weights, strict=False))
    norms |= {"norm_eps": rotation.norm_eps, "norm_offset": rotation.norm_offset}
    positions = rotation.embedding.positions_of(queries, qkv.shape[1])
    q, k = qk_rope(qkv, positions, rotation.embedding, heads=heads, kv_heads=kv_heads, **norms)
    return q, append(kv, k, qkv[:, :, heads + kv_heads :], queries)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _qk_rope_append_kv(
    qkv: Array, kv: KVPages, queries: Queries, weights: tuple[Weight, ...], rotation: Rotation
) -> tuple[Array, KVPages]:
    if fusions.is_unfused("qk_rope_append_kv"):
        return one_by_one(functools.partial(_in_separate_steps, rotation=rotation), (qkv, kv, queries, weights))
    options = {"eps": rotation.norm_eps, "norm_offset": rotation.norm_offset}
    append_kv = functools.partial(_QK_ROPE_APPEND_KV.kernels().append_kv, **options)

    def forward(qkv: Array, kv: KVPages, queries: Queries, weights: tuple[Array, ...]) -> tuple[Array, KVPages]:
        positions = rotation.embedding.positions_of(queries, qkv.shape[1])
        angles = cos_and_sin(rotation.embedding, positions, turn=1.0)
        return append_kv(qkv, angles, *weights, kv=kv, queries=queries)

    return one_by_one(forward, (qkv, kv, queries, tuple(value_and_sum(weight)[0] for weight in weights)))


def _in_separate_steps(
    qkv: Array, kv: KVPages, queries: Queries, weights: tuple[Weight, ...], rotation: Rotation
) -> tuple[Array, KVPages]:
    """Computes `qk_rope` and a scatter; their gradients are the operation's gradients."""
    positions = rotation.embedding.positions_of(queries, qkv.shape[1])
    rotated: Any = norm_and_rotate(qkv, positions, weights, rotation)
    q, k = rotated
    return q, append(kv, k, qkv[:, :, sum(rotation.heads) :], queries)


def _forward(qkv: Array, kv: KVPages, queries: Queries, weights: tuple[Weight, ...], rotation: Rotation):
    # Saving the pages for the gradients would prevent writing them in place.
    return _qk_rope_append_kv(qkv, kv, queries, weights, rotation), (qkv, queries, weights)


def _backward(rotation: Rotation, saved, gradients):
    qkv, queries, weights = saved

    def steps(qkv: Array, kv: KVPages, weights: tuple[Weight, ...]) -> tuple[Array, KVPages]:
        return _in_separate_steps(qkv, kv, queries, weights, rotation)

    kv = jax.tree.map(jnp.zeros_like, gradients[1])  # no gradient depends on the pages' content
    dqkv, dkv, dweights = jax.vjp(steps, qkv, kv, weights)[1](gradients)
    return dqkv, dkv, None, dweights


_qk_rope_append_kv.defvjp(_forward, _backward)
