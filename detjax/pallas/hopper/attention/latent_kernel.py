"""Latent attention kernel on Hopper: the roles of a CTA's warpgroups."""

import enum
from typing import Any, Final, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from detjax.contract import ACCUMULATOR, KV_BLOCK
from detjax.operands.options import Masking
from detjax.pallas.hopper.attention.decode_line import Line, Segment
from detjax.pallas.hopper.attention.decode_schedule import Schedule
from detjax.pallas.hopper.attention.latent_schedule import PART, Problem
from detjax.pallas.hopper.attention.online_softmax import (
    exponent_scale,
    exponentials,
    initial_statistics,
    log2_normalizers,
    merged,
    normalized,
    rescaling,
    visible_keys,
)
from detjax.pallas.hopper.attention.queries_on_rows import along_rows, row_indices, splat
from detjax.pallas.hopper.attention.warpgroups import (
    CONSUMERS,
    FIRST_BARRIER,
    LOADING_REGISTERS,
    MULTIPLYING_REGISTERS,
    WARPGROUPS,
    copy_rows,
)
from detjax.pallas.hopper.mosaic.barriers import await_loads, sync
from detjax.pallas.hopper.mosaic.layouts import MATRIX, PER_ROW, ROWS, swizzled
from detjax.pallas.hopper.mosaic.products import start_product
from detjax.pallas.hopper.mosaic.tiles import (
    LANE_SUMS,
    clear_rows,
    joined,
    load_by_thread,
    mask_columns,
    row_sums_of_halves,
    store_by_thread,
    store_lane_sums,
    store_lines,
)

_MEETING: Final = FIRST_BARRIER
"""Named barrier at which both multiplying warpgroups meet."""


class _Row(enum.IntEnum):
    """Numbers per row that warpgroups exchange in shared memory: one array, because every array takes whole kB."""

    MAXIMUM = 0
    """Maximum of a block's scores in the first half of its keys."""
    OTHER_MAXIMUM = 1
    """Maximum in the second half."""
    TOTAL = 2
    """A span's sum of probabilities."""
    RUNNING_MAXIMUM = 3
    """Maximum of all earlier spans of the segment."""
    RUNNING_TOTAL = 4
    """Sum of probabilities of all earlier spans of the segment."""


class Operands(NamedTuple):
    """Input arrays of the kernel.

    Attributes:
        q: rows of queries, `[N * H, K]`, padded so that the last sequence has `ROWS` rows.
        pages: pages of keys, `[P, 1, S, K]`.
        page_table: page ids of each request's blocks.
        request: request of each tile.
        q_start: position of each tile's first query.
        kv_length: number of the keys of each tile's request; 0 for padding tiles.
    """

    q: Any
    pages: Any
    page_table: Any
    request: Any
    q_start: Any
    kv_length: Any


class Results(NamedTuple):
    """Output arrays of the kernel.

    Attributes:
        o: the output `[tile, sequence, 64, V]`, except for split sequences.
        normalizers: log2 of each row's normalizer, `[tile, sequence, 64]`, except for split sequences.
        sums: sums of values of spans, `[place, part]` and a tile of 64 columns by thread; see `partial_results`.
        statistics: maxima and sums of probabilities of spans, `[place, 2, 64]`.
        splits: first span of each sequence that its first CTA has not merged, and end of its spans, or zeros if it is
            not split; `[tile * sequence, 2]`.
    """

    o: Any
    normalizers: Any
    sums: Any
    statistics: Any
    splits: Any


class _Sums(NamedTuple):
    """A warpgroup's running sums of a span.

    Attributes:
        o: running sums of values, for each of the warpgroup's parts of columns.
        m: running maximum of each row.
        total: running sum of each row's probabilities, in the second warpgroup only.
    """

    o: tuple[Array, ...]
    m: Array
    total: Array


def scratch_types(problem: Problem) -> dict[str, Any]:
    """Returns the shared memory and barriers of a CTA."""

    def rows(*shape: int) -> Any:
        return plgpu.SMEM(shape, problem.dtype, transforms=swizzled(PART))

    return {
        "q": rows(ROWS, problem.width),
        "page": rows(problem.parts, KV_BLOCK, PART),
        "lane_sums": plgpu.SMEM(LANE_SUMS, ACCUMULATOR),
        "rows": plgpu.SMEM((len(_Row), ROWS), ACCUMULATOR),
        "loaded": plgpu.Barrier(num_barriers=problem.parts),
        # Each part of values has one consumer, the warpgroup that multiplies it.
        "consumed": plgpu.Barrier(num_barriers=problem.value_parts),
        "p_consumed": plgpu.Barrier(num_arrivals=WARPGROUPS),
        "q_loaded": plgpu.Barrier(),
        "q_consumed": plgpu.Barrier(num_arrivals=WARPGROUPS),
    }


class Kernel:
    """A CTA of two multiplying warpgroups and one loading warpgroup.

    Both multiplying warpgroups have the same 64 rows, because the sums of 512 columns exceed one warpgroup's registers.
    Each scores one half of a block's keys, and multiplies every other part of the values' columns. So the matrix unit
    reads a page once for the scores and once as values. The warpgroups exchange probabilities in the part of the page
    that is keys only, which nobody needs after the scores.

    A *step* is a block that the CTA visits. Shared memory has room for one page, since a page of 576 columns takes 144
    kB and queries 72. Each part is overwritten by the next page's as soon as it has been multiplied, which overlaps the
    loads of one page with the products of the page before.

    Barriers: a copy completes `loaded` of its part. A part of values is released by the warpgroup that has multiplied
    it (`consumed`), the part of keys only by both, after they have read the probabilities in it (`p_consumed`), and
    the queries by both, after a segment's last scores (`q_consumed`).
    """

    def __init__(
        self,
        problem: Problem,
        schedule: Schedule,
        masking: Masking,
        operands: Operands,
        results: Results,
        scratch: dict[str, Any],
    ) -> None:
        self.problem, self.schedule, self.masking = problem, schedule, masking
        self.operands, self.results, self.scratch = operands, results, scratch
        self.line = Line(problem, schedule, masking, operands.q_start, operands.kv_length)
        self.cta = lax.axis_index("cta")
        self._warpgroup = lax.axis_index("warpgroup")
        self.share = self.line.share(self.cta)

    @property
    def warpgroup(self) -> Array:
        """The warpgroup's number, opaque to the compiler; see `prefill_wide`."""
        return lax.optimization_barrier(self._warpgroup)

    def run(self) -> None:
        """Runs the warpgroup's role."""
        lax.cond(self._warpgroup < WARPGROUPS, self.multiply, self.load)

    # --- the loading warpgroup ----------------------------------------------------------------------------------------

    def load(self) -> None:
        """Loads queries and pages of the share with one warp."""
        plgpu.set_max_registers(LOADING_REGISTERS, action="decrease")

        @plgpu.warp_map
        def _(warp: Array) -> None:
            @pl.when(warp == 0)
            def _() -> None:
                steps = self.line.fold(self.share, self.load_segment, jnp.int32(0))

                @pl.when(steps > 0)
                def _() -> None:
                    plgpu.barrier_wait(self.scratch["q_consumed"])
                    for part in range(self.problem.parts):
                        self.await_release(part)

    def await_release(self, part: int) -> None:
        """Waits until a part of the page is released."""
        values = self.problem.value_parts
        plgpu.barrier_wait(self.scratch["consumed"].at[part] if part < values else self.scratch["p_consumed"])

    def load_segment(self, segment: Segment, step: Array) -> Array:
        """Loads a segment's queries and pages, and returns the next step."""
        problem, scratch = self.problem, self.scratch
        pl.when(step > 0)(lambda: plgpu.barrier_wait(scratch["q_consumed"]))
        first = segment.request * (problem.tokens * problem.heads) + segment.sequence * problem.group
        plgpu.copy_gmem_to_smem(self.operands.q.at[pl.ds(first, ROWS)], scratch["q"], scratch["q_loaded"])
        request, kv_length = self.operands.request[segment.request], self.operands.kv_length[segment.request]

        def load_block(i: Array, step: Array) -> Array:
            block = segment.skipped + i
            page, remaining = self.operands.page_table[request, block], kv_length - block * KV_BLOCK
            # In the order of their release: the probabilities' part after the scores, values one by one.
            for part in (*range(problem.value_parts, problem.parts), *range(problem.value_parts)):
                pl.when(step > 0)(lambda part=part: self.await_release(part))

                def copy(rows: int, part: int = part) -> None:
                    source = self.operands.pages.at[page, 0, pl.ds(0, rows), pl.ds(part * PART, PART)]
                    target = scratch["page"].at[part, pl.ds(0, rows)]
                    plgpu.copy_gmem_to_smem(source, target, scratch["loaded"].at[part])

                copy_rows(copy, remaining)
            return step + 1

        return lax.fori_loop(0, segment.visits, load_block, step)

    # --- the multiplying warpgroups -----------------------------------------------------------------------------------
    # Both warpgroups meet twice per block: when maxima are in shared memory, and when probabilities are. What one of
    # them overwrites after a meeting, the other has read before it.

    def multiply(self) -> None:
        """Computes all segments of the share."""
        plgpu.set_max_registers(MULTIPLYING_REGISTERS, action="increase")
        self.line.fold(self.share, lambda segment, _: self.multiply_segment(segment), jnp.int32(0))

    def multiply_segment(self, segment: Segment) -> Array:
        """Computes a segment, span by span."""
        if self.schedule.cut:
            pl.when((segment.skipped == 0) & (self.warpgroup == 0))(lambda: self.store_split(segment))
        plgpu.barrier_wait(self.scratch["q_loaded"])
        unit = jnp.int32(self.problem.cut_unit)

        @pl.loop(0, lax.div(segment.visits + (unit - 1), unit))
        def _(span: Array) -> None:
            first = span * unit
            zeros = tuple(splat(0.0, (ROWS, PART)) for _ in range(self.pieces))
            sums = _Sums(zeros, *initial_statistics(None))
            end = lax.min(first + unit, segment.visits)
            sums = lax.fori_loop(first, end, lambda i, sums: self.merge_block(segment, i, sums), sums)
            self.end_span(segment, span, sums)

        return jnp.int32(0)

    @property
    def pieces(self) -> int:
        """Number of parts of the values' columns that a warpgroup has."""
        return self.problem.value_parts // WARPGROUPS

    def value_part(self, piece: int) -> Array:
        """Returns the part of the page that is piece number `piece` of the warpgroup."""
        return WARPGROUPS * piece + self.warpgroup

    def numbers(self, row: Any) -> Any:
        """Returns numbers of each row in shared memory; see `_Row`."""
        return self.scratch["rows"].at[row]

    @property
    def half(self) -> Any:
        """The warpgroup's half of a block's keys."""
        return pl.ds(self.warpgroup * ROWS, ROWS)

    def merge_block(self, segment: Segment, i: Array, sums: _Sums) -> _Sums:
        """Returns the sums including the segment's block i."""
        scratch = self.scratch
        keys = (segment.skipped + i) * KV_BLOCK
        s = self.score(segment, i)
        # Loaded again for every block, for lack of registers.
        positions = self.operands.q_start[segment.request] + lax.div(row_indices(), jnp.int32(self.problem.group))
        kv_length = self.operands.kv_length[segment.request]
        s = mask_columns(s, *visible_keys(self.masking, keys + self.warpgroup * ROWS, positions, kv_length))
        maxima = s.max(axis=1)
        self.numbers(_Row.MAXIMUM + self.warpgroup)[...] = maxima
        sync(_MEETING, CONSUMERS)
        others = _load(self.numbers(_Row.OTHER_MAXIMUM - self.warpgroup))
        p, m_b = exponentials(s, exponent_scale(self.masking), jnp.maximum(maxima, others))
        # The contract adds each lane's keys in ascending order: the second warpgroup continues the first one's sums.
        pl.when(self.warpgroup == 0)(lambda: store_lane_sums(p, scratch["lane_sums"]))
        exchanged = scratch["page"].at[self.problem.value_parts]
        store_lines(p.astype(self.problem.dtype), exchanged.at[self.half])

        # A page may hold NaN after its request's last token, and 0 * NaN is not 0.
        @pl.when(keys + KV_BLOCK > kv_length)
        def _() -> None:
            for part in range(self.problem.value_parts):
                clear_rows(scratch["page"].at[part, self.half], kv_length - keys - self.warpgroup * ROWS)

        plgpu.commit_smem()
        sync(_MEETING, CONSUMERS)
        total_b = lax.cond(
            self.warpgroup == 0, lambda: splat(0.0, (ROWS,)), lambda: row_sums_of_halves(p, scratch["lane_sums"])
        )
        # In registers p frees its memory for the next page before the values are multiplied.
        p = joined(*(_load(exchanged.at[pl.ds(first, ROWS)], MATRIX) for first in (0, ROWS)))
        await_loads(p, layouts=(MATRIX,))
        plgpu.barrier_arrive(scratch["p_consumed"])
        m, a, b = rescaling(sums.m, m_b)
        total = merged(sums.total, a, total_b, b)
        p, m, total, a, b = lax.optimization_barrier((p, m, total, a, b))
        return _Sums(self.multiply_values(p, a, b, sums.o), m, total)

    def score(self, segment: Segment, i: Array) -> Array:
        """Returns the products of the queries and the warpgroup's half of a block's keys."""
        scratch = self.scratch

        def multiply(accumulator: Any) -> Array:
            for part in range(self.problem.parts):
                plgpu.barrier_wait(scratch["loaded"].at[part])
                keys = scratch["page"].at[part, self.half]
                plgpu.wgmma(accumulator, scratch["q"].at[:, pl.ds(part * PART, PART)], keys.T)
            return accumulator[...]

        s = pl.run_scoped(multiply, plgpu.ACC((ROWS, KV_BLOCK // WARPGROUPS), ACCUMULATOR))  # pyright: ignore
        pl.when(i + 1 == segment.visits)(lambda: plgpu.barrier_arrive(scratch["q_consumed"]))
        return s

    def multiply_values(self, p: Array, a: Array, b: Array, o: tuple[Array, ...]) -> tuple[Array, ...]:
        """Returns the running sums `o`, scaled by `a`, plus the products of `p` and values, scaled by `b`.

        Each piece is merged before the next one is multiplied, while the other warpgroup multiplies.
        """
        merged_o = []
        for piece, x in enumerate(o):
            product = start_product(p, self.scratch["page"].at[self.value_part(piece)])
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(self.scratch["consumed"].at[self.value_part(piece)])
            product = lax.optimization_barrier(product)
            x = merged(x, along_rows(a, x.shape), product, along_rows(b, x.shape))
            merged_o.append(lax.optimization_barrier(x))
        return tuple(merged_o)

    # --- spans --------------------------------------------------------------------------------------------------------

    def record(self, segment: Segment) -> Array:
        """Returns the number of a segment's sequence."""
        return segment.request * self.problem.sequences + segment.sequence

    def store_split(self, segment: Segment) -> None:
        """Stores the spans that the merge kernel has to merge of a sequence that begins here."""
        is_split, unit = segment.visits < segment.blocks, self.problem.cut_unit
        for index, blocks in enumerate((segment.visits, segment.blocks)):
            spans = lax.div(blocks + (unit - 1), jnp.int32(unit))
            self.results.splits[self.record(segment), index] = jnp.where(is_split, spans, 0)

    def end_span(self, segment: Segment, span: Array, sums: _Sums) -> None:
        """Merges a span with the earlier ones of the segment, or stores it unmerged if its sequence began elsewhere.

        Registers have no room for two sums, so the sums of earlier spans are in memory.
        """
        results = self.results
        is_unmerged = segment.skipped > 0
        is_first = is_unmerged | (span == 0)
        initial = zip((_Row.RUNNING_MAXIMUM, _Row.RUNNING_TOTAL), initial_statistics(None), strict=True)
        m_before, total_before = (
            lax.cond(is_first, lambda x=x: x, lambda row=row: _load(self.numbers(row))) for row, x in initial
        )
        pl.when(self.warpgroup == 1)(lambda: _store(sums.total, self.numbers(_Row.TOTAL)))
        sync(_MEETING, CONSUMERS)
        total = _load(self.numbers(_Row.TOTAL))
        m, a, b = rescaling(m_before, sums.m)
        total = merged(total_before, a, total, b)
        place = self.cta
        if self.schedule.cut:
            number = lax.div(segment.skipped, jnp.int32(self.problem.cut_unit)) + span
            place = self.record(segment) * self.problem.most_spans + jnp.where(is_unmerged, number, 0)
        place_sums = results.sums.at[place]
        is_last = (segment.visits == segment.blocks) & ((span + 1) * self.problem.cut_unit >= segment.visits)
        is_result = ~is_unmerged & is_last

        # No fence between spans: a thread loads only sums that it has stored itself.
        def merge(piece: int, x: Array) -> Array:
            before = load_by_thread(place_sums.at[self.value_part(piece)])
            return merged(before, along_rows(a, x.shape), x, along_rows(b, x.shape))

        for piece, x in enumerate(sums.o):
            x = lax.cond(is_first, lambda x=x: x, lambda piece=piece, x=x: merge(piece, x))
            lax.cond(
                is_result,
                lambda piece=piece, x=x: self.store(segment, x, pl.ds(self.value_part(piece) * PART, PART), total),
                lambda piece=piece, x=x: store_by_thread(x, place_sums.at[self.value_part(piece)]),
            )

        # Both warpgroups have the same numbers, so one stores them. Both read the running ones at the end of the next
        # span, whose blocks' meetings come in between.
        @pl.when(self.warpgroup == 0)
        def _() -> None:
            for index, (row, x) in enumerate(((_Row.RUNNING_MAXIMUM, m), (_Row.RUNNING_TOTAL, total))):
                _store(x, self.numbers(row))
                _store(x, results.statistics.at[place, index])
            target = results.normalizers.at[segment.request, segment.sequence]
            pl.when(is_result)(lambda: _store(log2_normalizers(m, total), target))

    def store(self, segment: Segment, x: Array, columns: Any, total: Array) -> None:
        """Stores some columns of a whole sequence's result."""
        y = normalized(x, total, self.problem.dtype)
        _store(y, self.results.o.at[segment.request, segment.sequence, :, columns])


def _store(x: Array, target: Any) -> None:
    target[...] = x


def _load(source: Any, layout: Any = PER_ROW) -> Array:
    return plgpu.load(source, layout=layout, optimized=False)
