"""A tile of attention with keys on its rows and queries on its columns, for calls with few queries.

The matrix unit has 64 rows and as few as 8 columns: a decode of 4 heads that share keys wastes 4 columns rather than 60
rows of exponentials, and a thread holds 8 scores of a block rather than 64. `online_softmax` says what is computed and
in which order, for this orientation and for the other one.
"""

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import Array, lax

from detjax.pallas.hopper.mosaic.layouts import PER_COLUMN


def along_columns(x: Array, shape: tuple[int, ...]) -> Array:
    """A number per column, repeated in every row."""
    return lax.broadcast_in_dim(x, shape, [1])


def column_indices(columns: int) -> Array:
    """Column indices of a tile, int32 `[columns]`."""
    return plgpu.broadcasted_iota("int32", (columns,), 0, layout=PER_COLUMN)
