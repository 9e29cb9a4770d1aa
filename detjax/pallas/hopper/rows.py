"""Rows in the registers of a warpgroup: layouts, and row sums in the order of `contract.LANES`.

A row belongs to 2 to 128 threads, each of which holds `LANE_GROUP` neighbouring columns of every piece of the row. A
thread's own columns are then added left to right and the threads' sums in pairs of neighbours, by shuffles and across
warps: the contract's tree, however many threads share a row.
"""

import functools
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from detjax.contract import LANE_GROUP, LANES

WARP: Final = 32
WARPGROUP: Final = 128


def layout(rows: int, threads: int) -> Any:
    """The layout of pieces `[rows, LANE_GROUP * threads]`, each row held by `threads` threads.

    Rows fewer than the warpgroup has room for are held several times over. `rows` is a power of two up to
    `128 / threads`.
    """
    columns = LANE_GROUP * threads
    rows_in_warp = max(1, min(WARP // threads, rows))
    warps_in_row = max(1, threads // WARP)
    # Dimensions behind the tiling: row tiles, warps of a row, rows in a warp, threads of a row in a warp, 1, columns.
    tiling = plgpu.Tiling(((rows, columns), (rows_in_warp, columns // warps_in_row), (1, LANE_GROUP)))
    warps = _spread(((-6, rows // rows_in_warp), (-5, warps_in_row)), WARPGROUP // WARP)
    lanes = _spread(((-4, rows_in_warp), (-3, min(threads, WARP))), WARP)
    tiled = mgpu.TiledLayout(tiling, warps, lanes, -1, _check_canonical=False).canonicalize()
    return plgpu.Layout.TILED(tiled.tiling, tiled.warp_dims, tiled.lane_dims, tiled.vector_dim)


def _spread(dimensions: Sequence[tuple[int, int]], available: int) -> tuple[int | plgpu.Replicated, ...]:
    """The dimensions with more than one index; before them, what replication it takes to fill what is available."""
    spread = [dimension for dimension, size in dimensions if size > 1]
    copies = available
    for _, size in dimensions:
        copies //= size
    return (plgpu.Replicated(copies), *spread) if copies > 1 else tuple(spread)


def widened(x: jax.Array, shape: tuple[int, int], axis: int, layout: Any) -> jax.Array:
    """A vector along `axis` of a piece of the shape given, repeated along the other."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, (axis,)), layout)


def squares(x: jax.Array) -> jax.Array:
    """`x * x`, rounded before anything is added to it.

    Two compilers would fuse a product with the addition behind it. The maximum keeps its value and stands between.
    """
    return jnp.maximum(x * x, 0.0)


def row_sums(pieces: Sequence[jax.Array]) -> jax.Array:
    """Sums `[rows]` float32 of rows given as pieces `[rows, columns]`, which ascend; `columns` is a power of two.

    Products among the elements must be rounded already, see `squares`.
    """
    count = min(LANES // pieces[0].shape[1], len(pieces))
    sums = [_sum_of_piece(functools.reduce(jnp.add, pieces[first::count])) for first in range(count)]
    while len(sums) > 1:
        # Where the last one has no neighbour, that would be lanes of zeros.
        sums = [functools.reduce(jnp.add, sums[i : i + 2]) for i in range(0, len(sums), 2)]
    return sums[0]


def _sum_of_piece(piece: jax.Array) -> jax.Array:
    """Mosaic GPU's sum of a piece that has one register of `LANE_GROUP` numbers per row and thread.

    It adds these left to right, then the threads' by butterfly shuffles of 1, 2, 4, ... and the warps' as (0 + 1) +
    (2 + 3). With more registers it would choose a number of partial sums by itself.
    """
    return jnp.sum(piece, axis=1)
