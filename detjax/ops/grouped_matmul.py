"""Matrix products of rows sorted by expert with their experts' weights, under contract."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Int

from detjax.contract import ACCUMULATOR
from detjax.operands.accumulated_weight import Weight, fresh_and_carried, value_and_sum
from detjax.operands.adapted_weight import AdaptedWeight
from detjax.operands.options import Activation, AxisName, Clamp, Epilogue, WeightLayout
from detjax.operands.products import GroupedOperands, WeightSums
from detjax.operands.quantized_weight import QuantizedWeight, widened
from detjax.ops.adapters import Groups, adapted_product
from detjax.ops.checks import check_dtype, check_integers, check_product, check_quantized, check_shape, check_weights
from detjax.ops.grouped_kernels import GROUPED_MATMUL
from detjax.ops.grouped_kernels import group_unit as group_unit
from detjax.ops.quantized_matmul import quantized_grouped_matmul
from detjax.runtime import compilation, fusions
from detjax.runtime.device_links import DeviceLinks


@compilation.jit(static_argnames=("layout", "activation", "gated", "clamp", "unit", "out_dtype"))
def grouped_matmul(  # noqa: PLR0913
    x: Float[Array, "M K"],
    w: Weight | AdaptedWeight,
    group_sizes: Int[Array, "E"],
    *,
    layout: WeightLayout = "kn",
    bias: Weight | None = None,
    activation: Activation | None = None,
    gated: bool = False,
    clamp: Clamp | None = None,
    sequences: Int[Array, "M"] | None = None,
    unit: int = 1,
    tiles: Int[Array, "T"] | None = None,
    out_dtype: DTypeLike | None = None,
) -> Float[Array, "M N"]:
    """Returns `act(x[m] @ w[e] + bias[e])`, with e the expert of row m. Rows after the last group are undefined.

    A row has the same bits as from `matmul` with its expert's weight, and depends on no other rows.

    Args:
        x: rows sorted by expert; bfloat16, float16 or float32.
        w: the experts' weights of x's dtype, `[E, K, N]` if `layout` is "kn" and `[E, N, K]` if it is "nk"; if `gated`,
            `[E, 2, K, N]` or `[E, 2, N, K]`. With an `AccumulatedWeight`, also as bias, the gradient continues a sum.
            A `QuantizedWeight` is widened, or x is quantized, as its format says.
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
        tiles: `ExpertRows.tiles` of these rows. It saves work on some backends, and changes no bit.
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
    if isinstance(w, AdaptedWeight):
        dtype, product = jnp.dtype(x.dtype if out_dtype is None else out_dtype), _Product(unit)
        check_product(name, layout, dtype, activation=activation, gated=gated, clamp=clamp)
        added: dict[str, Any] = {"epilogue": Epilogue(activation, gated, clamp=clamp), "out_dtype": dtype}
        return adapted_product(product, x, w, bias, None, groups=Groups(group_sizes, sequences), **added)
    (w, w_sum), (bias, bias_sum) = (
        value_and_sum(GROUPED_MATMUL.taking(w)),
        value_and_sum(GROUPED_MATMUL.taking(bias)),
    )
    check_dtype(name, x=x, bias=bias)
    check_dtype(name, like=x, w=w)
    if isinstance(w, QuantizedWeight):
        check_quantized(name, w, layout)
        w = w if w.is_computed else widened(w)
    check_integers(name, group_sizes=group_sizes)
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    check_product(name, layout, out_dtype, activation=activation, gated=gated, clamp=clamp)
    operands, epilogue = GroupedOperands(x, w, bias, group_sizes, sequences), Epilogue(activation, gated, clamp=clamp)
    check_weights(name, operands, layout, gated)
    check_shape(name, "sequences", sequences, x.shape[:1], f"x being {x.shape}")
    if isinstance(w, QuantizedWeight):
        return quantized_grouped_matmul(operands, bias_sum, epilogue=epilogue, out_dtype=out_dtype, unit=unit)
    options, sums = _Options(layout, epilogue, out_dtype, unit), (w_sum, bias_sum)
    return GROUPED_MATMUL.call(
        lambda operands, **options: _grouped_matmul(operands, sums, tiles, _Options(**options)),
        operands,
        **options._asdict(),
    )


def shared_grouped_matmul(  # noqa: PLR0913
    x: Float[Array, "M K"],
    w: Float[Array, "E *P N K"],
    group_sizes: Int[Array, "E"],
    axis_name: AxisName,
    links: DeviceLinks | None,
    *,
    bias: Float[Array, "E *P N"] | None = None,
    unit: int = 1,
    tiles: Int[Array, "T"] | None = None,
    **options: Any,
) -> Float[Array, "M D"] | None:
    """Returns the columns `[M, devices * N]` of a product; each device of an axis computes its own columns.

    They have the same bits as `gather_columns` of `grouped_matmul`, but the kernel writes its results directly to all
    devices. Rows after the last group are undefined.

    Args:
        x: rows sorted by expert, replicated on all devices, inside `jax.shard_map`.
        w: this device's weights, with the layout "nk".
        group_sizes: see `grouped_matmul`.
        axis_name: see `detjax.ops.collectives.gather_columns`.
        links: links to the other devices.
        bias: this device's bias.
        unit: see `grouped_matmul`.
        tiles: see `grouped_matmul`.
        options: the options of the epilogue; see `grouped_matmul`.

    Returns:
        The columns; None if no kernel can write them.
    """
    kernels = GROUPED_MATMUL.module()
    if links is None or not hasattr(kernels, "shared_forward") or fusions.is_unfused("grouped_matmul_epilogue"):
        return None
    operands = GroupedOperands(x, w, bias, group_sizes)
    given: dict[str, Any] = {"epilogue": Epilogue(**options), "out_dtype": x.dtype, "unit": unit, "tiles": tiles}
    return kernels.shared_forward(operands, axis_name, links, **given)


class _Options(NamedTuple):
    layout: WeightLayout
    epilogue: Epilogue
    out_dtype: jnp.dtype
    unit: int


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _grouped_matmul(operands: GroupedOperands, sums: WeightSums, tiles: Array | None, options: _Options) -> Array:
    del sums  # only the backward pass adds to them
    if fusions.is_unfused("grouped_matmul_epilogue"):
        return _in_separate_steps(operands, options)
    return GROUPED_MATMUL.kernels().forward(operands, **options._asdict(), **_for_kernels(tiles))


def _for_kernels(tiles: Array | None) -> dict[str, Array]:
    """Returns the tiles as an option of the backend's kernels, if they take it."""
    return {} if tiles is None or not hasattr(GROUPED_MATMUL.kernels(), "TAKES_TILES") else {"tiles": tiles}


def _in_separate_steps(operands: GroupedOperands, options: _Options) -> Array:
    """Computes a product for each weight of an expert, then the epilogue in a pass over the float32 sums."""
    kernels, (x, w, bias, group_sizes, _), gated = GROUPED_MATMUL.kernels(), operands, options.epilogue.gated
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


def _forward(
    operands: GroupedOperands, sums: WeightSums, tiles: Array | None, options: _Options
) -> tuple[Array, tuple[Any, ...]]:
    kernels, (layout, epilogue, out_dtype, unit) = GROUPED_MATMUL.kernels(), options
    # As in `matmul`: a backend that can return the biased sums does not compute them twice.
    fused = epilogue != Epilogue() and not fusions.is_unfused("grouped_matmul_epilogue")
    if fused and out_dtype == operands.x.dtype and hasattr(kernels, "forward_keeping_sums"):
        given = _for_kernels(tiles)
        y, z = kernels.forward_keeping_sums(operands, layout=layout, epilogue=epilogue, unit=unit, **given)
        return y, (operands, sums, (z,))
    return _grouped_matmul(operands, sums, tiles, options), (operands, sums, ())


def _backward(options: _Options, saved: tuple[Any, ...], dy: Array) -> tuple[Any, ...]:
    operands, sums, biased_sums = saved
    layout, epilogue, _, unit = options
    backward = GROUPED_MATMUL.kernels().backward
    dx, *gradients = backward(operands, dy, sums, *biased_sums, layout=layout, epilogue=epilogue, unit=unit)
    (dw, dbias), carried = fresh_and_carried(gradients, sums)
    cotangents: Any = dx, dw, dbias, None, None
    return GroupedOperands(*cotangents), carried, None


_grouped_matmul.defvjp(_forward, _backward)


@dataclasses.dataclass(frozen=True)
class _Product:
    """Products of each expert's rows with its weight, for adapted weights."""

    unit: int

    def __call__(self, x: Array, w: Any, groups: Groups | None, **options: Any) -> Array:
        """Returns `ops.grouped_matmul`, by default in float32."""
        assert groups is not None
        given = {"layout": "nk", "out_dtype": ACCUMULATOR, "sequences": groups.sequences, "unit": self.unit, **options}
        return grouped_matmul(x, w, groups.sizes, **given)

    def apply_epilogue(self, sums: list[Array], residual: Array | None, epilogue: Epilogue, dtype: DTypeLike) -> Array:
        """Returns the epilogue of sums in float32."""
        return GROUPED_MATMUL.kernels().apply_epilogue(sums, None, residual, epilogue=epilogue, out_dtype=dtype)
