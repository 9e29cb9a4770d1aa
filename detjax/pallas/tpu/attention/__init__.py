"""Attention on TPUs: one kernel for prefill, decode and everything in between, and the tiling of its queries."""

from typing import Final

import jax.numpy as jnp
from jax import Array

from detjax.operands.attention import AttentionOperands
from detjax.operands.kv_pages import KVPages, request_of_rows
from detjax.operands.numerics import ceil_div
from detjax.operands.options import Masking
from detjax.pallas.tpu.attention import tiles
from detjax.pallas.tpu.attention.kernel import Operands, Problem, Schedule, default_schedule
from detjax.pallas.tpu.attention.tiles import QueryTiles, mask_of_tiles, problem_of
from detjax.pallas.tpu.device import check_dtypes
from detjax.portable import attention as portable_attention
from detjax.runtime import backends

WIDTHS: Final = range(8, 257, 8)
"""Widths of keys and values that the kernel serves."""

LATENT_WIDTHS: Final = range(8, 577, 8)
"""Widths that it serves where values are columns of their keys."""

# The gradients are the portable backend's program.
backward: Final = portable_attention.backward
ragged_backward: Final = portable_attention.ragged_backward


def forward(
    operands: AttentionOperands,
    *,
    masking: Masking,
    with_normalizers: bool = True,
    schedule: Schedule | None = None,
) -> tuple[Array, Array | None]:
    """Returns the output `[B, T, H, V]` and, if requested, the log2 of each row's normalizer, `[B, T, H]` float32.

    See `ops.attention` for the mask, `[B or 1, H or 1, T, s]`. It is expanded to the rows of tiles, with a byte for
    each key of the page table.

    Raises:
        NotImplementedError: the pages are quantized or have a width or a dtype that the kernel does not serve, or the
            page table has too many entries.
        ValueError: the schedule does not fit the problem.
    """
    q, kv, queries, sinks, mask = operands
    _check_served(q, kv)
    page_table, q_start, kv_length = queries.page_table, queries.start, queries.length
    batch, tokens, heads, width = q.shape
    problem, schedule = _schedule(q, kv, schedule)
    tile_tokens = schedule.tile_tokens(problem)
    count = ceil_div(tokens, tile_tokens)
    x = jnp.pad(q, ((0, 0), (0, count * tile_tokens - tokens), (0, 0), (0, 0)))
    request = jnp.repeat(jnp.arange(batch, dtype=jnp.int32), count)
    offset = jnp.tile(jnp.arange(count, dtype=jnp.int32) * tile_tokens, batch)
    present = jnp.minimum(tokens - offset, tile_tokens)
    x = x.reshape(batch * count, tile_tokens, heads, width)
    query_tiles = QueryTiles(q_start[request] + offset, kv_length[request], request, present)
    if mask is not None:
        mask = mask_of_tiles(mask, problem, schedule, count, page_table.shape[1])
    o, normalizers = tiles.attend(
        Operands(x, *kv, sinks, masking.alibi_slopes, mask),
        page_table,
        query_tiles,
        masking=masking,
        with_normalizers=with_normalizers,
        schedule=schedule,
    )
    o = o.reshape(batch, count * tile_tokens, *o.shape[2:])[:, :tokens]
    if normalizers is not None:
        normalizers = normalizers.reshape(batch, count * tile_tokens, heads)[:, :tokens]
    return o, normalizers


def ragged(operands: AttentionOperands, *, masking: Masking, schedule: Schedule | None = None) -> Array:
    """Returns the output `[N, H, V]` of packed queries `[N, H, K]`. Raises the errors of `forward`."""
    return _ragged(operands, masking, schedule, with_normalizers=False)[0]


def ragged_with_normalizers(operands: AttentionOperands, *, masking: Masking) -> tuple[Array, Array | None]:
    """Returns `ragged`, and the log2 of each row's normalizer, `[N, H]` float32."""
    return _ragged(operands, masking, None, with_normalizers=True)


def _ragged(
    operands: AttentionOperands, masking: Masking, schedule: Schedule | None, *, with_normalizers: bool
) -> tuple[Array, Array | None]:
    q, kv, queries, sinks, _ = operands
    _check_served(q, kv)
    page_table, q_start, kv_length = queries.page_table, queries.start, queries.length
    q_row, q_length = queries.first_row, queries.count
    assert q_row is not None and q_length is not None
    rows, requests = q.shape[0], q_row.shape[0]
    problem, schedule = _schedule(q, kv, schedule)
    tile_tokens = schedule.tile_tokens(problem)
    # The number of tiles is an upper bound for any division of the rows among requests. Surplus tiles have no query.
    needed = -(-q_length // tile_tokens)
    ends = jnp.cumsum(needed)
    tile = jnp.arange(ceil_div(rows, tile_tokens) + requests, dtype=jnp.int32)
    request = jnp.minimum(jnp.sum(ends[None] <= tile[:, None], axis=1), requests - 1)
    offset = (tile - (ends - needed)[request]) * tile_tokens
    present = jnp.clip(q_length[request] - offset, 0, tile_tokens)
    source = (q_row[request] + offset)[:, None] + jnp.arange(tile_tokens, dtype=jnp.int32)[None]
    x = q[jnp.clip(source, 0, rows - 1)]
    query_tiles = QueryTiles(q_start[request] + offset, kv_length[request], request, present)
    results = tiles.attend(
        Operands(x, *kv, sinks, masking.alibi_slopes, None),
        page_table,
        query_tiles,
        masking=masking,
        with_normalizers=with_normalizers,
        schedule=schedule,
    )
    request, index = request_of_rows(rows, q_row)
    # Padding rows get the result of some other row.
    place = (ends - needed)[request] * tile_tokens + jnp.maximum(index, 0)
    place = jnp.minimum(place, len(x) * tile_tokens - 1)
    o, normalizers = (None if y is None else y.reshape(-1, *y.shape[2:])[place] for y in results)
    assert o is not None
    return o, normalizers


def _schedule(q: Array, kv: KVPages, schedule: Schedule | None) -> tuple[Problem, Schedule]:
    """Returns the kernel's problem, and the given or the default schedule after checking that it fits."""
    problem = problem_of(q, kv.kv_heads)
    schedule = schedule or default_schedule(problem)
    schedule.check(problem)
    return problem, schedule


def _check_served(q: Array, kv: KVPages) -> None:
    """Raises NotImplementedError if the pages are quantized or have an unsupported width or dtype."""
    check_dtypes("attention", q)
    widths = {"q": q.shape[-1], "v_pages": kv.value_width}
    served = LATENT_WIDTHS if kv.values_are_keys else WIDTHS
    if kv.quantized:
        given, accepted = "quantized pages", f"pages of {q.dtype}. Dequantize them"
    elif not all(width in served for width in widths.values()):
        given = " and ".join(f"{name} with {width} columns" for name, width in widths.items())
        accepted = f"multiples of {served.step} up to {served[-1]}. Pad them with zeros"
    else:
        return
    raise NotImplementedError(
        f"attention: {given} on {backends.device_name()}; accepted by the backend 'tpu': {accepted}, or choose the "
        "backend 'portable', which takes them."
    )
