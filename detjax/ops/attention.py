"""Attention over a paged KV cache: one function for prefill, decode and training, under contract."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from detjax import platform, stock
from detjax.contract import KV_BLOCK, Masking
from detjax.ops.checks import check_dtype, check_integers, check_not_empty, check_shape
from detjax.ops.dispatch import kernels, with_vmap_rule
from detjax.portable import attention as portable_attention

# On Hopper the portable backend serves attention: the same contract, at the portable backend's speed.
_KERNELS = {"portable": portable_attention, "hopper": portable_attention}


@platform.jit(static_argnames=("scale", "causal", "window", "soft_cap", "alibi_slopes"))
def attention(
    q: Float[Array, "B T H K"],
    k_pages: Float[Array, "P h S K"],
    v_pages: Float[Array, "P h S V"],
    page_table: Int[Array, "B p"],
    q_start: Int[Array, "B"],
    kv_length: Int[Array, "B"],
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, "H"] | None = None,
    alibi_slopes: tuple[float, ...] | None = None,
) -> Float[Array, "B T H V"]:
    """Returns `softmax(q k^T * scale) v` of each request over its own keys.

    Query `t` of request `b` stands at absolute position `q_start[b] + t` and sees the request's first `kv_length[b]`
    keys, of these the ones that masking leaves it. Its own key must be in the cache already. A query that sees no key
    gives zeros. `detjax.contract` says in which order what is added.

    Args:
        q: queries; bfloat16, float16 or float32. H is a multiple of h: consecutive queries' heads share a key head.
        k_pages: pages of `contract.KV_BLOCK` tokens each, of q's dtype.
        v_pages: values in the same pages.
        page_table: the page of each request's block of tokens; entries behind its length are not read.
        q_start: absolute position of each request's first query, in tokens.
        kv_length: tokens of each request in the cache, the queries' own included.
        scale: default `1 / sqrt(K)`.
        causal: a query sees no later key.
        window: a query sees this many keys at most, the last ones; itself included.
        soft_cap: scores become `soft_cap * tanh(score / soft_cap)`.
        sinks: a logit per head that takes its share of the softmax and has no value.
        alibi_slopes: per head, added times `key position - query position` to the score.

    Raises:
        TypeError: a dtype is not under contract, or the pages' is not q's.
        ValueError: shapes do not fit together, or an option is out of range.
    """
    check_dtype("attention", q=q, sinks=sinks)
    check_dtype("attention", like=q, k_pages=k_pages, v_pages=v_pages)
    check_integers("attention", page_table=page_table, q_start=q_start, kv_length=kv_length)
    check_not_empty("attention", q=q, k_pages=k_pages, v_pages=v_pages, page_table=page_table)
    batch, _, heads, width = q.shape
    pages, kv_heads = k_pages.shape[:2]
    check_shape("attention", "k_pages", k_pages, (pages, kv_heads, KV_BLOCK, width), f"q being {q.shape}")
    like_keys = (pages, kv_heads, KV_BLOCK, v_pages.shape[3])
    check_shape("attention", "v_pages", v_pages, like_keys, f"k_pages being {k_pages.shape}")
    check_shape("attention", "page_table", page_table, (batch, page_table.shape[1]), f"q being {q.shape}")
    check_shape("attention", "q_start", q_start, (batch,), f"q being {q.shape}")
    check_shape("attention", "kv_length", kv_length, (batch,), f"q being {q.shape}")
    check_shape("attention", "sinks", sinks, (heads,), f"q being {q.shape}")
    if heads % kv_heads:
        raise ValueError(f"attention: q has {heads} heads and k_pages {kv_heads}; accepted: a multiple of {kv_heads}")
    if scale is not None and scale <= 0:
        raise ValueError(f"attention: scale is {scale}; accepted: None, or a positive number")
    if window is not None and window < 1:
        raise ValueError(f"attention: window is {window}; accepted: None, or at least 1 token")
    if soft_cap is not None and soft_cap <= 0:
        raise ValueError(f"attention: soft_cap is {soft_cap}; accepted: None, or a positive number")
    if alibi_slopes is not None and len(alibi_slopes) != heads:
        raise ValueError(f"attention: {len(alibi_slopes)} alibi_slopes; accepted: {heads}, one per head of q")

    scale = 1 / math.sqrt(width) if scale is None else scale
    masking = Masking(scale, causal, window, soft_cap, alibi_slopes)
    if platform.backend() == platform.STOCK:
        return stock.attention(q, k_pages, v_pages, page_table, q_start, kv_length, sinks, masking=masking)
    return _attention(masking, q, k_pages, v_pages, page_table, q_start, kv_length, sinks)


def dot_product_attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B t h K"],
    v: Float[Array, "B t h V"],
    *,
    kv_length: Int[Array, "B"] | None = None,
    q_start: Int[Array, "B"] | None = None,
    **options: Any,
) -> Float[Array, "B T H V"]:
    """Returns `attention` over keys and values that are not in pages: the bits are those of the paged form.

    Args:
        q: queries; bfloat16, float16 or float32.
        k: keys of each request from position 0, of q's dtype.
        v: their values.
        kv_length: keys of each request, in tokens; default: all t.
        q_start: absolute position of the first query; default: that of the last T keys, `kv_length - T`.
        options: `attention`'s keyword arguments.

    Raises:
        TypeError: as `attention`.
        ValueError: as `attention`.
    """
    k_pages, v_pages, page_table = in_pages(k), in_pages(v), contiguous_page_table(*k.shape[:2])
    if kv_length is None:
        kv_length = jnp.full(k.shape[0], k.shape[1], jnp.int32)
    if q_start is None:
        q_start = kv_length - q.shape[1]
    return attention(q, k_pages, v_pages, page_table, q_start, kv_length, **options)


def in_pages(x: Float[Array, "B t h K"]) -> Float[Array, "P h S K"]:
    """Keys or values as the pages that `contiguous_page_table` points to; the last page of a request ends in zeros."""
    kv_heads, width = x.shape[2:]
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % KV_BLOCK), (0, 0), (0, 0)))
    return x.reshape(-1, KV_BLOCK, kv_heads, width).transpose(0, 2, 1, 3)


def contiguous_page_table(batch: int, tokens: int) -> Int[Array, "B p"]:
    """Pages of requests that lie one behind the other, `ceil(tokens / contract.KV_BLOCK)` each."""
    per_request = -(-tokens // KV_BLOCK)
    return jnp.arange(batch * per_request, dtype=jnp.int32).reshape(batch, per_request)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(masking: Masking, *operands: Array | None) -> Array:
    return _forward(masking, *operands)[0]


def _forward(masking: Masking, *operands: Array | None):
    forward = functools.partial(kernels("attention", _KERNELS).forward, masking=masking)
    o, log2_normalizer = with_vmap_rule(forward, rows=(False,) * len(operands))(*operands)
    return o, (operands, o, log2_normalizer)


def _backward(masking: Masking, saved: tuple, do: Array):
    operands, o, log2_normalizer = saved
    backward = functools.partial(kernels("attention", _KERNELS).backward, masking=masking)
    arguments = (*operands, o, log2_normalizer, do)
    dq, dk, dv, dsinks = with_vmap_rule(backward, rows=(False,) * len(arguments))(*arguments)
    return dq, dk, dv, None, None, None, dsinks


_attention.defvjp(_forward, _backward)
