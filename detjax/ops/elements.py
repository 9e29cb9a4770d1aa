"""Elementwise arithmetic and sums of squares whose bits depend on neither shapes nor the surrounding program."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, DTypeLike, Float, Float32, PyTree

from detjax.contract import ACCUMULATOR, INPUT_DTYPES
from detjax.operands.rounding import rounded
from detjax.ops.checks import check_booleans, check_dtype, check_not_empty, check_shape
from detjax.ops.dispatch import Operation, backend_modules, with_vmap_rule
from detjax.runtime import compilation

_MODULES = backend_modules("elements", kernels=["hopper"], mma="hopper")
_WITHOUT_STOCK = _MODULES | {"stock": "detjax.portable.elements"}
_MAP_ELEMENTS = Operation("map_elements", _WITHOUT_STOCK)
_ROW_SQUARES = Operation("row_squares", _WITHOUT_STOCK)
_SUMS_IN_ORDER = Operation("sums_in_order", _WITHOUT_STOCK)
_ADD = Operation("add", _MODULES)
_SCALE = Operation("scale", _MODULES)
_SIGMOID = Operation("sigmoid", _MODULES)


def map_elements(
    fn: Callable[..., PyTree[Array]],
    *arrays: Array,
    scalars: Sequence[Array] = (),
    overwritten: Mapping[int, int] = MappingProxyType({}),
) -> PyTree[Array]:
    """Returns `fn(*arrays, *scalars)`, in which each element depends only on the elements at the same index.

    Compilers may fuse products with sums, and CPUs may compute the last elements of an array with other instructions.
    Here only the function's own barriers decide what is rounded.

    Args:
        fn: a function of arrays of one shape and of scalars, which returns arrays of this shape.
        arrays: non-empty arrays of one shape.
        scalars: arguments that all elements share.
        overwritten: maps indices of result leaves to indices of arrays of the same dtype whose memory they reuse if it
            was donated.
    """
    return _MAP_ELEMENTS.module().map_elements(fn, *arrays, scalars=scalars, overwritten=overwritten)


def row_squares(leaf: Float[Array, "..."], slices: int) -> Float32[Array, "slices rows"]:
    """Returns the sum of squares of each row of each slice of an array.

    The elements, padded with zeros, are divided into `slices` slices of rows of `contract.LANES` elements. A row is
    added as the contract adds rows.
    """
    return _ROW_SQUARES.module().row_squares(leaf, slices)


def sums_in_order(numbers: Sequence[Float32[Array, "runs _"]]) -> tuple[Float32[Array, "runs"], ...]:
    """Returns the sums of runs of numbers, which begin with 0 and are added from the first number to the last.

    GPUs add all runs of all arrays at the same time.

    Args:
        numbers: arrays with a run in each row; the arrays' runs may have different lengths.
    """
    return _SUMS_IN_ORDER.module().sums_in_order(numbers)


@compilation.jit
def add(x: Float[Array, "*B"], y: Float[Array, "*B"], *, mask: Bool[Array, "..."] | None = None) -> Float[Array, "*B"]:
    """Returns `x + y`, rounded once; with `mask`, only in some rows.

    Args:
        x: numbers; bfloat16, float16 or float32.
        y: numbers of x's shape and dtype.
        mask: the rows of the last axis that are sums, x's shape without that axis. In all others, the result has the
            bits of x, whatever y holds. Default: all.

    Raises:
        TypeError: a dtype is not under contract, y's is not x's, or `mask` holds no booleans.
        ValueError: the shapes do not fit, or the arrays are empty.

    Example:
        >>> ops.add(jnp.arange(3.0), jnp.ones(3))
        Array([1., 2., 3.], dtype=float32)
    """
    check_dtype("add", x=x)
    check_dtype("add", like=x, y=y)
    check_shape("add", "y", y, x.shape, "x's shape")
    check_not_empty("add", x=x)
    if mask is None:
        return _ADD.call(_add, x, y)
    check_booleans("add", mask=mask)
    check_shape("add", "mask", mask, x.shape[:-1], "x's shape without its last axis")
    return _ADD.call(_add_masked, x, y, mask)


@compilation.jit(static_argnames=("factor", "factor_dtype"))
def scale(x: Float[Array, "*B"], factor: float, *, factor_dtype: DTypeLike | None = None) -> Float[Array, "*B"]:
    """Returns `x * factor`, rounded once; the factor is first rounded to float32 and then to its dtype.

    Args:
        x: numbers; bfloat16, float16 or float32.
        factor: a finite number.
        factor_dtype: bfloat16, float16 or float32; default: x's dtype.

    Raises:
        TypeError: a dtype is not under contract.
        ValueError: the factor is not finite, or x is empty.

    Example:
        >>> ops.scale(jnp.arange(3.0), 0.5)
        Array([0. , 0.5, 1. ], dtype=float32)
    """
    check_dtype("scale", x=x)
    check_not_empty("scale", x=x)
    if not math.isfinite(factor):
        raise ValueError(f"scale: factor is {factor}; accepted: finite numbers")
    dtype = x.dtype if factor_dtype is None else jnp.dtype(factor_dtype)
    if dtype.name not in INPUT_DTYPES:
        raise TypeError(f"scale: factor_dtype is {dtype.name}; accepted: {', '.join(INPUT_DTYPES)}")
    return _SCALE.call(_scale, x, factor=float(np.float32(factor).astype(dtype)))


@compilation.jit
def sigmoid(x: Float32[Array, "*B"]) -> Float32[Array, "*B"]:
    """Returns `1 / (1 + exp(-x))`, each step rounded to float32, with the device's own exp and division.

    Args:
        x: float32 numbers.

    Raises:
        TypeError: x is not float32.
        ValueError: x is empty.

    Example:
        >>> ops.sigmoid(jnp.zeros(2))
        Array([0.5, 0.5], dtype=float32)
    """
    if x.dtype != jnp.float32:
        raise TypeError(f"sigmoid: x has dtype {x.dtype}; accepted: float32. Convert it first.")
    check_not_empty("sigmoid", x=x)
    return _SIGMOID.call(_sigmoid, x)


def _mapped(operation: Operation, fn: Callable[..., Array], *arrays: Array) -> Array:
    """Maps a function over the elements with the backend's kernel; under `vmap`, a batch is more elements."""
    return with_vmap_rule(functools.partial(operation.kernels().map_elements, fn), rows=(True,) * len(arrays))(*arrays)


@jax.custom_vjp
def _sigmoid(x: Array) -> Array:
    return _mapped(_SIGMOID, lambda x: 1 / (1 + jnp.exp(-x)), x)


def _sigmoid_forward(x: Array) -> tuple[Array, Array]:
    y = _sigmoid(x)
    return y, y


def _sigmoid_backward(y: Array, gradient: Array) -> tuple[Array]:
    # The barrier keeps the difference from becoming part of a fused product.
    return (_mapped(_SIGMOID, lambda y, gradient: gradient * (y * lax.optimization_barrier(1 - y)), y, gradient),)


_sigmoid.defvjp(_sigmoid_forward, _sigmoid_backward)


@jax.custom_vjp
def _add(x: Array, y: Array) -> Array:
    return _mapped(_ADD, lambda x, y: rounded(x.astype(ACCUMULATOR) + y.astype(ACCUMULATOR), x.dtype), x, y)


_add.defvjp(lambda x, y: (_add(x, y), None), lambda _, gradient: (gradient, gradient))


@jax.custom_vjp
def _add_masked(x: Array, y: Array, mask: Array) -> Array:
    return jnp.where(mask[..., None], _add(x, y), x)


def _add_masked_backward(mask: Array, gradient: Array) -> tuple[Array, Array, None]:
    # The derivative of the selection would add a zero to each gradient, and so change the sign of zeros.
    return gradient, jnp.where(mask[..., None], gradient, jnp.zeros_like(gradient)), None


_add_masked.defvjp(lambda x, y, mask: (_add_masked(x, y, mask), mask), _add_masked_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _scale(x: Array, factor: float) -> Array:
    return _mapped(_SCALE, lambda x: rounded(x.astype(ACCUMULATOR) * jnp.float32(factor), x.dtype), x)


_scale.defvjp(lambda x, factor: (_scale(x, factor), None), lambda factor, _, gradient: (_scale(gradient, factor),))
