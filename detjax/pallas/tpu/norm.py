"""RMS norm on TPUs (Mosaic TPU): a tile of whole rows is brought to VMEM once, added piece by piece, and written.

The speed is that of memory. Gradients are the portable backend's.
"""

from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.experimental.pallas as pl
from jax import Array, lax
from jax.experimental.pallas import tpu as pltpu

from detjax.contract import ACCUMULATOR
from detjax.pallas.tpu.device import check_dtypes
from detjax.pallas.tpu.rows import PIECE, filled, pieces_of, row_sum, row_tile, squares
from detjax.portable import norm as portable
from detjax.portable.tiles import flat_rows

# Row sums in the same order, arithmetic on single elements, and tiles of one shape: XLA has nothing to choose here.
backward = portable.backward

TILE_BYTES: Final = 256 * 1024
"""Of one operand's tile: enough for a step of the grid to take as long as its copies, several times over in VMEM."""
MOST_ROWS: Final = 256
"""Of a tile: short rows fill registers long before they fill VMEM."""


def forward(
    x: Array, weight: Array, residual: Array | None, *, eps: float, weight_offset: float, rows: int | None = None
) -> tuple[Array, Array | None]:
    """`(y, None)`, or `(y, h)` with `h = rn(x + residual)` where there is a residual; y is the norm of h then.

    `rows` of a tile are a schedule: no bit depends on them.

    Raises:
        NotImplementedError: a dtype is none of `tpu.DTYPES`.
    """
    check_dtypes("rms_norm", x, weight, residual)
    operands = (flat_rows(x), *(() if residual is None else (flat_rows(residual),)))
    y, *h = _kernel(operands, weight[None], eps, weight_offset, rows)
    return y.reshape(x.shape), h[0].reshape(x.shape) if h else None


def _kernel(
    operands: tuple[Array, ...], weight: Array, eps: float, weight_offset: float, rows: int | None
) -> Sequence[Array]:
    """The norm of `[M, D]`, and the sum of the operands where there are two."""
    (M, D), dtype = operands[0].shape, operands[0].dtype
    pieces = pieces_of(D)
    R = rows or row_tile(dtype, D * dtype.itemsize, TILE_BYTES, MOST_ROWS)

    def body(*refs: Any) -> None:
        *operand_refs, weight_ref, y_ref = refs[: len(operands) + 2]
        h_ref = refs[-1] if len(operands) > 1 else operand_refs[0]

        def at(piece: int) -> tuple[slice, slice]:
            return slice(None), slice(piece * PIECE, (piece + 1) * PIECE)

        if len(operands) > 1:
            for piece in map(at, range(pieces)):
                left, right = (ref[piece].astype(ACCUMULATOR) for ref in operand_refs)
                h_ref[piece] = (left + right).astype(dtype)

        def square(piece: int) -> Array:
            return filled(squares(h_ref[at(piece)].astype(ACCUMULATOR)), D - piece * PIECE, 0.0)

        scale = lax.rsqrt(row_sum([square(piece) for piece in range(pieces)]) / D + eps)
        for piece in map(at, range(pieces)):
            w = weight_ref[piece].astype(ACCUMULATOR) + weight_offset
            y_ref[piece] = (h_ref[piece].astype(ACCUMULATOR) * scale * w).astype(dtype)

    tile = pl.BlockSpec((R, pieces * PIECE), lambda i: (i, 0))
    return pl.pallas_call(
        body,
        out_shape=[jax.ShapeDtypeStruct((M, D), dtype)] * len(operands),
        grid=(pl.cdiv(M, R),),
        in_specs=[*[tile] * len(operands), pl.BlockSpec((1, pieces * PIECE), lambda i: (0, 0))],
        out_specs=[tile] * len(operands),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        name="rms_norm",
    )(*operands, weight)
