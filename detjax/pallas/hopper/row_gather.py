"""Rows of an array by their numbers on Hopper GPUs (Mosaic GPU), for many rows.

Experts take their tokens' rows, which are gathered in the order of experts: for a prompt of 8192 tokens as many bytes
as half of the experts' weights. Here a CTA copies some rows in vectors of 16 bytes, and all loads of a thread are under
way before its first store: 81,792 rows of 2048 numbers take 125 us on an H200, and 222 by XLA's kernel.
"""

from typing import Any, Final

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from detjax.contract import LANE_GROUP
from detjax.operands.numerics import ceil_div
from detjax.pallas.hopper.device import WARP, WARPGROUP
from detjax.pallas.hopper.rows import NO_AUTO_BARRIERS, layout

_VECTOR_BYTES: Final = 16
_MIN_ROWS: Final = 1024
"""Fewest rows for which the kernel is used. With 2944 rows it takes half of XLA's time; fewer were not measured."""
_MAX_ROWS: Final = 8
_MAX_REGISTERS: Final = 64
"""Registers of a thread that hold elements."""


def serves(x: Array, index: Array) -> bool:
    """Returns whether the kernel serves these operands."""
    is_wide = x.ndim == 2 and x.shape[1] % (WARP * _vector(x.dtype)) == 0
    return is_wide and index.ndim == 1 and len(index) >= _MIN_ROWS and x.dtype.itemsize in (2, 4) and len(x) > 0


def _vector(dtype: Any) -> int:
    """Returns the elements of a vector."""
    return _VECTOR_BYTES // jnp.dtype(dtype).itemsize


def rows_at(x: Array, index: Array) -> Array:
    """Returns rows `[M, D]` of an array `[N, D]`, and zeros for an index from N on.

    Args:
        x: the array; `serves` must have returned True.
        index: the rows' numbers, int32 `[M]`, from 0 on.
    """
    (known, width), count, vector = x.shape, len(index), _vector(x.dtype)
    threads = next(n for n in (WARPGROUP, WARPGROUP // 2, WARP) if width % (n * vector) == 0)
    columns = threads * vector
    registers = width * x.dtype.itemsize // (4 * threads)
    rows = max(1, min(_MAX_ROWS, _MAX_REGISTERS // registers))
    piece_layout = layout(1, threads, vector // LANE_GROUP)
    parts = [pl.ds(start, columns) for start in range(0, width, columns)]

    def body(x_ref: Any, index_ref: Any, y_ref: Any) -> None:
        # The last CTA copies some rows of its neighbour once more.
        first = jnp.minimum(lax.axis_index("rows") * rows, count - rows)
        numbers = [index_ref[first + i] for i in range(rows)]
        loaded = []
        for number in numbers:
            row = pl.ds(jnp.minimum(number, known - 1), 1)
            loaded.append([plgpu.load(x_ref.at[row, part], layout=piece_layout, optimized=False) for part in parts])
        for i, (number, pieces) in enumerate(zip(numbers, loaded, strict=True)):
            for part, piece in zip(parts, pieces, strict=True):
                y_ref[pl.ds(first + i, 1), part] = jnp.where(number < known, piece, jnp.zeros_like(piece))

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((count, width), x.dtype),
        grid=(ceil_div(count, rows),),
        grid_names=("rows",),
        kernel_name="row_gather",
        compiler_params=NO_AUTO_BARRIERS,
    )(x, index)
