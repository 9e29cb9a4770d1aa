"""Rotary position embedding that writes the KV cache: `qk_rope`, and keys and values appended to their pages."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from detjax import compilation
from detjax.contract import KV_BLOCK
from detjax.ops.checks import check_dtype, check_integers, check_not_empty, check_shape
from detjax.ops.dispatch import Operation, with_vmap_rule
from detjax.ops.quantized_kv import check_pools
from detjax.ops.rope import RotaryEmbedding, check_head_dim, cos_and_sin, in_separate_steps, norm_weights, qk_rope
from detjax.portable import pages
from detjax.portable.quantized_kv import QuantizedPages

_QK_ROPE_APPEND_KV = Operation(
    "qk_rope_append_kv",
    {
        "portable": "detjax.portable.rope",
        "hopper": "detjax.pallas.hopper.rope",
        "tpu": "detjax.portable.rope",
        "stock": "detjax.stock.rope",
    },
)


@compilation.jit(static_argnames=("embedding", "norm_eps"))
def qk_rope_append_kv(
    qkv: Float[Array, "B T N K"],
    k_pages: Float[Array, "P h S K"] | QuantizedPages,
    v_pages: Float[Array, "P h S K"] | QuantizedPages,
    page_table: Int[Array, "B p"],
    q_start: Int[Array, "B"],
    q_length: Int[Array, "B"],
    embedding: RotaryEmbedding,
    *,
    q_norm: Float[Array, "K"] | None = None,
    k_norm: Float[Array, "K"] | None = None,
    norm_eps: float | None = None,
) -> tuple[Float[Array, "B T H K"], Float[Array, "P h S K"] | QuantizedPages, Float[Array, "P h S K"] | QuantizedPages]:
    """Returns queries as `qk_rope` has them, and the pools of pages with the new keys, likewise, and values in them.

    Token `t` of request `b` stands at absolute position `q_start[b] + t`; the first `q_length[b]` tokens are written
    there. A token is dropped that is behind these, behind the request's `p` pages, or whose page is not in the pool;
    the bytes of all other slots stay as they are. Where the program may overwrite the pools, as it may those that it
    was donated, they are written in place.

    Args:
        qkv: a fused projection: H heads of queries, h of keys and h of values; bfloat16, float16 or float32.
        k_pages: pages of `contract.KV_BLOCK` tokens each, of qkv's dtype, or quantized; as `attention` takes them.
            What is written to quantized ones is quantized as `quantize_kv` does it, in steps of their own.
        v_pages: values in the same pages.
        page_table: the page of each request's block of tokens. No two new tokens may have one slot.
        q_start: absolute position of each request's first new token: how many it has in the cache. Positions are below
            2^24.
        q_length: new tokens of each request; 0 for one that has none. The rest is padding.
        embedding: frequencies; its head_dim is K.
        q_norm: as `qk_rope` has it.
        k_norm: as `qk_rope` has it.
        norm_eps: as `qk_rope` has it.

    Raises:
        TypeError: a dtype is not under contract, or the pages' is not qkv's.
        ValueError: shapes do not fit together, or one of q_norm, k_norm and norm_eps is given without the others.
    """
    name = "qk_rope_append_kv"
    check_dtype(name, qkv=qkv)
    check_pools(name, qkv, k_pages, v_pages)
    check_integers(name, page_table=page_table, q_start=q_start, q_length=q_length)
    check_not_empty(name, qkv=qkv, page_table=page_table)
    batch, _, all_heads, width = qkv.shape
    of_pool = (*k_pages.shape[:2], KV_BLOCK, width)
    check_shape(name, "k_pages", k_pages, of_pool, f"qkv being {qkv.shape}")
    check_shape(name, "v_pages", v_pages, of_pool, "k_pages' shape")
    check_shape(name, "page_table", page_table, (batch, page_table.shape[1]), f"qkv being {qkv.shape}")
    for argument, array in (("q_start", q_start), ("q_length", q_length)):
        check_shape(name, argument, array, (batch,), f"qkv being {qkv.shape}")
    if all_heads <= 2 * k_pages.shape[1]:
        raise ValueError(
            f"{name}: qkv has {all_heads} heads; accepted: at least {2 * k_pages.shape[1] + 1}, one of queries and, "
            f"k_pages being {k_pages.shape}, {k_pages.shape[1]} each of keys and values"
        )
    check_head_dim(name, "qkv", qkv, embedding)
    weights = norm_weights(name, qkv, q_norm, k_norm, norm_eps)
    where = page_table.astype(jnp.int32), q_start.astype(jnp.int32), q_length.astype(jnp.int32)
    if isinstance(k_pages, QuantizedPages) and isinstance(v_pages, QuantizedPages):
        heads, kv_heads = all_heads - 2 * k_pages.shape[1], k_pages.shape[1]
        options = {"q_norm": q_norm, "k_norm": k_norm, "norm_eps": norm_eps}
        q, k = qk_rope(qkv, _positions(qkv, where[1]), embedding, heads=heads, kv_heads=kv_heads, **options)
        at = pages.places(k_pages.shape[0], qkv.shape[1], *where)
        return q, k_pages.written(*at, k), v_pages.written(*at, qkv[:, :, heads + kv_heads :])
    assert not isinstance(k_pages, QuantizedPages) and not isinstance(v_pages, QuantizedPages)
    operands = qkv, (k_pages, v_pages), where, weights
    return _QK_ROPE_APPEND_KV.call(_qk_rope_append_kv, *operands, embedding=embedding, eps=norm_eps)


def _positions(qkv: Array, q_start: Array) -> Array:
    return q_start[:, None] + jnp.arange(qkv.shape[1], dtype=jnp.int32)[None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _qk_rope_append_kv(
    qkv: Array,
    pools: tuple[Array, Array],
    where: tuple[Array, Array, Array],
    weights: tuple[Array, ...],
    embedding: RotaryEmbedding,
    eps: float | None,
) -> tuple[Array, Array, Array]:
    append_kv = functools.partial(_QK_ROPE_APPEND_KV.kernels().append_kv, eps=eps)

    def forward(
        qkv: Array, k_pages: Array, v_pages: Array, page_table: Array, q_start: Array, q_length: Array, *weights: Array
    ) -> tuple[Array, Array, Array]:
        cos, sin = cos_and_sin(embedding, _positions(qkv, q_start), turn=1.0)
        return append_kv(
            qkv,
            cos,
            sin,
            *weights,
            k_pages=k_pages,
            v_pages=v_pages,
            page_table=page_table,
            q_start=q_start,
            q_length=q_length,
        )

    arguments = qkv, *pools, *where, *weights
    return with_vmap_rule(forward, rows=(False,) * len(arguments))(*arguments)


def _in_separate_steps(
    embedding: RotaryEmbedding,
    eps: float | None,
    qkv: Array,
    pools: tuple[Array, Array],
    where: tuple[Array, Array, Array],
    weights: tuple[Array, ...],
) -> tuple[Array, Array, Array]:
    """By `rms_norm`, `rope` and a scatter: what gradients are taken of."""
    kv_heads = pools[0].shape[1]
    heads = qkv.shape[2] - 2 * kv_heads, kv_heads
    q, k = in_separate_steps(embedding, heads, eps, qkv, _positions(qkv, where[1]), weights)
    k_pages, v_pages = pages.append(pools, (k, qkv[:, :, sum(heads) :]), *where)
    return q, k_pages, v_pages


def _forward(
    qkv: Array,
    pools: tuple[Array, Array],
    where: tuple[Array, Array, Array],
    weights: tuple[Array, ...],
    embedding: RotaryEmbedding,
    eps: float | None,
):
    # The pools are not among what is kept: they could not be written in place.
    return _qk_rope_append_kv(qkv, pools, where, weights, embedding, eps), (qkv, where, weights)


def _backward(embedding: RotaryEmbedding, eps: float | None, saved, gradients):
    qkv, where, weights = saved
    _, *of_pools = gradients

    def steps(qkv: Array, pools: tuple[Array, Array], weights: tuple[Array, ...]) -> tuple[Array, Array, Array]:
        return _in_separate_steps(embedding, eps, qkv, pools, where, weights)

    k_pages, v_pages = (jnp.zeros_like(pool) for pool in of_pools)  # no gradient depends on what is in them
    dqkv, dpools, dweights = jax.vjp(steps, qkv, (k_pages, v_pages), weights)[1](gradients)
    return dqkv, dpools, None, dweights


_qk_rope_append_kv.defvjp(_forward, _backward)
