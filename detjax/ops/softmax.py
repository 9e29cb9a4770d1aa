"""Softmax, log-softmax and logsumexp over the last axis, under contract."""

import jax
from jaxtyping import Array, Float, Float32

from detjax.operands.rounding import rounded
from detjax.ops.checks import check_dtype, check_not_empty
from detjax.ops.dispatch import Operation, with_vmap_rule
from detjax.runtime import compilation

_MODULES = {
    "portable": "detjax.portable.softmax",
    "hopper": "detjax.pallas.hopper.softmax",
    "tpu": "detjax.pallas.tpu.softmax",
    "stock": "detjax.stock.softmax",
}
_SOFTMAX = Operation("softmax", _MODULES)
_LOG_SOFTMAX = Operation("log_softmax", _MODULES)
_LOGSUMEXP = Operation("logsumexp", _MODULES)


@compilation.jit
def softmax(x: Float[Array, "*B V"]) -> Float32[Array, "*B V"]:
    """Returns `exp(x) / sum(exp(x))` over the last axis, float32.

    Raises:
        TypeError: x's dtype is not bfloat16, float16 or float32.
        ValueError: x is empty.

    Example:
        >>> ops.softmax(jnp.zeros((1, 4)))
        Array([[0.25, 0.25, 0.25, 0.25]], dtype=float32)
    """
    _check("softmax", x)
    return _SOFTMAX.call(_softmax, x)


@compilation.jit
def log_softmax(x: Float[Array, "*B V"]) -> Float32[Array, "*B V"]:
    """Returns `x - log(sum(exp(x)))` over the last axis, float32.

    Raises:
        TypeError: x's dtype is not bfloat16, float16 or float32.
        ValueError: x is empty.

    Example:
        >>> ops.log_softmax(jnp.zeros((1, 2))).round(3)
        Array([[-0.693, -0.693]], dtype=float32)
    """
    _check("log_softmax", x)
    return _LOG_SOFTMAX.call(_log_softmax, x)


def log_softmax_statistics(x: Float[Array, "*B V"]) -> tuple[Float32[Array, "*B"], Float32[Array, "*B"]] | None:
    """Returns the two numbers that `log_softmax` subtracts in sequence from a row's elements, or None.

    `rn(rn(x - first) - second)` then has the bits of `log_softmax` for single elements. None: the backend does not
    provide them.
    """
    module = _LOG_SOFTMAX.module()
    return module.log_softmax_statistics(x) if hasattr(module, "log_softmax_statistics") else None


@compilation.jit
def logsumexp(x: Float[Array, "*B V"]) -> Float32[Array, "*B"]:
    """Returns `log(sum(exp(x)))` over the last axis, float32.

    Raises:
        TypeError: x's dtype is not bfloat16, float16 or float32.
        ValueError: x is empty.

    Example:
        >>> ops.logsumexp(jnp.zeros((2, 4))).round(3)
        Array([1.386, 1.386], dtype=float32)
    """
    _check("logsumexp", x)
    return _LOGSUMEXP.call(_logsumexp, x)


def _check(operation: str, x: Array) -> None:
    check_dtype(operation, x=x)
    check_not_empty(operation, x=x)


@jax.custom_vjp
def _softmax(x: Array) -> Array:
    return with_vmap_rule(_SOFTMAX.kernels().softmax, rows=(True,))(x)


def _softmax_forward(x: Array) -> tuple[Array, tuple[Array, Array]]:
    y = _softmax(x)
    return y, (x, y)


def _softmax_backward(saved: tuple[Array, Array], dy: Array) -> tuple[Array]:
    x, y = saved
    dx = with_vmap_rule(_SOFTMAX.kernels().softmax_backward, rows=(True, True))(y, dy)
    return (rounded(dx, x.dtype),)


_softmax.defvjp(_softmax_forward, _softmax_backward)


@jax.custom_vjp
def _log_softmax(x: Array) -> Array:
    return with_vmap_rule(_LOG_SOFTMAX.kernels().log_softmax, rows=(True,))(x)


def _log_softmax_forward(x: Array) -> tuple[Array, tuple[Array, Array]]:
    y = _log_softmax(x)
    return y, (x, y)


def _log_softmax_backward(saved: tuple[Array, Array], dy: Array) -> tuple[Array]:
    x, y = saved
    dx = with_vmap_rule(_LOG_SOFTMAX.kernels().log_softmax_backward, rows=(True, True))(y, dy)
    return (rounded(dx, x.dtype),)


_log_softmax.defvjp(_log_softmax_forward, _log_softmax_backward)


@jax.custom_vjp
def _logsumexp(x: Array) -> Array:
    return with_vmap_rule(_LOGSUMEXP.kernels().logsumexp, rows=(True,))(x)


def _logsumexp_forward(x: Array) -> tuple[Array, tuple[Array, Array]]:
    y = _logsumexp(x)
    return y, (x, y)


def _logsumexp_backward(saved: tuple[Array, Array], dy: Array) -> tuple[Array]:
    x, y = saved
    dx = with_vmap_rule(_LOGSUMEXP.kernels().logsumexp_backward, rows=(True, True, True))(x, y, dy)
    return (rounded(dx, x.dtype),)


_logsumexp.defvjp(_logsumexp_forward, _logsumexp_backward)
