"""Loops over row tiles of one fixed shape: how every portable operation runs.

XLA chooses algorithms, fusions and vector widths by shape. A tile of `PORTABLE_ROWS` rows in a loop gives it the same
program for every number of rows, and nothing of the surrounding program gets in: operands and trip count enter through
an optimization barrier, so a loop of one trip stays a loop, no neighbouring multiply meets an add of ours to be
contracted with it, and no constant operand is folded by other arithmetic than the loop's.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PyTree

from detjax import backends
from detjax.contract import ACCUMULATOR, LANE_GROUP, LANES, PORTABLE_ROWS


def map_rows(
    tile: Callable[..., PyTree[Array]], rows: PyTree[Array], shared: PyTree[Array], size: int = PORTABLE_ROWS
) -> PyTree[Array]:
    """Arrays `[M, ...]` of what `tile` makes of each row.

    Args:
        tile: takes `rows` cut to `[size, ...]` and `shared`; returns arrays `[size, ...]`, row by row.
        rows: arrays `[M, ...]`, M >= 1. The last tile is filled up with zeros.
        shared: arrays that every tile sees whole, as weights.
        size: rows of a tile.
    """
    count = jax.tree.leaves(rows)[0].shape[0]
    trips, rows, shared = _sealed(count, rows, shared, size)
    out = jax.eval_shape(tile, _tile_at(rows, 0, size), shared)
    out = jax.tree.map(lambda leaf: jnp.zeros((-(-count // size) * size, *leaf.shape[1:]), leaf.dtype), out)

    def step(index: Array, out: PyTree[Array]) -> PyTree[Array]:
        made = lax.optimization_barrier(tile(_tile_at(rows, index, size), shared))
        return jax.tree.map(lambda o, m: lax.dynamic_update_slice_in_dim(o, m, index * size, 0), out, made)

    out = lax.fori_loop(0, trips, step, out)
    return jax.tree.map(lambda leaf: leaf[:count], out)


def fold_rows(
    tile: Callable[..., PyTree[Array]],
    initial: PyTree[Array],
    rows: PyTree[Array],
    shared: PyTree[Array],
    size: int = PORTABLE_ROWS,
) -> PyTree[Array]:
    """`initial` after `tile(carry, rows of the tile, shared)` over the tiles in ascending order of rows.

    The last tile is filled up with zeros, which `tile` must turn into exact zeros.
    """
    count = jax.tree.leaves(rows)[0].shape[0]
    trips, rows, shared = _sealed(count, rows, shared, size)
    return lax.fori_loop(0, trips, lambda index, carry: tile(carry, _tile_at(rows, index, size), shared), initial)


def row_sum(x: Array) -> Array:
    """Sums `[..., 1]` over the last axis of a tile, float32, lanes first (see `contract.LANES`).

    Every addition is written out: XLA would make one reduction of two, in an order of its own. The barrier keeps a
    product in `x` from being fused with the first of them.
    """
    # Lanes beyond the width's power of two are zeros, which change no sum.
    lanes = min(LANES, max(LANE_GROUP, 1 << (x.shape[-1] - 1).bit_length()))
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % lanes)])
    x = lax.optimization_barrier(x.reshape(*x.shape[:-1], -1, lanes))
    x = functools.reduce(jnp.add, [x[..., step, :] for step in range(x.shape[-2])])
    x = functools.reduce(jnp.add, [x[..., lane::LANE_GROUP] for lane in range(LANE_GROUP)])
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x


def dot(x: Array, w: Array, contracted: tuple[int, int], batched: bool = False) -> Array:
    """Float32 products of a tile with `w` over the two contracted axes, on the device's matrix unit.

    Where `batched`, the leading axes of both are paired, as heads are.
    """
    if backends.target() == "cpu":
        # Exact, and keeps XLA from choosing between the bfloat16 instructions of different processors.
        x, w = x.astype(ACCUMULATOR), w.astype(ACCUMULATOR)
    pairs = ((0,), (0,)) if batched else ((), ())
    dimensions = (((contracted[0],), (contracted[1],)), pairs)
    return lax.dot_general(x, w, dimensions, precision=lax.Precision.HIGHEST, preferred_element_type=ACCUMULATOR)


def _sealed(count: int, rows: PyTree[Array], shared: PyTree[Array], size: int) -> tuple[Array, PyTree, PyTree]:
    padding = -count % size
    rows = jax.tree.map(lambda leaf: jnp.pad(leaf, [(0, padding)] + [(0, 0)] * (leaf.ndim - 1)), rows)
    return lax.optimization_barrier((jnp.int32(-(-count // size)), rows, shared))


def _tile_at(rows: PyTree[Array], index: Array | int, size: int) -> PyTree[Array]:
    return jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, index * size, size, 0), rows)
