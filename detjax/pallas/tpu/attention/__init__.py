"""Attention on TPUs: one kernel for prefill, decode and everything between, and what surrounds it."""

from typing import Final

import jax.numpy as jnp
from jax import Array

from detjax import backends
from detjax.contract import KV_BLOCK
from detjax.options import Masking
from detjax.pallas.tpu.attention import kernel
from detjax.pallas.tpu.attention.kernel import Tiles, rows_of_a_tile
from detjax.pallas.tpu.device import check_dtypes
from detjax.portable import attention as portable_attention
from detjax.portable.quantized_kv import QuantizedPages

WIDTHS: Final = range(8, 257, 8)
"""Columns of keys and of values."""

MOST_SCALARS: Final = 240_000
"""Page numbers and integers of tiles in a call: of the 2**18 words for scalars the compiler takes some itself."""


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
    """Output `[B, T, H, V]` and, if asked for, the log2 of each row's normalizer, `[B, T, H]` float32.

    See `ops.attention` for the mask, `[B or 1, H or 1, T, s]`. It is spread over the rows of tiles, a byte for each key
    of the page table.

    Raises:
        NotImplementedError: the pages are quantized or have a width or a dtype that no kernel serves, or the page table
            has too many entries.
    """
    k_pages, v_pages = _served(q, k_pages, v_pages)
    batch, tokens, heads, width = q.shape
    per_tile = _tokens_of_a_tile(heads // k_pages.shape[1])
    count = -(-tokens // per_tile)
    x = jnp.pad(q, ((0, 0), (0, count * per_tile - tokens), (0, 0), (0, 0)))
    request = jnp.repeat(jnp.arange(batch, dtype=jnp.int32), count)
    offset = jnp.tile(jnp.arange(count, dtype=jnp.int32) * per_tile, batch)
    own = jnp.minimum(tokens - offset, per_tile)
    o, normalizers = _attended(
        x.reshape(batch * count, per_tile, heads, width),
        *(k_pages, v_pages, page_table, q_start[request] + offset, kv_length[request], request, own, sinks),
        None if mask is None else _by_tile(mask, heads, k_pages.shape[1], count * per_tile, page_table.shape[1]),
        masking=masking,
        with_normalizers=with_normalizers,
    )
    o = o.reshape(batch, count * per_tile, *o.shape[2:])[:, :tokens]
    if normalizers is not None:
        normalizers = normalizers.reshape(batch, count * per_tile, heads)[:, :tokens]
    return o, normalizers


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
        NotImplementedError: the pages are quantized or have a width or a dtype that no kernel serves, or the page table
            has too many entries.
    """
    k_pages, v_pages = _served(q, k_pages, v_pages)
    rows, requests = q.shape[0], q_row.shape[0]
    per_tile = _tokens_of_a_tile(q.shape[1] // k_pages.shape[1])
    # As many tiles as so many rows can need; those too many have no query.
    needed = -(-q_length // per_tile)
    ends = jnp.cumsum(needed)
    tile = jnp.arange(-(-rows // per_tile) + requests, dtype=jnp.int32)
    request = jnp.minimum(jnp.sum(ends[None] <= tile[:, None], axis=1), requests - 1)
    offset = (tile - (ends - needed)[request]) * per_tile
    own = jnp.clip(q_length[request] - offset, 0, per_tile)
    source = (q_row[request] + offset)[:, None] + jnp.arange(per_tile, dtype=jnp.int32)[None]
    o, _ = _attended(
        q[jnp.clip(source, 0, rows - 1)],
        *(k_pages, v_pages, page_table, q_start[request] + offset, kv_length[request], request, own, sinks),
        None,
        masking=masking,
        with_normalizers=False,
    )
    of_row, index = portable_attention.request_of_rows(rows, q_row)
    # Rows of no request get what any row has.
    place = (ends - needed)[of_row] * per_tile + jnp.maximum(index, 0)
    return o.reshape(-1, *o.shape[2:])[jnp.minimum(place, o.shape[0] * per_tile - 1)]


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
    log2_normalizer: Array,
    do: Array,
    *,
    masking: Masking,
) -> tuple[Array, Array, Array, Array | None]:
    """Gradients of q, of both page pools and of the sinks, by the portable backend's program."""
    operands = q, k_pages, v_pages, page_table, q_start, kv_length, sinks, mask, o, log2_normalizer, do
    return portable_attention.backward(*operands, masking=masking)


def _attended(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    page_table: Array,
    position: Array,
    kv_length: Array,
    request: Array,
    own: Array,
    sinks: Array | None,
    mask: Array | None,
    *,
    masking: Masking,
    with_normalizers: bool,
) -> tuple[Array, Array | None]:
    """Outputs `[tiles, tokens, H, V]` and normalizers `[tiles, tokens, H]` of tiles of queries `[tiles, tokens, H, K]`.

    The arrays of integers have, for each tile, the position of its first query, its request and that one's length, and
    how many of its queries there are.
    """
    tiles, tokens, heads, width = q.shape
    kv_heads, columns = k_pages.shape[1], page_table.shape[1]
    group = heads // kv_heads
    unused = rows_of_a_tile(group) - tokens * group
    scalars = page_table.size + len(Tiles._fields) * tiles
    if scalars > MOST_SCALARS:
        raise NotImplementedError(
            f"attention: a page table {page_table.shape} and {tiles} tiles of queries, {scalars} integers in all, on "
            f"{backends.device_name()}; accepted by the backend 'tpu': {MOST_SCALARS}. Call it for fewer requests."
        )
    q = q.reshape(tiles, tokens, kv_heads, group, width).transpose(0, 2, 1, 3, 4)
    q = jnp.pad(q.reshape(tiles, kv_heads, tokens * group, width), ((0, 0), (0, 0), (0, unused), (0, 0)))

    first, end = jnp.zeros_like(position), kv_length
    if masking.causal:
        end = jnp.minimum(end, position + own)
    if masking.window is not None:
        first = jnp.clip((position - (masking.window - 1)) // KV_BLOCK, 0, columns - 1)
    # Blocks that no query of the tile sees would add exact zeros.
    blocks = jnp.where(own > 0, jnp.clip(-(-end // KV_BLOCK), 0, columns) - first, 0)
    where = Tiles(request * columns, position, kv_length, first, jnp.maximum(blocks, 0), own * group)
    # What is behind a request's length may be any number; no page is fetched that does not exist.
    table = jnp.clip(page_table.reshape(-1), 0, k_pages.shape[0] - 1)
    o, normalizers = kernel.attend(
        q, k_pages, v_pages, table, where, sinks, mask, group=group, masking=masking, with_normalizers=with_normalizers
    )

    o = o[:, :, : tokens * group].reshape(tiles, kv_heads, tokens, group, -1).transpose(0, 2, 1, 3, 4)
    o = o.reshape(tiles, tokens, heads, -1)
    if normalizers is not None:
        normalizers = normalizers[:, :, : tokens * group].reshape(tiles, kv_heads, tokens, group)
        normalizers = normalizers.transpose(0, 2, 1, 3).reshape(tiles, tokens, heads)
    return o, normalizers


def _by_tile(mask: Array, heads: int, kv_heads: int, tokens: int, blocks: int) -> Array:
    """A mask `[b, m, T, s]` for so many tokens, as the kernel takes it: `[b * tiles, h or 1, rows, keys]`."""
    group = heads // kv_heads
    batch, masks, given, keys = mask.shape
    per_tile = _tokens_of_a_tile(group)
    mask = jnp.pad(mask.astype(jnp.int8), ((0, 0), (0, 0), (0, tokens - given), (0, blocks * KV_BLOCK - keys)))
    mask = mask.reshape(batch, *((1, 1) if masks == 1 else (kv_heads, group)), -1, per_tile, blocks * KV_BLOCK)
    mask = mask.transpose(0, 3, 1, 4, 2, 5)
    mask = jnp.broadcast_to(mask, (*mask.shape[:4], group, mask.shape[5]))
    mask = mask.reshape(-1, mask.shape[2], per_tile * group, mask.shape[5])
    return jnp.pad(mask, ((0, 0), (0, 0), (0, rows_of_a_tile(group) - mask.shape[2]), (0, 0)))


def _tokens_of_a_tile(group: int) -> int:
    return rows_of_a_tile(group) // group


def _served(q: Array, k_pages: Array | QuantizedPages, v_pages: Array | QuantizedPages) -> tuple[Array, Array]:
    """The pages, once it is known that the kernel serves them."""
    check_dtypes("attention", q)
    widths = {"q": q.shape[-1], "v_pages": v_pages.shape[-1]}
    if isinstance(k_pages, QuantizedPages) or isinstance(v_pages, QuantizedPages):
        given, accepted = "quantized pages", f"pages of {q.dtype}"
    elif not all(width in WIDTHS for width in widths.values()):
        given = " and ".join(f"{name} with {width} columns" for name, width in widths.items())
        accepted = f"multiples of {WIDTHS.step} up to {WIDTHS[-1]}. Pad them with zeros"
    else:
        return k_pages, v_pages
    raise NotImplementedError(
        f"attention: {given} on {backends.device_name()}; accepted by the backend 'tpu': {accepted}, or choose the "
        "backend 'portable', which takes them."
    )
