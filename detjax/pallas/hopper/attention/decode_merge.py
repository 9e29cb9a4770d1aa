"""Blocks of keys that several CTAs have of one sequence, merged in order on Hopper (Pallas Mosaic GPU).

Where a decode's line of blocks is cut within a sequence, the CTA that has its beginning leaves what it has merged, and
the others leave each block's result by itself. CTAs for each query of such a sequence merge them, a thread for each
column. The factors of 128 blocks are found first, a thread for each: what is left to do in order is a fused
multiply-add a block. What shared memory delivers limits how fast that goes, so where sequences are few, their columns
are spread over several CTAs.
"""

import functools
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.mosaic.gpu import utils as mgpu
from jax.experimental.mosaic.gpu.fragmented_array import FragmentedArray
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector

from detjax.contract import ACCUMULATOR
from detjax.pallas.hopper import device
from detjax.pallas.hopper.attention.queries_on_rows import element, finished, fma, index_of
from detjax.pallas.hopper.warps import WARP, from_lanes_below, warp

_THREADS: Final = 128
_AT_ONCE: Final = 32
"""Blocks that are loaded at once."""
_MOST_CTAS: Final = 4
"""Of a multiprocessor, up to which columns are spread over CTAs."""
_RING: Final = 192 * 1024
"""Bytes of loads in flight, of all the CTAs of a multiprocessor."""
_BEFORE, _OWN, _SUM = range(3)
"""Factors of a block: of what was merged before, of the block's own result, and its sum times that."""
_NUMBER: Final = plgpu.Layout.WG_SPLAT
_LINE: Final = plgpu.Layout.WG_STRIDED(shape=(_THREADS,), vec_size=1)


class Cuts(NamedTuple):
    """Sizes of what is left by CTAs that share sequences.

    A sequence is one request's, one head's of keys, one tile's of queries; query `t * group + g` of a tile is head `g`
    of the tile's token `t`.
    """

    ctas: int
    blocks: int
    """The most that a CTA leaves unmerged of a sequence that goes on in the next CTA."""
    batch: int
    sequences: int
    """Of a request."""
    tokens: int
    """Of a request, in `tiles` of `tile_tokens`."""
    tiles: int
    tile_tokens: int
    group: int
    value_width: int
    dtype: Any

    @property
    def rows(self) -> int:
        return self.tile_tokens * self.group

    @property
    def by_sequence(self) -> bool:
        """Whether there are fewer sequences than places to cut one: then each has a line of what is left, else each CTA
        has, for the sequence that it begins last."""
        return self.batch * self.sequences < self.ctas - 1

    @property
    def lines(self) -> int:
        return self.batch * self.sequences if self.by_sequence else self.ctas - 1

    def line(self, cta: Array, request: Array, sequence: Array) -> Array:
        return request * self.sequences + sequence if self.by_sequence else cta

    @property
    def columns(self) -> int:
        """Of a result, that one CTA merges."""
        fits = (
            columns
            for columns in (WARP, 2 * WARP, 4 * WARP)
            if self.lines * self.rows * -(-self.value_width // columns) <= _MOST_CTAS * device.multiprocessors()
        )
        return next(fits, 4 * WARP)

    @property
    def parts(self) -> int:
        """CTAs of a query."""
        return -(-self.value_width // self.columns)

    @property
    def width(self) -> int:
        """Columns of a result, as many in each part."""
        return self.parts * self.columns

    @property
    def stages(self) -> int:
        """Loads in flight: as many as fit where all CTAs run at the same time, most of which have nothing to do."""
        ctas = -(-self.lines * self.rows * self.parts // device.multiprocessors())
        return max(3, min(16, _RING // ctas // (_AT_ONCE * self.columns * 4)))

    @property
    def places(self) -> int:
        """Of unmerged blocks: those of the CTAs, what the last one may have more, and a load behind the last one."""
        return self.ctas * self.blocks + self.blocks + _THREADS

    @property
    def bytes(self) -> int:
        """Of results, about."""
        return self.places * self.rows * self.width * 4

    def first_place(self, cta: Array, each: Array) -> Array:
        """Where a CTA's unmerged blocks begin, most CTAs having `each`: those of one sequence are neighbours, in
        whichever CTAs they came to be. A sequence that is shorter than a piece is unmerged in one of them alone."""
        return cta * lax.min(each, jnp.int32(self.blocks))

    def out_types(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The fields of `Left`."""
        of_tile = self.tile_tokens, self.group, self.width
        return (
            jax.ShapeDtypeStruct((self.places, *of_tile), ACCUMULATOR),
            jax.ShapeDtypeStruct((self.rows, 2, self.places), ACCUMULATOR),
            jax.ShapeDtypeStruct((self.lines + 1, *of_tile), ACCUMULATOR),
            jax.ShapeDtypeStruct((self.lines + 1, self.rows, 2), ACCUMULATOR),
            jax.ShapeDtypeStruct((self.lines + 1, len(Cut._fields)), jnp.int32),
        )


class Left(NamedTuple):
    """What CTAs leave."""

    blocks: Any
    """Results of unmerged blocks, `[place, t, g, width]`."""
    statistics: Any
    """Their maxima and sums, `[query, 2, place]`."""
    prefixes: Any
    """Merged blocks of sequences that go on in other CTAs, `[line, t, g, width]`."""
    prefix_statistics: Any
    """Their maxima and sums, `[line, query, 2]`."""
    cuts: Any
    """A `Cut` for each line, `[line, 4]`."""


class Cut(NamedTuple):
    """What has to be known of a sequence, all int32."""

    request: Array
    sequence: Array
    """Of the request: heads of keys, of each its tiles."""
    left: Array
    """Blocks from the first cut through it on; 0 if there is none."""
    first_place: Array
    """Of these."""


def merge(cuts: Cuts, o: Array, left: Left) -> Array:
    """The output `[B, T, h, G, V]`, with the sequences in it that cuts go through."""
    columns, stages = cuts.columns, cuts.stages

    def spread(x: Array) -> Array:
        return plgpu.layout_cast(lax.broadcast_in_dim(x, (_THREADS,), ()), _LINE)

    def body(
        o_gmem: Any, *refs: Any, x_smem: Any, factors: Any, maxima: Any, warps: Any, changes: Any, loaded: Any
    ) -> None:
        gmem = Left(*refs)
        line, row, part = (lax.axis_index(name) for name in ("line", "row", "part"))
        cut = Cut(*(gmem.cuts[line, index] for index in range(len(Cut._fields))))
        kv_head, tile = lax.div(cut.sequence, jnp.int32(cuts.tiles)), lax.rem(cut.sequence, jnp.int32(cuts.tiles))
        in_tile, head = lax.div(row, jnp.int32(cuts.group)), lax.rem(row, jnp.int32(cuts.group))
        token = tile * cuts.tile_tokens + in_tile

        @pl.when((cut.left > 0) & (token < cuts.tokens))
        def _() -> None:
            loads = lax.div(cut.left + (_AT_ONCE - 1), jnp.int32(_AT_ONCE))
            own_columns = pl.ds(part * columns, columns)

            def load(index: Array) -> None:
                slot = lax.rem(index, jnp.int32(stages))
                source = gmem.blocks.at[pl.ds(cut.first_place + index * _AT_ONCE, _AT_ONCE), in_tile, head, own_columns]
                plgpu.copy_gmem_to_smem(source, x_smem.at[slot], loaded.at[slot])

            pl.loop(0, lax.min(loads, jnp.int32(stages)))(load)

            def statistics(first: Array) -> tuple[Array, Array]:
                """Maxima and sums of 128 blocks; of those behind the last one anything."""
                places = pl.ds(cut.first_place + first, _THREADS)
                m_b, total_b = (
                    plgpu.load(gmem.statistics.at[row, which, places], layout=_LINE, optimized=False)
                    for which in range(2)
                )
                return m_b, total_b

            def merge_blocks(
                slot: Array, first: Array, count: Array | int, carry: Any, *, is_steady: bool = False
            ) -> Any:
                """Some of a slot's blocks, the first one having its factors at `first`; its factor of what was merged
                before is that of all where the maximum `is_steady`."""
                steady = factors[_BEFORE, first]  # 1, which the compiler must not know: it would add products unrounded

                def before(index: Any) -> Array:
                    return steady if is_steady else factors[_BEFORE, first + index]

                def merge_result(index: Any, o: Array) -> Array:
                    x, b = load_line(x_smem.at[slot, index]), spread(factors[_OWN, first + index])
                    return fma(o, spread(before(index)), x * b, _LINE)

                def merge_sum(index: Any, total: Array) -> Array:
                    # The sum of a block has its factor already.
                    return fma(total, before(index), factors[_SUM, first + index], _NUMBER)

                def all_of(step: Callable[[Any, Array], Array], x: Array) -> Array:
                    if isinstance(count, int):
                        return functools.reduce(lambda x, index: step(index, x), range(count), x)
                    return lax.fori_loop(0, count, step, x)

                o, total = carry
                # What is broadcast from shared memory takes as long as what is not: one warp looks at the sums, and
                # those that have no columns at nothing.
                warps = columns // WARP
                total = is_warp_in(3, 4, functools.partial(all_of, merge_sum), total)
                return is_warp_in(0, warps, functools.partial(all_of, merge_result), o), total

            def merge_load(index: Array, carry: Any) -> Any:
                slot, first = lax.rem(index, jnp.int32(stages)), index * _AT_ONCE
                plgpu.barrier_wait(loaded.at[slot])
                in_factors, left = lax.rem(first, jnp.int32(_THREADS)), cut.left - first
                # What is loaded for all threads limits the speed, and a maximum seldom grows.
                is_steady = changes[lax.div(in_factors, jnp.int32(WARP))] == 0
                kind = jnp.where(left < _AT_ONCE, 0, jnp.where(is_steady, 2, 1))
                kinds = [
                    functools.partial(merge_blocks, slot, in_factors, left),
                    functools.partial(merge_blocks, slot, in_factors, _AT_ONCE),
                    functools.partial(merge_blocks, slot, in_factors, _AT_ONCE, is_steady=True),
                ]
                carry = lax.switch(kind, kinds, carry)

                @pl.when(index + stages < loads)
                def _() -> None:
                    meet()  # all have read the slot
                    load(index + stages)

                return carry

            def merge_128(index: Array, carry: Any) -> Any:
                x, total, before, m_b, total_b = carry
                first = index * _THREADS
                before, after = running_maxima(m_b, before, warps)
                b = jnp.exp2(m_b - after)
                for which, factor in ((_BEFORE, jnp.exp2(before - after)), (_OWN, b), (_SUM, total_b * b)):
                    factors.at[which][...] = factor
                maxima[...] = after
                leave_changes(before, after, changes)
                meet()
                # The next ones are on their way while these are merged.
                following = statistics(lax.min(first + _THREADS, cut.left))
                per_line = _THREADS // _AT_ONCE
                end = lax.min((index + 1) * per_line, loads)
                x, total = lax.fori_loop(index * per_line, end, merge_load, (x, total))
                return x, total, maxima[_THREADS - 1], *following

            before = gmem.prefix_statistics.at[line]
            prefix = load_line(gmem.prefixes.at[line, in_tile, head, own_columns])
            lines = lax.div(cut.left + (_THREADS - 1), jnp.int32(_THREADS))
            start = prefix, before[row, 1], before[row, 0], *statistics(jnp.int32(0))
            x, total, *_ = lax.fori_loop(0, lines, merge_128, start)
            maxima[...] = plgpu.layout_cast(jnp.full((_THREADS,), total), _LINE)
            meet()
            y = finished(x, spread(maxima[_THREADS - 1]), cuts.dtype, spread=lambda x, _: x)
            store_line(y, o_gmem.at[cut.request, token, kv_head, head], part * columns, columns)

    kernel = plgpu.kernel(
        body,
        out_type=(),
        grid=(cuts.lines, cuts.rows, cuts.parts),
        grid_names=("line", "row", "part"),
        scratch_types={
            "x_smem": plgpu.SMEM((stages, _AT_ONCE, columns), ACCUMULATOR),
            "factors": plgpu.SMEM((3, _THREADS), ACCUMULATOR),
            "maxima": plgpu.SMEM((_THREADS,), ACCUMULATOR),
            "warps": plgpu.SMEM((4,), ACCUMULATOR),
            "changes": plgpu.SMEM((_THREADS // WARP,), jnp.int32),
            "loaded": plgpu.Barrier(num_barriers=stages),
        },
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        kernel_name="attention_merge",
    )
    result = jax.new_ref(o)
    kernel(result, *left)
    return jax.freeze(result)


def meet() -> None:
    """All threads of the warpgroup wait for one another. Unlike `commit_smem` this waits for no load."""

    def barrier(_: Any) -> None:
        mgpu.warpgroup_barrier()

    inlined: Any = plgpu.inline_mgpu()(barrier)
    inlined()


def running_maxima(x: Array, start: Array, warps: Any) -> tuple[Array, Array]:
    """The largest of `start` and of `x [128]` before each element, and up to it.

    Args:
        warps: shared memory `[4]`, by which the warps exchange theirs; all threads meet.
    """

    def scanned(_: Any, x: Any, start: Any, warps: Any) -> Any:
        thread = mgpu.thread_idx()
        i32 = thread.type
        own_warp = arith.remui(arith.divui(thread, mgpu.c(32, i32)), mgpu.c(4, i32))
        lane = arith.remui(thread, mgpu.c(32, i32))

        value = element(x.registers.item())
        for distance in (1, 2, 4, 8, 16):
            value = arith.maximumf(value, from_lanes_below(value, distance))
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.eq, lane, mgpu.c(31, i32))):
            memref.store(value, warps, [index_of(own_warp)])
        mgpu.warpgroup_barrier()
        prior = start.registers.item()
        for other in range(3):
            largest = arith.maximumf(prior, memref.load(warps, [mgpu.c(other, ir.IndexType.get())]))
            prior = arith.select(arith.cmpi(arith.CmpIPredicate.sgt, own_warp, mgpu.c(other, i32)), largest, prior)
        after = arith.maximumf(value, prior)
        is_first = arith.cmpi(arith.CmpIPredicate.eq, lane, mgpu.c(0, i32))
        before = arith.select(is_first, prior, from_lanes_below(after, 1))

        return _line_of(before), _line_of(after)

    result = plgpu.ShapeDtypeStruct(x.shape, ACCUMULATOR, layout=_LINE)
    arg_types = _LINE, plgpu.Layout.WG_SPLAT, plgpu.RefType()
    inlined: Any = plgpu.inline_mgpu(arg_types=arg_types, return_type=(result, result))(scanned)
    return inlined(x, start, warps)


def leave_changes(before: Array, after: Array, changes: Any) -> None:
    """Stores in shared memory `[4]`, for each 32 elements of `[128]`, whether two arrays differ in one of them."""

    def store(_: Any, before: Any, after: Any, changes: Any) -> None:
        thread = mgpu.thread_idx()
        i32 = thread.type
        differs = arith.cmpf(arith.CmpFPredicate.UNE, element(before.registers.item()), element(after.registers.item()))
        differs = mgpu.redux(arith.extui(i32, differs), mgpu.c(0xFFFFFFFF, i32), mgpu.ReductionKind.OR)
        own_warp = arith.remui(arith.divui(thread, mgpu.c(WARP, i32)), mgpu.c(_THREADS // WARP, i32))
        lane = arith.remui(thread, mgpu.c(WARP, i32))
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.eq, lane, mgpu.c(0, i32))):
            memref.store(differs, changes, [index_of(own_warp)])

    inlined: Any = plgpu.inline_mgpu(arg_types=(_LINE, _LINE, plgpu.RefType()))(store)
    inlined(before, after, changes)


def is_warp_in(first: int, end: int, step: Callable[[Array], Array], x: Array) -> Array:
    """`step(x)` in some of the warpgroup's warps, `x` in the others."""
    if end - first == _THREADS // WARP:
        return step(x)
    own = warp()
    return lax.cond((own >= first) & (own < end), step, lambda x: x, x)


def load_line(source: Any) -> Array:
    """Numbers of memory `[n]` for 128 threads: the first n have one each, the others those again."""
    (count,) = source.shape

    def load(_: Any, source: Any) -> Any:
        thread = mgpu.thread_idx()
        return _line_of(memref.load(source, [index_of(arith.remui(thread, mgpu.c(count, thread.type)))]))

    result = plgpu.ShapeDtypeStruct((_THREADS,), ACCUMULATOR, layout=_LINE)
    inlined: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)(load)
    return inlined(source)


def store_line(x: Array, target: Any, first: Array, count: int) -> None:
    """Stores the first `count` of 128 threads' numbers from element `first` of memory `[n]` on, as far as that goes."""
    (size,) = target.shape

    def store(_: Any, x: Any, target: Any, first: Any) -> None:
        thread = mgpu.thread_idx()
        thread = arith.remui(thread, mgpu.c(_THREADS, thread.type))
        at = arith.addi(first.registers.item(), thread)
        is_own = arith.cmpi(arith.CmpIPredicate.ult, thread, mgpu.c(count, thread.type))
        is_there = arith.cmpi(arith.CmpIPredicate.ult, at, mgpu.c(size, thread.type))
        with mgpu.when(arith.andi(is_own, is_there)):
            memref.store(element(x.registers.item()), target, [index_of(at)])

    inlined: Any = plgpu.inline_mgpu(arg_types=(_LINE, plgpu.RefType(), plgpu.Layout.WG_SPLAT))(store)
    inlined(x, target, first)


def _line_of(value: Any) -> Any:
    """An array of 128 elements from each thread's own, in the compiler's terms."""
    registers = np.empty(_LINE.to_mgpu().registers_shape((_THREADS,)), dtype=object)
    registers[...] = vector.from_elements(ir.VectorType.get((1,), value.type), [value])
    return FragmentedArray(_registers=registers, _layout=_LINE.to_mgpu(), _is_signed=None)
