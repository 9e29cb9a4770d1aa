"""RMS norm on TPUs (Mosaic TPU): a tile of whole rows is loaded into VMEM once, summed piece by piece, and written.

It is bound by memory. The gradients are the portable backend's.
"""

import dataclasses
from typing import Any, Final, NamedTuple

import jax
import jax.experimental.pallas as pl
from jax import Array, lax
from jax.experimental.pallas import tpu as pltpu

from detjax.contract import ACCUMULATOR
from detjax.operands.numerics import flat_rows
from detjax.pallas.tpu.device import check_dtypes
from detjax.pallas.tpu.rows import (
    PIECE,
    Problem,
    Schedule,
    filled_from,
    piece_columns,
    piece_count,
    row_sum,
    rows_within,
    squares,
)
from detjax.portable import norm as portable

# The portable program adds rows in the same order, computes everything else elementwise, and has tiles of one shape, so
# it leaves XLA no choice that could change a bit.
backward = portable.backward

TILE_BYTES: Final = 256 * 1024
"""Bytes of one operand's tile. A grid step is then bound by its copies, and the tiles of x, residual, y and h, two of
each since copies overlap with computation, are 2 MiB of the 16 MiB of VMEM."""
MAX_ROWS: Final = 256
"""Most rows of a tile: short rows fill the registers long before they fill VMEM."""


def default_schedule(problem: Problem) -> Schedule:
    """Returns the schedule for rows of this width and dtype."""
    row_bytes = problem.width * problem.dtype.itemsize
    return Schedule(rows_within(problem.dtype, row_bytes, TILE_BYTES, MAX_ROWS))


def forward(
    x: Array,
    weight: Array,
    residual: Array | None,
    *,
    eps: float,
    weight_offset: float,
    schedule: Schedule | None = None,
) -> tuple[Array, Array | None]:
    """Returns `(y, None)`, or with a residual `(y, h)`: the norm y of `h = rn(x + residual)`.

    Args:
        x: rows `[*B, D]`.
        weight: `[D]`.
        residual: `[*B, D]`, or None.
        eps: added to the mean of the squares.
        weight_offset: added to the weight, in float32.
        schedule: default: `default_schedule`'s.

    Raises:
        NotImplementedError: a dtype is not one of `device.DTYPES`.
        ValueError: the schedule does not fit the problem.
    """
    check_dtypes("rms_norm", x, weight, residual)
    problem = Problem("rms_norm", x.shape[-1], x.dtype)
    schedule = schedule or default_schedule(problem)
    schedule.check(problem)

    inputs = _Inputs(flat_rows(x), None if residual is None else flat_rows(residual))
    rows, pieces = schedule.rows, piece_count(problem.width)
    tile = pl.BlockSpec((rows, pieces * PIECE), lambda i: (i, 0))
    residual_tile = None if residual is None else tile
    shape = jax.ShapeDtypeStruct(inputs.x.shape, x.dtype)

    def kernel(inputs: _Inputs, weight: Any, outputs: _Outputs) -> None:
        _Kernel(inputs, weight, outputs, problem.width, eps, weight_offset).run()

    (outputs,) = pl.pallas_call(
        kernel,
        out_shape=[_Outputs(shape, None if residual is None else shape)],
        grid=(pl.cdiv(shape.shape[0], rows),),
        in_specs=[_Inputs(tile, residual_tile), pl.BlockSpec((1, pieces * PIECE), lambda i: (0, 0))],
        out_specs=[_Outputs(tile, residual_tile)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        name="rms_norm",
    )(inputs, weight[None])
    return outputs.y.reshape(x.shape), None if outputs.h is None else outputs.h.reshape(x.shape)


class _Inputs(NamedTuple):
    """The rows `[M, D]` that the kernel reads, or their tile; residual: None without one."""

    x: Any
    residual: Any


class _Outputs(NamedTuple):
    """The rows `[M, D]` that the kernel writes, or their tile; h: None without a residual."""

    y: Any
    h: Any


@dataclasses.dataclass(frozen=True, eq=False)
class _Kernel:
    """The norm of one tile of rows, with references to its arrays in VMEM."""

    inputs: _Inputs
    weight: Any
    outputs: _Outputs
    width: int
    eps: float
    weight_offset: float

    def run(self) -> None:
        pieces = range(piece_count(self.width))
        if self.inputs.residual is not None:
            for piece in pieces:
                self.add_residual(piece)
        scale = lax.rsqrt(row_sum([self.square(piece) for piece in pieces]) / self.width + self.eps)
        for piece in pieces:
            self.store(piece, scale)

    @property
    def normalized(self) -> Any:
        """The normalized rows: x, or the rounded sum h, read back after it was written."""
        return self.inputs.x if self.outputs.h is None else self.outputs.h

    def add_residual(self, piece: int) -> None:
        place = slice(None), piece_columns(piece)
        x, residual = (ref[place].astype(ACCUMULATOR) for ref in self.inputs)
        self.outputs.h[place] = (x + residual).astype(self.outputs.h.dtype)

    def square(self, piece: int) -> Array:
        x = self.normalized[:, piece_columns(piece)].astype(ACCUMULATOR)
        return filled_from(squares(x), self.width - piece * PIECE, 0.0)

    def store(self, piece: int, scale: Array) -> None:
        place = slice(None), piece_columns(piece)
        weight = self.weight[place].astype(ACCUMULATOR) + self.weight_offset
        y = self.normalized[place].astype(ACCUMULATOR) * scale * weight
        self.outputs.y[place] = y.astype(self.outputs.y.dtype)
