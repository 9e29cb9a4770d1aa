"""Primitives that scale the products of quantized rows and weights, in the registers of the matrix unit's results."""

import functools
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.mosaic.gpu import utils as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector
from jaxlib.mlir.dialects import math as math_dialect

from detjax.contract import ACCUMULATOR
from detjax.pallas.hopper.device import WARPGROUP
from detjax.pallas.hopper.mosaic import like, primitive
from detjax.pallas.hopper.mosaic.layouts import MATRIX, NUMBER, PER_COLUMN, PER_ROW, ROWS, UNIT
from detjax.pallas.hopper.mosaic.registers import (
    array,
    as_index,
    element,
    empty_registers,
    first_row_and_lane,
    i32,
    int32,
    number,
    packed,
    plus,
    thread_of_warpgroup,
    times,
)

_VECTOR_BYTES = 16
"""Bytes that a thread loads at once."""


# --- the scales of weights --------------------------------------------------------------------------------------------


def _plain_row_scales(group: Array, first: Array, scales: Any) -> Array:
    rows = jnp.minimum(first + jnp.arange(ROWS), scales.shape[0] - 1)
    return lax.dynamic_slice_in_dim(scales[...], group, 1, axis=1)[rows, 0].astype(ACCUMULATOR)


@primitive(
    twin=_plain_row_scales,
    args=(NUMBER, NUMBER, plgpu.RefType()),
    out=plgpu.ShapeDtypeStruct((ROWS,), ACCUMULATOR, layout=PER_ROW),
)
def row_scales(group: Any, first: Any, scales: Any) -> Any:
    """Returns the scales of a tile's rows in a group, `[ROWS]` float32.

    Args:
        group: the group in `scales`.
        first: the row of `scales` that is the tile's first.
        scales: `[rows, groups]` in shared memory. Rows of the tile beyond its end take the last one's.
    """
    registers = empty_registers(PER_ROW, (ROWS,))
    row, _ = first_row_and_lane()
    for half, place in enumerate(np.ndindex(registers.shape)):
        this_row = plus(row, first.registers.item(), int32(8 * half))
        registers[place] = packed([_scale(scales, arith.minui(this_row, int32(scales.type.shape[0] - 1)), group)])
    return array(registers, PER_ROW)


def _plain_column_scales(group: Array, scales: Any, *, unit: int) -> Array:
    columns = lax.dynamic_slice_in_dim(scales[...], group, 1, axis=1)[:, 0].astype(ACCUMULATOR)
    return jnp.repeat(columns[::unit], unit)


@primitive(
    twin=_plain_column_scales,
    args=(NUMBER, plgpu.RefType()),
    out=lambda _, scales, unit: plgpu.ShapeDtypeStruct((scales.shape[0],), ACCUMULATOR, layout=PER_COLUMN),
)
def column_scales(group: Any, scales: Any, *, unit: int) -> Any:
    """Returns the scales of a tile's columns in a group, `[columns]` float32.

    Args:
        group: the group in `scales`.
        scales: `[columns, groups]` in shared memory.
        unit: number of consecutive columns that share their scales: 1, or a multiple of eight. With many, threads load
            little and the factors of these columns are the same.
    """
    registers = empty_registers(PER_COLUMN, (scales.type.shape[0],))
    _, lane = first_row_and_lane()
    for place, at in zip(np.ndindex(registers.shape), range(0, scales.type.shape[0], UNIT), strict=True):
        if unit > 1:
            # The compiler loads the same scale once.
            registers[place] = packed([_scale(scales, int32(at - at % unit), group)] * 2)
        else:
            first = plus(times(lane, 2), int32(at))
            registers[place] = packed([_scale(scales, plus(first, int32(i)), group) for i in range(2)])
    return array(registers, PER_COLUMN)


def _scale(scales: Any, row: Any, group: Any) -> Any:
    """Loads the scale of a row in a group."""
    scale = memref.load(scales, (as_index(row), as_index(group.registers.item())))
    return scale if scale.type == ir.F32Type.get() else arith.extf(ir.F32Type.get(), scale)


def _plain_rows_share_scales(first: Array, scales: Any, *, rows: int, unit: int) -> Array:
    place = jnp.arange(rows)
    row, first_row = (jnp.minimum(first + at, scales.shape[0] - 1) for at in (place, place - place % unit))
    bits = lax.bitcast_convert_type(scales[...], jnp.dtype(f"uint{8 * scales.dtype.itemsize}"))
    return jnp.all(bits[row] == bits[first_row]).astype(jnp.int32)


@primitive(
    twin=_plain_rows_share_scales,
    args=(NUMBER, plgpu.RefType()),
    out=plgpu.ShapeDtypeStruct((), jnp.int32, layout=NUMBER),
)
def rows_share_scales(first: Any, scales: Any, *, rows: int, unit: int) -> Any:
    """Returns 1 if each `unit` rows of a tile have equal bits of their scales, in all groups; otherwise 0.

    Args:
        first: the row of `scales` that is the tile's first, a multiple of `unit`.
        scales: `[N, groups]` in device memory, groups in units of 16 bytes.
        rows: rows of the tile. Those beyond the end of `scales` do not matter.
        unit: number of rows.
    """
    dtype = scales.type.element_type
    count = _VECTOR_BYTES // mgpu.bytewidth(dtype)
    loaded, words = ir.VectorType.get((count,), dtype), ir.VectorType.get((_VECTOR_BYTES // 4,), i32())
    last = int32(scales.type.shape[0] - 1)

    def bits(place: Any, group: int) -> Any:
        row = as_index(arith.minui(plus(first.registers.item(), place), last))
        return vector.bitcast(words, vector.load(loaded, scales, [row, as_index(int32(group))]))

    differences = []
    for begin in range(0, rows, WARPGROUP):
        place = arith.minui(plus(thread_of_warpgroup(), int32(begin)), int32(rows - 1))
        first_of_unit = arith.subi(place, arith.remui(place, int32(unit)))
        differences += [
            arith.xori(bits(place, group), bits(first_of_unit, group))
            for group in range(0, scales.type.shape[1], count)
        ]
    differs = functools.reduce(arith.ori, differences)
    differs = functools.reduce(arith.ori, [element(differs, i) for i in range(_VECTOR_BYTES // 4)])
    text = f"{{ .reg .pred p, q; setp.ne.b32 p, $1, 0; bar.red.or.pred q, $2, {WARPGROUP}, p; selp.b32 $0, 0, 1, q; }}"
    barrier = mgpu.warpgroup_barrier_idx()
    return number(mgpu.inline_ptx(text, differs, barrier, result_types=i32(), has_side_effects=True))


# --- products and sums ------------------------------------------------------------------------------------------------


def _plain_promoted_by(product: Array, total: Array, columns: Array, rows: Array) -> Array:
    factors = lax.optimization_barrier(columns[None] * rows[:, None])
    # Rounds twice, like `fma`'s twin.
    scaled, total = lax.optimization_barrier((product * factors, total))
    return scaled + total


@primitive(twin=_plain_promoted_by, args=(MATRIX, MATRIX, PER_COLUMN, PER_ROW), out=like(MATRIX))
def promoted_by(product: Any, total: Any, columns: Any, rows: Any) -> Any:
    """Returns `fma(product, rn(s_x * s_w), total)`, `[ROWS, columns]` float32.

    Args:
        product: the products of a block.
        total: the sums before it.
        columns: the scales of columns.
        rows: the scales of rows.
    """
    # A factor of an fma cannot be fused with anything, so both roundings are the contract's.
    by_column, by_row = columns.registers.flatten(), [element(x) for x in rows.registers.flatten()]
    registers = empty_registers(MATRIX, product.shape)
    for i, place in enumerate(np.ndindex(registers.shape)):
        column, half = divmod(i, 2)
        factor = arith.mulf(by_column[column], packed([by_row[half]] * 2))
        registers[place] = math_dialect.fma(product.registers[place], factor, total.registers[place])
    return array(registers, MATRIX)


def _plain_scaled_by(total: Array, columns: Array, rows: Array, *, by_columns_first: bool) -> Array:
    first, second = (columns[None], rows[:, None]) if by_columns_first else (rows[:, None], columns[None])
    return lax.optimization_barrier(second * lax.optimization_barrier(first * total))


@primitive(twin=_plain_scaled_by, args=(MATRIX, PER_COLUMN, PER_ROW), out=like(MATRIX))
def scaled_by(total: Any, columns: Any, rows: Any, *, by_columns_first: bool) -> Any:
    """Returns `rn(s * rn(t * total))`, `[ROWS, columns]` float32.

    Args:
        total: the sums.
        columns: the scales of columns: `t` if `by_columns_first`, otherwise `s`.
        rows: the scales of rows, the other ones.
        by_columns_first: which scales are multiplied first.
    """
    by_column, by_row = columns.registers.flatten(), [element(x) for x in rows.registers.flatten()]
    registers = empty_registers(MATRIX, total.shape)
    for i, place in enumerate(np.ndindex(registers.shape)):
        column, half = divmod(i, 2)
        scales = by_column[column], packed([by_row[half]] * 2)
        first, second = scales if by_columns_first else scales[::-1]
        registers[place] = _product(second, _product(first, total.registers[place]))
    return array(registers, MATRIX)


def _product(x: Any, y: Any) -> Any:
    """Returns the rounded products of two pairs. As instructions of their own they cannot be fused with additions."""
    numbers = [
        mgpu.inline_ptx("mul.rn.f32 $0, $1, $2;", element(x, i), element(y, i), result_types=ir.F32Type.get())
        for i in range(2)
    ]
    return packed(numbers)
