"""RMS norm, alone or after a residual add, under contract."""

import functools
from typing import overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from detjax.operands.accumulated_weight import Weight, fresh_and_carried, value_and_sum
from detjax.ops.checks import check_dtype, check_not_empty, check_shape
from detjax.ops.dispatch import Operation, backend_modules, with_vmap_rule
from detjax.ops.elements import add
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
    weight, weight_sum = value_and_sum(_RMS_NORM.taking(weight))
    check_dtype("rms_norm", x=x, weight=weight)
    check_dtype("rms_norm", like=x, residual=residual)
    check_shape("rms_norm", "weight", weight, x.shape[-1:], f"x being {x.shape}")
    check_shape("rms_norm", "residual", residual, x.shape, "x's shape")
    check_not_empty("rms_norm", x=x)
    y, h = _RMS_NORM.call(
        lambda *operands, **options: _rms_norm(*operands, weight_sum, **options),
        *(x, weight, residual),
        eps=eps,
        weight_offset=weight_offset,
    )
    return y if h is None else (y, h)


def _norm_by_kernel(
    x: Array, weight: Array, residual: Array | None, weight_sum: Array | None, eps: float, weight_offset: float
) -> tuple[Array, Array | None]:
    del weight_sum  # only the backward pass adds to it
    forward = functools.partial(_RMS_NORM.kernels().forward, eps=eps, weight_offset=weight_offset)
    norm = with_vmap_rule(forward, rows=(True, False, True))
    if residual is not None and fusions.is_unfused("rms_norm_residual"):
        h = add(x, residual)
        return norm(h, weight, None)[0], h
    return norm(x, weight, residual)


_rms_norm = jax.custom_vjp(_norm_by_kernel, nondiff_argnums=(4, 5))


def _forward(
    x: Array, weight: Array, residual: Array | None, weight_sum: Array | None, eps: float, weight_offset: float
) -> tuple[tuple[Array, Array | None], tuple[Array, Array, Array | None, Array | None]]:
    y, h = _rms_norm(x, weight, residual, weight_sum, eps, weight_offset)
    # With a residual, `h` was normalized, and `x` need not be kept.
    return (y, h), (x if h is None else h, weight, None if h is None else jnp.zeros(0), weight_sum)


def _backward(
    eps: float,
    weight_offset: float,
    saved: tuple[Array, Array, Array | None, Array | None],
    gradients: tuple[Array, Array | None],
) -> tuple[Array | None, ...]:
    normalized, weight, residual, weight_sum = saved
    backward = functools.partial(_RMS_NORM.kernels().backward, eps=eps, weight_offset=weight_offset)
    dh, dweight = with_vmap_rule(backward, rows=(False,) * 5)(normalized, weight, *gradients, weight_sum)
    fresh, carried = fresh_and_carried([dweight], [weight_sum])
    return dh, *fresh, None if residual is None else dh, *carried


_rms_norm.defvjp(_forward, _backward)
