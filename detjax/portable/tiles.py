"""Loops over row tiles of one fixed shape, in which every portable operation runs.

XLA chooses algorithms, fusions and vector widths by shape. A loop over tiles of `PORTABLE_ROWS` rows gives XLA the same
program for every number of rows. An optimization barrier at the loop's entrance keeps the surrounding program out:
operands and the trip count pass through it. So a loop of one trip stays a loop, no multiplication outside is fused with
an addition inside, and no constant operand is folded by an arithmetic other than the loop's.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PyTree

from detjax import backends
from detjax.contract import ACCUMULATOR, LANE_GROUP, LANES, PORTABLE_ROWS
from detjax.numerics import ceil_div, round_up


def map_rows(
    tile: Callable[..., PyTree[Array]], rows: PyTree[Array], shared: PyTree[Array], size: int = PORTABLE_ROWS
) -> PyTree[Array]:
    """Returns the results `[M, ...]` of `tile` for all rows.

    Args:
        tile: a function of the rows of one tile, `[size, ...]`, and of `shared`. Its results are arrays `[size, ...]`,
            and a row of them depends on the same row of its argument alone.
        rows: arrays `[M, ...]`, M >= 1. Zeros fill up the last tile.
        shared: arrays that every tile sees whole, such as weights.
        size: the rows of a tile.
    """
    count = jax.tree.leaves(rows)[0].shape[0]
    trips, rows, shared = _behind_barrier(count, rows, shared, size)
    out = jax.eval_shape(tile, _tile_at(rows, 0, size), shared)
    out = jax.tree.map(lambda leaf: jnp.zeros((round_up(count, size), *leaf.shape[1:]), leaf.dtype), out)

    def step(index: Array, out: PyTree[Array]) -> PyTree[Array]:
        result = lax.optimization_barrier(tile(_tile_at(rows, index, size), shared))
        return jax.tree.map(lambda o, r: lax.dynamic_update_slice_in_dim(o, r, index * size, 0), out, result)

    out = lax.fori_loop(0, trips, step, out)
    return jax.tree.map(lambda leaf: leaf[:count], out)


def fold_rows(
    tile: Callable[..., PyTree[Array]],
    initial: PyTree[Array],
    rows: PyTree[Array],
    shared: PyTree[Array],
    size: int = PORTABLE_ROWS,
) -> PyTree[Array]:
    """Returns the carry after the last tile, in ascending order of rows.

    Args:
        tile: a function of the carry, of the rows of one tile, `[size, ...]`, and of `shared`; it returns the next
            carry. Rows of zeros must add exact zeros to it.
        initial: the carry before the first tile.
        rows: arrays `[M, ...]`, M >= 1. Zeros fill up the last tile.
        shared: arrays that every tile sees whole.
        size: the rows of a tile.
    """
    count = jax.tree.leaves(rows)[0].shape[0]
    trips, rows, shared = _behind_barrier(count, rows, shared, size)
    initial = lax.optimization_barrier(initial)
    return lax.fori_loop(0, trips, lambda index, carry: tile(carry, _tile_at(rows, index, size), shared), initial)


def sum_of_rows(x: Array) -> Array:
    """Returns the sum `[...]` of a tile `[rows, ...]`, its rows added left to right.

    As in `row_sum`, every addition is written out, and a barrier keeps products in `x` from being fused with them.
    """
    x = lax.optimization_barrier(x)
    return functools.reduce(jnp.add, [x[row] for row in range(x.shape[0])])


def row_sum(x: Array) -> Array:
    """Returns the float32 sums `[..., 1]` of a tile's last axis, in the order of `contract.LANES`.

    Every addition is written out, because XLA could turn two reductions into one in an order of its own. The barrier
    keeps a product in `x` from being fused with the first addition.
    """
    # Lanes beyond the width's power of two hold zeros, which change no sum.
    lanes = min(LANES, max(LANE_GROUP, 1 << (x.shape[-1] - 1).bit_length()))
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % lanes)])
    x = lax.optimization_barrier(x.reshape(*x.shape[:-1], -1, lanes))
    x = functools.reduce(jnp.add, [x[..., step, :] for step in range(x.shape[-2])])
    x = functools.reduce(jnp.add, [x[..., lane::LANE_GROUP] for lane in range(LANE_GROUP)])
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x


def dot(x: Array, w: Array, contracted: tuple[int, int], batched: bool = False) -> Array:
    """Returns the float32 products of a tile with `w`, on the device's matrix unit.

    Args:
        x: a tile.
        w: the other operand.
        contracted: the axis of `x` and the axis of `w` that are summed over.
        batched: whether the leading axes of both are paired, such as heads.
    """
    if backends.target() == "cpu":
        # The conversion is exact, and it keeps XLA from the bfloat16 instructions that only some processors have.
        x, w = x.astype(ACCUMULATOR), w.astype(ACCUMULATOR)
    pairs = ((0,), (0,)) if batched else ((), ())
    dimensions = (((contracted[0],), (contracted[1],)), pairs)
    return lax.dot_general(x, w, dimensions, precision=lax.Precision.HIGHEST, preferred_element_type=ACCUMULATOR)


def _behind_barrier(count: int, rows: PyTree[Array], shared: PyTree[Array], size: int) -> tuple[Array, PyTree, PyTree]:
    """The number of tiles, the rows filled up to whole tiles, and `shared`, past the barrier at the loop's entrance."""
    padding = -count % size
    rows = jax.tree.map(lambda leaf: jnp.pad(leaf, [(0, padding)] + [(0, 0)] * (leaf.ndim - 1)), rows)
    return lax.optimization_barrier((jnp.int32(ceil_div(count, size)), rows, shared))


def _tile_at(rows: PyTree[Array], index: Array | int, size: int) -> PyTree[Array]:
    return jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, index * size, size, 0), rows)
