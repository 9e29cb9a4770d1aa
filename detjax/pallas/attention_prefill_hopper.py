"""Attention of many query tokens on Hopper (Pallas Mosaic GPU): prefill, chunked prefill and the training forward.

A CTA has 128 query rows of one head: two warpgroups of 64, which take turns at the matrix unit, so that one multiplies
while the other exponentiates. A third one loads: one of its warps brings keys and values, a page each, another one the
queries.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from detjax.contract import ACCUMULATOR, KV_BLOCK, QUERY_UNIT, Masking
from detjax.pallas import hopper
from detjax.pallas.attention_cta_hopper import (
    CONSUMERS,
    FIRST_BARRIER,
    TILE,
    WARPGROUPS,
    arrive,
    launch,
    pass_turn,
    sync,
    take_turn,
)
from detjax.pallas.attention_tile_hopper import (
    ROWS,
    along_rows,
    columns_kept,
    distances,
    exponent_scale,
    exponentials,
    finished,
    initial_statistics,
    log2_normalizers,
    merged,
    rescaling,
    row_sums,
    rows_of_tile,
    scrub,
    shaped_scores,
    splat,
    swizzled,
    visible_keys,
)
from detjax.pallas.hopper import SHARED_MEMORY, SHARED_MEMORY_RESERVED

_SCRUBBED, _FIRST_FREE = FIRST_BARRIER, FIRST_BARRIER + 1
"""Named barriers: one for both warpgroups to meet at; then one for each slot of keys and of values, and for each
warpgroup's queries."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How tiles are spread over the chip; no bit depends on it.

    Attributes:
        stages: pages of keys, and of values, in flight.
        persistent: one CTA per multiprocessor takes tile after tile, the longest first; else each tile is a CTA.
    """

    stages: int = 2
    persistent: bool = True


class Problem(NamedTuple):
    """Sizes: requests, packed query rows, heads, heads of keys, widths of keys and of values."""

    batch: int
    rows: int
    heads: int
    kv_heads: int
    width: int
    value_width: int
    dtype: Any

    @property
    def parts(self) -> int:
        """CTAs that share out the columns of a tile's values. Each computes the scores: beside the sums of more than
        128 columns these do not fit into registers."""
        return 1 if self.value_width <= 128 else 2

    @property
    def part_width(self) -> int:
        return self.value_width // self.parts

    def shared_memory(self, stages: int) -> int:
        """Bytes."""
        of_tile = TILE * (self.width + self.part_width)
        return (of_tile + stages * KV_BLOCK * (self.width + self.part_width)) * self.dtype.itemsize

    def schedule(self) -> Schedule:
        free = SHARED_MEMORY - SHARED_MEMORY_RESERVED
        # Long tiles even out by themselves; short ones gain from the next one's queries being there.
        return Schedule(2 if self.shared_memory(2) <= free else 1, persistent=self.rows // self.batch < 2048)


class Tiles(NamedTuple):
    """Where each tile of 128 rows stands, int32 `[tiles]`: request, its first row in the packed queries and within the
    request, and how many of its rows are the request's."""

    request: Array
    row: Array
    offset: Array
    rows: Array


def forward(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    page_table: Array,
    q_start: Array,
    kv_length: Array,
    sinks: Array | None,
    *,
    masking: Masking,
    tiles: Tiles | None = None,
    schedule: Schedule | None = None,
) -> tuple[Array, Array]:
    """Output `[N, H, V]` and log2 of each row's normalizer, `[H, N]` float32.

    Args:
        q: queries of all requests, `[N, H, K]`; N is a multiple of 8 and each request begins at one.
        tiles: the tiles of 128 rows; default: those of requests of N / B rows each. Rows behind a request's last are
            written up to the next multiple of 8.
        schedule: default: the problem's own.
    """
    batch, (rows, heads, width) = q_start.shape[0], q.shape
    problem = Problem(batch, rows, heads, k_pages.shape[1], width, v_pages.shape[-1], q.dtype)
    schedule = schedule or problem.schedule()
    count = batch * -(-rows // (batch * TILE)) if tiles is None else tiles.request.shape[0]
    items = count * heads * problem.parts
    grid = min(items, hopper.multiprocessors()) if schedule.persistent else items
    dtype = q.dtype
    scratch: dict[str, Any] = {
        "q": plgpu.SMEM((TILE, width), dtype, transforms=swizzled(width)),
        "k": plgpu.SMEM((schedule.stages, KV_BLOCK, width), dtype, transforms=swizzled(width)),
        "v": plgpu.SMEM(
            (schedule.stages, KV_BLOCK, problem.part_width), dtype, transforms=swizzled(problem.part_width)
        ),
        "o": plgpu.SMEM((TILE, problem.part_width), dtype, transforms=swizzled(problem.part_width)),
        "normalizers": plgpu.SMEM((WARPGROUPS, ROWS), ACCUMULATOR),
        "q_loaded": plgpu.Barrier(num_barriers=WARPGROUPS),
        "k_loaded": plgpu.Barrier(num_barriers=schedule.stages),
        "v_loaded": plgpu.Barrier(num_barriers=schedule.stages),
    }
    operands = [q, k_pages, v_pages, page_table, q_start, kv_length, *(tiles or ())]
    if sinks is not None:
        operands.append(sinks.astype(ACCUMULATOR))
    if masking.alibi_slopes is not None:
        operands.append(jnp.asarray(masking.alibi_slopes, ACCUMULATOR))

    def body(*refs: Any, **scratch: Any) -> None:
        _Kernel(problem, schedule, masking, items, grid, tiles is not None, sinks is not None, refs, scratch).run()

    out_type = (
        jax.ShapeDtypeStruct((rows, heads, problem.value_width), dtype),
        jax.ShapeDtypeStruct((heads, rows), ACCUMULATOR),
    )
    o, normalizers = launch("attention_prefill", body, out_type, grid, scratch)(*operands)
    return o, normalizers


class _Item(NamedTuple):
    """A tile of one head."""

    request: Array
    head: Array
    part: Array | int
    """Of the values' columns."""
    row: Array
    """Of the packed queries."""
    rows: Array
    """Of these, how many are the request's."""
    position: Array
    """Of the tile's first row."""
    kv_length: Array
    first: Array
    """Block of keys that is visited first."""
    end: Array
    """Behind the last one; at least one is visited."""


class _Kernel:
    def __init__(
        self,
        problem: Problem,
        schedule: Schedule,
        masking: Masking,
        items: int,
        grid: int,
        has_tiles: bool,
        has_sinks: bool,
        refs: tuple[Any, ...],
        scratch: dict[str, Any],
    ) -> None:
        self.problem, self.schedule, self.masking = problem, schedule, masking
        *operands, self.o_gmem, self.normalizers_gmem = refs
        self.q_gmem, self.k_gmem, self.v_gmem, self.page_table, self.q_start, self.kv_length, *operands = operands
        self.tiles = Tiles(*(operands.pop(0) for _ in Tiles._fields)) if has_tiles else None
        self.sinks = operands.pop(0) if has_sinks else None
        self.slopes = operands.pop(0) if masking.alibi_slopes is not None else None
        self.scratch = scratch
        self.warpgroup = lax.axis_index("warpgroup")
        cta = lax.axis_index("cta")
        self.item_count = lax.div(items - cta + (grid - 1), jnp.int32(grid))
        self.item_index = lambda i: cta + i * grid
        stages = schedule.stages
        self.k_free, self.v_free, self.q_free = _FIRST_FREE, _FIRST_FREE + stages, _FIRST_FREE + 2 * stages

    def run(self) -> None:
        lax.cond(self.warpgroup < WARPGROUPS, self.multiply, self.load)

    def item(self, i: Array) -> _Item:
        index = self.item_index(i)
        # Heads of one tile are neighbours, so that those that share keys run at the same time.
        parts, heads = self.problem.parts, jnp.int32(self.problem.heads)
        part, index = (lax.rem(index, jnp.int32(parts)), lax.div(index, jnp.int32(parts))) if parts > 1 else (0, index)
        tile, head = lax.div(index, heads), lax.rem(index, heads)
        request, row, offset, rows = self.place(tile)
        kv_length = self.kv_length[request]
        position = self.q_start[request] + offset
        end, first = kv_length, jnp.int32(0)
        if self.masking.causal:
            end = lax.min(end, position + rows)
        if self.masking.window is not None:
            first = lax.div(lax.max(position - (self.masking.window - 1), 0), jnp.int32(KV_BLOCK))
        end = lax.max(lax.div(end + (KV_BLOCK - 1), jnp.int32(KV_BLOCK)), first + 1)
        end = lax.min(end, jnp.int32(self.page_table.shape[1]))
        return _Item(request, head, part, row, rows, position, kv_length, lax.min(first, end - 1), end)

    def place(self, tile: Array) -> tuple[Array, Array, Array, Array]:
        """What `Tiles` says of a tile."""
        if self.tiles is not None:
            return tuple(ref[tile] for ref in self.tiles)  # pyright: ignore[reportReturnType]
        batch = self.q_start.shape[0]
        tokens = self.problem.rows // batch
        # The last tiles of the requests see most keys, and come first.
        offset = (-(-tokens // TILE) - 1 - lax.div(tile, jnp.int32(batch))) * TILE
        request = lax.rem(tile, jnp.int32(batch))
        return request, request * tokens + offset, offset, lax.min(jnp.int32(TILE), tokens - offset)

    # --- the loading warpgroup ----------------------------------------------------------------------------------------

    def load(self) -> None:
        plgpu.set_max_registers(24, action="decrease")

        @plgpu.warp_map
        def _(warp: Array) -> None:
            pl.when(warp == 0)(self.load_keys_and_values)
            pl.when(warp == 1)(self.load_queries)

    def load_keys_and_values(self) -> None:
        group = self.problem.heads // self.problem.kv_heads
        stages = jnp.int32(self.schedule.stages)

        def load_tile(i: Array, step: Array) -> Array:
            item = self.item(i)
            kv_head = lax.div(item.head, jnp.int32(group))

            def load_block(block: Array, step: Array) -> Array:
                slot = lax.rem(step, stages)
                page = self.page_table[item.request, block]
                sync(self.k_free + slot, CONSUMERS + 32)
                self.copy_page(self.k_gmem.at[page, kv_head], "k", slot)
                sync(self.v_free + slot, CONSUMERS + 32)
                self.copy_page(self.v_gmem.at[page, kv_head, :, self.own_columns(item)], "v", slot)
                return step + 1

            return lax.fori_loop(item.first, item.end, load_block, step)

        lax.fori_loop(0, self.item_count, load_tile, jnp.int32(0))

    def own_columns(self, item: _Item) -> Any:
        return pl.ds(item.part * self.problem.part_width, self.problem.part_width)

    def copy_page(self, source: Any, name: str, slot: Array) -> None:
        plgpu.copy_gmem_to_smem(source, self.scratch[name].at[slot], self.scratch[f"{name}_loaded"].at[slot])

    def load_queries(self) -> None:
        @pl.loop(0, self.item_count)
        def _(i: Array) -> None:
            item = self.item(i)
            for part in range(WARPGROUPS):
                sync(self.q_free + part, 128 + 32)
                source = self.q_gmem.at[pl.ds(item.row + part * ROWS, ROWS), item.head]
                target = self.scratch["q"].at[pl.ds(part * ROWS, ROWS)]
                plgpu.copy_gmem_to_smem(source, target, self.scratch["q_loaded"].at[part])

    # --- the multiplying warpgroups -----------------------------------------------------------------------------------

    def multiply(self) -> None:
        plgpu.set_max_registers(240, action="increase")
        for slot in range(self.schedule.stages):
            arrive(self.k_free + slot, CONSUMERS + 32)
            arrive(self.v_free + slot, CONSUMERS + 32)
        self.free_queries()
        pl.when(self.warpgroup == 1)(self.pass_turn)
        lax.fori_loop(0, self.item_count, self.multiply_tile, jnp.int32(0))
        pl.when(self.warpgroup == 0)(self.take_turn)
        plgpu.wait_smem_to_gmem(0)

    def take_turn(self) -> None:
        take_turn(self.warpgroup)

    def pass_turn(self) -> None:
        pass_turn(self.warpgroup)

    def free_queries(self) -> None:
        arrive(self.q_free + self.warpgroup, 128 + 32)

    def multiply_tile(self, i: Array, first_step: Array) -> Array:
        item = self.item(i)
        own = pl.ds(self.warpgroup * ROWS, ROWS)
        q_smem = self.scratch["q"].at[own]
        position = item.position + self.warpgroup * ROWS
        stages = jnp.int32(self.schedule.stages)
        c = exponent_scale(self.masking)
        sinks = None if self.sinks is None else splat(self.sinks[item.head], (ROWS,))
        slopes = None if self.slopes is None else splat(self.slopes[item.head], (ROWS, KV_BLOCK))
        plgpu.barrier_wait(self.scratch["k_loaded"].at[lax.rem(first_step, stages)])
        plgpu.barrier_wait(self.scratch["q_loaded"].at[self.warpgroup])
        self.take_turn()

        def visit(block: Array, carry: Any, *, is_masked: bool) -> Any:
            o, m, total = carry
            step = first_step + (block - item.first)
            slot = lax.rem(step, stages)
            is_last = block + 1 == item.end

            def scores(accumulator: Any) -> Array:
                plgpu.wgmma(accumulator, q_smem, self.scratch["k"].at[slot].T)
                self.pass_turn()
                return accumulator[...]

            s = pl.run_scoped(scores, plgpu.ACC((ROWS, KV_BLOCK), ACCUMULATOR))  # pyright: ignore
            arrive(self.k_free + slot, CONSUMERS + 32)
            pl.when(is_last)(self.free_queries)
            keys = block * KV_BLOCK
            s = shaped_scores(s, self.masking, slopes, lambda: distances(keys - position - rows_of_tile()))
            if is_masked:
                positions = position + rows_of_tile()
                s = columns_kept(s, *visible_keys(self.masking, keys, positions, item.kv_length))
            p, m_b = exponentials(s, c, s.max(axis=1))
            total_b = row_sums(p)
            p = p.astype(self.problem.dtype)
            m, a, b = rescaling(m, m_b)
            total = merged(total, a, total_b, b)
            p, m, total, a, b = lax.optimization_barrier((p, m, total, a, b))
            plgpu.barrier_wait(self.scratch["v_loaded"].at[slot])
            if is_masked:
                pl.when(keys + KV_BLOCK > item.kv_length)(lambda: self.scrub(slot, item.kv_length - keys))
            self.take_turn()

            def await_next() -> None:
                plgpu.barrier_wait(self.scratch["k_loaded"].at[lax.rem(step + 1, stages)])

            def values(accumulator: Any) -> Array:
                plgpu.wgmma(accumulator, p, self.scratch["v"].at[slot])
                lax.cond(is_last, self.pass_turn, await_next)
                return accumulator[...]

            x = pl.run_scoped(values, plgpu.ACC(o.shape, ACCUMULATOR))  # pyright: ignore
            arrive(self.v_free + slot, CONSUMERS + 32)
            return merged(o, along_rows(a, x.shape), x, along_rows(b, x.shape)), m, total

        def visit_all(first: Array, end: Array, carry: Any, is_masked: bool) -> Any:
            return lax.fori_loop(first, end, lambda block, carry: visit(block, carry, is_masked=is_masked), carry)

        carry = splat(0.0, (ROWS, self.problem.part_width)), *initial_statistics(sinks)
        # Blocks that every row of the tile sees whole need no mask.
        open_end = lax.div(item.kv_length, jnp.int32(KV_BLOCK))
        if self.masking.causal:
            open_end = lax.min(open_end, lax.div(position + 1, jnp.int32(KV_BLOCK)))
        open_end = lax.max(lax.min(open_end, item.end), item.first)
        open_first = item.first
        if self.masking.window is not None:
            behind = lax.max(position + (ROWS - self.masking.window), 0)
            open_first = lax.min(lax.div(behind + (KV_BLOCK - 1), jnp.int32(KV_BLOCK)), open_end)
            open_first = lax.max(open_first, item.first)
            carry = visit_all(item.first, open_first, carry, True)
        carry = visit_all(open_first, open_end, carry, False)
        o, m, total = visit_all(open_end, item.end, carry, True)
        self.write(self.item(i), o, m, total)
        return first_step + (item.end - item.first)

    def scrub(self, slot: Array, length: Array) -> None:
        """Zeros behind a request's last value: each warpgroup has half of the page, and both use it whole."""
        own = pl.ds(self.warpgroup * ROWS, ROWS)
        scrub(self.scratch["v"].at[slot, own], length - self.warpgroup * ROWS)
        sync(_SCRUBBED, CONSUMERS)

    def write(self, item: _Item, o: Array, m: Array, total: Array) -> None:
        own = pl.ds(self.warpgroup * ROWS, ROWS)
        staged = self.scratch["o"].at[own]
        normalizers = self.scratch["normalizers"].at[self.warpgroup]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        staged[...] = finished(o, total, self.problem.dtype)
        normalizers[...] = log2_normalizers(m, total)
        plgpu.commit_smem()
        row, left = item.row + self.warpgroup * ROWS, item.rows - self.warpgroup * ROWS

        def copy(first: int, size: int) -> None:
            rows, part = pl.ds(row + first, size), pl.ds(first, size)
            plgpu.copy_smem_to_gmem(staged.at[part], self.o_gmem.at[rows, item.head, self.own_columns(item)])
            plgpu.copy_smem_to_gmem(normalizers.at[part], self.normalizers_gmem.at[item.head, rows])

        pl.when(left >= ROWS)(lambda: copy(0, ROWS))

        @pl.when(left < ROWS)
        def _() -> None:
            for first in range(0, ROWS, QUERY_UNIT):
                pl.when(first < left)(lambda first=first: copy(first, QUERY_UNIT))
