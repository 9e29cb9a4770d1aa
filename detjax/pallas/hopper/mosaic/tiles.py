"""Primitives on tiles with queries on the rows, in the layout of the matrix unit's results."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.mosaic.gpu import utils as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxlib.mlir.dialects import math as math_dialect

from detjax.contract import ACCUMULATOR, KEY_GROUPS, KEY_LANES, KV_BLOCK
from detjax.pallas.hopper.device import WARP, WARPGROUP
from detjax.pallas.hopper.mosaic import like, primitive
from detjax.pallas.hopper.mosaic.layouts import MATRIX, NUMBER, PER_ROW, PER_THREAD, ROWS, line, swizzled
from detjax.pallas.hopper.mosaic.registers import (
    array,
    as_index,
    element,
    empty_registers,
    first_row_and_lane,
    i32,
    index,
    int32,
    offset_address,
    packed,
    thread_of_warpgroup,
    unhoisted_thread,
)

# --- arithmetic -------------------------------------------------------------------------------------------------------


def _plain_fma(x: Array, y: Array, z: Array, *, layout: Any = None) -> Array:
    """Rounds twice, since JAX has no primitive that rounds once, but the same way wherever it is used."""
    product, z = lax.optimization_barrier((x * y, z))
    return product + z


def _layout_of(x: Array, layout: Any) -> Any:
    return layout or (MATRIX if x.ndim == 2 else PER_ROW)


@primitive(
    twin=_plain_fma,
    args=lambda x, y, z, *, layout=None: (_layout_of(x, layout),) * 3,
    out=lambda x, y, z, *, layout=None: plgpu.ShapeDtypeStruct(x.shape, ACCUMULATOR, layout=_layout_of(x, layout)),
)
def fma(x: Any, y: Any, z: Any, *, layout: Any = None) -> Any:
    """Returns `x * y + z` in float32, rounded once; the default layout is `MATRIX` for two axes, `PER_ROW` for one."""
    # Whether the compiler fuses a multiplication with an addition depends on the code around them. This is one
    # instruction, whose bits do not.
    return x._pointwise(math_dialect.fma, y, z)


def sum_in_order(registers: Sequence[Any]) -> Any:
    """Adds registers from left to right."""
    return functools.reduce(arith.addf, registers)


def block_sums(p: Array) -> Array:
    """Returns the sums of the rows of `[n, keys]` in the contract's order, in plain JAX."""
    # Adding -0.0 changes nothing, not even a zero's sign.
    missing = -p.shape[1] % (2 * KEY_GROUPS * KEY_LANES)
    p = jnp.pad(p, ((0, 0), (0, missing)), constant_values=-0.0)
    lanes = lax.optimization_barrier(p.reshape(p.shape[0], -1, KEY_GROUPS, 2, KEY_LANES))
    in_lane = [lanes[:, half, :, pair] for half in range(lanes.shape[1]) for pair in range(2)]
    by_group = functools.reduce(jnp.add, in_lane)
    sums = functools.reduce(jnp.add, [by_group[:, group] for group in range(KEY_GROUPS)])
    while sums.shape[1] > 1:
        sums = sums[:, 0::2] + sums[:, 1::2]
    return sums[:, 0]


@primitive(
    twin=block_sums, args=(MATRIX,), out=lambda p: plgpu.ShapeDtypeStruct(p.shape[:1], ACCUMULATOR, layout=PER_ROW)
)
def row_sums(p: Any) -> Any:
    """Returns the sums of the rows of `[ROWS, n]`, float32, with a block's keys in the contract's order."""
    # The contract's order is the hardware's: a thread adds all that it holds before it exchanges anything.
    groups = p.registers.reshape(-1, 2)  # of 8 columns; the thread's first row, and the one 8 below
    registers = empty_registers(PER_ROW, (ROWS,))
    for half, place in enumerate(np.ndindex(registers.shape)):
        by_group = [keys_of_group(group, len(groups)) for group in range(KEY_GROUPS)]
        registers[place] = _sum_of_lanes(
            sum_in_order([sum_in_order(list(groups[keys, half])) for keys in by_group if keys])
        )
    return array(registers, PER_ROW)


LANE_SUMS: Final = (2 * KEY_GROUPS, WARPGROUP, 2)
"""Shape of the sums that `store_lane_sums` stores: a thread has keys of two lanes of each group, in two rows. A warp
stores 256 consecutive bytes at a time, which is free of bank conflicts."""


def _plain_store_lane_sums(p: Array, lanes: Any) -> None:
    p = lax.optimization_barrier(p.reshape(p.shape[0], KEY_GROUPS, 2, KEY_LANES))
    lanes[...] = (p[:, :, 0] + p[:, :, 1]).reshape(lanes.shape)


@primitive(twin=_plain_store_lane_sums, args=(MATRIX, plgpu.RefType()))
def store_lane_sums(p: Any, lanes: Any) -> None:
    """Stores each lane's sum of the first half of a block's keys, for another warpgroup's `row_sums_of_halves`.

    Args:
        p: `[ROWS, KV_BLOCK / 2]`, float32.
        lanes: shared memory, `LANE_SUMS`.
    """
    for number, keys in enumerate(_keys_of_lanes(p)):
        vector.store(sum_in_order(keys), lanes, [index(number), as_index(thread_of_warpgroup()), index(0)])


def _plain_row_sums_of_halves(p: Array, lanes: Any) -> Array:
    p = lax.optimization_barrier(p.reshape(p.shape[0], KEY_GROUPS, 2, KEY_LANES))
    sums = lanes[...].reshape(p.shape[0], KEY_GROUPS, KEY_LANES) + p[:, :, 0] + p[:, :, 1]
    sums = functools.reduce(jnp.add, [sums[:, group] for group in range(KEY_GROUPS)])
    while sums.shape[1] > 1:
        sums = sums[:, 0::2] + sums[:, 1::2]
    return sums[:, 0]


@primitive(
    twin=_plain_row_sums_of_halves,
    args=(MATRIX, plgpu.RefType()),
    out=lambda p, _: plgpu.ShapeDtypeStruct(p.shape[:1], ACCUMULATOR, layout=PER_ROW),
)
def row_sums_of_halves(p: Any, lanes: Any) -> Any:
    """Returns the bits of `row_sums` of a block from two halves of its keys.

    Args:
        p: the second half, `[ROWS, KV_BLOCK / 2]`, float32.
        lanes: the lanes' sums of the first half, in shared memory.
    """
    pair = ir.VectorType.get((2,), ir.F32Type.get())
    sums = []
    for number, keys in enumerate(_keys_of_lanes(p)):
        before = vector.load(pair, lanes, [index(number), as_index(thread_of_warpgroup()), index(0)])
        sums.append(sum_in_order([before, *keys]))
    registers = empty_registers(PER_ROW, (ROWS,))
    for half, place in enumerate(np.ndindex(registers.shape)):
        registers[place] = _sum_of_lanes(sum_in_order(sums[half::2]))
    return array(registers, PER_ROW)


def _keys_of_lanes(p: Any) -> list[list[Any]]:
    """Returns the registers of half a block's keys by group, for the thread's first row and the one 8 below."""
    groups = p.registers.reshape(-1, 2)
    return [list(groups[keys_of_group(group, len(groups)), half]) for group in range(KEY_GROUPS) for half in range(2)]


def _sum_of_lanes(lanes: Any) -> Any:
    """Sums a row's lanes; each of four threads has two."""
    # Both threads of an exchange add the same two numbers, and addition commutes: all four get the same bits.
    total = sum_in_order([element(lanes, place) for place in range(2)])
    for distance in (1, 2):
        total = arith.addf(total, mgpu.shfl_bfly(total, distance))
    return packed([total])


def _plain_joined(left: Array, right: Array) -> Array:
    return jnp.concatenate([left, right], axis=1)


@primitive(
    twin=_plain_joined,
    args=(MATRIX, MATRIX),
    out=lambda left, right: plgpu.ShapeDtypeStruct((left.shape[0], 2 * left.shape[1]), left.dtype, layout=MATRIX),
)
def joined(left: Any, right: Any) -> Any:
    """Concatenates two tiles along columns."""
    return array(np.concatenate([left.registers, right.registers], axis=1), MATRIX, left.is_signed)


def keys_of_group(group: int, count: int) -> list[int]:
    """Returns which of `count` registers, of 8 ascending keys each, hold keys of one of the contract's groups."""
    return [index for index in range(count) if index // 2 % KEY_GROUPS == group]


# --- masks and distances ----------------------------------------------------------------------------------------------


def masked_scores(s: Any, is_visible: Callable[[int, int, int], Any]) -> Any:
    """Emits a tile with -inf where a score is not visible.

    Args:
        s: the tile.
        is_visible: emits the condition for a group of 8 columns, a half of the rows (the thread's first row, or the one
            8 below), and one of the thread's two columns there.
    """
    lowest = arith.constant(ir.F32Type.get(), ir.FloatAttr.get(ir.F32Type.get(), -np.inf))
    registers = np.empty_like(s.registers)
    for number, place in enumerate(np.ndindex(s.registers.shape)):
        group, half = divmod(number, 2)
        register = s.registers[place]
        for offset in range(2):
            score = arith.select(is_visible(group, half, offset), element(register, offset), lowest)
            position = ir.DenseI64ArrayAttr.get([offset])
            register = vector.insert(score, register, dynamic_position=[], static_position=position)
        registers[place] = register
    return array(registers, plgpu.Layout.WGMMA, s.is_signed)


def _plain_mask_columns(s: Array, end: Array, first: Array | None = None) -> Array:
    columns = jnp.arange(s.shape[1])[None]
    is_visible = columns < end[:, None]
    if first is not None:
        is_visible = is_visible & (columns >= first[:, None])
    return jnp.where(is_visible, s, -jnp.inf)


@primitive(twin=_plain_mask_columns, args=lambda s, *bounds: (MATRIX, *(PER_ROW,) * len(bounds)), out=like(MATRIX))
def mask_columns(s: Any, *bounds: Any) -> Any:
    """Returns a tile with -inf from each row's `end` on and, if given, before its `first`; int32 `[ROWS]`."""
    # A thread's columns are constants plus its lane's offset, which is subtracted from the bounds: a comparison with an
    # iota would take a register per column.
    _, lane = first_row_and_lane()
    shift = arith.muli(lane, int32(2))
    limits = [
        [arith.subi(element(bound), shift) for bound in bound_of_rows.registers.flatten()] for bound_of_rows in bounds
    ]

    def is_visible(group: int, half: int, offset: int) -> Any:
        column = int32(8 * group + offset)
        visible = arith.cmpi(arith.CmpIPredicate.slt, column, limits[0][half])
        if len(limits) > 1:
            is_in_window = arith.cmpi(arith.CmpIPredicate.sge, column, limits[1][half])
            visible = arith.andi(visible, is_in_window)
        return visible

    return masked_scores(s, is_visible)


def _plain_mask_bits(s: Array, *words: Array) -> Array:
    tiles = []
    for word in words:
        bits = (word[:, None] >> jnp.arange(32)[None]) & 1
        # The threads' axes are warp, row and column; the bits' are half, group of columns, and one of two columns.
        bits = bits.reshape(4, 8, 4, 2, 8, 2).transpose(0, 3, 1, 4, 2, 5)
        tiles.append(bits.reshape(ROWS, ROWS))
    return jnp.where(jnp.concatenate(tiles, axis=1) == 1, s, -jnp.inf)


@primitive(twin=_plain_mask_bits, args=lambda s, *words: (MATRIX, *(PER_THREAD,) * len(words)), out=like(MATRIX))
def mask_bits(s: Any, *words: Any) -> Any:
    """Returns a tile with -inf where a score's bit is 0; each word has `ROWS` columns, see `attention.mask`."""
    bits_of_columns = [element(word.registers.item()) for word in words]

    def is_visible(group: int, half: int, offset: int) -> Any:
        part, group = divmod(group, 8)
        bit = 16 * half + 2 * group + offset
        mask = int32(int(np.uint32(1 << bit).view(np.int32)))
        return arith.cmpi(arith.CmpIPredicate.ne, arith.andi(bits_of_columns[part], mask), int32(0))

    return masked_scores(s, is_visible)


def _plain_column_distances(first: Array) -> Array:
    return (first[:, None] + jnp.arange(KV_BLOCK)[None]).astype(ACCUMULATOR)


@primitive(
    twin=_plain_column_distances,
    args=(PER_ROW,),
    out=plgpu.ShapeDtypeStruct((ROWS, KV_BLOCK), ACCUMULATOR, layout=MATRIX),
)
def column_distances(first: Any) -> Any:
    """Returns `first + column` as float32 `[ROWS, KV_BLOCK]`, from int32 `[ROWS]`."""
    _, lane = first_row_and_lane()
    shift = arith.muli(lane, int32(2))
    float32 = ir.F32Type.get()
    bases = [arith.sitofp(float32, arith.addi(element(x), shift)) for x in first.registers.flatten()]
    registers = empty_registers(MATRIX, (ROWS, KV_BLOCK))
    for number, place in enumerate(np.ndindex(registers.shape)):
        group, half = divmod(number, 2)
        columns = [arith.constant(float32, ir.FloatAttr.get(float32, 8.0 * group + i)) for i in range(2)]
        registers[place] = packed([arith.addf(bases[half], column) for column in columns])
    return array(registers, MATRIX)


# --- memory, thread by thread -----------------------------------------------------------------------------------------
# In row-major order a warp would access eight rows in pieces of 32 bytes. By thread it accesses 512 consecutive bytes.

_NUMBERS_OF_A_GROUP: Final = 4
"""Numbers that a thread has of 8 columns of a tile: two of its first row, and two of the row 8 below."""


def by_thread(columns: int) -> tuple[int, int, int]:
    """Returns the shape of a tile in memory by `store_by_thread`: groups of 8 columns, threads, and their numbers."""
    return columns // 8, WARPGROUP, _NUMBERS_OF_A_GROUP


def _plain_store_by_thread(x: Array, ref: Any) -> None:
    # The axes of rows are warp, half and row of 8; the axes of columns are group, lane, and one of two columns.
    x = x.reshape(4, 2, 8, -1, 4, 2).transpose(3, 0, 2, 4, 1, 5)
    ref[...] = x.reshape(-1, WARPGROUP, _NUMBERS_OF_A_GROUP)


@primitive(twin=_plain_store_by_thread, args=(MATRIX, plgpu.RefType()))
def store_by_thread(x: Any, ref: Any) -> None:
    """Stores a float32 tile of `ROWS` rows to memory of the shape `by_thread`."""
    registers = x.registers.flatten()  # of 8 columns two: the thread's first row, and the one 8 below
    for group, pair in enumerate(zip(registers[::2], registers[1::2], strict=True)):
        llvm.store(packed([element(register, i) for register in pair for i in range(2)]), _group_address(ref, group))


def _plain_load_by_thread(ref: Any) -> Array:
    groups = ref.shape[0]
    x = ref[...].reshape(groups, 4, 8, 4, 2, 2).transpose(1, 4, 2, 0, 3, 5)
    return x.reshape(ROWS, 8 * groups)


@primitive(
    twin=_plain_load_by_thread,
    args=(plgpu.RefType(),),
    out=lambda ref: plgpu.ShapeDtypeStruct((ROWS, 8 * ref.shape[0]), ACCUMULATOR, layout=MATRIX),
)
def load_by_thread(ref: Any) -> Any:
    """Loads the tile that `store_by_thread` stored, or some of its groups of 8 columns."""
    groups = ref.type.shape[0]
    four = ir.VectorType.get((_NUMBERS_OF_A_GROUP,), ir.F32Type.get())
    registers = empty_registers(MATRIX, (ROWS, 8 * groups))
    numbers = [llvm.load(four, _group_address(ref, group)) for group in range(groups)]
    for number, place in enumerate(np.ndindex(registers.shape)):
        group, half = divmod(number, 2)
        registers[place] = packed([element(numbers[group], 2 * half + i) for i in range(2)])
    return array(registers, MATRIX)


def _group_address(ref: Any, group: int) -> Any:
    """Returns the address of the thread's numbers of a group of 8 columns."""
    first = arith.muli(unhoisted_thread(), int32(_NUMBERS_OF_A_GROUP))
    offset = arith.addi(first, int32(group * WARPGROUP * _NUMBERS_OF_A_GROUP))
    return offset_address(mgpu.memref_ptr(ref), offset, ir.F32Type.get())


# --- shared memory ----------------------------------------------------------------------------------------------------


def clear_rows_in_registers(rows: Any, length: Array) -> None:
    """Zeroes all but the first `length` of `ROWS` rows of keys or values in shared memory, through registers."""
    width = rows.shape[-1]
    for first in range(0, width, line(width)):
        part = rows.at[:, pl.ds(first, line(width))]
        is_kept = plgpu.broadcasted_iota(jnp.int32, (ROWS, line(width)), 0, layout=MATRIX) < length
        values = plgpu.load(part, layout=MATRIX, optimized=False)
        part[...] = jnp.where(is_kept, values.astype(ACCUMULATOR), 0.0).astype(values.dtype)


@primitive(twin=clear_rows_in_registers, args=(plgpu.RefType(swizzled(64)), NUMBER))
def clear_rows(rows: Any, length: Any) -> None:
    """Zeroes all but the first `length` of `ROWS` rows of 2-byte elements, swizzled in lines of 128 bytes.

    It takes fewer registers than `clear_rows_in_registers`: a swizzle moves nothing between rows, so whole rows are
    overwritten without being loaded.
    """
    thread, address, down, across, lines = _place_in_lines(rows)
    # Each thread has half of a row of each line.
    row, half = arith.divui(thread, int32(2)), arith.remui(thread, int32(2))
    address = arith.addi(address, arith.muli(arith.divui(row, int32(8)), int32(down)))
    address = arith.addi(address, arith.muli(arith.remui(row, int32(8)), int32(128)))
    address = arith.addi(address, arith.muli(half, int32(64)))
    zeros = vector.broadcast(ir.VectorType.get((4,), i32()), int32(0))
    with mgpu.when(arith.cmpi(arith.CmpIPredicate.sge, row, length.registers.item())):
        for line_index in range(lines):
            for byte in range(0, 64, 16):
                _store(zeros, arith.addi(address, int32(line_index * across + byte)))


def _plain_store_lines(x: Array, ref: Any) -> None:
    ref[...] = x


@primitive(twin=_plain_store_lines, args=(MATRIX, plgpu.RefType(swizzled(64))))
def store_lines(x: Any, ref: Any) -> None:
    """Stores `[ROWS, n]` of 2-byte elements to shared memory that is swizzled in lines of 128 bytes.

    It is `ref[...] = x`, except that no addresses stay in registers between tiles.
    """
    thread, address, down, across, _ = _place_in_lines(ref)
    warp, lane = arith.divui(thread, int32(WARP)), arith.remui(thread, int32(WARP))
    row = arith.divui(lane, int32(4))  # of 8
    address = arith.addi(address, arith.muli(warp, int32(2 * down)))
    address = arith.addi(address, arith.muli(row, int32(128)))
    address = arith.addi(address, arith.muli(arith.remui(lane, int32(4)), int32(4)))
    # The hardware's swizzle: chunk c of 16 bytes of row r is at chunk c ^ r. The 32 threads of a warp store four bytes
    # each to one chunk of eight rows, which so are in all 32 banks.
    swizzle = arith.muli(row, int32(16))
    registers = x.registers.flatten()  # of 8 columns two: the thread's first row, and the one 8 below
    for group, pair in enumerate(zip(registers[::2], registers[1::2], strict=True)):
        line_index, chunk = divmod(group, 8)
        chunk_address = arith.addi(address, arith.xori(swizzle, int32(16 * chunk)))
        for half, register in enumerate(pair):
            _store(register, arith.addi(chunk_address, int32(half * down + line_index * across)))


def _place_in_lines(ref: Any) -> tuple[Any, Any, int, int, int]:
    """Returns the geometry of swizzled lines.

    Returns:
        The opaque thread number of `unhoisted_thread`; the address of the lines; bytes from 8 rows to the next 8; bytes
        from line to line of a row; and the number of lines of a row.
    """
    _, lines, _, _ = ref.type.shape
    (down, across, _, _), _ = ref.type.get_strides_and_offset()
    address = llvm.ptrtoint(i32(), mgpu.memref_ptr(ref))
    return unhoisted_thread(), address, 2 * down, 2 * across, lines


def _store(value: Any, address: Any) -> None:
    llvm.store(value, llvm.inttoptr(ir.Type.parse("!llvm.ptr<3>"), address))
