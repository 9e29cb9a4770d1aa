"""The attention kernel for TPUs: tiles of queries that visit their request's blocks of keys in order.

Prefill, prefill chunks, decode and the verification of drafted tokens are one program. For each key head, a tile holds
the query heads that share the keys, for each of its tokens. Its shape depends only on the number of these heads, and no
row's arithmetic uses another row's numbers. So neither the number of tokens nor the neighbours can affect the bits. A
second, smaller tile for decode would be another program, and nothing would keep its bits equal. Instead, the kernel's
inner loop skips units of `TPU_ATTENTION_ROWS` rows without a query.

VMEM. With 8 key heads of 128 columns in bfloat16, a grid step has blocks of 256 KiB each for queries, keys, values and
outputs, two of each since copies overlap with computation, and a float32 state of 1.5 MiB: accumulator, sums and maxima
of 8 x 128 rows x 128 lanes. That is 3.5 MiB of the 16 that a kernel has by default.
"""

import dataclasses
import functools
from typing import Any, Final, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.tpu as pltpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from detjax.contract import ACCUMULATOR, KV_BLOCK, SPAN_BLOCKS, SPAN_WIDTH, TPU_ATTENTION_ROWS
from detjax.operands.kv_pages import KeyColumns
from detjax.operands.numerics import round_up
from detjax.operands.options import Masking
from detjax.operands.rounding import rounded
from detjax.pallas.tpu.attention.mask import key_positions, present_values, query_positions, visible_keys
from detjax.pallas.tpu.attention.online_softmax import State, dot, exponentials, scores

TILE_ROWS: Final = 128
"""Rows of a tile, unless more query heads share a key head."""

MAX_ROWS: Final = 1024
"""Most rows of a tile: the kernel divides row numbers by multiplying them, which is exact up to this number."""

MAX_KV_HEADS: Final = 8
"""Most key heads in a grid step. Their pages are adjacent in memory, so a step has one long copy."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """The numbers of key heads, and of query heads that share one, on which a schedule depends."""

    kv_heads: int
    group: int


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The division of the kernel's work. No bit depends on it.

    Attributes:
        kv_heads: key heads in a grid step, a divisor of their number.
        rows: rows of a tile, for which keys are loaded once: a multiple of `TPU_ATTENTION_ROWS`, at most `MAX_ROWS`.
    """

    kv_heads: int
    rows: int

    def __post_init__(self) -> None:
        if self.kv_heads < 1 or self.rows % TPU_ATTENTION_ROWS or not 0 < self.rows <= MAX_ROWS:
            raise ValueError(
                f"attention: the schedule has {self.kv_heads} key heads in a step and tiles of {self.rows} rows; "
                f"accepted: 1 head or more, and multiples of {TPU_ATTENTION_ROWS} rows up to {MAX_ROWS}."
            )

    def check(self, problem: Problem) -> None:
        """Raises ValueError if the key heads are not whole steps, or a token's query heads don't fit into a tile."""
        if problem.kv_heads % self.kv_heads or self.rows < problem.group:
            raise ValueError(
                f"attention: the schedule has {self.kv_heads} key heads in a step and tiles of {self.rows} rows, "
                f"for {problem.kv_heads} key heads with {problem.group} query heads each; accepted: a divisor of "
                f"{problem.kv_heads}, and at least {problem.group} rows. Take the default schedule."
            )

    def tile_tokens(self, problem: Problem) -> int:
        """Returns the tokens of a tile."""
        return self.rows // problem.group


def default_schedule(problem: Problem) -> Schedule:
    """Returns the schedule for a problem."""
    heads = max(heads for heads in range(1, MAX_KV_HEADS + 1) if problem.kv_heads % heads == 0)
    return Schedule(heads, max(TILE_ROWS, round_up(problem.group, TPU_ATTENTION_ROWS)))


class Tiles(NamedTuple):
    """Integers `[tiles]` that describe each tile. The scalar core reads them before it starts the tile's copies.

    Attributes:
        table_row: the offset of its request's page ids in the page table.
        position: the position of its first token.
        kv_length: tokens of its request.
        first_block: the first block of keys that one of its queries sees.
        blocks: the number of blocks that it visits, from `first_block` on.
        rows: the number of its rows with a query.
    """

    table_row: Any
    position: Any
    kv_length: Any
    first_block: Any
    blocks: Any
    rows: Any

    def block(self, tile: Array, step: Array) -> Array:
        """Returns the block of a grid step. After its last block a tile stays there, so that nothing is copied."""
        return self.first_block[tile] + jnp.minimum(step, jnp.maximum(self.blocks[tile] - 1, 0))


class Operands(NamedTuple):
    """The operands of attention, or references to their blocks in VMEM.

    Attributes:
        q: queries `[tiles, h, rows, K]`. Row `r` of a tile is query head `r % group` of its token `r // group`.
        k: pages of keys `[P, h, S, K]`.
        v: pages of values `[P, h, S, V]`, or the number of key columns that are the values.
        sinks: sinks `[H]`, or None; in VMEM `[1, rows, heads]`, for the rows of a tile and the heads of a step.
        slopes: ALiBi's slopes, with the sinks' shapes.
        mask: int8 `[n, h or 1, rows, keys]` with whole blocks of keys, 1 where a key is visible, or None. Tile `i` has
            mask `i % n`.
    """

    q: Any
    k: Any
    v: Any
    sinks: Any
    slopes: Any
    mask: Any

    @property
    def value_width(self) -> int:
        """V."""
        return self.v.width if isinstance(self.v, KeyColumns) else self.v.shape[3]

    def block(self, head: int) -> tuple[Array, Array]:
        """Returns the keys `[S, K]` and values `[S, V]` of a key head in VMEM."""
        k = self.k[0, head]
        return k, k[:, : self.v.width] if isinstance(self.v, KeyColumns) else self.v[0, head]


class Results(NamedTuple):
    """Results of attention, or references to their blocks in VMEM. Rows without a query are undefined.

    Attributes:
        o: `[tiles, h, rows, V]`.
        log2_normalizers: the log2 of each row's normalizer, float32 `[tiles, h, rows]`, in VMEM `[1, heads, 1, rows]`;
            None unless requested.
    """

    o: Any
    log2_normalizers: Any


def attend(
    operands: Operands,
    page_table: Array,
    tiles: Tiles,
    *,
    group: int,
    masking: Masking,
    with_normalizers: bool,
    schedule: Schedule,
) -> Results:
    """Returns the attention of tiles of queries.

    Tiles have the schedule's number of rows, `group` query heads share a key head, and the flat page table has only ids
    of existing pages.
    """
    q, k, v, sinks, slopes, mask = operands
    kv_heads, heads = q.shape[1], schedule.kv_heads
    sinks, slopes = (None if x is None else _by_row(x, schedule, group) for x in (sinks, slopes))
    # A surplus step costs little, but a page table may have far more columns than any request has blocks, so the length
    # of the grid is computed on the device.
    steps = jnp.maximum(jnp.max(tiles.blocks), 1)
    operands = Operands(q, k, v, sinks, slopes, mask)
    value_width = operands.value_width
    state = State.scratch(heads, schedule.rows, value_width)
    shapes = Results(
        jax.ShapeDtypeStruct((*q.shape[:3], value_width), q.dtype),
        jax.ShapeDtypeStruct((q.shape[0], kv_heads, 1, schedule.rows), ACCUMULATOR) if with_normalizers else None,
    )
    in_specs, out_specs = _specs(operands, schedule, with_normalizers)
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=(q.shape[0], kv_heads // heads, steps),
        in_specs=[in_specs],
        out_specs=[out_specs],
        scratch_shapes=[state, state if value_width > SPAN_WIDTH else None],
    )

    def kernel(
        _page_table: Any, tiles: Tiles, operands: Operands, results: Results, state: State, span: State | None
    ) -> None:
        _Kernel(group, masking, tiles, operands, results, state, span).run()

    (results,) = pl.pallas_call(
        kernel,
        grid_spec=grid_spec,
        out_shape=[shapes],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        name="attention",
    )(page_table.astype(jnp.int32), Tiles(*(x.astype(jnp.int32) for x in tiles)), operands)
    o, log2_normalizers = results
    return Results(o, None if log2_normalizers is None else log2_normalizers[:, :, 0])


def _by_row(values: Array, schedule: Schedule, group: int) -> Array:
    """Returns values of query heads `[H]` for the rows of a tile, `[h / heads, rows, heads]`."""
    values = jnp.asarray(values, ACCUMULATOR)
    values = values.reshape(-1, schedule.kv_heads, group)[:, :, np.arange(schedule.rows) % group]
    return values.transpose(0, 2, 1)


def _specs(operands: Operands, schedule: Schedule, with_normalizers: bool) -> tuple[Operands, Results]:
    """Returns the blocks of operands and results for each grid step (tile, heads, step)."""
    heads, rows, mask = schedule.kv_heads, schedule.rows, operands.mask
    width, value_width = operands.k.shape[3], operands.value_width

    def tile_index(tile: Array, heads: Array, *_: Any) -> tuple[Any, ...]:
        return tile, heads, 0, 0

    def page_index(tile: Array, heads: Array, step: Array, page_table: Any, tiles: Tiles) -> tuple[Any, ...]:
        return page_table[tiles.table_row[tile] + tiles.block(tile, step)], heads, 0, 0

    def mask_index(tile: Array, heads: Array, step: Array, _: Any, tiles: Tiles) -> tuple[Any, ...]:
        return lax.rem(tile, mask.shape[0]), 0 if mask.shape[1] == 1 else heads, 0, tiles.block(tile, step)

    per_head = pl.BlockSpec((1, rows, heads), lambda tile, heads, *_: (heads, 0, 0))
    in_specs = Operands(
        q=pl.BlockSpec((1, heads, rows, width), tile_index),
        k=pl.BlockSpec((1, heads, KV_BLOCK, width), page_index),
        v=operands.v
        if isinstance(operands.v, KeyColumns)
        else pl.BlockSpec((1, heads, KV_BLOCK, value_width), page_index),
        sinks=None if operands.sinks is None else per_head,
        slopes=None if operands.slopes is None else per_head,
        mask=None if mask is None else pl.BlockSpec((1, min(heads, mask.shape[1]), rows, KV_BLOCK), mask_index),
    )
    out_specs = Results(
        o=pl.BlockSpec((1, heads, rows, value_width), tile_index),
        log2_normalizers=pl.BlockSpec((1, heads, 1, rows), tile_index) if with_normalizers else None,
    )
    return in_specs, out_specs


@dataclasses.dataclass(frozen=True, eq=False)
class _Kernel:
    """One tile, some key heads, and one block of their keys, with references to the arrays in VMEM."""

    group: int
    masking: Masking
    tiles: Tiles
    operands: Operands
    results: Results
    state: State
    span: State | None
    """Running results of the span that the block belongs to; None: blocks merge without spans."""

    def run(self) -> None:
        tile, step = pl.program_id(0), pl.program_id(2)
        block = self.tiles.first_block[tile] + step

        @pl.when(step == 0)
        def clear() -> None:
            self.state.clear(self.operands.sinks)

        @pl.when(step < self.tiles.blocks[tile])
        def visit_block() -> None:
            def visit_unit(index: Array, _: None) -> None:
                first_row = pl.multiple_of(index * TPU_ATTENTION_ROWS, TPU_ATTENTION_ROWS)
                pl.when(first_row < self.tiles.rows[tile])(functools.partial(self.add_block, tile, block, first_row))

            # The trip count is static, since a loop of unknown length is compiled twice; empty units are skipped
            # instead.
            lax.fori_loop(0, self.operands.q.shape[2] // TPU_ATTENTION_ROWS, visit_unit, None)

        pl.when(step == pl.num_programs(2) - 1)(self.store)

    def add_block(self, tile: Array, block: Array, first_row: Array) -> None:
        """Adds the block to one unit of rows."""
        # A unit's products have one shape in every phase; the compiler's choices for the matrix unit depend on it.
        q, slopes, mask = self.operands.q, self.operands.slopes, self.operands.mask
        rows = pl.ds(first_row, TPU_ATTENTION_ROWS)
        positions = query_positions(first_row, TPU_ATTENTION_ROWS, self.tiles.position[tile], self.group)
        keys = key_positions(block, TPU_ATTENTION_ROWS)
        visible = visible_keys(keys, positions, self.tiles.kv_length[tile], self.masking)
        masks = [] if mask is None else [mask[0, head, rows].astype(jnp.int32) != 0 for head in range(mask.shape[1])]
        for head in range(q.shape[1]):
            slope = None if slopes is None else slopes[0, rows, head : head + 1]
            k, v = self.operands.block(head)
            s, c = scores(q[0, head, rows], k, slope, keys - positions, self.masking)
            s = jnp.where(visible if mask is None else visible & masks[head % len(masks)], s, -jnp.inf)
            p, m_b = exponentials(s, c)
            o_b = dot(rounded(p, v.dtype), present_values(v, block, self.tiles.kv_length[tile]), 0)
            self.merge((head, rows), tile, block, (p, m_b, o_b))

    def merge(self, place: tuple[int, Any], tile: Array, block: Array, part: tuple[Array, Array, Array]) -> None:
        """Merges a block into its span, and after the span's last block the span; without spans, the block at once."""
        span = self.span
        if span is None:
            self.state.merge_block(place, *part)
            return
        first = self.tiles.first_block[tile]
        begins = (block == first) | (lax.rem(block, SPAN_BLOCKS) == 0)
        ends = (block == first + self.tiles.blocks[tile] - 1) | (lax.rem(block, SPAN_BLOCKS) == SPAN_BLOCKS - 1)
        pl.when(begins)(lambda: span.clear_rows(place))
        span.merge_block(place, *part)
        pl.when(ends)(lambda: self.state.merge(place, span.total[place], span.maximum[place], span.accumulator[place]))

    def store(self) -> None:
        """Writes the results after the last block."""
        for head in range(self.operands.q.shape[1]):
            self.state.store(head, *self.results)
