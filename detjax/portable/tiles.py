"""Loops over row tiles of one fixed shape, which all portable operations use.

XLA chooses algorithms, fusions and vector widths by shape. A loop over tiles of `PORTABLE_ROWS` rows gives XLA the same
program for every number of rows. An optimization barrier at the loop's entrance isolates it from the surrounding
program: operands and the trip count pass through it. So a loop of one trip stays a loop, no multiplication outside is
fused with an addition inside, and no constant operand is folded by arithmetic other than the loop's.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, PyTree

from detjax.contract import ACCUMULATOR, LANE_GROUP, LANES, PORTABLE_ROWS
from detjax.operands.numerics import ceil_div, round_up
from detjax.operands.rounding import rounded
from detjax.runtime import backends, varying


def map_rows(
    tile: Callable[..., PyTree[Array]], rows: PyTree[Array], shared: PyTree[Array], size: int = PORTABLE_ROWS
) -> PyTree[Array]:
    """Returns the results `[M, ...]` of `tile` for all rows.

    Args:
        tile: a function of the rows of one tile, `[size, ...]`, and of `shared`. Its results are arrays `[size, ...]`
            whose rows depend only on the same row of its argument.
        rows: arrays `[M, ...]`, M >= 1. Zeros pad the last tile.
        shared: arrays that every tile gets in full, such as weights.
        size: the rows of a tile.
    """
    count = jax.tree.leaves(rows)[0].shape[0]
    trips, rows, shared = _behind_barrier(count, rows, shared, size)
    out = jax.eval_shape(tile, _tile_at(rows, 0, size), shared)
    out = jax.tree.map(lambda leaf: jnp.zeros((round_up(count, size), *leaf.shape[1:]), leaf.dtype), out)

    def step(index: Array, out: PyTree[Array]) -> PyTree[Array]:
        result = lax.optimization_barrier(tile(_tile_at(rows, index, size), shared))
        return jax.tree.map(lambda o, r: lax.dynamic_update_slice_in_dim(o, r, index * size, 0), out, result)

    out = varying.fori_loop(0, trips, step, out)
    return jax.tree.map(lambda leaf: leaf[:count], out)


def fold_rows(
    tile: Callable[..., PyTree[Array]],
    initial: PyTree[Array],
    rows: PyTree[Array],
    shared: PyTree[Array],
    size: int = PORTABLE_ROWS,
) -> PyTree[Array]:
    """Returns the carry after the last tile, in ascending order of rows; see `map_rows`.

    `tile` is a function of the carry, the rows of one tile, and `shared`; it returns the next carry. Rows of zeros must
    add exact zeros to it.
    """
    count = jax.tree.leaves(rows)[0].shape[0]
    trips, rows, shared = _behind_barrier(count, rows, shared, size)
    initial = lax.optimization_barrier(initial)
    return varying.fori_loop(0, trips, lambda index, carry: tile(carry, _tile_at(rows, index, size), shared), initial)


class GroupTiles(NamedTuple):
    """Tiles of rows that are sorted by group; each tile is within one group.

    Attributes:
        number: the number of tiles.
        first: the first row of each.
        rows: the number of rows of its group in each.
        group: the group of each. Entries of the last three from `number` on are undefined.
    """

    number: Int[Array, ""]
    first: Int[Array, "M"]
    rows: Int[Array, "M"]
    group: Int[Array, "M"]


def group_tiles(group_sizes: Int[Array, "G"], rows: int, size: int, parts: Int[Array, "M"] | None = None) -> GroupTiles:
    """Returns tiles of up to `size` rows for groups of the given sizes, starting at each group's first row.

    Args:
        group_sizes: the rows of each group; the groups are consecutive, and rows after the last group belong to none.
        rows: all rows.
        size: the rows of a tile.
        parts: for each row a number; within a group, a tile starts where it changes. Rows with negative numbers are in
            no tile.
    """
    index = jnp.arange(rows, dtype=jnp.int32)
    group = jnp.searchsorted(jnp.cumsum(group_sizes, dtype=jnp.int32), index, side="right").astype(jnp.int32)
    labels = (group,) if parts is None else (group, parts)
    changes = jnp.any(jnp.stack([x[1:] != x[:-1] for x in labels]), axis=0)
    begins = jnp.concatenate([jnp.ones(1, bool), changes])
    run = lax.cummax(jnp.where(begins, index, 0))
    # The end of the run of each row.
    nexts = lax.cummin(jnp.where(begins, index, rows), reverse=True)
    ends = jnp.append(nexts[1:], jnp.int32(rows))
    is_first = ((index - run) % size == 0) & (group < group_sizes.shape[0])
    if parts is not None:
        is_first &= parts >= 0
    (first,) = jnp.nonzero(is_first, size=rows, fill_value=0)
    first = first.astype(jnp.int32)
    return GroupTiles(jnp.sum(is_first, dtype=jnp.int32), first, jnp.minimum(ends[first] - first, size), group[first])


def map_groups(
    tile: Callable[..., Array],
    rows: PyTree[Array],
    shared: PyTree[Array],
    tiles: GroupTiles,
    size: int = PORTABLE_ROWS,
) -> Array:
    """Returns the results `[M, ...]` of `tile` for rows that are sorted by group; zeros for rows without a group.

    `tile` is a function of the rows of one tile, their group, and `shared`; see `map_rows`. Within a tile, zeros
    replace the rows of other groups. `tiles` are from `group_tiles`, with the same size.
    """
    count, tiles, rows, shared = _groups_behind_barrier(tiles, rows, shared, size)
    out = jax.eval_shape(tile, _tile_at(rows, 0, size), tiles.group[0], shared)
    out = jnp.zeros((count + size, *out.shape[1:]), out.dtype)

    def step(index: Array, out: Array) -> Array:
        is_in_group, tile_rows = _group_tile(index, tiles, rows, size)
        result = lax.optimization_barrier(tile(tile_rows, tiles.group[index], shared))
        first = tiles.first[index]
        before = lax.dynamic_slice_in_dim(out, first, size, 0)
        return lax.dynamic_update_slice_in_dim(out, jnp.where(_column(is_in_group, result), result, before), first, 0)

    return varying.fori_loop(0, tiles.number, step, out)[:count]


def fold_groups(
    tile: Callable[..., PyTree[Array]],
    initial: PyTree[Array],
    rows: PyTree[Array],
    tiles: GroupTiles,
    size: int = PORTABLE_ROWS,
) -> PyTree[Array]:
    """Returns arrays `[G, ...]` after `tile` has added the rows of each group, in ascending order; see `map_groups`.

    `tile` is a function of one group's arrays and of the rows of one tile; it returns the group's next arrays. Rows of
    zeros must add exact zeros to them.
    """
    _, tiles, rows, _ = _groups_behind_barrier(tiles, rows, None, size)
    initial = lax.optimization_barrier(initial)

    def step(index: Array, carry: PyTree[Array]) -> PyTree[Array]:
        _, tile_rows = _group_tile(index, tiles, rows, size)
        group = tiles.group[index]
        updated = tile(jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, group, 0, keepdims=False), carry), tile_rows)
        return jax.tree.map(lambda x, y: lax.dynamic_update_index_in_dim(x, y, group, 0), carry, updated)

    return varying.fori_loop(0, tiles.number, step, initial)


def _groups_behind_barrier(
    tiles: GroupTiles, rows: PyTree[Array], shared: PyTree[Array], size: int
) -> tuple[int, GroupTiles, PyTree, PyTree]:
    """Returns the number of rows, and from a barrier: tiles, rows padded with zeros for the last tile, `shared`."""
    count = jax.tree.leaves(rows)[0].shape[0]
    rows = jax.tree.map(lambda leaf: jnp.pad(leaf, [(0, size)] + [(0, 0)] * (leaf.ndim - 1)), rows)
    return count, *lax.optimization_barrier((tiles, rows, shared))


def _group_tile(index: Array, tiles: GroupTiles, rows: PyTree[Array], size: int) -> tuple[Array, PyTree[Array]]:
    """Returns which rows of a tile belong to its group, and the tile with zeros in place of the others."""
    is_in_group = jnp.arange(size, dtype=jnp.int32) < tiles.rows[index]
    tile_rows = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, tiles.first[index], size, 0), rows)
    return is_in_group, jax.tree.map(lambda x: jnp.where(_column(is_in_group, x), x, jnp.zeros_like(x)), tile_rows)


def _column(flags: Array, like: Array) -> Array:
    """Broadcasts flags of rows to the shape of rows."""
    return jnp.broadcast_to(flags.reshape(-1, *[1] * (like.ndim - 1)), like.shape)


def each_row(tile: Callable[..., PyTree[Array]], rows: PyTree[Array], shared: PyTree[Array]) -> PyTree[Array]:
    """Returns the result of `map_rows` for a `tile` of elementwise arithmetic whose own barriers fix the roundings.

    On accelerators every element goes through the same instructions, so all rows are one tile there.
    """
    if backends.target() == "cpu":
        return map_rows(tile, rows, shared)
    return lax.optimization_barrier(tile(*lax.optimization_barrier((rows, shared))))


def sealed[T: PyTree[Array]](x: T) -> T:
    """Returns float arrays that no compiler can fuse with their producers, so later arithmetic uses rounded values.

    A compiler that fuses a product with a sum does not round in between. A barrier separates the two, but on GPUs it
    also puts them into separate kernels, whose results pass through memory. So there the bits are combined with a
    number that changes none of them, which XLA cannot know, since that number itself comes from a barrier.
    """
    if backends.target() != "gpu":
        return lax.optimization_barrier(x)
    zero = lax.optimization_barrier(jnp.zeros((), jnp.uint32))

    def seal(x: Array) -> Array:
        bits = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
        return lax.bitcast_convert_type(lax.bitcast_convert_type(x, bits) ^ zero.astype(bits), x.dtype)

    return jax.tree.map(seal, x)


def fused_multiply_add(x: Array, y: Array, z: Array) -> Array:
    """Returns `x * y + z` for float32 arrays, on GPUs rounded once as in kernels, where XLA would round the product."""
    if backends.target() != "gpu":
        return x * y + z
    with jax.enable_x64(True):
        x, y, z = (lax.convert_element_type(a, jnp.float64) for a in (x, y, z))
        product = x * y  # exact
        total = product + z
        part = total - product
        error = (product - (total - part)) + (z - part)  # exact (Knuth's two-sum)
        # Rounded to odd, the sum rounds to the float32 number to which the exact sum rounds (Boldo and Melquiond 2008).
        bits = lax.bitcast_convert_type(total, jnp.int64)
        is_even = (error != 0) & (bits & 1 == 0) & jnp.isfinite(total)
        towards_zero = (error > 0) != (total > 0)
        odd = lax.bitcast_convert_type(bits + jnp.where(towards_zero, -1, 1), jnp.float64)
        return lax.convert_element_type(jnp.where(is_even, odd, total), jnp.float32)


def sum_of_rows(x: Array) -> Array:
    """Returns the sum `[...]` of a tile `[rows, ...]`, its rows added left to right.

    As in `row_sum`, every addition is written out, and a barrier keeps products in `x` from being fused with them.
    """
    x = lax.optimization_barrier(x)
    return functools.reduce(jnp.add, [x[row] for row in range(x.shape[0])])


def initial_sum(previous: Array | None, shape: tuple[int, ...]) -> Array:
    """Returns the float32 sum that gradients of a given shape are added to: the previous one, or zeros."""
    return jnp.zeros(shape, ACCUMULATOR) if previous is None else previous.reshape(shape)


def final_sum(total: Array, previous: Array | None, like: Array) -> Array:
    """Returns a sum in the shape of its operand `like`, and rounded to its dtype unless there was a previous sum."""
    total = total.reshape(like.shape)
    return rounded(total, like.dtype) if previous is None else total


def row_sum(x: Array) -> Array:
    """Returns the float32 sums `[..., 1]` of a tile's last axis, in the order of `contract.LANES`.

    Every addition is written out, because XLA could merge two reductions into one in another order. The barrier
    keeps a product in `x` from being fused with the first addition.
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
    """Returns the float32 products of a tile with `w`, on the device's matrix unit.

    The axes `contracted`, of `x` and of `w`, are summed over. If `batched`, their leading axes, such as heads, are
    paired.
    """
    if backends.target() == "cpu":
        # The conversion is exact, and avoids the bfloat16 instructions that only some processors have.
        x, w = x.astype(ACCUMULATOR), w.astype(ACCUMULATOR)
    pairs = ((0,), (0,)) if batched else ((), ())
    dimensions = (((contracted[0],), (contracted[1],)), pairs)
    return lax.dot_general(x, w, dimensions, precision=lax.Precision.HIGHEST, preferred_element_type=ACCUMULATOR)


def _behind_barrier(count: int, rows: PyTree[Array], shared: PyTree[Array], size: int) -> tuple[Array, PyTree, PyTree]:
    """Returns the number of tiles, the rows padded to whole tiles, and `shared`, all from one barrier."""
    padding = -count % size
    rows = jax.tree.map(lambda leaf: jnp.pad(leaf, [(0, padding)] + [(0, 0)] * (leaf.ndim - 1)), rows)
    return lax.optimization_barrier((jnp.int32(ceil_div(count, size)), rows, shared))


def _tile_at(rows: PyTree[Array], index: Array | int, size: int) -> PyTree[Array]:
    return jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, index * size, size, 0), rows)
