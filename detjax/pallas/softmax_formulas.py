"""Formulas of softmax, log-softmax and logsumexp on single elements, and their gradients, for the kernels of all chips.

A backend's kernel computes the row sums. The elementwise arithmetic around them is left to XLA, which has no choice
there that could change a bit.
"""

from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp
from jax import Array, lax

from detjax.contract import ACCUMULATOR, LOG2_E
from detjax.operands.numerics import LOWEST

Operation = Literal["softmax", "log_softmax", "logsumexp"]

RowSums = Callable[[Array], Array]
"""A function that returns the sums `[*B, 1]` of rows `[*B, V]`, both float32, in the contract's order."""


def exp_difference(x: Array, m: Array) -> Array:
    """Returns `e(x, m)` of `contract.SOFTMAX_BLOCK`: `exp(x - m)` by exp2."""
    return jnp.exp2((x - m) * LOG2_E)


def row_constant(operation: Operation, total: Array) -> Array:
    """Returns the number that finally multiplies every element of a row (softmax), or is subtracted from it."""
    return 1 / total if operation == "softmax" else jnp.log(total)


def finished(operation: Operation, x: Array, m: Array, constant: Array) -> Array:
    """Returns elements of the result from elements of the input and the maximum and constant of their row."""
    return exp_difference(x, m) * constant if operation == "softmax" else (x - m) - constant


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
