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
from detjax.pallas.hopper.mosaic.layouts import MATRIX, NUMBER, ROWS, UNIT
from detjax.pallas.hopper.mosaic.registers import (
    array,
    as_index,
    element,
    empty_registers,
    first_row_and_lane,
    int32,
    packed,
)


def _plain_scales(token_scales: Any, weight_scales: Any, group: Array, first: Array, columns: int) -> tuple[Any, Any]:
    """Returns the scales of a tile's columns, `[1, columns]`, and rows, `[ROWS, 1]`."""
    rows = jnp.minimum(first + jnp.arange(ROWS), weight_scales.shape[0] - 1)
    block_scales = lax.dynamic_slice_in_dim(weight_scales[...], group, 1, axis=1)
    return token_scales[...][None, :columns], block_scales[rows].astype(ACCUMULATOR)


def _plain_promoted(
    product: Array, total: Array, token_scales: Any, weight_scales: Any, group: Array, first: Array
) -> Array:
    tokens, weights = _plain_scales(token_scales, weight_scales, group, first, product.shape[1])
    # Rounds twice, like `fma`'s twin.
    scaled, total = lax.optimization_barrier((product * lax.optimization_barrier(tokens * weights), total))
    return scaled + total


@primitive(
    twin=_plain_promoted, args=(MATRIX, MATRIX, plgpu.RefType(), plgpu.RefType(), NUMBER, NUMBER), out=like(MATRIX)
)
def promoted(product: Any, total: Any, token_scales: Any, weight_scales: Any, group: Any, first: Any) -> Any:
    """Returns `fma(product, rn(s_x * s_w), total)`, `[ROWS, columns]` float32, for weights on the rows.

    Args:
        product: the products of a block.
        total: the sums before it.
        token_scales: float32 `[columns or more]` in shared memory.
        weight_scales: `[rows, groups]` in shared memory. Rows of the tile beyond its end take the last one's.
        group: the group of the block in `weight_scales`.
        first: the row of `weight_scales` that is the tile's first.
    """
    # A factor of an fma cannot be fused with anything, so both roundings are the contract's.
    return _map_scaled(
        product,
        token_scales,
        (weight_scales, group, first),
        lambda place, s_x, s_w: math_dialect.fma(
            product.registers[place], arith.mulf(s_x, s_w), total.registers[place]
        ),
    )


def _plain_scaled(total: Array, token_scales: Any, weight_scales: Any, group: Array, first: Array) -> Array:
    tokens, weights = _plain_scales(token_scales, weight_scales, group, first, total.shape[1])
    return lax.optimization_barrier(tokens * lax.optimization_barrier(weights * total))


@primitive(twin=_plain_scaled, args=(MATRIX, plgpu.RefType(), plgpu.RefType(), NUMBER, NUMBER), out=like(MATRIX))
def scaled(total: Any, token_scales: Any, weight_scales: Any, group: Any, first: Any) -> Any:
    """Returns `rn(s_x * rn(s_w * total))`, `[ROWS, columns]` float32; see `promoted` for the operands."""
    return _map_scaled(
        total,
        token_scales,
        (weight_scales, group, first),
        lambda place, s_x, s_w: _product(s_x, _product(s_w, total.registers[place])),
    )


def _map_scaled(like_this: Any, token_scales: Any, weights: tuple[Any, Any, Any], fn: Any) -> Any:
    """Returns the array of `fn(place, token scales, weight scales)` for each register, which has two columns."""
    weight_scales, group, first = weights
    row, lane = first_row_and_lane()
    last = int32(weight_scales.type.shape[0] - 1)
    pair = ir.VectorType.get((2,), ir.F32Type.get())
    row_scales = []
    for half in range(2):
        this_row = arith.addi(arith.addi(row, int32(8 * half)), first.registers.item())
        place = as_index(arith.minui(this_row, last)), as_index(group.registers.item())
        scale = memref.load(weight_scales, place)
        scale = scale if scale.type == pair.element_type else arith.extf(pair.element_type, scale)
        row_scales.append(packed([scale, scale]))
    registers = empty_registers(MATRIX, like_this.shape)
    column_scales: Any = None
    for number, place in enumerate(np.ndindex(registers.shape)):
        column, half = divmod(number, 2)
        if half == 0:
            offset = as_index(arith.addi(arith.muli(lane, int32(2)), int32(UNIT * column)))
            column_scales = vector.load(pair, token_scales, [offset])
        registers[place] = fn(place, column_scales, row_scales[half])
    return array(registers, MATRIX)


def _product(x: Any, y: Any) -> Any:
    """Returns the rounded products of two pairs. As instructions of their own they cannot be fused with additions."""
    numbers = [
        mgpu.inline_ptx("mul.rn.f32 $0, $1, $2;", element(x, i), element(y, i), result_types=ir.F32Type.get())
        for i in range(2)
    ]
    return packed(numbers)
