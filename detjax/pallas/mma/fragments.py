"""Tiles of matrices in the registers of a warpgroup, and their product by `mma.sync.m16n8k16`.

The four warps lie along the rows of a product, along its columns, or two by two: `row_warps` of them along the rows.
Rows come in `16 * row_warps`, columns in `8 * (4 / row_warps)`, K in 16s.
"""

from typing import Any, Final, Literal

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import DTypeLike

from detjax.contract import ACCUMULATOR
from detjax.pallas.hopper.mosaic import with_twin

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
