"""Elementwise functions, and sums of squares, in plain JAX: no bit depends on shapes or the surrounding program."""

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, PyTree

from detjax.contract import ACCUMULATOR, LANES
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


def row_squares(leaf: Array, slices: int) -> Array:
    """Returns `[slices, rows]` float32; see `detjax.ops.elements.row_squares`."""
    flat = leaf.reshape(-1)
    flat = jnp.pad(flat, (0, round_up(flat.size, slices * LANES) - flat.size))
    return map_rows(lambda rows, _: row_sum(rows * rows)[:, 0], flat.reshape(-1, LANES), None).reshape(slices, -1)


def sums_in_order(numbers: Sequence[Array]) -> tuple[Array, ...]:
    """Returns float32 `[S]` for each array `[S, R]`; see `detjax.ops.elements.sums_in_order`."""

    def add(total: Array, columns: Array, _: None) -> Array:
        return functools.reduce(jnp.add, list(columns), total)

    lengths: dict[int, list[int]] = defaultdict(list)
    for index, x in enumerate(numbers):
        lengths[x.shape[1]].append(index)
    sums: dict[int, Array] = {}
    for indices in lengths.values():  # a loop for all runs of a length, since arrays often have equal shapes
        runs = jnp.concatenate([numbers[index] for index in indices])
        totals = fold_rows(add, jnp.zeros(len(runs), ACCUMULATOR), runs.T, None)
        sums |= zip(indices, jnp.split(totals, np.cumsum([len(numbers[index]) for index in indices])[:-1]), strict=True)
    return tuple(sums[index] for index in range(len(numbers)))
