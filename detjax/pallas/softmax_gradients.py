"""Gradients of softmax, log-softmax and logsumexp from their results.

A backend's kernel computes the row sums. The elementwise arithmetic around them is left to XLA, which has no choice
there that could change a bit.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from detjax.contract import ACCUMULATOR
from detjax.operands.numerics import LOWEST

RowSums = Callable[[Array], Array]
"""A function that returns the sums `[*B, 1]` of rows `[*B, V]`, both float32, in the contract's order."""


def softmax_gradient(y: Array, dy: Array, row_sums: RowSums) -> Array:
    """Returns the gradient of softmax's input, `y * (dy - sum(y * dy))`, from its result `y`; float32 `[*B, V]`."""
    # The barrier forces the products to be rounded before they are added.
    return y * (dy - row_sums(lax.optimization_barrier(y * dy)))


def log_softmax_gradient(y: Array, dy: Array, row_sums: RowSums) -> Array:
    """Returns the gradient of log-softmax's input, `dy - exp(y) * sum(dy)`, from its result `y`; float32 `[*B, V]`."""
    # The maximum with the lowest number keeps the product from being fused with the subtraction.
    return dy - jnp.maximum(jnp.exp(y) * row_sums(dy), LOWEST)


def logsumexp_gradient(x: Array, y: Array, dy: Array) -> Array:
    """Returns the gradient of logsumexp's input, `exp(x - y) * dy`, from input `x` and result `y [*B]`; float32."""
    return jnp.exp(x.astype(ACCUMULATOR) - y[..., None]) * dy[..., None]
