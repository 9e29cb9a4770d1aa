"""The attention kernel for TPUs: tiles of queries that meet their request's blocks of keys one after the other.

Prefill, chunks of it, decode and the check of drafted tokens are one program. A tile holds, for each head of keys and
each of its tokens, the query heads that share the keys. Its shape follows from the number of these heads alone, and no
row's arithmetic knows another row's numbers, so neither the number of tokens nor the neighbours can be in the bits. A
second, smaller tile for decode would be another program, with bits that nothing holds equal; instead the kernel's inner
loop leaves out units of `TPU_ATTENTION_ROWS` in which there is no row.

Of a product and a sum, as `s * c - m_b`, the compiler may make one step or two, and nothing here can forbid it. It
chooses once for all rows, as it compiles each step once.
"""

import functools
import math
from typing import Any, Final, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.tpu as pltpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from detjax.contract import ACCUMULATOR, KEY_GROUPS, KEY_LANES, KV_BLOCK, LOWEST_MAXIMUM, TPU_ATTENTION_ROWS
from detjax.options import Masking
from detjax.rounding import log2_scale, rounded, soft_cap_exponent

TILE_ROWS: Final = 128
"""Rows that share one visit of their keys: whole units."""

MOST_HEADS: Final = 8
"""Heads of keys in a step of the grid. Their pages lie side by side, so that a step has one long copy."""


class Tiles(NamedTuple):
    """Integers `[tiles]` that say what each tile is: read by the processor of scalars, before its copies start.

    Attributes:
        table_row: where its request's page numbers begin in the table.
        position: of its first token.
        kv_length: tokens of its request.
        first_block: the first block that it sees.
        blocks: how many it sees.
        rows: how many rows it has.
    """

    table_row: Array
    position: Array
    kv_length: Array
    first_block: Array
    blocks: Array
    rows: Array


def rows_of_a_tile(group: int) -> int:
    """For so many query heads to a head of keys."""
    return max(TILE_ROWS, -(-group // TPU_ATTENTION_ROWS) * TPU_ATTENTION_ROWS)


def attend(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    page_table: Array,
    tiles: Tiles,
    sinks: Array | None,
    mask: Array | None,
    *,
    group: int,
    masking: Masking,
    with_normalizers: bool,
) -> tuple[Array, Array | None]:
    """Outputs `[tiles, h, rows, V]` of queries `[tiles, h, rows, K]`, and the log2 of rows' normalizers if asked for.

    A mask is int8 `[n, h or 1, rows, keys]`, with whole blocks of keys and 1 where a row may see one; tile `i` has the
    mask `i % n`. Row `r` of a tile is head `r % group` of its token `r // group`. The page table has one axis, and no
    page number in it is beyond the pool. Rows behind a tile's last have any result.
    """
    count, kv_heads, rows, width = q.shape
    heads = max(heads for heads in range(1, MOST_HEADS + 1) if kv_heads % heads == 0)

    def of_tile(tile: Array, heads: Array, step: Array, *_: Any) -> tuple[Any, ...]:
        del step
        return tile, heads, 0, 0

    def block(tile: Array, step: Array, where: Tiles) -> Array:
        # Steps that a tile has too many stay at its last block, which is there already.
        return where.first_block[tile] + jnp.minimum(step, jnp.maximum(where.blocks[tile] - 1, 0))

    def page(tile: Array, heads: Array, step: Array, page_table: Any, *tiles: Any) -> tuple[Any, ...]:
        where = Tiles(*tiles)
        return page_table[where.table_row[tile] + block(tile, step, where)], heads, 0, 0

    def of_mask(tile: Array, heads: Array, step: Array, _page_table: Any, *tiles: Any) -> tuple[Any, ...]:
        assert mask is not None
        head = 0 if mask.shape[1] == 1 else heads
        return lax.rem(tile, mask.shape[0]), head, 0, block(tile, step, Tiles(*tiles))

    def of_heads(tile: Array, heads: Array, step: Array, *_: Any) -> tuple[Any, ...]:
        del tile, step
        return heads, 0, 0

    in_specs = [
        pl.BlockSpec((1, heads, rows, width), of_tile),
        pl.BlockSpec((1, heads, KV_BLOCK, width), page),
        pl.BlockSpec((1, heads, KV_BLOCK, v_pages.shape[3]), page),
    ]
    per_head = [
        None if values is None else _by_row(jnp.asarray(values, ACCUMULATOR), rows, group, heads)
        for values in (sinks, masking.alibi_slopes)
    ]
    in_specs += [None if values is None else pl.BlockSpec((1, rows, heads), of_heads) for values in per_head]
    in_specs.append(None if mask is None else pl.BlockSpec((1, min(heads, mask.shape[1]), rows, KV_BLOCK), of_mask))
    shapes = [jax.ShapeDtypeStruct((*q.shape[:3], v_pages.shape[3]), q.dtype), None]
    out_specs = [pl.BlockSpec((1, heads, rows, v_pages.shape[3]), of_tile), None]
    if with_normalizers:
        shapes[1] = jax.ShapeDtypeStruct((count, kv_heads, 1, rows), ACCUMULATOR)
        out_specs[1] = pl.BlockSpec((1, heads, 1, rows), of_tile)
    # A step too many costs little, but a page table may have many more columns than any request has blocks.
    steps = jnp.maximum(jnp.max(tiles.blocks), 1)
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1 + len(tiles),
        grid=(count, kv_heads // heads, steps),
        in_specs=in_specs,
        out_specs=out_specs,
        scratch_shapes=[
            pltpu.VMEM((heads, rows, v_pages.shape[3]), ACCUMULATOR),
            pltpu.VMEM((heads, rows, KV_BLOCK), ACCUMULATOR),
            pltpu.VMEM((heads, rows, KV_BLOCK), ACCUMULATOR),
        ],
    )
    o, normalizers = pl.pallas_call(
        functools.partial(_kernel, group=group, masking=masking),
        grid_spec=grid_spec,
        out_shape=shapes,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        name="attention",
    )(page_table.astype(jnp.int32), *(x.astype(jnp.int32) for x in tiles), q, k_pages, v_pages, *per_head, mask)
    return o, None if normalizers is None else normalizers[:, :, 0]


def _by_row(values: Array, rows: int, group: int, heads: int) -> Array:
    """Values of query heads `[H]` for the rows of a tile, `[h / heads, rows, heads]`."""
    values = values.reshape(-1, heads, group)[:, :, np.arange(rows) % group]
    return values.transpose(0, 2, 1)


def _kernel(
    _page_table: Any,
    table_row: Any,
    position: Any,
    kv_length: Any,
    first_block: Any,
    blocks: Any,
    rows: Any,
    q: Any,
    k: Any,
    v: Any,
    sinks: Any,
    slopes: Any,
    mask: Any,
    o: Any,
    normalizers: Any,
    accumulator: Any,
    total: Any,
    maximum: Any,
    *,
    group: int,
    masking: Masking,
) -> None:
    """One tile, some heads of keys, and one block of each.

    The accumulator is `[heads, rows, V]`. Totals and maxima have a lane for each key, `[heads, rows, S]`: maxima are
    the same in all lanes, and of totals only the first is looked at.
    """
    del table_row
    tile, step = pl.program_id(0), pl.program_id(2)
    heads = range(q.shape[1])
    block = first_block[tile] + step

    @pl.when(step == 0)
    def _() -> None:
        # A sink is a key without a value that comes before all others.
        accumulator[...] = jnp.zeros(accumulator.shape, ACCUMULATOR)
        if sinks is None:
            total[...] = jnp.zeros(total.shape, ACCUMULATOR)
            maximum[...] = jnp.full(maximum.shape, LOWEST_MAXIMUM, ACCUMULATOR)
        else:
            total[...] = jnp.ones(total.shape, ACCUMULATOR)
            for head in heads:
                m = jnp.maximum(sinks[0, :, head : head + 1] * log2_scale(1.0), LOWEST_MAXIMUM)
                maximum[head] = jnp.broadcast_to(m, maximum.shape[1:])

    def meet(first: Array) -> None:
        """One unit of rows, from the one given on, and the block."""
        place = pl.ds(first, TPU_ATTENTION_ROWS)
        positions = position[tile] + _quotient(
            first + lax.broadcasted_iota(jnp.int32, (TPU_ATTENTION_ROWS, 1), 0), group
        )
        keys = block * KV_BLOCK + lax.broadcasted_iota(jnp.int32, (TPU_ATTENTION_ROWS, KV_BLOCK), 1)
        visible = keys < kv_length[tile]
        if masking.causal:
            visible = visible & (keys <= positions)
        if masking.window is not None:
            visible = visible & (keys > positions - masking.window)
        masks = [] if mask is None else [mask[0, head, place].astype(jnp.int32) != 0 for head in range(mask.shape[1])]
        for head in heads:
            slope = None if slopes is None else slopes[0, place, head : head + 1]
            s, c = _scores(q[0, head, place], k[0, head], slope, keys - positions, masking)
            s = jnp.where(visible if mask is None else visible & masks[head % len(masks)], s, -jnp.inf)
            m_b = jnp.maximum(jnp.max(s, axis=-1, keepdims=True) * c, LOWEST_MAXIMUM)
            p = jnp.exp2(s * c - m_b)
            o_b = _dot(rounded(p, v.dtype), _own(v[0, head], block, kv_length[tile]), 0)
            m = maximum[head, place]
            m_new = jnp.maximum(m, m_b)
            a, b = jnp.exp2(m - m_new), jnp.exp2(m_b - m_new)
            accumulator[head, place] = accumulator[head, place] * _columns(a, o_b) + o_b * _columns(b, o_b)
            total[head, place] = total[head, place] * a + _block_sum(p) * b
            maximum[head, place] = m_new

    @pl.when(step < blocks[tile])
    def _() -> None:
        def unit(index: Array, _: None) -> None:
            first = pl.multiple_of(index * TPU_ATTENTION_ROWS, TPU_ATTENTION_ROWS)
            pl.when(first < rows[tile])(functools.partial(meet, first))

        # Of so many trips however many rows there are: one of a number that is not known is compiled twice.
        lax.fori_loop(0, q.shape[2] // TPU_ATTENTION_ROWS, unit, None)

    @pl.when(step == pl.num_programs(2) - 1)
    def _() -> None:
        for head in heads:
            empty = total[head, :, :1] == 0
            divisor = jnp.where(empty, 1.0, total[head, :, :1])
            result = jnp.where(empty, 0.0, accumulator[head] * (1.0 / divisor))
            # Rounding may leave a zero's sign.
            result = rounded(result, o.dtype).astype(ACCUMULATOR)
            o[0, head] = jnp.where(result == 0, 0.0, result).astype(o.dtype)
            if normalizers is not None:
                found = jnp.where(empty, 0.0, maximum[head] + jnp.log2(divisor))
                normalizers[0, head] = found.T[:1]


def _scores(q: Array, k: Array, slope: Array | None, distance: Array, masking: Masking) -> tuple[Array, np.float32]:
    """Scores `[rows, S]` before masking, and `c`, so that exponents are `s * c`."""
    s, c = _dot(q, k, 1), log2_scale(masking.scale)
    if masking.soft_cap is not None or slope is not None:
        s, c = s * np.float32(masking.scale), log2_scale(1.0)
    if masking.soft_cap is not None:
        s = np.float32(masking.soft_cap) * (1.0 - 2.0 / (1.0 + jnp.exp2(s * soft_cap_exponent(masking.soft_cap))))
    if slope is not None:
        s = s + slope * distance.astype(ACCUMULATOR)
    return s, c


def _dot(x: Array, y: Array, axis: int) -> Array:
    """Float32 products of rows, over the axis of `y` given."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return lax.dot_general(x, y, (((1,), (axis,)), ((), ())), precision=precision, preferred_element_type=ACCUMULATOR)


def _own(v: Array, block: Array, kv_length: Array) -> Array:
    """Values of the request: what lies behind its length in its last page may be NaN, and zero times that is NaN."""
    keys = block * KV_BLOCK + lax.broadcasted_iota(jnp.int32, v.shape, 0)
    return jnp.where(keys < kv_length, v, jnp.zeros_like(v))


def _block_sum(p: Array) -> Array:
    """Sums of `[rows, S]` in the order of `contract.KEY_LANES`: in the first of as many lanes, the rest is by-catch.

    Each addition is one of whole registers, with what comes from some lanes further on.
    """

    def ahead(x: Array, lanes: int) -> Array:
        return pltpu.roll(x, KV_BLOCK - lanes, 1)

    half, of_group = KV_BLOCK // 2, 2 * KEY_LANES
    p = functools.reduce(jnp.add, [p, ahead(p, KEY_LANES), ahead(p, half), ahead(p, half + KEY_LANES)])
    p = functools.reduce(jnp.add, [p, *(ahead(p, group * of_group) for group in range(1, KEY_GROUPS))])
    for step in range(int(math.log2(KEY_LANES))):
        p = p + ahead(p, 1 << step)
    return p


def _columns(x: Array, like: Array) -> Array:
    """`[rows, S]`, the same in all lanes, for as many columns as `like` has."""
    return x if x.shape == like.shape else jnp.broadcast_to(x[:, :1], like.shape)


def _quotient(x: Array, divisor: int) -> Array:
    """`x // divisor` for rows of a tile: vectors of integers have no division."""
    bits = 16
    return (x * ((1 << bits) // divisor + 1)) >> bits
