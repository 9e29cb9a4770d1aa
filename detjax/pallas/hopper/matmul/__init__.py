"""Matmul on Hopper GPUs: the forward and backward pass, as products computed by one kernel.

The kernel is in `kernel.py`, its schedules in `plan.py`, the choice of a schedule in `tuning.py`.
"""

from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike, Float32, Int32

from detjax.contract import ACCUMULATOR
from detjax.operands.numerics import activated, flat_rows
from detjax.operands.options import AxisName, Epilogue, WeightLayout
from detjax.operands.products import NO_SUMS, Gradients, MatmulOperands, WeightSums
from detjax.operands.rounding import rounded
from detjax.pallas.hopper.elements import PIECE_LAYOUT, IndexedRows, map_elements
from detjax.pallas.hopper.exchange import Peers
from detjax.pallas.hopper.matmul.activations import ACTIVATIONS
from detjax.pallas.hopper.matmul.adapters import RANK_UNIT as RANK_UNIT
from detjax.pallas.hopper.matmul.adapters import forward_with_adapter as forward_with_adapter
from detjax.pallas.hopper.matmul.adapters import multiplies_adapters as multiplies_adapters
from detjax.pallas.hopper.matmul.kernel import (
    Operands,
    product,
    product_keeping_sums,
    shared_product,
)
from detjax.pallas.hopper.mosaic.exact import fused_multiply_add
from detjax.pallas.hopper.token_sums import token_sums
from detjax.portable.matmul import full_rows
from detjax.runtime import compilation
from detjax.runtime.device_links import DeviceLinks


def forward(
    operands: MatmulOperands,
    *,
    layout: WeightLayout,
    epilogue: Epilogue,
    out_dtype: DTypeLike,
    multiply: Callable[..., Array] = product,
) -> Array:
    """Returns `[*B, N]` for rows `[*B, K]`; see `detjax.ops.matmul` for the arguments.

    `multiply` is the kernel of the product, with the arguments of `product`.

    Raises:
        NotImplementedError: the matrix unit does not take x's dtype.
    """
    y = multiply(_flat(operands), layout=layout, epilogue=epilogue, out_dtype=out_dtype)
    return y.reshape(*operands.x.shape[:-1], y.shape[-1])


def shared_forward(
    operands: MatmulOperands, axis_name: AxisName, links: DeviceLinks, *, epilogue: Epilogue, out_dtype: DTypeLike
) -> Array | None:
    """Returns `[*B, devices * N]`, or None if no kernel can write it; see `detjax.ops.matmul.shared_matmul`.

    Raises:
        NotImplementedError: the matrix unit does not take x's dtype.
    """
    if not compilation.is_chained():
        return None
    flat = _flat(operands)._replace(peers=Peers.over(axis_name, links))
    y = shared_product(flat, layout="nk", epilogue=epilogue, out_dtype=out_dtype)
    return None if y is None else y.reshape(*operands.x.shape[:-1], y.shape[-1])


def forward_keeping_sums(
    operands: MatmulOperands,
    *,
    layout: WeightLayout,
    epilogue: Epilogue,
    multiply: Callable[..., tuple[Array, tuple[Array, ...]]] = product_keeping_sums,
) -> tuple[Array, tuple[Array, ...]]:
    """Returns the result of `forward` in x's dtype, and the biased sums `[*B, N]` of each part, for `backward`.

    `multiply` is the kernel of both, with the arguments of `product_keeping_sums`.
    """
    y, z = multiply(_flat(operands), layout=layout, epilogue=epilogue)
    shape = *operands.x.shape[:-1], y.shape[-1]
    return y.reshape(shape), tuple(part.reshape(shape) for part in z)


def biased_sums(
    operands: MatmulOperands, *, multiply: Callable[..., tuple[Array, tuple[Array, ...]]] = product_keeping_sums
) -> tuple[Array, ...]:
    """Returns the biased float32 sums `[*B, N]` of gate and up, whose stacked weights are read as they lie.

    `multiply` is the kernel, with the arguments of `product_keeping_sums`.
    """
    x, w, bias, _ = operands
    options = {"layout": "nk", "epilogue": Epilogue(gated=True), "out_dtype": ACCUMULATOR}
    _, z = multiply(Operands(flat_rows(x), w, bias), **options)
    return tuple(part.reshape(*x.shape[:-1], part.shape[-1]) for part in z)


def _flat(operands: MatmulOperands) -> Operands:
    x, w, bias, residual = operands
    return Operands(flat_rows(x), w, bias, None if residual is None else flat_rows(residual))


def apply_epilogue(
    sums: Sequence[Array],
    biases: Sequence[Array] | None,
    residual: Array | None,
    *,
    epilogue: Epilogue,
    out_dtype: DTypeLike,
) -> Array:
    """Returns rows `[*B, N]` with the bits of `forward`, from its sums; see `detjax.portable.matmul.apply_epilogue`."""
    added = [] if biases is None else [full_rows(bias, sums[0]) for bias in biases]
    last = [] if residual is None else [residual.astype(ACCUMULATOR)]

    def apply(*elements: Array) -> Array:
        z, elements = elements[: len(sums)], elements[len(sums) :]
        biased = [part + bias for part, bias in zip(z, elements, strict=False)] if added else list(z)
        y = activated(biased, epilogue, ACTIVATIONS)
        return (y + elements[-1] if last else y).astype(out_dtype)

    return map_elements(apply, *sums, *added, *last)


def add_adapter(  # noqa: PLR0913
    sums: Sequence[Array],
    products: Sequence[Array],
    scales: Sequence[Array],
    residual: Array | None,
    *,
    dtype: DTypeLike,
    epilogue: Epilogue,
    out_dtype: DTypeLike,
    keeps: bool,
) -> tuple[Array, tuple[Array, ...]]:
    """Returns rows `[*B, N]` from the sums and the adapter's products of each part, `[*B, N]` float32.

    If `keeps`, also the parts that the epilogue consumed, rounded to `dtype`. See `contract.RANK_STEP`; `scales` are
    `[N]` float32 of each part.
    """
    count = len(sums)
    last = [] if residual is None else [residual]

    def apply(*elements: Array) -> tuple[Array, tuple[Array, ...]]:
        rest, factors = elements[:-count], elements[-count:]
        z = _added(factors, rest[count : 2 * count], rest[:count])
        y = _rounded_result(z, rest[2 * count :], epilogue, out_dtype)
        return y, tuple(part.astype(dtype) for part in z) if keeps else ()

    return map_elements(apply, *sums, *products, *last, columns=scales)


def add_adapters_of_rows(  # noqa: PLR0913
    sums: Sequence[Float32[Array, "M N"]],
    products: Float32[Array, "P _"],
    place: Int32[Array, "M"],
    scales: Float32[Array, "S _"],
    slot: Int32[Array, "M"],
    residual: Array | None,
    *,
    epilogue: Epilogue,
    out_dtype: DTypeLike,
) -> Array:
    """Returns rows `[M, N]` from the sums of each part, with the product and the factors of each row's adapter.

    Args:
        sums: the sums of each part.
        products: the adapters' products, whose columns are the parts' in turn.
        place: the row of the products for each row; -1: it has no adapter.
        scales: the factors of each adapter, with the same columns.
        slot: the adapter of each row; -1: it has none.
        residual: an array to add to the result.
        epilogue: what is applied to the sums.
        out_dtype: the dtype of the result.
    """
    count, columns = len(sums), [index * sums[0].shape[1] for index in range(len(sums))]
    last = [] if residual is None else [residual]
    # -0 added to any number gives this number.
    terms = [IndexedRows(products, place, -0.0, first) for first in columns]
    factors = [IndexedRows(scales, slot, 1.0, first) for first in columns]

    def apply(*elements: Array) -> Array:
        z = _added(elements[-count:], elements[-2 * count : -count], elements[:count])
        return _rounded_result(z, elements[count : -2 * count], epilogue, out_dtype)

    return map_elements(apply, *sums, *last, rows=(*terms, *factors))


def _added(scales: Iterable[Array], products: Iterable[Array], sums: Iterable[Array]) -> list[Array]:
    """Returns the sums plus the scaled products of adapters."""
    return [fused_multiply_add(*one, layout=PIECE_LAYOUT) for one in zip(scales, products, sums, strict=True)]


def _rounded_result(z: list[Array], residual: Sequence[Array], epilogue: Epilogue, out_dtype: DTypeLike) -> Array:
    """Returns the epilogue of sums, plus the residual if there is one, rounded once."""
    y = activated(z, epilogue, ACTIVATIONS)
    return (y + residual[0].astype(ACCUMULATOR) if residual else y).astype(out_dtype)


def backward(
    operands: MatmulOperands,
    dy: Array,
    sums: WeightSums = NO_SUMS,
    z: tuple[Array, ...] | None = None,
    *,
    layout: WeightLayout,
    epilogue: Epilogue,
    multiply: Callable[..., Array] = product,
) -> Gradients:
    """Returns the gradients of x, w and bias; for a w or bias with a running sum, the next sum instead.

    With z = x @ w + bias, rounded to x's dtype, and y = epilogue(z), dz is the gradient of z, rounded to x's dtype. If
    z was not kept, it is recomputed. Then

        dx[m, k]    = sum over n ascending (gate's, then up's) of dz[m, n] * w[k, n]
        dw[k, n]    = sum over tokens m ascending of x[m, k] * dz[m, n]
        dbias[n]    = sum over tokens m ascending of dz[m, n], see `token_sums`

    each in one float32 accumulator that is rounded once. A running sum stays in float32 and is not rounded. `multiply`
    is the kernel of these products, with the arguments of `product`.

    Raises:
        NotImplementedError: the matrix unit does not take x's dtype.
    """
    (x, w, bias, _), (w_sum, bias_sum) = operands, sums
    flat_x = flat_rows(x)
    halves = [w] if w.ndim == 2 else [w[0], w[1]]
    if epilogue == Epilogue():
        dz = rounded(flat_rows(dy), x.dtype)
    else:
        z = _biased_sums(flat_x, halves, bias, layout, multiply) if z is None else tuple(map(flat_rows, z))
        dz = gradient_of_sums(z, flat_rows(dy), epilogue)

    # The halves of a stacked "nk" weight are already contiguous along N; contracting "kn" halves at once takes a copy.
    joined = w.reshape(-1, w.shape[-1]) if layout == "nk" else jnp.concatenate(halves, axis=1)
    transposed: WeightLayout = "kn" if layout == "nk" else "nk"
    dx = multiply(Operands(dz, joined), layout=transposed, epilogue=Epilogue(), out_dtype=x.dtype)

    if layout == "nk":
        dw = weight_gradient(flat_x, dz, None if w_sum is None else w_sum.reshape(joined.shape), multiply=multiply)
    else:
        parts_of_dz = jnp.split(dz, len(halves), axis=1)
        starts = [None] * len(halves) if w_sum is None else list(w_sum.reshape(len(halves), *halves[0].shape))
        pairs = zip(parts_of_dz, starts, strict=True)
        dw = jnp.stack([weight_gradient(part, flat_x, start, multiply=multiply) for part, start in pairs])
    dbias = None
    if bias is not None:
        start = jnp.zeros(bias.size, ACCUMULATOR) if bias_sum is None else bias_sum.reshape(-1)
        dbias = token_sums(start, dz).reshape(bias.shape)
        dbias = rounded(dbias, bias.dtype) if bias_sum is None else dbias
    return dx.reshape(x.shape), dw.reshape(w.shape), dbias


def weight_gradient(
    x: Array, dz: Array, start: Array | None = None, *, multiply: Callable[..., Array] = product
) -> Array:
    """Returns the gradient `[N, K]` of a weight from rows `[M, K]` and the gradient `[M, N]` of their sums.

    With `start`, it is the next value of these running sums, otherwise rounded to x's dtype.
    """
    out_dtype = x.dtype if start is None else start.dtype
    operands = Operands(dz, x, start=start)
    return multiply(operands, token_layout="km", layout="kn", epilogue=Epilogue(), out_dtype=out_dtype)


def _biased_sums(
    x: Array, halves: list[Array], bias: Array | None, layout: WeightLayout, multiply: Callable[..., Array]
) -> tuple[Array, ...]:
    """Returns the biased sums `[M, N]` of each part, rounded to x's dtype."""
    z = [multiply(Operands(x, half), layout=layout, epilogue=Epilogue(), out_dtype=ACCUMULATOR) for half in halves]
    if bias is not None:
        z = [total + b.astype(ACCUMULATOR) for total, b in zip(z, bias.reshape(len(z), 1, -1), strict=True)]
    return tuple(rounded(total, x.dtype) for total in z)


def gradient_of_sums(z: tuple[Array, ...], dy: Array, epilogue: Epilogue) -> Array:
    """Returns the gradient of the biased sums in their dtype: `[M, N]`, or `[M, 2 N]` for gate and up."""
    # Without the barrier XLA could fuse this arithmetic with the surrounding program, differently in each program.
    z, dy = lax.optimization_barrier((z, dy))
    wide = [total.astype(ACCUMULATOR) for total in z]
    dz = jax.vjp(lambda *z: activated(z, epilogue), *wide)[1](dy.astype(ACCUMULATOR))
    return jnp.concatenate([rounded(part, z[0].dtype) for part in dz], axis=1)
