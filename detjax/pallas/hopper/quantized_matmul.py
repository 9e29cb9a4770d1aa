"""Products with quantized weights on Hopper GPUs.

Plain activations: a kernel widens codes on the chip, with the bits of a product with the widened weight. Quantized
activations and e4m3 weights: another kernel multiplies the codes as they are and scales the products of each block, for
one weight as for experts. Its bits within a block are the matrix unit's for e4m3 operands, so it computes either all
products of a weight or none: see `codes.serves`.

Weights that it does not serve take a product of bfloat16 for each block of columns. bfloat16 holds e4m3 numbers
exactly, the kernel of `matmul` adds a block's products in a fresh accumulator, and everything else is elementwise.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike

from detjax.contract import ACCUMULATOR
from detjax.operands.numerics import flat_rows, round_up
from detjax.operands.options import Epilogue
from detjax.operands.products import GroupedOperands, MatmulOperands, RowCodes
from detjax.operands.quantized_weight import QuantizedWeight, scales_of, widened
from detjax.operands.rounding import rounded
from detjax.pallas.hopper import grouped_matmul as grouped
from detjax.pallas.hopper import matmul as plain
from detjax.pallas.hopper.quantized.codes import codes_plan, codes_product, grouped_codes_product, serves
from detjax.pallas.hopper.quantized.packed import packed_plan, packed_product
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


def takes_row_codes(w: QuantizedWeight) -> bool:
    """Returns whether `forward` takes the codes of rows from another kernel, with a scale for each group of columns."""
    return w.format.activations == "group" and serves(w)


def forward(
    operands: MatmulOperands, *, epilogue: Epilogue, out_dtype: DTypeLike, codes: RowCodes | None = None
) -> Array:
    """Returns rows `[*B, N]` for rows `[*B, K]`; see `detjax.ops.matmul` for the operands and options.

    `codes` are the rows' own; None: they are computed here. See `takes_row_codes`.
    """
    x, w, bias, residual = operands
    if not w.is_computed:
        plan = packed_plan(operands, out_dtype=out_dtype)
        if plan is None:
            return plain.forward(operands._replace(w=widened(w)), layout="nk", epilogue=epilogue, out_dtype=out_dtype)
        return packed_product(operands, plan, epilogue=epilogue, out_dtype=out_dtype)
    flat_residual = None if residual is None else flat_rows(residual)
    flat = MatmulOperands(flat_rows(x), w, bias, flat_residual)
    if serves(w) and _has_one_quantization(w, w.ndim - 1):
        y = codes_product(flat, codes_plan(flat, out_dtype=out_dtype), epilogue=epilogue, codes=codes)
    else:
        sums = _sums(flat)
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
    if serves(operands.w) and _has_one_quantization(operands.w, operands.w.ndim - 2):
        return grouped_codes_product(operands, epilogue=epilogue, out_dtype=out_dtype, unit=unit)
    sums, biases = _grouped_sums(operands, unit)
    return plain.apply_epilogue(sums, biases, None, epilogue=epilogue, out_dtype=out_dtype)


def grouped_backward(
    operands: GroupedOperands, dy: Array, bias_sum: Array | None = None, *, epilogue: Epilogue, unit: int
) -> tuple[Array, Array | None]:
    """Returns the gradients of x and of the bias, or its next sum if it has one; see `backward`."""
    biased = _biased(*_grouped_sums(operands, unit), operands.x.dtype)
    return grouped_gradients(operands, _gradient_of_sums(biased, dy, epilogue), bias_sum)


def _has_one_quantization(w: QuantizedWeight, parts: int) -> bool:
    """Returns whether all outputs take the same codes of a row. Static scales may differ between tensors."""
    return w.format.activations != "static" or (w.source is None and parts == 1)


def _sums(operands: MatmulOperands) -> list[Array]:
    """Returns the float32 sums `[M, N]` of each part, without biases."""
    w, x = operands.w, flat_rows(operands.x)

    def multiply(x: Array, w: Array) -> Array:
        return plain.forward(MatmulOperands(x, w), layout="nk", epilogue=Epilogue(), out_dtype=ACCUMULATOR)

    def sums(matrix: QuantizedWeight) -> Array:
        if not serves(matrix):
            return _sum_of_blocks(x, matrix, multiply, lambda numbers: numbers[None])
        operands = MatmulOperands(x, matrix)
        plan = codes_plan(operands, out_dtype=ACCUMULATOR)
        product = functools.partial(codes_product, operands, plan, epilogue=Epilogue())
        return _chosen_by_source(matrix, lambda source: product(source=source), lambda numbers: numbers[None])

    return [sums(matrix) for matrix in ([w] if w.ndim == 2 else [w.matrix(0), w.matrix(1)])]


def _grouped_sums(operands: GroupedOperands, unit: int) -> tuple[list[Array], list[Array] | None]:
    """Returns the float32 sums `[M, N]` of each part, and the biases of each row."""
    x, w, bias, group_sizes, _ = operands
    ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
    expert = jnp.searchsorted(ends, jnp.arange(len(x), dtype=jnp.int32), side="right")
    expert = jnp.minimum(expert, len(w) - 1)
    options: dict[str, Any] = {"epilogue": Epilogue(), "out_dtype": ACCUMULATOR, "unit": unit}

    def multiply(x: Array, w: Array) -> Array:
        return grouped.forward(GroupedOperands(x, w, None, group_sizes), layout="nk", **options)

    def sums(matrix: QuantizedWeight) -> Array:
        if not serves(matrix):
            return _sum_of_blocks(x, matrix, multiply, lambda numbers: numbers[expert])
        product = functools.partial(grouped_codes_product, GroupedOperands(x, matrix, None, group_sizes), **options)
        return _chosen_by_source(matrix, lambda source: product(source=source), lambda numbers: numbers[expert])

    z = [sums(matrix) for matrix in ([w] if w.ndim == 3 else [w.matrix(slice(None), 0), w.matrix(slice(None), 1)])]
    if bias is None:
        return z, None
    rows = bias[expert]
    return z, [rows] if len(z) == 1 else [rows[:, 0], rows[:, 1]]


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


def _chosen_by_source(w: QuantizedWeight, product: Callable[[int], Array], by_row: _ByRow) -> Array:
    """Returns the sums of a product, whose codes of rows differ between sources if scales are static."""
    y, *others = [product(source) for source in range(1 if w.input_scales is None else w.input_scales.shape[-1])]
    if others:
        source = jnp.broadcast_to(by_row(w.source), y.shape)
        for number, sums in enumerate(others, start=1):
            y = jnp.where(source == number, sums, y)
    return y


def _sum_of_blocks(x: Array, w: QuantizedWeight, multiply: _Multiply, by_row: _ByRow) -> Array:
    """Returns the float32 sums `[M, N]` of rows with a matrix, or with the matrix of each row's expert.

    Scales belong to groups of columns. `multiply` multiplies the numbers of a group, which bfloat16 holds exactly.
    """
    numbers, scales = quantized_rows(x, w.format.group)
    rows, blocks, columns = numbers.shape
    padding = round_up(columns, _COLUMNS) - columns
    numbers = jnp.pad(numbers.astype(jnp.bfloat16).swapaxes(0, 1), [(0, 0), (0, 0), (0, padding)])
    missing = blocks * columns - w.codes.shape[-1]
    codes, weight_scales = jnp.pad(w.codes, [(0, 0)] * (w.ndim - 1) + [(0, missing)]), scales_of(w)

    def step(block: Array, acc: Array) -> Array:
        some = lax.dynamic_slice_in_dim(codes, block * columns, columns, axis=-1)
        weights = lax.bitcast_convert_type(some, jnp.float8_e4m3fn).astype(jnp.bfloat16)
        weights = jnp.pad(weights, [(0, 0)] * (w.ndim - 1) + [(0, padding)])
        product = multiply(lax.dynamic_index_in_dim(numbers, block, keepdims=False), weights)
        scale = lax.dynamic_slice_in_dim(scales, block, 1, axis=1)
        weight_scale = by_row(lax.dynamic_index_in_dim(weight_scales, block, axis=-1, keepdims=False))
        return fused_multiply_add(product, sealed(jnp.broadcast_to(scale * weight_scale, acc.shape)), acc)

    start = jnp.zeros((rows, w.codes.shape[-2]), ACCUMULATOR)
    return lax.fori_loop(0, blocks, step, start)
