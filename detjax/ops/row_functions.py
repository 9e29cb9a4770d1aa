"""Row functions that few families use: norms, gates, decays, rates and weighted sums."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, PyTree

from detjax.operands.accumulated_weight import Weight, fresh_and_carried, value_and_sum
from detjax.ops.checks import check_dtype, check_not_empty, check_shape
from detjax.ops.dispatch import Operation, backend_modules, one_by_one
from detjax.runtime import compilation

_MODULES = backend_modules("row_functions", kernels=["hopper"], mma="hopper")
_L2_NORM = Operation("l2_norm", _MODULES)
_GATED_RMS_NORM = Operation("gated_rms_norm", _MODULES)
_SIGMOID_GATED = Operation("sigmoid_gated", _MODULES)
_DECAY_AND_RATE = Operation("decay_and_rate", _MODULES)
_LAYER_NORM = Operation("layer_norm", _MODULES)
_WEIGHTED_SUM = Operation("weighted_sum", _MODULES)


@compilation.jit(static_argnames="eps")
def l2_norm(x: Float[Array, "*B K"], *, eps: float) -> Float[Array, "*B K"]:
    """Returns `x / sqrt(sum(x^2) + eps)`, in float32, rounded once.

    Args:
        x: rows; bfloat16, float16 or float32.
        eps: the number added to the sum of squares.

    Raises:
        TypeError: the dtype is not under contract.

    Example:
        >>> ops.l2_norm(jnp.array([[0.0, 2.0]]), eps=0.0)
        Array([[0., 1.]], dtype=float32)
    """
    check_dtype("l2_norm", x=x)
    check_not_empty("l2_norm", x=x)
    return _by_row(_L2_NORM, (x,), (), axes=1, eps=eps)


@compilation.jit(static_argnames="eps")
def gated_rms_norm(
    x: Float[Array, "*B V"], gate: Float[Array, "*B V"], weight: Weight, *, eps: float
) -> Float[Array, "*B V"]:
    """Returns `x / sqrt(mean(x^2) + eps) * weight * silu(gate)`, in float32, rounded once.

    Args:
        x: rows; bfloat16, float16 or float32.
        gate: rows of x's dtype.
        weight: `[V]`, a factor per column. With an `AccumulatedWeight` the gradient continues a sum.
        eps: the number added to the mean square.

    Raises:
        TypeError: a dtype is not under contract.
        ValueError: shapes do not fit together.

    Example:
        >>> ops.gated_rms_norm(jnp.ones((1, 2)), jnp.zeros((1, 2)), jnp.ones(2), eps=1e-6)
        Array([[0., 0.]], dtype=float32)
    """
    check_dtype("gated_rms_norm", x=x, weight=value_and_sum(weight)[0])
    check_dtype("gated_rms_norm", like=x, gate=gate)
    check_shape("gated_rms_norm", "gate", gate, x.shape, "x's shape")
    check_shape("gated_rms_norm", "weight", value_and_sum(weight)[0], x.shape[-1:], f"x being {x.shape}")
    check_not_empty("gated_rms_norm", x=x)
    return _by_row(_GATED_RMS_NORM, (x, gate), (weight,), axes=1, eps=eps)


@compilation.jit
def sigmoid_gated(x: Float[Array, "*B K"], gate: Float[Array, "*B #K"]) -> Float[Array, "*B K"]:
    """Returns `x * sigmoid(gate)`, in float32, rounded once.

    Args:
        x: rows; bfloat16, float16 or float32.
        gate: rows with x's columns or one column for all, in any of these dtypes.

    Raises:
        TypeError: a dtype is not under contract.
        ValueError: the shapes do not fit together.

    Example:
        >>> ops.sigmoid_gated(jnp.full((1, 2), 4.0), jnp.zeros((1, 2)))
        Array([[2., 2.]], dtype=float32)
    """
    check_dtype("sigmoid_gated", x=x, gate=gate)
    if gate.shape != (*x.shape[:-1], 1):
        check_shape("sigmoid_gated", "gate", gate, x.shape, "x's shape, or one column")
    check_not_empty("sigmoid_gated", x=x)
    return _by_row(_SIGMOID_GATED, (x, gate), (), axes=1)


@compilation.jit
def decay_and_rate(
    a: Float[Array, "*B H"], b: Float[Array, "*B H"], log_rate: Weight, bias: Weight
) -> tuple[Float32[Array, "*B H"], Float32[Array, "*B H"]]:
    """Returns decay and rate for `gated_delta_rule`: `-exp(log_rate) * softplus(a + bias)` and `sigmoid(b)`, float32.

    Args:
        a: a number per token and head; bfloat16, float16 or float32.
        b: a number per token and head, of a's dtype.
        log_rate: `[H]`, called `A_log` in checkpoints. With an `AccumulatedWeight`, here or as bias, the gradient
            continues a sum.
        bias: `[H]`, called `dt_bias` in checkpoints.

    Raises:
        TypeError: a dtype is not under contract.
        ValueError: shapes do not fit together.

    Example:
        >>> decay, rate = ops.decay_and_rate(jnp.zeros((1, 2)), jnp.zeros((1, 2)), jnp.zeros(2), jnp.zeros(2))
        >>> rate
        Array([[0.5, 0.5]], dtype=float32)
    """
    check_dtype("decay_and_rate", a=a, log_rate=value_and_sum(log_rate)[0], bias=value_and_sum(bias)[0])
    check_dtype("decay_and_rate", like=a, b=b)
    check_shape("decay_and_rate", "b", b, a.shape, "a's shape")
    for name, weight in {"log_rate": log_rate, "bias": bias}.items():
        check_shape("decay_and_rate", name, value_and_sum(weight)[0], a.shape[-1:], f"a being {a.shape}")
    check_not_empty("decay_and_rate", a=a)
    return _by_row(_DECAY_AND_RATE, (a, b), (log_rate, bias), axes=1)


@compilation.jit(static_argnames="eps")
def layer_norm(x: Float[Array, "*B D"], weight: Weight, bias: Weight, *, eps: float) -> Float[Array, "*B D"]:
    """Returns `(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias` (Ba et al. 2016), in float32, rounded once.

    Args:
        x: rows; bfloat16, float16 or float32.
        weight: `[D]`, a factor per column, in any of these dtypes. With an `AccumulatedWeight`, here or as bias, the
            gradient continues a sum.
        bias: `[D]`, added to each column.
        eps: the number added to the variance.

    Raises:
        TypeError: a dtype is not under contract.
        ValueError: shapes do not fit together.

    Example:
        >>> ops.layer_norm(jnp.array([[1.0, 3.0]]), jnp.ones(2), jnp.zeros(2), eps=0.0)
        Array([[-1.,  1.]], dtype=float32)
    """
    for name, given in {"weight": weight, "bias": bias}.items():
        check_dtype("layer_norm", x=x, **{name: value_and_sum(given)[0]})
        check_shape("layer_norm", name, value_and_sum(given)[0], x.shape[-1:], f"x being {x.shape}")
    check_not_empty("layer_norm", x=x)
    return _by_row(_LAYER_NORM, (x,), (weight, bias), axes=1, eps=eps)


@compilation.jit
def weighted_sum(x: Float[Array, "*B n D"], factors: Float32[Array, "*B n"]) -> Float[Array, "*B D"]:
    """Returns the sum of rows times their factors, in float32 and in the order of the rows, rounded once.

    Args:
        x: rows; bfloat16, float16 or float32.
        factors: a number per row, without a gradient.

    Raises:
        TypeError: a dtype is not under contract, or the factors are not float32.
        ValueError: the shapes do not fit together, or the arrays are empty.

    Example:
        >>> ops.weighted_sum(jnp.ones((1, 3, 2)), jnp.array([[1.0, 2.0, 3.0]]))
        Array([[6., 6.]], dtype=float32)
    """
    check_dtype("weighted_sum", x=x)
    if factors.dtype != jnp.float32:
        raise TypeError(f"weighted_sum: factors has dtype {factors.dtype}; accepted: float32. Convert it first.")
    check_shape("weighted_sum", "factors", factors, x.shape[:-1], f"x being {x.shape}")
    check_not_empty("weighted_sum", x=x)
    return _by_row(_WEIGHTED_SUM, (x, factors), (), axes=2)


def _by_row(operation: Operation, rows: tuple[Array, ...], weights: tuple[Weight, ...], *, axes: int, **options: Any):
    """Calls an operation on rows, whose last `axes` axes are one row's."""
    pairs = [value_and_sum(operation.taking(weight)) for weight in weights]
    leading = rows[0].shape[: rows[0].ndim - axes]
    flat = tuple(x.reshape(math.prod(leading), *x.shape[len(leading) :]) for x in rows)
    # A module of XLA's operations takes no sums: `taking` has included them in the weights' gradients.
    sums = tuple(total for _, total in pairs)

    def under_contract(rows: tuple[Array, ...], weights: tuple[Array, ...], **options: Any) -> PyTree[Array]:
        function = "function", operation.name
        return rows_by_kernel(rows, weights, sums, operation, (function, *sorted(options.items())))

    results = operation.call(under_contract, flat, tuple(value for value, _ in pairs), **options)
    return jax.tree.map(lambda y: y.reshape(*leading, *y.shape[1:]), results)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def rows_by_kernel(
    rows: tuple[Array, ...],
    weights: tuple[Array, ...],
    sums: tuple[Array | None, ...],
    operation: Operation,
    options: tuple[tuple[str, Any], ...],
) -> PyTree[Array]:
    """Returns the results `[M, ...]` of an operation whose module has `forward` and `backward` of rows and weights.

    `sums` has for each weight the sum that its gradient continues, or None.
    """
    del sums  # only the backward pass adds to them
    return one_by_one(functools.partial(operation.kernels().forward, **dict(options)), (rows, weights))


def _forward(rows: Any, weights: Any, sums: Any, operation: Operation, options: Any) -> tuple[Any, Any]:
    return rows_by_kernel(rows, weights, sums, operation, options), (rows, weights, sums)


def _backward(operation: Operation, options: Any, saved: Any, gradients: Any) -> tuple[Any, Any, Any]:
    rows, weights, sums = saved
    backward = functools.partial(operation.kernels().backward, **dict(options))
    by_row, totals = one_by_one(backward, (rows, weights, sums, gradients))
    return by_row, *fresh_and_carried(totals, sums)


rows_by_kernel.defvjp(_forward, _backward)
