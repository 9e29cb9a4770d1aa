"""Elementwise products under contract."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from detjax.contract import ACCUMULATOR
from detjax.operands.rounding import rounded
from detjax.ops.checks import check_dtype, check_not_empty, check_shape
from detjax.ops.dispatch import Operation, backend_modules, with_vmap_rule
from detjax.runtime import compilation

_MULTIPLY = Operation("multiply", backend_modules("elements", kernels=["hopper"], mma="hopper"))


@compilation.jit
def multiply(x: Float[Array, "*B"], y: Float[Array, "..."]) -> Float[Array, "*B"]:
    """Returns `x * y` in x's dtype, rounded once.

    Args:
        x: numbers; bfloat16, float16 or float32.
        y: numbers of x's shape, in any of these dtypes; or one number for all, `[1]`, which has no gradient.

    Raises:
        TypeError: a dtype is not under contract.
        ValueError: the shapes do not fit together, or the arrays are empty.

    Example:
        >>> ops.multiply(jnp.arange(3.0), jnp.full(1, 0.5))
        Array([0. , 0.5, 1. ], dtype=float32)
    """
    check_dtype("multiply", x=x, y=y)
    check_not_empty("multiply", x=x)
    if y.shape == x.shape:
        return _MULTIPLY.call(_multiply, x, y)
    check_shape("multiply", "y", y, (1,), f"or x's shape, {x.shape}")
    return _MULTIPLY.call(_multiply_by_number, x, jax.lax.stop_gradient(y))


def _product(x: Array, y: Array) -> Array:
    return rounded(x.astype(ACCUMULATOR) * y.astype(ACCUMULATOR), x.dtype)


def _elements(*arrays: Array, scalars: tuple[Array, ...] = ()) -> Array:
    """Multiplies element by element with the backend's kernel; under `vmap`, a batch is more elements."""
    count = len(arrays)

    def kernel(*operands: Array) -> Array:
        multiplied: Callable[..., Array] = _MULTIPLY.kernels().map_elements
        return multiplied(_product, *operands[:count], scalars=operands[count:])

    return with_vmap_rule(kernel, rows=(True,) * count + (False,) * len(scalars))(*arrays, *scalars)


@jax.custom_vjp
def _multiply(x: Array, y: Array) -> Array:
    return _elements(x, y)


def _backward(saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, y = saved
    return _elements(gradient, y), rounded(_elements(gradient.astype(ACCUMULATOR), x), y.dtype)


_multiply.defvjp(lambda x, y: (_multiply(x, y), (x, y)), _backward)


@jax.custom_vjp
def _multiply_by_number(x: Array, number: Array) -> Array:
    return _elements(x, scalars=(number.astype(ACCUMULATOR).reshape(()),))


_multiply_by_number.defvjp(
    lambda x, number: (_multiply_by_number(x, number), number),
    lambda number, gradient: (_multiply_by_number(gradient, number), jnp.zeros_like(number)),
)
