"""Products with adapted weights: each row adds the low-rank product of its own adapter to the weight's sum.

`ops.matmul` and `ops.grouped_matmul` call these functions for an `AdaptedWeight`. The weight's sums and the adapters'
products are separate float32 products, which are added before the epilogue. Kernels that do several of these steps have
the bits of separate ones.
"""

import functools
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Float32, Int

from detjax.contract import ACCUMULATOR, RANK_STEP
from detjax.operands.accumulated_weight import Weight, value_and_sum
from detjax.operands.adapted_weight import NO_ADAPTER, AdaptedWeight, only_adapter
from detjax.operands.numerics import activated, flat_rows, parts
from detjax.operands.options import Epilogue
from detjax.operands.rounding import rounded
from detjax.ops import single_adapter
from detjax.ops.adapter_places import BlocksOfRows, SortedRows, low_rank_products, places_of_rows
from detjax.portable import adapters as portable
from detjax.portable.tiles import each_row
from detjax.runtime import backends

_NO_GRADIENT: Final = (
    "matmul: the gradient of rows with different adapters; accepted: one adapter for all rows, which is trained alone"
)


class Groups(NamedTuple):
    """Rows that are sorted by expert; see `ops.grouped_matmul`.

    Attributes:
        sizes: the number of rows of each expert.
        sequences: the sequence of each row; None: all rows belong to one.
    """

    sizes: Array
    sequences: Array | None


@runtime_checkable
class Product(Protocol):
    """A matrix product without an epilogue, hashable: of all rows with one weight, or of each expert's rows."""

    def __call__(self, x: Array, w: Any, groups: Groups | None, **options: Any) -> Array:
        """Returns the product with the options of `ops.matmul`."""
        ...

    def apply_epilogue(self, sums: list[Array], residual: Array | None, epilogue: Epilogue, dtype: DTypeLike) -> Array:
        """Returns the epilogue of sums in float32."""
        ...

    @property
    def unit(self) -> int:
        """The multiple that all sizes of groups are; see `ops.grouped_matmul`."""
        ...


def adapted_product(  # noqa: PLR0913
    product: Product,
    x: Float[Array, "*B K"],
    weight: AdaptedWeight,
    bias: Weight | None,
    residual: Float[Array, "*B N"] | None,
    *,
    groups: Groups | None = None,
    epilogue: Epilogue,
    out_dtype: DTypeLike,
) -> Float[Array, "*B N"]:
    """Returns the epilogue of the sums of an adapted weight, rounded once.

    Raises:
        NotImplementedError: on a backend without contracts, and for the gradient of rows with different adapters.
        ValueError: shapes do not fit together.
    """
    name = "matmul" if groups is None else "grouped_matmul"
    if (backend := backends.backend()) not in backends.BACKENDS:
        raise NotImplementedError(
            f"{name}: the weight has adapters, and the backend is {backend!r}; accepted: a backend under contract. "
            "Choose one with detjax.use_backend."
        )
    _check(name, x, weight, epilogue.gated, has_experts=groups is not None)
    plain_bias, _ = value_and_sum(bias)
    flat = None if residual is None else flat_rows(residual)
    if groups is None and single_adapter.is_served():
        multiply = single_adapter.one_adapters_product if weight.rows is None else _with_rows_of_kernels
        y: Any = multiply(product, epilogue, jnp.dtype(out_dtype), flat_rows(x), weight, plain_bias, flat)
        return y.reshape(*x.shape[:-1], y.shape[-1])
    sums: Any = _sums(product, epilogue.gated, flat_rows(x), weight, plain_bias, groups)
    y = _epilogue(product, epilogue, jnp.dtype(x.dtype), jnp.dtype(out_dtype), sums, flat)
    return y.reshape(*x.shape[:-1], y.shape[-1])


def _check(name: str, x: Array, weight: AdaptedWeight, gated: bool, *, has_experts: bool) -> None:
    lead, inner = weight.shape[: int(has_experts)], weight.shape[-1]
    slots, ranks = weight.a.shape[-3:-1]
    outputs = *lead, slots, *weight.shape[len(lead) : -1]
    given, expected = (weight.a.shape, weight.b.shape), ((*lead, slots, ranks, inner), (*outputs, ranks))
    if (*given, weight.scales.shape) != (*expected, outputs) or ranks % RANK_STEP or inner != x.shape[-1]:
        raise ValueError(
            f"{name}: the factors of adapters have shapes {given[0]} and {given[1]}, and scales {weight.scales.shape}; "
            f"accepted: {expected[0]}, {expected[1]} and {outputs}, the weight being {weight.shape} and x {x.shape}, "
            f"with a multiple of {RANK_STEP} ranks"
        )
    if len(weight.shape) - len(lead) != 2 + gated:
        raise ValueError(f"{name}: w has shape {weight.shape}; accepted: {2 + gated + len(lead)} axes")
    if weight.rows is None and slots != 1:
        raise ValueError(f"{name}: {slots} adapters without rows; accepted: rows with the slot of each row of x")
    if weight.rows is not None and weight.rows.size != x.size // x.shape[-1]:
        raise ValueError(f"{name}: rows has shape {weight.rows.shape}; accepted: {x.shape[:-1]}, the rows of x")


# --- sums ----------------------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sums(
    product: Product, gated: bool, x: Array, weight: AdaptedWeight, bias: Array | None, groups: Groups | None
) -> tuple[Array, ...]:
    """Returns the biased sums `[M, N]` with the adapters' products: one, or gate's and up's."""
    halves = _halves(weight.value, gated, groups)
    biases = [None] * len(halves) if bias is None else _halves(bias, gated, groups)
    sums = [product(x, half, groups, bias=b) for half, b in zip(halves, biases, strict=True)]
    factors, products = _adapter_products(product, x, weight, groups)
    parts_of = functools.partial(jnp.split, indices_or_sections=len(sums), axis=1)
    terms = zip(parts_of(factors), parts_of(products), sums, strict=True)
    return tuple(portable.added_to_sums(*term) for term in terms)


def _halves(x: Any, gated: bool, groups: Groups | None) -> list[Any]:
    """Returns a weight or a bias, or the two for gate and up."""
    if not gated:
        return [x]
    axis = 0 if groups is None else 1

    def half(x: Array, index: int) -> Array:
        return jax.lax.index_in_dim(x, index, axis, keepdims=False)

    return [jax.tree.map(functools.partial(half, index=index), x) for index in range(2)]


def _adapter_products(
    product: Product, x: Array, weight: AdaptedWeight, groups: Groups | None
) -> tuple[Float32[Array, "M N"], Float32[Array, "M N"]]:
    """Returns the factors and the float32 product of each row's adapter.

    Rows without an adapter get -0, which added to any number gives this number.
    """
    a, b = value_and_sum(weight.a)[0], value_and_sum(weight.b)[0]
    slots, ranks = a.shape[-3:-1]
    experts = 1 if groups is None else len(groups.sizes)
    a, b = a.reshape(-1, ranks, a.shape[-1]), b.reshape(slots * experts, -1, ranks)
    scales = weight.scales.reshape(slots * experts, -1)
    if weight.rows is None:
        if groups is None:
            products = low_rank_products(x, a, b, jnp.full(1, len(x), jnp.int32), 1)
            return jnp.broadcast_to(scales, products.shape), products
        group = _expert_of_rows(groups.sizes, len(x))[0]
        return scales[group], low_rank_products(x, a, b, groups.sizes, product.unit)
    group = slot = weight.rows.reshape(-1).astype(jnp.int32)
    if groups is not None:
        expert, is_expert = _expert_of_rows(groups.sizes, len(x))
        group = jnp.where((slot >= 0) & is_expert, expert * slots + slot, NO_ADAPTER)
    rows, has_adapter = SortedRows.for_rows(group, slots * experts), (group >= 0)[:, None]
    products = jnp.where(has_adapter, rows.products(x, a, b)[rows.place], -0.0)
    return jnp.where(has_adapter, scales[group], 1.0), products


def _expert_of_rows(sizes: Int[Array, "E"], rows: int) -> tuple[Array, Array]:
    """Returns the expert of each row, and whether it has one."""
    index = jnp.arange(rows, dtype=jnp.int32)
    expert = jnp.searchsorted(jnp.cumsum(sizes, dtype=jnp.int32), index, side="right").astype(jnp.int32)
    return jnp.minimum(expert, len(sizes) - 1), expert < len(sizes)


def _sums_forward(
    product: Product, gated: bool, x: Array, weight: AdaptedWeight, bias: Array | None, groups: Groups | None
) -> tuple[tuple[Array, ...], tuple[Any, ...]]:
    return _sums(product, gated, x, weight, bias, groups), (x, weight, groups)


def _sums_backward(
    product: Product, gated: bool, saved: tuple[Any, ...], gradients: tuple[Array, ...]
) -> tuple[Any, ...]:
    x, weight, groups = saved
    if weight.rows is not None:
        raise NotImplementedError(_NO_GRADIENT)
    # The gradient of the sums is rounded to x's dtype before matrix products.
    g = [rounded(gradient, x.dtype) for gradient in gradients]
    to_inputs = functools.partial(product, groups=groups, layout="kn")
    base = [to_inputs(part, half) for part, half in zip(g, _halves(weight.value, gated, groups), strict=True)]
    joined, lead = jnp.concatenate(g, axis=1), len(weight.a.shape) - 3
    a, b = only_adapter(weight.a, lead), only_adapter(weight.b, lead)
    b = _joined(b, lead) if gated else b
    scales = weight.scales.reshape(*weight.scales.shape[:lead], -1)
    factors = jnp.broadcast_to(scales, joined.shape)
    if groups is not None:
        factors = scales[_expert_of_rows(groups.sizes, len(x))[0]]
    h = rounded(factors * joined.astype(ACCUMULATOR), x.dtype)
    (a_value, _), (b_value, _) = value_and_sum(a), value_and_sum(b)
    v = rounded(to_inputs(h, b_value), x.dtype)
    u = rounded(product(x, a_value, groups), x.dtype)
    dx = rounded(sum(base[1:], base[0]) + to_inputs(v, a_value), x.dtype)
    da = _weight_gradient(product, x, a, v, groups)
    db = _weight_gradient(product, u, b, h, groups)
    if weight.b_mask is not None:
        db = jax.tree.map(lambda x: jnp.where(weight.b_mask.reshape(x.shape), x, jnp.zeros_like(x)), db)
    shaped = jax.tree.map(lambda gradient, like: gradient.reshape(like.shape), (da, db), (weight.a, weight.b))
    da, db = shaped
    cotangent: Any = AdaptedWeight(None, da, db, jnp.zeros_like(weight.scales), None, None)
    return dx, cotangent, None, None


def _joined(weight: Weight, axis: int) -> Weight:
    """Joins the axis of gate and up with the axis of their outputs."""

    def join(x: Array) -> Array:
        return x.reshape(*x.shape[:axis], -1, x.shape[-1])

    return jax.tree.map(join, weight)


def _weight_gradient(product: Product, x: Array, w: Weight, dy: Array, groups: Groups | None) -> Any:
    """Returns the gradient of a weight, or its next sum."""
    _, pull = jax.vjp(lambda w: product(x, w, groups, out_dtype=x.dtype), w)
    return pull(dy)[0]


_sums.defvjp(_sums_forward, _sums_backward)


# --- rows with different adapters, by kernels ------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _with_rows_of_kernels(
    product: Product,
    epilogue: Epilogue,
    out_dtype: jnp.dtype,
    x: Array,
    weight: AdaptedWeight,
    bias: Array | None,
    residual: Array | None,
) -> Array:
    """Returns the epilogue of the sums and of the product of each row's adapter."""
    (a, _), (b, _) = value_and_sum(weight.a), value_and_sum(weight.b)
    slots, ranks = a.shape[:2]
    assert weight.rows is not None
    places = places_of_rows(weight.rows, slots) if weight.places is None else weight.places
    options: dict[str, Any] = {"epilogue": epilogue, "out_dtype": out_dtype}
    separate = functools.partial(single_adapter.biased_sums, product, x, weight.value, bias, epilogue.gated)
    if isinstance(places, BlocksOfRows):
        both = places.sums_and_first_products(x, weight.value, bias, a) or (separate(), places.first_products(x, a))
        return places.joined(*both, b, weight.scales, residual, **options)
    sums = separate()
    products, slot = places.products(x, a, b.reshape(slots, -1, ranks)), weight.rows.reshape(-1).astype(jnp.int32)
    rows = products, places.place, weight.scales.reshape(slots, -1), slot
    return single_adapter.joined_rows(sums, rows, residual, **options)


def _refused_forward(*args: Any) -> tuple[Array, None]:
    return _with_rows_of_kernels(*args), None


def _refused_backward(*_: Any) -> Any:
    raise NotImplementedError(_NO_GRADIENT)


_with_rows_of_kernels.defvjp(_refused_forward, _refused_backward)


# --- epilogue ------------------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _epilogue(
    product: Product,
    epilogue: Epilogue,
    dtype: jnp.dtype,
    out_dtype: jnp.dtype,
    sums: tuple[Array, ...],
    residual: Array | None,
) -> Array:
    return product.apply_epilogue(list(sums), residual, epilogue, out_dtype)


def _epilogue_forward(
    product: Product,
    epilogue: Epilogue,
    dtype: jnp.dtype,
    out_dtype: jnp.dtype,
    sums: tuple[Array, ...],
    residual: Array | None,
) -> tuple[Array, tuple[Any, ...]]:
    # The backward pass needs only the residual's dtype, so an empty array stands for it.
    empty = None if residual is None else jnp.zeros(0, residual.dtype)
    kept = None if epilogue == Epilogue() else tuple(rounded(part, dtype) for part in sums)
    return _epilogue(product, epilogue, dtype, out_dtype, sums, residual), (kept, empty)


def _epilogue_backward(
    product: Product, epilogue: Epilogue, dtype: jnp.dtype, out_dtype: jnp.dtype, saved: tuple[Any, ...], dy: Array
) -> tuple[Any, ...]:
    sums, residual = saved
    dresidual = None if residual is None else dy.astype(residual.dtype)
    if sums is None:
        return (dy.astype(ACCUMULATOR),), dresidual

    def tile(rows: tuple[Array, Array], _: None) -> Array:
        z, dy = rows
        z = z.astype(ACCUMULATOR)
        (dz,) = jax.vjp(lambda z: activated(parts(z), epilogue), z)[1](dy.astype(ACCUMULATOR))
        return dz

    dz = each_row(tile, (jnp.stack(sums, axis=1), dy), None)
    return tuple(parts(dz)), dresidual


_epilogue.defvjp(_epilogue_forward, _epilogue_backward)
