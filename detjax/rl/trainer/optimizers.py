"""AdamW and the norm of gradients, with bits that depend on neither shapes nor programs nor devices."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float32, Int32, PyTree

from detjax.contract import ACCUMULATOR
from detjax.ops.elements import map_elements, slice_squares


class AdamState(NamedTuple):
    """The state of `adamw`.

    Attributes:
        updates: the number of updates.
        mean: the moving averages of the gradients, float32.
        square: the moving averages of their squares, float32.
    """

    updates: Int32[Array, ""]
    mean: PyTree[Float32[Array, "..."]]
    square: PyTree[Float32[Array, "..."]]


def adamw(
    learning_rate: float | Callable[[Array], Array],
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> optax.GradientTransformation:
    """Returns AdamW (Loshchilov & Hutter 2019), for float32 gradients and parameters.

    `optax.adamw` has the same formula. Its bits depend on the shapes of the arrays, and on the program that it is part
    of, because a CPU's compiler treats the last elements of an array differently and folds what it knows.

    Args:
        learning_rate: the step size, or a function of the number of updates before this one, as optax has them.
        b1: the decay of the gradients' averages.
        b2: the decay of the squares' averages.
        eps: what is added to the root of the squares' average.
        weight_decay: the factor of the parameters that is subtracted, times the step size.
    """

    def init(params: PyTree[Array]) -> AdamState:
        for path, leaf in jax.tree.leaves_with_path(params):
            if leaf.dtype != ACCUMULATOR:
                raise TypeError(
                    f"adamw: {jax.tree_util.keystr(path)} has dtype {leaf.dtype}; accepted: float32. Train float32 "
                    "masters, and round them to the weights."
                )
        return AdamState(jnp.int32(0), jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, AdamState]:
        if params is None:
            raise ValueError("adamw: params is None; accepted: the parameters, whose decay is part of the update")
        count = lax.optimization_barrier(optax.safe_increment(state.updates))
        step = count.astype(ACCUMULATOR)
        rate = learning_rate(count - 1) if callable(learning_rate) else learning_rate
        # What depends on the number of updates is computed once and sealed: as a constant it would be folded, and a
        # compiler may turn a division by it into a product with its reciprocal.
        corrections = [_sealed(1 - _sealed(jnp.float32(b) ** step)) for b in (b1, b2)]
        scalars = _sealed((jnp.asarray(rate, ACCUMULATOR), *(1 / correction for correction in corrections)))

        def next_leaf(gradient: Array, mean: Array, square: Array, param: Array) -> tuple[Array, Array, Array]:
            def element(g: Array, m: Array, v: Array, p: Array, *scalars: Array) -> tuple[Array, Array, Array]:
                rate, mean_factor, square_factor = scalars
                # Every product is rounded before it is added, and the averages before they are used: a compiler that
                # computes them twice may otherwise fuse a product with a sum in one place and not in the other.
                m = _sealed(_sealed(b1 * m) + _sealed((1 - b1) * g))
                v = _sealed(_sealed(b2 * v) + _sealed((1 - b2) * _sealed(g * g)))
                change = _sealed(m * mean_factor) / (jnp.sqrt(_sealed(v * square_factor)) + eps)
                return -rate * (change + _sealed(weight_decay * p)), m, v

            averages = {1: 1, 2: 2}
            return map_elements(element, gradient, mean, square, param, scalars=scalars, overwritten=averages)

        results = jax.tree.map(next_leaf, updates, state.mean, state.square, params)
        updates, mean, square = jax.tree.transpose(jax.tree.structure(updates), None, results)
        return updates, AdamState(count, mean, square)

    return optax.GradientTransformation(init, update)


def _sealed[T](x: T) -> T:
    return lax.optimization_barrier(x)


def global_norm(gradients: PyTree[Float32[Array, "..."]], slices: int) -> Float32[Array, ""]:
    """Returns the root of the sum of all squares, in an order that depends on the leaves' sizes and on `slices`.

    Each leaf is cut into so many slices of rows of `contract.LANES` elements. A row is added as the contract adds rows,
    rows ascending within a slice, then slices and leaves in order.

    Args:
        gradients: float32 arrays.
        slices: the run's shards, so that as many devices can add slices of their own.
    """
    return norm_of_slices(jnp.stack([slice_squares(leaf, slices) for leaf in jax.tree.leaves(gradients)]))


def norm_of_slices(squares: Float32[Array, "leaves slices"]) -> Float32[Array, ""]:
    """Returns the root of the sum of all slices' squares: each leaf's slices in order, then the leaves in order."""
    leaves = functools.reduce(jnp.add, list(squares.T))
    return jnp.sqrt(lax.optimization_barrier(functools.reduce(jnp.add, list(leaves))))
