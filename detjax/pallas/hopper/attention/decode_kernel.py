"""Decode kernel on Hopper: the roles of a CTA's warpgroups.

Memory bandwidth limits a decode, not the matrix unit, so a single warpgroup multiplies, and pages of many blocks are in
flight. Each slot of a ring passes from warpgroup to warpgroup by barriers in shared memory:

* Numbers: the loader starts a copy, whose end completes `loaded`; the multiplying warpgroup arrives at `consumed` once
  the matrix unit has read the slot, which the loader awaits before it loads the next page into it.
* Codes: copies complete `codes_loaded`. Both dequantizing warpgroups wait for that and for `consumed`, write their
  halves of the page, and arrive at `codes_consumed` for the loader and at `loaded` for the multiplying warpgroup.
"""

import functools
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from detjax.contract import ACCUMULATOR, KV_BLOCK
from detjax.operands.options import Masking
from detjax.pallas.hopper.attention.decode_line import Line, Operands, Segment
from detjax.pallas.hopper.attention.decode_merge import Split, SplitPartials
from detjax.pallas.hopper.attention.decode_schedule import Problem, Schedule
from detjax.pallas.hopper.attention.dequantize import dequantize, page_buffers
from detjax.pallas.hopper.attention.online_softmax import (
    exponent_scale,
    exponentials,
    initial_statistics,
    merged,
    normalized,
    rescaling,
    shaped_scores,
    visible_keys,
)
from detjax.pallas.hopper.attention.queries_on_columns import along_columns, column_indices
from detjax.pallas.hopper.attention.queries_on_rows import clear_tail, splat
from detjax.pallas.hopper.attention.warpgroups import MULTIPLYING_REGISTERS, copy_rows
from detjax.pallas.hopper.device import WARPGROUP, shared_registers
from detjax.pallas.hopper.mosaic.barriers import prefetch
from detjax.pallas.hopper.mosaic.columns import (
    column_maxima,
    column_sums,
    exchanges,
    load_queries,
    mask_rows,
    row_distances,
    store_column_numbers,
    store_columns,
    store_partial_sums,
)
from detjax.pallas.hopper.mosaic.layouts import PER_COLUMN, ROWS, line, swizzled

DEQUANTIZING: Final = KV_BLOCK // ROWS
"""Dequantizing warpgroups of a CTA with quantized pages; each has `ROWS` rows of every page."""
_PREFETCHING: Final = 2 * WARPGROUP
"""Threads that prefetch the page table."""
# The sums need 240 registers of a thread. A CTA of four warpgroups begins with 128 per thread, so the other three get
# what remains of 512: the loader holds addresses, a dequantizing thread 64 numbers of a page and their codes.
_, _LOADING_REGISTERS, _DEQUANTIZING_REGISTERS, _ = shared_registers(MULTIPLYING_REGISTERS, 40, 112, 112)


def scratch_types(problem: Problem) -> dict[str, Any]:
    """Returns the shared memory and barriers of a CTA."""
    dtype, slots, columns, kind = problem.dtype, problem.slots, problem.columns, problem.quantization
    scratch: dict[str, Any] = {
        "q": plgpu.SMEM((columns, problem.width), dtype, transforms=swizzled(problem.width)),
        # The swizzle is the values': both operands of a product have the same one.
        "p": plgpu.SMEM((columns, KV_BLOCK), dtype, transforms=swizzled(line(problem.value_width))),
        "kv": [plgpu.SMEM((slots, KV_BLOCK, size), dtype, transforms=swizzled(size)) for size in problem.ring_widths],
        # A slot is filled by one copy, or by the dequantizing warpgroups; only one warpgroup reads it.
        "loaded": plgpu.Barrier(num_arrivals=1 if kind is None else DEQUANTIZING, num_barriers=slots),
        "consumed": plgpu.Barrier(num_barriers=slots),
        **exchanges(columns),
    }
    if kind is not None:
        scratch |= {
            "codes": [page_buffers(kind, problem.code_slots, size) for size in problem.ring_widths],
            # One copy of codes and one of scales.
            "codes_loaded": plgpu.Barrier(num_arrivals=2, num_barriers=problem.code_slots),
            "codes_consumed": plgpu.Barrier(num_arrivals=DEQUANTIZING, num_barriers=problem.code_slots),
        }
    return scratch


class _Arrivals(NamedTuple):
    """Destination of the loader's copies: pages as they are multiplied, or codes and scales.

    Attributes:
        rings: for keys and for values, or for both, the slots of each array of a page.
        loaded: name of the barriers that copies complete.
        consumed: name of the barriers that release slots.
    """

    rings: list[tuple[Any, ...]]
    slots: int
    loaded: str
    consumed: str


class _Tile(NamedTuple):
    """A segment and its queries.

    Attributes:
        tile: index of the tile among the request's query tokens.
        position: position of the tile's first query.
        sinks: sink of each column, or None.
        queries: number of columns that are queries.
        first_step: step of the segment's first page of keys.
    """

    segment: Segment
    kv_head: Array
    tile: Array
    kv_length: Array
    position: Array
    sinks: Array | None
    queries: Array
    first_step: Array


class _Sums(NamedTuple):
    """Running sums of a sequence.

    Attributes:
        o: running sums of values, for each chunk of columns.
        m: running maximum of each query.
        total: running sum of each query's probabilities.
    """

    o: tuple[Array, ...]
    m: Array
    total: Array


class Kernel:
    """A CTA of one multiplying and one loading warpgroup, and two dequantizing ones if pages are quantized.

    A *step* is a page of keys or of values; keys and values of block `i` are steps `2 i` and `2 i + 1`.
    """

    def __init__(
        self,
        problem: Problem,
        schedule: Schedule,
        masking: Masking,
        operands: Operands,
        results: list[Any],
        scratch: dict[str, Any],
    ) -> None:
        self.problem, self.masking, self.operands, self.scratch = problem, masking, operands, scratch
        self.splits = schedule.splits(problem)
        self.o_gmem, *partials = results
        self.partials = SplitPartials(*partials) if schedule.cut else None
        if problem.quantization is None:
            self.arrivals = _Arrivals([(ring,) for ring in scratch["kv"]], problem.slots, "loaded", "consumed")
        else:
            self.arrivals = _Arrivals(scratch["codes"], problem.code_slots, "codes_loaded", "codes_consumed")
        self.line = Line(problem, schedule, masking, operands.q_start, operands.kv_length)
        self.cta = lax.axis_index("cta")
        self.warpgroup = lax.axis_index("warpgroup")
        # The loader reads page ids one at a time, waiting for each. All CTAs together bring the table to the L2 cache
        # while they look for their shares.
        prefetch(operands.page_table, self.cta, parts=schedule.ctas, threads=_PREFETCHING)
        self.share = self.line.share(self.cta)

    def run(self) -> None:
        """Runs the warpgroup's role."""
        roles = [self.multiply, self.load]
        if self.problem.quantization is not None:
            roles.append(lambda: self.dequantize((self.warpgroup - 2) * ROWS))
        lax.switch(self.warpgroup, roles)  # clamps the index: further warpgroups have the last role

    def take_registers(self, count: int) -> None:
        """Sets the registers of each thread of the warpgroup, if the CTA has four warpgroups."""
        # They begin with 128 per thread. Two warpgroups begin with 256, which suffice for every role.
        if self.problem.quantization is not None:
            plgpu.set_max_registers(count, action="increase" if count > 128 else "decrease")

    def head_and_tile(self, segment: Segment) -> tuple[Array, Array]:
        """Returns the KV head and the tile of a segment's sequence."""
        tiles = jnp.int32(self.problem.tiles)
        return lax.div(segment.sequence, tiles), lax.rem(segment.sequence, tiles)

    def ring(self, number: int) -> Any:
        """Returns the slots of keys (0) or values (1), which share a ring if they are equally wide."""
        rings = self.scratch["kv"]
        return rings[number % len(rings)]

    # --- the loading warpgroup ----------------------------------------------------------------------------------------

    def load(self) -> None:
        """Loads all pages of the share with one warp, which starts copies faster than a whole warpgroup."""
        self.take_registers(_LOADING_REGISTERS)

        @plgpu.warp_map
        def _(warp: Array) -> None:
            @pl.when(warp == 0)
            def _() -> None:
                steps = self.line.fold(self.share, self.load_segment, jnp.int32(0))
                self.await_all(self.arrivals.consumed, steps, self.arrivals.slots)

    def await_all(self, name: str, count: Array, slots: int) -> None:
        """Waits for the releases that are outstanding after the last of `count` loads was started."""

        @pl.loop(lax.max(count - slots, 0), count)
        def _(index: Array) -> None:
            plgpu.barrier_wait(self.scratch[name].at[lax.rem(index, jnp.int32(slots))])

    def await_slot(self, name: str, step: Array, slots: int) -> Array:
        """Waits until the step's slot is free, and returns the slot."""
        slot = lax.rem(step, jnp.int32(slots))

        @pl.when(step >= slots)
        def _() -> None:
            plgpu.barrier_wait(self.scratch[name].at[slot])

        return slot

    def load_segment(self, segment: Segment, step: Array) -> Array:
        """Loads a segment's pages, and returns the next step."""
        kv_head, _ = self.head_and_tile(segment)
        kv_length = self.operands.kv_length[segment.request]

        def load_block(i: Array, step: Array) -> Array:
            block = segment.first_block + segment.skipped + i
            page, remaining = self.operands.page_table[segment.request, block], kv_length - block * KV_BLOCK
            for number in range(len(self.operands.pools)):
                slot = self.await_slot(self.arrivals.consumed, step + number, self.arrivals.slots)
                self.copy_page(number, page, kv_head, slot, remaining)
            return step + 2

        return lax.fori_loop(0, segment.visits, load_block, step)

    def copy_page(self, number: int, page: Array, kv_head: Array, slot: Array, remaining: Array) -> None:
        """Starts to copy the rows of a page of keys (0) or values (1) that a request has into a slot, which is free.

        `remaining` are the rows of the request from this page on; see `copy_rows`.
        """
        barrier = self.scratch[self.arrivals.loaded].at[slot]
        arrays = [
            *zip(self.operands.pools[number], self.arrivals.rings[number % len(self.arrivals.rings)], strict=True)
        ]

        def copy(rows: int) -> None:
            for pages, ring in arrays:
                source, target = pages.at[page, kv_head], ring.at[slot]
                if rows < KV_BLOCK:
                    source, target = source.at[pl.ds(0, rows)], target.at[pl.ds(0, rows)]
                plgpu.copy_gmem_to_smem(source, target, barrier)

        if self.problem.quantization is not None:
            copy(KV_BLOCK)
            return
        copy_rows(copy, remaining)

    # --- the dequantizing warpgroups ----------------------------------------------------------------------------------

    def dequantize(self, first_row: Array) -> None:
        """Dequantizes `ROWS` rows of every page of the share, for the matrix unit."""
        self.take_registers(_DEQUANTIZING_REGISTERS)

        def dequantize_block(_: Array, step: Array) -> Array:
            for number in range(len(self.operands.pools)):
                self.dequantize_page(number, step + number, first_row)
            return step + len(self.operands.pools)

        steps = self.line.fold(
            self.share, lambda segment, step: lax.fori_loop(0, segment.visits, dequantize_block, step), jnp.int32(0)
        )
        self.await_all("consumed", steps, self.problem.slots)

    def dequantize_page(self, number: int, step: Array, first_row: Array) -> None:
        """Dequantizes `ROWS` rows of a page of keys (0) or values (1)."""
        kind = self.problem.quantization
        assert kind is not None
        code_slot = lax.rem(step, jnp.int32(self.problem.code_slots))
        plgpu.barrier_wait(self.scratch["codes_loaded"].at[code_slot])
        slot = self.await_slot("consumed", step, self.problem.slots)
        codes, scales = self.arrivals.rings[number % len(self.arrivals.rings)]
        target = self.ring(number).at[slot]
        dequantize(kind, codes.at[code_slot], scales.at[code_slot], target, first_row)
        # Codes are in registers by now, so the loader may go ahead before the numbers are visible to the matrix unit.
        plgpu.barrier_arrive(self.scratch["codes_consumed"].at[code_slot])
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.scratch["loaded"].at[slot])

    # --- the multiplying warpgroup ------------------------------------------------------------------------------------
    # All threads of the warpgroup meet twice per block: in `column_maxima`, and in `commit_smem` after p and its
    # partial sums are written. Maxima are read before the second meeting and written after it. Sums are read before
    # the next block's first meeting and written after it, and so is p, whose product has ended by then. No thread
    # overwrites what another still reads, so no further barrier is needed.

    def multiply(self) -> None:
        """Computes all segments of the share."""
        self.take_registers(MULTIPLYING_REGISTERS)
        if self.partials is not None and not self.splits.by_sequence:
            # Default: a CTA in which no sequence begins has none that continues in the next CTA.
            self.store_split(self.partials, Split(*(jnp.int32(0),) * len(Split._fields)))
        self.line.fold(self.share, self.multiply_segment, jnp.int32(0))

    def multiply_segment(self, segment: Segment, first_step: Array) -> Array:
        """Merges or stores a segment's blocks, and returns the next step."""
        tile = self.load_tile(segment, first_step)
        if self.partials is None:
            self.merge_segment(tile)
        else:
            merge_segment = functools.partial(self.merge_segment, tile)
            lax.cond(segment.skipped == 0, merge_segment, functools.partial(self.store_segment, self.partials, tile))
        return first_step + 2 * segment.visits

    def load_tile(self, segment: Segment, first_step: Array) -> _Tile:
        """Loads a segment's queries and sinks."""
        problem = self.problem
        kv_head, tile = self.head_and_tile(segment)
        kv_length = self.operands.kv_length[segment.request]
        first_token = tile * problem.tile_tokens
        position = self.operands.q_start[segment.request] + first_token
        sinks = None if self.operands.sinks is None else self.by_column(self.operands.sinks, kv_head)
        # Columns after the last token are zeros.
        queries = lax.min(jnp.int32(problem.tile_tokens), problem.tokens - first_token) * problem.group
        source = self.operands.q.at[segment.request, :, kv_head]
        load_queries(source, self.scratch["q"], first_token, queries)
        plgpu.commit_smem()
        return _Tile(segment, kv_head, tile, kv_length, position, sinks, queries, first_step)

    def by_column(self, ref: Any, kv_head: Array) -> Array:
        """Loads the numbers of a head's columns."""
        return plgpu.load(ref.at[kv_head], layout=PER_COLUMN, optimized=False)

    def visit(
        self, tile: _Tile, i: Array, use: Callable[[int, Array, Array], Any]
    ) -> tuple[Array, Array, tuple[Any, ...]]:
        """Returns maxima and sums of the segment's block i, and `use(chunk, product, maxima)` of each chunk."""
        segment, step = tile.segment, tile.first_step + 2 * i
        k_slot, v_slot = (lax.rem(step + number, jnp.int32(self.problem.slots)) for number in range(2))
        k, v = self.ring(0).at[k_slot], self.ring(1).at[v_slot]
        keys = (segment.first_block + segment.skipped + i) * KV_BLOCK
        plgpu.barrier_wait(self.scratch["loaded"].at[k_slot])
        s = self.score(tile, k, k_slot, keys)
        m_b = self.exponentiate(s)
        plgpu.barrier_wait(self.scratch["loaded"].at[v_slot])
        length = tile.kv_length - keys

        @pl.when(keys + KV_BLOCK > tile.kv_length)
        def _() -> None:
            for first in range(0, KV_BLOCK, ROWS):
                clear_tail(v.at[pl.ds(first, ROWS)], length - first)

        # For the matrix unit, which reads p and the zeros, and for all threads, which read the partial sums.
        plgpu.commit_smem()
        results = self.multiply_values(v, lambda chunk, product: use(chunk, product, m_b))
        plgpu.barrier_arrive(self.scratch["consumed"].at[v_slot])
        return m_b, column_sums(self.scratch["sums"]), results

    def score(self, tile: _Tile, k: Any, k_slot: Array, keys: Array) -> Array:
        """Returns the shaped and masked scores of a block, `[KV_BLOCK, n]`; releases the keys."""
        problem, masking = self.problem, self.masking

        def multiply(accumulator: Any) -> Array:
            plgpu.wgmma(accumulator, k, self.scratch["q"].T)
            return accumulator[...]

        s = pl.run_scoped(multiply, plgpu.ACC((KV_BLOCK, problem.columns), ACCUMULATOR))  # pyright: ignore
        # Scores are in registers, so the loader may replace the keys while the block's values are awaited.
        plgpu.barrier_arrive(self.scratch["consumed"].at[k_slot])
        positions = tile.position + lax.div(column_indices(problem.columns), jnp.int32(problem.group))
        slopes = self.operands.slopes
        slopes = None if slopes is None else along_columns(self.by_column(slopes, tile.kv_head), s.shape)
        s = shaped_scores(s, masking, slopes, lambda: row_distances(keys - positions))
        return mask_rows(s, *visible_keys(masking, keys, positions, tile.kv_length, PER_COLUMN))

    def exponentiate(self, s: Array) -> Array:
        """Stores p and its partial sums to shared memory, and returns the block's maxima."""
        maxima = column_maxima(s, self.scratch["maxima"])
        p, m_b = exponentials(s, exponent_scale(self.masking), maxima, along_columns)
        store_partial_sums(p, self.scratch["sums"])
        # p is the product's second operand, which the matrix unit takes from shared memory only.
        self.scratch["p"].T[...] = p.astype(self.problem.dtype)
        return m_b

    def multiply_values(self, v: Any, use: Callable[[int, Array], Any]) -> tuple[Any, ...]:
        """Returns `use(chunk, product)` of the product of each chunk of values with p."""
        results = []
        for chunks in self.problem.chunks_at_once:

            def multiply(*accumulators: Any, chunks: list[int] = chunks) -> list[Array]:
                for accumulator, chunk in zip(accumulators, chunks, strict=True):
                    columns = pl.ds(self.problem.value_chunks[chunk], ROWS)
                    plgpu.wgmma(accumulator, v.at[:, columns].T, self.scratch["p"].T)
                return [accumulator[...] for accumulator in accumulators]

            shape = ROWS, self.problem.columns
            accumulators = [plgpu.ACC(shape, ACCUMULATOR) for _ in chunks]  # pyright: ignore
            products = pl.run_scoped(multiply, *accumulators)
            results += [use(chunk, product) for chunk, product in zip(chunks, products, strict=True)]
        return tuple(results)

    def merge_block(self, tile: _Tile, i: Array, sums: _Sums) -> _Sums:
        """Returns the sums including the segment's block i."""

        def merge_chunk(chunk: int, product: Array, m_b: Array) -> Array:
            _, a, b = rescaling(sums.m, m_b)
            shape = product.shape
            return merged(sums.o[chunk], along_columns(a, shape), product, along_columns(b, shape))

        m_b, total_b, o = self.visit(tile, i, merge_chunk)
        m, a, b = rescaling(sums.m, m_b)
        return _Sums(o, m, merged(sums.total, a, total_b, b, PER_COLUMN))

    def merge_segment(self, tile: _Tile) -> None:
        """Merges the first segment of a sequence; stores the result, or the prefix if the sequence is split."""
        segment, partials = tile.segment, self.partials
        if partials is not None:
            first_place = self.splits.first_place(self.cta + 1, self.share.usual)
            remaining = segment.blocks - segment.visits
            self.store_split(partials, Split(segment.request, segment.sequence, remaining, first_place))
        zeros = tuple(splat(0.0, (ROWS, self.problem.columns)) for _ in self.problem.value_chunks)
        sums = _Sums(zeros, *initial_statistics(tile.sinks, self.problem.columns, PER_COLUMN))
        sums = lax.fori_loop(0, segment.visits, functools.partial(self.merge_block, tile), sums)
        if partials is None:
            return self.store(tile, sums)
        is_whole = segment.visits == segment.blocks
        pl.when(is_whole)(lambda: self.store(tile, sums))
        return pl.when(~is_whole)(lambda: self.store_prefix(partials, segment, sums))

    def store(self, tile: _Tile, sums: _Sums) -> None:
        """Stores the result of a whole sequence."""
        problem = self.problem
        for first, x in zip(problem.value_chunks, sums.o, strict=True):
            y = normalized(x, sums.total, problem.dtype, along_columns)
            target = self.o_gmem.at[tile.segment.request, :, tile.kv_head, :, pl.ds(first, ROWS)]
            store_columns(y, target, tile.tile * problem.tile_tokens, tile.queries)

    # --- partial results of split sequences ---------------------------------------------------------------------------

    def store_split(self, partials: SplitPartials, split: Split) -> None:
        """Stores the record of a sequence that begins here, for the merge kernel."""
        for index, number in enumerate(split):
            partials.splits[self.splits.record(self.cta, split.request, split.sequence), index] = number

    def store_prefix(self, partials: SplitPartials, segment: Segment, sums: _Sums) -> None:
        """Stores the sums of a sequence that continues in the next CTA."""
        record = self.splits.record(self.cta, segment.request, segment.sequence)
        for chunk, x in enumerate(sums.o):
            self.store_chunk(partials.prefixes.at[record], chunk, x)
        for index, numbers in enumerate((sums.m, sums.total)):
            store_column_numbers(numbers, partials.prefix_statistics.at[record, :, index])

    def store_segment(self, partials: SplitPartials, tile: _Tile) -> None:
        """Stores the blocks of a segment unmerged, because its sequence began in an earlier CTA."""

        def store_block(i: Array, carry: None) -> None:
            place = self.splits.first_place(self.cta, self.share.usual) + i
            m_b, total_b, _ = self.visit(
                tile, i, lambda chunk, product, _: self.store_chunk(partials.blocks.at[place], chunk, product)
            )
            for index, numbers in enumerate((m_b, total_b)):
                store_column_numbers(numbers, partials.statistics.at[:, index, place])

        lax.fori_loop(0, tile.segment.visits, store_block, None)

    def store_chunk(self, ref: Any, chunk: int, x: Array) -> None:
        """Stores a chunk of columns of a partial result."""
        # The merge kernel reads it soon. Keys and values that stream through the L2 cache would evict it before.
        target = ref.at[:, :, pl.ds(self.problem.value_chunks[chunk], ROWS)]
        store_columns(x, target, 0, self.problem.rows, keep_in_cache=True)
