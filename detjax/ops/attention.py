"""Attention over a paged KV cache: one function for prefill, decode and training, under contract."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from detjax.contract import KV_BLOCK
from detjax.operands.accumulated_weight import Weight, fresh_and_carried, value_and_sum
from detjax.operands.attention import AttentionOperands
from detjax.operands.kv_pages import KeyColumns, KVPages, Queries
from detjax.operands.numerics import ceil_div
from detjax.operands.options import Masking
from detjax.ops.checks import check_booleans, check_dtype, check_not_empty, check_shape
from detjax.ops.dispatch import Operation, backend_modules, one_by_one
from detjax.ops.paged import check_kv, check_queries
from detjax.ops.quantized_kv import dequantize_kv
from detjax.runtime import compilation, fusions

_MODULES = backend_modules("attention", mma="mma")
_ATTENTION = Operation("attention", _MODULES)
_RAGGED_ATTENTION = Operation("ragged_attention", _MODULES)


@compilation.jit(static_argnames=("scale", "causal", "window", "soft_cap", "alibi_slopes"))
def attention(  # noqa: PLR0913
    q: Float[Array, "*N H K"],
    kv: KVPages,
    queries: Queries,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Weight | None = None,
    alibi_slopes: tuple[float, ...] | None = None,
    mask: Bool[Array, "#B #H T s"] | None = None,
) -> Float[Array, "*N H V"]:
    """Returns `softmax(q k^T * scale) v` of each request over its own keys.

    A query at absolute position `i` of request `b` sees the request's first `queries.length[b]` keys, restricted by
    the masking options. Its own key must already be in the cache. A query that sees no key gives zeros.
    `detjax.contract` defines the order of the sums.

    Queries are `[B, T, H, K]`, T per request at positions `queries.start[b] + t`, or packed, `[N, H, K]`; see
    `Queries`. Packed queries and their gradients have the same bits as rectangular ones. They take no mask. Results of
    padding rows are undefined.

    Args:
        q: queries; bfloat16, float16 or float32. H is a multiple of h: consecutive query heads share a key head.
        kv: pages of keys and values. Quantized pages give the same bits as pages of `dequantize_kv`'s numbers, and have
            no gradients. `KeyColumns` for values give the same bits as pages of these values.
        queries: the queries' positions in their requests.
        scale: default `1 / sqrt(K)`.
        causal: a query sees no later key.
        window: a query sees at most this many of the last keys, including its own.
        soft_cap: scores become `soft_cap * tanh(score / soft_cap)`.
        sinks: a logit per head, `[H]`, that takes its share of the softmax and has no value. With an
            `AccumulatedWeight`, the gradient continues a sum.
        alibi_slopes: a slope per head; `slope * (key position - query position)` is added to the score.
        mask: `mask[b, h, t, j]` is True if query `t` of the call may see the key at position `j` of the request; the
            other options restrict it further. The axes of requests and heads may have size 1 to broadcast. The axis of
            keys may be shorter than the cache: keys at `s` and after are not seen. Calls with a mask are computed as
            prefill, even with one token.

    Raises:
        TypeError: a dtype is not under contract, the pages' dtype is not q's, only one of keys and values is quantized,
            or the mask does not hold booleans.
        ValueError: shapes do not fit together, an option is out of range, or packed queries have a mask.
        NotImplementedError: gradients are taken through quantized pages, or sinks with a sum have decode rows.

    Example:
        >>> x = jax.random.normal(jax.random.key(0), (1, 5, 2, 8))
        >>> kv = ops.KVPages(ops.in_pages(x), ops.in_pages(x))
        >>> queries = ops.Queries(ops.contiguous_page_table(1, 5), start=jnp.array([0]), length=jnp.array([5]))
        >>> ops.attention(x, kv, queries).shape
        (1, 5, 2, 8)
    """
    sinks, sinks_sum = value_and_sum(_ATTENTION.taking(sinks))
    _check_arrays(q, kv, queries, sinks)
    masking = _masking(q, scale, causal, window, soft_cap, alibi_slopes)
    if queries.first_row is not None:
        if mask is not None:
            raise ValueError(f"attention: mask has shape {mask.shape}; accepted: None, because the queries are packed")
        return _packed(AttentionOperands(q, kv, queries, sinks), sinks_sum, masking)
    keys = queries.page_table.shape[1] * KV_BLOCK
    _check_mask("attention", mask, q, keys, f"queries.page_table being {queries.page_table.shape}")
    operands = AttentionOperands(q, kv, queries, sinks, mask)
    return _ATTENTION.call(
        lambda operands, masking: _attention(operands, sinks_sum, masking), operands, masking=masking
    )


def _packed(operands: AttentionOperands, sinks_sum: Array | None, masking: Masking) -> Array:
    """Computes decode rows as rectangular queries, and prefill rows as ragged queries."""
    q, queries = operands.q, operands.queries
    decodes, outputs = queries.num_decodes, []
    rows = decodes * queries.decode_queries
    if decodes and sinks_sum is not None:
        raise NotImplementedError(
            f"attention: sinks is an AccumulatedWeight with a sum, and queries.num_decodes is {decodes}; accepted: 0, "
            "as in training, or sinks without a sum"
        )

    def under_contract(operands: AttentionOperands, masking: Masking) -> Array:
        return _attention(operands, sinks_sum, masking)

    if decodes:
        by_request = q[:rows].reshape(decodes, queries.decode_queries, *q.shape[1:])
        decoding = operands._replace(q=by_request, queries=queries.decoding())
        output = _ATTENTION.call(under_contract, decoding, masking=masking)
        outputs.append(output.reshape(rows, *output.shape[2:]))
    if decodes < queries.page_table.shape[0]:
        prefilling = operands._replace(q=q[rows:], queries=queries.prefilling())
        outputs.append(_RAGGED_ATTENTION.call(under_contract, prefilling, masking=masking))
    return outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs)


def _masking(
    q: Array,
    scale: float | None,
    causal: bool,
    window: int | None,
    soft_cap: float | None,
    alibi_slopes: tuple[float, ...] | None,
) -> Masking:
    """Validates the masking options."""
    heads, width = q.shape[-2:]
    if scale is not None and scale <= 0:
        raise ValueError(f"attention: scale is {scale}; accepted: None, or a positive number")
    if window is not None and window < 1:
        raise ValueError(f"attention: window is {window}; accepted: None, or at least 1 token")
    if soft_cap is not None and soft_cap <= 0:
        raise ValueError(f"attention: soft_cap is {soft_cap}; accepted: None, or a positive number")
    if alibi_slopes is not None and len(alibi_slopes) != heads:
        raise ValueError(f"attention: {len(alibi_slopes)} alibi_slopes; accepted: {heads}, one per head of q")
    return Masking(1 / math.sqrt(width) if scale is None else scale, causal, window, soft_cap, alibi_slopes)


def _check_arrays(q: Array, kv: KVPages, queries: Queries, sinks: Array | None) -> None:
    check_dtype("attention", q=q, sinks=sinks)
    check_kv("attention", q, kv)
    heads, width = q.shape[-2:]
    pages, kv_heads = kv.num_pages, kv.kv_heads
    check_shape("attention", "kv.k", kv.k, (pages, kv_heads, KV_BLOCK, width), f"q being {q.shape}")
    if isinstance(kv.v, KeyColumns):
        if not 1 <= kv.v.width <= width:
            raise ValueError(f"attention: kv.v is {kv.v}; accepted: from 1 to {width} columns, q being {q.shape}")
    else:
        like_keys = (pages, kv_heads, KV_BLOCK, kv.value_width)
        check_shape("attention", "kv.v", kv.v, like_keys, f"kv.k being {kv.k.shape}")
    check_shape("attention", "sinks", sinks, (heads,), f"q being {q.shape}")
    if heads % kv_heads:
        raise ValueError(f"attention: q has {heads} heads and kv.k {kv_heads}; accepted: a multiple of {kv_heads}")
    check_not_empty("attention", q=q)
    check_queries("attention", "q", q, queries, ("start", "length"))


def _check_mask(name: str, mask: Array | None, q: Array, keys: int, why: str) -> None:
    """Raises unless the mask is None, or has booleans for each query of the call and 1 to `keys` keys."""
    check_booleans(name, mask=mask)
    if mask is None:
        return
    batch, tokens, heads = q.shape[:3]
    accepted = {1, batch}, {1, heads}, {tokens}, range(1, keys + 1)
    if mask.ndim != 4 or not all(size in sizes for size, sizes in zip(mask.shape, accepted, strict=True)):
        raise ValueError(
            f"{name}: mask has shape {mask.shape}; accepted: (1 or {batch}, 1 or {heads}, {tokens}, 1 to {keys}), q "
            f"being {q.shape} and {why}"
        )


def dot_product_attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B t h K"],
    v: Float[Array, "B t h V"],
    *,
    kv_length: Int[Array, "B"] | None = None,
    q_start: Int[Array, "B"] | None = None,
    mask: Bool[Array, "#B #H T s"] | None = None,
    **options: Any,
) -> Float[Array, "B T H V"]:
    """Returns `attention` over keys and values that are not in pages, with the same bits as the paged form.

    Args:
        q: queries; bfloat16, float16 or float32.
        k: keys of each request from position 0, of q's dtype.
        v: their values.
        kv_length: keys of each request, in tokens; default: all t.
        q_start: absolute position of the first query; default: `kv_length - T`.
        mask: see `attention`; over at most t keys.
        options: `attention`'s keyword arguments.

    Raises:
        TypeError: see `attention`.
        ValueError: see `attention`.

    Example:
        >>> x = jax.random.normal(jax.random.key(0), (1, 5, 2, 8))
        >>> ops.dot_product_attention(x, x, x).shape
        (1, 5, 2, 8)
    """
    _check_mask("dot_product_attention", mask, q, k.shape[1], f"k being {k.shape}")
    kv, page_table = KVPages(in_pages(k), in_pages(v)), contiguous_page_table(*k.shape[:2])
    if kv_length is None:
        kv_length = jnp.full(k.shape[0], k.shape[1], jnp.int32)
    if q_start is None:
        q_start = kv_length - q.shape[1]
    return attention(q, kv, Queries(page_table, q_start, kv_length), mask=mask, **options)


def in_pages(x: Float[Array, "B t h K"]) -> Float[Array, "P h S K"]:
    """Returns keys or values in the pages of `contiguous_page_table`. The last page of a request is padded with zeros.

    Example:
        >>> ops.in_pages(jnp.ones((1, 130, 2, 8))).shape  # two pages of 128 tokens
        (2, 2, 128, 8)
    """
    kv_heads, width = x.shape[2:]
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % KV_BLOCK), (0, 0), (0, 0)))
    return x.reshape(-1, KV_BLOCK, kv_heads, width).transpose(0, 2, 1, 3)


def contiguous_page_table(batch: int, tokens: int) -> Int[Array, "B p"]:
    """Returns the page table of requests with consecutive pages, `ceil(tokens / contract.KV_BLOCK)` each.

    Example:
        >>> ops.contiguous_page_table(2, 130)
        Array([[0, 1],
               [2, 3]], dtype=int32)
    """
    pages = ceil_div(tokens, KV_BLOCK)
    return jnp.arange(batch * pages, dtype=jnp.int32).reshape(batch, pages)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _attention(operands: AttentionOperands, sinks_sum: Array | None, masking: Masking) -> Array:
    del sinks_sum  # only the backward pass adds to it
    kv = operands.kv
    if kv.quantized and fusions.is_unfused("attention_dequantize"):
        kv = KVPages(*(dequantize_kv(pages, operands.q.dtype) for pages in kv.quantized))
    return _output_and_normalizers(operands._replace(kv=kv), masking, with_normalizers=False)[0]


def _output_and_normalizers(operands: AttentionOperands, masking: Masking, with_normalizers: bool) -> tuple[Array, Any]:
    """Returns the output and, on request, the softmax's normalizers in the form that the backend's gradients need."""
    if operands.queries.first_row is None:
        forward = functools.partial(_ATTENTION.kernels().forward, masking=masking, with_normalizers=with_normalizers)
        return one_by_one(forward, (operands,))
    kernels = _RAGGED_ATTENTION.kernels()
    if with_normalizers:
        return one_by_one(functools.partial(kernels.ragged_with_normalizers, masking=masking), (operands,))
    return one_by_one(functools.partial(kernels.ragged, masking=masking), (operands,)), None


def _forward(operands: AttentionOperands, sinks_sum: Array | None, masking: Masking) -> tuple[Array, Any]:
    _check_gradients(operands.kv)
    output = _output_and_normalizers(operands, masking, with_normalizers=True)
    return output[0], (operands, output, sinks_sum)


def _backward(masking: Masking, saved: tuple[Any, ...], do: Array) -> tuple[Any, ...]:
    operands, output, sinks_sum = saved
    is_packed = operands.queries.first_row is not None
    backward = _RAGGED_ATTENTION.kernels().ragged_backward if is_packed else _ATTENTION.kernels().backward
    backward = functools.partial(backward, masking=masking)
    dq, dkv, dsinks = one_by_one(backward, (operands, output, do, sinks_sum))
    (fresh,), (carried,) = fresh_and_carried((dsinks,), (sinks_sum,))
    cotangents: Any = dq, dkv, None, fresh, None
    return AttentionOperands(*cotangents), carried


_attention.defvjp(_forward, _backward)


def _check_gradients(kv: KVPages) -> None:
    if kv.quantized:
        raise NotImplementedError(
            f"attention: gradients through pages that are quantized ({kv.quantized[0].kind}); accepted: pages of q's "
            "dtype. Train without quantization, or take no gradient."
        )
