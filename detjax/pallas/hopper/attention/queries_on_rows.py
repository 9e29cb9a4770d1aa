"""Attention tiles with queries on the rows, as prefill and gradients have them."""

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from detjax.contract import ACCUMULATOR, KV_BLOCK
from detjax.pallas.hopper.mosaic.layouts import MATRIX, PER_ROW, ROWS
from detjax.pallas.hopper.mosaic.tiles import clear_rows_in_registers


def along_rows(x: Array, shape: tuple[int, ...]) -> Array:
    """Repeats one number per row in every column."""
    return lax.broadcast_in_dim(x, shape, [0])


def splat(value: Any, shape: tuple[int, ...], layout: Any = None) -> Array:
    """Returns an array of one float32 number; the default layout is `MATRIX` for two axes, `PER_ROW` for one."""
    filled = jnp.full(shape, value, ACCUMULATOR)
    return plgpu.layout_cast(filled, layout or (MATRIX if len(shape) == 2 else PER_ROW))


def indices(axis: int, shape: tuple[int, ...] = (ROWS, KV_BLOCK)) -> Array:
    """Returns the row or column of each element of a tile, int32."""
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=MATRIX)


def row_indices() -> Array:
    """Returns the row indices of a tile, int32 `[ROWS]`."""
    return plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=PER_ROW)


def clear_tail(rows: Any, length: Array) -> None:
    """Zeroes all but the first `length` of `ROWS` rows of keys or values in shared memory, visibly to the matrix unit.

    A page may hold NaN after its request's last token, and 0 * NaN is not 0.
    """
    clear_rows_in_registers(rows, length)
    plgpu.commit_smem()
