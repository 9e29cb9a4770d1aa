"""Checks of arguments. Errors name the operation, the argument, what was given and what is accepted."""

import math
from typing import get_args

import jax.numpy as jnp
from jaxtyping import Array

from detjax.contract import INPUT_DTYPES
from detjax.operands.kv_pages import QuantizedPages
from detjax.operands.options import Activation, Clamp, WeightLayout
from detjax.operands.products import GroupedOperands, MatmulOperands
from detjax.operands.quantized_weight import QuantizedWeight
from detjax.runtime import backends


def check_dtype(operation: str, *, like: Array | None = None, **arrays: Array | QuantizedWeight | None) -> None:
    """Raises a TypeError unless all arrays have a dtype under contract, or the dtype of `like` if it is given."""
    accepted = INPUT_DTYPES if like is None else (str(like.dtype),)
    for name, array in arrays.items():
        if array is not None and str(array.dtype) not in accepted:
            raise TypeError(
                f"{operation}: {name} has dtype {array.dtype} on {backends.device_name()}; accepted: "
                f"{', '.join(accepted)}. Convert it first."
            )


def check_quantized(operation: str, w: QuantizedWeight, layout: str) -> None:
    """Raises a ValueError unless the layout of a product with a quantized weight is "nk"."""
    if layout != "nk":
        raise ValueError(
            f"{operation}: layout is {layout!r} and w has codes of {w.format.numbers}; accepted: 'nk', because scales "
            "belong to outputs"
        )


def check_integers(operation: str, **arrays: Array) -> None:
    """Raises a TypeError unless all arrays hold integers."""
    for name, array in arrays.items():
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise TypeError(f"{operation}: {name} has dtype {array.dtype}; accepted: integers")


def check_booleans(operation: str, **arrays: Array | None) -> None:
    """Raises a TypeError unless all arrays are None or hold booleans."""
    for name, array in arrays.items():
        if array is not None and array.dtype != bool:
            raise TypeError(f"{operation}: {name} has dtype {array.dtype}; accepted: bool")


def check_shape(
    operation: str,
    name: str,
    array: Array | QuantizedPages | QuantizedWeight | None,
    accepted: tuple[int, ...],
    because: str,
) -> None:
    """Raises a ValueError unless `array` is None or has the shape `accepted`; `because` explains the shape."""
    if array is not None and array.shape != accepted:
        raise ValueError(f"{operation}: {name} has shape {array.shape}; accepted: {accepted}, {because}")


def check_not_empty(operation: str, **arrays: Array | QuantizedWeight) -> None:
    """Raises a ValueError if an array is empty."""
    for name, array in arrays.items():
        if array.size == 0:
            raise ValueError(
                f"{operation}: {name} has shape {array.shape}; accepted: at least one element on every axis"
            )


def check_product(
    operation: str,
    layout: str,
    out_dtype: jnp.dtype,
    *,
    activation: str | None,
    gated: bool,
    clamp: Clamp | None,
    soft_cap: float | None = None,
) -> None:
    """Raises unless the options of a product are known and in range.

    Raises:
        TypeError: the result's dtype is not under contract.
        ValueError: an option is unknown or out of range.
    """
    if layout not in get_args(WeightLayout):
        raise ValueError(f"{operation}: layout is {layout!r}; accepted: {', '.join(get_args(WeightLayout))}")
    if activation not in (None, *get_args(Activation)):
        accepted = ", ".join(get_args(Activation))
        raise ValueError(f"{operation}: activation is {activation!r}; accepted: None, {accepted}")
    if gated and activation is None:
        raise ValueError(f"{operation}: gated without an activation; accepted: gated with one, such as silu")
    if clamp is not None and not gated:
        raise ValueError(f"{operation}: clamp is {clamp} and gated is False; accepted: a clamp only if gated is True")
    if clamp is not None and not (0 < clamp.limit < math.inf and 0 < clamp.slope < math.inf):
        raise ValueError(f"{operation}: clamp is {clamp}; accepted: finite, positive limit and slope")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"{operation}: soft_cap is {soft_cap}; accepted: positive numbers, or None for no cap")
    if str(out_dtype) not in INPUT_DTYPES:
        raise TypeError(f"{operation}: out_dtype is {out_dtype}; accepted: {', '.join(INPUT_DTYPES)}")


def check_weights(operation: str, operands: MatmulOperands | GroupedOperands, layout: str, gated: bool) -> None:
    """Raises a ValueError unless the shapes of x, w and bias of a product fit together."""
    x, w = operands.x, operands.w
    groups = operands.group_sizes.shape if isinstance(operands, GroupedOperands) else ()
    grouping = f", group_sizes {groups}" if groups else ""
    leading = (*groups, 2) if gated else groups
    if w.ndim != len(leading) + 2:
        raise ValueError(f"{operation}: w has shape {w.shape}; accepted: {len(leading) + 2} axes if gated is {gated}")
    outputs = w.shape[-1] if layout == "kn" else w.shape[-2]
    shape = (x.shape[-1], outputs) if layout == "kn" else (outputs, x.shape[-1])
    check_shape(operation, "w", w, (*leading, *shape), f"x being {x.shape}{grouping} and the layout {layout!r}")
    check_shape(operation, "bias", operands.bias, (*leading, outputs), f"w being {w.shape}")
    check_not_empty(operation, x=x, w=w)
