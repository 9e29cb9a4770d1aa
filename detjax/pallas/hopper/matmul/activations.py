"""Activations that the epilogue of a Hopper matmul applies to accumulators in registers.

All schedules share this code, so the compiler fuses the same products with the same additions in all of them; tests on
the device compare the bits.
"""

from collections.abc import Callable, Sequence
from typing import Final

import jax.numpy as jnp
from jaxtyping import Array

from detjax.operands.options import Activation


def _erf(x: Array) -> Array:
    """The error function, which Mosaic GPU lacks, by the rational approximation of Eigen's float32 code."""
    x = jnp.clip(x, -3.7439211627767994, 3.7439211627767994)
    square = x * x
    numerator = (0.00022905065861350646, 0.0034082910107109506, 0.050955695062380861, 0.18520832239976145)
    denominator = (
        *(-1.1791602954361697e-7, 0.000023547966471313185, 0.0010179625278914885),
        *(0.014070470171167667, 0.11098505178285362, 0.49746925110067538),
    )
    p = _polynomial(square, (*numerator, 1.128379143519084))
    return x * p / _polynomial(square, (*denominator, 1.0))


def _polynomial(x: Array, coefficients: Sequence[float]) -> Array:
    """Horner's rule, highest power first."""
    value = jnp.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        value = value * x + coefficient
    return value


def _gelu_tanh(z: Array) -> Array:
    return 0.5 * z * (1.0 + jnp.tanh(0.7978845608028654 * (z + 0.044715 * (z * z * z))))


ACTIVATIONS: Final[dict[Activation, Callable[[Array], Array]]] = {
    "silu": lambda z: z / (1.0 + jnp.exp(-z)),
    "gelu": lambda z: 0.5 * z * (1.0 + _erf(0.7071067811865476 * z)),
    "gelu_tanh": _gelu_tanh,
    "relu": lambda z: jnp.maximum(z, 0.0),
}
