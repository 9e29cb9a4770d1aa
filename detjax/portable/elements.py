"""Functions of single elements, whose bits depend on neither the arrays' shapes nor the program around them."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PyTree

from detjax import backends
from detjax.contract import LANES
from detjax.portable.tiles import map_rows


def map_elements(fn: Callable[..., PyTree[Array]], *arrays: Array, scalars: Sequence[Array] = ()) -> PyTree[Array]:
    """Returns `fn(*arrays, *scalars)`, where each element depends on the elements at the same place alone.

    On a CPU, compilers compute the last elements of an array by other instructions than those before, and fuse products
    with sums as they see fit. So there `fn` sees tiles of one shape. On accelerators every element goes through the
    same instructions, and the barriers keep the program around out of them.

    Args:
        fn: a function of arrays of one shape and of scalars, which returns arrays of that shape.
        arrays: of one shape, with one element at least.
        scalars: what all elements share.
    """
    shape = arrays[0].shape
    if backends.target() != "cpu":
        return lax.optimization_barrier(fn(*lax.optimization_barrier((*arrays, *scalars))))

    def as_rows(x: Array) -> Array:
        flat = x.reshape(-1)
        return jnp.pad(flat, (0, -flat.size % LANES)).reshape(-1, LANES)

    results = map_rows(lambda rows, scalars: fn(*rows, *scalars), tuple(map(as_rows, arrays)), tuple(scalars))
    size = arrays[0].size
    return jax.tree.map(lambda x: x.reshape(-1)[:size].reshape(shape), results)
