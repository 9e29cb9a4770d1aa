"""Attention over a paged KV cache in plain JAX, as blocks of keys at absolute positions, merged left to right."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, DTypeLike

from detjax.contract import (
    ACCUMULATOR,
    KEY_GROUPS,
    KEY_LANES,
    KV_BLOCK,
    LOWEST_MAXIMUM,
    PORTABLE_ROWS,
    SPAN_BLOCKS,
    SPAN_WIDTH,
)
from detjax.operands.attention import AttentionOperands
from detjax.operands.kv_pages import KeyColumns, KVPages, Queries, rows_as_requests
from detjax.operands.options import Masking
from detjax.operands.rounding import log2_scale, rounded, soft_cap_exponent
from detjax.portable.tiles import dot, final_sum, fold_rows, initial_sum, map_rows, row_sum
from detjax.runtime import varying

type Gradients = tuple[Array, KVPages, Array | None]
"""The gradients of q, the pages and the sinks."""


class _Tile(NamedTuple):
    """The position of a tile's rows in their request. Row `r` of a request is head `r % G` of its token `r // G`."""

    page_table: Array
    q_start: Array
    kv_length: Array
    first_row: Array
    request: Array

    def positions(self, rows: int, group: int) -> Array:
        """Absolute positions `[rows]`."""
        return self.q_start + (self.first_row + jnp.arange(rows, dtype=jnp.int32)) // group

    def by_row(self, values: Array, rows: int) -> Array:
        """Values of heads, `[h, G]`, for the rows of the tile, `[h, rows, 1]`."""
        return values[:, (self.first_row + jnp.arange(rows, dtype=jnp.int32)) % values.shape[1], None]

    def by_key(self, mask: Array, block: Array, rows: int, heads: int, group: int) -> Array:
        """The part of a mask `[B, h, G, T, s]`, with B, h and G possibly 1, for a block's keys: `[h, rows, S]`."""
        mask = lax.dynamic_slice_in_dim(mask[jnp.minimum(self.request, len(mask) - 1)], block * KV_BLOCK, KV_BLOCK, 3)
        row = self.first_row + jnp.arange(rows, dtype=jnp.int32)
        # The mask of padding rows is undefined.
        mask = mask[:, row % group % mask.shape[1], jnp.minimum(row // group, mask.shape[2] - 1)]
        # Broadcast whatever axes the mask has, so that the code that uses the scores is compiled the same.
        return lax.optimization_barrier(jnp.broadcast_to(mask, (heads, rows, KV_BLOCK)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _PerHead:
    """Values of the query heads, `[h, G]`, and the mask, `[B, h, G, T, s]` with s whole blocks."""

    sinks: Array | None
    slopes: Array | None
    mask: Array | None
    group: int = dataclasses.field(metadata={"static": True})


class _GradientRows(NamedTuple):
    """The arrays of query rows that gradients are computed from; `log2_normalizer` has a last axis of 1."""

    q: Array
    do: Array
    o: Array
    log2_normalizer: Array


@dataclasses.dataclass(frozen=True, eq=False)
class _TileGradients:
    """The steps of the backward pass for one tile of query rows. See `backward` for the formulas."""

    rows: _GradientRows
    tile: _Tile
    kv: KVPages
    per_head: _PerHead
    masking: Masking

    @classmethod
    def from_rows(
        cls, rows: tuple[_GradientRows, _Tile], shared: tuple[KVPages, _PerHead], masking: Masking
    ) -> "_TileGradients":
        """Takes one tile's arguments from `map_rows` and `fold_rows`, with a leading axis of 1 on `rows`."""
        operands, tile = jax.tree.map(lambda leaf: leaf[0], rows)
        return cls(operands, tile, *shared, masking)

    def query_gradient(self) -> Array:
        """Returns dq `[h, rows, K]`."""
        q = self.rows.q
        dq = varying.fori_loop(*self._blocks(), self._add_block_to_queries, jnp.zeros(q.shape, ACCUMULATOR))
        return rounded(dq * np.float32(self.masking.scale), q.dtype)

    def add_to_pages(self, pools: tuple[Array, Array]) -> tuple[Array, Array]:
        """Adds the tile's shares to dk and dv, `[P, H, S, K]`; heads are in groups of one."""
        return varying.fori_loop(*self._blocks(), self._add_block_to_pages, pools)

    def add_to_sinks(self, dsinks: Array) -> Array:
        """Adds the tile's share to the gradient `[H]` of the sinks; heads are in groups of one."""
        if self.per_head.sinks is None:
            return dsinks
        q, do, o, log2_normalizer = self.rows
        share = jnp.exp2(self.tile.by_row(self.per_head.sinks, q.shape[1]) * log2_scale(1.0) - log2_normalizer)
        return dsinks - jnp.sum(share * _delta(do, o), axis=(1, 2))

    def _add_block_to_queries(self, block: Array, dq: Array) -> Array:
        k, v = self._load(block)
        _, ds = self._score_gradients(k, v, block)
        return dq + dot(ds, k, (2, 1), batched=True)

    def _add_block_to_pages(self, block: Array, pools: tuple[Array, Array]) -> tuple[Array, Array]:
        dk, dv = pools
        group = self.rows.q.shape[0] // self.kv.kv_heads
        k, v = (jnp.repeat(x, group, axis=0) for x in self._load(block))
        p, ds = self._score_gradients(k, v, block)
        page = self.tile.page_table[block]
        dk = dk.at[page].add(dot(ds, self.rows.q, (1, 1), batched=True))
        dv = dv.at[page].add(dot(p, self.rows.do, (1, 1), batched=True))
        return dk, dv

    def _score_gradients(self, k: Array, v: Array, block: Array) -> tuple[Array, Array]:
        """Returns the probabilities, and the gradient of the scaled scores before the soft cap: `[h, rows, S]`."""
        q, do, o, log2_normalizer = self.rows
        s, c, cap_slope = _scores(q, k, block, self.tile, self.per_head, self.masking)
        p = jnp.exp2(s * c - log2_normalizer)
        ds = p * (dot(do, v, (2, 2), batched=True) - _delta(do, o)) * cap_slope
        return rounded(p, do.dtype), rounded(ds, q.dtype)

    def _blocks(self) -> tuple[Array, Array]:
        return _visible_blocks(self.tile, self.rows.q.shape[1], self.per_head.group, self.masking)

    def _load(self, block: Array) -> tuple[Array, Array]:
        return _block(block, self.tile, self.kv, self.rows.q.dtype)


def forward(operands: AttentionOperands, *, masking: Masking, with_normalizers: bool = True) -> tuple[Array, Array]:
    """Returns the output `[B, T, H, V]` and the log2 of each row's normalizer, `[B, T, H]` float32.

    A row without keys has a normalizer of 0. Normalizers cost next to nothing here, so they are always returned. See
    `ops.attention` for the mask, `[B or 1, H or 1, T, s]`.
    """
    del with_normalizers
    q, kv, queries, sinks, mask = operands
    heads, group = q.shape[2], q.shape[2] // kv.kv_heads

    def attend(rows: tuple[Array, _Tile], shared: tuple[KVPages, _PerHead]) -> tuple[Array, Array]:
        q, tile = jax.tree.map(lambda leaf: leaf[0], rows)
        kv, per_head = shared

        def merge(block: Array, state: _State) -> _State:
            k, v = _block(block, tile, kv, q.dtype)
            s, c, _ = _scores(q, k, block, tile, per_head, masking)
            m_b = jnp.maximum(jnp.max(s, axis=-1, keepdims=True) * c, LOWEST_MAXIMUM)
            p = jnp.exp2(s * c - m_b)
            o_b = dot(rounded(p, v.dtype), v, (2, 1), batched=True)
            return _merged(state, _State(o_b, block_sum(p), m_b))

        def merge_span(span: Array, state: _State) -> _State:
            begin = jnp.maximum(span * SPAN_BLOCKS, first)
            part = varying.fori_loop(begin, jnp.minimum((span + 1) * SPAN_BLOCKS, end), merge, _initial(*shape, tile))
            return _merged(state, part)

        shape = q, kv.value_width
        first, end = _visible_blocks(tile, q.shape[1], group, masking)
        state = _initial(*shape, tile, per_head.sinks)
        if kv.value_width <= SPAN_WIDTH:
            o, total, m = varying.fori_loop(first, end, merge, state)
        else:
            o, total, m = varying.fori_loop(first // SPAN_BLOCKS, -(-end // SPAN_BLOCKS), merge_span, state)
        empty = total == 0
        total = jnp.where(empty, 1.0, total)
        o = rounded(jnp.where(empty, 0.0, o * (1.0 / total)), q.dtype)
        o = jnp.where(o == 0, jnp.zeros_like(o), o)
        log2_normalizer = jnp.where(empty, 0.0, m + jnp.log2(total))
        return o[None], log2_normalizer[None]

    rows = _packed(q, group), _tiles(q, group, queries)
    shared = kv, _per_head(sinks, mask, queries.page_table.shape[1], masking, heads, group)
    o, log2_normalizer = map_rows(attend, rows, shared, size=1)
    return _unpacked(o, q.shape, group), _unpacked(log2_normalizer, q.shape, group)[..., 0]


def ragged(operands: AttentionOperands, *, masking: Masking) -> Array:
    """Returns the output `[N, H, V]` of packed queries `[N, H, K]`: each row is computed as a separate request."""
    return ragged_with_normalizers(operands, masking=masking)[0]


def ragged_with_normalizers(operands: AttentionOperands, *, masking: Masking) -> tuple[Array, Array]:
    """Returns the output of packed queries, and the log2 of each row's normalizer, `[N, H]`; see `forward`."""
    q = operands.q
    row_by_row = operands._replace(q=q[:, None], queries=rows_as_requests(q.shape[0], operands.queries))
    o, log2_normalizer = forward(row_by_row, masking=masking)
    return o[:, 0], log2_normalizer[:, 0]


def backward(
    operands: AttentionOperands,
    output: tuple[Array, Array],
    do: Array,
    sinks_sum: Array | None = None,
    *,
    masking: Masking,
) -> Gradients:
    """Returns the gradients of q, of the pages and of the sinks.

    With `p` the probabilities of a query, `o` its output and `do` the output's gradient,

        delta = sum(do * o)
        ds    = p * (do . v - delta), times the soft cap's slope
        dq    = scale * sum over keys of ds * k
        dk    = scale * sum over queries of ds * q
        dv    = sum over queries of p * do
        dsink = -sum over queries of p_sink * delta, with p_sink the sink's share of the softmax

    If values are columns of the keys, the gradient of such a column is the sum `rn(dk) + dv`, rounded once more.

    `dq` adds blocks of keys in ascending order. `dk` and `dv` add, for each query head, the requests in order and their
    tokens ascending, `PORTABLE_ROWS` in one step; then the heads of a group, left to right.

    Args:
        operands: the operands of `forward`.
        output: the results of `forward`.
        do: the gradient of the output.
        sinks_sum: a float32 sum to which the gradient of the sinks is added; None: the rounded gradient is returned.
        masking: see `forward`.
    """
    (q, kv, queries, sinks, mask), (o, log2_normalizer) = operands, output
    rows = _GradientRows(q, do, o, log2_normalizer[..., None])
    per_head = functools.partial(_per_head, sinks, mask, queries.page_table.shape[1], masking, q.shape[2])
    # Every query head is a separate group here, so that its dk and dv are summed separately.
    tiles = _GradientRows(*(_packed(x, 1) for x in rows)), _tiles(q, 1, queries)
    dkv, dsinks = _page_gradients(tiles, (kv, per_head(1)), sinks_sum, masking)
    dq = _query_gradients(rows, queries, (kv, per_head(q.shape[2] // kv.kv_heads)), masking)
    return dq, dkv, None if sinks is None else final_sum(dsinks, sinks_sum, sinks)


def ragged_backward(
    operands: AttentionOperands,
    output: tuple[Array, Array],
    do: Array,
    sinks_sum: Array | None = None,
    *,
    masking: Masking,
) -> Gradients:
    """Returns the gradients of packed queries, of the pages and of the sinks, with the bits of `backward`.

    `output` is the result of `ragged_with_normalizers`; see `backward` for the other arguments.
    """
    (q, kv, queries, sinks, _), (o, log2_normalizer) = operands, output
    rows = _GradientRows(q, do, o, log2_normalizer[..., None])
    per_head = functools.partial(_per_head, sinks, None, queries.page_table.shape[1], masking, q.shape[1])
    dkv, dsinks = _page_gradients(_gathered_tiles(rows, queries), (kv, per_head(1)), sinks_sum, masking)
    requests = rows_as_requests(q.shape[0], queries)
    shared = kv, per_head(q.shape[1] // kv.kv_heads)
    dq = _query_gradients(_GradientRows(*(x[:, None] for x in rows)), requests, shared, masking)[:, 0]
    return dq, dkv, None if sinks is None else final_sum(dsinks, sinks_sum, sinks)


def _query_gradients(
    rows: _GradientRows, queries: Queries, shared: tuple[KVPages, _PerHead], masking: Masking
) -> Array:
    """Returns dq `[B, T, H, K]` of rectangular queries."""
    group = rows.q.shape[2] // shared[0].kv_heads
    tiles = _GradientRows(*(_packed(x, group) for x in rows)), _tiles(rows.q, group, queries)

    def gradient(tile: tuple[_GradientRows, _Tile], shared: tuple[KVPages, _PerHead]) -> Array:
        return _TileGradients.from_rows(tile, shared, masking).query_gradient()[None]

    return _unpacked(map_rows(gradient, tiles, shared, size=1), rows.q.shape, group)


def _page_gradients(
    tiles: tuple[_GradientRows, _Tile], shared: tuple[KVPages, _PerHead], sinks_sum: Array | None, masking: Masking
) -> tuple[KVPages, Array]:
    """Returns dk and dv, and the gradient `[H]` of the sinks in float32, of tiles in which every head is a group."""
    kv, heads = shared[0], tiles[0].q.shape[1]
    zeros = [jnp.zeros((x.shape[0], heads, *x.shape[2:]), ACCUMULATOR) for x in kv.numbers]

    def add_tile(
        carry: tuple[Array, Array, Array], tile: tuple[_GradientRows, _Tile], shared: tuple[KVPages, _PerHead]
    ) -> tuple[Array, Array, Array]:
        gradients = _TileGradients.from_rows(tile, shared, masking)
        return *gradients.add_to_pages(carry[:2]), gradients.add_to_sinks(carry[2])

    initial = *zeros, initial_sum(sinks_sum, (heads,))
    dk, dv, dsinks = fold_rows(add_tile, initial, tiles, shared, size=1)
    group, (k_pages, v_pages) = heads // kv.kv_heads, kv.numbers
    dk, dv = _sum_of_group(dk, group) * np.float32(masking.scale), _sum_of_group(dv, group)
    if isinstance(kv.v, KeyColumns):
        # The barrier keeps the product from being fused with the sum.
        dk, dv = lax.optimization_barrier((dk, dv))
        dk = dk.at[..., : kv.v.width].add(dv)
        return KVPages(rounded(dk, k_pages.dtype), kv.v), dsinks
    return KVPages(rounded(dk, k_pages.dtype), rounded(dv, v_pages.dtype)), dsinks


def _gathered_tiles(rows: _GradientRows, queries: Queries) -> tuple[_GradientRows, _Tile]:
    """Returns packed rows `[N, H, K]` as the tiles that `_packed` and `_tiles` make of rectangular ones, by head.

    The last tiles may be padding: they belong to no request and see no key.
    """
    assert queries.first_row is not None and queries.count is not None
    requests, count = queries.count.shape[0], rows.q.shape[0]
    ends = jnp.cumsum(-(-queries.count // PORTABLE_ROWS))
    tile = jnp.arange(-(-count // PORTABLE_ROWS) + requests, dtype=jnp.int32)
    request = jnp.minimum(jnp.searchsorted(ends, tile, side="right").astype(jnp.int32), requests - 1)
    first = (tile - jnp.where(request > 0, ends[request - 1], 0)) * PORTABLE_ROWS
    offset = first[:, None] + jnp.arange(PORTABLE_ROWS, dtype=jnp.int32)[None]
    is_present = (offset < queries.count[request][:, None]) & (tile < ends[-1])[:, None]
    row = jnp.clip(queries.first_row[request][:, None] + offset, 0, count - 1)

    def gathered(x: Array) -> Array:
        x = jnp.where(is_present[:, :, None, None], x[row], jnp.zeros((), x.dtype))
        return x.transpose(0, 2, 1, 3)

    length = jnp.where(tile < ends[-1], queries.length[request], 0)
    tiles = _Tile(queries.page_table[request], queries.start[request], length, first, request)
    return _GradientRows(*(gathered(x) for x in rows)), tiles


def block_sum(p: Array) -> Array:
    """Sums `[..., 1]` of `[..., KV_BLOCK]`, float32, in the order of `contract.KEY_LANES`.

    As in `row_sum`, every addition is written out, and a barrier keeps products in `p` from being fused with them.
    """
    p = lax.optimization_barrier(p.reshape(*p.shape[:-1], -1, KEY_GROUPS, 2, KEY_LANES))
    halves = range(p.shape[-4])
    p = functools.reduce(jnp.add, [p[..., half, :, pair, :] for half in halves for pair in range(2)])
    p = functools.reduce(jnp.add, [p[..., group, :] for group in range(KEY_GROUPS)])
    while p.shape[-1] > 1:
        p = p[..., 0::2] + p[..., 1::2]
    return p


def _delta(do: Array, o: Array) -> Array:
    """Row sums of `do * o`: what the softmax's own gradient subtracts."""
    return row_sum(do.astype(ACCUMULATOR) * o.astype(ACCUMULATOR))


class _State(NamedTuple):
    """The merged state of a tile's keys: sums of values `[h, rows, V]`; of probabilities, and maxima `[h, rows, 1]`."""

    o: Array
    total: Array
    m: Array


def _initial(q: Array, width: int, tile: _Tile, sinks: Array | None = None) -> _State:
    """The state before the first block. A sink is a key without a value that precedes all others."""
    shape = q.shape[:2]
    o = jnp.zeros((*shape, width), ACCUMULATOR)
    if sinks is None:
        return _State(o, jnp.zeros((*shape, 1), ACCUMULATOR), jnp.full((*shape, 1), LOWEST_MAXIMUM, ACCUMULATOR))
    m = jnp.maximum(tile.by_row(sinks, shape[1]) * log2_scale(1.0), LOWEST_MAXIMUM)
    return _State(o, jnp.ones((*shape, 1), ACCUMULATOR), m)


def _merged(state: _State, part: _State) -> _State:
    """Merges the state of the following keys into a state."""
    m = jnp.maximum(state.m, part.m)
    a, b = jnp.exp2(state.m - m), jnp.exp2(part.m - m)
    # The products of the new part are rounded before they are added; the running ones may be fused with the sum.
    o_b, l_b = lax.optimization_barrier((part.o * b, part.total * b))
    return _State(state.o * a + o_b, state.total * a + l_b, m)


def _scores(
    q: Array, k: Array, block: Array, tile: _Tile, per_head: _PerHead, masking: Masking
) -> tuple[Array, np.float32, Array | float]:
    """Masked scores `s [h, rows, S]`, `c` such that exponents are `s * c`, and the soft cap's slope at each score."""
    s, c, cap_slope = dot(q, k, (2, 2), batched=True), log2_scale(masking.scale), 1.0
    positions = tile.positions(q.shape[1], per_head.group)[:, None]
    keys = (block * KV_BLOCK + jnp.arange(KV_BLOCK))[None]
    if masking.soft_cap is not None or per_head.slopes is not None:
        # Barriers keep a product from being merged with the next one, or fused with the following sum.
        s, c = lax.optimization_barrier(s * np.float32(masking.scale)), log2_scale(1.0)
    if masking.soft_cap is not None:
        bent = 1.0 - 2.0 / (1.0 + jnp.exp2(s * soft_cap_exponent(masking.soft_cap)))
        s, cap_slope = lax.optimization_barrier(np.float32(masking.soft_cap) * bent), 1.0 - bent * bent
    if per_head.slopes is not None:
        s = s + tile.by_row(per_head.slopes, q.shape[1]) * (keys - positions).astype(ACCUMULATOR)[None]
    visible = keys < tile.kv_length
    if masking.causal:
        visible = visible & (keys <= positions)
    if masking.window is not None:
        visible = visible & (keys > positions - masking.window)
    visible = visible[None]
    if per_head.mask is not None:
        visible = visible & tile.by_key(per_head.mask, block, q.shape[1], q.shape[0], per_head.group)
    # Code that uses the scores is compiled the same, whatever masks them.
    s, visible = lax.optimization_barrier((s, jnp.broadcast_to(visible, s.shape)))
    return lax.optimization_barrier(jnp.where(visible, s, -jnp.inf)), c, cap_slope


def _visible_blocks(tile: _Tile, rows: int, group: int, masking: Masking) -> tuple[Array, Array]:
    """First and end of the blocks that any row of the tile may see; the others would add exact zeros."""
    positions = tile.positions(rows, group)
    first, end = jnp.int32(0), tile.kv_length
    if masking.causal:
        end = jnp.minimum(end, positions[-1] + 1)
    if masking.window is not None:
        first = jnp.maximum(positions[0] - masking.window + 1, 0) // KV_BLOCK
    return first, -(-end // KV_BLOCK)


def _block(block: Array, tile: _Tile, kv: KVPages, dtype: DTypeLike) -> tuple[Array, Array]:
    """Keys and values `[h, S, K]` of a block, quantized ones in the given dtype.

    Zeros replace the entries after the request's length in its last page, which are undefined.
    """
    page = tile.page_table[block]
    is_present = (block * KV_BLOCK + jnp.arange(KV_BLOCK) < tile.kv_length)[None, :, None]
    k, v = kv.page(page, dtype)
    return jnp.where(is_present, k, jnp.zeros_like(k)), jnp.where(is_present, v, jnp.zeros_like(v))


def _tiles(q: Array, group: int, queries: Queries) -> _Tile:
    """The tiles of all requests, request by request, with a leading axis of `B * ceil(T * G / rows)` on each field."""
    per_request = -(-q.shape[1] * group // PORTABLE_ROWS)
    first_row = jnp.tile(jnp.arange(per_request, dtype=jnp.int32) * PORTABLE_ROWS, q.shape[0])
    request = jnp.arange(q.shape[0], dtype=jnp.int32)
    table, start, length, request = (
        jnp.repeat(x, per_request, axis=0) for x in (queries.page_table, queries.start, queries.length, request)
    )
    return _Tile(table, start, length, first_row, request)


def _packed(x: Array, group: int) -> Array:
    """`[B, T, h * G, K]` as tiles `[B * tiles, h, rows, K]`; the last tile of a request is padded with zeros."""
    batch, tokens, heads, width = x.shape
    x = x.reshape(batch, tokens, heads // group, group, width).transpose(0, 2, 1, 3, 4)
    x = x.reshape(batch, heads // group, tokens * group, width)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % PORTABLE_ROWS), (0, 0)))
    x = x.reshape(batch, heads // group, -1, PORTABLE_ROWS, width).transpose(0, 2, 1, 3, 4)
    return x.reshape(-1, heads // group, PORTABLE_ROWS, width)


def _unpacked(x: Array, shape: tuple[int, ...], group: int) -> Array:
    """The inverse of `_packed`, for q of the given shape."""
    batch, tokens, heads, _ = shape
    width = x.shape[-1]
    x = x.reshape(batch, -1, heads // group, PORTABLE_ROWS, width).transpose(0, 2, 1, 3, 4)
    x = x.reshape(batch, heads // group, -1, width)[:, :, : tokens * group]
    x = x.reshape(batch, heads // group, tokens, group, width).transpose(0, 2, 1, 3, 4)
    return x.reshape(batch, tokens, heads, width)


def _per_head(
    sinks: Array | None, mask: Array | None, blocks: int, masking: Masking, heads: int, group: int
) -> _PerHead:
    shape = heads // group, group
    if mask is not None:
        batch, masks, tokens, keys = mask.shape
        mask = jnp.pad(mask, ((0, 0), (0, 0), (0, 0), (0, blocks * KV_BLOCK - keys)))
        mask = mask.reshape(batch, *(shape if masks == heads else (1, 1)), tokens, blocks * KV_BLOCK)
    slopes = None if masking.alibi_slopes is None else jnp.asarray(masking.alibi_slopes, ACCUMULATOR).reshape(shape)
    return _PerHead(None if sinks is None else sinks.astype(ACCUMULATOR).reshape(shape), slopes, mask, group)


def _sum_of_group(x: Array, group: int) -> Array:
    """`[P, H, S, K]` as `[P, h, S, K]`, the heads of a group added left to right."""
    x = x.reshape(x.shape[0], -1, group, *x.shape[2:])
    return functools.reduce(jnp.add, [x[:, :, head] for head in range(group)])
