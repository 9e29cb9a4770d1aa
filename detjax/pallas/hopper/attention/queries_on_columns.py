"""Attention tiles with keys on the rows and queries on the columns, for calls with few queries.

The matrix unit has 64 rows but as few as 8 columns. So a decode of 4 heads that share keys wastes 4 columns instead of
60 rows of exponentials, and a thread holds 8 scores of a block instead of 64. `online_softmax` has the arithmetic and
its order for both orientations.
"""

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import Array, lax

from detjax.pallas.hopper.mosaic.layouts import PER_COLUMN


def along_columns(x: Array, shape: tuple[int, ...]) -> Array:
    """Repeats one number per column in every row."""
    return lax.broadcast_in_dim(x, shape, [1])


def column_indices(columns: int) -> Array:
    """Returns the column indices of a tile, int32 `[columns]`."""
    return plgpu.broadcasted_iota("int32", (columns,), 0, layout=PER_COLUMN)
