"""AdamW and the norm of gradients, with bits that do not depend on shapes, programs or devices."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, DTypeLike, Float32, Int32, PyTree

from detjax.contract import ACCUMULATOR
from detjax.operands.rounding import rounded
from detjax.ops.elements import map_elements, row_squares, sums_in_order


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


class NextLeaf(Protocol):
    """The update of a leaf in one pass over memory; see `OnePassOptimizer`."""

    def __call__(
        self, gradient: Array, scale: Array | None, state: Any, master: Array, dtype: DTypeLike
    ) -> tuple[Array, Any, Array]:
        """Returns the leaf's next master and state, and the master rounded to a dtype.

        Args:
            gradient: float32.
            scale: the factor of the gradient that limits the norm of all gradients; None: 1.
            state: the leaf's optimizer state.
            master: float32, of the gradient's shape. Its buffer and the state's are overwritten if they were donated.
            dtype: the dtype of the weight.
        """
        ...


class OnePassOptimizer(optax.GradientTransformation):
    """An optimizer that can update a leaf in one pass over memory, with the bits of `update` and an addition.

    An update is bound by the memory's bandwidth: clipping, moments, the addition to the master and the rounding of the
    weight as steps of their own would read and write the leaf twice as often.

    Attributes:
        next_leaf: updates a leaf.
    """

    next_leaf: NextLeaf

    def __new__(cls, init: Any, update: Any, next_leaf: NextLeaf) -> Self:
        """Creates the optimizer from optax' two functions and its own."""
        self = super().__new__(cls, init, update)
        self.next_leaf = next_leaf
        return self


def adamw(
    learning_rate: float | Callable[[Array], Array],
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> OnePassOptimizer:
    """Returns AdamW (Loshchilov & Hutter 2019), for float32 gradients and parameters.

    `optax.adamw` has the same formula, but its bits depend on array shapes and on the surrounding program, because a
    CPU's compiler vectorizes the last elements of an array differently and folds constants.

    Args:
        learning_rate: the step size, or an optax schedule: a function of the number of previous updates.
        b1: the decay of the gradients' averages.
        b2: the decay of the squares' averages.
        eps: added to the root of the squares' average.
        weight_decay: the decoupled weight decay, multiplied by the step size.
    """

    def init(params: PyTree[Array]) -> AdamState:
        for path, leaf in jax.tree.leaves_with_path(params):
            if leaf.dtype != ACCUMULATOR:
                raise TypeError(
                    f"adamw: {jax.tree_util.keystr(path)} has dtype {leaf.dtype}; accepted: float32. Train float32 "
                    "masters and round them to the weights."
                )
        return AdamState(jnp.int32(0), jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, AdamState]:
        if params is None:
            raise ValueError("adamw: params is None; accepted: the parameters, which weight decay needs")
        count, scalars = next_scalars(state.updates)

        def leaf(gradient: Array, mean: Array, square: Array, param: Array) -> tuple[Array, Array, Array]:
            return map_elements(change, gradient, mean, square, param, scalars=scalars, overwritten={1: 1, 2: 2})

        results = jax.tree.map(leaf, updates, state.mean, state.square, params)
        updates, mean, square = jax.tree.transpose(jax.tree.structure(updates), None, results)
        return updates, AdamState(count, mean, square)

    def next_leaf(
        gradient: Array, scale: Array | None, state: AdamState, master: Array, dtype: DTypeLike
    ) -> tuple[Array, AdamState, Array]:
        count, scalars = next_scalars(state.updates)

        def element(g: Array, m: Array, v: Array, p: Array, *scalars: Array) -> tuple[Array, Array, Array, Array]:
            if scale is not None:
                *_, factor = scalars
                g = _with_barrier(g * factor)
            difference, m, v = change(g, m, v, p, *scalars[:3])
            p = _with_barrier(p + _with_barrier(difference))
            return p, m, v, rounded(p, dtype)

        scalars = scalars if scale is None else (*scalars, scale)
        arrays = gradient, state.mean, state.square, master
        master, mean, square, weight = map_elements(element, *arrays, scalars=scalars, overwritten={0: 3, 1: 1, 2: 2})
        return master, AdamState(count, mean, square), weight

    def next_scalars(updates: Array) -> tuple[Array, tuple[Array, ...]]:
        """Counts an update, and returns its step size and the factors that correct the averages' bias."""
        count = lax.optimization_barrier(optax.safe_increment(updates))
        step = count.astype(ACCUMULATOR)
        rate = learning_rate(count - 1) if callable(learning_rate) else learning_rate
        # Barriers keep the compiler from folding scalars that depend on the number of updates, and from replacing a
        # division by them with a product with the reciprocal.
        corrections = [_with_barrier(1 - _with_barrier(jnp.float32(b) ** step)) for b in (b1, b2)]
        return count, _with_barrier((jnp.asarray(rate, ACCUMULATOR), *(1 / correction for correction in corrections)))

    def change(g: Array, m: Array, v: Array, p: Array, *scalars: Array) -> tuple[Array, Array, Array]:
        """Returns what is added to an element, and its next averages."""
        rate, mean_factor, square_factor = scalars
        # Products are rounded before they are added, and averages before they are used. Otherwise a compiler that
        # computes one twice may contract product and sum to an FMA in one place and not in the other.
        m = _with_barrier(_with_barrier(b1 * m) + _with_barrier((1 - b1) * g))
        v = _with_barrier(_with_barrier(b2 * v) + _with_barrier((1 - b2) * _with_barrier(g * g)))
        step = _with_barrier(m * mean_factor) / (jnp.sqrt(_with_barrier(v * square_factor)) + eps)
        return -rate * (step + _with_barrier(weight_decay * p)), m, v

    return OnePassOptimizer(init, update, next_leaf)


def _with_barrier[T](x: T) -> T:
    return lax.optimization_barrier(x)


def global_norm(gradients: PyTree[Float32[Array, "..."]], slices: int) -> Float32[Array, ""]:
    """Returns the root of the sum of all squares. The order of addition depends on the leaves' sizes and on `slices`.

    Each leaf is split into `slices` slices of rows of `contract.LANES` elements. Each row is summed by the contract's
    tree; rows are added in ascending order within a slice, then slices, then leaves.

    Args:
        gradients: float32 arrays.
        slices: the run's number of shards, so that up to as many devices can each sum their own slices.
    """
    rows = [row_squares(leaf, slices) for leaf in jax.tree.leaves(gradients)]
    return norm_of_slices(jnp.stack(sums_in_order(rows)))


def norm_of_slices(squares: Float32[Array, "leaves slices"]) -> Float32[Array, ""]:
    """Returns the root of the sum of all slices' squares, added over each leaf's slices, then over the leaves."""
    leaves = functools.reduce(jnp.add, list(squares.T))
    return jnp.sqrt(lax.optimization_barrier(functools.reduce(jnp.add, list(leaves))))
