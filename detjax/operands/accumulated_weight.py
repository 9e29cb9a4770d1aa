"""Weights with the sum of their gradients, which carry gradients from one microbatch to the next."""

import dataclasses
from collections.abc import Sequence
from typing import Any, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from detjax.contract import ACCUMULATOR
from detjax.operands.pytrees import array_dataclass
from detjax.operands.quantized_weight import QuantizedWeight
from detjax.operands.rounding import rounded
from detjax.operands.whole_weight import WeightWithValue


@array_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class AccumulatedWeight(WeightWithValue):
    """A weight, and the float32 sums to which a backward pass adds the weight's gradient.

    Operations accept it in place of a weight. They compute with the value and return the *next* sum, `sum + gradient`,
    as the sum's cotangent: the gradient of a loss with respect to the sums is the sums after this microbatch. So the
    order in which tokens are added does not depend on microbatches. The value itself has no gradient.

    Each sum belongs to one operation of a model. A weight that several operations share cannot be accumulated, except
    for a table that is both an embedding and a head, which has two sums.

    Attributes:
        value: the weight.
        products: the sum over the tokens that used the weight in an operation; None for a table with only lookups.
        lookups: for an embedding's table, the sum over the tokens that looked up its rows.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from detjax import ops
        >>> x, w = jnp.ones((16, 2)), jnp.ones((2, 3))
        >>> def loss(products):
        ...     return ops.matmul(x, ops.AccumulatedWeight(w, products)).sum()
        >>> sums = jnp.zeros((2, 3))
        >>> for microbatch in range(2):
        ...     sums = jax.grad(loss)(sums)
        >>> sums[0]
        Array([32., 32., 32.], dtype=float32)
    """

    value: Float[Array, "..."]
    products: Float32[Array, "..."] | None = None
    lookups: Float32[Array, "..."] | None = None


type Weight = Float[Array, "..."] | AccumulatedWeight | QuantizedWeight
"""A weight with or without the sum of its gradients, or one in the numbers of a checkpoint."""


@overload
def value_and_sum(weight: Weight) -> tuple[Array, Array | None]: ...
@overload
def value_and_sum(weight: Weight | None) -> tuple[Array | None, Array | None]: ...
def value_and_sum(weight: Any) -> tuple[Any, Array | None]:
    """Returns the value of a weight and its sum `products`, or None if it has no sum."""
    return (weight.value, weight.products) if isinstance(weight, AccumulatedWeight) else (weight, None)


def fresh_and_carried(
    gradients: Sequence[Array | None], sums: Sequence[Array | None]
) -> tuple[tuple[Array | None, ...], tuple[Array | None, ...]]:
    """Splits gradients into cotangents of an operation's weights and cotangents of the weights' sums.

    Args:
        gradients: for each weight its gradient, or its next sum if it has one.
        sums: the sums of the weights.
    """
    pairs = list(zip(gradients, sums, strict=True))
    fresh = tuple(gradient if total is None else None for gradient, total in pairs)
    return fresh, tuple(None if total is None else gradient for gradient, total in pairs)


def weight_cotangent(weight: Weight, total: Array) -> Weight:
    """Returns the cotangent of a weight: `total` for its sum, or the rounded gradient of a plain weight."""
    if not isinstance(weight, AccumulatedWeight):
        return rounded(total, weight.dtype)
    carried = None if weight.products is None else total
    unread = None if weight.lookups is None else jnp.zeros_like(weight.lookups)
    fresh = rounded(total, weight.dtype) if weight.products is None else jnp.zeros_like(weight.value)
    return AccumulatedWeight(fresh, carried, unread)


def with_fresh_sum(weight: Any) -> Any:
    """Returns the value of a weight. The rounded gradient of each call is added to the weight's sum.

    Frameworks usually accumulate gradients like this; the sum depends on the microbatches.
    """
    if not isinstance(weight, AccumulatedWeight):
        return weight
    return weight.value if weight.products is None else _value_with_sum(weight.value, weight.products)


@jax.custom_vjp
def _value_with_sum(value: Array, total: Array) -> Array:
    del total
    return value


def _forward(value: Array, total: Array) -> tuple[Array, Array]:
    return value, total


def _backward(total: Array, gradient: Array) -> tuple[Array, Array]:
    return jnp.zeros_like(gradient), total + gradient.astype(ACCUMULATOR)


_value_with_sum.defvjp(_forward, _backward)
