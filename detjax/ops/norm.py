"""RMS norm, alone, after a residual add or for a product in codes, under contract."""

import dataclasses
import functools
from typing import Any, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from detjax.operands.accumulated_weight import Weight, fresh_and_carried, value_and_sum
from detjax.operands.products import NormalizedRows, RowCodes
from detjax.ops.checks import check_dtype, check_not_empty, check_shape
from detjax.ops.dispatch import Operation, backend_modules, one_by_one, with_vmap_rule
from detjax.ops.elements import add
from detjax.ops.quantized_matmul import takes_row_codes
from detjax.runtime import compilation, fusions

_RMS_NORM = Operation("rms_norm", backend_modules("norm", mma="hopper"))


@overload
def rms_norm(
    x: Float[Array, "*B D"], weight: Weight, *, eps: float, weight_offset: float = 0.0, residual: None = None
) -> Float[Array, "*B D"]: ...
@overload
def rms_norm(
    x: Float[Array, "*B D"],
    weight: Weight,
    *,
    eps: float,
    weight_offset: float = 0.0,
    residual: Float[Array, "*B D"],
) -> tuple[Float[Array, "*B D"], Float[Array, "*B D"]]: ...
@compilation.jit(static_argnames=("eps", "weight_offset"))
def rms_norm(
    x: Float[Array, "*B D"],
    weight: Weight,
    *,
    eps: float,
    weight_offset: float = 0.0,
    residual: Float[Array, "*B D"] | None = None,
) -> Float[Array, "*B D"] | tuple[Float[Array, "*B D"], Float[Array, "*B D"]]:
    """Returns `x / sqrt(mean(x^2) + eps) * (weight + weight_offset)` (Zhang & Sennrich 2019), in float32, rounded once.

    With a residual, the result is the pair of the norm of `h = rn(x + residual)`, and `h`, with the same bits as
    separate steps.

    Args:
        x: rows; bfloat16, float16 or float32.
        weight: `[D]`, a factor per column, in any of these dtypes. With an `AccumulatedWeight` the gradient continues a
            sum.
        eps: the number added to the mean square.
        weight_offset: the number added to the weight; 1.0 for models that store `weight - 1`, such as Gemma.
        residual: rows of x's dtype.

    Raises:
        TypeError: a dtype is not under contract.
        ValueError: shapes do not fit together.

    Example:
        >>> ops.rms_norm(jnp.array([[3.0, 3.0]]), jnp.ones(2), eps=0.0)
        Array([[1., 1.]], dtype=float32)
    """
    weight, weight_sum = _checked(x, weight, residual)
    y, h = _RMS_NORM.call(
        lambda *operands, **options: _rms_norm(*operands, weight_sum, *options.values(), False)[:2],
        *(x, weight, residual),
        eps=eps,
        weight_offset=weight_offset,
    )
    return y if h is None else (y, h)


def gives_codes(x: Array, w: Any) -> bool:
    """Returns whether one kernel computes the norm of x and the codes that a product with w multiplies."""
    if fusions.is_unfused("rms_norm_codes") or not takes_row_codes(w):
        return False
    return _RMS_NORM.module().gives_codes(x.shape[-1], x.dtype)


def normalized(x: NormalizedRows, w: Any) -> tuple[Array, RowCodes | None]:
    """Returns the norm for a product with w, and its codes if `gives_codes` holds. It has the bits of `rms_norm`."""
    options: dict[str, Any] = {"eps": x.eps, "weight_offset": x.weight_offset}
    if not gives_codes(x.rows, w):
        return rms_norm(x.rows, x.weight, **options), None
    weight, weight_sum = _checked(x.rows, x.weight, None)
    y, _, codes = _rms_norm(x.rows, weight, None, weight_sum, *options.values(), True)
    assert codes is not None
    # If the product computes the norm itself, the compiler drops the kernel that computes y and its codes.
    return y, codes._replace(norm=dataclasses.replace(x, weight=weight))


def _checked(x: Array, weight: Any, residual: Array | None) -> tuple[Any, Array | None]:
    """Returns the weight and its sum, if the arguments are valid."""
    value, weight_sum = value_and_sum(_RMS_NORM.taking(weight))
    check_dtype("rms_norm", x=x, weight=value)
    check_dtype("rms_norm", like=x, residual=residual)
    check_shape("rms_norm", "weight", value, x.shape[-1:], f"x being {x.shape}")
    check_shape("rms_norm", "residual", residual, x.shape, "x's shape")
    check_not_empty("rms_norm", x=x)
    return value, weight_sum


def _norm_by_kernel(
    x: Array,
    weight: Array,
    residual: Array | None,
    weight_sum: Array | None,
    eps: float,
    weight_offset: float,
    with_codes: bool,
) -> tuple[Array, Array | None, RowCodes | None]:
    del weight_sum  # only the backward pass adds to it
    kernels, options = _RMS_NORM.kernels(), {"eps": eps, "weight_offset": weight_offset}
    if with_codes:
        assert residual is None
        # The codes of a batch do not have the batch's leading axes.
        y, codes = one_by_one(functools.partial(kernels.forward_with_codes, **options), (x, weight))
        return y, None, codes
    norm = with_vmap_rule(functools.partial(kernels.forward, **options), rows=(True, False, True))
    if residual is not None and fusions.is_unfused("rms_norm_residual"):
        h = add(x, residual)
        return norm(h, weight, None)[0], h, None
    return *norm(x, weight, residual), None


_rms_norm = jax.custom_vjp(_norm_by_kernel, nondiff_argnums=(4, 5, 6))


def _forward(
    x: Array, weight: Array, residual: Array | None, weight_sum: Array | None, *options: Any
) -> tuple[tuple[Array, Array | None, RowCodes | None], tuple[Array, Array, Array | None, Array | None]]:
    y, h, codes = _rms_norm(x, weight, residual, weight_sum, *options)
    # With a residual, `h` was normalized, and `x` need not be kept.
    return (y, h, codes), (x if h is None else h, weight, None if h is None else jnp.zeros(0), weight_sum)


def _backward(
    eps: float,
    weight_offset: float,
    with_codes: bool,
    saved: tuple[Array, Array, Array | None, Array | None],
    gradients: tuple[Array, Array | None, Any],
) -> tuple[Array | None, ...]:
    del with_codes
    rows, weight, residual, weight_sum = saved
    # The gradient of a product is for its rows, not for their codes.
    dy, dsum, _ = gradients
    backward = functools.partial(_RMS_NORM.kernels().backward, eps=eps, weight_offset=weight_offset)
    dh, dweight = with_vmap_rule(backward, rows=(False,) * 5)(rows, weight, dy, dsum, weight_sum)
    fresh, carried = fresh_and_carried([dweight], [weight_sum])
    return dh, *fresh, None if residual is None else dh, *carried


_rms_norm.defvjp(_forward, _backward)
