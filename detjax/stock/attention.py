"""Attention over a paged KV cache by XLA, and by cuDNN where cuDNN supports it."""

from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.cudnn import (
    fused_attention_stablehlo as cudnn,  # JAX has no public name for paged attention
)
from jaxtyping import Array, DTypeLike

from detjax.contract import ACCUMULATOR, KV_BLOCK
from detjax.operands.attention import AttentionOperands
from detjax.operands.kv_pages import KVPages, Queries, request_of_rows, rows_as_requests
from detjax.operands.options import Masking
from detjax.runtime import backends
from detjax.stock.dot import dot_operands

DIFFERENTIATED_BY_JAX: Final = True

_CUDNN_DTYPES: Final = ("bfloat16", "float16")
_PADDING: Final = 4
"""The maximum ratio of rows in a padded call to rows of the packed queries..."""
_MIN_PADDED_ROWS: Final = 4096
"""...unless they are this many or fewer."""


def attention(operands: AttentionOperands, *, masking: Masking) -> Array:
    """See `detjax.ops.attention`. cuDNN computes decode where it can."""
    q, kv, queries, sinks, mask = operands
    k_pages, v_pages = _numbers(kv, q.dtype)
    page_table, q_start, kv_length = queries.page_table, queries.start, queries.length
    batch, tokens, heads, width = q.shape
    kv_heads = k_pages.shape[1]
    # cuDNN aligns queries with the first keys, so a window would be in the wrong place.
    if tokens == 1 and mask is None and masking.window is None and _has_cudnn(q, v_pages, sinks, masking):
        length = jnp.minimum(kv_length, q_start + 1) if masking.causal else kv_length
        one_each = Queries(page_table, q_start, length, jnp.ones_like(length))
        o = _cudnn(q.swapaxes(1, 2), KVPages(k_pages, v_pages), one_each, masking, causal=False).swapaxes(1, 2)
        return jnp.where((length > 0)[:, None, None, None], o, jnp.zeros_like(o))
    k, v = (
        pages[page_table].transpose(0, 2, 1, 3, 4).reshape(batch, kv_heads, -1, pages.shape[-1])
        for pages in (k_pages, v_pages)
    )
    grouped = q.reshape(batch, tokens, kv_heads, -1, width)
    factors = dot_operands(grouped, k)
    s = jnp.einsum("bthgk,bhsk->bhgts", *factors, precision="highest", preferred_element_type=ACCUMULATOR)
    s = s.reshape(batch, heads, tokens, -1) * masking.scale
    if masking.soft_cap is not None:
        s = masking.soft_cap * jnp.tanh(s / masking.soft_cap)
    keys = jnp.arange(page_table.shape[1] * KV_BLOCK)[None, None, None, :]
    positions = (q_start[:, None] + jnp.arange(tokens)[None])[:, None, :, None]
    if masking.alibi_slopes is not None:
        slopes = jnp.asarray(masking.alibi_slopes, ACCUMULATOR)[None, :, None, None]
        s = s + slopes * (keys - positions).astype(ACCUMULATOR)
    is_present = keys < kv_length[:, None, None, None]
    visible = is_present
    if masking.causal:
        visible = visible & (keys <= positions)
    if masking.window is not None:
        visible = visible & (keys > positions - masking.window)
    if mask is not None:
        visible = visible & jnp.pad(mask, ((0, 0), (0, 0), (0, 0), (0, keys.size - mask.shape[-1])))
    s = jnp.where(visible, s, -jnp.inf)
    if sinks is not None:
        sink = jnp.broadcast_to(sinks.astype(ACCUMULATOR)[None, :, None, None], (*s.shape[:-1], 1))
        p = jax.nn.softmax(jnp.concatenate([sink, s], axis=-1), axis=-1)[..., 1:]
    else:
        p = jax.nn.softmax(s, axis=-1)
    p = jnp.where(visible, p, 0.0).astype(v.dtype).reshape(batch, kv_heads, -1, tokens, s.shape[-1])
    v = jnp.where(is_present.swapaxes(-1, -2), v, jnp.zeros_like(v))
    o = jnp.einsum("bhgts,bhsk->bthgk", *dot_operands(p, v), precision="highest", preferred_element_type=ACCUMULATOR)
    return o.reshape(batch, tokens, heads, -1).astype(q.dtype)


def ragged_attention(operands: AttentionOperands, *, masking: Masking) -> Array:
    """See `detjax.ops.attention`. cuDNN computes packed queries where it can; otherwise each row is a request."""
    q, kv, queries, sinks, _ = operands
    k_pages, v_pages = _numbers(kv, q.dtype)
    page_table, q_start, kv_length = queries.page_table, queries.start, queries.length
    first_row, count = queries.first_row, queries.count
    assert first_row is not None and count is not None
    request, index = request_of_rows(q.shape[0], first_row)
    rows, requests = q.shape[0], page_table.shape[0]
    position = q_start[request] + index
    if not _has_cudnn(q, v_pages, sinks, masking):
        row_by_row = AttentionOperands(q[:, None], KVPages(k_pages, v_pages), rows_as_requests(rows, queries), sinks)
        return attention(row_by_row, masking=masking)[:, 0]

    # cuDNN aligns queries with the first keys. So each query is placed at its position in its request, after one
    # unused row per earlier key; a call takes `together` requests.
    keys = page_table.shape[1] * KV_BLOCK
    together = min(requests, max(1, max(_PADDING * rows, _MIN_PADDED_ROWS) // keys))

    def attend(first: Array | int, o: Array) -> Array:
        """Adds the results of the requests from `first` on to the output."""
        requests_served = jnp.minimum(first + jnp.arange(together, dtype=jnp.int32), requests - 1)
        source = (first_row - q_start)[requests_served][:, None] + jnp.arange(keys, dtype=jnp.int32)[None]
        padded = q[jnp.clip(source, 0, rows - 1)].swapaxes(1, 2)
        length = jnp.where(count[requests_served] > 0, kv_length[requests_served], 0)
        table = page_table[requests_served]
        start: Any = np.zeros(together, np.int32)
        padded_queries = Queries(table, start, length, length)
        attended = _cudnn(padded, KVPages(k_pages, v_pages), padded_queries, masking, causal=masking.causal)
        slot = request - first
        new = attended[jnp.clip(slot, 0, together - 1), :, jnp.clip(position, 0, keys - 1)]
        return jnp.where(((slot >= 0) & (slot < together))[:, None, None], new, o)

    o = jnp.zeros_like(q)
    if together == requests:
        return attend(0, o)
    present = jnp.max(jnp.where(count > 0, jnp.arange(1, requests + 1), 0))
    return jax.lax.fori_loop(0, -(-present // together), lambda turn, o: attend(turn * together, o), o)


def _numbers(kv: KVPages, dtype: DTypeLike) -> tuple[Array, Array]:
    if not kv.quantized:
        return kv.numbers
    k, v = (pages.numbers(dtype) for pages in kv.quantized)
    return k, v


def _has_cudnn(q: Array, v_pages: Array, sinks: Array | None, masking: Masking) -> bool:
    width = q.shape[-1]
    return (
        backends.target() == "gpu"
        and q.dtype.name in _CUDNN_DTYPES
        and width % 8 == 0
        and width <= 256
        and v_pages.shape[-1] == width
        and sinks is None
        and masking.soft_cap is None
        and masking.alibi_slopes is None
    )


def _cudnn(q: Array, kv: KVPages, queries: Queries, masking: Masking, *, causal: bool) -> Array:
    """Returns cuDNN's attention of queries `[B, H, T, K]`; if causal, query `t` sees the keys up to position `t`."""
    # `cudnn.paged_attention` only accepts pools with as many pages as the page table has entries.
    (k_pages, v_pages), page_table = kv.numbers, queries.page_table
    assert queries.count is not None
    none = jnp.zeros(0, q.dtype)
    table = jnp.clip(page_table.astype(jnp.int32), 0, k_pages.shape[0] - 1)[:, None, :, None]
    mask_type = cudnn.MaskType.PADDING_CAUSAL if causal else cudnn.MaskType.PADDING
    return cudnn._dot_product_attention(
        q,
        k_pages,
        v_pages,
        none,
        queries.count.astype(jnp.int32),
        queries.length.astype(jnp.int32),
        none,
        none,
        table,
        table,
        masking.scale,
        0,
        0.0,
        (False, False),
        mask_type,
        cudnn.AttentionLayout.BNTH.value,
        masking.window,
        cudnn.check_cudnn_version(),
        False,
    )
