"""Tiles of matrices in the registers of a warpgroup, and their product by `mma.sync.m16n8k16`.

The four warps lie along the rows of a product, along its columns, or two by two: `row_warps` of them along the rows.
Rows come in `16 * row_warps`, columns in `8 * (4 / row_warps)`, K in 16s.
"""

from collections.abc import Sequence
from typing import Any, Final, Literal

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith
from jaxtyping import DTypeLike

from detjax.contract import ACCUMULATOR
from detjax.pallas.hopper.device import WARP
from detjax.pallas.hopper.mosaic import barriers, with_twin
from detjax.pallas.hopper.mosaic.layouts import swizzled_lines
from detjax.pallas.hopper.mosaic.registers import array, empty_registers, int32, unhoisted_thread
from detjax.pallas.mma.matrices import load_matrices

STEP: Final = 16
"""Elements of K that one instruction adds."""

RowWarps = Literal[1, 2, 4]


def row_unit(row_warps: int) -> int:
    """Returns the number of rows that a product's rows are a multiple of."""
    return 16 * row_warps


def column_unit(row_warps: int) -> int:
    """Returns the number of columns that a product's columns are a multiple of."""
    return 8 * (4 // row_warps)


def accumulator_layout(dtype: DTypeLike, row_warps: int = 4) -> Any:
    """Returns the layout of sums `[rows, columns]`, for operands of a dtype."""
    return plgpu.Layout.MMA_ACC(jnp.dtype(dtype), m_warps=row_warps)


def left_layout(dtype: DTypeLike, row_warps: int = 4) -> Any:
    """Returns the layout of left operands `[rows, K]`."""
    return plgpu.Layout.MMA_LHS(jnp.dtype(dtype), m_warps=row_warps)


def right_layout(dtype: DTypeLike, row_warps: int = 4) -> Any:
    """Returns the layout of right operands `[K, columns]`."""
    return plgpu.Layout.MMA_RHS(jnp.dtype(dtype), m_warps=row_warps)


def zeros(shape: tuple[int, int], dtype: DTypeLike, row_warps: int = 4) -> Array:
    """Returns sums `[rows, columns]` float32 that begin with zero, for operands of a dtype."""
    return plgpu.layout_cast(jnp.zeros(shape, ACCUMULATOR), accumulator_layout(dtype, row_warps))


def load_left(ref: Any, row_warps: int = 4) -> Array:
    """Returns the left operand `[rows, K]` that a reference to shared memory, possibly transposed, has."""
    return plgpu.load(ref, layout=left_layout(ref.dtype, row_warps), optimized=False)


def load_right(ref: Any, row_warps: int = 4) -> Array:
    """Returns the right operand `[K, columns]` that a reference to shared memory, possibly transposed, has."""
    return plgpu.load(ref, layout=right_layout(ref.dtype, row_warps), optimized=False)


def await_loads(operands: Sequence[Array], row_warps: int = 4) -> None:
    """Makes a thread wait until it has loaded a left operand and right ones; see `barriers.await_loads`."""
    left, *right = operands
    layouts = left_layout(left.dtype, row_warps), right_layout(left.dtype, row_warps)
    barriers.await_loads(left, *right, layouts=(layouts[0], *layouts[1:] * len(right)))


def _plain_right_of_lines(ref: Any, first: int, *, line: int, row_warps: int) -> Array:
    return ref[:, pl.ds(first, STEP)].T


@with_twin(_plain_right_of_lines)
def load_right_of_lines(ref: Any, first: int, *, line: int, row_warps: int) -> Array:
    """Returns the right operand `[STEP, columns]` of some columns of a reference `[columns, line]`.

    `load_right` takes whole lines, so its instruction loads two steps of a column. If only one is used, half of the
    loads are wasted. Here an instruction loads one step of twice as many columns.

    Args:
        ref: swizzled lines along K in shared memory, of 2-byte elements; its rows are a multiple of two units.
        first: the first column, a multiple of `STEP`.
        line: elements of a line.
        row_warps: warps along the rows of the product.
    """
    layout = right_layout(ref.dtype, row_warps)
    inline: Any = plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(swizzled_lines(line, 2)),),
        return_type=plgpu.ShapeDtypeStruct((STEP, ref.shape[0]), ref.dtype, layout=layout),
    )
    return inline(lambda _, ref: _emit_right(ref, first, line, 4 // row_warps, layout))(ref)


def _emit_right(ref: Any, first: int, line: int, column_warps: int, layout: Any) -> Any:
    """Emits the loads of `load_right_of_lines`."""
    units, _, lines, _ = ref.type.shape
    assert lines == 8 and units % (2 * column_warps) == 0
    (stride, *_), _ = ref.type.get_strides_and_offset()
    unit_bytes, line_bytes = 2 * stride, 2 * line
    thread = unhoisted_thread()
    warp, lane = arith.divui(thread, int32(WARP)), arith.remui(thread, int32(WARP))
    column = arith.remui(lane, int32(8))
    second_unit, upper = arith.divui(lane, int32(16)), arith.remui(arith.divui(lane, int32(8)), int32(2))
    unit = arith.addi(arith.muli(second_unit, int32(column_warps)), arith.remui(warp, int32(column_warps)))
    # A swizzle of 128 bytes exchanges the 8 chunks of a line by its number; one of 64 bytes the 4 chunks of two lines.
    swizzle = arith.divui(column, int32(128 // line_bytes))
    chunk = arith.xori(arith.addi(upper, int32(first // 8)), swizzle)
    place = arith.addi(
        arith.addi(arith.muli(unit, int32(unit_bytes)), arith.muli(column, int32(line_bytes))),
        arith.muli(chunk, int32(16)),
    )
    pointer = mgpu.getelementptr(mgpu.memref_ptr(ref), [place], ir.IntegerType.get_signless(8))
    registers = empty_registers(layout, (STEP, 8 * units))
    pair = ir.VectorType.get((2,), ref.type.element_type)
    loaded = [
        mgpu.bitcast(register, pair)
        for first_unit in range(0, units, 2 * column_warps)
        for register in load_matrices(pointer, first_unit * unit_bytes, transposed=False)
    ]
    for place, register in zip(np.ndindex(registers.shape), loaded, strict=True):
        registers[place] = register
    return array(registers, layout)


def _plain_multiply(sums: Array, a: Array, b: Array) -> Array:
    """The products of a step are exact in float32. They are added in ascending order, then to the sums."""

    def add_step(sums: Array, step: tuple[Array, Array]) -> tuple[Array, None]:
        a, b = (x.astype(ACCUMULATOR) for x in step)
        total = a[0][:, None] * b[0][None]
        for k in range(1, STEP):
            total = total + a[k][:, None] * b[k][None]
        return sums + total, None

    steps = a.shape[1] // STEP
    operands = a.T.reshape(steps, STEP, -1), b.reshape(steps, STEP, -1)
    return lax.scan(add_step, sums, operands)[0]


@with_twin(_plain_multiply)
def multiply(sums: Array, a: Array, b: Array) -> Array:
    """Returns `sums + a @ b`, K ascending in steps of `STEP`.

    Args:
        sums: `[rows, columns]` float32 in `accumulator_layout`.
        a: `[rows, K]` in `left_layout`.
        b: `[K, columns]` in `right_layout`, of the same dtype and number of `row_warps`.
    """
    return plgpu.mma(sums, a, b)
