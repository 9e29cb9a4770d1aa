"""Attention of a few query tokens a request on Hopper (Pallas Mosaic GPU): decode, and verifying drafted tokens.

The queries of all heads that share keys, and of up to 16 tokens, are the columns of one tile. A *sequence* is one
request, one head of keys and one tile. Blocks of keys of all sequences lie on one line, in order, which is cut into one
*share* of equal length for each CTA: requests of any lengths are side by side. A CTA merges the blocks of a sequence
that it has from the first on. A sequence that began in an earlier CTA is *split*: the CTA stores each block's result by
itself, and a second kernel merges these in order. Where the cuts lie changes no bit.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from detjax.contract import ACCUMULATOR, KV_BLOCK
from detjax.kv_pages import KVPages, Queries
from detjax.numerics import ceil_div, round_up
from detjax.options import KVQuantization, Masking
from detjax.pallas.hopper import device
from detjax.pallas.hopper.attention.decode_merge import Split, SplitPartials, Splits, merge
from detjax.pallas.hopper.attention.dequantize import dequantize, page_buffers, page_bytes
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
from detjax.pallas.hopper.attention.warpgroups import MULTIPLYING_REGISTERS, launch
from detjax.pallas.hopper.device import SHARED_MEMORY, SHARED_MEMORY_RESERVED, WARPGROUP
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
from detjax.pallas.hopper.mosaic.layouts import PER_COLUMN, ROWS, UNIT, line, swizzled
from detjax.pallas.hopper.warps import find_places

MOST_TOKENS: Final = 16
"""The most query tokens of a request."""
_DEQUANTIZING: Final = KV_BLOCK // ROWS
"""Warpgroups that dequantize, where pages are quantized: each has its rows of every page."""
_PREFETCHING: Final = 2 * WARPGROUP
"""Threads that ask for the page table."""
_REGISTERS: Final = 512
"""Registers of four threads, one of each warpgroup."""
_LOADING_REGISTERS: Final = 40
_DEQUANTIZING_REGISTERS: Final = 112
_BYTES_IN_FLIGHT: Final = 128 * 1024
"""Bytes of pages in flight: enough to keep memory busy. What arrives last is all there at about the same time, and the
more that is, the longer it takes until it is multiplied."""
_MOST_PARTIALS: Final = 1 << 28
"""Bytes of partial results above which sequences are not split."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """Sizes of a call.

    Attributes:
        batch: requests.
        tokens: query tokens of each request.
        heads: query heads.
        kv_heads: heads of keys and values.
        width: columns of queries and keys.
        value_width: columns of values.
        most_blocks: the most blocks of keys that a request may have.
        dtype: dtype of the queries and of the output, of 2 bytes.
        quantization: kind of quantized pages, or None.
    """

    batch: int
    tokens: int
    heads: int
    kv_heads: int
    width: int
    value_width: int
    most_blocks: int
    dtype: Any
    quantization: KVQuantization | None = None

    @classmethod
    def from_operands(cls, q: Array, kv: KVPages, most_blocks: int) -> "Problem":
        """The problem of queries `[B, T, H, K]`."""
        batch, tokens, heads, width = q.shape
        kind = None if kv.quantized is None else kv.quantized[0].kind
        return cls(batch, tokens, heads, kv.kv_heads, width, kv.v.shape[-1], most_blocks, q.dtype, kind)

    @property
    def group(self) -> int:
        """Query heads that share a head of keys."""
        return self.heads // self.kv_heads

    @property
    def most_columns(self) -> int:
        """The most columns of a tile whose sums fit into registers."""
        return 64 if self.value_width <= 128 else 32

    @property
    def tile_tokens(self) -> int:
        """Tokens of a tile."""
        return min(self.tokens, self.most_columns // self.group)

    @property
    def tiles(self) -> int:
        """Tiles of a request."""
        return ceil_div(self.tokens, self.tile_tokens)

    @property
    def rows(self) -> int:
        """Queries of a tile; query `t * group + g` is head `g` of the tile's token `t`."""
        return self.tile_tokens * self.group

    @property
    def columns(self) -> int:
        """Columns of a tile: its queries, and zeros up to what the matrix unit multiplies."""
        return round_up(self.rows, UNIT)

    @property
    def sequences(self) -> int:
        """Sequences of a request."""
        return self.kv_heads * self.tiles

    @property
    def value_chunks(self) -> list[int]:
        """First columns of the chunks of 64 in which values are multiplied. The last chunk may overlap the one before:
        both then have the same bits."""
        return [*range(0, self.value_width - ROWS, ROWS), self.value_width - ROWS]

    @property
    def chunks_at_once(self) -> list[list[int]]:
        """The chunks of values in groups whose products are in registers at the same time, beside all sums."""
        size = max(1, 64 // self.columns)
        chunks = list(range(len(self.value_chunks)))
        return [chunks[first : first + size] for first in range(0, len(chunks), size)]

    @property
    def ring_widths(self) -> list[int]:
        """Columns of the rings of keys and values: one ring for both if they are equally wide, or one for each."""
        return list(dict.fromkeys((self.width, self.value_width)))

    @property
    def slots(self) -> int:
        """Pages of keys or values that the matrix unit can read, at once or while more are in flight."""
        return self._slots_and_code_slots[0]

    @property
    def code_slots(self) -> int:
        """Pages of codes in flight."""
        return self._slots_and_code_slots[1]

    @property
    def _slots_and_code_slots(self) -> tuple[int, int]:
        columns = self.columns
        exchanged = columns * (self.width + KV_BLOCK) * self.dtype.itemsize + columns * (4 + 32) * 4
        free = SHARED_MEMORY - SHARED_MEMORY_RESERVED - exchanged
        page = KV_BLOCK * sum(self.ring_widths) * self.dtype.itemsize
        if self.quantization is None:
            return min(6, free // page, max(3, _BYTES_IN_FLIGHT // page)), 0
        page_of_codes = sum(page_bytes(self.quantization, width) for width in self.ring_widths)
        # Numbers that wait hide nothing of the memory's latency: more room is for codes.
        slots = min(3, free // (page + page_of_codes))
        return slots, min(8, (free - slots * page) // page_of_codes)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How blocks are dealt out; no bit depends on it.

    Attributes:
        ctas: into how many shares the line of blocks is cut.
        cut: whether a share may begin within a sequence.
        slack: a cut that lies within this part of a share from a sequence's beginning moves there: what is not split
            needs no merging.
    """

    ctas: int
    cut: bool = True
    slack: float = 0.15

    def __post_init__(self) -> None:
        if self.ctas < 1:
            raise ValueError(f"Schedule: ctas is {self.ctas}; accepted: at least 1")
        if not 0 <= self.slack < 0.5:
            raise ValueError(f"Schedule: slack is {self.slack}; accepted: from 0 to less than 0.5")

    def check(self, problem: Problem) -> None:
        """Accepts every problem: any number of CTAs can share any line of blocks."""

    def splits(self, problem: Problem) -> Splits:
        """Sizes of the partial results of CTAs that share sequences."""
        blocks = ceil_div(problem.batch * problem.sequences * problem.most_blocks, self.ctas)
        return Splits(
            ctas=self.ctas,
            blocks=min(problem.most_blocks, blocks),
            batch=problem.batch,
            sequences=problem.sequences,
            tokens=problem.tokens,
            tiles=problem.tiles,
            tile_tokens=problem.tile_tokens,
            group=problem.group,
            value_width=problem.value_width,
            dtype=problem.dtype,
        )


def default_schedule(problem: Problem) -> Schedule:
    """The schedule that serves a problem where none is given: sequences are split if the memory for it is small, or if
    there are too few sequences for all multiprocessors."""
    ctas = device.multiprocessors()
    is_small = Schedule(ctas).splits(problem).bytes <= _MOST_PARTIALS
    return Schedule(ctas, cut=is_small or problem.batch * problem.sequences < 2 * ctas)


def serves(q: Array, kv: KVPages) -> bool:
    """Whether tokens are few, a tile has room for the heads that share keys, and values fill the matrix unit's rows."""
    problem = Problem.from_operands(q, kv, 1)
    return problem.tokens <= MOST_TOKENS and problem.group <= problem.most_columns and problem.value_width >= ROWS


class _Operands(NamedTuple):
    """Arrays in memory that the kernel reads.

    Attributes:
        q: queries by head of keys, `[B, T, h, G, K]`.
        pools: the arrays of the pages of keys, and of values: numbers, or codes and scales.
        page_table: the page of each request's block.
        q_start: position of each request's first query.
        kv_length: number of each request's keys.
        sinks: the sink of each column of a tile, `[h, n]`, or None.
        slopes: ALiBi's slope of each column of a tile, `[h, n]`, or None.
    """

    q: Any
    pools: tuple[tuple[Any, ...], ...]
    page_table: Any
    q_start: Any
    kv_length: Any
    sinks: Any | None
    slopes: Any | None


def forward(
    q: Array,
    kv: KVPages,
    queries: Queries,
    sinks: Array | None,
    *,
    masking: Masking,
    schedule: Schedule | None = None,
) -> Array:
    """Output `[B, T, H, V]` of queries `[B, T, H, K]`, if decode `serves` them.

    Args:
        q: the queries.
        kv: pages of numbers, or quantized ones.
        queries: page table, start and length of each request.
        sinks: a score for each head, or None.
        masking: which keys a query sees, and how scores are shaped.
        schedule: default: `default_schedule`.
    """
    batch, tokens, heads, width = q.shape
    problem = Problem.from_operands(q, kv, queries.page_table.shape[1])
    schedule = schedule or default_schedule(problem)
    schedule.check(problem)
    shape = batch, tokens, problem.kv_heads, problem.group
    pools = tuple(tuple(jax.tree.leaves(pages)) for pages in (kv.k, kv.v))
    slopes = None if masking.alibi_slopes is None else jnp.asarray(masking.alibi_slopes, ACCUMULATOR)
    operands = _Operands(
        q.reshape(*shape, width),
        pools,
        queries.page_table,
        queries.start,
        queries.length,
        None if sinks is None else _by_column(sinks.astype(ACCUMULATOR), problem),
        None if slopes is None else _by_column(slopes, problem),
    )
    splits = schedule.splits(problem)
    out = [jax.ShapeDtypeStruct((*shape, problem.value_width), q.dtype)]
    if schedule.cut:
        out += splits.out_types()

    def body(operands: _Operands, results: list[Any], scratch: dict[str, Any]) -> None:
        _Kernel(problem, schedule, masking, operands, results, scratch).run()

    warpgroups = 2 if problem.quantization is None else 2 + _DEQUANTIZING
    scratch = _scratch(problem)
    o, *partials = launch("attention_decode", body, operands, out, schedule.ctas, scratch, warpgroups=warpgroups)
    if schedule.cut:
        o = merge(splits, o, SplitPartials(*partials))
    return o.reshape(batch, tokens, heads, problem.value_width)


def _by_column(per_head: Array, problem: Problem) -> Array:
    """Numbers of the query heads for the columns of a tile, `[h, n]`."""
    by_token = jnp.tile(per_head.reshape(problem.kv_heads, problem.group), (1, problem.tile_tokens))
    return jnp.pad(by_token, ((0, 0), (0, problem.columns - problem.rows)))


def _scratch(problem: Problem) -> dict[str, Any]:
    """Shared memory and barriers of a CTA."""
    dtype, slots, columns, kind = problem.dtype, problem.slots, problem.columns, problem.quantization
    scratch: dict[str, Any] = {
        "q": plgpu.SMEM((columns, problem.width), dtype, transforms=swizzled(problem.width)),
        # As wide lines as the values have: the matrix unit's operands share them.
        "p": plgpu.SMEM((columns, KV_BLOCK), dtype, transforms=swizzled(line(problem.value_width))),
        "kv": [plgpu.SMEM((slots, KV_BLOCK, size), dtype, transforms=swizzled(size)) for size in problem.ring_widths],
        "loaded": plgpu.Barrier(num_arrivals=1 if kind is None else _DEQUANTIZING, num_barriers=slots),
        "consumed": plgpu.Barrier(num_barriers=slots),
        **exchanges(columns),
    }
    if kind is not None:
        scratch |= {
            "codes": [page_buffers(kind, problem.code_slots, size) for size in problem.ring_widths],
            "codes_loaded": plgpu.Barrier(num_arrivals=2, num_barriers=problem.code_slots),
            "codes_consumed": plgpu.Barrier(num_arrivals=_DEQUANTIZING, num_barriers=problem.code_slots),
        }
    return scratch


class _Place(NamedTuple):
    """A block on the line.

    Attributes:
        request: the request.
        sequence: the sequence of the request: heads of keys, and for each head its tiles.
        skipped: blocks of the sequence before this one.
    """

    request: Array
    sequence: Array
    skipped: Array


class _Share(NamedTuple):
    """The blocks that a CTA has.

    Attributes:
        start: the first block.
        count: number of blocks.
        size: number of blocks that most CTAs have.
    """

    start: _Place
    count: Array
    size: Array


class _Segment(NamedTuple):
    """Blocks of one sequence that a CTA has.

    Attributes:
        request: the request.
        sequence: the sequence of the request.
        skipped: blocks of the sequence that earlier CTAs have.
        first_block: the block of the request's cache with which the sequence begins.
        blocks: number of the sequence's blocks.
        visits: how many of these the CTA has.
    """

    request: Array
    sequence: Array
    skipped: Array
    first_block: Array
    blocks: Array
    visits: Array


class _Line:
    """The line of blocks of all sequences, and its cuts."""

    def __init__(self, problem: Problem, schedule: Schedule, masking: Masking, operands: _Operands) -> None:
        self.problem, self.schedule, self.masking, self.operands = problem, schedule, masking, operands

    def blocks_of(self, request: Array) -> tuple[Array, Array]:
        """First block, and number of blocks, that some query token of the request sees; at least one."""
        length = self.operands.kv_length[request]
        first, end = jnp.int32(0), length
        if self.masking.causal or self.masking.window is not None:
            position = self.operands.q_start[request]
            if self.masking.causal:
                end = lax.min(end, position + self.problem.tokens)
            if self.masking.window is not None:
                first = lax.div(lax.max(position - (self.masking.window - 1), 0), jnp.int32(KV_BLOCK))
        end = lax.min(lax.div(end + (KV_BLOCK - 1), jnp.int32(KV_BLOCK)), jnp.int32(self.problem.most_blocks))
        end = lax.max(end, 1)
        first = lax.min(first, end - 1)
        return first, end - first

    def share(self, cta: Array) -> _Share:
        """The blocks of a CTA."""

        def amount(request: Array) -> Array:
            _, blocks = self.blocks_of(request)
            return blocks * self.problem.sequences

        def cuts(total: Array) -> tuple[Array, ...]:
            size = lax.div(total + (self.schedule.ctas - 1), jnp.int32(self.schedule.ctas))
            return size, lax.min(cta * size, total), lax.min((cta + 1) * size, total)

        total, places = find_places(amount, self.problem.batch, lambda total: cuts(total)[1:])
        size, *ends = cuts(total)
        slack = (size.astype(ACCUMULATOR) * self.schedule.slack).astype(jnp.int32)
        (begin, start), (end, _) = (self.adjusted(*cut, slack) for cut in zip(ends, places, strict=True))
        return _Share(start, end - begin, size)

    def adjusted(self, position: Array, place: tuple[Array, Array], slack: Array) -> tuple[Array, _Place]:
        """Where the schedule wants a cut, and the block after it.

        Args:
            position: the cut's place on the line.
            place: the request of the block after it, and how many of the request's blocks are before it.
            slack: how many blocks a cut may move.
        """
        request, offset = place
        _, blocks = self.blocks_of(request)
        sequence = lax.div(offset.astype(jnp.uint32), blocks.astype(jnp.uint32)).astype(jnp.int32)
        skipped = offset - sequence * blocks
        missing = jnp.where(skipped > 0, blocks - skipped, 0)
        to_beginning, to_next = skipped <= slack, missing <= slack
        if not self.schedule.cut:
            # A sequence belongs to the CTA in whose share it begins.
            to_beginning, to_next = skipped == 0, skipped > 0
        step = jnp.where(to_beginning, -skipped, jnp.where(to_next, missing, 0))
        is_same = to_beginning | ~to_next
        place_in_sequence = _Place(request, sequence, skipped + jnp.where(is_same, step, 0))
        pairs = zip(place_in_sequence, self.following(place_in_sequence), strict=True)
        return position + step, _Place(*(jnp.where(is_same, *pair) for pair in pairs))

    def following(self, place: _Place) -> _Place:
        """Where the next sequence begins."""
        is_last = place.sequence + 1 == self.problem.sequences
        request = jnp.where(is_last, place.request + 1, place.request)
        return _Place(request, jnp.where(is_last, 0, place.sequence + 1), jnp.zeros_like(place.skipped))

    def fold(self, share: _Share, step: Callable[[_Segment, Array], Array], carry: Array) -> Array:
        """The last `carry = step(segment, carry)` of a share's segments in order."""

        def body(state: tuple[_Place, Array, Array]) -> tuple[_Place, Array, Array]:
            place, remaining, carry = state
            first_block, blocks = self.blocks_of(place.request)
            count = lax.min(blocks - place.skipped, remaining)
            segment = _Segment(place.request, place.sequence, place.skipped, first_block, blocks, count)
            carry = step(segment, carry)
            return self.following(place), remaining - count, carry

        return lax.while_loop(lambda state: state[1] > 0, body, (share.start, share.count, carry))[-1]


class _Arrivals(NamedTuple):
    """Where pages arrive: as they are multiplied, or as codes and scales.

    Attributes:
        rings: for keys and for values, or for both, the slots of each array of a page.
        slots: number of slots.
        loaded: name of the barriers of their arrival.
        consumed: name of the barriers of their release.
    """

    rings: list[tuple[Any, ...]]
    slots: int
    loaded: str
    consumed: str


class _Tile(NamedTuple):
    """A segment as the multiplying warpgroup works on it.

    Attributes:
        segment: the segment.
        kv_head: head of keys.
        tile: tile of the request's query tokens.
        kv_length: number of the request's keys.
        position: position of the tile's first query.
        sinks: sink of each column, or None.
        queries: columns that are queries.
        first_step: the step of the segment's first page of keys.
    """

    segment: _Segment
    kv_head: Array
    tile: Array
    kv_length: Array
    position: Array
    sinks: Array | None
    queries: Array
    first_step: Array


class _Sums(NamedTuple):
    """What is merged so far of a sequence.

    Attributes:
        o: running sums of values, for each chunk of the columns.
        m: running maximum of each query.
        total: running sum of each query's probabilities.
    """

    o: tuple[Array, ...]
    m: Array
    total: Array


class _Kernel:
    """A CTA: a warpgroup that multiplies, one that loads, and two that dequantize where pages are quantized.

    A *step* is a page of keys or of values; keys and values of a block are steps `2 i` and `2 i + 1`.
    """

    def __init__(
        self,
        problem: Problem,
        schedule: Schedule,
        masking: Masking,
        operands: _Operands,
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
        self.line = _Line(problem, schedule, masking, operands)
        self.cta = lax.axis_index("cta")
        self.warpgroup = lax.axis_index("warpgroup")
        prefetch(operands.page_table, self.cta, parts=schedule.ctas, threads=_PREFETCHING)
        self.share = self.line.share(self.cta)

    def run(self) -> None:
        """Runs the warpgroup's role."""
        roles = [self.multiply, self.load]
        if self.problem.quantization is not None:
            roles.append(lambda: self.dequantize((self.warpgroup - 2) * ROWS))
        lax.switch(self.warpgroup, roles)  # the last one is that of all further warpgroups

    def take_registers(self, count: int) -> None:
        """Takes so many registers for each thread, where warpgroups that dequantize leave too few for the one that
        multiplies. Else all may have as many as that one."""
        if self.problem.quantization is not None:
            plgpu.set_max_registers(count, action="increase" if count > _REGISTERS // 4 else "decrease")

    def head_and_tile(self, segment: _Segment) -> tuple[Array, Array]:
        """Head of keys, and tile of query tokens, of a segment's sequence."""
        tiles = jnp.int32(self.problem.tiles)
        return lax.div(segment.sequence, tiles), lax.rem(segment.sequence, tiles)

    def ring(self, number: int) -> Any:
        """The slots that keys (0) or values (1) pass through; both the same ones where they are equally wide."""
        rings = self.scratch["kv"]
        return rings[number % len(rings)]

    # --- the loading warpgroup ----------------------------------------------------------------------------------------

    def load(self) -> None:
        """Loads all pages of the share with one warp."""
        self.take_registers(_LOADING_REGISTERS)

        @plgpu.warp_map
        def _(warp: Array) -> None:
            @pl.when(warp == 0)
            def _() -> None:
                steps = self.line.fold(self.share, self.load_segment, jnp.int32(0))
                self.await_all(self.arrivals.consumed, steps, self.arrivals.slots)

    def await_all(self, name: str, count: Array, slots: int) -> None:
        """Waits for the releases that have not been waited for when the last of `count` loads was started."""

        @pl.loop(lax.max(count - slots, 0), count)
        def _(index: Array) -> None:
            plgpu.barrier_wait(self.scratch[name].at[lax.rem(index, jnp.int32(slots))])

    def await_slot(self, name: str, step: Array, slots: int) -> Array:
        """The step's slot, once its content is no longer needed."""
        slot = lax.rem(step, jnp.int32(slots))

        @pl.when(step >= slots)
        def _() -> None:
            plgpu.barrier_wait(self.scratch[name].at[slot])

        return slot

    def load_segment(self, segment: _Segment, step: Array) -> Array:
        """Loads a segment's pages, and returns the next step."""
        kv_head, _ = self.head_and_tile(segment)

        def load_block(i: Array, step: Array) -> Array:
            page = self.operands.page_table[segment.request, segment.first_block + segment.skipped + i]
            for number, pool in enumerate(self.operands.pools):
                slot = self.await_slot(self.arrivals.consumed, step + number, self.arrivals.slots)
                barrier = self.scratch[self.arrivals.loaded].at[slot]
                for pages, ring in zip(pool, self.arrivals.rings[number % len(self.arrivals.rings)], strict=True):
                    plgpu.copy_gmem_to_smem(pages.at[page, kv_head], ring.at[slot], barrier)
            return step + 2

        return lax.fori_loop(0, segment.visits, load_block, step)

    # --- the dequantizing warpgroups ----------------------------------------------------------------------------------

    def dequantize(self, first_row: Array) -> None:
        """Turns `ROWS` rows of every page that arrives from codes into what the matrix unit reads."""
        self.take_registers(_DEQUANTIZING_REGISTERS)

        def dequantize_block(_: Array, step: Array) -> Array:
            for number in range(len(self.operands.pools)):
                self.dequantize_page(number, step + number, first_row)
            return step + len(self.operands.pools)

        def dequantize_segment(segment: _Segment, step: Array) -> Array:
            return lax.fori_loop(0, segment.visits, dequantize_block, step)

        steps = self.line.fold(self.share, dequantize_segment, jnp.int32(0))
        self.await_all("consumed", steps, self.problem.slots)

    def dequantize_page(self, number: int, step: Array, first_row: Array) -> None:
        """Turns some rows of a page of keys (0) or values (1) into numbers."""
        kind = self.problem.quantization
        assert kind is not None
        code_slot = lax.rem(step, jnp.int32(self.problem.code_slots))
        plgpu.barrier_wait(self.scratch["codes_loaded"].at[code_slot])
        slot = self.await_slot("consumed", step, self.problem.slots)
        codes, scales = self.arrivals.rings[number % len(self.arrivals.rings)]
        target = self.ring(number).at[slot]
        dequantize(kind, codes.at[code_slot], scales.at[code_slot], target, first_row)
        plgpu.barrier_arrive(self.scratch["codes_consumed"].at[code_slot])
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.scratch["loaded"].at[slot])

    # --- the multiplying warpgroup ------------------------------------------------------------------------------------
    # Every block has the warpgroup's threads meet twice: in `column_maxima`, and when p and its sums are in shared
    # memory. So whatever is written there has been read, by all of them, a meeting earlier.

    def multiply(self) -> None:
        """Computes all segments of the share."""
        self.take_registers(MULTIPLYING_REGISTERS)
        if self.partials is not None and not self.splits.by_sequence:
            # A CTA that begins no sequence has none that goes on in the next CTA.
            self.store_split(self.partials, Split(*(jnp.int32(0),) * len(Split._fields)))
        self.line.fold(self.share, self.multiply_segment, jnp.int32(0))

    def multiply_segment(self, segment: _Segment, first_step: Array) -> Array:
        """Computes a segment, and returns the next step."""
        tile = self.load_tile(segment, first_step)
        if self.partials is None:
            self.merge_segment(tile)
        else:
            merge_segment = functools.partial(self.merge_segment, tile)
            lax.cond(segment.skipped == 0, merge_segment, functools.partial(self.store_segment, self.partials, tile))
        return first_step + 2 * segment.visits

    def load_tile(self, segment: _Segment, first_step: Array) -> _Tile:
        """Loads a segment's queries and sinks."""
        problem = self.problem
        kv_head, tile = self.head_and_tile(segment)
        kv_length = self.operands.kv_length[segment.request]
        first_token = tile * problem.tile_tokens
        position = self.operands.q_start[segment.request] + first_token
        sinks = None if self.operands.sinks is None else self.by_column(self.operands.sinks, kv_head)
        # In the last tile, columns after the last token are zeros.
        queries = lax.min(jnp.int32(problem.tile_tokens), problem.tokens - first_token) * problem.group
        source = self.operands.q.at[segment.request, :, kv_head]
        load_queries(source, self.scratch["q"], first_token, queries)
        plgpu.commit_smem()
        return _Tile(segment, kv_head, tile, kv_length, position, sinks, queries, first_step)

    def by_column(self, ref: Any, kv_head: Array) -> Array:
        """Numbers of the columns of a head's tile."""
        return plgpu.load(ref.at[kv_head], layout=PER_COLUMN, optimized=False)

    def visit(
        self, tile: _Tile, i: Array, use: Callable[[int, Array, Array], Any]
    ) -> tuple[Array, Array, tuple[Any, ...]]:
        """Maximum and sum of the segment's block i, and what `use(chunk, product, maximum)` made of each chunk."""
        segment, step = tile.segment, tile.first_step + 2 * i
        k_slot, v_slot = (lax.rem(step + number, jnp.int32(self.problem.slots)) for number in range(2))
        k, v = self.ring(0).at[k_slot], self.ring(1).at[v_slot]
        keys = (segment.first_block + segment.skipped + i) * KV_BLOCK
        plgpu.barrier_wait(self.scratch["loaded"].at[k_slot])
        s = self.score(tile, k, k_slot, keys)
        m_b = self.exponentiate(s)
        plgpu.barrier_wait(self.scratch["loaded"].at[v_slot])
        pl.when(keys + KV_BLOCK > tile.kv_length)(lambda: self.clear_values(v, tile.kv_length - keys))
        plgpu.commit_smem()
        results = self.multiply_values(v, lambda chunk, product: use(chunk, product, m_b))
        plgpu.barrier_arrive(self.scratch["consumed"].at[v_slot])
        return m_b, column_sums(self.scratch["sums"]), results

    def score(self, tile: _Tile, k: Any, k_slot: Array, keys: Array) -> Array:
        """Shaped and masked scores of a block, `[KV_BLOCK, n]`; releases the keys."""
        problem, masking = self.problem, self.masking

        def multiply(accumulator: Any) -> Array:
            plgpu.wgmma(accumulator, k, self.scratch["q"].T)
            return accumulator[...]

        s = pl.run_scoped(multiply, plgpu.ACC((KV_BLOCK, problem.columns), ACCUMULATOR))  # pyright: ignore
        plgpu.barrier_arrive(self.scratch["consumed"].at[k_slot])
        positions = tile.position + lax.div(column_indices(problem.columns), jnp.int32(problem.group))
        slopes = self.operands.slopes
        slopes = None if slopes is None else along_columns(self.by_column(slopes, tile.kv_head), s.shape)
        s = shaped_scores(s, masking, slopes, lambda: row_distances(keys - positions))
        return mask_rows(s, *visible_keys(masking, keys, positions, tile.kv_length, PER_COLUMN))

    def exponentiate(self, s: Array) -> Array:
        """Leaves p and its partial sums in shared memory, and returns the block's maxima."""
        maxima = column_maxima(s, self.scratch["maxima"])
        p, m_b = exponentials(s, exponent_scale(self.masking), maxima, along_columns)
        store_partial_sums(p, self.scratch["sums"])
        self.scratch["p"].T[...] = p.astype(self.problem.dtype)
        return m_b

    def multiply_values(self, v: Any, use: Callable[[int, Array], Any]) -> tuple[Any, ...]:
        """What `use(chunk, product)` makes of the product of each chunk of values with p."""
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

    def clear_values(self, v: Any, length: Array) -> None:
        """Zeros after a request's last value."""
        for first in range(0, KV_BLOCK, ROWS):
            clear_tail(v.at[pl.ds(first, ROWS)], length - first)

    def merge_block(self, tile: _Tile, i: Array, sums: _Sums) -> _Sums:
        """The sums with the segment's block i."""

        def merge_chunk(chunk: int, product: Array, m_b: Array) -> Array:
            _, a, b = rescaling(sums.m, m_b)
            shape = product.shape
            return merged(sums.o[chunk], along_columns(a, shape), product, along_columns(b, shape))

        m_b, total_b, o = self.visit(tile, i, merge_chunk)
        m, a, b = rescaling(sums.m, m_b)
        return _Sums(o, m, merged(sums.total, a, total_b, b, PER_COLUMN))

    def merge_segment(self, tile: _Tile) -> None:
        """Merges a segment with which its sequence begins, and stores the result, or the prefix of a split sequence."""
        segment, partials = tile.segment, self.partials
        if partials is not None:
            first_place = self.splits.first_place(self.cta + 1, self.share.size)
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
        """Stores what the merging kernel has to know of a sequence that begins here."""
        for index, number in enumerate(split):
            partials.splits[self.splits.record(self.cta, split.request, split.sequence), index] = number

    def store_prefix(self, partials: SplitPartials, segment: _Segment, sums: _Sums) -> None:
        """Stores what was merged of a sequence that goes on in the next CTA."""
        record = self.splits.record(self.cta, segment.request, segment.sequence)
        for chunk, x in enumerate(sums.o):
            self.store_chunk(partials.prefixes.at[record], chunk, x)
        for index, numbers in enumerate((sums.m, sums.total)):
            store_column_numbers(numbers, partials.prefix_statistics.at[record, :, index])

    def store_segment(self, partials: SplitPartials, tile: _Tile) -> None:
        """Stores each block of a segment whose sequence began in an earlier CTA by itself."""

        def store_block(i: Array, _: None) -> None:
            place = self.splits.first_place(self.cta, self.share.size) + i
            m_b, total_b, _ = self.visit(
                tile, i, lambda chunk, product, _: self.store_chunk(partials.blocks.at[place], chunk, product)
            )
            for index, numbers in enumerate((m_b, total_b)):
                store_column_numbers(numbers, partials.statistics.at[:, index, place])

        lax.fori_loop(0, tile.segment.visits, store_block, None)

    def store_chunk(self, ref: Any, chunk: int, x: Array) -> None:
        """Stores a chunk of the columns of a partial result.

        It will be merged soon, and is better not written to memory until then, which keys and values that stream
        through the cache would make it.
        """
        target = ref.at[:, :, pl.ds(self.problem.value_chunks[chunk], ROWS)]
        store_columns(x, target, 0, self.problem.rows, keep_in_cache=True)
