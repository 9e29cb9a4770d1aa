"""Primitives on tiles with keys on the rows and queries on the columns, for calls with few queries."""

import functools
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.mosaic.gpu import utils as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector

from detjax.contract import ACCUMULATOR, KEY_GROUPS, KEY_LANES, KV_BLOCK
from detjax.pallas.hopper.device import WARP, WARPGROUP
from detjax.pallas.hopper.mosaic import like, primitive
from detjax.pallas.hopper.mosaic.layouts import MATRIX, NUMBER, PER_COLUMN, UNIT, line, swizzled
from detjax.pallas.hopper.mosaic.registers import (
    array,
    as_index,
    element,
    empty_registers,
    first_row_and_lane,
    index,
    int32,
    offset_address,
    packed,
    thread_of_warpgroup,
)
from detjax.pallas.hopper.mosaic.tiles import block_sums, masked_scores, sum_in_order

_WARPS = WARPGROUP // WARP
_LANE_DISTANCES = 4, 8, 16
"""Distances between the lanes of a warp that hold parts of the same column."""

# --- maxima and sums --------------------------------------------------------------------------------------------------


def exchanges(columns: int) -> dict[str, Any]:
    """Returns the shared memory by which the warps of a tile exchange maxima and sums."""
    # A warp stores 256 consecutive bytes of sums at a time, which is free of bank conflicts.
    return {
        "maxima": plgpu.SMEM((_WARPS, columns), ACCUMULATOR),
        "sums": plgpu.SMEM((_WARPS, columns // UNIT, KEY_LANES, UNIT), ACCUMULATOR),
    }


def _plain_column_maxima(s: Array, exchange: Any) -> Array:
    return s.max(axis=0)


@primitive(
    twin=_plain_column_maxima,
    args=(MATRIX, plgpu.RefType()),
    out=lambda s, _: plgpu.ShapeDtypeStruct(s.shape[1:], ACCUMULATOR, layout=PER_COLUMN),
)
def column_maxima(s: Any, exchange: Any) -> Any:
    """Returns the maxima of the columns of `[KV_BLOCK, n]`, through shared memory `[4, n]`; all threads meet in it."""
    row, lane = first_row_and_lane()
    warp, is_first = _warp_and_is_first(row)
    parts = _parts(s)
    maxima = []
    for group in range(parts.shape[1]):
        x = _largest(list(parts[:, group].flatten()))
        for distance in _LANE_DISTANCES:
            x = arith.maximumf(x, mgpu.shfl_bfly(x, distance))
        maxima.append(x)
    with mgpu.when(is_first):
        for group, x in enumerate(maxima):
            vector.store(x, exchange, [warp, _column(lane, group)])
    mgpu.warpgroup_barrier()
    registers = empty_registers(PER_COLUMN, (s.shape[1],))
    for group, place in enumerate(np.ndindex(registers.shape)):
        warp_maxima = [
            vector.load(maxima[group].type, exchange, [index(other), _column(lane, group)]) for other in range(_WARPS)
        ]
        registers[place] = _largest(warp_maxima)
    return array(registers, PER_COLUMN)


def _plain_store_partial_sums(p: Array, exchange: Any) -> None:
    exchange[0, :, 0, :] = block_sums(p.T).reshape(exchange.shape[1], exchange.shape[3])


@primitive(twin=_plain_store_partial_sums, args=(MATRIX, plgpu.RefType()))
def store_partial_sums(p: Any, exchange: Any) -> None:
    """Stores to shared memory the sums that `column_sums` adds once all threads have met.

    A warp has the keys of one of the contract's groups; a thread has the keys of one lane, for two of 8 columns.
    """
    row, lane = first_row_and_lane()
    warp, _ = _warp_and_is_first(row)
    key_lane = as_index(arith.remui(row, int32(KEY_LANES)))
    parts = _parts(p)
    for group in range(parts.shape[1]):
        # Both halves of the block; in each the thread's first row and the one 8 below.
        x = sum_in_order(list(parts[:, group].flatten()))
        vector.store(x, exchange, [warp, index(group), key_lane, _column(lane, 0)])


def _plain_column_sums(exchange: Any) -> Array:
    return exchange[0, :, 0, :].reshape(-1)


@primitive(
    twin=_plain_column_sums,
    args=(plgpu.RefType(),),
    out=lambda exchange: plgpu.ShapeDtypeStruct((exchange.shape[1] * UNIT,), ACCUMULATOR, layout=PER_COLUMN),
)
def column_sums(exchange: Any) -> Any:
    """Returns the sums of the columns that `store_partial_sums` was given, in the contract's order."""
    columns = exchange.type.shape[1] * UNIT
    row, lane = first_row_and_lane()
    key_lane = as_index(arith.remui(row, int32(KEY_LANES)))
    pair = ir.VectorType.get((2,), ir.F32Type.get())
    # Every warp adds all groups by itself, since sharing the work would take another meeting.
    registers = empty_registers(PER_COLUMN, (columns,))
    for group, place in enumerate(np.ndindex(registers.shape)):
        indices = [index(group), key_lane, _column(lane, 0)]
        x = sum_in_order([vector.load(pair, exchange, [index(warp), *indices]) for warp in range(KEY_GROUPS)])
        for distance in _LANE_DISTANCES:
            x = arith.addf(x, mgpu.shfl_bfly(x, distance))
        registers[place] = x
    return array(registers, PER_COLUMN)


# --- masks and distances ----------------------------------------------------------------------------------------------


def _plain_mask_rows(s: Array, end: Array, first: Array | None = None) -> Array:
    rows = jnp.arange(s.shape[0])[:, None]
    is_visible = rows < end[None]
    if first is not None:
        is_visible = is_visible & (rows >= first[None])
    return jnp.where(is_visible, s, -jnp.inf)


@primitive(twin=_plain_mask_rows, args=lambda s, *bounds: (MATRIX, *(PER_COLUMN,) * len(bounds)), out=like(MATRIX))
def mask_rows(s: Any, *bounds: Any) -> Any:
    """Returns a tile with -inf from each column's `end` on and, if given, before its `first`; int32 `[n]`."""
    # A thread's rows are constants plus its first row, which is subtracted from the bounds; see `tiles.mask_columns`.
    first_row, _ = first_row_and_lane()
    limits = [
        [[arith.subi(element(bound, i), first_row) for i in range(2)] for bound in bound_of_columns.registers.flatten()]
        for bound_of_columns in bounds
    ]

    def is_visible(group: int, half: int, offset: int) -> Any:
        part, group = divmod(group, s.shape[1] // UNIT)
        row = int32(64 * part + 8 * half)
        visible = arith.cmpi(arith.CmpIPredicate.slt, row, limits[0][group][offset])
        if len(limits) > 1:
            visible = arith.andi(visible, arith.cmpi(arith.CmpIPredicate.sge, row, limits[1][group][offset]))
        return visible

    return masked_scores(s, is_visible)


def _plain_row_distances(first: Array) -> Array:
    return (first[None] + jnp.arange(KV_BLOCK)[:, None]).astype(ACCUMULATOR)


@primitive(
    twin=_plain_row_distances,
    args=(PER_COLUMN,),
    out=lambda first: plgpu.ShapeDtypeStruct((KV_BLOCK, *first.shape), ACCUMULATOR, layout=MATRIX),
)
def row_distances(first: Any) -> Any:
    """Returns `first + row` as float32 `[KV_BLOCK, n]`, from int32 `[n]`."""
    shape = KV_BLOCK, *first.shape
    first_row, _ = first_row_and_lane()
    float32 = ir.F32Type.get()
    bases = [
        [arith.sitofp(float32, arith.addi(element(x, i), first_row)) for i in range(2)]
        for x in first.registers.flatten()
    ]
    registers = empty_registers(MATRIX, shape)
    for number, place in enumerate(np.ndindex(registers.shape)):
        group, half = divmod(number, 2)
        part, group = divmod(group, shape[1] // UNIT)
        row = arith.constant(float32, ir.FloatAttr.get(float32, 64.0 * part + 8.0 * half))
        registers[place] = packed([arith.addf(base, row) for base in bases[group]])
    return array(registers, MATRIX)


# --- loads and stores -------------------------------------------------------------------------------------------------


def _copy(x: Any, target: Any) -> None:
    target[...] = x[...]


def _plain_load_queries(source: Any, target: Any, first: Array, count: Array) -> None:
    target[...] = jnp.zeros(target.shape, target.dtype)
    heads = source.shape[1]
    for row in range(target.shape[0]):
        query = source.at[first + row // heads, row % heads]
        pl.when(row < count)(functools.partial(_copy, query, target.at[row]))


@primitive(
    twin=_plain_load_queries,
    args=lambda source, target, *_: (plgpu.RefType(), plgpu.RefType(swizzled(target.shape[1])), NUMBER, NUMBER),
)
def load_queries(source: Any, target: Any, first: Any, count: Any) -> None:
    """Copies queries to shared memory for the matrix unit, with zeros after the first `count`.

    Args:
        source: memory `[T, G, K]`; the query at `[first + t, g]` becomes row `t * G + g`.
        target: shared memory `[n, K]`, `swizzled(K)`.
    """
    # Threads copy: the copy engine takes rows in groups of 8, and a token may have fewer heads.
    _, heads, width = source.type.shape
    rows, tile_line = target.type.shape[0] * target.type.shape[2], line(width)
    dtype = ir.MemRefType(source.type).element_type
    chunk_type = ir.VectorType.get((8,), dtype)  # 16 bytes
    thread, limit = thread_of_warpgroup(), count.registers.item()

    def move(row: Any, chunk: Any, place: Any, is_query: Any) -> None:
        indices = [
            arith.addi(arith.divui(row, int32(heads)), first.registers.item()),
            arith.remui(row, int32(heads)),
            arith.muli(chunk, int32(8)),
        ]
        with mgpu.when(is_query):
            vector.store(vector.load(chunk_type, source, [as_index(x) for x in indices]), target, place)
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.sge, row, limit)):
            vector.store(zeros, target, place)

    chunks = width // 8
    zeros = arith.constant(chunk_type, ir.DenseElementsAttr.get_splat(chunk_type, ir.FloatAttr.get(dtype, 0.0)))
    for first_chunk in range(0, rows * chunks, WARPGROUP):
        number = arith.addi(thread, int32(first_chunk))
        row, chunk = arith.divui(number, int32(chunks)), arith.remui(number, int32(chunks))
        # The hardware's swizzle: the number of a line of 128 bytes is XORed into the number of the 16-byte chunk.
        column = arith.remui(chunk, int32(tile_line // 8))
        lines = arith.divui(arith.remui(row, int32(8)), int32(64 // tile_line))
        column = arith.xori(column, lines)
        place = [
            arith.divui(row, int32(8)),
            arith.divui(chunk, int32(tile_line // 8)),
            arith.remui(row, int32(8)),
            arith.muli(column, int32(8)),
        ]
        place = [as_index(x) for x in place]
        is_query = arith.cmpi(arith.CmpIPredicate.slt, row, limit)
        if rows * chunks - first_chunk >= WARPGROUP:
            move(row, chunk, place, is_query)
        else:
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, number, int32(rows * chunks))):
                move(row, chunk, place, is_query)


def _plain_store_columns(
    x: Array, target: Any, first: Array | int, count: Array | int, *, keep_in_cache: bool = False
) -> None:
    heads = target.shape[1]
    for column in range(x.shape[1]):
        row = target.at[first + column // heads, column % heads]
        pl.when(column < count)(functools.partial(_copy, x[:, column], row))


@primitive(twin=_plain_store_columns, args=(MATRIX, plgpu.RefType(), NUMBER, NUMBER))
def store_columns(x: Any, target: Any, first: Any, count: Any, *, keep_in_cache: bool = False) -> None:
    """Stores the first `count` columns of `[64, n]` as rows of memory `[T, G, 64]`: `t * G + g` to `[first + t, g]`.

    Args:
        keep_in_cache: whether to ask the L2 cache to evict the data last; for float32.
    """
    _, heads, _ = target.type.shape
    first_row, lane = first_row_and_lane()
    limit = count.registers.item()
    parts = _parts(x)[0]
    store = _store_evicted_last if keep_in_cache else memref.store
    for group in range(parts.shape[0]):
        for i in range(2):
            column = arith.addi(arith.muli(lane, int32(2)), int32(UNIT * group + i))
            token = arith.addi(arith.divui(column, int32(heads)), first.registers.item())
            head = arith.remui(column, int32(heads))
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.slt, column, limit)):
                for half in range(2):
                    row = arith.addi(first_row, int32(8 * half))
                    indices = [as_index(x) for x in (token, head, row)]
                    store(element(parts[group, half], i), target, indices)


def _store_evicted_last(value: Any, target: Any, indices: list[Any]) -> None:
    strides, _ = ir.MemRefType(target.type).get_strides_and_offset()
    offset = functools.reduce(
        arith.addi, [arith.muli(position, index(stride)) for position, stride in zip(indices, strides, strict=True)]
    )
    offset = arith.index_cast(ir.IntegerType.get_signless(64), offset)
    address = offset_address(mgpu.memref_ptr(target), offset, value.type)
    text = """{ .reg .b64 policy;
createpolicy.fractional.L2::evict_last.b64 policy, 1.0;
st.global.L2::cache_hint.f32 [$0], $1, policy; }"""
    mgpu.inline_ptx(text, address, value, has_side_effects=True)


def _plain_store_column_numbers(x: Array, target: Any) -> None:
    target[...] = x[: target.shape[0]]


@primitive(twin=_plain_store_column_numbers, args=(PER_COLUMN, plgpu.RefType()))
def store_column_numbers(x: Any, target: Any) -> None:
    """Stores the first `count` numbers of `[n]` to memory `[count]`."""
    (count,) = target.type.shape
    row, lane = first_row_and_lane()
    warp, is_first = _warp_and_is_first(row)
    is_first = arith.andi(is_first, arith.cmpi(arith.CmpIPredicate.eq, warp, index(0)))
    for group, register in enumerate(x.registers.flatten()):
        for i in range(2):
            column = arith.addi(_column(lane, group), index(i))
            is_stored = arith.cmpi(arith.CmpIPredicate.slt, column, index(count))
            with mgpu.when(arith.andi(is_first, is_stored)):
                memref.store(element(register, i), target, [column])


# --- registers and threads --------------------------------------------------------------------------------------------


def _parts(x: Any) -> Any:
    """Returns registers `[rows // 64, columns // 8, 2]`: two columns of the thread's row, and of the one 8 below."""
    rows, columns = x.shape
    return x.registers.reshape(rows // 64, columns // UNIT, 2)


def _largest(values: list[Any]) -> Any:
    return functools.reduce(arith.maximumf, values)


def _warp_and_is_first(row: Any) -> tuple[Any, Any]:
    """Returns the thread's warp, and whether its rows are the warp's first."""
    warp, in_warp = arith.divui(row, int32(16)), arith.remui(row, int32(16))
    return as_index(warp), arith.cmpi(arith.CmpIPredicate.eq, in_warp, int32(0))


def _column(lane: Any, group: int) -> Any:
    """Returns the first of the thread's two columns in a group of 8."""
    return as_index(arith.addi(arith.muli(lane, int32(2)), int32(UNIT * group)))
