"""Rows in the registers of a warpgroup: layouts, and row sums in the order of `contract.LANES`.

A row is split into *pieces* of equal width. 2 to 128 threads hold it, each with `LANE_GROUP` neighbouring columns of
every piece. A row sum adds the columns of a thread left to right, then the threads' sums in pairs of neighbours, by
shuffles and across warps. This is the contract's tree, no matter how many threads share a row.
"""

import functools
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from detjax.contract import ACCUMULATOR, LANE_GROUP, LANES
from detjax.pallas.hopper.device import WARP, WARPGROUP

NO_AUTO_BARRIERS: Final = plgpu.CompilerParams(
    lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
)
"""Parameters of kernels in which no thread reads memory that another thread writes. Pallas' automatic barriers, which
stop the warpgroup at every load and store, are then not needed. Two CTAs may still write equal bits to the same
rows."""


def layout(rows: int, threads: int, numbers: int = 1) -> Any:
    """Returns the layout of pieces `[rows, LANE_GROUP * threads * numbers]`, in which `threads` threads hold each row.

    A column is a vector of `numbers` numbers. If the warpgroup has room for more than `rows` rows, it holds several
    copies of them. `rows` is a power of two up to `128 / threads`.
    """
    columns = LANE_GROUP * threads * numbers
    rows_in_warp = max(1, min(WARP // threads, rows))
    warps_in_row = max(1, threads // WARP)
    # The tiling appends these dimensions: row tiles, warps of a row, rows of a warp, threads that a warp has for a row,
    # 1, columns of a thread.
    tiling = plgpu.Tiling(((rows, columns), (rows_in_warp, columns // warps_in_row), (1, LANE_GROUP * numbers)))
    warps = _spread(((-6, rows // rows_in_warp), (-5, warps_in_row)), WARPGROUP // WARP)
    lanes = _spread(((-4, rows_in_warp), (-3, min(threads, WARP))), WARP)
    tiled = mgpu.TiledLayout(tiling, warps, lanes, -1, _check_canonical=False).canonicalize()
    return plgpu.Layout.TILED(tiled.tiling, tiled.warp_dims, tiled.lane_dims, tiled.vector_dim)


def _spread(dimensions: Sequence[tuple[int, int]], available: int) -> tuple[int | plgpu.Replicated, ...]:
    """Returns the dimensions, given with their sizes, that have more than one index.

    They follow the replication that makes them fill the available warps, or threads of a warp.
    """
    spread = [dimension for dimension, size in dimensions if size > 1]
    copies = available
    for _, size in dimensions:
        copies //= size
    return (plgpu.Replicated(copies), *spread) if copies > 1 else tuple(spread)


def broadcast(vector: jax.Array, shape: tuple[int, int], axis: int, layout: Any) -> jax.Array:
    """Returns a piece of the given shape with the vector along `axis`, repeated along the other axis."""
    return plgpu.layout_cast(lax.broadcast_in_dim(vector, shape, (axis,)), layout)


def load_weight(ref: Any, offset: float, shape: tuple[int, int], layout: Any) -> jax.Array:
    """Returns a float32 piece of the given shape that repeats a stored vector plus the offset in every row."""
    vector = plgpu.load(ref, layout=layout.reduce(0), optimized=False).astype(ACCUMULATOR)
    return broadcast(vector + offset, shape, 1, layout)


def rounded_squares(x: jax.Array) -> jax.Array:
    """Returns `x * x`, rounded before anything is added to it.

    XLA and ptxas would each fuse a product with a subsequent addition, and ptxas ignores optimization barriers. The
    maximum is a real instruction between the two that never changes the value.
    """
    return jnp.maximum(x * x, 0.0)


def logistic(x: jax.Array) -> jax.Array:
    """Returns `1 / (1 + exp(-x))`, each step rounded to float32."""
    return 1.0 / (1.0 + jnp.exp(-x))


def row_sums(pieces: Sequence[jax.Array]) -> jax.Array:
    """Returns the sums `[rows]` float32 of rows.

    Args:
        pieces: the pieces `[rows, columns]` of the rows in ascending order; `columns` is a power of two. Products among
            the elements must already be rounded; see `rounded_squares`.
    """
    count = min(LANES // pieces[0].shape[1], len(pieces))
    sums = [_piece_sums(functools.reduce(jnp.add, pieces[first::count])) for first in range(count)]
    while len(sums) > 1:
        # A last sum without a neighbour: in the contract its neighbour is a sum of lanes without elements, zero.
        sums = [functools.reduce(jnp.add, sums[i : i + 2]) for i in range(0, len(sums), 2)]
    return sums[0]


def _piece_sums(piece: jax.Array) -> jax.Array:
    """Returns Mosaic GPU's row sums of a piece with one register of `LANE_GROUP` numbers per thread and row.

    Mosaic GPU adds these left to right, then the threads' sums by butterfly shuffles of 1, 2, 4, ... and the warps'
    sums as (0 + 1) + (2 + 3). With more registers it would choose the number of partial sums itself.
    """
    return jnp.sum(piece, axis=1)
