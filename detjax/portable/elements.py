"""Elementwise functions, and sums of squares, in plain JAX: no bit depends on shapes or the surrounding program."""

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PyTree

from detjax.contract import LANES, PORTABLE_ROWS
from detjax.operands.numerics import round_up
from detjax.portable.tiles import fold_rows, map_rows, row_sum
from detjax.runtime import backends


def map_elements(
    fn: Callable[..., PyTree[Array]],
    *arrays: Array,
    scalars: Sequence[Array] = (),
    overwritten: Mapping[int, int] = MappingProxyType({}),
) -> PyTree[Array]:
    """Returns `fn(*arrays, *scalars)`, where each element depends only on the elements at the same place.

    On a CPU, compilers use different instructions for the last elements of an array, and fuse products with sums at
    will. So there `fn` sees tiles of one shape. On accelerators every element goes through the same instructions, and
    barriers isolate them from the surrounding program.

    Args:
        fn: a function of arrays of one shape and of scalars, which returns arrays of that shape.
        arrays: arrays of one shape, with at least one element.
        scalars: shared by all elements.
        overwritten: see `detjax.ops.elements`; here XLA decides what to overwrite.
    """
    del overwritten
    shape = arrays[0].shape
    if backends.target() != "cpu":
        return lax.optimization_barrier(fn(*lax.optimization_barrier((*arrays, *scalars))))

    def as_rows(x: Array) -> Array:
        flat = x.reshape(-1)
        return jnp.pad(flat, (0, -flat.size % LANES)).reshape(-1, LANES)

    results = map_rows(lambda rows, scalars: fn(*rows, *scalars), tuple(map(as_rows, arrays)), tuple(scalars))
    size = arrays[0].size
    return jax.tree.map(lambda x: x.reshape(-1)[:size].reshape(shape), results)


def slice_squares(leaf: Array, slices: int) -> Array:
    """Returns `[slices]` float32, the sum of the squares of each slice of an array; see `detjax.ops.elements`."""
    flat = leaf.reshape(-1)
    flat = jnp.pad(flat, (0, round_up(flat.size, slices * LANES) - flat.size))
    return lax.map(_sum_of_squares, flat.reshape(slices, -1, LANES))


def _sum_of_squares(rows: Array) -> Array:
    """The sum of the squares of rows `[M, LANES]`, added row by row."""

    def add(carry: Array, rows: Array, _: None) -> Array:
        sums = row_sum(rows * rows)[:, 0]
        return functools.reduce(jnp.add, [sums[row] for row in range(PORTABLE_ROWS)], carry)

    return fold_rows(add, jnp.float32(0), rows, None)
