"""Primitives that scale the products of quantized rows and weights, in the registers of the matrix unit's results."""

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
from detjax.pallas.hopper.mosaic import like, primitive
from detjax.pallas.hopper.mosaic.layouts import MATRIX, NUMBER, PER_COLUMN, PER_ROW, ROWS, UNIT
from detjax.pallas.hopper.mosaic.registers import (
    array,
    as_index,
    element,
    empty_registers,
    first_row_and_lane,
    int32,
    packed,
    plus,
)


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
        registers[place] = packed([_row_scale(scales, group, plus(row, first.registers.item(), int32(8 * half)))])
    return array(registers, PER_ROW)


def _row_scale(scales: Any, group: Any, row: Any) -> Any:
    """Loads the scale of a row, or of the last one, in a group."""
    place = as_index(arith.minui(row, int32(scales.type.shape[0] - 1))), as_index(group.registers.item())
    scale = memref.load(scales, place)
    return scale if scale.type == ir.F32Type.get() else arith.extf(ir.F32Type.get(), scale)


def _plain_promoted_by(product: Array, total: Array, tokens: Array, rows: Array) -> Array:
    factors = lax.optimization_barrier(tokens[None] * rows[:, None])
    scaled, total = lax.optimization_barrier((product * factors, total))
    return scaled + total


@primitive(twin=_plain_promoted_by, args=(MATRIX, MATRIX, PER_COLUMN, PER_ROW), out=like(MATRIX))
def promoted_by(product: Any, total: Any, tokens: Any, rows: Any) -> Any:
    """Returns `fma(product, rn(s_x * s_w), total)`, `[ROWS, columns]` float32, for weights on the rows.

    Args:
        product: the products of a block.
        total: the sums before it.
        tokens: the scales of the columns.
        rows: the scales of the rows, in the order of `row_scales`.
    """
    # A factor of an fma cannot be fused with anything, so both roundings are the contract's.
    by_column, by_row = tokens.registers.flatten(), [element(x) for x in rows.registers.flatten()]
    registers = empty_registers(MATRIX, product.shape)
    for number, place in enumerate(np.ndindex(registers.shape)):
        column, half = divmod(number, 2)
        factor = arith.mulf(by_column[column], packed([by_row[half]] * 2))
        registers[place] = math_dialect.fma(product.registers[place], factor, total.registers[place])
    return array(registers, MATRIX)


def _plain_scaled(total: Array, token_scales: Any, group: Array, first: Array, weight_scales: Any) -> Array:
    weights = _plain_row_scales(group, first, weight_scales)[:, None]
    tokens = token_scales[...][None, : total.shape[1]]
    return lax.optimization_barrier(tokens * lax.optimization_barrier(weights * total))


@primitive(
    twin=_plain_scaled,
    args=(MATRIX, plgpu.RefType(), NUMBER, NUMBER, plgpu.RefType()),
    out=like(MATRIX),
)
def scaled(total: Any, token_scales: Any, group: Any, first: Any, weight_scales: Any) -> Any:
    """Returns `rn(s_x * rn(s_w * total))`, `[ROWS, columns]` float32.

    Args:
        total: the sums.
        token_scales: float32 `[columns or more]` in shared memory.
        group: the group in `weight_scales`.
        first: as in `row_scales`, like `weight_scales`.
        weight_scales: `[rows, groups]` in shared memory.
    """
    row, lane = first_row_and_lane()
    pair = ir.VectorType.get((2,), ir.F32Type.get())
    rows = [plus(row, first.registers.item(), int32(8 * half)) for half in range(2)]
    scales_of_rows = [packed([_row_scale(weight_scales, group, this_row)] * 2) for this_row in rows]
    registers = empty_registers(MATRIX, total.shape)
    column_scales: Any = None
    for number, place in enumerate(np.ndindex(registers.shape)):
        column, half = divmod(number, 2)
        if half == 0:
            offset = as_index(arith.addi(arith.muli(lane, int32(2)), int32(UNIT * column)))
            column_scales = vector.load(pair, token_scales, [offset])
        registers[place] = _product(column_scales, _product(scales_of_rows[half], total.registers[place]))
    return array(registers, MATRIX)


def _product(x: Any, y: Any) -> Any:
    """Returns the rounded products of two pairs. As instructions of their own they cannot be fused with additions."""
    numbers = [
        mgpu.inline_ptx("mul.rn.f32 $0, $1, $2;", element(x, i), element(y, i), result_types=ir.F32Type.get())
        for i in range(2)
    ]
    return packed(numbers)
