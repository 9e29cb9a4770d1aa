"""A tile of attention with queries on its rows, as prefill and the gradients have it."""

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from detjax.contract import ACCUMULATOR, KV_BLOCK
from detjax.pallas.hopper.mosaic.layouts import MATRIX, PER_ROW, ROWS
from detjax.pallas.hopper.mosaic.tiles import clear_rows_in_registers


def along_rows(x: Array, shape: tuple[int, ...]) -> Array:
    """A number per row, repeated in every column."""
    return lax.broadcast_in_dim(x, shape, [0])


def splat(value: Any, shape: tuple[int, ...], layout: Any = None) -> Array:
    """The same float32 number everywhere.

    The default layout is that of a tile for two axes, and of a number for each of its rows for one axis.
    """
    filled = jnp.full(shape, value, ACCUMULATOR)
    return plgpu.layout_cast(filled, layout or (MATRIX if len(shape) == 2 else PER_ROW))


def indices(axis: int, shape: tuple[int, ...] = (ROWS, KV_BLOCK)) -> Array:
    """Row or column of each element of a tile."""
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=MATRIX)


def row_indices() -> Array:
    """Row indices of a tile, int32 `[ROWS]`."""
    return plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=PER_ROW)


def clear_tail(rows: Any, length: Array) -> None:
    """Zeros after the first `length` of `ROWS` rows of keys or values in shared memory, for the matrix unit to see.

    What a page holds after its request's last token may be NaN, and 0 * NaN is not 0.
    """
    clear_rows_in_registers(rows, length)
    plgpu.commit_smem()
