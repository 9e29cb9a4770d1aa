"""Attention on Hopper GPUs: one contract, served by two kernels and their gradients."""

from typing import Final

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from detjax import backends
from detjax.contract import KV_BLOCK, QUERY_UNIT
from detjax.numerics import round_up
from detjax.options import Masking
from detjax.pallas.hopper.attention import backward as hopper_backward
from detjax.pallas.hopper.attention import decode, prefill
from detjax.pallas.hopper.attention.dequantize import read_pages
from detjax.pallas.hopper.attention.mask import words_of
from detjax.pallas.hopper.attention.prefill import Tiles
from detjax.pallas.hopper.attention.warpgroups import TILE
from detjax.pallas.hopper.device import DTYPES
from detjax.portable.quantized_kv import QuantizedPages

WIDTHS: Final = (*range(16, 129, 16), 192, 256)
"""Columns of keys and of values."""


def forward(
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
    with_normalizers: bool = True,
) -> tuple[Array, Array | None]:
    """Output `[B, T, H, V]` and, if asked for, the log2 of rows' normalizers, `[H, N]` float32 in `_packed`'s order.

    See `ops.attention` for the mask, `[B or 1, H or 1, T, s]`; only prefill takes one.

    Raises:
        NotImplementedError: no kernel serves the dtype or the sizes.
    """
    _check(q, v_pages)
    operands = k_pages, v_pages, page_table, q_start, kv_length, sinks
    if not with_normalizers and mask is None and decode.serves(q, k_pages, v_pages):
        return decode.forward(q, *operands, masking=masking), None
    pools = _numbers(k_pages, v_pages, page_table, q_start, q.shape[1], kv_length, masking, q.dtype)
    operands = *pools, q_start, kv_length, sinks
    words = None if mask is None else words_of(mask, round_up(q.shape[1], TILE), page_table.shape[1] * KV_BLOCK)
    o, normalizers = prefill.forward(_packed(q), *operands, masking=masking, mask=words)
    return _unpacked(o, q), normalizers


def backward(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    page_table: Array,
    q_start: Array,
    kv_length: Array,
    sinks: Array | None,
    mask: Array | None,
    o: Array,
    log2_normalizers: Array,
    do: Array,
    *,
    masking: Masking,
) -> tuple[Array, Array, Array, Array | None]:
    """Gradients of q, of both page pools and of the sinks; a page belongs to one request."""
    operands = k_pages, v_pages, page_table, q_start, kv_length, sinks, _packed(o), log2_normalizers, _packed(do)
    dq, dk, dv, dsinks = hopper_backward.backward(_packed(q), *operands, masking=masking, mask=mask)
    return _unpacked(dq, q), dk, dv, None if sinks is None or dsinks is None else dsinks.astype(sinks.dtype)


def _packed(x: Array) -> Array:
    """`[B, T, H, K]` as `[N, H, K]`, requests one behind the other, each filled up to a multiple of `QUERY_UNIT`."""
    batch, tokens, *rest = x.shape
    padded = round_up(tokens, QUERY_UNIT)
    return jnp.pad(x, ((0, 0), (0, padded - tokens), (0, 0), (0, 0))).reshape(batch * padded, *rest)


def _unpacked(x: Array, like: Array) -> Array:
    """The inverse of `_packed`, with `like`'s requests and tokens."""
    batch, tokens = like.shape[:2]
    return x.reshape(batch, -1, *x.shape[1:])[:, :tokens]


def ragged(
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
    """Output `[N, H, V]` of queries `[N, H, K]` of requests that begin at `q_row` and have `q_length` rows each.

    Raises:
        NotImplementedError: no kernel serves the dtype or the sizes.
    """
    _check(q, v_pages)
    rows = q.shape[0]
    packed = jnp.pad(q, ((0, round_up(rows, QUERY_UNIT) - rows), (0, 0), (0, 0)))
    tiles = _ragged_tiles(packed.shape[0], q_row, q_length)
    pools = _numbers(k_pages, v_pages, page_table, q_start, q_length, kv_length, masking, q.dtype)
    operands = *pools, q_start, kv_length, sinks
    return prefill.forward(packed, *operands, masking=masking, tiles=tiles)[0][:rows]


def _numbers(
    k_pages: Array | QuantizedPages,
    v_pages: Array | QuantizedPages,
    page_table: Array,
    q_start: Array,
    q_length: Array | int,
    kv_length: Array,
    masking: Masking,
    dtype: DTypeLike,
) -> tuple[Array, Array, Array]:
    """Keys, values and page table as prefill takes them: of quantized pages those that some tile of queries visits."""
    if not (isinstance(k_pages, QuantizedPages) and isinstance(v_pages, QuantizedPages)):
        return k_pages, v_pages, page_table  # pyright: ignore[reportReturnType]
    last, end, first = q_start + q_length - 1, kv_length, jnp.zeros_like(kv_length)
    least_end = jnp.ones_like(kv_length)
    if masking.causal:
        end = jnp.minimum(end, last + 1)
    if masking.window is not None:
        # A tile visits at least one block, also where its window holds no key.
        first = jnp.maximum(q_start - (masking.window - 1), 0) // KV_BLOCK
        least_end = jnp.maximum(last - (masking.window - 1), 0) // KV_BLOCK + 1
    first = jnp.minimum(first, page_table.shape[1] - 1).astype(jnp.int32)
    end = jnp.minimum(jnp.maximum(-(-end // KV_BLOCK), least_end), page_table.shape[1]).astype(jnp.int32)
    (k, table), (v, _) = (read_pages(pages, page_table, first, end, dtype) for pages in (k_pages, v_pages))
    return k, v, table


def _ragged_tiles(rows: int, q_row: Array, q_length: Array) -> Tiles:
    """As many tiles as `rows` rows can need; those too many have no row."""
    requests = q_row.shape[0]
    needed = -(-q_length // TILE)
    ends = jnp.cumsum(needed)
    tile = jnp.arange(-(-rows // TILE) + requests, dtype=jnp.int32)
    request = jnp.minimum(jnp.sum(ends[None] <= tile[:, None], axis=1), requests - 1)
    # The last tile of a request sees most keys, and comes first.
    offset = (ends[request] - 1 - tile) * TILE
    count = jnp.where(tile < ends[-1], jnp.minimum(TILE, q_length[request] - offset), 0)
    offset = jnp.where(tile < ends[-1], offset, 0)
    return Tiles(*(x.astype(jnp.int32) for x in (request, q_row[request] + offset, offset, count)))


def _check(q: Array, v_pages: Array | QuantizedPages) -> None:
    sizes = {"q": q.shape[-1], "v_pages": v_pages.shape[-1]}
    if str(q.dtype) not in DTYPES:
        given, accepted = f"q has dtype {q.dtype}", f"{', '.join(DTYPES)}. Cast q and the pages"
    elif not all(size in WIDTHS for size in sizes.values()):
        given = " and ".join(f"{name} has {size} columns" for name, size in sizes.items())
        accepted = f"{', '.join(map(str, WIDTHS))}. Pad them with zeros"
    elif max(sizes.values()) > 128 and any(size % 64 for size in sizes.values()):
        given = " and ".join(f"{name} has {size} columns" for name, size in sizes.items())
        accepted = "multiples of 64 where either is above 128. Pad them with zeros"
    else:
        return
    raise NotImplementedError(
        f"attention: {given} on {backends.device_name()}; accepted by the backend 'hopper': {accepted}, or choose the "
        "backend 'portable', which takes them."
    )
