"""RMS norm, alone and with the residual add before it, under contract."""

import functools
from typing import overload

import jax
from jaxtyping import Array, Float

from detjax import backends, compilation, stock
from detjax.ops.checks import check_dtype, check_not_empty, check_shape
from detjax.ops.dispatch import kernels, with_vmap_rule
from detjax.pallas.hopper import norm
from detjax.pallas.tpu import norm as tpu_norm
from detjax.portable import norm as portable_norm

_KERNELS = {"portable": portable_norm, "hopper": norm, "tpu": tpu_norm}


@overload
def rms_norm(
    x: Float[Array, "*B D"], weight: Float[Array, "D"], *, eps: float, weight_offset: float = 0.0, residual: None = None
) -> Float[Array, "*B D"]: ...
@overload
def rms_norm(
    x: Float[Array, "*B D"],
    weight: Float[Array, "D"],
    *,
    eps: float,
    weight_offset: float = 0.0,
    residual: Float[Array, "*B D"],
) -> tuple[Float[Array, "*B D"], Float[Array, "*B D"]]: ...
@compilation.jit(static_argnames=("eps", "weight_offset"))
def rms_norm(
    x: Float[Array, "*B D"],
    weight: Float[Array, "D"],
    *,
    eps: float,
    weight_offset: float = 0.0,
    residual: Float[Array, "*B D"] | None = None,
) -> Float[Array, "*B D"] | tuple[Float[Array, "*B D"], Float[Array, "*B D"]]:
    """Returns `x / sqrt(mean(x^2) + eps) * (weight + weight_offset)` (Zhang & Sennrich 2019), in float32, rounded once.

    With a residual: the pair of the norm of `h = rn(x + residual)`, and `h`. The bits are those of the separate steps.

    Args:
        x: rows; bfloat16, float16 or float32.
        weight: of any of these dtypes.
        eps: added to the mean square.
        weight_offset: 1.0 for models that store `weight - 1`, as Gemma.
        residual: of x's dtype.

    Raises:
        TypeError: a dtype is not under contract.
        ValueError: shapes do not fit together.
    """
    check_dtype("rms_norm", x=x, weight=weight)
    check_dtype("rms_norm", like=x, residual=residual)
    check_shape("rms_norm", "weight", weight, x.shape[-1:], f"x being {x.shape}")
    check_shape("rms_norm", "residual", residual, x.shape, "x's shape")
    check_not_empty("rms_norm", x=x)
    if backends.backend() == backends.STOCK:
        y, h = stock.rms_norm(x, weight, residual, eps=eps, weight_offset=weight_offset)
    else:
        y, h = _rms_norm(eps, weight_offset, x, weight, residual)
    return y if h is None else (y, h)


def _primal(
    eps: float, weight_offset: float, x: Array, weight: Array, residual: Array | None
) -> tuple[Array, Array | None]:
    forward = functools.partial(kernels("rms_norm", _KERNELS).forward, eps=eps, weight_offset=weight_offset)
    return with_vmap_rule(forward, rows=(True, False, True))(x, weight, residual)


_rms_norm = jax.custom_vjp(_primal, nondiff_argnums=(0, 1))


def _forward(eps: float, weight_offset: float, x: Array, weight: Array, residual: Array | None):
    y, h = _rms_norm(eps, weight_offset, x, weight, residual)
    return (y, h), (x, weight, h)


def _backward(
    eps: float, weight_offset: float, saved: tuple[Array, Array, Array | None], gradients: tuple[Array, Array | None]
):
    x, weight, h = saved
    backward = functools.partial(kernels("rms_norm", _KERNELS).backward, eps=eps, weight_offset=weight_offset)
    normalized = x if h is None else h
    dh, dweight = with_vmap_rule(backward, rows=(False,) * 4)(normalized, weight, *gradients)
    return dh, dweight, None if h is None else dh


_rms_norm.defvjp(_forward, _backward)
