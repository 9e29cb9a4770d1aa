"""Attention of many query tokens on Hopper (Pallas Mosaic GPU): prefill, chunked prefill and the training forward.

A CTA has 128 query rows of one head: two warpgroups of 64, which take turns at the matrix unit, so that one multiplies
while the other exponentiates. A third one loads: one of its warps brings keys and values, a page each, another one the
queries.

Rows of more than 128 columns are wide: shared memory does not hold two pages of keys and two of values, nor registers a
block's product beside all running sums. Wide pages come in parts, which share one ring of slots, and a block's values
are multiplied in pieces: while one is multiplied, the one before it is merged.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from detjax.contract import ACCUMULATOR, KV_BLOCK, QUERY_UNIT
from detjax.options import Masking
from detjax.pallas.hopper import device
from detjax.pallas.hopper.attention.mask import bits_kept, tile_words
from detjax.pallas.hopper.attention.queries_on_rows import (
    ROWS,
    along_rows,
    clear_rows,
    columns_kept,
    distances,
    exponent_scale,
    exponentials,
    finished,
    initial_statistics,
    issued_product,
    log2_normalizers,
    merged,
    rescaling,
    row_sums,
    rows_of_tile,
    scrub,
    shaped_scores,
    splat,
    store_lines,
    swizzled,
    visible_keys,
)
from detjax.pallas.hopper.attention.warpgroups import (
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
from detjax.pallas.hopper.device import SHARED_MEMORY, SHARED_MEMORY_RESERVED

_SCRUBBED, _FIRST_FREE = FIRST_BARRIER, FIRST_BARRIER + 1
"""Named barriers: one for both warpgroups to meet at; then one for each slot of keys and of values, and for each
warpgroup's queries."""
_MOST_SLOTS = 16 - _FIRST_FREE - WARPGROUPS
"""Of parts of pages: so many named barriers are left."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How tiles are spread over the chip; no bit depends on it.

    Attributes:
        stages: pages of keys, and of values, in flight; of wide rows, parts of either.
        persistent: one CTA per multiprocessor takes tile after tile, the longest first; else each tile is a CTA.
        product_turns: a turn at the matrix unit is one product: a warpgroup merges while the other multiplies, but has
            less time to exponentiate. Else a turn is a block's values and the next block's scores.
    """

    stages: int = 2
    persistent: bool = True
    product_turns: bool = False


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
    def is_wide(self) -> bool:
        """Whether pages come in parts and values are multiplied in pieces. Both widths are then multiples of 64."""
        return max(self.width, self.value_width) > 128

    @property
    def part_width(self) -> int:
        """Columns of a page that are loaded, and freed, at once."""
        common = math.gcd(self.width, self.value_width)
        return 128 if common == 256 else common

    @property
    def piece_width(self) -> int:
        """Columns of values that are multiplied, and merged, at once, if a part has so many. Two pieces' products, all
        running sums and a block's p are in a warpgroup's registers at the same time."""
        return 64 if self.value_width > 192 else 128

    @property
    def results_in_queries(self) -> bool:
        """Whether results wait to be copied where their queries were: there is no other place."""
        return self.is_wide and self.width == self.value_width

    def scratch(self, stages: int) -> dict[str, Any]:
        """Shared memory of queries, keys, values and results."""

        def rows(line: int, *shape: int) -> Any:
            return plgpu.SMEM(shape, self.dtype, transforms=swizzled(line))

        q, o = (TILE, self.width), (TILE, self.value_width)
        if not self.is_wide:
            k, v = (stages, KV_BLOCK, self.width), (stages, KV_BLOCK, self.value_width)
            return {
                "q": rows(self.width, *q),
                "k": rows(self.width, *k),
                "v": rows(self.value_width, *v),
                "o": rows(self.value_width, *o),
            }
        scratch = {"q": rows(64, *q), "kv": rows(64, stages, KV_BLOCK, self.part_width)}
        return scratch if self.results_in_queries else scratch | {"o": rows(64, *o)}

    def schedule(self) -> Schedule:
        # Long tiles even out by themselves; short ones gain from the next one's queries being there.
        persistent = self.rows // self.batch < 2048
        if not self.is_wide:
            return Schedule(2, persistent)
        of_tile = TILE * (self.width + (0 if self.results_in_queries else self.value_width))
        free = (SHARED_MEMORY - SHARED_MEMORY_RESERVED) // self.dtype.itemsize - of_tile
        slots = min(_MOST_SLOTS, free // (KV_BLOCK * self.part_width))
        # A turn for each product is 1% faster on an H200 at 256 columns; a persistent CTA has no registers for it.
        return Schedule(slots, persistent, product_turns=self.value_width == 256 and not persistent)


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
    mask: Array | None = None,
    tiles: Tiles | None = None,
    schedule: Schedule | None = None,
) -> tuple[Array, Array]:
    """Output `[N, H, V]` and log2 of each row's normalizer, `[H, N]` float32.

    Args:
        q: queries of all requests, `[N, H, K]`; N is a multiple of 8 and each request begins at one.
        mask: `words_of` a mask, of whole tiles of 128 rows and all pages; none with `tiles`.
        tiles: the tiles of 128 rows; default: those of requests of N / B rows each. Rows behind a request's last are
            written up to the next multiple of 8.
        schedule: default: the problem's own.
    """
    batch, (rows, heads, width) = q_start.shape[0], q.shape
    problem = Problem(batch, rows, heads, k_pages.shape[1], width, v_pages.shape[-1], q.dtype)
    schedule = schedule or problem.schedule()
    count = batch * -(-rows // (batch * TILE)) if tiles is None else tiles.request.shape[0]
    items = count * heads
    grid = min(items, device.multiprocessors()) if schedule.persistent else items
    scratch = problem.scratch(schedule.stages) | {
        "normalizers": plgpu.SMEM((WARPGROUPS, ROWS), ACCUMULATOR),
        "q_loaded": plgpu.Barrier(num_barriers=WARPGROUPS),
    }
    for ring in ("kv",) if problem.is_wide else ("k", "v"):
        scratch[f"{ring}_loaded"] = plgpu.Barrier(num_barriers=schedule.stages)
    operands = [q, k_pages, v_pages, page_table, q_start, kv_length, *(tiles or ())]
    if sinks is not None:
        operands.append(sinks.astype(ACCUMULATOR))
    if masking.alibi_slopes is not None:
        operands.append(jnp.asarray(masking.alibi_slopes, ACCUMULATOR))
    if mask is not None:
        operands.append(mask)

    def body(*refs: Any, **scratch: Any) -> None:
        _Kernel(problem, schedule, masking, items, grid, tiles is not None, sinks is not None, refs, scratch).run()

    out_type = (
        jax.ShapeDtypeStruct((rows, heads, problem.value_width), q.dtype),
        jax.ShapeDtypeStruct((heads, rows), ACCUMULATOR),
    )
    o, normalizers = launch("attention_prefill", body, out_type, grid, scratch)(*operands)
    return o, normalizers


class _Item(NamedTuple):
    """A tile of one head."""

    request: Array
    head: Array
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


class _Ring(NamedTuple):
    """Slots of shared memory that parts of pages go through in order."""

    name: str
    free: int
    """The first of the slots' named barriers."""
    parts: int
    """That come for each block,"""
    first: int
    """and how many of these come before those of keys, or of values."""


class _Slot(NamedTuple):
    """One of these."""

    content: Any
    loaded: Any
    """Barrier of the part's arrival."""
    number: Array
    first_free: int

    @property
    def free(self) -> Array:
        """Named barrier of all being done with the part."""
        return self.first_free + self.number


class _Piece(NamedTuple):
    """Columns of values."""

    part: int
    first: int
    """Of the part's columns."""
    size: int


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
        self.mask = operands.pop(0) if operands else None
        self.scratch = scratch
        self._warpgroup = lax.axis_index("warpgroup")
        cta = lax.axis_index("cta")
        self.item_count = lax.div(items - cta + (grid - 1), jnp.int32(grid))
        self.item_index = lambda i: cta + i * grid
        stages = schedule.stages
        keys, values = 1, 1
        self.rings = {"k": _Ring("k", _FIRST_FREE, keys, 0), "v": _Ring("v", _FIRST_FREE + stages, values, 0)}
        self.q_free = _FIRST_FREE + 2 * stages
        self.pieces = [_Piece(0, 0, problem.value_width)]
        if problem.is_wide:
            each, size = problem.part_width, problem.piece_width
            keys, values = problem.width // each, problem.value_width // each
            self.rings = {
                name: _Ring("kv", _FIRST_FREE, keys + values, first) for name, first in (("k", 0), ("v", keys))
            }
            self.q_free = _FIRST_FREE + stages
            self.pieces = [
                _Piece(part, first, min(size, each - first)) for part in range(values) for first in range(0, each, size)
            ]
        self.parts = {"k": keys, "v": values}

    @property
    def warpgroup(self) -> Array:
        # For wide rows the compiler takes it for another one each time: registers are too few to keep all addresses,
        # barriers and descriptors that follow from it from block to block.
        return lax.optimization_barrier(self._warpgroup) if self.problem.is_wide else self._warpgroup

    def run(self) -> None:
        lax.cond(self.warpgroup < WARPGROUPS, self.multiply, self.load)

    # A step is a block that the CTA visits: of narrow rows its number, of wide ones the slot of its first part, as a
    # remainder by 3, 5 or 7 slots would be multiplications of 64 bits for each part, in registers that are not there.

    def slots(self, name: str, step: Array) -> list[_Slot]:
        """Where the parts of the step's page of keys, or of values, go."""
        return [self.slot(name, step, part) for part in range(self.parts[name])]

    def slot(self, name: str, step: Array, part: int = 0) -> _Slot:
        ring = self.rings[name]
        index = self.wrapped(step, ring.first + part) if self.problem.is_wide else self.remainder(step)
        return _Slot(self.scratch[ring.name].at[index], self.scratch[f"{ring.name}_loaded"].at[index], index, ring.free)

    def next_step(self, step: Array) -> Array:
        return self.wrapped(step, self.rings["k"].parts) if self.problem.is_wide else step + 1

    def wrapped(self, slot: Array, distance: int) -> Array:
        slot = slot + distance
        return jnp.where(slot >= self.schedule.stages, slot - self.schedule.stages, slot) if distance else slot

    def remainder(self, step: Array) -> Array:
        return lax.rem(step, jnp.int32(self.schedule.stages))

    def columns(self, part: int) -> Any:
        return pl.ds(part * self.problem.part_width, self.problem.part_width)

    def item(self, i: Array) -> _Item:
        index = self.item_index(i)
        # Heads of one tile are neighbours, so that those that share keys run at the same time.
        heads = jnp.int32(self.problem.heads)
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
        return _Item(request, head, row, rows, position, kv_length, lax.min(first, end - 1), end)

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

        def load_tile(i: Array, step: Array) -> Array:
            item = self.item(i)
            kv_head = lax.div(item.head, jnp.int32(group))

            def load_block(block: Array, step: Array) -> Array:
                k_slots, v_slots = self.slots("k", step), self.slots("v", step)
                page = self.page_table[item.request, block]
                for pages, slots in ((self.k_gmem, k_slots), (self.v_gmem, v_slots)):
                    for part, slot in enumerate(slots):
                        sync(slot.free, CONSUMERS + 32)
                        source = pages.at[page, kv_head]
                        source = source.at[:, self.columns(part)] if self.problem.is_wide else source
                        plgpu.copy_gmem_to_smem(source, slot.content, slot.loaded)
                return self.next_step(step)

            return lax.fori_loop(item.first, item.end, load_block, step)

        lax.fori_loop(0, self.item_count, load_tile, jnp.int32(0))

    def load_queries(self) -> None:
        @pl.loop(0, self.item_count)
        def _(i: Array) -> None:
            item = self.item(i)
            for part in range(WARPGROUPS):
                sync(self.q_free + part, 128 + 32)
                source = self.q_gmem.at[pl.ds(item.row + part * ROWS, ROWS), item.head]
                target = self.queries(part)
                plgpu.copy_gmem_to_smem(source, target, self.scratch["q_loaded"].at[part])

    def queries(self, warpgroup: Array | int) -> Any:
        """A warpgroup's rows of them in shared memory."""
        return self.scratch["q"].at[pl.ds(warpgroup * ROWS, ROWS)]

    # --- the multiplying warpgroups -----------------------------------------------------------------------------------

    def multiply(self) -> None:
        plgpu.set_max_registers(240, action="increase")
        for slot in range(self.schedule.stages):
            for free in dict.fromkeys(ring.free for ring in self.rings.values()):
                arrive(free + slot, CONSUMERS + 32)
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
        q_smem = self.queries(self.warpgroup)
        position = item.position + self.warpgroup * ROWS
        product_turns = self.schedule.product_turns
        c = exponent_scale(self.masking)
        sinks = None if self.sinks is None else splat(self.sinks[item.head], (ROWS,))
        slopes = None if self.slopes is None else splat(self.slopes[item.head], (ROWS, KV_BLOCK))
        plgpu.barrier_wait(self.slot("k", first_step).loaded)
        plgpu.barrier_wait(self.scratch["q_loaded"].at[self.warpgroup])
        if not product_turns:
            self.take_turn()

        def visit(block: Array, carry: Any, *, is_masked: bool) -> Any:
            o, m, total, step = carry
            step = first_step + (block - item.first) if step is None else step
            k_slots, v_slots = self.slots("k", step), self.slots("v", step)
            is_last = block + 1 == item.end
            words = self.mask_words(item, block)

            def scores(accumulator: Any) -> Array:
                self.issue_scores(accumulator, q_smem, k_slots)
                self.pass_turn()
                for part, slot in enumerate(k_slots[:-1]):
                    plgpu.wgmma_wait(len(k_slots) - 1 - part)
                    arrive(slot.free, CONSUMERS + 32)
                return accumulator[...]

            if product_turns:
                self.take_turn()
            s = pl.run_scoped(scores, plgpu.ACC((ROWS, KV_BLOCK), ACCUMULATOR))  # pyright: ignore
            arrive(k_slots[-1].free, CONSUMERS + 32)
            if not self.problem.results_in_queries:
                pl.when(is_last)(self.free_queries)
            keys = block * KV_BLOCK
            s = shaped_scores(s, self.masking, slopes, lambda: distances(keys - position - rows_of_tile()))
            if is_masked:
                positions = position + rows_of_tile()
                s = columns_kept(s, *visible_keys(self.masking, keys, positions, item.kv_length))
            if words:
                s = bits_kept(s, *words)
            p, m_b = exponentials(s, c, s.max(axis=1))
            total_b = row_sums(p)
            p = p.astype(self.problem.dtype)
            m, a, b = rescaling(m, m_b)
            total = merged(total, a, total_b, b)
            p, m, total, a, b = lax.optimization_barrier((p, m, total, a, b))
            # Parts behind the first are waited for when it is their turn, unless they are to be scrubbed.
            loaded = len(v_slots) if is_masked else 1
            for slot in v_slots[:loaded]:
                plgpu.barrier_wait(slot.loaded)
            if is_masked:
                pl.when(keys + KV_BLOCK > item.kv_length)(lambda: self.scrub(v_slots, item.kv_length - keys))
            self.take_turn()

            def await_next() -> None:
                plgpu.barrier_wait(self.slot("k", self.next_step(step)).loaded)

            def after_last_product() -> None:
                if product_turns:
                    self.pass_turn()
                    pl.when(~is_last)(await_next)
                else:
                    lax.cond(is_last, self.pass_turn, await_next)

            def with_product(o: Array, x: Array) -> Array:
                return merged(o, along_rows(a, x.shape), x, along_rows(b, x.shape))

            if not self.problem.is_wide:

                def values(accumulator: Any) -> Array:
                    plgpu.wgmma(accumulator, p, v_slots[0].content)
                    after_last_product()
                    return accumulator[...]

                x = pl.run_scoped(values, plgpu.ACC(o[0].shape, ACCUMULATOR))  # pyright: ignore
                arrive(v_slots[0].free, CONSUMERS + 32)
                return (with_product(o[0], x),), m, total, None

            o = self.merge_values(o, p, v_slots, loaded, with_product, after_last_product)
            return o, m, total, self.next_step(step)

        def visit_all(first: Array, end: Array, carry: Any, is_masked: bool) -> Any:
            return lax.fori_loop(first, end, lambda block, carry: visit(block, carry, is_masked=is_masked), carry)

        zeros = tuple(splat(0.0, (ROWS, piece.size)) for piece in self.pieces)
        carry = zeros, *initial_statistics(sinks), first_step if self.problem.is_wide else None
        # Blocks that every row of the tile sees whole, but for what the call's own mask hides, need no masking.
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
        o, m, total, step = visit_all(open_end, item.end, carry, True)
        self.write(self.item(i), o, m, total)
        return first_step + (item.end - item.first) if step is None else step

    def mask_words(self, item: _Item, block: Array) -> list[Array]:
        """Which scores of a block the call's mask leaves; nothing without one."""
        if self.mask is None:
            return []
        tokens = self.problem.rows // self.q_start.shape[0]
        row = lax.div(item.row - item.request * tokens, jnp.int32(ROWS)) + self.warpgroup
        parts = KV_BLOCK // ROWS
        return [tile_words(self.mask, item.request, item.head, row, block * parts + part) for part in range(parts)]

    def issue_scores(self, accumulator: Any, q_smem: Any, slots: list[_Slot]) -> None:
        """Begins with the products of queries and keys, part by part of their columns; the first part is there."""
        if not self.problem.is_wide:
            return plgpu.wgmma(accumulator, q_smem, slots[0].content.T)
        q_smem = self.queries(self.warpgroup)
        for part, slot in enumerate(slots):
            if part > 0:
                plgpu.barrier_wait(slot.loaded)
            plgpu.wgmma(accumulator, q_smem.at[:, self.columns(part)], slot.content.T)
        return None

    def merge_values(
        self,
        o: tuple[Array, ...],
        p: Array,
        slots: list[_Slot],
        loaded: int,
        with_product: Callable[[Array, Array], Array],
        after_last_product: Callable[[], None],
    ) -> tuple[Array, ...]:
        """Multiplies a block's values and merges them, piece by piece.

        Args:
            loaded: how many of the parts are known to be there.
            with_product: sums of a piece's columns with the block's product.
            after_last_product: is called when the last product is on its way.
        """
        merged_o, before = [], None
        for piece in self.pieces:
            is_next_part = piece.part > 0 and piece.first == 0
            if is_next_part and piece.part >= loaded:
                plgpu.barrier_wait(slots[piece.part].loaded)
            x = issued_product(p, slots[piece.part].content.at[:, pl.ds(piece.first, piece.size)])
            if before is not None:
                plgpu.wgmma_wait(1)
                if is_next_part:
                    arrive(slots[piece.part - 1].free, CONSUMERS + 32)
                merged_o.append(
                    lax.optimization_barrier(with_product(o[len(merged_o)], lax.optimization_barrier(before)))
                )
            before = x
        # Not before the merging above, which the compiler would put off to behind what this waits for.
        after_last_product()
        plgpu.wgmma_wait(0)
        arrive(slots[-1].free, CONSUMERS + 32)
        return (*merged_o, with_product(o[-1], lax.optimization_barrier(before)))

    def scrub(self, slots: list[_Slot], length: Array) -> None:
        """Zeros behind a request's last value: each warpgroup has half of the page, and both use it whole."""
        own = pl.ds(self.warpgroup * ROWS, ROWS)
        left = length - self.warpgroup * ROWS
        if self.problem.is_wide:
            for slot in slots:
                clear_rows(slot.content.at[own], left)
            plgpu.commit_smem()
        else:
            scrub(slots[0].content.at[own], left)
        sync(_SCRUBBED, CONSUMERS)

    def write(self, item: _Item, o: tuple[Array, ...], m: Array, total: Array) -> None:
        is_wide, in_queries = self.problem.is_wide, self.problem.results_in_queries
        own = pl.ds(self.warpgroup * ROWS, ROWS)
        staged = self.scratch["q" if in_queries else "o"].at[own]
        normalizers = self.scratch["normalizers"].at[self.warpgroup]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for x, piece in zip(o, self.pieces, strict=True):
            y = finished(x, total, self.problem.dtype)
            if is_wide:
                store_lines(y, staged.at[:, pl.ds(piece.part * self.problem.part_width + piece.first, piece.size)])
            else:
                staged[...] = y
        normalizers[...] = log2_normalizers(m, total)
        plgpu.commit_smem()
        row, left = item.row + self.warpgroup * ROWS, item.rows - self.warpgroup * ROWS

        def copy(first: int, size: int) -> None:
            rows, part = pl.ds(row + first, size), pl.ds(first, size)
            plgpu.copy_smem_to_gmem(staged.at[part], self.o_gmem.at[rows, item.head])
            plgpu.copy_smem_to_gmem(normalizers.at[part], self.normalizers_gmem.at[item.head, rows])

        pl.when(left >= ROWS)(lambda: copy(0, ROWS))

        @pl.when(left < ROWS)
        def _() -> None:
            for first in range(0, ROWS, QUERY_UNIT):
                pl.when(first < left)(lambda first=first: copy(first, QUERY_UNIT))

        if in_queries:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self.free_queries()
