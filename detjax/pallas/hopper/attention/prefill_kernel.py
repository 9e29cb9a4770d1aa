"""Prefill kernel on Hopper: the steps that narrow and wide rows share.

Loader and multiplying warpgroups are connected by two barriers per slot. A copy completes `loaded`, which both
warpgroups await. When both have multiplied the slot's content, they have arrived at its named barrier, `Slot.free`,
which the loading warp awaits before it starts the next copy. Queries work the same way, but per warpgroup.
"""

import abc
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from detjax.contract import ACCUMULATOR, KV_BLOCK, QUERY_UNIT
from detjax.operands.numerics import ceil_div
from detjax.operands.options import Masking
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
from detjax.pallas.hopper.attention.prefill_schedule import CLEARED, FIRST_FREE, Problem, Schedule, Tiles
from detjax.pallas.hopper.attention.queries_on_rows import along_rows, row_indices, splat
from detjax.pallas.hopper.attention.warpgroups import (
    CONSUMERS,
    LOADING_REGISTERS,
    MULTIPLYING_REGISTERS,
    TILE,
    WARPGROUPS,
    arrive_for_loader,
    pass_turn,
    sync_with_consumers,
    take_turn,
)
from detjax.pallas.hopper.device import WARP, WARPGROUP
from detjax.pallas.hopper.mosaic.barriers import arrive, sync
from detjax.pallas.hopper.mosaic.layouts import ROWS
from detjax.pallas.hopper.mosaic.tiles import column_distances, mask_bits, mask_columns, row_sums


class Operands(NamedTuple):
    """Input arrays of the kernel."""

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


class Item(NamedTuple):
    """A tile of one head.

    Attributes:
        row: the tile's first row in the packed queries.
        rows: number of its rows that the request has.
        position: position of its first row.
        first: the first block of keys that is visited.
        end: the end of the blocks that are visited, at least one.
    """

    request: Array
    head: Array
    row: Array
    rows: Array
    position: Array
    kv_length: Array
    first: Array
    end: Array


class Rows(NamedTuple):
    """A warpgroup's rows of a tile.

    Attributes:
        position: position of the warpgroup's first row.
        q: the queries in shared memory.
        sinks: the head's sink for each row, or None.
        slopes: ALiBi slope for each score, or None.
        first_step: the step of the tile's first block.
    """

    item: Item
    position: Array
    q: Any
    sinks: Array | None
    slopes: Array | None
    first_step: Array


class Slot(NamedTuple):
    """Shared memory for a page, or for a part of a wide page.

    Attributes:
        loaded: the barrier that copies into it complete.
        number: its number in the ring.
        first_free: the named barrier of the ring's first slot.
    """

    content: Any
    loaded: Any
    number: Array
    first_free: int

    @property
    def free(self) -> Array:
        """The named barrier at which warpgroups arrive when they are done with the content."""
        return self.first_free + self.number


class Visit(NamedTuple):
    """A warpgroup's visit of a block of keys.

    Attributes:
        step: the step, see `Kernel`.
        words: words of the call's mask; empty without a mask.
        is_last: whether it is the last block of the tile.
        is_masked: whether positions may hide some of the block's keys from some row.
    """

    rows: Rows
    block: Array
    step: Array
    k: list[Slot]
    v: list[Slot]
    words: list[Array]
    is_last: Array
    is_masked: bool


class Sums(NamedTuple):
    """Running sums of a warpgroup.

    Attributes:
        o: running sums of values, for each piece of columns.
        m: running maximum of each row.
        total: running sum of each row's probabilities.
        step: the step of the next block, or None if it follows from the block.
    """

    o: tuple[Array, ...]
    m: Array
    total: Array
    step: Array | None


class Block(NamedTuple):
    """A block's contribution to the sums.

    Attributes:
        p: probabilities in the values' dtype.
        a: factors of the running sums.
        b: factors of the block's product.
    """

    p: Array
    a: Array
    b: Array

    def merge(self, o: Array, product: Array) -> Array:
        """Returns the running sums of some columns including the block's product."""
        return merged(o, along_rows(self.a, product.shape), product, along_rows(self.b, product.shape))


class Piece(NamedTuple):
    """Columns of values that are multiplied at once.

    Attributes:
        part: the part of the page.
        first: the first column within the part.
    """

    part: int
    first: int
    size: int


class Kernel(abc.ABC):
    """A CTA that computes tiles of 128 query rows of one head each.

    A *step* is a block that the CTA visits. For narrow rows it is the block's number. For wide rows it is the slot of
    the block's first part: a remainder by 3, 5 or 7 slots would need a 64-bit multiply per part, and we have no
    registers left.
    """

    ring_names: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        problem: Problem,
        schedule: Schedule,
        masking: Masking,
        operands: Operands,
        results: Sequence[Any],
        scratch: dict[str, Any],
    ) -> None:
        self.problem, self.schedule, self.masking = problem, schedule, masking
        self.operands, self.scratch = operands, scratch
        self.o_gmem, self.normalizers_gmem = results
        self._warpgroup = lax.axis_index("warpgroup")
        cta, ctas = lax.axis_index("cta"), schedule.ctas(problem)
        self.item_count = lax.div(problem.tiles * problem.heads - cta + (ctas - 1), jnp.int32(ctas))
        # Strided, so that all CTAs begin with the longest tiles, which come first.
        self.item_index = lambda i: cta + i * ctas

    @classmethod
    @abc.abstractmethod
    def scratch_types(cls, problem: Problem, schedule: Schedule) -> dict[str, Any]:
        """Returns shared memory for queries, keys, values and results."""

    def run(self) -> None:
        """Runs the warpgroup's role."""
        lax.cond(self.warpgroup < WARPGROUPS, self.multiply, self.load)

    # --- steps that narrow and wide rows implement differently --------------------------------------------------------

    @property
    def warpgroup(self) -> Array:
        """The warpgroup's number."""
        return self._warpgroup

    @property
    @abc.abstractmethod
    def first_free(self) -> tuple[int, ...]:
        """The named barrier of the first slot of each ring."""

    @property
    @abc.abstractmethod
    def pieces(self) -> Sequence[Piece]:
        """The pieces of columns in which values are multiplied."""

    @abc.abstractmethod
    def key_slots(self, step: Array) -> list[Slot]:
        """Returns the slots of the parts of the step's keys."""

    @abc.abstractmethod
    def value_slots(self, step: Array) -> list[Slot]:
        """Returns the slots of the parts of the step's values."""

    @abc.abstractmethod
    def page_part(self, page: Any, part: int) -> Any:
        """Returns a part of a page in memory."""

    @abc.abstractmethod
    def next_step(self, step: Array) -> Array:
        """Returns the step of the next block."""

    @abc.abstractmethod
    def initial_step(self, rows: Rows) -> Array | None:
        """Returns the step that the running sums carry into a tile's first block."""

    @abc.abstractmethod
    def step_of(self, rows: Rows, block: Array, sums: Sums) -> Array:
        """Returns the step of a block."""

    @abc.abstractmethod
    def step_after(self, rows: Rows, sums: Sums) -> Array:
        """Returns the step of the next tile's first block."""

    @abc.abstractmethod
    def start_scores(self, accumulator: Any, rows: Rows, slots: list[Slot]) -> None:
        """Starts the products of queries and keys; the keys' first part is already loaded."""

    @abc.abstractmethod
    def accumulate(self, visit: Visit, o: tuple[Array, ...], block: Block, loaded: int) -> tuple[Array, ...]:
        """Multiplies a block's values and merges the products.

        Args:
            visit: the visit of the block.
            o: the running sums.
            block: the block's probabilities and factors.
            loaded: number of parts of the values that were already awaited.
        """

    @abc.abstractmethod
    def step_after_visit(self, visit: Visit) -> Array | None:
        """Returns the step that the running sums carry after a visit."""

    @abc.abstractmethod
    def clear_values(self, slots: list[Slot], rows: Any, length: Array) -> None:
        """Zeroes all but the first `length` of the warpgroup's rows of a page of values."""

    @abc.abstractmethod
    def stage(self, y: Array, target: Any, piece: Piece) -> None:
        """Stores a piece of the result in shared memory."""

    # --- which tiles --------------------------------------------------------------------------------------------------

    def item(self, i: Array) -> Item:
        """Returns tile number i of the CTA, with the blocks of keys that any of its rows sees."""
        index = self.item_index(i)
        # Heads of a tile are neighbours, so that heads that share keys run at the same time.
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
        return Item(request, head, row, rows, position, kv_length, lax.min(first, end - 1), end)

    def place(self, tile: Array) -> tuple[Array, Array, Array, Array]:
        """Returns the fields of `Tiles` for one tile."""
        if self.operands.tiles is not None:
            return tuple(ref[tile] for ref in self.operands.tiles)  # pyright: ignore[reportReturnType]
        batch = self.problem.batch
        tokens = self.problem.rows // batch
        # Longest first: the last tiles of requests see the most keys.
        offset = (ceil_div(tokens, TILE) - 1 - lax.div(tile, jnp.int32(batch))) * TILE
        request = lax.rem(tile, jnp.int32(batch))
        return request, request * tokens + offset, offset, lax.min(jnp.int32(TILE), tokens - offset)

    # --- the loading warpgroup ----------------------------------------------------------------------------------------

    def load(self) -> None:
        """Loads keys and values with one warp, and queries with another."""
        # Two warps, so that waiting for free queries delays no page. One warp starts a copy faster than a warpgroup.
        plgpu.set_max_registers(LOADING_REGISTERS, action="decrease")

        @plgpu.warp_map
        def _(warp: Array) -> None:
            pl.when(warp == 0)(self.load_keys_and_values)
            pl.when(warp == 1)(self.load_queries)

    def load_keys_and_values(self) -> None:
        """Loads all pages that the CTA's tiles visit, each part as soon as its slot is free."""
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
        """Loads the queries of all tiles, for each warpgroup as soon as it is done with the previous ones."""

        @pl.loop(0, self.item_count)
        def _(i: Array) -> None:
            item = self.item(i)
            for warpgroup in range(WARPGROUPS):
                sync(self.q_free + warpgroup, WARPGROUP + WARP)
                source = self.operands.q.at[pl.ds(item.row + warpgroup * ROWS, ROWS), item.head]
                target = self.queries(warpgroup)
                plgpu.copy_gmem_to_smem(source, target, self.scratch["q_loaded"].at[warpgroup])

    def queries(self, warpgroup: Array | int) -> Any:
        """Returns a warpgroup's rows of the queries in shared memory."""
        return self.scratch["q"].at[pl.ds(warpgroup * ROWS, ROWS)]

    @property
    def q_free(self) -> int:
        """The named barrier of the first warpgroup's queries."""
        return FIRST_FREE + len(self.first_free) * self.schedule.stages

    # --- the multiplying warpgroups -----------------------------------------------------------------------------------

    def multiply(self) -> None:
        """Computes the warpgroup's rows of all tiles of the CTA."""
        plgpu.set_max_registers(MULTIPLYING_REGISTERS, action="increase")
        # Everything is free at first: the loader awaits a release before every copy, also the first one into a slot.
        for slot in range(self.schedule.stages):
            for first_free in self.first_free:
                arrive_for_loader(first_free + slot)
        self.free_queries()
        pl.when(self.warpgroup == 1)(lambda: pass_turn(self.warpgroup))
        lax.fori_loop(0, self.item_count, self.multiply_tile, jnp.int32(0))
        pl.when(self.warpgroup == 0)(lambda: take_turn(self.warpgroup))
        plgpu.wait_smem_to_gmem(0)

    def free_queries(self) -> None:
        """Releases the warpgroup's queries."""
        arrive(self.q_free + self.warpgroup, WARPGROUP + WARP)

    def multiply_tile(self, i: Array, first_step: Array) -> Array:
        """Computes a tile, and returns the next tile's first step."""
        rows = self.await_rows(i, first_step)
        if not self.schedule.product_turns:
            take_turn(self.warpgroup)
        sums = self.visit_blocks(rows)
        self.write(self.item(i), sums)
        return self.step_after(rows, sums)

    def await_rows(self, i: Array, first_step: Array) -> Rows:
        """Waits for the tile's queries and for the first part of its keys."""
        item = self.item(i)
        q = self.queries(self.warpgroup)
        position = item.position + self.warpgroup * ROWS
        sinks, slopes = self.operands.sinks, self.operands.slopes
        sinks = None if sinks is None else splat(sinks[item.head], (ROWS,))
        slopes = None if slopes is None else splat(slopes[item.head], (ROWS, KV_BLOCK))
        plgpu.barrier_wait(self.key_slots(first_step)[0].loaded)
        plgpu.barrier_wait(self.scratch["q_loaded"].at[self.warpgroup])
        return Rows(item, position, q, sinks, slopes, first_step)

    def visit_blocks(self, rows: Rows) -> Sums:
        """Merges all blocks of keys from left to right."""

        def visit_all(first: Array, end: Array, sums: Sums, is_masked: bool) -> Sums:
            return lax.fori_loop(first, end, lambda block, sums: self.visit(rows, block, sums, is_masked), sums)

        item = rows.item
        zeros = tuple(splat(0.0, (ROWS, piece.size)) for piece in self.pieces)
        sums = Sums(zeros, *initial_statistics(rows.sinks), self.initial_step(rows))
        open_first, open_end = self.open_blocks(rows)
        if self.masking.window is not None:
            sums = visit_all(item.first, open_first, sums, True)
        sums = visit_all(open_first, open_end, sums, False)
        return visit_all(open_end, item.end, sums, True)

    def open_blocks(self, rows: Rows) -> tuple[Array, Array]:
        """Returns first and end of the blocks that every row sees entirely, except for the call's own mask."""
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
        # The warpgroups' bounds may differ, since masking a visible key changes no bit. A block whose tail is zeroed,
        # for which both warpgroups meet, is masked in both.
        return open_first, open_end

    def visit(self, rows: Rows, block: Array, sums: Sums, is_masked: bool) -> Sums:
        """Merges one block of keys."""
        step = self.step_of(rows, block, sums)
        k_slots, v_slots = self.key_slots(step), self.value_slots(step)
        is_last, words = block + 1 == rows.item.end, self.mask_words(rows.item, block)
        visit = Visit(rows, block, step, k_slots, v_slots, words, is_last, is_masked)
        s = self.score(visit)
        keys = block * KV_BLOCK
        s = self.masked(visit, keys, s)
        p, m_b = exponentials(s, exponent_scale(self.masking), s.max(axis=1))
        total_b = row_sums(p)
        p = p.astype(self.problem.dtype)
        m, a, b = rescaling(sums.m, m_b)
        total = merged(sums.total, a, total_b, b)
        # The turn is for products: the barrier keeps the compiler from moving exponentials and factors into it.
        p, m, total, a, b = lax.optimization_barrier((p, m, total, a, b))
        loaded = self.await_values(visit, keys)
        take_turn(self.warpgroup)
        o = self.accumulate(visit, sums.o, Block(p, a, b), loaded)
        return Sums(o, m, total, self.step_after_visit(visit))

    def score(self, visit: Visit) -> Array:
        """Returns the products of the queries and a block's keys, and releases the keys."""

        def multiply(accumulator: Any) -> Array:
            self.start_scores(accumulator, visit.rows, visit.k)
            # Products run asynchronously, so the other warpgroup can start its own right away.
            pass_turn(self.warpgroup)
            # Waits for the oldest products only, so parts are released one by one.
            for part, slot in enumerate(visit.k[:-1]):
                plgpu.wgmma_wait(len(visit.k) - 1 - part)
                arrive_for_loader(slot.free)
            return accumulator[...]

        if self.schedule.product_turns:
            take_turn(self.warpgroup)
        s = pl.run_scoped(multiply, plgpu.ACC((ROWS, KV_BLOCK), ACCUMULATOR))  # pyright: ignore
        arrive_for_loader(visit.k[-1].free)
        # The next tile's queries are loaded while this tile ends, unless its results take their place.
        if not self.problem.results_in_queries:
            pl.when(visit.is_last)(self.free_queries)
        return s

    def masked(self, visit: Visit, keys: Array, s: Array) -> Array:
        """Returns shaped scores of a block that begins at position `keys`, with -inf where a key is not visible."""
        rows = visit.rows
        s = shaped_scores(s, self.masking, rows.slopes, lambda: column_distances(keys - rows.position - row_indices()))
        if visit.is_masked:
            positions = rows.position + row_indices()
            s = mask_columns(s, *visible_keys(self.masking, keys, positions, rows.item.kv_length))
        return mask_bits(s, *visit.words) if visit.words else s

    def mask_words(self, item: Item, block: Array) -> list[Array]:
        """Loads the words of the call's mask for a block; none without a mask."""
        mask = self.operands.mask
        if mask is None:
            return []
        tokens = self.problem.rows // self.problem.batch
        row = lax.div(item.row - item.request * tokens, jnp.int32(ROWS)) + self.warpgroup
        parts = KV_BLOCK // ROWS
        return [load_words(mask, item.request, item.head, row, block * parts + part) for part in range(parts)]

    def await_values(self, visit: Visit, keys: Array) -> int:
        """Waits for a block's values, and returns for how many parts.

        Parts after the first are awaited when they are multiplied, unless their tails must be zeroed first.
        """
        loaded = len(visit.v) if visit.is_masked else 1
        for slot in visit.v[:loaded]:
            plgpu.barrier_wait(slot.loaded)
        if visit.is_masked:
            kv_length = visit.rows.item.kv_length
            pl.when(keys + KV_BLOCK > kv_length)(lambda: self.clear_tail(visit.v, kv_length - keys))
        return loaded

    def clear_tail(self, slots: list[Slot], length: Array) -> None:
        """Zeroes the values after a request's last one: each warpgroup half of the page, which both use as a whole."""
        rows = pl.ds(self.warpgroup * ROWS, ROWS)
        self.clear_values(slots, rows, length - self.warpgroup * ROWS)
        sync(CLEARED, CONSUMERS)

    def end_turn(self, visit: Visit) -> None:
        """Ends the warpgroup's turn after the block's last product has been started.

        A turn that continues with the next block's scores waits for their keys here, while the product runs.
        """

        def await_next() -> None:
            plgpu.barrier_wait(self.key_slots(self.next_step(visit.step))[0].loaded)

        if self.schedule.product_turns:
            pass_turn(self.warpgroup)
            pl.when(~visit.is_last)(await_next)
        else:
            lax.cond(visit.is_last, lambda: pass_turn(self.warpgroup), await_next)

    def write(self, item: Item, sums: Sums) -> None:
        """Writes the warpgroup's rows of the result, up to the next multiple of 8 after the request's last one."""
        in_queries = self.problem.results_in_queries
        staged = self.scratch["q" if in_queries else "o"].at[pl.ds(self.warpgroup * ROWS, ROWS)]
        normalizers = self.scratch["normalizers"].at[self.warpgroup]
        # The copies of the previous tile have to have read the staged results before they are overwritten.
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

        # The copy engine takes whole groups of 8 rows, at which requests begin.
        @pl.when(count < ROWS)
        def _() -> None:
            for first in range(0, ROWS, QUERY_UNIT):
                pl.when(first < count)(lambda first=first: copy(first, QUERY_UNIT))

        if in_queries:  # the next queries may be loaded once the copies have read the results
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self.free_queries()
