"""Attention of a few query tokens a request on Hopper (Pallas Mosaic GPU): decode, and verifying drafted tokens.

The queries of all heads that share keys, and of up to 16 tokens, are the columns of one tile. Blocks of keys of all
requests and heads lie on one line, in order, which is cut into one piece of equal length for each CTA: requests of any
lengths are side by side. A CTA merges the blocks of a sequence (one request, one head of keys, one tile) that it has
from the first on; of a sequence that began in an earlier CTA it writes each block's result by itself, and a second
kernel merges what is left, in order. Where the cuts lie changes no bit.
"""

import dataclasses
import functools
import math
from typing import Any, Final, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.mosaic.gpu import utils as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from detjax.contract import ACCUMULATOR, KV_BLOCK
from detjax.options import KVQuantization, Masking
from detjax.pallas.hopper import device
from detjax.pallas.hopper.attention.decode_merge import Cut, Cuts, Left, merge
from detjax.pallas.hopper.attention.dequantize import dequantize, page_buffers, page_bytes
from detjax.pallas.hopper.attention.queries_on_columns import (
    COLUMN,
    UNIT,
    along_columns,
    column_maxima,
    column_sums,
    columns_of_tile,
    exchanges,
    leave_sums,
    load_queries,
    row_distances,
    rows_kept,
    store_column_numbers,
    store_columns,
)
from detjax.pallas.hopper.attention.queries_on_rows import (
    ROWS,
    address_behind,
    exponent_scale,
    exponentials,
    finished,
    initial_statistics,
    line,
    merged,
    rescaling,
    scrub,
    shaped_scores,
    splat,
    swizzled,
    visible_keys,
)
from detjax.pallas.hopper.device import SHARED_MEMORY, SHARED_MEMORY_RESERVED
from detjax.pallas.hopper.warps import find_places
from detjax.portable.quantized_kv import QuantizedPages

MOST_TOKENS: Final = 16
"""Query tokens of a request."""
_DEQUANTIZING: Final = KV_BLOCK // ROWS
"""Warpgroups that dequantize, where pages are quantized: each has its rows of every page."""
_THREADS: Final = 256
_REGISTERS: Final = 512
"""Of four threads, one of each warpgroup."""
_CACHE_LINE: Final = 128
"""Bytes."""
_RING: Final = 128 * 1024
"""Bytes of pages in flight: enough to keep memory busy. What arrives last is all there at about the same time, and the
more that is, the longer it takes until it is multiplied."""
_MOST_SCRATCH: Final = 1 << 28
"""Bytes of unmerged results above which sequences are not cut."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How blocks are dealt out; no bit depends on it.

    Attributes:
        ctas: how many pieces the line of blocks is cut into.
        cut: whether a piece may begin within a sequence.
        slack: a cut that lies within this part of a piece from a sequence's beginning moves there: what is not cut
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


class Problem(NamedTuple):
    """Sizes of one call."""

    batch: int
    tokens: int
    heads: int
    kv_heads: int
    width: int
    value_width: int
    most_blocks: int
    """Of a request."""
    dtype: Any
    kind: KVQuantization | None = None
    """Of quantized pages."""

    @classmethod
    def of(
        cls, q: Array, k_pages: Array | QuantizedPages, v_pages: Array | QuantizedPages, most_blocks: int
    ) -> "Problem":
        batch, tokens, heads, width = q.shape
        kind = k_pages.kind if isinstance(k_pages, QuantizedPages) else None
        return cls(batch, tokens, heads, k_pages.shape[1], width, v_pages.shape[-1], most_blocks, q.dtype, kind)

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def most_columns(self) -> int:
        """Of a tile: so many that its sums fit into registers."""
        return 64 if self.value_width <= 128 else 32

    @property
    def tile_tokens(self) -> int:
        """Tokens of a tile."""
        return min(self.tokens, self.most_columns // self.group)

    @property
    def tiles(self) -> int:
        return -(-self.tokens // self.tile_tokens)

    @property
    def rows(self) -> int:
        """Queries of a tile; query `t * group + g` is head `g` of the tile's token `t`."""
        return self.tile_tokens * self.group

    @property
    def columns(self) -> int:
        """Columns of a tile: its queries, and zeros up to what the matrix unit multiplies."""
        return -(-self.rows // UNIT) * UNIT

    @property
    def sequences(self) -> int:
        """Of a request."""
        return self.kv_heads * self.tiles

    def cuts(self, ctas: int) -> Cuts:
        """What CTAs leave that share sequences."""
        blocks = min(self.most_blocks, -(-self.batch * self.sequences * self.most_blocks // ctas))
        of_tile = self.tokens, self.tiles, self.tile_tokens, self.group
        return Cuts(ctas, blocks, self.batch, self.sequences, *of_tile, self.value_width, self.dtype)

    def schedule(self) -> Schedule:
        ctas = device.multiprocessors()
        return Schedule(ctas, cut=self.cuts(ctas).bytes <= _MOST_SCRATCH or self.batch * self.sequences < 2 * ctas)

    @property
    def value_chunks(self) -> list[int]:
        """First columns of the pieces of 64 in which values are multiplied. The last one may overlap the one before:
        both then have the same bits."""
        return [*range(0, self.value_width - ROWS, ROWS), self.value_width - ROWS]

    @property
    def chunks_at_once(self) -> list[list[int]]:
        """The pieces of values in groups whose products are in registers at the same time, beside all sums."""
        size = max(1, 64 // self.columns)
        chunks = list(range(len(self.value_chunks)))
        return [chunks[first : first + size] for first in range(0, len(chunks), size)]

    @property
    def widths(self) -> list[int]:
        """Of the rings of keys and values: one for both, or one for each."""
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
        page = KV_BLOCK * sum(self.widths) * self.dtype.itemsize
        if self.kind is None:
            return min(6, free // page, max(3, _RING // page)), 0
        page_of_codes = sum(page_bytes(self.kind, width) for width in self.widths)
        # Numbers that wait hide nothing of the memory's latency: more room is for codes.
        slots = min(3, free // (page + page_of_codes))
        return slots, min(8, (free - slots * page) // page_of_codes)


def serves(q: Array, k_pages: Array | QuantizedPages, v_pages: Array | QuantizedPages) -> bool:
    """Whether tokens are few, a tile has room for the heads that share keys, and values fill the matrix unit's rows."""
    problem = Problem.of(q, k_pages, v_pages, 1)
    return problem.tokens <= MOST_TOKENS and problem.group <= problem.most_columns and problem.value_width >= ROWS


def forward(
    q: Array,
    k_pages: Array | QuantizedPages,
    v_pages: Array | QuantizedPages,
    page_table: Array,
    q_start: Array,
    kv_length: Array,
    sinks: Array | None,
    *,
    masking: Masking,
    schedule: Schedule | None = None,
) -> Array:
    """Output `[B, T, H, V]` of queries `[B, T, H, K]` that it `serves`."""
    batch, tokens, heads, width = q.shape
    problem = Problem.of(q, k_pages, v_pages, page_table.shape[1])
    schedule = schedule or problem.schedule()
    by_group = batch, tokens, problem.kv_heads, problem.group
    operands = [q.reshape(*by_group, width), *jax.tree.leaves((k_pages, v_pages)), page_table, q_start, kv_length]
    if sinks is not None:
        operands.append(_by_column(sinks.astype(ACCUMULATOR), problem))
    if masking.alibi_slopes is not None:
        operands.append(_by_column(jnp.asarray(masking.alibi_slopes, ACCUMULATOR), problem))
    out = [jax.ShapeDtypeStruct((*by_group, problem.value_width), q.dtype)]
    cuts = problem.cuts(schedule.ctas)
    if schedule.cut:
        out += cuts.out_types()
    dtype, slots, columns, kind = q.dtype, problem.slots, problem.columns, problem.kind
    scratch: dict[str, Any] = {
        "q": plgpu.SMEM((columns, width), dtype, transforms=swizzled(width)),
        # As wide lines as the values have: the matrix unit's operands share them.
        "p": plgpu.SMEM((columns, KV_BLOCK), dtype, transforms=swizzled(line(problem.value_width))),
        "kv": [plgpu.SMEM((slots, KV_BLOCK, size), dtype, transforms=swizzled(size)) for size in problem.widths],
        "loaded": plgpu.Barrier(num_arrivals=1 if kind is None else _DEQUANTIZING, num_barriers=slots),
        "consumed": plgpu.Barrier(num_barriers=slots),
        **exchanges(columns),
    }
    if kind is not None:
        scratch |= {
            "codes": [page_buffers(kind, problem.code_slots, size) for size in problem.widths],
            "codes_loaded": plgpu.Barrier(num_arrivals=2, num_barriers=problem.code_slots),
            "codes_consumed": plgpu.Barrier(num_arrivals=_DEQUANTIZING, num_barriers=problem.code_slots),
        }

    def body(*refs: Any, **scratch: Any) -> None:
        _Kernel(problem, schedule, masking, sinks is not None, refs, scratch).run()

    results = plgpu.kernel(
        body,
        out_type=out,
        grid=(schedule.ctas,),
        grid_names=("cta",),
        num_threads=2 if kind is None else 2 + _DEQUANTIZING,
        thread_name="warpgroup",
        scratch_types=scratch,
        # What one warp leaves in shared memory for others, these read once all have met: see `_Kernel.multiply_piece`.
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        kernel_name="attention_decode",
    )(*operands)
    o = merge(cuts, results[0], Left(*results[1:])) if schedule.cut else results[0]
    return o.reshape(batch, tokens, heads, problem.value_width)


def _by_column(per_head: Array, problem: Problem) -> Array:
    """Values of the query heads for the columns of a tile, `[h, n]`."""
    by_token = jnp.tile(per_head.reshape(problem.kv_heads, problem.group), (1, problem.tile_tokens))
    return jnp.pad(by_token, ((0, 0), (0, problem.columns - problem.rows)))


class _Place(NamedTuple):
    """A block on the line."""

    request: Array
    sequence: Array
    """Of the request: heads of keys, of each its tiles."""
    skipped: Array
    """Blocks of the sequence before this one."""


class _Piece(NamedTuple):
    """Blocks of one sequence that a CTA has, and those of its `_Place` before."""

    request: Array
    sequence: Array
    skipped: Array
    first_block: Array
    """Of the request's cache, that the sequence begins with."""
    blocks: Array
    """Of the sequence."""
    visits: Array
    """Of these, how many are the CTA's."""


class _Arrivals(NamedTuple):
    """Where pages arrive: as they are multiplied, or as codes and scales."""

    rings: list[tuple[Any, ...]]
    """Of the arrays of a page, for keys and for values."""
    slots: int
    loaded: str
    """The barriers' names."""
    consumed: str


class _Kernel:
    def __init__(
        self,
        problem: Problem,
        schedule: Schedule,
        masking: Masking,
        has_sinks: bool,
        refs: tuple[Any, ...],
        scratch: dict[str, Any],
    ) -> None:
        self.problem, self.schedule, self.masking, self.scratch = problem, schedule, masking, scratch
        self.cuts = problem.cuts(schedule.ctas)
        count = 1 + len(Left._fields) if schedule.cut else 1
        operands, (self.o_gmem, *left) = refs[:-count], refs[-count:]
        self.left = Left(*left) if schedule.cut else None
        arrays = 1 if problem.kind is None else 2  # of a pool
        self.q_gmem, *operands = operands
        self.pools, operands = (operands[:arrays], operands[arrays : 2 * arrays]), operands[2 * arrays :]
        self.page_table, self.q_start, self.kv_length, *operands = operands
        self.sinks = operands.pop(0) if has_sinks else None
        self.slopes = operands.pop(0) if masking.alibi_slopes is not None else None
        self.slots = problem.slots
        if problem.kind is None:
            self.arrivals = _Arrivals([(ring,) for ring in scratch["kv"]], self.slots, "loaded", "consumed")
        else:
            self.arrivals = _Arrivals(scratch["codes"], problem.code_slots, "codes_loaded", "codes_consumed")
        self.cta = lax.axis_index("cta")

    def run(self) -> None:
        warpgroup = lax.axis_index("warpgroup")
        prefetch(self.page_table, self.cta, self.schedule.ctas)
        self.deal()
        roles = [self.multiply, self.load]
        if self.problem.kind is not None:
            roles.append(lambda: self.dequantize((warpgroup - 2) * ROWS))
        lax.switch(warpgroup, roles)  # the last one is that of all further warpgroups

    def take_registers(self, count: int) -> None:
        """Of a thread, where warpgroups that dequantize leave too few for the one that multiplies. Else all may have as
        many as that one."""
        if self.problem.kind is not None:
            plgpu.set_max_registers(count, action="increase" if count > _REGISTERS // 4 else "decrease")

    # --- which blocks -------------------------------------------------------------------------------------------------

    def blocks_of(self, request: Array) -> tuple[Array, Array]:
        """First block, and number of blocks, that some query token of the request sees; at least one."""
        length = self.kv_length[request]
        first, end = jnp.int32(0), length
        if self.masking.causal or self.masking.window is not None:
            position = self.q_start[request]
            if self.masking.causal:
                end = lax.min(end, position + self.problem.tokens)
            if self.masking.window is not None:
                first = lax.div(lax.max(position - (self.masking.window - 1), 0), jnp.int32(KV_BLOCK))
        end = lax.min(lax.div(end + (KV_BLOCK - 1), jnp.int32(KV_BLOCK)), jnp.int32(self.problem.most_blocks))
        end = lax.max(end, 1)
        first = lax.min(first, end - 1)
        return first, end - first

    def deal(self) -> None:
        """Where on the line of blocks the CTA's piece begins, and how long it is."""

        def amount(request: Array) -> Array:
            _, blocks = self.blocks_of(request)
            return blocks * self.problem.sequences

        def cuts(total: Array) -> tuple[Array, ...]:
            each = lax.div(total + (self.schedule.ctas - 1), jnp.int32(self.schedule.ctas))
            return each, lax.min(self.cta * each, total), lax.min((self.cta + 1) * each, total)

        total, places = find_places(amount, self.problem.batch, lambda total: cuts(total)[1:])
        self.each, *ends = cuts(total)
        self.slack = (self.each.astype(ACCUMULATOR) * self.schedule.slack).astype(jnp.int32)
        (begin, self.start), (end, _) = (self.moved(*at) for at in zip(ends, places, strict=True))
        self.work = end - begin

    def moved(self, position: Array, place: tuple[Array, Array]) -> tuple[Array, _Place]:
        """A cut, and what lies behind it, given the request and the block of its sequences: where the schedule wants it
        instead."""
        request, offset = place
        _, blocks = self.blocks_of(request)
        sequence = lax.div(offset.astype(jnp.uint32), blocks.astype(jnp.uint32)).astype(jnp.int32)
        behind = offset - sequence * blocks
        missing = jnp.where(behind > 0, blocks - behind, 0)
        to_beginning, to_next = behind <= self.slack, missing <= self.slack
        if not self.schedule.cut:
            # A sequence belongs to the CTA in whose piece it begins.
            to_beginning, to_next = behind == 0, behind > 0
        step = jnp.where(to_beginning, -behind, jnp.where(to_next, missing, 0))
        goes_on = to_beginning | ~to_next
        at = _Place(request, sequence, behind + jnp.where(goes_on, step, 0))
        following = self.following(at)
        return position + step, _Place(*(jnp.where(goes_on, *pair) for pair in zip(at, following, strict=True)))

    def following(self, place: _Place) -> _Place:
        """Where the next sequence begins."""
        is_last = place.sequence + 1 == self.problem.sequences
        request = jnp.where(is_last, place.request + 1, place.request)
        return _Place(request, jnp.where(is_last, 0, place.sequence + 1), jnp.zeros_like(place.skipped))

    def for_each_piece(self, step: Any, carry: Array) -> Array:
        """The last `carry = step(piece, carry)` of the CTA's sequences in order."""

        def body(state: Any) -> Any:
            place, left, carry = state
            first_block, blocks = self.blocks_of(place.request)
            count = lax.min(blocks - place.skipped, left)
            piece = _Piece(place.request, place.sequence, place.skipped, first_block, blocks, count)
            carry = step(piece, carry)
            return self.following(place), left - count, carry

        return lax.while_loop(lambda state: state[1] > 0, body, (self.start, self.work, carry))[-1]

    def head_and_tile(self, piece: _Piece) -> tuple[Array, Array]:
        """Head of keys, and tile of query tokens, of the piece's sequence."""
        tiles = jnp.int32(self.problem.tiles)
        return lax.div(piece.sequence, tiles), lax.rem(piece.sequence, tiles)

    def ring(self, number: int) -> Any:
        """The slots that keys (0) or values (1) pass through; both the same ones where they are equally wide."""
        rings = self.scratch["kv"]
        return rings[number % len(rings)]

    # --- the loading warpgroup ----------------------------------------------------------------------------------------

    def load(self) -> None:
        self.take_registers(40)

        @plgpu.warp_map
        def _(warp: Array) -> None:
            @pl.when(warp == 0)
            def _() -> None:
                steps = self.for_each_piece(self.load_piece, jnp.int32(0))
                self.await_all(self.arrivals.consumed, steps, self.arrivals.slots)

    def await_all(self, name: str, count: Array, slots: int) -> None:
        """Waits for what has not been waited for when the last of `count` loads was started."""

        @pl.loop(lax.max(count - slots, 0), count)
        def _(index: Array) -> None:
            plgpu.barrier_wait(self.scratch[name].at[lax.rem(index, jnp.int32(slots))])

    def await_slot(self, name: str, step: Array, slots: int) -> Array:
        """The step's slot, once what was in it is no longer needed."""
        slot = lax.rem(step, jnp.int32(slots))

        @pl.when(step >= slots)
        def _() -> None:
            plgpu.barrier_wait(self.scratch[name].at[slot])

        return slot

    def load_piece(self, piece: _Piece, step: Array) -> Array:
        kv_head, _ = self.head_and_tile(piece)

        def load_block(i: Array, step: Array) -> Array:
            page = self.page_table[piece.request, piece.first_block + piece.skipped + i]
            for number, pool in enumerate(self.pools):
                slot = self.await_slot(self.arrivals.consumed, step + number, self.arrivals.slots)
                barrier = self.scratch[self.arrivals.loaded].at[slot]
                for pages, ring in zip(pool, self.arrivals.rings[number % len(self.arrivals.rings)], strict=True):
                    plgpu.copy_gmem_to_smem(pages.at[page, kv_head], ring.at[slot], barrier)
            return step + 2

        return lax.fori_loop(0, piece.visits, load_block, step)

    # --- the dequantizing warpgroups ----------------------------------------------------------------------------------

    def dequantize(self, first_row: Array) -> None:
        """`ROWS` rows of every page that arrives, from codes to what the matrix unit reads."""
        self.take_registers(112)
        problem, kind = self.problem, self.problem.kind
        assert kind is not None

        def page(number: int, step: Array) -> None:
            code_slot = lax.rem(step, jnp.int32(problem.code_slots))
            plgpu.barrier_wait(self.scratch["codes_loaded"].at[code_slot])
            slot = self.await_slot("consumed", step, self.slots)
            codes, scales = self.arrivals.rings[number % len(self.arrivals.rings)]
            target = self.ring(number).at[slot]
            dequantize(kind, codes.at[code_slot], scales.at[code_slot], target, first_row)
            plgpu.barrier_arrive(self.scratch["codes_consumed"].at[code_slot])
            plgpu.commit_smem()
            plgpu.barrier_arrive(self.scratch["loaded"].at[slot])

        def pages(_: Array, step: Array) -> Array:
            for number in range(len(self.pools)):
                page(number, step + number)
            return step + len(self.pools)

        def dequantize_piece(piece: _Piece, step: Array) -> Array:
            return lax.fori_loop(0, piece.visits, pages, step)

        steps = self.for_each_piece(dequantize_piece, jnp.int32(0))
        self.await_all("consumed", steps, self.slots)

    # --- the multiplying warpgroup ------------------------------------------------------------------------------------

    def multiply(self) -> None:
        self.take_registers(240)
        if self.left is not None and not self.cuts.by_sequence:
            # Of a CTA that begins no sequence nothing goes on.
            self.leave_cut(self.left, Cut(*(jnp.int32(0),) * len(Cut._fields)))
        self.for_each_piece(self.multiply_piece, jnp.int32(0))

    def leave_cut(self, left: Left, cut: Cut) -> None:
        """What the merging kernel has to know of a sequence that begins here."""
        for index, number in enumerate(cut):
            left.cuts[self.cuts.line(self.cta, cut.request, cut.sequence), index] = number

    def multiply_piece(self, piece: _Piece, first_step: Array) -> Array:
        """Every block has its threads meet twice: in `column_maxima`, and when `p` and its sums are in shared memory.
        So whatever is written there has been read, by all of them, a meeting earlier."""
        problem, masking, columns = self.problem, self.masking, self.problem.columns
        kv_head, tile = self.head_and_tile(piece)
        kv_length = self.kv_length[piece.request]
        first_token = tile * problem.tile_tokens
        position = self.q_start[piece.request] + first_token
        c = exponent_scale(masking)

        def by_column(ref: Any) -> Array:
            return plgpu.load(ref.at[kv_head], layout=COLUMN, optimized=False)

        sinks = None if self.sinks is None else by_column(self.sinks)
        # Of the last tile, columns behind the last token are zeros.
        self.queries = lax.min(jnp.int32(problem.tile_tokens), problem.tokens - first_token) * problem.group
        load_queries(self.q_gmem.at[piece.request, :, kv_head], self.scratch["q"], first_token, self.queries)
        plgpu.commit_smem()

        def visit(i: Array, use: Any) -> tuple[Array, Array, Any]:
            """Maximum and sum of the piece's block i, and what `use(index, chunk, maximum)` made of each chunk."""
            step = first_step + 2 * i
            k_slot, v_slot = (lax.rem(step + number, jnp.int32(self.slots)) for number in range(2))
            k, v = self.ring(0).at[k_slot], self.ring(1).at[v_slot]
            keys = (piece.first_block + piece.skipped + i) * KV_BLOCK
            plgpu.barrier_wait(self.scratch["loaded"].at[k_slot])

            def scores(accumulator: Any) -> Array:
                plgpu.wgmma(accumulator, k, self.scratch["q"].T)
                return accumulator[...]

            s = pl.run_scoped(scores, plgpu.ACC((KV_BLOCK, columns), ACCUMULATOR))  # pyright: ignore
            plgpu.barrier_arrive(self.scratch["consumed"].at[k_slot])
            positions = position + lax.div(columns_of_tile(columns), jnp.int32(problem.group))
            slopes = None if self.slopes is None else along_columns(by_column(self.slopes), s.shape)
            s = shaped_scores(s, masking, slopes, lambda: row_distances(keys - positions))
            s = rows_kept(s, *visible_keys(masking, keys, positions, kv_length, COLUMN))
            p, m_b = exponentials(s, c, column_maxima(s, self.scratch["maxima"]), along_columns)
            leave_sums(p, self.scratch["sums"])
            self.scratch["p"].T[...] = p.astype(problem.dtype)
            plgpu.barrier_wait(self.scratch["loaded"].at[v_slot])
            pl.when(keys + KV_BLOCK > kv_length)(lambda: self.scrub(v, kv_length - keys))
            plgpu.commit_smem()
            results = []
            for chunks in problem.chunks_at_once:

                def values(*accumulators: Any, chunks: list[int] = chunks) -> list[Array]:
                    for accumulator, chunk in zip(accumulators, chunks, strict=True):
                        columns = pl.ds(problem.value_chunks[chunk], ROWS)
                        plgpu.wgmma(accumulator, v.at[:, columns].T, self.scratch["p"].T)
                    return [accumulator[...] for accumulator in accumulators]

                accumulators = [plgpu.ACC((ROWS, columns), ACCUMULATOR) for _ in chunks]  # pyright: ignore
                found = pl.run_scoped(values, *accumulators)
                results += [use(chunk, x, m_b) for chunk, x in zip(chunks, found, strict=True)]
            plgpu.barrier_arrive(self.scratch["consumed"].at[v_slot])
            return m_b, column_sums(self.scratch["sums"]), tuple(results)

        def merge_block(i: Array, carry: Any) -> Any:
            o, m, total = carry

            def merge(index: int, x: Array, m_b: Array) -> Array:
                _, a, b = rescaling(m, m_b)
                return merged(o[index], along_columns(a, x.shape), x, along_columns(b, x.shape))

            m_b, total_b, o = visit(i, merge)
            m, a, b = rescaling(m, m_b)
            return o, m, merged(total, a, total_b, b, COLUMN)

        def from_the_beginning() -> None:
            left = self.left
            if left is not None:
                first_place = self.cuts.first_place(self.cta + 1, self.each)
                self.leave_cut(left, Cut(piece.request, piece.sequence, piece.blocks - piece.visits, first_place))
            zeros = tuple(splat(0.0, (ROWS, columns)) for _ in problem.value_chunks)
            start = zeros, *initial_statistics(sinks, columns, COLUMN)
            o, m, total = lax.fori_loop(0, piece.visits, merge_block, start)
            if left is None:
                return self.write(piece, kv_head, tile, o, total)
            is_whole = piece.visits == piece.blocks
            pl.when(is_whole)(lambda: self.write(piece, kv_head, tile, o, total))

            @pl.when(~is_whole)
            def _() -> None:
                line = self.cuts.line(self.cta, piece.request, piece.sequence)
                for index, x in enumerate(o):
                    self.leave_columns(left.prefixes.at[line], index, x)
                for which, numbers in enumerate((m, total)):
                    store_column_numbers(numbers, left.prefix_statistics.at[line, :, which])

        def block_by_block(left: Left) -> None:
            def leave_block(i: Array, _: None) -> None:
                place = self.cuts.first_place(self.cta, self.each) + i
                m_b, total_b, _ = visit(i, lambda index, x, _: self.leave_columns(left.blocks.at[place], index, x))
                for which, numbers in enumerate((m_b, total_b)):
                    store_column_numbers(numbers, left.statistics.at[:, which, place])

            lax.fori_loop(0, piece.visits, leave_block, None)

        if self.left is None:
            from_the_beginning()
        else:
            lax.cond(piece.skipped == 0, from_the_beginning, functools.partial(block_by_block, self.left))
        return first_step + 2 * piece.visits

    def scrub(self, v: Any, length: Array) -> None:
        """Zeros behind a request's last value."""
        for first in range(0, KV_BLOCK, ROWS):
            scrub(v.at[pl.ds(first, ROWS)], length - first)

    def write(self, piece: _Piece, kv_head: Array, tile: Array, o: tuple[Array, ...], total: Array) -> None:
        """The result of a whole sequence."""
        problem = self.problem
        for first, x in zip(problem.value_chunks, o, strict=True):
            y = finished(x, total, problem.dtype, along_columns)
            target = self.o_gmem.at[piece.request, :, kv_head, :, pl.ds(first, ROWS)]
            store_columns(y, target, tile * problem.tile_tokens, self.queries)

    def leave_columns(self, ref: Any, index: int, x: Array) -> None:
        """Columns of something that is not merged yet; soon it will be, and is better not written to memory until then,
        which keys and values that stream through the cache would make it."""
        target = ref.at[:, :, pl.ds(self.problem.value_chunks[index], ROWS)]
        store_columns(x, target, 0, self.problem.rows, keep_in_cache=True)


def prefetch(ref: Any, part: Array, parts: int) -> None:
    """Asks for one of `parts` parts of what lies in memory to be brought to the L2 cache."""

    def ask(_: Any, ref: Any, part: Any) -> None:
        pointer = mgpu.memref_ptr(ref)
        i32, i8 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(8)
        lines = -(-size // _CACHE_LINE)
        each = -(-lines // parts)
        thread = mgpu.thread_idx()
        for first in range(0, each, _THREADS):
            own = arith.addi(thread, mgpu.c(first, i32))
            index = arith.addi(arith.muli(part.registers.item(), mgpu.c(each, i32)), own)
            is_own = arith.andi(
                arith.cmpi(arith.CmpIPredicate.ult, own, mgpu.c(each, i32)),
                arith.cmpi(arith.CmpIPredicate.ult, index, mgpu.c(lines, i32)),
            )
            offset = arith.muli(index, mgpu.c(_CACHE_LINE, i32))
            with mgpu.when(is_own):
                at = address_behind(pointer, offset, i8)
                mgpu.inline_ptx("prefetch.global.L2 [$0];", at, has_side_effects=True)

    size = math.prod(ref.shape) * 4
    inlined: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT))(ask)
    inlined(ref, part)
