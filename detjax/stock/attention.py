"""Attention over a paged KV cache by XLA, and by cuDNN where that serves it."""

from typing import Final

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as cudnn  # JAX has no public name for paged attention
from jaxtyping import Array, DTypeLike

from detjax import backends
from detjax.contract import ACCUMULATOR, KV_BLOCK
from detjax.options import Masking
from detjax.portable.attention import request_of_rows
from detjax.portable.quantized_kv import QuantizedPages, dequantized
from detjax.stock.dot import dot_operands

DIFFERENTIATED_BY_JAX: Final = True

_CUDNN_DTYPES: Final = ("bfloat16", "float16")
_PADDING: Final = 4
"""Rows that packed queries take at most where they are padded, over those that they have."""
_LEAST_PADDED_ROWS: Final = 4096


def attention(
    q: Array,
    k_pages: Array | QuantizedPages,
    v_pages: Array | QuantizedPages,
    page_table: Array,
    q_start: Array,
    kv_length: Array,
    sinks: Array | None,
    mask: Array | None = None,
    *,
    masking: Masking,
) -> Array:
    """See `detjax.ops.attention`. Decode is cuDNN's where that can do it."""
    k_pages, v_pages = (_dequantized(pages, q.dtype) for pages in (k_pages, v_pages))
    batch, tokens, heads, width = q.shape
    kv_heads = k_pages.shape[1]
    # cuDNN lines queries up with the first keys: a window would lie there.
    if tokens == 1 and mask is None and masking.window is None and _has_cudnn(q, v_pages, sinks, masking):
        length = jnp.minimum(kv_length, q_start + 1) if masking.causal else kv_length
        where = page_table, jnp.ones_like(length), length
        o = _cudnn(q.swapaxes(1, 2), k_pages, v_pages, *where, masking, causal=False).swapaxes(1, 2)
        return jnp.where((length > 0)[:, None, None, None], o, jnp.zeros_like(o))
    k, v = (
        pages[page_table].transpose(0, 2, 1, 3, 4).reshape(batch, kv_heads, -1, pages.shape[-1])
        for pages in (k_pages, v_pages)
    )
    grouped = q.reshape(batch, tokens, kv_heads, -1, width)
    operands = dot_operands(grouped, k)
    s = jnp.einsum("bthgk,bhsk->bhgts", *operands, precision="highest", preferred_element_type=ACCUMULATOR)
    s = s.reshape(batch, heads, tokens, -1) * masking.scale
    if masking.soft_cap is not None:
        s = masking.soft_cap * jnp.tanh(s / masking.soft_cap)
    keys = jnp.arange(page_table.shape[1] * KV_BLOCK)[None, None, None, :]
    positions = (q_start[:, None] + jnp.arange(tokens)[None])[:, None, :, None]
    if masking.alibi_slopes is not None:
        slopes = jnp.asarray(masking.alibi_slopes, ACCUMULATOR)[None, :, None, None]
        s = s + slopes * (keys - positions).astype(ACCUMULATOR)
    own = keys < kv_length[:, None, None, None]
    visible = own
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
    v = jnp.where(own.swapaxes(-1, -2), v, jnp.zeros_like(v))
    o = jnp.einsum("bhgts,bhsk->bthgk", *dot_operands(p, v), precision="highest", preferred_element_type=ACCUMULATOR)
    return o.reshape(batch, tokens, heads, -1).astype(q.dtype)


def ragged_attention(
    q: Array,
    k_pages: Array | QuantizedPages,
    v_pages: Array | QuantizedPages,
    page_table: Array,
    q_row: Array,
    q_length: Array,
    q_start: Array,
    kv_length: Array,
    sinks: Array | None,
    *,
    masking: Masking,
) -> Array:
    """See `detjax.ops.ragged_attention`. cuDNN serves it where it can; elsewhere each row is a request of its own."""
    k_pages, v_pages = (_dequantized(pages, q.dtype) for pages in (k_pages, v_pages))
    request, index = request_of_rows(q.shape[0], q_row)
    rows, requests = q.shape[0], page_table.shape[0]
    position = q_start[request] + index
    if not _has_cudnn(q, v_pages, sinks, masking):
        is_own = (index >= 0) & (index < q_length[request])
        where = page_table[request], position, jnp.where(is_own, kv_length[request], 0)
        return attention(q[:, None], k_pages, v_pages, *where, sinks, masking=masking)[:, 0]

    # cuDNN lines queries up with the first keys. So they are put where they stand in their requests, behind as many
    # rows of no meaning as there are keys before them; as many requests at once as such rows have room for.
    keys = page_table.shape[1] * KV_BLOCK
    together = min(requests, max(1, max(_PADDING * rows, _LEAST_PADDED_ROWS) // keys))

    def attend(first: Array | int, o: Array) -> Array:
        """The output, with that of the requests from `first` on."""
        of = jnp.minimum(first + jnp.arange(together, dtype=jnp.int32), requests - 1)
        source = (q_row - q_start)[of][:, None] + jnp.arange(keys, dtype=jnp.int32)[None]
        padded = q[jnp.clip(source, 0, rows - 1)].swapaxes(1, 2)
        length = jnp.where(q_length[of] > 0, kv_length[of], 0)
        found = _cudnn(padded, k_pages, v_pages, page_table[of], length, length, masking, causal=masking.causal)
        slot = request - first
        mine = found[jnp.clip(slot, 0, together - 1), :, jnp.clip(position, 0, keys - 1)]
        return jnp.where(((slot >= 0) & (slot < together))[:, None, None], mine, o)

    o = jnp.zeros_like(q)
    if together == requests:
        return attend(0, o)
    present = jnp.max(jnp.where(q_length > 0, jnp.arange(1, requests + 1), 0))
    return jax.lax.fori_loop(0, -(-present // together), lambda turn, o: attend(turn * together, o), o)


def _dequantized(pages: Array | QuantizedPages, dtype: DTypeLike) -> Array:
    return dequantized(pages, dtype) if isinstance(pages, QuantizedPages) else pages


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


def _cudnn(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    page_table: Array,
    q_length: Array,
    kv_length: Array,
    masking: Masking,
    *,
    causal: bool,
) -> Array:
    """cuDNN's attention of queries `[B, H, T, K]`; if causal, query `t` sees the keys up to position `t`."""
    # Not `cudnn.paged_attention`: it accepts only pools with as many pages as the page table has entries.
    none = jnp.zeros(0, q.dtype)
    table = jnp.clip(page_table.astype(jnp.int32), 0, k_pages.shape[0] - 1)[:, None, :, None]
    mask_type = cudnn.MaskType.PADDING_CAUSAL if causal else cudnn.MaskType.PADDING
    return cudnn._dot_product_attention(
        q,
        k_pages,
        v_pages,
        none,
        q_length.astype(jnp.int32),
        kv_length.astype(jnp.int32),
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
