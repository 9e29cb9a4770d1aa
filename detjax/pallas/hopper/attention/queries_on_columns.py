"""A tile of attention with keys on its rows and queries on its columns, for calls with few queries (Pallas Mosaic GPU).

The matrix unit has 64 rows and as few as 8 columns: a decode of 4 heads that share keys wastes 4 columns rather than 60
rows of exponentials, and a thread holds 8 scores of a block rather than 64. What is computed, and in which order, is
what `attention_tile_hopper` says of the other orientation.
"""

import functools
from collections.abc import Iterator
from typing import Any, Final

import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
from jax import Array, lax
from jax.experimental.mosaic.gpu import utils as mgpu
from jax.experimental.mosaic.gpu.fragmented_array import FragmentedArray
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector

from detjax.contract import ACCUMULATOR, KEY_GROUPS, KEY_LANES, KV_BLOCK
from detjax.pallas.hopper.attention.queries_on_rows import (
    MATRIX,
    added,
    address_behind,
    element,
    first_row_and_lane,
    index_of,
    line,
    swizzled,
)

COLUMN: Final = plgpu.Layout.WGMMA.reduce(0)
"""One number for each column of a tile, held by the threads that hold part of the column."""
UNIT: Final = 8
"""The least columns that the matrix unit has, and of which their number is a multiple."""
_WARPS: Final = 4


def along_columns(x: Array, shape: tuple[int, ...]) -> Array:
    """A number per column at every row."""
    return lax.broadcast_in_dim(x, shape, [1])


def columns_of_tile(columns: int) -> Array:
    """Column indices of a tile, int32 `[columns]`."""
    return plgpu.broadcasted_iota("int32", (columns,), 0, layout=COLUMN)


def exchanges(columns: int) -> dict[str, Any]:
    """Shared memory by which the warps of a tile exchange maxima and sums."""
    return {
        "maxima": plgpu.SMEM((_WARPS, columns), ACCUMULATOR),
        "sums": plgpu.SMEM((_WARPS, columns // UNIT, KEY_LANES, UNIT), ACCUMULATOR),
    }


def column_maxima(s: Array, exchange: Any) -> Array:
    """Maxima of the columns of `[KV_BLOCK, n]`, by way of shared memory `[4, n]`; all threads meet in it."""

    def reduced(_: Any, s: Any, exchange: Any) -> Any:
        row, lane = first_row_and_lane()
        warp, is_first = _warp_and_is_first(row)
        parts = _parts(s)
        found = []
        for group in range(parts.shape[1]):
            x = _largest(list(parts[:, group].flatten()))
            for distance in (4, 8, 16):
                x = arith.maximumf(x, mgpu.shfl_bfly(x, distance))
            found.append(x)
        with mgpu.when(is_first):
            for group, x in enumerate(found):
                vector.store(x, exchange, [warp, _column(lane, group)])
        mgpu.warpgroup_barrier()
        registers = np.empty(COLUMN.to_mgpu().registers_shape((s.shape[1],)), dtype=object)
        for group, place in enumerate(np.ndindex(registers.shape)):
            of_warps = [
                vector.load(found[group].type, exchange, [_constant(other), _column(lane, group)])
                for other in range(_WARPS)
            ]
            registers[place] = _largest(of_warps)
        return FragmentedArray(_registers=registers, _layout=COLUMN.to_mgpu(), _is_signed=None)

    result = plgpu.ShapeDtypeStruct(s.shape[1:], ACCUMULATOR, layout=COLUMN)
    inlined: Any = plgpu.inline_mgpu(arg_types=(MATRIX, plgpu.RefType()), return_type=result)(reduced)
    return inlined(s, exchange)


def leave_sums(p: Array, exchange: Any) -> None:
    """Leaves in shared memory what `column_sums` adds, once all threads have met: a warp has a group of the contract's
    keys, a thread two of its lanes' keys."""

    def left(_: Any, p: Any, exchange: Any) -> None:
        row, lane = first_row_and_lane()
        warp, _ = _warp_and_is_first(row)
        key_lane = index_of(arith.remui(row, mgpu.c(KEY_LANES, row.type)))
        parts = _parts(p)
        for group in range(parts.shape[1]):
            # Both halves of the block, of each the thread's row and the one 8 below.
            x = added(list(parts[:, group].flatten()))
            vector.store(x, exchange, [warp, _constant(group), key_lane, _column(lane, 0)])

    inlined: Any = plgpu.inline_mgpu(arg_types=(MATRIX, plgpu.RefType()))(left)
    inlined(p, exchange)


def column_sums(exchange: Any) -> Array:
    """Sums of the columns that `leave_sums` was given, in the contract's order."""
    columns = exchange.shape[1] * UNIT

    def reduced(_: Any, exchange: Any) -> Any:
        row, lane = first_row_and_lane()
        key_lane = index_of(arith.remui(row, mgpu.c(KEY_LANES, row.type)))
        pair = ir.VectorType.get((2,), ir.F32Type.get())
        registers = np.empty(COLUMN.to_mgpu().registers_shape((columns,)), dtype=object)
        for group, place in enumerate(np.ndindex(registers.shape)):
            own = [_constant(group), key_lane, _column(lane, 0)]
            x = added([vector.load(pair, exchange, [_constant(warp), *own]) for warp in range(KEY_GROUPS)])
            for distance in (4, 8, 16):
                x = arith.addf(x, mgpu.shfl_bfly(x, distance))
            registers[place] = x
        return FragmentedArray(_registers=registers, _layout=COLUMN.to_mgpu(), _is_signed=None)

    result = plgpu.ShapeDtypeStruct((columns,), ACCUMULATOR, layout=COLUMN)
    inlined: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)(reduced)
    return inlined(exchange)


def rows_kept(s: Array, end: Array, first: Array | None = None) -> Array:
    """A tile with -inf in the rows from each column's `end` on and, if given, below its `first`; int32 `[n]`."""
    bounds = (end,) if first is None else (end, first)

    def kept(_: Any, s: Any, *bounds: Any) -> Any:
        own, _ = first_row_and_lane()
        limits = [
            [[arith.subi(element(bound, i), own) for i in range(2)] for bound in array.registers.flatten()]
            for array in bounds
        ]
        lowest = arith.constant(ir.F32Type.get(), ir.FloatAttr.get(ir.F32Type.get(), -np.inf))
        registers = np.empty_like(s.registers)
        for place, group, row in _places(registers, s.shape):
            scores = []
            for i in range(2):
                constant = mgpu.c(row, own.type)
                seen = arith.cmpi(arith.CmpIPredicate.slt, constant, limits[0][group][i])
                if len(limits) > 1:
                    behind = arith.cmpi(arith.CmpIPredicate.sge, constant, limits[1][group][i])
                    seen = arith.andi(seen, behind)
                scores.append(arith.select(seen, element(s.registers[place], i), lowest))
            registers[place] = vector.from_elements(s.registers[place].type, scores)
        return FragmentedArray(_registers=registers, _layout=s.layout, _is_signed=s.is_signed)

    result = plgpu.ShapeDtypeStruct(s.shape, ACCUMULATOR, layout=MATRIX)
    inlined: Any = plgpu.inline_mgpu(arg_types=(MATRIX, *(COLUMN,) * len(bounds)), return_type=result)(kept)
    return inlined(s, *bounds)


def row_distances(first: Array) -> Array:
    """`first + row` as float32 `[KV_BLOCK, n]`, of int32 `[n]`."""
    shape = KV_BLOCK, *first.shape

    def distances(_: Any, first: Any) -> Any:
        own, _ = first_row_and_lane()
        float32 = ir.F32Type.get()
        bases = [
            [arith.sitofp(float32, arith.addi(element(x, i), own)) for i in range(2)] for x in first.registers.flatten()
        ]
        registers = np.empty(MATRIX.to_mgpu().registers_shape(shape), dtype=object)
        for place, group, row in _places(registers, shape):
            constant = arith.constant(float32, ir.FloatAttr.get(float32, float(row)))
            elements = [arith.addf(base, constant) for base in bases[group]]
            registers[place] = vector.from_elements(ir.VectorType.get((2,), float32), elements)
        return FragmentedArray(_registers=registers, _layout=MATRIX.to_mgpu(), _is_signed=None)

    result = plgpu.ShapeDtypeStruct(shape, ACCUMULATOR, layout=MATRIX)
    inlined: Any = plgpu.inline_mgpu(arg_types=(COLUMN,), return_type=result)(distances)
    return inlined(first)


def load_queries(source: Any, target: Any, first: Array, count: Array) -> None:
    """Brings queries to where the matrix unit reads them; zeros behind the first `count`.

    Args:
        source: memory `[T, G, K]`; the query at `[first + t, g]` becomes row `t * G + g`.
        target: shared memory `[n, K]`, `swizzled(K)`.
    """
    _, heads, width = source.shape
    rows, tile_line = target.shape[0], line(width)

    def load(_: Any, source: Any, target: Any, first_token: Any, count: Any) -> None:
        dtype = ir.MemRefType(source.type).element_type
        chunk_type = ir.VectorType.get((8,), dtype)  # 16 bytes
        thread = arith.remui(mgpu.thread_idx(), mgpu.c(128, mgpu.thread_idx().type))
        limit = count.registers.item()

        def constant(value: int) -> Any:
            return mgpu.c(value, thread.type)

        chunks = width // 8
        zeros = arith.constant(chunk_type, ir.DenseElementsAttr.get_splat(chunk_type, ir.FloatAttr.get(dtype, 0.0)))
        for first in range(0, rows * chunks, 128):
            index = arith.addi(thread, constant(first))
            row, chunk = arith.divui(index, constant(chunks)), arith.remui(index, constant(chunks))
            # The hardware's swizzle: of an address in lines of 128 bytes, the line's number moves 16-byte chunks.
            column = arith.remui(chunk, constant(tile_line // 8))
            lines = arith.divui(arith.remui(row, constant(8)), constant(64 // tile_line))
            column = arith.xori(column, lines)
            place = [
                arith.divui(row, constant(8)),
                arith.divui(chunk, constant(tile_line // 8)),
                arith.remui(row, constant(8)),
                arith.muli(column, constant(8)),
            ]
            place = [index_of(x) for x in place]
            is_own = arith.cmpi(arith.CmpIPredicate.slt, row, limit)
            is_there = None if rows * chunks - first >= 128 else index
            if is_there is not None:
                is_there = arith.cmpi(arith.CmpIPredicate.ult, index, constant(rows * chunks))

            def move(row: Any = row, chunk: Any = chunk, place: Any = place, is_own: Any = is_own) -> None:
                at = [
                    arith.addi(arith.divui(row, constant(heads)), first_token.registers.item()),
                    arith.remui(row, constant(heads)),
                    arith.muli(chunk, constant(8)),
                ]
                with mgpu.when(is_own):
                    vector.store(vector.load(chunk_type, source, [index_of(x) for x in at]), target, place)
                with mgpu.when(arith.cmpi(arith.CmpIPredicate.sge, row, limit)):
                    vector.store(zeros, target, place)

            if is_there is None:
                move()
            else:
                with mgpu.when(is_there):
                    move()

    arg_types = plgpu.RefType(), plgpu.RefType(swizzled(width)), *(plgpu.Layout.WG_SPLAT,) * 2
    inlined: Any = plgpu.inline_mgpu(arg_types=arg_types)(load)
    inlined(source, target, first, count)


def store_columns(
    x: Array, target: Any, first: Array | int, count: Array | int, *, keep_in_cache: bool = False
) -> None:
    """Stores the first `count` columns of `[64, n]` as rows of memory `[T, G, 64]`: `t * G + g` to `[first + t, g]`.

    A tile of decode has few columns that mean anything, and the threads that have them store them.

    Args:
        keep_in_cache: of all that is in the L2 cache this is to be written to memory last; for float32.
    """
    _, heads, _ = target.shape

    def store(_: Any, x: Any, target: Any, first: Any, count: Any) -> None:
        own, lane = first_row_and_lane()
        limit = count.registers.item()
        parts = _parts(x)[0]
        for group in range(parts.shape[0]):
            for i in range(2):
                column = arith.addi(arith.muli(lane, mgpu.c(2, lane.type)), mgpu.c(UNIT * group + i, lane.type))
                token = arith.addi(arith.divui(column, mgpu.c(heads, lane.type)), first.registers.item())
                head = arith.remui(column, mgpu.c(heads, lane.type))
                with mgpu.when(arith.cmpi(arith.CmpIPredicate.slt, column, limit)):
                    for half in range(2):
                        row = arith.addi(own, mgpu.c(8 * half, own.type))
                        at = [index_of(index) for index in (token, head, row)]
                        (_store_kept if keep_in_cache else memref.store)(element(parts[group, half], i), target, at)

    inlined: Any = plgpu.inline_mgpu(arg_types=(MATRIX, plgpu.RefType(), *(plgpu.Layout.WG_SPLAT,) * 2))(store)
    inlined(x, target, *(np.int32(number) if isinstance(number, int) else number for number in (first, count)))


def _store_kept(value: Any, target: Any, at: list[Any]) -> None:
    strides, _ = ir.MemRefType(target.type).get_strides_and_offset()
    offset = functools.reduce(
        arith.addi, [arith.muli(index, _constant(stride)) for index, stride in zip(at, strides, strict=True)]
    )
    offset = arith.index_cast(ir.IntegerType.get_signless(64), offset)
    place = address_behind(mgpu.memref_ptr(target), offset, value.type)
    text = """{ .reg .b64 policy;
createpolicy.fractional.L2::evict_last.b64 policy, 1.0;
st.global.L2::cache_hint.f32 [$0], $1, policy; }"""
    mgpu.inline_ptx(text, place, value, has_side_effects=True)


def store_column_numbers(x: Array, target: Any) -> None:
    """Stores the first numbers of `[n]`, as many as memory `[count]` takes."""
    (count,) = target.shape

    def store(_: Any, x: Any, target: Any) -> None:
        row, lane = first_row_and_lane()
        warp, is_first = _warp_and_is_first(row)
        is_first = arith.andi(is_first, arith.cmpi(arith.CmpIPredicate.eq, warp, _constant(0)))
        for group, register in enumerate(x.registers.flatten()):
            for i in range(2):
                column = arith.addi(_column(lane, group), _constant(i))
                is_there = arith.cmpi(arith.CmpIPredicate.slt, column, _constant(count))
                with mgpu.when(arith.andi(is_first, is_there)):
                    memref.store(element(register, i), target, [column])

    inlined: Any = plgpu.inline_mgpu(arg_types=(COLUMN, plgpu.RefType()))(store)
    inlined(x, target)


# --- registers and threads --------------------------------------------------------------------------------------------


def _parts(x: Any) -> Any:
    """Registers `[rows // 64, columns // 8, 2]` of a tile: two columns of the thread's row, and of the one 8 below."""
    rows, columns = x.shape
    return x.registers.reshape(rows // 64, columns // UNIT, 2)


def _places(registers: Any, shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """Of each register of a tile: where it is, its group of columns, and its row from the thread's first one."""
    groups = shape[1] // UNIT
    for index, place in enumerate(np.ndindex(registers.shape)):
        part, half = divmod(index, 2)
        yield place, part % groups, 64 * (part // groups) + 8 * half


def _largest(values: list[Any]) -> Any:
    result, *others = values
    for value in others:
        result = arith.maximumf(result, value)
    return result


def _warp_and_is_first(row: Any) -> tuple[Any, Any]:
    """The thread's warp, and whether its rows are the warp's first."""
    warp = index_of(arith.divui(row, mgpu.c(16, row.type)))
    in_warp = arith.remui(row, mgpu.c(16, row.type))
    return warp, arith.cmpi(arith.CmpIPredicate.eq, in_warp, mgpu.c(0, row.type))


def _column(lane: Any, group: int) -> Any:
    """The first of the thread's two columns in a group of 8."""
    return index_of(arith.addi(arith.muli(lane, mgpu.c(2, lane.type)), mgpu.c(UNIT * group, lane.type)))


def _constant(value: int) -> Any:
    return mgpu.c(value, ir.IndexType.get())
