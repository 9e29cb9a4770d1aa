"""The numbers of a model's weights that training changes: all of them, or an adapter's.

If a weight is an `AdaptedWeight`, only the factors of such weights are trained. They are one leaf of gradients, masters
and optimizer states: the numbers of `A`, then the numbers of `B`. A weight that is not trained has a single zero there.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
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
    return (sum(math.prod(factor.shape) for factor in trained_arrays(weight)),)


def trained_arrays(weight: Any) -> tuple[Any, ...]:
    """Returns the arrays of a weight that are trained, in the order of its trained numbers."""
    return (weight.a, weight.b) if isinstance(weight, AdaptedWeight) else (weight,)


def trained_numbers(weight: Any) -> Array:
    """Returns the trained numbers of a weight."""
    if not isinstance(weight, AdaptedWeight):
        return weight
    return jnp.concatenate([jnp.asarray(factor).reshape(-1) for factor in trained_arrays(weight)])


def split(numbers: Float[Array, "_"], shapes: Sequence[tuple[int, ...]]) -> tuple[Array, ...]:
    """Returns trained numbers as the arrays that have them, given the arrays' shapes. Padding at the end is dropped."""
    ends = itertools.accumulate(map(math.prod, shapes), initial=0)
    return tuple(
        numbers[begin:end].reshape(shape) for (begin, end), shape in zip(itertools.pairwise(ends), shapes, strict=True)
    )


def with_arrays(weight: AdaptedWeight, arrays: tuple[Any, ...]) -> AdaptedWeight:
    """Returns an adapted weight with other trained arrays."""
    a, b = arrays
    return dataclasses.replace(weight, a=a, b=b)


def with_sums(weight: Any, products: Any, lookups: Any) -> Any:
    """Returns a weight whose gradient is added to sums in the shape of its trained numbers."""
    if not isinstance(weight, AdaptedWeight):
        return AccumulatedWeight(weight, products, lookups)
    factors = trained_arrays(weight)
    sums = split(products, [factor.shape for factor in factors])
    return with_arrays(weight, tuple(map(AccumulatedWeight, factors, sums)))
