"""Matrix products of rows sorted by expert with their experts' weights, under contract."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Int

from detjax.contract import ACCUMULATOR
from detjax.operands.accumulated_weight import Weight, fresh_and_carried, value_and_sum
from detjax.operands.options import Activation, Clamp, Epilogue, WeightLayout
from detjax.operands.products import GroupedOperands, WeightSums
from detjax.ops.checks import check_dtype, check_integers, check_product, check_shape, check_weights
from detjax.ops.dispatch import Operation, backend_modules
from detjax.runtime import compilation, fusions

_GROUPED_MATMUL = Operation("grouped_matmul", backend_modules("grouped_matmul"))


def group_unit(rows: int, experts: int) -> int:
    """Returns the backend's preferred multiple of group sizes for a number of rows and experts."""
    return _GROUPED_MATMUL.module().group_unit(rows, experts)


@compilation.jit(static_argnames=("layout", "activation", "gated", "clamp", "unit", "out_dtype"))
def grouped_matmul(  # noqa: PLR0913
    x: Float[Array, "M K"],
    w: Weight,
    group_sizes: Int[Array, "E"],
    *,
    layout: WeightLayout = "kn",
    bias: Weight | None = None,
    activation: Activation | None = None,
    gated: bool = False,
    clamp: Clamp | None = None,
    sequences: Int[Array, "M"] | None = None,
    unit: int = 1,
    out_dtype: DTypeLike | None = None,
) -> Float[Array, "M N"]:
    """Returns `act(x[m] @ w[e] + bias[e])`, with e the expert of row m. Rows after the last group are undefined.

    A row has the same bits as from `matmul` with its expert's weight, and depends on no other rows.

    Args:
        x: rows sorted by expert; bfloat16, float16 or float32.
        w: the experts' weights of x's dtype, `[E, K, N]` if `layout` is "kn" and `[E, N, K]` if it is "nk"; if `gated`,
            `[E, 2, K, N]` or `[E, 2, N, K]`. With an `AccumulatedWeight`, also as bias, the gradient continues a sum.
        group_sizes: number of rows of each expert; their sum is at most M.
        layout: "kn" or "nk".
        bias: `[E, N]`, or `[E, 2, N]` if `gated`.
        activation: see `matmul`.
        gated: see `matmul`.
        clamp: see `matmul`.
        sequences: the sequence of each row. The gradient of a weight adds an expert's rows in ascending order,
            `contract.WEIGHT_GRADIENT_TOKENS` in one step, and begins a new step where the sequence changes. Negative
            numbers mark padding rows, which add nothing. Default: all rows belong to one sequence.
        unit: M and all group sizes are multiples of this number, such as `ExpertRows.unit`. It saves work on some
            backends, and changes no bit.
        out_dtype: the dtype of the result; default: x's.

    Raises:
        NotImplementedError: the backend has no kernels for it.
        TypeError: a dtype is not under contract, or w's dtype is not x's.
        ValueError: shapes do not fit together, or an option is unknown.

    Example:
        >>> x, w = jnp.ones((3, 2)), jnp.array([1.0, 10.0])[:, None, None] * jnp.ones((2, 2, 4))
        >>> ops.grouped_matmul(x, w, jnp.array([1, 2]))[:, 0]
        Array([ 2., 20., 20.], dtype=float32)
    """
    name = "grouped_matmul"
    (w, w_sum), (bias, bias_sum) = (
        value_and_sum(_GROUPED_MATMUL.taking(w)),
        value_and_sum(_GROUPED_MATMUL.taking(bias)),
    )
    check_dtype(name, x=x, bias=bias)
    check_dtype(name, like=x, w=w)
    check_integers(name, group_sizes=group_sizes)
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    check_product(name, layout, out_dtype, activation=activation, gated=gated, clamp=clamp)
    operands, epilogue = GroupedOperands(x, w, bias, group_sizes, sequences), Epilogue(activation, gated, clamp=clamp)
    check_weights(name, operands, layout, gated)
    check_shape(name, "sequences", sequences, x.shape[:1], f"x being {x.shape}")
    options, sums = _Options(layout, epilogue, out_dtype, unit), (w_sum, bias_sum)
    return _GROUPED_MATMUL.call(
        lambda operands, **options: _grouped_matmul(operands, sums, _Options(**options)), operands, **options._asdict()
    )


class _Options(NamedTuple):
    layout: WeightLayout
    epilogue: Epilogue
    out_dtype: jnp.dtype
    unit: int


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _grouped_matmul(operands: GroupedOperands, sums: WeightSums, options: _Options) -> Array:
    del sums  # only the backward pass adds to them
    if fusions.is_unfused("grouped_matmul_epilogue"):
        return _in_separate_steps(operands, options)
    return _GROUPED_MATMUL.kernels().forward(operands, **options._asdict())


def _in_separate_steps(operands: GroupedOperands, options: _Options) -> Array:
    """Computes a product for each weight of an expert, then the epilogue in a pass over the float32 sums."""
    kernels, (x, w, bias, group_sizes, _), gated = _GROUPED_MATMUL.kernels(), operands, options.epilogue.gated
    plain = options._replace(epilogue=Epilogue(), out_dtype=ACCUMULATOR)._asdict()
    halves = (w[:, 0], w[:, 1]) if gated else (w,)
    sums = [kernels.forward(GroupedOperands(x, half, None, group_sizes), **plain) for half in halves]
    biases = None
    if bias is not None:
        ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
        expert = jnp.searchsorted(ends, jnp.arange(len(x), dtype=jnp.int32), side="right")
        rows = bias[jnp.minimum(expert, len(bias) - 1)]
        biases = [rows[:, 0], rows[:, 1]] if gated else [rows]
    return kernels.apply_epilogue(sums, biases, None, epilogue=options.epilogue, out_dtype=options.out_dtype)


def _forward(operands: GroupedOperands, sums: WeightSums, options: _Options) -> tuple[Array, tuple[Any, ...]]:
    kernels, (layout, epilogue, out_dtype, unit) = _GROUPED_MATMUL.kernels(), options
    # As in `matmul`: a backend that can return the biased sums does not compute them twice.
    fused = epilogue != Epilogue() and not fusions.is_unfused("grouped_matmul_epilogue")
    if fused and out_dtype == operands.x.dtype and hasattr(kernels, "forward_keeping_sums"):
        y, z = kernels.forward_keeping_sums(operands, layout=layout, epilogue=epilogue, unit=unit)
        return y, (operands, sums, (z,))
    return _grouped_matmul(operands, sums, options), (operands, sums, ())


def _backward(options: _Options, saved: tuple[Any, ...], dy: Array) -> tuple[Any, ...]:
    operands, sums, biased_sums = saved
    layout, epilogue, _, unit = options
    backward = _GROUPED_MATMUL.kernels().backward
    dx, *gradients = backward(operands, dy, sums, *biased_sums, layout=layout, epilogue=epilogue, unit=unit)
    (dw, dbias), carried = fresh_and_carried(gradients, sums)
    cotangents: Any = dx, dw, dbias, None, None
    return GroupedOperands(*cotangents), carried


_grouped_matmul.defvjp(_forward, _backward)
