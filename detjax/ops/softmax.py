"""Softmax, log-softmax and logsumexp over the last axis, under contract."""

import jax
from jaxtyping import Array, Float, Float32

from detjax import backends, compilation, stock
from detjax.ops.checks import check_dtype, check_not_empty
from detjax.ops.dispatch import kernels, with_vmap_rule
from detjax.pallas.hopper import softmax as hopper_softmax
from detjax.pallas.tpu import softmax as tpu_softmax
from detjax.portable import softmax as portable_softmax
from detjax.rounding import rounded

_KERNELS = {"portable": portable_softmax, "hopper": hopper_softmax, "tpu": tpu_softmax}


@compilation.jit
def softmax(x: Float[Array, "*B V"]) -> Float32[Array, "*B V"]:
    """Returns `exp(x) / sum(exp(x))` over the last axis, float32.

    Raises:
        TypeError: x's dtype is not bfloat16, float16 or float32.
        ValueError: x is empty.
    """
    _check("softmax", x)
    return stock.softmax(x) if backends.backend() == backends.STOCK else _softmax(x)


@compilation.jit
def log_softmax(x: Float[Array, "*B V"]) -> Float32[Array, "*B V"]:
    """Returns `x - log(sum(exp(x)))` over the last axis, float32.

    Raises:
        TypeError: x's dtype is not bfloat16, float16 or float32.
        ValueError: x is empty.
    """
    _check("log_softmax", x)
    return stock.log_softmax(x) if backends.backend() == backends.STOCK else _log_softmax(x)


@compilation.jit
def logsumexp(x: Float[Array, "*B V"]) -> Float32[Array, "*B"]:
    """Returns `log(sum(exp(x)))` over the last axis, float32.

    Raises:
        TypeError: x's dtype is not bfloat16, float16 or float32.
        ValueError: x is empty.
    """
    _check("logsumexp", x)
    return stock.logsumexp(x) if backends.backend() == backends.STOCK else _logsumexp(x)


def _check(operation: str, x: Array) -> None:
    check_dtype(operation, x=x)
    check_not_empty(operation, x=x)


@jax.custom_vjp
def _softmax(x: Array) -> Array:
    return with_vmap_rule(kernels("softmax", _KERNELS).softmax, rows=(True,))(x)


@jax.custom_vjp
def _log_softmax(x: Array) -> Array:
    return with_vmap_rule(kernels("log_softmax", _KERNELS).log_softmax, rows=(True,))(x)


@jax.custom_vjp
def _logsumexp(x: Array) -> Array:
    return with_vmap_rule(kernels("logsumexp", _KERNELS).logsumexp, rows=(True,))(x)


def _softmax_backward(saved: tuple[Array, Array], dy: Array) -> tuple[Array]:
    x, y = saved
    dx = with_vmap_rule(kernels("softmax", _KERNELS).softmax_backward, rows=(True, True))(y, dy)
    return (rounded(dx, x.dtype),)


def _log_softmax_backward(saved: tuple[Array, Array], dy: Array) -> tuple[Array]:
    x, y = saved
    dx = with_vmap_rule(kernels("log_softmax", _KERNELS).log_softmax_backward, rows=(True, True))(y, dy)
    return (rounded(dx, x.dtype),)


def _logsumexp_backward(saved: tuple[Array, Array], dy: Array) -> tuple[Array]:
    x, y = saved
    dx = with_vmap_rule(kernels("logsumexp", _KERNELS).logsumexp_backward, rows=(True, True, True))(x, y, dy)
    return (rounded(dx, x.dtype),)


def _saving_input_and_output(fn):
    def forward(x: Array) -> tuple[Array, tuple[Array, Array]]:
        y = fn(x)
        return y, (x, y)

    return forward


for _operation, _gradient in (
    (_softmax, _softmax_backward),
    (_log_softmax, _log_softmax_backward),
    (_logsumexp, _logsumexp_backward),
):
    _operation.defvjp(_saving_input_and_output(_operation), _gradient)
