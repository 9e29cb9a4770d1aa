"""Matrix products with the epilogues of linear layers, under contract."""

import functools
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike, Float

from detjax.contract import ACCUMULATOR
from detjax.operands.accumulated_weight import Weight, fresh_and_carried, value_and_sum
from detjax.operands.adapted_weight import AdaptedWeight
from detjax.operands.options import Activation, AxisName, Clamp, Epilogue, WeightLayout
from detjax.operands.products import GroupedOperands, MatmulOperands, NormalizedRows, WeightSums
from detjax.operands.quantized_weight import QuantizedWeight, widened
from detjax.ops.adapters import Groups, adapted_product
from detjax.ops.checks import check_dtype, check_product, check_quantized, check_shape, check_weights
from detjax.ops.dispatch import Operation, backend_modules, one_by_one, with_vmap_rule
from detjax.ops.grouped_kernels import GROUPED_MATMUL, group_unit
from detjax.ops.norm import normalized
from detjax.ops.quantized_matmul import multiplies_codes, quantized_matmul
from detjax.runtime import compilation, fusions
from detjax.runtime.device_links import DeviceLinks

_MATMUL = Operation("matmul", backend_modules("matmul", mma="mma"))


@compilation.jit(static_argnames=("layout", "activation", "gated", "clamp", "soft_cap", "out_dtype"))
def matmul(  # noqa: PLR0913
    x: Float[Array, "*B K"] | NormalizedRows,
    w: Weight | AdaptedWeight,
    *,
    layout: WeightLayout = "kn",
    bias: Weight | None = None,
    activation: Activation | None = None,
    gated: bool = False,
    clamp: Clamp | None = None,
    soft_cap: float | None = None,
    residual: Float[Array, "*B N"] | None = None,
    out_dtype: DTypeLike | None = None,
) -> Float[Array, "*B N"]:
    """Returns `act(x @ w + bias) + residual`, summed in float32 with K ascending and rounded once.

    Args:
        x: rows; bfloat16, float16 or float32. Models also pass `NormalizedRows`.
        w: weights of x's dtype, `[K, N]` if `layout` is "kn", and `[N, K]`, the layout of checkpoints, if it is "nk".
            If `gated`, the stacked weights of gate and up projection: `[2, K, N]` or `[2, N, K]`. With an
            `AccumulatedWeight`, here or as bias, the gradient continues a sum. An `AdaptedWeight` has the layout "nk".
            A `QuantizedWeight` is widened, or x is quantized, as its format says.
        layout: "kn" or "nk".
        bias: `[N]`, or `[2, N]` if `gated`.
        activation: applied to the biased sum; "gelu" is exact, "gelu_tanh" its approximation.
        gated: the result is `act(x @ w[0] + bias[0]) * (x @ w[1] + bias[1]) + residual` (Shazeer 2020).
        clamp: bounds of both sums of a gated result; see `detjax.operands.options.Clamp`.
        soft_cap: bound of the activated result `y`, which becomes `soft_cap * tanh(y / soft_cap)`, as for Gemma's
            logits.
        residual: rows added to the float32 result.
        out_dtype: the dtype of the result; default: x's.

    Raises:
        TypeError: a dtype is not under contract, or w's dtype is not x's.
        ValueError: shapes do not fit together, or an option is unknown.

    Example:
        >>> x, w = jnp.ones((2, 3)), jnp.ones((3, 4))
        >>> ops.matmul(x, w, bias=jnp.ones(4), activation="relu")[0]
        Array([4., 4., 4., 4.], dtype=float32)
    """
    x, codes = normalized(x, w) if isinstance(x, NormalizedRows) else (x, None)
    if isinstance(w, AdaptedWeight):
        dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
        check_product("matmul", layout, dtype, activation=activation, gated=gated, clamp=clamp, soft_cap=soft_cap)
        epilogue = Epilogue(activation, gated, soft_cap, clamp)
        return adapted_product(_PRODUCT, x, w, bias, residual, epilogue=epilogue, out_dtype=dtype)
    (w, w_sum), (bias, bias_sum) = value_and_sum(_MATMUL.taking(w)), value_and_sum(_MATMUL.taking(bias))
    check_dtype("matmul", x=x, bias=bias, residual=residual)
    check_dtype("matmul", like=x, w=w)
    if isinstance(w, QuantizedWeight):
        check_quantized("matmul", w, layout)
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    check_product("matmul", layout, out_dtype, activation=activation, gated=gated, clamp=clamp, soft_cap=soft_cap)
    operands, epilogue = MatmulOperands(x, w, bias, residual), Epilogue(activation, gated, soft_cap, clamp)
    check_weights("matmul", operands, layout, gated)
    check_shape(
        "matmul", "residual", residual, (*x.shape[:-1], w.shape[-1 if layout == "kn" else -2]), "the result's shape"
    )
    if isinstance(w, QuantizedWeight):
        # The format of a weight with plain activations is a schedule: widening ahead gives the same bits.
        if multiplies_codes(operands, out_dtype):
            return quantized_matmul(operands, bias_sum, epilogue=epilogue, out_dtype=out_dtype, codes=codes)
        operands = operands._replace(w=widened(w))
    options = {"layout": layout, "epilogue": epilogue, "out_dtype": out_dtype}
    sums = w_sum, bias_sum
    return _MATMUL.call(lambda operands, **options: _matmul(operands, sums, **options), operands, **options)


def shared_matmul(
    x: Float[Array, "*B K"],
    w: Float[Array, "*P N K"],
    axis_name: AxisName,
    links: DeviceLinks | None,
    *,
    bias: Float[Array, "*P N"] | None = None,
    residual: Float[Array, "*B D"] | None = None,
    **options: Any,
) -> Float[Array, "*B D"] | None:
    """Returns the columns `[*B, devices * N]` of a product; each device of an axis computes its own columns.

    They have the same bits as `gather_columns` of `matmul`, but the kernel writes its results directly to all devices.

    Args:
        x: rows, replicated on all devices, inside `jax.shard_map`.
        w: this device's weights, with the layout "nk".
        axis_name: see `detjax.ops.collectives.gather_columns`.
        links: links to the other devices.
        bias: this device's bias.
        residual: the columns of all devices.
        options: further options of `matmul`.

    Returns:
        The columns; None if no kernel can write them.
    """
    kernels = _MATMUL.module()
    if links is None or not hasattr(kernels, "shared_forward") or fusions.is_unfused("matmul_epilogue"):
        return None
    out_dtype = jnp.dtype(options.pop("out_dtype", x.dtype))
    operands = MatmulOperands(x, w, bias, residual)
    return kernels.shared_forward(operands, axis_name, links, epilogue=Epilogue(**options), out_dtype=out_dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _matmul(
    operands: MatmulOperands, sums: WeightSums, layout: WeightLayout, epilogue: Epilogue, out_dtype: jnp.dtype
) -> Array:
    del sums  # only the backward pass adds to them
    options: dict[str, Any] = {"layout": layout, "epilogue": epilogue, "out_dtype": out_dtype}
    if fusions.is_unfused("matmul_epilogue"):
        return _with_row_rule(functools.partial(_in_separate_steps, **options), operands)
    forward = functools.partial(_MATMUL.kernels().forward, **options)
    # A loop over examples would launch several kernels for each weight. Latent attention has a weight for each head.
    in_groups = operands.residual is None and hasattr(GROUPED_MATMUL.kernels(), "TAKES_TILES")
    return _with_row_rule(forward, operands, functools.partial(_for_each_weight, **options) if in_groups else None)


def _with_row_rule(
    forward: Callable[[MatmulOperands], Any],
    operands: MatmulOperands,
    for_each_weight: Callable[[MatmulOperands], Any] | None = None,
) -> Any:
    """Calls `forward`; under `vmap`, a batch axis of rows becomes more rows.

    `for_each_weight` takes rows and weights that are both batched; None: they are taken example by example.
    """
    at_once = None if for_each_weight is None else (lambda *arrays: for_each_weight(MatmulOperands(*arrays)))
    rows = True, False, False, True
    return with_vmap_rule(lambda *arrays: forward(MatmulOperands(*arrays)), rows, at_once)(*operands)


def _for_each_weight(
    operands: MatmulOperands, *, layout: WeightLayout, epilogue: Epilogue, out_dtype: jnp.dtype
) -> Array:
    """Returns the products `[E, *B, N]` of rows `[E, *B, K]` with E weights, which one grouped product computes."""
    x, w, bias, _ = operands
    by_weight = x.reshape(len(x), -1, x.shape[-1])
    rows = by_weight.shape[1]
    unit = group_unit(len(x) * rows, len(x))
    padded = jnp.pad(by_weight, ((0, 0), (0, -rows % unit), (0, 0)))
    count = padded.shape[1] // unit
    tiles = np.append(np.repeat(np.arange(len(x), dtype=np.int32), count), np.int32(len(x) * count))
    sizes = jnp.full(len(x), padded.shape[1], jnp.int32)
    y = GROUPED_MATMUL.kernels().forward(
        GroupedOperands(padded.reshape(-1, x.shape[-1]), w, bias, sizes),
        layout=layout,
        epilogue=epilogue,
        out_dtype=out_dtype,
        unit=unit,
        tiles=jnp.asarray(tiles),
    )
    return y.reshape(len(x), padded.shape[1], y.shape[-1])[:, :rows].reshape(*x.shape[:-1], y.shape[-1])


def _in_separate_steps(
    operands: MatmulOperands, *, layout: WeightLayout, epilogue: Epilogue, out_dtype: jnp.dtype
) -> Array:
    """Computes a product for each weight, then the epilogue in a pass over the float32 sums."""
    kernels, (x, w, bias, residual) = _MATMUL.kernels(), operands
    product = functools.partial(kernels.forward, layout=layout, epilogue=Epilogue(), out_dtype=ACCUMULATOR)
    sums = [product(MatmulOperands(x, one)) for one in (w if epilogue.gated else (w,))]
    biases = None if bias is None else list(bias if epilogue.gated else (bias,))
    return kernels.apply_epilogue(sums, biases, residual, epilogue=epilogue, out_dtype=out_dtype)


def _forward(
    operands: MatmulOperands, sums: WeightSums, layout: WeightLayout, epilogue: Epilogue, out_dtype: jnp.dtype
) -> tuple[Any, tuple[Any, ...]]:
    kernels = _MATMUL.kernels()
    # The gradient of an epilogue needs the biased sums. A backend that can return them does not compute them twice.
    fused = epilogue != Epilogue() and not fusions.is_unfused("matmul_epilogue")
    if fused and out_dtype == operands.x.dtype and hasattr(kernels, "forward_keeping_sums"):
        forward = functools.partial(kernels.forward_keeping_sums, layout=layout, epilogue=epilogue)
        y, z = _with_row_rule(forward, operands)
    else:
        y, z = _matmul(operands, sums, layout, epilogue, out_dtype), None
    # The backward pass needs only the residual's dtype, so an empty array stands for it.
    empty = None if operands.residual is None else jnp.zeros(0, operands.residual.dtype)
    return y, (operands._replace(residual=None), z, sums, empty)


def _backward(
    layout: WeightLayout, epilogue: Epilogue, out_dtype: jnp.dtype, saved: tuple[Any, ...], dy: Array
) -> tuple[Any, ...]:
    operands, z, sums, residual = saved
    backward = functools.partial(_MATMUL.kernels().backward, layout=layout, epilogue=epilogue)
    dx, *gradients = one_by_one(backward, (operands, dy, sums, *(() if z is None else (z,))))
    (dw, dbias), carried = fresh_and_carried(gradients, sums)
    cotangents: Any = dx, dw, dbias, None if residual is None else dy.astype(residual.dtype)
    return MatmulOperands(*cotangents), carried


_matmul.defvjp(_forward, _backward)


class _Product:
    """Products of all rows with one weight, for adapted weights."""

    unit = 1

    def __call__(self, x: Array, w: Any, groups: Groups | None, **options: Any) -> Array:
        """Returns `ops.matmul`, by default in float32."""
        assert groups is None
        return matmul(x, w, **{"layout": "nk", "out_dtype": ACCUMULATOR, **options})

    def apply_epilogue(self, sums: list[Array], residual: Array | None, epilogue: Epilogue, dtype: DTypeLike) -> Array:
        """Returns the epilogue of sums in float32."""
        return _MATMUL.kernels().apply_epilogue(sums, None, residual, epilogue=epilogue, out_dtype=dtype)


_PRODUCT: Final = _Product()
