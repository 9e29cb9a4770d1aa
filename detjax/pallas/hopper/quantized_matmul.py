"""Products with quantized weights on Hopper GPUs.

Plain activations: a kernel widens codes on the chip, with the bits of a product with the widened weight. Quantized
activations and e4m3 weights: another one widens codes without scales, and scales the products of each block. Experts,
and shapes that it does not take, are composed of a product of bfloat16 for each block of columns, with the same bits.
bfloat16 holds e4m3 numbers exactly, so the kernel of `matmul` adds a block's products in a fresh accumulator, and its
bits do not depend on the number of rows. Everything else is elementwise.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike

from detjax.contract import ACCUMULATOR, FP8_BLOCK
from detjax.operands.numerics import flat_rows, round_up
from detjax.operands.options import Epilogue
from detjax.operands.products import GroupedOperands, MatmulOperands
from detjax.operands.quantized_weight import QuantizedWeight, scales_of, widened
from detjax.operands.rounding import rounded
from detjax.pallas.hopper import grouped_matmul as grouped
from detjax.pallas.hopper import matmul as plain
from detjax.pallas.hopper.quantized.packed import packed_plan, packed_product
from detjax.pallas.hopper.quantized.scaled import (
    ScaledPlan,
    has_one_quantization,
    scaled_plan,
    scaled_product,
)
from detjax.portable.quantized_matmul import gradients, grouped_gradients, quantized_rows
from detjax.portable.tiles import fused_multiply_add, sealed

_COLUMNS = 64
"""Blocks are padded with zeros to a multiple of this number of columns, which kernels load at once."""

type _Multiply = Callable[[Array, Array], Array]
"""A function of rows `[M, K]` and weights `[..., N, K]` in bfloat16 that returns their float32 products."""

type _ByRow = Callable[[Array], Array]
"""A function of numbers of outputs, `[..., N]`, that returns them for each row, or `[1, N]` for all rows."""


def takes_codes(operands: MatmulOperands, out_dtype: DTypeLike) -> bool:
    """Returns whether a kernel multiplies plain rows with the codes of the weight, rather than with a widened one."""
    return packed_plan(operands, out_dtype=out_dtype) is not None


def forward(operands: MatmulOperands, *, epilogue: Epilogue, out_dtype: DTypeLike, is_composed: bool = False) -> Array:
    """Returns rows `[*B, N]` for rows `[*B, K]`; see `detjax.ops.matmul` for the operands and options.

    With `is_composed`, quantized activations take a product for each block even if one kernel can compute all: what its
    bits are compared with.
    """
    x, w, bias, residual = operands
    if not w.is_computed:
        plan = packed_plan(operands, out_dtype=out_dtype)
        if plan is None:
            return plain.forward(operands._replace(w=widened(w)), layout="nk", epilogue=epilogue, out_dtype=out_dtype)
        return packed_product(operands, plan, epilogue=epilogue, out_dtype=out_dtype)
    flat_residual = None if residual is None else flat_rows(residual)
    flat = MatmulOperands(flat_rows(x), w, bias, flat_residual)
    if not is_composed and has_one_quantization(w) and (plan := scaled_plan(flat, out_dtype=out_dtype)) is not None:
        y = scaled_product(flat, plan, epilogue=epilogue)
    else:
        sums = _sums(flat, is_composed=is_composed)
        y = plain.apply_epilogue(sums, _biases(bias, len(sums)), flat_residual, epilogue=epilogue, out_dtype=out_dtype)
    return y.reshape(*x.shape[:-1], y.shape[-1])


def backward(
    operands: MatmulOperands, dy: Array, bias_sum: Array | None = None, *, epilogue: Epilogue
) -> tuple[Array, Array | None]:
    """Returns the gradients of x and of the bias, or its next sum if it has one; see `contract`."""
    if not operands.w.is_computed:
        dense = operands._replace(w=widened(operands.w))
        dx, _, dbias = plain.backward(dense, dy, (None, bias_sum), layout="nk", epilogue=epilogue)
        return dx, dbias
    sums = _sums(operands)
    biased = _biased(sums, _biases(operands.bias, len(sums)), operands.x.dtype)
    return gradients(operands, _gradient_of_sums(biased, flat_rows(dy), epilogue), bias_sum)


def grouped_forward(operands: GroupedOperands, *, epilogue: Epilogue, out_dtype: DTypeLike, unit: int) -> Array:
    """Returns rows `[M, N]` for rows `[M, K]` that are sorted by expert; see `detjax.ops.grouped_matmul`."""
    sums, biases = _grouped_sums(operands, unit)
    return plain.apply_epilogue(sums, biases, None, epilogue=epilogue, out_dtype=out_dtype)


def grouped_backward(
    operands: GroupedOperands, dy: Array, bias_sum: Array | None = None, *, epilogue: Epilogue, unit: int
) -> tuple[Array, Array | None]:
    """Returns the gradients of x and of the bias, or its next sum if it has one; see `backward`."""
    biased = _biased(*_grouped_sums(operands, unit), operands.x.dtype)
    return grouped_gradients(operands, _gradient_of_sums(biased, dy, epilogue), bias_sum)


def _sums(operands: MatmulOperands, *, is_composed: bool = False) -> list[Array]:
    """Returns the float32 sums `[M, N]` of each part, without biases."""

    def multiply(x: Array, w: Array) -> Array:
        return plain.forward(MatmulOperands(x, w), layout="nk", epilogue=Epilogue(), out_dtype=ACCUMULATOR)

    w, x = operands.w, flat_rows(operands.x)
    matrices = [w] if w.ndim == 2 else [w.matrix(0), w.matrix(1)]
    plan = None if is_composed else scaled_plan(MatmulOperands(x, matrices[0]), out_dtype=ACCUMULATOR)
    if plan is None:
        return [sum_of_blocks(x, matrix, multiply, lambda numbers: numbers[None]) for matrix in matrices]
    return [_scaled_sum(MatmulOperands(x, matrix), plan) for matrix in matrices]


def _scaled_sum(operands: MatmulOperands, plan: ScaledPlan) -> Array:
    """Returns the float32 sums `[M, N]` of rows with a matrix, from the kernel that scales."""
    w = operands.w
    sources = 1 if w.input_scales is None else w.input_scales.shape[-1]
    by_source = [scaled_product(operands, plan, epilogue=Epilogue(), source=source) for source in range(sources)]
    return by_source[0] if w.source is None else _chosen_by_source(by_source, w.source[None])


def _grouped_sums(operands: GroupedOperands, unit: int) -> tuple[list[Array], list[Array] | None]:
    """Returns the float32 sums `[M, N]` of each part, and the biases of each row."""
    x, w, bias, group_sizes, _ = operands
    ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
    expert = jnp.searchsorted(ends, jnp.arange(len(x), dtype=jnp.int32), side="right")
    expert = jnp.minimum(expert, len(w) - 1)

    def multiply(x: Array, w: Array) -> Array:
        options: dict[str, Any] = {"layout": "nk", "epilogue": Epilogue(), "out_dtype": ACCUMULATOR, "unit": unit}
        return grouped.forward(GroupedOperands(x, w, None, group_sizes), **options)

    matrices = [w] if w.ndim == 3 else [w.matrix(slice(None), 0), w.matrix(slice(None), 1)]
    sums = [sum_of_blocks(x, matrix, multiply, lambda numbers: numbers[expert]) for matrix in matrices]
    if bias is None:
        return sums, None
    rows = bias[expert]
    return sums, [rows] if len(matrices) == 1 else [rows[:, 0], rows[:, 1]]


def _biases(bias: Array | None, parts: int) -> list[Array] | None:
    return None if bias is None else [bias] if parts == 1 else [bias[0], bias[1]]


def _biased(sums: list[Array], biases: list[Array] | None, dtype: DTypeLike) -> tuple[Array, ...]:
    """Returns the biased sums, rounded."""
    added = [None] * len(sums) if biases is None else biases
    pairs = zip(sums, added, strict=True)
    return tuple(rounded(z if bias is None else z + plain.full_rows(bias, z), dtype) for z, bias in pairs)


def _gradient_of_sums(z: tuple[Array, ...], dy: Array, epilogue: Epilogue) -> Array:
    """Returns the gradient of the biased sums, `[M, parts, N]`."""
    dz = rounded(dy, z[0].dtype) if epilogue == Epilogue() else plain.gradient_of_sums(z, dy, epilogue)
    return dz.reshape(len(dz), len(z), -1)


def sum_of_blocks(x: Array, w: QuantizedWeight, multiply: _Multiply, by_row: _ByRow) -> Array:
    """Returns the float32 sums `[M, N]` of rows with a matrix, or with the matrix of each row's expert.

    `multiply` multiplies the numbers of a block of columns, which bfloat16 holds exactly.
    """
    if w.format.activations == "group":
        numbers, scales = quantized_rows(x, w.format.group)
        weight_scales = scales_of(w)

        def add(block: Array, product: Array, acc: Array) -> Array:
            scale = lax.dynamic_slice_in_dim(scales, block, 1, axis=1)
            weight_scale = by_row(lax.dynamic_index_in_dim(weight_scales, block, axis=-1, keepdims=False))
            return fused_multiply_add(product, sealed(jnp.broadcast_to(scale * weight_scale, acc.shape)), acc)

        return _by_blocks(numbers, w, multiply, add)
    if w.input_scales is None:
        return _sum_by_rows(*quantized_rows(x, x.shape[-1]), w, multiply, by_row)
    sources = w.input_scales.shape[-1]
    by_source = []
    for source in range(sources):
        scale = by_row(w.input_scales[..., source, None])
        by_source.append(_sum_by_rows(*quantized_rows(x, x.shape[-1], scale), w, multiply, by_row))
    return by_source[0] if w.source is None else _chosen_by_source(by_source, by_row(w.source))


def _chosen_by_source(by_source: list[Array], source: Array) -> Array:
    """Chooses each output from the sums for its source."""
    y = by_source[0]
    for number, sums in enumerate(by_source[1:], start=1):
        y = jnp.where(jnp.broadcast_to(source == number, y.shape), sums, y)
    return y


def _sum_by_rows(numbers: Array, scales: Array, w: QuantizedWeight, multiply: _Multiply, by_row: _ByRow) -> Array:
    flat = numbers.reshape(len(numbers), -1)
    flat = jnp.pad(flat, [(0, 0), (0, -flat.shape[1] % FP8_BLOCK)])
    blocks = flat.reshape(len(flat), -1, FP8_BLOCK)
    acc = _by_blocks(blocks, w, multiply, lambda block, product, acc: acc + product)
    return sealed(scales[:, :1] * sealed(by_row(scales_of(w)[..., 0]) * acc))


def _by_blocks(
    numbers: Array, w: QuantizedWeight, multiply: _Multiply, add: Callable[[Array, Array, Array], Array]
) -> Array:
    """Adds the products of blocks `[M, blocks, columns]`, ascending."""
    rows, blocks, columns = numbers.shape
    padding = round_up(columns, _COLUMNS) - columns
    numbers = jnp.pad(numbers.astype(jnp.bfloat16).swapaxes(0, 1), [(0, 0), (0, 0), (0, padding)])
    missing = blocks * columns - w.codes.shape[-1]
    codes = jnp.pad(w.codes, [(0, 0)] * (w.ndim - 1) + [(0, missing)])

    def step(block: Array, acc: Array) -> Array:
        some = lax.dynamic_slice_in_dim(codes, block * columns, columns, axis=-1)
        weights = lax.bitcast_convert_type(some, jnp.float8_e4m3fn).astype(jnp.bfloat16)
        weights = jnp.pad(weights, [(0, 0)] * (w.ndim - 1) + [(0, padding)])
        x = lax.dynamic_index_in_dim(numbers, block, keepdims=False)
        return add(block, multiply(x, weights), acc)

    start = jnp.zeros((rows, w.codes.shape[-2]), ACCUMULATOR)
    return lax.fori_loop(0, blocks, step, start)
