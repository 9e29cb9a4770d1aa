"""Checks of arguments. An error says what was given, what is accepted, and in which operation and on which device."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array

from detjax.contract import INPUT_DTYPES
from detjax.operands.kv_pages import QuantizedPages
from detjax.operands.options import Clamp
from detjax.runtime import backends


def check_dtype(operation: str, *, like: Array | None = None, **arrays: Array | None) -> None:
    """Returns if every array has a dtype under contract, or the dtype of `like` where that is given.

    Raises:
        TypeError: names the operation, the argument, its dtype and the device.
    """
    accepted = INPUT_DTYPES if like is None else (str(like.dtype),)
    for name, array in arrays.items():
        if array is not None and str(array.dtype) not in accepted:
            raise TypeError(
                f"{operation}: {name} has dtype {array.dtype} on {backends.device_name()}; accepted: "
                f"{', '.join(accepted)}. Convert it first."
            )


def check_integers(operation: str, **arrays: Array) -> None:
    """Returns if every array holds integers.

    Raises:
        TypeError: names the operation, the argument and its dtype.
    """
    for name, array in arrays.items():
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise TypeError(f"{operation}: {name} has dtype {array.dtype}; accepted: integers")


def check_booleans(operation: str, **arrays: Array | None) -> None:
    """Returns if every array is None or holds booleans.

    Raises:
        TypeError: names the operation, the argument and its dtype.
    """
    for name, array in arrays.items():
        if array is not None and array.dtype != bool:
            raise TypeError(f"{operation}: {name} has dtype {array.dtype}; accepted: bool")


def check_shape(
    operation: str, name: str, array: Array | QuantizedPages | None, accepted: tuple[int, ...], because: str
) -> None:
    """Returns if `array` is None or has the shape `accepted`.

    Raises:
        ValueError: names the operation, the argument, its shape and why another is needed.
    """
    if array is not None and array.shape != accepted:
        raise ValueError(f"{operation}: {name} has shape {array.shape}; accepted: {accepted}, {because}")


def check_not_empty(operation: str, **arrays: jax.Array) -> None:
    """Returns if no array is empty.

    Raises:
        ValueError: names the operation, the argument and its shape.
    """
    for name, array in arrays.items():
        if array.size == 0:
            raise ValueError(
                f"{operation}: {name} has shape {array.shape}; accepted: at least one element on every axis"
            )


def check_clamp(operation: str, clamp: Clamp | None, gated: bool) -> None:
    """Returns if the bounds of a gated activation are None, or positive and finite, and there is a gate.

    Raises:
        ValueError: names the operation and what is accepted.
    """
    if clamp is None:
        return
    if not gated:
        raise ValueError(f"{operation}: clamp is {clamp} and gated is False; accepted: a clamp where gated is True")
    if not (0 < clamp.limit < math.inf and 0 < clamp.slope < math.inf):
        raise ValueError(f"{operation}: clamp is {clamp}; accepted: a limit and a slope that are finite and positive")
