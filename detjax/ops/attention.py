"""Attention over a paged KV cache: one function for prefill, decode and training, under contract."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from detjax import compilation
from detjax.contract import KV_BLOCK
from detjax.ops.checks import check_booleans, check_dtype, check_integers, check_not_empty, check_shape
from detjax.ops.dispatch import Operation, with_vmap_rule
from detjax.ops.quantized_kv import check_pools
from detjax.options import Masking
from detjax.portable.quantized_kv import QuantizedPages

_MODULES = {
    "portable": "detjax.portable.attention",
    "hopper": "detjax.pallas.hopper.attention",
    "tpu": "detjax.pallas.tpu.attention",
    "stock": "detjax.stock.attention",
}
_ATTENTION = Operation("attention", _MODULES)
_RAGGED_ATTENTION = Operation("ragged_attention", _MODULES)


@compilation.jit(static_argnames=("scale", "causal", "window", "soft_cap", "alibi_slopes"))
def attention(
    q: Float[Array, "B T H K"],
    k_pages: Float[Array, "P h S K"] | QuantizedPages,
    v_pages: Float[Array, "P h S V"] | QuantizedPages,
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
    mask: Bool[Array, "#B #H T s"] | None = None,
) -> Float[Array, "B T H V"]:
    """Returns `softmax(q k^T * scale) v` of each request over its own keys.

    Query `t` of request `b` stands at absolute position `q_start[b] + t` and sees the request's first `kv_length[b]`
    keys, of these the ones that masking leaves it. Its own key must be in the cache already. A query that sees no key
    gives zeros. `detjax.contract` says in which order what is added.

    Args:
        q: queries; bfloat16, float16 or float32. H is a multiple of h: consecutive queries' heads share a key head.
        k_pages: pages of `contract.KV_BLOCK` tokens each, of q's dtype or quantized; there are no gradients through
            quantized ones, and the bits are those of `dequantize_kv` of them.
        v_pages: values in the same pages, of the same dtype or kind.
        page_table: the page of each request's block of tokens; entries behind its length are not read.
        q_start: absolute position of each request's first query, in tokens.
        kv_length: tokens of each request in the cache, the queries' own included.
        scale: default `1 / sqrt(K)`.
        causal: a query sees no later key.
        window: a query sees this many keys at most, the last ones; itself included.
        soft_cap: scores become `soft_cap * tanh(score / soft_cap)`.
        sinks: a logit per head that takes its share of the softmax and has no value.
        alibi_slopes: per head, added times `key position - query position` to the score.
        mask: `mask[b, h, t, j]` says whether query `t` of the call may see the key at position `j` of the request; of
            the keys that it may see, it sees those that all else leaves it. An axis of requests, or of heads, of size 1
            stands for all of them. The axis of keys may end before the cache does: keys at `s` and behind are not seen.
            Calls with a mask are served as prefill, also those of one token.

    Raises:
        TypeError: a dtype is not under contract, or the pages' is not q's; or one is quantized as the other is not; or
            the mask is not of booleans.
        ValueError: shapes do not fit together, or an option is out of range.
        NotImplementedError: gradients are taken, and the pages are quantized.
    """
    batch = q.shape[0]
    masking = _checked(
        "attention", q, k_pages, v_pages, page_table, sinks, scale, causal, window, soft_cap, alibi_slopes
    )
    _check_requests("attention", page_table, batch, f"q being {q.shape}", q_start=q_start, kv_length=kv_length)
    _check_mask("attention", mask, q, page_table.shape[1] * KV_BLOCK, f"page_table being {page_table.shape}")
    operands = q, k_pages, v_pages, page_table, q_start, kv_length, sinks, mask
    return _ATTENTION.call(_attention, *operands, masking=masking)


@compilation.jit(static_argnames=("scale", "causal", "window", "soft_cap", "alibi_slopes"))
def ragged_attention(
    q: Float[Array, "N H K"],
    k_pages: Float[Array, "P h S K"] | QuantizedPages,
    v_pages: Float[Array, "P h S V"] | QuantizedPages,
    page_table: Int[Array, "B p"],
    q_row: Int[Array, "B"],
    q_length: Int[Array, "B"],
    q_start: Int[Array, "B"],
    kv_length: Int[Array, "B"],
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, "H"] | None = None,
    alibi_slopes: tuple[float, ...] | None = None,
) -> Float[Array, "N H V"]:
    """Returns `attention` of requests with different numbers of queries, packed into one array: prefills side by side.

    A request's rows have the bits that `attention` gives them. There are no gradients.

    Args:
        q: queries of all requests; bfloat16, float16 or float32.
        k_pages: as `attention` has them.
        v_pages: as `attention` has them.
        page_table: as `attention` has it.
        q_row: row of each request's first query, ascending, multiples of `contract.QUERY_UNIT`. Rows behind a request's
            last query, and before the next one's first, are not looked at; the result there may be anything.
        q_length: queries of each request; 0 for one that has none.
        q_start: absolute position of each request's first query, in tokens.
        kv_length: tokens of each request in the cache, the queries' own included.
        scale: and all other options, as `attention` has them.

    Raises:
        TypeError: as `attention`.
        ValueError: as `attention`.
    """
    name = "ragged_attention"
    batch = page_table.shape[0]
    masking = _checked(name, q, k_pages, v_pages, page_table, sinks, scale, causal, window, soft_cap, alibi_slopes)
    of_requests = {"q_row": q_row, "q_length": q_length, "q_start": q_start, "kv_length": kv_length}
    _check_requests(name, page_table, batch, f"page_table being {page_table.shape}", **of_requests)
    operands = q, k_pages, v_pages, page_table, q_row, q_length, q_start, kv_length, sinks
    return _RAGGED_ATTENTION.call(_ragged_attention, *operands, masking=masking)


def _ragged_attention(*operands: Array | QuantizedPages | None, masking: Masking) -> Array:
    return _one_by_one(functools.partial(_RAGGED_ATTENTION.kernels().ragged, masking=masking), operands)


def _checked(
    name: str,
    q: Array,
    k_pages: Array | QuantizedPages,
    v_pages: Array | QuantizedPages,
    page_table: Array,
    sinks: Array | None,
    scale: float | None,
    causal: bool,
    window: int | None,
    soft_cap: float | None,
    alibi_slopes: tuple[float, ...] | None,
) -> Masking:
    """The options together, once they and the arrays' shapes and dtypes are known to fit."""
    check_dtype(name, q=q, sinks=sinks)
    check_pools(name, q, k_pages, v_pages)
    check_not_empty(name, q=q, page_table=page_table)
    heads, width = q.shape[-2:]
    pages, kv_heads = k_pages.shape[:2]
    check_shape(name, "k_pages", k_pages, (pages, kv_heads, KV_BLOCK, width), f"q being {q.shape}")
    like_keys = (pages, kv_heads, KV_BLOCK, v_pages.shape[3])
    check_shape(name, "v_pages", v_pages, like_keys, f"k_pages being {k_pages.shape}")
    check_shape(name, "sinks", sinks, (heads,), f"q being {q.shape}")
    if heads % kv_heads:
        raise ValueError(f"{name}: q has {heads} heads and k_pages {kv_heads}; accepted: a multiple of {kv_heads}")
    if scale is not None and scale <= 0:
        raise ValueError(f"{name}: scale is {scale}; accepted: None, or a positive number")
    if window is not None and window < 1:
        raise ValueError(f"{name}: window is {window}; accepted: None, or at least 1 token")
    if soft_cap is not None and soft_cap <= 0:
        raise ValueError(f"{name}: soft_cap is {soft_cap}; accepted: None, or a positive number")
    if alibi_slopes is not None and len(alibi_slopes) != heads:
        raise ValueError(f"{name}: {len(alibi_slopes)} alibi_slopes; accepted: {heads}, one per head of q")
    return Masking(1 / math.sqrt(width) if scale is None else scale, causal, window, soft_cap, alibi_slopes)


def _check_requests(name: str, page_table: Array, batch: int, why: str, **of_requests: Array) -> None:
    """Raises unless there is a row of the page table, and an integer of each kind, for every request."""
    check_integers(name, page_table=page_table, **of_requests)
    check_shape(name, "page_table", page_table, (batch, page_table.shape[1]), why)
    for argument, array in of_requests.items():
        check_shape(name, argument, array, (batch,), why)


def _check_mask(name: str, mask: Array | None, q: Array, keys: int, why: str) -> None:
    """Raises unless the mask is None, or booleans for each query of the call and for 1 to `keys` keys."""
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
    """Returns `attention` over keys and values that are not in pages: the bits are those of the paged form.

    Args:
        q: queries; bfloat16, float16 or float32.
        k: keys of each request from position 0, of q's dtype.
        v: their values.
        kv_length: keys of each request, in tokens; default: all t.
        q_start: absolute position of the first query; default: that of the last T keys, `kv_length - T`.
        mask: as `attention` has it, over at most t keys.
        options: `attention`'s keyword arguments.

    Raises:
        TypeError: as `attention`.
        ValueError: as `attention`.
    """
    _check_mask("dot_product_attention", mask, q, k.shape[1], f"k being {k.shape}")
    k_pages, v_pages, page_table = in_pages(k), in_pages(v), contiguous_page_table(*k.shape[:2])
    if kv_length is None:
        kv_length = jnp.full(k.shape[0], k.shape[1], jnp.int32)
    if q_start is None:
        q_start = kv_length - q.shape[1]
    return attention(q, k_pages, v_pages, page_table, q_start, kv_length, mask=mask, **options)


def in_pages(x: Float[Array, "B t h K"]) -> Float[Array, "P h S K"]:
    """Keys or values as the pages that `contiguous_page_table` points to; the last page of a request ends in zeros."""
    kv_heads, width = x.shape[2:]
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % KV_BLOCK), (0, 0), (0, 0)))
    return x.reshape(-1, KV_BLOCK, kv_heads, width).transpose(0, 2, 1, 3)


def contiguous_page_table(batch: int, tokens: int) -> Int[Array, "B p"]:
    """Pages of requests that lie one behind the other, `ceil(tokens / contract.KV_BLOCK)` each."""
    per_request = -(-tokens // KV_BLOCK)
    return jnp.arange(batch * per_request, dtype=jnp.int32).reshape(batch, per_request)


def _attention(*operands: Array | QuantizedPages | None, masking: Masking) -> Array:
    return _attention_with_gradients(masking, *operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention_with_gradients(masking: Masking, *operands: Array | QuantizedPages | None) -> Array:
    return _output_and_normalizers(masking, operands, with_normalizers=False)[0]


def _forward(masking: Masking, *operands: Array | QuantizedPages | None):
    if isinstance(operands[1], QuantizedPages):
        raise NotImplementedError(
            f"attention: gradients through pages that are quantized ({operands[1].kind}); accepted: pages of q's "
            "dtype. Train without quantization, or take no gradient."
        )
    o, log2_normalizers = _output_and_normalizers(masking, operands, with_normalizers=True)
    return o, (operands, o, log2_normalizers)


def _output_and_normalizers(
    masking: Masking, operands: tuple[Array | QuantizedPages | None, ...], with_normalizers: bool
):
    """The output, and what the backend's own gradients need of the softmax; None if they are not to come."""
    forward = _ATTENTION.kernels().forward
    return _one_by_one(functools.partial(forward, masking=masking, with_normalizers=with_normalizers), operands)


def _one_by_one(fn: Callable[..., Any], operands: tuple[Any, ...]) -> Any:
    """`fn(*operands)`, under `vmap` one example after another."""
    leaves, tree = jax.tree.flatten(operands)  # quantized pages are two arrays, either of which may be batched
    flat = with_vmap_rule(lambda *leaves: fn(*jax.tree.unflatten(tree, leaves)), rows=(False,) * len(leaves))
    return flat(*leaves)


def _backward(masking: Masking, saved: tuple, do: Array):
    operands, o, log2_normalizers = saved
    backward = functools.partial(_ATTENTION.kernels().backward, masking=masking)
    arguments = (*operands, o, log2_normalizers, do)
    dq, dk, dv, dsinks = with_vmap_rule(backward, rows=(False,) * len(arguments))(*arguments)
    return dq, dk, dv, None, None, None, dsinks, None


_attention_with_gradients.defvjp(_forward, _backward)
