"""Softmax, log-softmax and logsumexp over the last axis, under contract."""

import functools

import jax
from jaxtyping import Array, Float, Float32

from detjax.operands.rounding import rounded
from detjax.ops.checks import check_dtype, check_not_empty
from detjax.ops.dispatch import Operation, backend_modules, with_vmap_rule
from detjax.runtime import compilation

_MODULES = backend_modules("softmax", mma="hopper")
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
    return _checked_call(_SOFTMAX, x)


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
    return _checked_call(_LOG_SOFTMAX, x)


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
    return _checked_call(_LOGSUMEXP, x)


def _checked_call(operation: Operation, x: Array) -> Array:
    check_dtype(operation.name, x=x)
    check_not_empty(operation.name, x=x)
    return operation.call(lambda x: _by_kernel(x, operation), x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _by_kernel(x: Array, operation: Operation) -> Array:
    return with_vmap_rule(getattr(operation.kernels(), operation.name), rows=(True,))(x)


def _forward(x: Array, operation: Operation) -> tuple[Array, tuple[Array, Array]]:
    y: Array = _by_kernel(x, operation)
    return y, (x, y)


def _backward(operation: Operation, saved: tuple[Array, Array], dy: Array) -> tuple[Array]:
    x, y = saved
    operands = (x, y, dy) if operation is _LOGSUMEXP else (y, dy)  # the others need no x
    backward = getattr(operation.kernels(), f"{operation.name}_backward")
    return (rounded(with_vmap_rule(backward, rows=(True,) * len(operands))(*operands), x.dtype),)


_by_kernel.defvjp(_forward, _backward)
