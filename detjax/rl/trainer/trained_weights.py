"""The numbers of a model's weights that training changes: all of them, or an adapter's.

If a weight is an `AdaptedWeight`, only the factors of such weights are trained. They are one leaf of gradients, masters
and optimizer states: the numbers of `A`, then the numbers of `B`. A weight that is not trained has a single zero there.
"""

import dataclasses
import math
from typing import Any, Final

import jax.numpy as jnp
from jaxtyping import Array, Float

from detjax.models.network import Network, Weights
from detjax.operands.accumulated_weight import AccumulatedWeight
from detjax.operands.adapted_weight import AdaptedWeight
from detjax.operands.quantized_weight import is_quantized

UNTRAINED: Final = (1,)
"""The shape of the gradients and the master of a weight without masters, which are zero."""


def has_adapter(weights: Weights) -> bool:
    """Returns whether an adapter is trained, and not the model's weights."""
    return any(isinstance(weight, AdaptedWeight) for weight in weights)


def without_masters(weights: Weights) -> tuple[bool, ...]:
    """Returns for each weight whether no number of it can ever be trained: it is quantized, or an adapter's base."""
    is_base = has_adapter(weights)
    return tuple(is_quantized(one) or (is_base and not isinstance(one, AdaptedWeight)) for one in weights)


def trained(network: Network, weights: Weights) -> tuple[bool, ...]:
    """Returns for each weight whether gradients and optimizers change it."""
    if not has_adapter(weights):
        return network.trained
    return tuple(isinstance(weight, AdaptedWeight) for weight in weights)


def gradient_shapes(weights: Weights) -> list[tuple[int, ...]]:
    """Returns the shape of each weight's gradient."""
    pairs = zip(weights, without_masters(weights), strict=True)
    return [UNTRAINED if is_fixed else trained_shape(weight) for weight, is_fixed in pairs]


def trained_shape(weight: Any) -> tuple[int, ...]:
    """Returns the shape of a weight's trained numbers."""
    if not isinstance(weight, AdaptedWeight):
        return weight.shape
    return (math.prod(weight.a.shape) + math.prod(weight.b.shape),)


def trained_numbers(weight: Any) -> Array:
    """Returns the trained numbers of a weight."""
    if not isinstance(weight, AdaptedWeight):
        return weight
    return jnp.concatenate([jnp.asarray(factor).reshape(-1) for factor in (weight.a, weight.b)])


def with_numbers(weight: AdaptedWeight, numbers: Float[Array, "n"]) -> AdaptedWeight:
    """Returns an adapted weight with other trained numbers."""
    a, b = _split(weight, numbers)
    return dataclasses.replace(weight, a=a, b=b)


def with_sums(weight: Any, products: Any, lookups: Any) -> Any:
    """Returns a weight whose gradient is added to sums in the shape of its trained numbers."""
    if not isinstance(weight, AdaptedWeight):
        return AccumulatedWeight(weight, products, lookups)
    pairs: Any = zip((weight.a, weight.b), _split(weight, products), strict=True)
    a, b = (AccumulatedWeight(*pair) for pair in pairs)
    return dataclasses.replace(weight, a=a, b=b)


def _split(weight: AdaptedWeight, numbers: Array) -> tuple[Array, Array]:
    first = math.prod(weight.a.shape)
    return numbers[:first].reshape(weight.a.shape), numbers[first:].reshape(weight.b.shape)
