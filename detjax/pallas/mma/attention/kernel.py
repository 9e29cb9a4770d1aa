"""The kernel of attention on `mma.sync` (Pallas Mosaic GPU): 64 rows of queries by pages of keys and values.

It is the kernel of every phase. A CTA is one warpgroup, which has a tile of rows and visits the blocks of keys that any
of them sees, from left to right. Nothing that a row computes depends on the other rows of its tile, so tokens of a
prefill, of a decode and of a verified draft have the same bits, as have rows of split and of whole sequences.

Pages are loaded in parts of 64 columns, into a ring of slots: keys of the block part by part, then values. A score adds
the columns of its parts in ascending order to one accumulator. All parts but the one in use are on their way. Parts of
quantized pages arrive as codes, and all threads dequantize them into one slot of numbers.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from detjax.contract import KV_BLOCK
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
from detjax.pallas.hopper.attention.queries_on_rows import along_rows, row_indices, splat
from detjax.pallas.hopper.mosaic.barriers import meet
from detjax.pallas.hopper.mosaic.layouts import PER_ROW, ROWS
from detjax.pallas.hopper.mosaic.tiles import column_distances, mask_bits, mask_columns, row_sums
from detjax.pallas.mma.attention.dequantize import copy_codes, dequantize, page_buffers, part_of_page
from detjax.pallas.mma.attention.products import add_scores, multiply_values
from detjax.pallas.mma.attention.rows import await_copies, commit_copies, copy_rows, slots, store_numbers, store_tile
from detjax.pallas.mma.attention.schedule import Problem, Schedule, Tiles


class Operands(NamedTuple):
    """Input arrays of the kernel.

    Attributes:
        q: rows `[N, heads, K]`.
        pools: pages of keys and of values: of numbers alone, or of codes and of scales.
        sinks: float32 `[heads, 64]`, the sink of each row of a tile, or None.
        slopes: float32 `[heads, 64]`, the ALiBi slope of each row of a tile, or None.
        mask: words of `pack_words`, or None.
    """

    q: Any
    pools: tuple[tuple[Any, ...], tuple[Any, ...]]
    page_table: Any
    start: Any
    length: Any
    tiles: Tiles
    sinks: Any | None
    slopes: Any | None
    mask: Any | None


class Whole(NamedTuple):
    """Results of sequences that are not split: output `[N, heads, V]`, and log2 of the normalizers `[heads, N]`."""

    o: Any
    normalizers: Any


class Partials(NamedTuple):
    """Partial results of sequences that are split; a sequence is an item, which is one tile and one head.

    Attributes:
        prefixes: running sums of values of the first CTA's blocks, `[item, row, V]`.
        prefix_statistics: running maxima and sums, `[item, 2, row]`.
        blocks: products of the other blocks, `[item, block, row, V]`.
        statistics: their maxima and sums, `[item, block, 2, row]`.
        ranges: first of the other blocks and the end of all, as numbers in the sequence, int32 `[item, 2]`.
    """

    prefixes: Any
    prefix_statistics: Any
    blocks: Any
    statistics: Any
    ranges: Any


class _Item(NamedTuple):
    """A tile of one head, and the blocks that the CTA visits.

    Attributes:
        position: position of the tile's first token.
        first: the first block that any row sees.
        last: the end of the blocks that any row sees.
        begin: the first block that the CTA visits.
        end: the end of the blocks that it visits.
    """

    number: Array
    request: Array
    head: Array
    kv_head: Array
    row: Array
    token: Array
    rows: Array
    position: Array
    length: Array
    first: Array
    last: Array
    begin: Array
    end: Array


class _Sums(NamedTuple):
    """Running sums of values for each piece of columns, running maxima, and running sums of probabilities."""

    o: tuple[Array, ...]
    m: Array
    total: Array


type _Pages = tuple[Array, ...]
"""The pages of a block and of the blocks after it whose parts are loaded ahead."""
type _Use = Callable[[int, Array, Array], Array | None]
"""Takes the number of a piece of values, its product with the probabilities, and the block's maxima."""


def scratch_types(problem: Problem, schedule: Schedule) -> dict[str, Any]:
    """Returns the kernel's shared memory."""
    queries = {"q": slots(len(problem.key_parts), ROWS, problem.dtype)}
    if problem.quantization is None:
        return queries | {"pages": slots(schedule.stages, KV_BLOCK, problem.dtype)}
    codes, scales = page_buffers(problem.quantization, schedule.stages)
    return queries | {"pages": slots(1, KV_BLOCK, problem.dtype), "codes": codes, "scales": scales}


class Kernel:
    """A CTA that computes a tile of rows, or merges some of its blocks."""

    def __init__(
        self,
        problem: Problem,
        schedule: Schedule,
        masking: Masking,
        operands: Operands,
        results: Whole | Partials,
        scratch: dict[str, Any],
    ) -> None:
        self.problem, self.schedule, self.masking = problem, schedule, masking
        self.operands, self.results = operands, results
        self.q_slots, self.page_slots, self.scratch = scratch["q"], scratch["pages"], scratch

    def run(self) -> None:
        """Computes the CTA's rows, if its tile has any."""
        heads, number = jnp.int32(self.problem.heads), lax.axis_index("item")
        # Heads of a tile are neighbours, so that heads that share keys run at the same time.
        tile, head = lax.div(number, heads), lax.rem(number, heads)
        pl.when(self.operands.tiles.rows[tile] > 0)(lambda: self.compute(self.item(number, tile, head)))

    def item(self, number: Array, tile: Array, head: Array) -> _Item:
        """Returns the CTA's item, with the blocks of keys that any of its rows sees."""
        problem, tiles, block = self.problem, self.operands.tiles, jnp.int32(KV_BLOCK)
        request, rows = tiles.request[tile], tiles.rows[tile]
        length = self.operands.length[request]
        position = self.operands.start[request] + tiles.token[tile]
        end, first = length, jnp.int32(0)
        if self.masking.causal:
            end = lax.min(end, position + lax.div(rows - 1, jnp.int32(problem.group)) + 1)
        if self.masking.window is not None:
            first = lax.div(lax.max(position - (self.masking.window - 1), 0), block)
        end = lax.min(lax.div(lax.max(end, 0) + (KV_BLOCK - 1), block), jnp.int32(problem.blocks))
        first = lax.min(first, end)
        begin, stop = first, end
        if self.schedule.splits > 1:
            splits, split = jnp.int32(self.schedule.splits), lax.axis_index("split")
            share = lax.div(end - first + (splits - 1), splits)
            begin = lax.min(first + split * share, end)
            stop = lax.min(begin + share, end)
        kv_head = lax.div(head, jnp.int32(problem.heads_per_key_head))
        row, token = tiles.row[tile], tiles.token[tile]
        return _Item(number, request, head, kv_head, row, token, rows, position, length, first, end, begin, stop)

    def compute(self, item: _Item) -> None:
        """Merges the item's blocks and stores the result, or the partial results if the sequence is split."""
        self.load_queries(item)
        pages = self.start_pages(item)
        results = self.results
        if isinstance(results, Whole):
            self.store(item, results, self.merge_blocks(item, pages))
        else:
            is_first = lax.axis_index("split") == 0

            def store_prefix() -> None:
                self.store_prefix(item, results, self.merge_blocks(item, pages))

            lax.cond(is_first, store_prefix, lambda: self.store_blocks(item, results, pages))
        # Without blocks, nobody has waited for the queries, and shared memory must not be given away before.
        await_copies(unfinished=0)

    # --- loads --------------------------------------------------------------------------------------------------------

    def load_queries(self, item: _Item) -> None:
        """Starts to load the queries, in the same group as the first part of a page."""
        for number, (first, columns) in enumerate(self.problem.key_parts):
            source = self.operands.q.at[pl.ds(item.row, ROWS), item.head, pl.ds(first, columns)]
            copy_rows(source, self.q_slots.at[number], item.rows, whole=False)

    def start_pages(self, item: _Item) -> _Pages:
        """Starts the first loads of the ring; returns the pages of the first blocks."""
        ahead = self.schedule.stages - 1
        pages = tuple(
            self.page(item, item.begin + i) for i in range(1 + (self.problem.parts + ahead - 1) // self.problem.parts)
        )
        for part in range(ahead):
            self.load_part(item, item.begin, pages, part)
        return pages

    def page(self, item: _Item, block: Array) -> Array:
        """Returns the page of a block; undefined after the last block."""
        return self.operands.page_table[item.request, lax.min(block, jnp.int32(self.problem.blocks - 1))]

    def load_part(self, item: _Item, block: Array, pages: _Pages, part: int) -> None:
        """Starts the load of a part, counted from the first part of a block, if its block is visited."""
        later, number = divmod(part, self.problem.parts)
        page = pages[later]
        block = block + later
        pool = self.operands.pools[0 if number < len(self.problem.key_parts) else 1]
        first, columns = self.part(number)
        slot = self.ring_slot(item, block, number)

        @pl.when(block < item.end)
        def _() -> None:
            # A page may hold NaN after its request's last token, and 0 * NaN is not 0.
            count = item.length - block * KV_BLOCK
            source = [ref.at[page, item.kv_head] for ref in pool]
            if self.problem.quantization is None:
                copy_rows(source[0].at[:, pl.ds(first, columns)], self.page_slots.at[slot], count, whole=True)
            else:
                codes, scales = part_of_page(self.problem.quantization, source[0], source[1], first, columns)
                copy_codes(codes, scales, self.scratch["codes"].at[slot], self.scratch["scales"].at[slot], count)

        # Also without a copy: `await_copies` counts groups.
        commit_copies()

    def await_part(self, item: _Item, block: Array, pages: _Pages, part: int) -> Any:
        """Returns the slot of a part of the block, once it is loaded; starts the load of the part that is next."""
        await_copies(unfinished=self.schedule.stages - 2)
        # All threads have met, so all have read the previous part, and its slot is free.
        self.load_part(item, block, pages, part + self.schedule.stages - 1)
        slot, kind = self.ring_slot(item, block, part), self.problem.quantization
        if kind is None:
            return self.page_slots.at[slot]
        # All threads have read the numbers of the previous part, too.
        codes, scales, numbers = self.scratch["codes"].at[slot], self.scratch["scales"].at[slot], self.page_slots.at[0]
        count = item.length - block * KV_BLOCK
        dequantize(codes, scales, numbers, count, kind=kind, columns=self.part(part)[1])
        meet()
        return numbers

    def part(self, number: int) -> tuple[int, int]:
        """Returns the first column and the number of columns of a part of a block."""
        return (self.problem.key_parts + self.problem.value_parts)[number]

    def ring_slot(self, item: _Item, block: Array, part: int) -> Array:
        """Returns the number of the slot that a part of a block is loaded into."""
        step = (block - item.begin) * self.problem.parts + part
        return lax.rem(step, jnp.int32(self.schedule.stages))

    # --- blocks -------------------------------------------------------------------------------------------------------

    def visit(self, item: _Item, block: Array, pages: _Pages, use: _Use, is_masked: bool) -> tuple[Any, ...]:
        """Returns a block's maxima and sums, the results of `use` for each piece of values, and the next pages.

        Args:
            item: the item.
            block: number of the block.
            pages: the pages of the block and of the next ones.
            use: see `_Use`.
            is_masked: whether positions may hide some of the block's keys from some row.
        """
        following = (*pages[1:], self.page(item, block + len(pages)))
        s = splat(0.0, (ROWS, KV_BLOCK))
        for number, (_, columns) in enumerate(self.problem.key_parts):
            slot = self.await_part(item, block, pages, number)
            s = add_scores(s, self.q_slots.at[number], slot, columns=columns)
        s = self.masked(item, block, s, is_masked)
        p, m_b = exponentials(s, exponent_scale(self.masking), s.max(axis=1))
        total_b = row_sums(p)
        p = p.astype(self.problem.dtype)
        results, slot = [], None
        for piece, (part, first, columns) in enumerate(self.problem.value_pieces):
            if first == 0:
                slot = self.await_part(item, block, pages, len(self.problem.key_parts) + part)
            results.append(use(piece, multiply_values(p, slot, first=first, columns=columns), m_b))
        return (m_b, total_b), tuple(results), following

    def masked(self, item: _Item, block: Array, s: Array, is_masked: bool) -> Array:
        """Returns shaped scores of a block, with -inf where a key is not visible."""
        keys = block * KV_BLOCK
        positions = item.position + lax.div(row_indices(), jnp.int32(self.problem.group))
        slopes = self.operands.slopes
        if slopes is not None:
            slopes = along_rows(plgpu.load(slopes.at[item.head], layout=PER_ROW, optimized=False), s.shape)
        s = shaped_scores(s, self.masking, slopes, lambda: column_distances(keys - positions))
        if is_masked:
            s = mask_columns(s, *visible_keys(self.masking, keys, positions, item.length))
        words = self.mask_words(item, block)
        return mask_bits(s, *words) if words else s

    def mask_words(self, item: _Item, block: Array) -> list[Array]:
        """Loads the words of the call's mask for a block; none without a mask."""
        mask, parts = self.operands.mask, KV_BLOCK // ROWS
        if mask is None:
            return []
        row = lax.div(item.token, jnp.int32(ROWS))
        return [load_words(mask, item.request, item.head, row, block * parts + part) for part in range(parts)]

    def over_blocks[T](self, item: _Item, step: Callable[[Array, T, bool], T], state: T) -> T:
        """Folds `step(block, state, is_masked)` over the blocks that the CTA visits."""

        def over(first: Array, end: Array, state: T, is_masked: bool) -> T:
            return lax.fori_loop(first, end, lambda block, state: step(block, state, is_masked), state)

        if self.problem.is_wide or self.problem.tile_rows < ROWS or isinstance(self.results, Partials):
            # Each copy of the loop's code takes the compiler seconds, and calls with few rows wait for memory, not for
            # masks. Masking a visible key changes no bit.
            return over(item.begin, item.end, state, True)
        open_first, open_end = self.open_blocks(item)
        if self.masking.window is not None:
            state = over(item.begin, open_first, state, True)
        state = over(open_first, open_end, state, False)
        return over(open_end, item.end, state, True)

    def open_blocks(self, item: _Item) -> tuple[Array, Array]:
        """Returns first and end of the visited blocks that every row sees entirely, except for the call's own mask."""
        block = jnp.int32(KV_BLOCK)
        end = lax.div(item.length, block)
        if self.masking.causal:
            end = lax.min(end, lax.div(item.position + 1, block))
        end = lax.max(lax.min(end, item.end), item.begin)
        if self.masking.window is None:
            return item.begin, end
        last = item.position + (ROWS - 1) // self.problem.group
        hidden = lax.max(last + 1 - self.masking.window, 0)
        first = lax.min(lax.div(hidden + (KV_BLOCK - 1), block), end)
        return lax.max(first, item.begin), end

    def merge_blocks(self, item: _Item, pages: _Pages) -> _Sums:
        """Returns the sums of the blocks that the CTA visits, merged from left to right after the sinks."""

        def merge(block: Array, state: tuple[_Sums, _Pages], is_masked: bool) -> tuple[_Sums, _Pages]:
            sums, pages = state

            def merge_piece(piece: int, product: Array, m_b: Array) -> Array:
                _, a, b = rescaling(sums.m, m_b)
                shape = product.shape
                return merged(sums.o[piece], along_rows(a, shape), product, along_rows(b, shape))

            (m_b, total_b), o, pages = self.visit(item, block, pages, merge_piece, is_masked)
            m, a, b = rescaling(sums.m, m_b)
            return _Sums(o, m, merged(sums.total, a, total_b, b)), pages

        sinks = self.operands.sinks
        if sinks is not None:
            sinks = plgpu.load(sinks.at[item.head], layout=PER_ROW, optimized=False)
        zeros = tuple(splat(0.0, (ROWS, columns)) for _, _, columns in self.problem.value_pieces)
        return self.over_blocks(item, merge, (_Sums(zeros, *initial_statistics(sinks)), pages))[0]

    # --- results ------------------------------------------------------------------------------------------------------

    def store(self, item: _Item, results: Whole, sums: _Sums) -> None:
        """Stores the result of a whole sequence."""
        rows = pl.ds(item.row, ROWS)
        for piece, x in enumerate(sums.o):
            target = results.o.at[rows, item.head, pl.ds(self.problem.first_column(piece), x.shape[1])]
            store_tile(normalized(x, sums.total, self.problem.dtype), target, item.rows)
        store_numbers(log2_normalizers(sums.m, sums.total), results.normalizers.at[item.head, rows], item.rows)

    def store_prefix(self, item: _Item, partials: Partials, sums: _Sums) -> None:
        """Stores the sums of the first CTA of a split sequence, and which blocks it leaves to the others."""
        for piece, x in enumerate(sums.o):
            columns = pl.ds(self.problem.first_column(piece), x.shape[1])
            store_tile(x, partials.prefixes.at[item.number, :, columns], item.rows)
        self.store_statistics(partials.prefix_statistics.at[item.number], item, (sums.m, sums.total))
        for index, block in enumerate((item.end, item.last)):
            partials.ranges[item.number, index] = block - item.first

    def store_blocks(self, item: _Item, partials: Partials, pages: _Pages) -> None:
        """Stores the products of the blocks that the CTA visits one by one."""

        def store(block: Array, pages: _Pages, is_masked: bool) -> _Pages:
            place = block - item.first

            def store_piece(piece: int, product: Array, _: Array) -> None:
                columns = pl.ds(self.problem.first_column(piece), product.shape[1])
                store_tile(product, partials.blocks.at[item.number, place, :, columns], item.rows)

            statistics, _, pages = self.visit(item, block, pages, store_piece, is_masked)
            self.store_statistics(partials.statistics.at[item.number, place], item, statistics)
            return pages

        self.over_blocks(item, store, pages)

    def store_statistics(self, ref: Any, item: _Item, statistics: Sequence[Array]) -> None:
        """Stores maxima and sums to memory `[2, row]`."""
        for index, x in enumerate(statistics):
            store_numbers(x, ref.at[index], item.rows)
