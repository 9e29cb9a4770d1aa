"""Attention of a few query tokens a request on Hopper (Pallas Mosaic GPU): decode, and verifying drafted tokens.

The queries of all heads that share keys, and of up to 16 tokens, are the columns of one tile. Blocks of keys of all
requests and heads lie on one line, in order, which is cut into one piece of equal length for each CTA: requests of any
lengths are side by side. A CTA merges the blocks of a sequence (one request, one head of keys, one tile) that it has
from the first on; of a sequence that began in an earlier CTA it writes each block's result by itself, and a second
kernel merges what is left, in order. Where the cuts lie changes no bit.
"""

import dataclasses
import functools
from typing import Any, Final, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from detjax.contract import ACCUMULATOR, KV_BLOCK, LOWEST_MAXIMUM, Masking
from detjax.pallas import hopper
from detjax.pallas.attention_columns_hopper import (
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
from detjax.pallas.attention_tile_hopper import (
    ROWS,
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
from detjax.pallas.hopper import SHARED_MEMORY, SHARED_MEMORY_RESERVED

MOST_TOKENS: Final = 16
"""Query tokens of a request."""
_MERGED_AT_ONCE: Final = 16
"""Unmerged blocks that a CTA of the merging kernel loads at once: their statistics fill 128 bytes."""
_MERGE_STAGES: Final = 6
_INFO: Final = 8
"""Numbers that a CTA leaves about the sequence that it begins in."""
_MOST_SCRATCH: Final = 1 << 28
"""Bytes of unmerged results above which sequences are not cut."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How blocks are dealt out; no bit depends on it.

    Attributes:
        ctas: how many pieces the line of blocks is cut into.
        cut: whether a piece may begin within a sequence.
    """

    ctas: int
    cut: bool = True


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

    @classmethod
    def of(cls, q: Array, k_pages: Array, v_pages: Array, most_blocks: int) -> "Problem":
        batch, tokens, heads, width = q.shape
        return cls(batch, tokens, heads, k_pages.shape[1], width, v_pages.shape[-1], most_blocks, q.dtype)

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

    @property
    def padded_width(self) -> int:
        """Columns of an unmerged result: what all threads of a warpgroup divide."""
        return -(-self.value_width // 128) * 128

    def partial_blocks(self, ctas: int) -> int:
        """The most blocks that a CTA leaves unmerged, in whole loads of the merging kernel."""
        most = min(self.most_blocks, -(-self.batch * self.sequences * self.most_blocks // ctas))
        return -(-most // _MERGED_AT_ONCE) * _MERGED_AT_ONCE

    def schedule(self) -> Schedule:
        ctas = hopper.multiprocessors()
        partials = ctas * self.partial_blocks(ctas) * self.rows * self.padded_width * 4
        return Schedule(ctas, cut=partials <= _MOST_SCRATCH or self.batch * self.sequences < 2 * ctas)

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
    def slots(self) -> int:
        """Pages of keys or values in flight."""
        columns = self.columns
        exchanged = columns * (self.width + KV_BLOCK) * self.dtype.itemsize + columns * (4 + 32) * 4
        free = SHARED_MEMORY - SHARED_MEMORY_RESERVED - exchanged
        widths = sum({self.width, self.value_width})  # one ring for both, or one for each
        return min(6, free // (KV_BLOCK * widths * self.dtype.itemsize))


def serves(q: Array, k_pages: Array, v_pages: Array) -> bool:
    """Whether tokens are few, a tile has room for the heads that share keys, and values fill the matrix unit's rows."""
    problem = Problem.of(q, k_pages, v_pages, 1)
    return problem.tokens <= MOST_TOKENS and problem.group <= problem.most_columns and problem.value_width >= ROWS


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
    schedule: Schedule | None = None,
) -> Array:
    """Output `[B, T, H, V]` of queries `[B, T, H, K]` that it `serves`."""
    batch, tokens, heads, width = q.shape
    problem = Problem.of(q, k_pages, v_pages, page_table.shape[1])
    schedule = schedule or problem.schedule()
    by_group = batch, tokens, problem.kv_heads, problem.group
    operands = [q.reshape(*by_group, width), k_pages, v_pages, page_table, q_start, kv_length]
    if sinks is not None:
        operands.append(_by_column(sinks.astype(ACCUMULATOR), problem))
    if masking.alibi_slopes is not None:
        operands.append(_by_column(jnp.asarray(masking.alibi_slopes, ACCUMULATOR), problem))
    out = [jax.ShapeDtypeStruct((*by_group, problem.value_width), q.dtype)]
    if schedule.cut:
        blocks = problem.partial_blocks(schedule.ctas)
        of_tile = problem.tile_tokens, problem.group, problem.padded_width
        out += [
            jax.ShapeDtypeStruct((schedule.ctas * blocks, *of_tile), ACCUMULATOR),
            jax.ShapeDtypeStruct((problem.rows, 2, schedule.ctas * blocks), ACCUMULATOR),
            jax.ShapeDtypeStruct((schedule.ctas, *of_tile), ACCUMULATOR),
            jax.ShapeDtypeStruct((schedule.ctas, problem.rows, 2), ACCUMULATOR),
            jax.ShapeDtypeStruct((schedule.ctas, _INFO), jnp.int32),
        ]
    dtype, slots, columns = q.dtype, problem.slots, problem.columns
    scratch = {
        "q": plgpu.SMEM((columns, width), dtype, transforms=swizzled(width)),
        # As wide lines as the values have: the matrix unit's operands share them.
        "p": plgpu.SMEM((columns, KV_BLOCK), dtype, transforms=swizzled(line(problem.value_width))),
        "kv": [
            plgpu.SMEM((slots, KV_BLOCK, size), dtype, transforms=swizzled(size))
            for size in dict.fromkeys((width, problem.value_width))
        ],
        "loaded": plgpu.Barrier(num_barriers=slots),
        "consumed": plgpu.Barrier(num_barriers=slots),
        **exchanges(columns),
    }

    def body(*refs: Any, **scratch: Any) -> None:
        _Kernel(problem, schedule, masking, sinks is not None, refs, scratch).run()

    results = plgpu.kernel(
        body,
        out_type=out,
        grid=(schedule.ctas,),
        grid_names=("cta",),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=scratch,
        # What one warp leaves in shared memory for others, these read once all have met: see `_Kernel.multiply_piece`.
        compiler_params=dataclasses.replace(_COMPILER_PARAMS, unsafe_no_auto_barriers=True),
        kernel_name="attention_decode",
    )(*operands)
    o = _merge(problem, schedule, *results) if schedule.cut else results[0]
    return o.reshape(batch, tokens, heads, problem.value_width)


_COMPILER_PARAMS = plgpu.CompilerParams(
    approx_math=True, reduction_scratch_bytes=0, lowering_semantics=plgpu.LoweringSemantics.Lane
)


def _by_column(per_head: Array, problem: Problem) -> Array:
    """Values of the query heads for the columns of a tile, `[h, n]`."""
    by_token = jnp.tile(per_head.reshape(problem.kv_heads, problem.group), (1, problem.tile_tokens))
    return jnp.pad(by_token, ((0, 0), (0, problem.columns - problem.rows)))


class _Piece(NamedTuple):
    """Blocks of one sequence that a CTA has."""

    request: Array
    sequence: Array
    """Of the request: heads of keys, of each its tiles."""
    skipped: Array
    """Blocks of the sequence that earlier CTAs have."""
    first_block: Array
    """Of the request's cache, that the sequence begins with."""
    blocks: Array
    """Of the sequence."""
    visits: Array
    """Of these, how many are the CTA's."""


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
        operands, results = refs[: -6 if schedule.cut else -1], refs[-6 if schedule.cut else -1 :]
        self.q_gmem, self.k_gmem, self.v_gmem, self.page_table, self.q_start, self.kv_length, *operands = operands
        self.sinks = operands.pop(0) if has_sinks else None
        self.slopes = operands.pop(0) if masking.alibi_slopes is not None else None
        self.o_gmem, *self.partials = results
        self.slots = problem.slots
        self.cta = lax.axis_index("cta")

    def run(self) -> None:
        warpgroup = lax.axis_index("warpgroup")
        start, work, each = self.own_work()
        if self.schedule.cut:
            self.first_place = _first_place(self.problem, self.schedule, self.cta, each)
        lax.cond(warpgroup == 1, lambda: self.load(start, work), lambda: self.multiply(start, work))

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

    def own_work(self) -> tuple[tuple[Array, Array], Array, Array]:
        """Request, and block of its sequences, that the CTA begins with; how many blocks it has, and most CTAs have."""

        def amount(request: Array) -> Array:
            _, blocks = self.blocks_of(request)
            return blocks * self.problem.sequences

        def fold(step: Any, carry: Any) -> Any:
            # Several at once, so that their loads do not wait for one another.
            unrolled = min(self.problem.batch, 32)
            whole = self.problem.batch // unrolled

            def steps(index: Array, carry: Any) -> Any:
                amounts = [amount(index * unrolled + i) for i in range(unrolled)]
                for i in range(unrolled):
                    carry = step(index * unrolled + i, amounts[i], carry)
                return carry

            carry = lax.fori_loop(0, whole, steps, carry) if whole else carry
            for request in range(whole * unrolled, self.problem.batch):
                carry = step(jnp.int32(request), amount(jnp.int32(request)), carry)
            return carry

        total = fold(lambda _, amount, carry: carry + amount, jnp.int32(0))
        each = lax.div(total + (self.schedule.ctas - 1), jnp.int32(self.schedule.ctas))
        begin = lax.min(self.cta * each, total)
        end = lax.min(begin + each, total)

        def locate(request: Array, amount: Array, carry: Any) -> Any:
            passed, found, offset = carry
            here = (passed <= begin) & (begin < passed + amount)
            return passed + amount, jnp.where(here, request, found), jnp.where(here, begin - passed, offset)

        _, request, offset = fold(locate, (jnp.int32(0), jnp.int32(0), jnp.int32(0)))
        if not self.schedule.cut:
            # A sequence belongs to the CTA in whose piece it begins.
            begin, request, offset = self.next_beginning(request, offset, begin)
            end = lax.max(begin, end)
        return (request, offset), end - begin, each

    def next_beginning(self, request: Array, offset: Array, begin: Array) -> tuple[Array, Array, Array]:
        _, blocks = self.blocks_of(request)
        missing = lax.rem(blocks - lax.rem(offset, blocks), blocks)
        offset = offset + missing
        is_next = offset >= blocks * self.problem.sequences
        return begin + missing, jnp.where(is_next, request + 1, request), jnp.where(is_next, 0, offset)

    def for_each_piece(self, start: tuple[Array, Array], work: Array, step: Any, carry: Array) -> Array:
        """The last `carry = step(piece, carry)` of the CTA's sequences in order."""

        def body(state: Any) -> Any:
            request, offset, left, carry = state
            first_block, blocks = self.blocks_of(request)
            sequence, skipped = lax.div(offset, blocks), lax.rem(offset, blocks)
            count = blocks - skipped
            if self.schedule.cut:
                count = lax.min(count, left)
            carry = step(_Piece(request, sequence, skipped, first_block, blocks, count), carry)
            offset = offset + count
            is_next = offset >= blocks * self.problem.sequences
            request = jnp.where(is_next, request + 1, request)
            return request, jnp.where(is_next, 0, offset), left - count, carry

        return lax.while_loop(lambda state: state[2] > 0, body, (*start, work, carry))[-1]

    def head_and_tile(self, piece: _Piece) -> tuple[Array, Array]:
        """Head of keys, and tile of query tokens, of the piece's sequence."""
        tiles = jnp.int32(self.problem.tiles)
        return lax.div(piece.sequence, tiles), lax.rem(piece.sequence, tiles)

    def ring(self, number: int) -> Any:
        """The slots that keys (0) or values (1) pass through; both the same ones where they are equally wide."""
        rings = self.scratch["kv"]
        return rings[number % len(rings)]

    # --- the loading warpgroup ----------------------------------------------------------------------------------------

    def load(self, start: tuple[Array, Array], work: Array) -> None:
        plgpu.set_max_registers(40, action="decrease")

        @plgpu.warp_map
        def _(warp: Array) -> None:
            @pl.when(warp == 0)
            def _() -> None:
                steps = self.for_each_piece(start, work, self.load_piece, jnp.int32(0))

                # What has not been waited for when the last load was started.
                @pl.loop(lax.max(steps - self.slots, 0), steps)
                def _(step: Array) -> None:
                    plgpu.barrier_wait(self.scratch["consumed"].at[lax.rem(step, jnp.int32(self.slots))])

    def load_piece(self, piece: _Piece, step: Array) -> Array:
        kv_head, _ = self.head_and_tile(piece)

        def load_block(i: Array, step: Array) -> Array:
            page = self.page_table[piece.request, piece.first_block + piece.skipped + i]
            for number, pages in enumerate((self.k_gmem, self.v_gmem)):
                slot = lax.rem(step + number, jnp.int32(self.slots))

                @pl.when(step + number >= self.slots)
                def _(slot: Array = slot) -> None:
                    plgpu.barrier_wait(self.scratch["consumed"].at[slot])

                target = self.ring(number).at[slot]
                plgpu.copy_gmem_to_smem(pages.at[page, kv_head], target, self.scratch["loaded"].at[slot])
            return step + 2

        return lax.fori_loop(0, piece.visits, load_block, step)

    # --- the multiplying warpgroup ------------------------------------------------------------------------------------

    def multiply(self, start: tuple[Array, Array], work: Array) -> None:
        plgpu.set_max_registers(248, action="increase")
        if self.schedule.cut:
            self.leave_info(start, work)
        self.for_each_piece(start, work, self.multiply_piece, jnp.int32(0))

    def leave_info(self, start: tuple[Array, Array], work: Array) -> None:
        """What the merging kernel has to know of the sequence that the CTA begins in."""
        request, offset = start
        _, blocks = self.blocks_of(request)
        info = self.partials[-1]
        numbers = (request, lax.div(offset, blocks), lax.rem(offset, blocks), blocks, work)
        for index, number in enumerate(numbers):
            info[self.cta, index] = number

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
        source = self.q_gmem.at[piece.request, pl.ds(first_token, problem.tile_tokens), kv_head]
        load_queries(source, self.scratch["q"], self.queries)
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
            zeros = tuple(splat(0.0, (ROWS, columns)) for _ in problem.value_chunks)
            start = zeros, *initial_statistics(sinks, columns, COLUMN)
            o, m, total = lax.fori_loop(0, piece.visits, merge_block, start)
            if not self.schedule.cut:
                return self.write(piece, kv_head, tile, o, total)
            is_whole = piece.visits == piece.blocks
            pl.when(is_whole)(lambda: self.write(piece, kv_head, tile, o, total))

            @pl.when(~is_whole)
            def _() -> None:
                _, _, prefixes, statistics, _ = self.partials
                for index, x in enumerate(o):
                    self.leave_columns(prefixes.at[self.cta], index, x)
                self.leave_statistics(statistics.at[self.cta], None, m, total)

        def block_by_block() -> None:
            partials, statistics, *_ = self.partials

            def leave_block(i: Array, _: None) -> None:
                place = self.first_place + i
                m_b, total_b, _ = visit(i, lambda index, x, _: self.leave_columns(partials.at[place], index, x))
                self.leave_statistics(statistics, place, m_b, total_b)

            lax.fori_loop(0, piece.visits, leave_block, None)

        if self.schedule.cut:
            lax.cond(piece.skipped == 0, from_the_beginning, block_by_block)
        else:
            from_the_beginning()
        return first_step + 2 * piece.visits

    def scrub(self, v: Any, length: Array) -> None:
        """Zeros behind a request's last value."""
        for first in range(0, KV_BLOCK, ROWS):
            scrub(v.at[pl.ds(first, ROWS)], length - first)

    def write(self, piece: _Piece, kv_head: Array, tile: Array, o: tuple[Array, ...], total: Array) -> None:
        """The result of a whole sequence."""
        problem = self.problem
        tokens = pl.ds(tile * problem.tile_tokens, problem.tile_tokens)
        for first, x in zip(problem.value_chunks, o, strict=True):
            y = finished(x, total, problem.dtype, along_columns)
            store_columns(y, self.o_gmem.at[piece.request, tokens, kv_head, :, pl.ds(first, ROWS)], self.queries)

    def leave_columns(self, ref: Any, index: int, x: Array) -> None:
        """Columns of something that is not merged yet."""
        store_columns(x, ref.at[:, :, pl.ds(self.problem.value_chunks[index], ROWS)], self.problem.rows)

    def leave_statistics(self, ref: Any, block: Array | None, m: Array, total: Array) -> None:
        for which, numbers in enumerate((m, total)):
            store_column_numbers(numbers, ref.at[:, which] if block is None else ref.at[:, which, block])


def _first_place(problem: Problem, schedule: Schedule, cta: Array, each: Array) -> Array:
    """Where a CTA's unmerged blocks begin: those of one sequence are neighbours, in whichever CTAs they came to be.

    A sequence that is shorter than a CTA's piece lies in two at most, unmerged in the second alone.
    """
    return cta * lax.min(each, jnp.int32(problem.partial_blocks(schedule.ctas)))


# --- what several CTAs have of one sequence ---------------------------------------------------------------------------


def _merge(
    problem: Problem,
    schedule: Schedule,
    o: Array,
    partials: Array,
    statistics: Array,
    prefixes: Array,
    prefix_statistics: Array,
    info: Array,
) -> Array:
    """The output, with the sequences in it that cuts go through; a CTA for each row of each of them."""
    width = problem.padded_width
    chunk, stages = _MERGED_AT_ONCE, _MERGE_STAGES
    layout = plgpu.Layout.WG_STRIDED(shape=(width,), vec_size=1)

    def spread(x: Array) -> Array:
        return plgpu.layout_cast(lax.broadcast_in_dim(x, (width,), ()), layout)

    def body(
        o_gmem: Any,
        partials_gmem: Any,
        statistics_gmem: Any,
        prefixes_gmem: Any,
        prefix_statistics_gmem: Any,
        info_gmem: Any,
        x_smem: Any,
        statistics_smem: Any,
        y_smem: Any,
        loaded: Any,
    ) -> None:
        row, cta = lax.axis_index("row"), lax.axis_index("cut") + 1
        request, sequence, skipped, blocks, work = (info_gmem[cta, i] for i in range(5))
        each = info_gmem[0, 4]
        tile = lax.rem(sequence, jnp.int32(problem.tiles))
        of_tile = lax.div(row, jnp.int32(problem.group))
        token = tile * problem.tile_tokens + of_tile
        # Of the cuts through one sequence the first one's CTA merges: the CTA before it began with the first block.
        head = lax.rem(row, jnp.int32(problem.group))
        is_own = (work > 0) & (skipped > 0) & (skipped <= each) & (token < problem.tokens)

        @pl.when(is_own)
        def _() -> None:
            left = blocks - skipped
            # The copy engine begins at 16 bytes, four statistics: a few blocks before the first one are loaded too.
            first_place = _first_place(problem, schedule, cta, each)
            early = lax.rem(first_place, jnp.int32(4))
            first_place, end = first_place - early, left + early
            chunks = lax.div(end + (chunk - 1), jnp.int32(chunk))

            def load(index: Array) -> None:
                slot = lax.rem(index, jnp.int32(stages))
                places = pl.ds(first_place + index * chunk, chunk)
                plgpu.copy_gmem_to_smem(partials_gmem.at[places, of_tile, head], x_smem.at[slot], loaded.at[slot])
                plgpu.copy_gmem_to_smem(statistics_gmem.at[row, :, places], statistics_smem.at[slot], loaded.at[slot])

            for index in range(stages):
                pl.when(index < chunks)(lambda index=index: load(jnp.int32(index)))

            def block(slot: Array, i: int, first: Array) -> tuple[Array, Array, Array]:
                """Result, maximum and sum of the chunk's block i; what changes nothing if that is none of these."""
                is_there = (first + i >= early) & (first + i < end)
                x = plgpu.load(x_smem.at[slot, i], layout=layout)
                m = jnp.where(is_there, statistics_smem[slot, 0, i], LOWEST_MAXIMUM)
                total = jnp.where(is_there, statistics_smem[slot, 1, i], 0.0)
                return jnp.where(is_there, x, 0.0), spread(m), spread(total)

            def merge_block(carry: Any, block: tuple[Array, Array, Array]) -> Any:
                o, m, total = carry
                x, m_b, total_b = block
                m_new = jnp.maximum(m, m_b)
                # Of the two factors one is 1: half as many exponentials, the same bits.
                factor, is_new = jnp.exp2(jnp.minimum(m, m_b) - m_new), m_b > m
                a, b = jnp.where(is_new, factor, 1.0), jnp.where(is_new, 1.0, factor)
                return merged(o, a, x, b, layout), m_new, merged(total, a, total_b, b, layout)

            def merge_chunk(index: Array, carry: Any) -> Any:
                slot = lax.rem(index, jnp.int32(stages))
                plgpu.barrier_wait(loaded.at[slot])
                # Loaded before the first is merged, so that none waits for another.
                loads = [block(slot, i, index * chunk) for i in range(chunk)]
                carry = functools.reduce(merge_block, loads, carry)

                @pl.when(index + stages < chunks)
                def _() -> None:
                    load(index + stages)

                return carry

            before = prefix_statistics_gmem.at[cta - 1]
            carry = (
                plgpu.load(prefixes_gmem.at[cta - 1, of_tile, head], layout=layout),
                spread(before[row, 0]),
                spread(before[row, 1]),
            )
            x, _, total = lax.fori_loop(0, chunks, merge_chunk, carry)
            y_smem[...] = finished(x, total, problem.dtype, spread=lambda x, _: x)
            plgpu.commit_smem()
            kv_head = lax.div(sequence, jnp.int32(problem.tiles))
            plgpu.copy_smem_to_gmem(y_smem.at[pl.ds(0, problem.value_width)], o_gmem.at[request, token, kv_head, head])
            plgpu.wait_smem_to_gmem(0)

    merge = plgpu.kernel(
        body,
        out_type=(),
        grid=(schedule.ctas - 1, problem.rows),
        grid_names=("cut", "row"),
        scratch_types=[
            plgpu.SMEM((stages, chunk, width), ACCUMULATOR),
            plgpu.SMEM((stages, 2, chunk), ACCUMULATOR),
            plgpu.SMEM((width,), problem.dtype),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        ],
        compiler_params=_COMPILER_PARAMS,
        kernel_name="attention_merge",
    )
    result = jax.new_ref(o)
    merge(result, partials, statistics, prefixes, prefix_statistics, info)
    return jax.freeze(result)
