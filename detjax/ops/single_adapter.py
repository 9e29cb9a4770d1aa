"""Products with one adapter for all rows, as in training: no rows are sorted, and kernels add the adapter themselves.

The bits are those that `ops.adapters` computes for rows with different adapters. Per weight there are the products of
the contract and no others: `u`, the sum, and the adapter's product forward; `v`, x's two and the factors' backward.
"""

import functools
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike

from detjax.contract import ACCUMULATOR
from detjax.operands.accumulated_weight import Weight, value_and_sum, weight_cotangent
from detjax.operands.adapted_weight import AdaptedWeight, only_adapter
from detjax.operands.numerics import activated
from detjax.operands.options import Epilogue
from detjax.operands.products import AdapterOperands, MatmulOperands
from detjax.operands.quantized_weight import QuantizedWeight
from detjax.operands.rounding import rounded
from detjax.ops.dispatch import Operation, backend_modules, one_by_one, with_vmap_rule
from detjax.portable.tiles import each_row
from detjax.runtime import fusions

_MATMUL: Final = Operation("matmul", backend_modules("matmul", mma="mma"))

_FEW_ROWS: Final = 1024
"""Most rows whose sums of gate and up come from one product."""


@runtime_checkable
class Product(Protocol):
    """`ops.matmul` of all rows with one weight; by default with the layout "nk", in float32."""

    def __call__(self, x: Array, w: Any, groups: None, **options: Any) -> Array:
        """Returns the product with the options of `ops.matmul`."""
        ...


def is_served() -> bool:
    """Returns whether the backend has kernels for products with one adapter."""
    return hasattr(_MATMUL.module(), "add_adapter")


class Factors(NamedTuple):
    """An adapter's factors, with ranks of zeros up to the width that kernels load.

    Attributes:
        a: `[R, K]`.
        b: `[N, R]`, or `[2, N, R]` for gate and up.
        scales: `[N]`, or `[2, N]`, float32.
    """

    a: Array
    b: Array
    scales: Array


def padded_factors(weight: AdaptedWeight) -> Factors:
    """Returns the factors of the only adapter of a weight."""
    a, b = (value_and_sum(only_adapter(factor, 0))[0] for factor in (weight.a, weight.b))
    missing = -len(a) % _MATMUL.kernels().RANK_UNIT
    a, b = jnp.pad(a, ((0, missing), (0, 0))), jnp.pad(b, (*((0, 0),) * (b.ndim - 1), (0, missing)))
    return Factors(a, b, weight.scales[0])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def one_adapters_product(
    product: Product,
    epilogue: Epilogue,
    out_dtype: jnp.dtype,
    x: Array,
    weight: AdaptedWeight,
    bias: Array | None,
    residual: Array | None,
) -> Array:
    """Returns the epilogue of the sums `[M, N]` of rows `[M, K]` and of a weight with one adapter, rounded once."""
    return _computed(product, epilogue, out_dtype, x, weight, bias, residual, keeps=False)[0]


def _computed(  # noqa: PLR0913
    product: Product,
    epilogue: Epilogue,
    out_dtype: DTypeLike,
    x: Array,
    weight: AdaptedWeight,
    bias: Array | None,
    residual: Array | None,
    *,
    keeps: bool,
) -> tuple[Array, tuple[Array, ...], Array]:
    """Returns the result, the sums rounded to x's dtype if they are kept, and the rows times the first factor."""
    kernels, factors = _MATMUL.kernels(), padded_factors(weight)
    u = product(x, factors.a, None, out_dtype=x.dtype)
    options: dict[str, Any] = {"epilogue": epilogue, "out_dtype": out_dtype, "keeps": keeps}
    fused = not fusions.is_unfused("matmul_epilogue") and (not keeps or out_dtype == x.dtype)
    if fused and kernels.multiplies_adapters(weight.value, len(factors.a)):

        def multiply(x: Array, u: Array, residual: Array | None, *shared: Any) -> Any:
            w, bias, b, scales = shared
            operands, adapter = MatmulOperands(x, w, bias, residual), AdapterOperands(u, b, scales)
            return kernels.forward_with_adapter(operands, adapter, layout="nk", **options)

        batched = with_vmap_rule(multiply, (True, True, True, False, False, False, False))
        return *batched(x, u, residual, weight.value, bias, factors.b, factors.scales), u
    sums = biased_sums(product, x, weight.value, bias, epilogue.gated)
    products = [product(u, b, None) for b in _parts(factors.b, epilogue.gated)]
    scales = _parts(factors.scales, epilogue.gated)
    return *joined(sums, products, scales, residual, dtype=x.dtype, **options), u


def biased_sums(product: Product, x: Array, w: Any, bias: Array | None, gated: bool) -> list[Array]:
    """Returns the biased sums `[M, N]` of a weight, float32, or the two of gate and up."""
    kernels = _MATMUL.kernels()
    # Copies of the two weights would take longer than the result of gate and up together, which nobody reads.
    if gated and len(x) <= _FEW_ROWS and not isinstance(w, QuantizedWeight):

        def multiply(x: Array, w: Array, bias: Array | None) -> tuple[Array, ...]:
            return kernels.biased_sums(MatmulOperands(x, w, bias))

        return list(with_vmap_rule(multiply, (True, False, False))(x, w, bias))
    biases = [None, None] if bias is None else _parts(bias, gated)
    return [product(x, part, None, bias=b) for part, b in zip(_parts(w, gated), biases, strict=False)]


def joined(
    sums: Sequence[Array],
    products: Sequence[Array],
    scales: Sequence[Array],
    residual: Array | None,
    **options: Any,
) -> tuple[Array, tuple[Array, ...]]:
    """Returns the epilogue of the sums and the adapters' products, and the sums that it consumed, if they are kept.

    For `scales` and the options see `add_adapter` of the backends.
    """
    kernels, count = _MATMUL.kernels(), len(sums)

    def join(residual: Array | None, *arrays: Array) -> Any:
        z, terms, scales = arrays[:count], arrays[count : 2 * count], arrays[2 * count :]
        return kernels.add_adapter(z, terms, scales, residual, **options)

    batched = with_vmap_rule(join, (True,) * (1 + 2 * count) + (False,) * count)
    return batched(residual, *sums, *products, *scales)


def joined_rows(sums: list[Array], rows: tuple[Array, ...], residual: Array | None, **options: Any) -> Array:
    """Returns the epilogue of the sums `[M, N]` of each part, each row with the product of its own adapter.

    `rows` are an array of products, the place of each row's, an array of factors, and the slot of each row; for these
    and the options see `add_adapters_of_rows` of the backends.
    """
    join = functools.partial(_MATMUL.kernels().add_adapters_of_rows, **options)
    return one_by_one(join, (sums, *rows, residual))


def _parts(x: Any, gated: bool) -> list[Any]:
    """Returns a weight, or the two for gate and up."""
    if not gated:
        return [x]
    return [jax.tree.map(lambda leaf, index=index: leaf[index], x) for index in range(2)]


def _forward(
    product: Product,
    epilogue: Epilogue,
    out_dtype: jnp.dtype,
    x: Array,
    weight: AdaptedWeight,
    bias: Array | None,
    residual: Array | None,
) -> tuple[Array, tuple[Any, ...]]:
    y, z, u = _computed(product, epilogue, out_dtype, x, weight, bias, residual, keeps=epilogue != Epilogue())
    # The backward pass needs only the residual's dtype, so an empty array stands for it.
    empty = None if residual is None else jnp.zeros(0, residual.dtype)
    return y, (x, u, weight, z, empty)


def _backward(
    product: Product, epilogue: Epilogue, out_dtype: jnp.dtype, saved: tuple[Any, ...], dy: Array
) -> tuple[Any, ...]:
    x, u, weight, z, residual = saved
    kernels, factors = _MATMUL.kernels(), padded_factors(weight)

    def gradients(rows: tuple[Array, ...], scales: tuple[Array, ...]) -> tuple[list[Array], Array]:
        *z, dy = rows
        dz: Any = (dy,)
        if epilogue != Epilogue():
            wide = [part.astype(ACCUMULATOR) for part in z]
            dz = jax.vjp(lambda *z: activated(z, epilogue), *wide)[1](dy.astype(ACCUMULATOR))
        g = [rounded(part, x.dtype) for part in dz]
        pairs = zip(scales, g, strict=True)
        h = [rounded(scale[None] * part.astype(ACCUMULATOR), x.dtype) for scale, part in pairs]
        return g, h[0] if len(h) == 1 else jnp.concatenate(h, axis=1)

    g, h = each_row(gradients, (*z, dy), tuple(_parts(factors.scales, epilogue.gated)))
    v = product(h, factors.b.reshape(-1, factors.b.shape[-1]), None, layout="kn", out_dtype=x.dtype)
    dx = _input_gradient(product, weight.value, g, v, factors.a)

    def next_factor(rows: Array, dz: Array, factor: Weight, ranks: int) -> Any:
        """The gradient of a factor, or its next sum, with its padding."""
        _, start = value_and_sum(factor)
        if start is not None:
            missing = dz.shape[1] - start.shape[0], rows.shape[1] - start.shape[1]
            start = jnp.pad(start, [(0, size) for size in missing])
        return kernels.weight_gradient(rows, dz, start)[: factor.shape[0], :ranks]

    a, wide_b = only_adapter(weight.a, 0), _joined(only_adapter(weight.b, 0))
    da = next_factor(x, v, a, x.shape[1])
    db = next_factor(u, h, wide_b, wide_b.shape[1])
    if weight.b_mask is not None:
        db = jnp.where(weight.b_mask.reshape(db.shape), db, jnp.zeros_like(db))
    pairs = zip((weight.a, weight.b), (da, db), strict=True)
    a, b = (weight_cotangent(factor, gradient.reshape(factor.shape)) for factor, gradient in pairs)
    cotangent: Any = AdaptedWeight(None, a, b, jnp.zeros_like(weight.scales), None, None)
    return dx, cotangent, None, None if residual is None else dy.astype(residual.dtype)


def _input_gradient(product: Product, weight: Any, g: list[Array], v: Array, a: Array) -> Array:
    """Returns the gradient of x: the weight's product, gate's before up's, and the adapter's, rounded once."""
    kernels, dtype = _MATMUL.kernels(), v.dtype
    fused = len(g) == 1 and not fusions.is_unfused("matmul_epilogue")
    if fused and kernels.multiplies_adapters(weight, len(a)):

        def multiply(g: Array, v: Array, w: Array, a: Array) -> Array:
            adapter = AdapterOperands(v, a, None)
            options: dict[str, Any] = {"epilogue": Epilogue(), "out_dtype": dtype, "keeps": False}
            return kernels.forward_with_adapter(MatmulOperands(g, w), adapter, layout="kn", **options)[0]

        return with_vmap_rule(multiply, (True, True, False, False))(g[0], v, weight, a)
    total = None
    for part, w in zip(g, _parts(weight, len(g) > 1), strict=True):
        total = product(part, w, None, layout="kn", residual=total)
    return product(v, a, None, layout="kn", residual=total, out_dtype=dtype)


def _joined(factor: Weight) -> Weight:
    """Joins the axis of gate and up, if there is one, with the axis of their outputs."""
    return jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), factor)


one_adapters_product.defvjp(_forward, _backward)
