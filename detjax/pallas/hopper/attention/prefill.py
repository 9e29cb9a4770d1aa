"""Attention of many query tokens on Hopper (Pallas Mosaic GPU): prefill, chunked prefill and the training forward.

A CTA has 128 query rows of one head: two warpgroups of 64, which take turns at the matrix unit, so that one multiplies
while the other exponentiates. A third one loads: one of its warps brings keys and values, a page each, another one the
queries.

Rows of more than 128 columns are wide: shared memory does not hold two pages of keys and two of values, nor registers a
block's product beside all running sums. Wide pages come in parts, which share one ring of slots, and a block's values
are multiplied in pieces: while one is multiplied, the one before it is merged.
"""

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Final, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from detjax.contract import ACCUMULATOR, KV_BLOCK, QUERY_UNIT
from detjax.kv_pages import KVPages, Queries
from detjax.numerics import ceil_div
from detjax.options import Masking
from detjax.pallas.hopper import device
from detjax.pallas.hopper.attention.mask import load_words
from detjax.pallas.hopper.attention.online_softmax import (
    exponent_scale,
    exponentials,
    initial_statistics,
    log2_normalizers,
    merged,
    normalized,
    rescaling,
    shaped_scores,
    visible_keys,
)
from detjax.pallas.hopper.attention.queries_on_rows import along_rows, clear_tail, row_indices, splat
from detjax.pallas.hopper.attention.warpgroups import (
    CONSUMERS,
    FIRST_BARRIER,
    LOADING_REGISTERS,
    MULTIPLYING_REGISTERS,
    NAMED_BARRIERS,
    TILE,
    WARPGROUPS,
    arrive_for_loader,
    launch,
    pass_turn,
    sync_with_consumers,
    take_turn,
)
from detjax.pallas.hopper.device import SHARED_MEMORY, SHARED_MEMORY_RESERVED, WARP, WARPGROUP
from detjax.pallas.hopper.mosaic.barriers import arrive, sync
from detjax.pallas.hopper.mosaic.layouts import ROWS, swizzled
from detjax.pallas.hopper.mosaic.tiles import (
    clear_rows,
    column_distances,
    mask_bits,
    mask_columns,
    row_sums,
    start_product,
    store_lines,
)

_CLEARED: Final = FIRST_BARRIER
"""The named barrier at which both warpgroups meet when they have cleared the tail of a page."""
_FIRST_FREE: Final = FIRST_BARRIER + 1
"""Named barriers from here on: one for each slot of keys and of values, then one for each warpgroup's queries."""
_MOST_SLOTS: Final = NAMED_BARRIERS - _FIRST_FREE - WARPGROUPS
"""Slots for which there are named barriers."""
_SHORT_REQUEST: Final = 2048
"""Query rows. The tiles of longer requests even out by themselves; short ones gain from the next one's queries being
loaded already."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """Sizes of a call.

    Attributes:
        batch: requests.
        rows: packed query rows of all requests.
        tiles: tiles of 128 rows of one request each.
        heads: query heads.
        kv_heads: heads of keys and values.
        width: columns of queries and keys.
        value_width: columns of values.
        dtype: the operands' dtype, of 2 bytes.
    """

    batch: int
    rows: int
    tiles: int
    heads: int
    kv_heads: int
    width: int
    value_width: int
    dtype: Any

    @property
    def is_wide(self) -> bool:
        """Whether pages come in parts and values are multiplied in pieces. Both widths are then multiples of 64."""
        return max(self.width, self.value_width) > 128

    @property
    def part_width(self) -> int:
        """Columns of a wide page that are loaded, and freed, at once."""
        common = math.gcd(self.width, self.value_width)
        return 128 if common == 256 else common

    @property
    def results_in_queries(self) -> bool:
        """Whether results wait to be copied where their queries were, because there is no other room."""
        return self.is_wide and self.width == self.value_width

    @property
    def most_stages(self) -> int:
        """The most stages that fit into shared memory and for which there are named barriers."""
        free = (SHARED_MEMORY - SHARED_MEMORY_RESERVED) // self.dtype.itemsize
        free -= TILE * (self.width + (0 if self.results_in_queries else self.value_width))
        if self.is_wide:
            return min(_MOST_SLOTS, free // (KV_BLOCK * self.part_width))
        return min(_MOST_SLOTS // 2, free // (KV_BLOCK * (self.width + self.value_width)))


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How tiles are spread over the chip; no bit depends on it.

    Attributes:
        stages: pages of keys, and of values, in flight; of wide rows, parts of either.
        persistent: whether one CTA per multiprocessor takes tile after tile, the longest first; else a CTA has one tile.
        product_turns: whether a turn at the matrix unit is one product: a warpgroup merges while the other multiplies,
            but has less time to exponentiate. Else a turn is a block's values and the next block's scores.
    """

    stages: int = 2
    persistent: bool = True
    product_turns: bool = False

    def __post_init__(self) -> None:
        if self.stages < 1:
            raise ValueError(f"Schedule: stages is {self.stages}; accepted: at least 1")

    def check(self, problem: Problem) -> None:
        """Raises a ValueError if the problem's pages do not fit into so many stages."""
        if self.stages > problem.most_stages:
            raise ValueError(
                f"Schedule: stages is {self.stages} for rows of {problem.width} and {problem.value_width} columns; "
                f"accepted: at most {problem.most_stages}"
            )

    def ctas(self, problem: Problem) -> int:
        """How many CTAs a call has."""
        items = problem.tiles * problem.heads
        return min(items, device.multiprocessors()) if self.persistent else items


def default_schedule(problem: Problem) -> Schedule:
    """The schedule that serves a problem where none is given."""
    persistent = problem.rows // problem.batch < _SHORT_REQUEST
    if not problem.is_wide:
        return Schedule(2, persistent)
    # A turn for each product is 1% faster on an H200 at 256 columns; a persistent CTA has no registers for it.
    return Schedule(problem.most_stages, persistent, product_turns=problem.value_width == 256 and not persistent)


class Tiles(NamedTuple):
    """Where each tile of 128 rows stands, int32 `[tiles]`.

    Attributes:
        request: the tile's request.
        row: its first row in the packed queries.
        offset: its first row in the request.
        rows: how many of its rows are the request's.
    """

    request: Array
    row: Array
    offset: Array
    rows: Array


class _Operands(NamedTuple):
    """Arrays in memory that the kernel reads."""

    q: Any
    k_pages: Any
    v_pages: Any
    page_table: Any
    q_start: Any
    kv_length: Any
    tiles: Tiles | None
    sinks: Any | None
    slopes: Any | None
    mask: Any | None


def forward(
    q: Array,
    kv: KVPages,
    queries: Queries,
    sinks: Array | None,
    *,
    masking: Masking,
    mask: Array | None = None,
    tiles: Tiles | None = None,
    schedule: Schedule | None = None,
) -> tuple[Array, Array]:
    """Output `[N, H, V]` and log2 of each row's normalizer, `[H, N]` float32.

    Args:
        q: queries of all requests, `[N, H, K]`; N is a multiple of 8 and each request begins at one.
        kv: pages of numbers.
        queries: page table, start and length of each request.
        sinks: a score for each head, or None.
        masking: which keys a query sees, and how scores are shaped.
        mask: the words of a mask, see `pack_words`, of whole tiles of 128 rows and all pages; None with `tiles`.
        tiles: the tiles of 128 rows; default: those of requests of N / B rows each. Rows after a request's last are
            written up to the next multiple of 8.
        schedule: default: `default_schedule`.
    """
    (k_pages, v_pages), start = kv.numbers, jnp.asarray(queries.start)
    batch, (rows, heads, width) = start.shape[0], q.shape
    count = batch * ceil_div(rows, batch * TILE) if tiles is None else tiles.request.shape[0]
    problem = Problem(batch, rows, count, heads, k_pages.shape[1], width, v_pages.shape[-1], q.dtype)
    schedule = schedule or default_schedule(problem)
    schedule.check(problem)
    kind = _WideKernel if problem.is_wide else _NarrowKernel
    scratch = kind.scratch(problem, schedule) | {
        "normalizers": plgpu.SMEM((WARPGROUPS, ROWS), ACCUMULATOR),
        "q_loaded": plgpu.Barrier(num_barriers=WARPGROUPS),
    }
    for ring in kind.ring_names:
        scratch[f"{ring}_loaded"] = plgpu.Barrier(num_barriers=schedule.stages)
    sinks = None if sinks is None else sinks.astype(ACCUMULATOR)
    slopes = None if masking.alibi_slopes is None else jnp.asarray(masking.alibi_slopes, ACCUMULATOR)
    where = queries.page_table, start, queries.length
    operands = _Operands(q, k_pages, v_pages, *where, tiles, sinks, slopes, mask)

    def body(operands: _Operands, results: list[Any], scratch: dict[str, Any]) -> None:
        kind(problem, schedule, masking, operands, results, scratch).run()

    out_type = (
        jax.ShapeDtypeStruct((rows, heads, problem.value_width), q.dtype),
        jax.ShapeDtypeStruct((heads, rows), ACCUMULATOR),
    )
    o, normalizers = launch("attention_prefill", body, operands, out_type, schedule.ctas(problem), scratch)
    return o, normalizers


class _Item(NamedTuple):
    """A tile of one head.

    Attributes:
        request: the request.
        head: the query head.
        row: the tile's first row in the packed queries.
        rows: how many of its rows are the request's.
        position: position of its first row.
        kv_length: number of the request's keys.
        first: the first block of keys that is visited.
        end: the end of the blocks that are visited; at least one is.
    """

    request: Array
    head: Array
    row: Array
    rows: Array
    position: Array
    kv_length: Array
    first: Array
    end: Array


class _Rows(NamedTuple):
    """A warpgroup's rows of a tile.

    Attributes:
        item: the tile.
        position: position of the warpgroup's first row.
        q: the queries in shared memory.
        sinks: the head's sink for each row, or None.
        slopes: ALiBi's slope for each score, or None.
        first_step: the step at which the tile's first block is visited.
    """

    item: _Item
    position: Array
    q: Any
    sinks: Array | None
    slopes: Array | None
    first_step: Array


class _Slot(NamedTuple):
    """Room in shared memory for a page, or for a part of a wide page.

    Attributes:
        content: the room.
        loaded: the barrier of its content's arrival.
        number: its number in the ring.
        first_free: the named barrier of the ring's first slot.
    """

    content: Any
    loaded: Any
    number: Array
    first_free: int

    @property
    def free(self) -> Array:
        """The named barrier at which all arrive that are done with the content."""
        return self.first_free + self.number


class _Visit(NamedTuple):
    """A block of keys that a warpgroup visits.

    Attributes:
        rows: the warpgroup's rows.
        block: the block's number in the request.
        step: the step, see `_Kernel`.
        k: slots of the block's keys.
        v: slots of the block's values.
        words: words of the call's mask; none without a mask.
        is_last: whether it is the last block of the tile.
        is_masked: whether some row may not see all of the block's keys.
    """

    rows: _Rows
    block: Array
    step: Array
    k: list[_Slot]
    v: list[_Slot]
    words: list[Array]
    is_last: Array
    is_masked: bool


class _Sums(NamedTuple):
    """What a warpgroup has merged so far.

    Attributes:
        o: running sums of values, for each piece of the columns.
        m: running maximum of each row.
        total: running sum of each row's probabilities.
        step: the step of the next block, or None where it follows from the block.
    """

    o: tuple[Array, ...]
    m: Array
    total: Array
    step: Array | None


class _Block(NamedTuple):
    """What a block contributes to the sums.

    Attributes:
        p: probabilities in the values' dtype.
        a: factors of the running sums.
        b: factors of the block's product.
    """

    p: Array
    a: Array
    b: Array

    def merge(self, o: Array, product: Array) -> Array:
        """The running sums of some columns with the block's product."""
        return merged(o, along_rows(self.a, product.shape), product, along_rows(self.b, product.shape))


class _Kernel(abc.ABC):
    """A CTA's work: tiles of 128 query rows of one head each.

    A *step* is a block that the CTA visits: its number for narrow rows; for wide rows the slot of its first part, as a
    remainder by 3, 5 or 7 slots would be multiplications of 64 bits for each part, in registers that are not there.
    """

    ring_names: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        problem: Problem,
        schedule: Schedule,
        masking: Masking,
        operands: _Operands,
        results: Sequence[Any],
        scratch: dict[str, Any],
    ) -> None:
        self.problem, self.schedule, self.masking = problem, schedule, masking
        self.operands, self.scratch = operands, scratch
        self.o_gmem, self.normalizers_gmem = results
        self._warpgroup = lax.axis_index("warpgroup")
        cta, ctas = lax.axis_index("cta"), schedule.ctas(problem)
        self.item_count = lax.div(problem.tiles * problem.heads - cta + (ctas - 1), jnp.int32(ctas))
        self.item_index = lambda i: cta + i * ctas

    @classmethod
    @abc.abstractmethod
    def scratch(cls, problem: Problem, schedule: Schedule) -> dict[str, Any]:
        """Shared memory of queries, keys, values and results."""

    def run(self) -> None:
        """Runs the warpgroup's role."""
        lax.cond(self.warpgroup < WARPGROUPS, self.multiply, self.load)

    # --- what narrow and wide rows do in different ways ---------------------------------------------------------------

    @property
    def warpgroup(self) -> Array:
        """The warpgroup's number."""
        return self._warpgroup

    @property
    @abc.abstractmethod
    def first_free(self) -> tuple[int, ...]:
        """For each ring of slots, the named barrier of the first slot."""

    @property
    @abc.abstractmethod
    def pieces(self) -> Sequence["_Piece"]:
        """The pieces of columns in which values are multiplied."""

    @abc.abstractmethod
    def key_slots(self, step: Array) -> list[_Slot]:
        """Where the parts of the step's page of keys go."""

    @abc.abstractmethod
    def value_slots(self, step: Array) -> list[_Slot]:
        """Where the parts of the step's page of values go."""

    @abc.abstractmethod
    def first_key_slot(self, step: Array) -> _Slot:
        """Where the first part of the step's page of keys goes."""

    @abc.abstractmethod
    def page_part(self, page: Any, part: int) -> Any:
        """A part of a page in memory."""

    @abc.abstractmethod
    def next_step(self, step: Array) -> Array:
        """The step of the next block."""

    @abc.abstractmethod
    def initial_step(self, rows: _Rows) -> Array | None:
        """The step that goes with the running sums at a tile's first block."""

    @abc.abstractmethod
    def step_of(self, rows: _Rows, block: Array, sums: _Sums) -> Array:
        """The step at which a block is visited."""

    @abc.abstractmethod
    def step_after(self, rows: _Rows, sums: _Sums) -> Array:
        """The step of the next tile's first block."""

    @abc.abstractmethod
    def start_scores(self, accumulator: Any, rows: _Rows, slots: list[_Slot]) -> None:
        """Starts the products of queries and keys; the keys' first part has been loaded."""

    @abc.abstractmethod
    def accumulate(self, visit: _Visit, o: tuple[Array, ...], block: _Block, loaded: int) -> tuple[Array, ...]:
        """Multiplies a block's values and merges the products.

        Args:
            visit: the block.
            o: the running sums.
            block: the block's probabilities and factors.
            loaded: how many parts of the values are known to be loaded.
        """

    @abc.abstractmethod
    def step_after_visit(self, visit: _Visit) -> Array | None:
        """The step that goes with the running sums after a visit."""

    @abc.abstractmethod
    def clear_values(self, slots: list[_Slot], rows: Any, length: Array) -> None:
        """Zeros after the first `length` of the warpgroup's rows of a page of values."""

    @abc.abstractmethod
    def stage(self, y: Array, target: Any, piece: "_Piece") -> None:
        """Stores a piece of the result in shared memory."""

    # --- which tiles --------------------------------------------------------------------------------------------------

    def item(self, i: Array) -> _Item:
        """The CTA's tile number i, and the blocks of keys that some of its rows see."""
        index = self.item_index(i)
        # Heads of one tile are neighbours, so that those that share keys run at the same time.
        heads = jnp.int32(self.problem.heads)
        tile, head = lax.div(index, heads), lax.rem(index, heads)
        request, row, offset, rows = self.place(tile)
        kv_length = self.operands.kv_length[request]
        position = self.operands.q_start[request] + offset
        end, first = kv_length, jnp.int32(0)
        if self.masking.causal:
            end = lax.min(end, position + rows)
        if self.masking.window is not None:
            first = lax.div(lax.max(position - (self.masking.window - 1), 0), jnp.int32(KV_BLOCK))
        end = lax.max(lax.div(end + (KV_BLOCK - 1), jnp.int32(KV_BLOCK)), first + 1)
        end = lax.min(end, jnp.int32(self.operands.page_table.shape[1]))
        return _Item(request, head, row, rows, position, kv_length, lax.min(first, end - 1), end)

    def place(self, tile: Array) -> tuple[Array, Array, Array, Array]:
        """The fields of `Tiles` for one tile."""
        if self.operands.tiles is not None:
            return tuple(ref[tile] for ref in self.operands.tiles)  # pyright: ignore[reportReturnType]
        batch = self.problem.batch
        tokens = self.problem.rows // batch
        # The last tiles of the requests see most keys, and come first.
        offset = (ceil_div(tokens, TILE) - 1 - lax.div(tile, jnp.int32(batch))) * TILE
        request = lax.rem(tile, jnp.int32(batch))
        return request, request * tokens + offset, offset, lax.min(jnp.int32(TILE), tokens - offset)

    # --- the loading warpgroup ----------------------------------------------------------------------------------------

    def load(self) -> None:
        """Loads keys and values with one warp, and queries with another one."""
        plgpu.set_max_registers(LOADING_REGISTERS, action="decrease")

        @plgpu.warp_map
        def _(warp: Array) -> None:
            pl.when(warp == 0)(self.load_keys_and_values)
            pl.when(warp == 1)(self.load_queries)

    def load_keys_and_values(self) -> None:
        """Loads all pages that the CTA's tiles visit, each as soon as its slots are free."""
        group = self.problem.heads // self.problem.kv_heads

        def load_tile(i: Array, step: Array) -> Array:
            item = self.item(i)
            kv_head = lax.div(item.head, jnp.int32(group))

            def load_block(block: Array, step: Array) -> Array:
                k_slots, v_slots = self.key_slots(step), self.value_slots(step)
                page = self.operands.page_table[item.request, block]
                for pages, slots in ((self.operands.k_pages, k_slots), (self.operands.v_pages, v_slots)):
                    for part, slot in enumerate(slots):
                        sync_with_consumers(slot.free)
                        source = self.page_part(pages.at[page, kv_head], part)
                        plgpu.copy_gmem_to_smem(source, slot.content, slot.loaded)
                return self.next_step(step)

            return lax.fori_loop(item.first, item.end, load_block, step)

        lax.fori_loop(0, self.item_count, load_tile, jnp.int32(0))

    def load_queries(self) -> None:
        """Loads the queries of all of the CTA's tiles, for each warpgroup as soon as it needs the last ones no more."""

        @pl.loop(0, self.item_count)
        def _(i: Array) -> None:
            item = self.item(i)
            for warpgroup in range(WARPGROUPS):
                sync(self.q_free + warpgroup, WARPGROUP + WARP)
                source = self.operands.q.at[pl.ds(item.row + warpgroup * ROWS, ROWS), item.head]
                target = self.queries(warpgroup)
                plgpu.copy_gmem_to_smem(source, target, self.scratch["q_loaded"].at[warpgroup])

    def queries(self, warpgroup: Array | int) -> Any:
        """A warpgroup's rows of the queries in shared memory."""
        return self.scratch["q"].at[pl.ds(warpgroup * ROWS, ROWS)]

    @property
    def q_free(self) -> int:
        """The named barrier at which the first warpgroup is done with its queries."""
        return _FIRST_FREE + len(self.first_free) * self.schedule.stages

    # --- the multiplying warpgroups -----------------------------------------------------------------------------------

    def multiply(self) -> None:
        """Computes the warpgroup's rows of all of the CTA's tiles."""
        plgpu.set_max_registers(MULTIPLYING_REGISTERS, action="increase")
        for slot in range(self.schedule.stages):
            for first_free in self.first_free:
                arrive_for_loader(first_free + slot)
        self.free_queries()
        pl.when(self.warpgroup == 1)(self.pass_turn)
        lax.fori_loop(0, self.item_count, self.multiply_tile, jnp.int32(0))
        pl.when(self.warpgroup == 0)(self.take_turn)
        plgpu.wait_smem_to_gmem(0)

    def take_turn(self) -> None:
        """Waits for the matrix unit."""
        take_turn(self.warpgroup)

    def pass_turn(self) -> None:
        """Passes the matrix unit on."""
        pass_turn(self.warpgroup)

    def free_queries(self) -> None:
        """Lets the warpgroup's queries be overwritten."""
        arrive(self.q_free + self.warpgroup, WARPGROUP + WARP)

    def multiply_tile(self, i: Array, first_step: Array) -> Array:
        """Computes a tile, and returns the next one's first step."""
        rows = self.await_rows(i, first_step)
        if not self.schedule.product_turns:
            self.take_turn()
        sums = self.visit_blocks(rows)
        self.write(self.item(i), sums)
        return self.step_after(rows, sums)

    def await_rows(self, i: Array, first_step: Array) -> _Rows:
        """Waits for the tile's queries and for the first part of its keys."""
        item = self.item(i)
        q = self.queries(self.warpgroup)
        position = item.position + self.warpgroup * ROWS
        sinks, slopes = self.operands.sinks, self.operands.slopes
        sinks = None if sinks is None else splat(sinks[item.head], (ROWS,))
        slopes = None if slopes is None else splat(slopes[item.head], (ROWS, KV_BLOCK))
        plgpu.barrier_wait(self.first_key_slot(first_step).loaded)
        plgpu.barrier_wait(self.scratch["q_loaded"].at[self.warpgroup])
        return _Rows(item, position, q, sinks, slopes, first_step)

    def visit_blocks(self, rows: _Rows) -> _Sums:
        """Merges all blocks of keys from left to right."""

        def visit_all(first: Array, end: Array, sums: _Sums, is_masked: bool) -> _Sums:
            return lax.fori_loop(first, end, lambda block, sums: self.visit(rows, block, sums, is_masked), sums)

        item = rows.item
        zeros = tuple(splat(0.0, (ROWS, piece.size)) for piece in self.pieces)
        sums = _Sums(zeros, *initial_statistics(rows.sinks), self.initial_step(rows))
        open_first, open_end = self.open_blocks(rows)
        if self.masking.window is not None:
            sums = visit_all(item.first, open_first, sums, True)
        sums = visit_all(open_first, open_end, sums, False)
        return visit_all(open_end, item.end, sums, True)

    def open_blocks(self, rows: _Rows) -> tuple[Array, Array]:
        """First and end of the blocks that every row sees whole, but for what the call's own mask hides."""
        item = rows.item
        open_end = lax.div(item.kv_length, jnp.int32(KV_BLOCK))
        if self.masking.causal:
            open_end = lax.min(open_end, lax.div(rows.position + 1, jnp.int32(KV_BLOCK)))
        open_end = lax.max(lax.min(open_end, item.end), item.first)
        open_first = item.first
        if self.masking.window is not None:
            hidden = lax.max(rows.position + (ROWS - self.masking.window), 0)
            open_first = lax.min(lax.div(hidden + (KV_BLOCK - 1), jnp.int32(KV_BLOCK)), open_end)
            open_first = lax.max(open_first, item.first)
        return open_first, open_end

    def visit(self, rows: _Rows, block: Array, sums: _Sums, is_masked: bool) -> _Sums:
        """Merges one block of keys."""
        step = self.step_of(rows, block, sums)
        k_slots, v_slots = self.key_slots(step), self.value_slots(step)
        is_last, words = block + 1 == rows.item.end, self.mask_words(rows.item, block)
        visit = _Visit(rows, block, step, k_slots, v_slots, words, is_last, is_masked)
        s = self.score(visit)
        keys = block * KV_BLOCK
        s = self.masked(visit, keys, s)
        p, m_b = exponentials(s, exponent_scale(self.masking), s.max(axis=1))
        total_b = row_sums(p)
        p = p.astype(self.problem.dtype)
        m, a, b = rescaling(sums.m, m_b)
        total = merged(sums.total, a, total_b, b)
        p, m, total, a, b = lax.optimization_barrier((p, m, total, a, b))
        loaded = self.await_values(visit, keys)
        self.take_turn()
        o = self.accumulate(visit, sums.o, _Block(p, a, b), loaded)
        return _Sums(o, m, total, self.step_after_visit(visit))

    def score(self, visit: _Visit) -> Array:
        """Products of the queries and a block's keys, which are released."""

        def multiply(accumulator: Any) -> Array:
            self.start_scores(accumulator, visit.rows, visit.k)
            self.pass_turn()
            for part, slot in enumerate(visit.k[:-1]):
                plgpu.wgmma_wait(len(visit.k) - 1 - part)
                arrive_for_loader(slot.free)
            return accumulator[...]

        if self.schedule.product_turns:
            self.take_turn()
        s = pl.run_scoped(multiply, plgpu.ACC((ROWS, KV_BLOCK), ACCUMULATOR))  # pyright: ignore
        arrive_for_loader(visit.k[-1].free)
        if not self.problem.results_in_queries:
            pl.when(visit.is_last)(self.free_queries)
        return s

    def masked(self, visit: _Visit, keys: Array, s: Array) -> Array:
        """Shaped scores of a block whose first key is at position `keys`, with -inf where a key is not visible."""
        rows = visit.rows
        s = shaped_scores(s, self.masking, rows.slopes, lambda: column_distances(keys - rows.position - row_indices()))
        if visit.is_masked:
            positions = rows.position + row_indices()
            s = mask_columns(s, *visible_keys(self.masking, keys, positions, rows.item.kv_length))
        return mask_bits(s, *visit.words) if visit.words else s

    def mask_words(self, item: _Item, block: Array) -> list[Array]:
        """Words of the call's mask for a block; none without a mask."""
        mask = self.operands.mask
        if mask is None:
            return []
        tokens = self.problem.rows // self.problem.batch
        row = lax.div(item.row - item.request * tokens, jnp.int32(ROWS)) + self.warpgroup
        parts = KV_BLOCK // ROWS
        return [load_words(mask, item.request, item.head, row, block * parts + part) for part in range(parts)]

    def await_values(self, visit: _Visit, keys: Array) -> int:
        """Waits for a block's values, and returns for how many parts it did.

        Parts after the first one are waited for when it is their turn, unless their tails are to be cleared.
        """
        loaded = len(visit.v) if visit.is_masked else 1
        for slot in visit.v[:loaded]:
            plgpu.barrier_wait(slot.loaded)
        if visit.is_masked:
            kv_length = visit.rows.item.kv_length
            pl.when(keys + KV_BLOCK > kv_length)(lambda: self.clear_tail(visit.v, kv_length - keys))
        return loaded

    def clear_tail(self, slots: list[_Slot], length: Array) -> None:
        """Zeros after a request's last value: each warpgroup clears half of the page, and both use it whole."""
        rows = pl.ds(self.warpgroup * ROWS, ROWS)
        self.clear_values(slots, rows, length - self.warpgroup * ROWS)
        sync(_CLEARED, CONSUMERS)

    def end_turn(self, visit: _Visit) -> None:
        """Ends the warpgroup's turn when the block's last product has been started.

        Where a turn goes on with the next block's scores, the warpgroup waits for their keys first.
        """

        def await_next() -> None:
            plgpu.barrier_wait(self.first_key_slot(self.next_step(visit.step)).loaded)

        if self.schedule.product_turns:
            self.pass_turn()
            pl.when(~visit.is_last)(await_next)
        else:
            lax.cond(visit.is_last, self.pass_turn, await_next)

    def write(self, item: _Item, sums: _Sums) -> None:
        """Writes the warpgroup's rows of the result, up to the next multiple of 8 after the request's last one."""
        in_queries = self.problem.results_in_queries
        staged = self.scratch["q" if in_queries else "o"].at[pl.ds(self.warpgroup * ROWS, ROWS)]
        normalizers = self.scratch["normalizers"].at[self.warpgroup]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for x, piece in zip(sums.o, self.pieces, strict=True):
            self.stage(normalized(x, sums.total, self.problem.dtype), staged, piece)
        normalizers[...] = log2_normalizers(sums.m, sums.total)
        plgpu.commit_smem()
        row, count = item.row + self.warpgroup * ROWS, item.rows - self.warpgroup * ROWS

        def copy(first: int, size: int) -> None:
            rows, part = pl.ds(row + first, size), pl.ds(first, size)
            plgpu.copy_smem_to_gmem(staged.at[part], self.o_gmem.at[rows, item.head])
            plgpu.copy_smem_to_gmem(normalizers.at[part], self.normalizers_gmem.at[item.head, rows])

        pl.when(count >= ROWS)(lambda: copy(0, ROWS))

        @pl.when(count < ROWS)
        def _() -> None:
            for first in range(0, ROWS, QUERY_UNIT):
                pl.when(first < count)(lambda first=first: copy(first, QUERY_UNIT))

        if in_queries:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self.free_queries()


class _Piece(NamedTuple):
    """Columns of values that are multiplied at once.

    Attributes:
        part: the part of the page.
        first: the first column in the part.
        size: number of columns.
    """

    part: int
    first: int
    size: int


class _NarrowKernel(_Kernel):
    """Rows of at most 128 columns: whole pages, a ring of slots for keys and one for values."""

    ring_names = "k", "v"

    @classmethod
    def scratch(cls, problem: Problem, schedule: Schedule) -> dict[str, Any]:
        def rows(width: int, *shape: int) -> Any:
            return plgpu.SMEM((*shape, width), problem.dtype, transforms=swizzled(width))

        return {
            "q": rows(problem.width, TILE),
            "k": rows(problem.width, schedule.stages, KV_BLOCK),
            "v": rows(problem.value_width, schedule.stages, KV_BLOCK),
            "o": rows(problem.value_width, TILE),
        }

    @property
    def first_free(self) -> tuple[int, ...]:
        return _FIRST_FREE, _FIRST_FREE + self.schedule.stages

    @property
    def pieces(self) -> Sequence[_Piece]:
        return [_Piece(0, 0, self.problem.value_width)]

    def slot(self, ring: int, step: Array) -> _Slot:
        """Where the step's page goes in one of the rings."""
        name = self.ring_names[ring]
        index = lax.rem(step, jnp.int32(self.schedule.stages))
        return _Slot(
            self.scratch[name].at[index], self.scratch[f"{name}_loaded"].at[index], index, self.first_free[ring]
        )

    def key_slots(self, step: Array) -> list[_Slot]:
        return [self.slot(0, step)]

    def value_slots(self, step: Array) -> list[_Slot]:
        return [self.slot(1, step)]

    def first_key_slot(self, step: Array) -> _Slot:
        return self.slot(0, step)

    def page_part(self, page: Any, part: int) -> Any:
        return page

    def next_step(self, step: Array) -> Array:
        return step + 1

    def initial_step(self, rows: _Rows) -> None:
        return None

    def step_of(self, rows: _Rows, block: Array, sums: _Sums) -> Array:
        return rows.first_step + (block - rows.item.first)

    def step_after_visit(self, visit: _Visit) -> None:
        return None

    def step_after(self, rows: _Rows, sums: _Sums) -> Array:
        return rows.first_step + (rows.item.end - rows.item.first)

    def start_scores(self, accumulator: Any, rows: _Rows, slots: list[_Slot]) -> None:
        plgpu.wgmma(accumulator, rows.q, slots[0].content.T)

    def accumulate(self, visit: _Visit, o: tuple[Array, ...], block: _Block, loaded: int) -> tuple[Array, ...]:
        def multiply(accumulator: Any) -> Array:
            plgpu.wgmma(accumulator, block.p, visit.v[0].content)
            self.end_turn(visit)
            return accumulator[...]

        product = pl.run_scoped(multiply, plgpu.ACC(o[0].shape, ACCUMULATOR))  # pyright: ignore
        arrive_for_loader(visit.v[0].free)
        return (block.merge(o[0], product),)

    def clear_values(self, slots: list[_Slot], rows: Any, length: Array) -> None:
        clear_tail(slots[0].content.at[rows], length)

    def stage(self, y: Array, target: Any, piece: _Piece) -> None:
        target[...] = y


class _WideKernel(_Kernel):
    """Rows of more than 128 columns: pages in parts, which share one ring of slots, keys before values."""

    ring_names = ("kv",)

    @classmethod
    def scratch(cls, problem: Problem, schedule: Schedule) -> dict[str, Any]:
        def rows(*shape: int) -> Any:
            return plgpu.SMEM(shape, problem.dtype, transforms=swizzled(64))

        scratch = {"q": rows(TILE, problem.width), "kv": rows(schedule.stages, KV_BLOCK, problem.part_width)}
        return scratch if problem.results_in_queries else scratch | {"o": rows(TILE, problem.value_width)}

    @property
    def warpgroup(self) -> Array:
        # The compiler takes it for another one each time: registers are too few to keep all addresses, barriers and
        # descriptors that follow from it from block to block.
        return lax.optimization_barrier(self._warpgroup)

    @property
    def first_free(self) -> tuple[int, ...]:
        return (_FIRST_FREE,)

    @property
    def key_parts(self) -> int:
        """Parts of a page of keys."""
        return self.problem.width // self.problem.part_width

    @property
    def value_parts(self) -> int:
        """Parts of a page of values."""
        return self.problem.value_width // self.problem.part_width

    @property
    def pieces(self) -> Sequence[_Piece]:
        """Two pieces' products, all running sums and a block's p are in a warpgroup's registers at the same time."""
        width, size = self.problem.part_width, 64 if self.problem.value_width > 192 else 128
        firsts = [(part, first) for part in range(self.value_parts) for first in range(0, width, size)]
        return [_Piece(part, first, min(size, width - first)) for part, first in firsts]

    def slot(self, step: Array, part: int) -> _Slot:
        """Where one of the parts of a step's keys and values goes."""
        index = self.slot_after(step, part)
        return _Slot(self.scratch["kv"].at[index], self.scratch["kv_loaded"].at[index], index, _FIRST_FREE)

    def slot_after(self, slot: Array, distance: int) -> Array:
        """The number of the slot that comes so much later in the ring."""
        slot = slot + distance
        return jnp.where(slot >= self.schedule.stages, slot - self.schedule.stages, slot) if distance else slot

    def key_slots(self, step: Array) -> list[_Slot]:
        return [self.slot(step, part) for part in range(self.key_parts)]

    def value_slots(self, step: Array) -> list[_Slot]:
        return [self.slot(step, self.key_parts + part) for part in range(self.value_parts)]

    def first_key_slot(self, step: Array) -> _Slot:
        return self.slot(step, 0)

    def page_part(self, page: Any, part: int) -> Any:
        return page.at[:, self.columns(part)]

    def columns(self, part: int) -> Any:
        """The columns of a part."""
        return pl.ds(part * self.problem.part_width, self.problem.part_width)

    def next_step(self, step: Array) -> Array:
        return self.slot_after(step, self.key_parts + self.value_parts)

    def initial_step(self, rows: _Rows) -> Array:
        return rows.first_step

    def step_of(self, rows: _Rows, block: Array, sums: _Sums) -> Array:
        assert sums.step is not None
        return sums.step

    def step_after_visit(self, visit: _Visit) -> Array:
        return self.next_step(visit.step)

    def step_after(self, rows: _Rows, sums: _Sums) -> Array:
        assert sums.step is not None
        return sums.step

    def start_scores(self, accumulator: Any, rows: _Rows, slots: list[_Slot]) -> None:
        """Starts the products part by part of the columns."""
        q = self.queries(self.warpgroup)
        for part, slot in enumerate(slots):
            if part > 0:
                plgpu.barrier_wait(slot.loaded)
            plgpu.wgmma(accumulator, q.at[:, self.columns(part)], slot.content.T)

    def accumulate(self, visit: _Visit, o: tuple[Array, ...], block: _Block, loaded: int) -> tuple[Array, ...]:
        """Multiplies the values piece by piece; while one piece is multiplied, the one before it is merged."""
        slots = visit.v
        merged_o, product_before = [], None
        for piece in self.pieces:
            is_next_part = piece.part > 0 and piece.first == 0
            if is_next_part and piece.part >= loaded:
                plgpu.barrier_wait(slots[piece.part].loaded)
            product = start_product(block.p, slots[piece.part].content.at[:, pl.ds(piece.first, piece.size)])
            if product_before is not None:
                plgpu.wgmma_wait(1)
                if is_next_part:
                    arrive_for_loader(slots[piece.part - 1].free)
                sums = block.merge(o[len(merged_o)], lax.optimization_barrier(product_before))
                merged_o.append(lax.optimization_barrier(sums))
            product_before = product
        # Not before the merging above, which the compiler would put off until after what this waits for.
        self.end_turn(visit)
        plgpu.wgmma_wait(0)
        arrive_for_loader(slots[-1].free)
        return (*merged_o, block.merge(o[-1], lax.optimization_barrier(product_before)))

    def clear_values(self, slots: list[_Slot], rows: Any, length: Array) -> None:
        for slot in slots:
            clear_rows(slot.content.at[rows], length)
        plgpu.commit_smem()

    def stage(self, y: Array, target: Any, piece: _Piece) -> None:
        store_lines(y, target.at[:, pl.ds(piece.part * self.problem.part_width + piece.first, piece.size)])
