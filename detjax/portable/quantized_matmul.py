"""Products of quantized activations and e4m3 weights in plain JAX: blocks of columns, each in a fresh accumulator."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, DTypeLike

from detjax.contract import ACCUMULATOR, FP8_BLOCK, FP8_LARGEST, PORTABLE_ROWS, WEIGHT_GRADIENT_TOKENS
from detjax.operands.numerics import activated, flat_rows, parts, round_up
from detjax.operands.options import Epilogue
from detjax.operands.products import GroupedOperands, MatmulOperands
from detjax.operands.quantized_weight import QuantizedWeight, scales_of, widened
from detjax.operands.rounding import rounded
from detjax.portable.matmul import backward as plain_backward
from detjax.portable.matmul import gradient_of_sums, input_gradient
from detjax.portable.tiles import (
    dot,
    final_sum,
    fold_groups,
    fold_rows,
    fused_multiply_add,
    group_tiles,
    initial_sum,
    map_groups,
    map_rows,
    sealed,
    sum_of_rows,
)
from detjax.runtime import backends, varying

_SMALLEST_NORMAL: Final = np.float32(2.0**-6)
"""The smallest normal e4m3 number."""

_TWICE_ONE: Final = np.uint32(0x7F000000)
"""Twice the bits of 1.0: the bits of a power of two and of its inverse add up to this."""


type _Shared = tuple[QuantizedWeight, Array | None]
"""The padded weight and the bias, which every tile gets."""


def to_e4m3(x: Array) -> Array:
    """Returns the nearest e4m3 numbers as float32, ties to even; larger ones are held at `FP8_LARGEST`."""
    x = jnp.clip(x, -FP8_LARGEST, FP8_LARGEST)
    # Conversions of some backends round twice. All steps here but `round` are exact.
    exponent = lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.uint32) & 0x7F800000, jnp.float32)
    step = jnp.maximum(exponent, _SMALLEST_NORMAL) * np.float32(0.125)
    # The bits of 1 / step, as division is inexact on GPUs even if the quotient is a number.
    inverse = lax.bitcast_convert_type(_TWICE_ONE - lax.bitcast_convert_type(step, jnp.uint32), jnp.float32)
    return lax.round(x * inverse, lax.RoundingMethod.TO_NEAREST_EVEN) * step


def quantized_rows(x: Array, group: int, scale: Array | None = None) -> tuple[Array, Array]:
    """Returns the numbers of a tile's codes, `[rows, groups, group]`, and their scales, `[rows, groups]`."""
    x = jnp.pad(x.astype(ACCUMULATOR), [(0, 0), (0, -x.shape[-1] % group)])
    x = x.reshape(len(x), -1, group)
    if scale is None:
        # As integers, since XLA's maximum of numbers loses a NaN on CPUs in some shapes.
        largest = jnp.max(lax.bitcast_convert_type(jnp.abs(x), jnp.uint32), axis=-1)
        scales = _quotient(lax.bitcast_convert_type(largest, jnp.float32), np.float32(FP8_LARGEST))
    else:
        scales = jnp.broadcast_to(scale, x.shape[:2])
    scales = sealed(jnp.where(scales == 0, np.float32(1), scales))
    return to_e4m3(_quotient(x, scales[..., None])), scales


def _quotient(x: Array, divisor: Any) -> Array:
    """Returns `x / divisor`, correctly rounded."""
    # XLA would multiply by the reciprocal of a divisor that it broadcasts.
    divisor = jnp.where(x == 0, np.float32(1), divisor)
    if backends.target() != "gpu":
        return x / divisor
    # XLA's float32 division on GPUs is off by up to two units in the last place, its float64 division is not. The
    # float64 quotient of float32 numbers, rounded to float32, is the correctly rounded quotient (Figueroa 1995). The
    # compiler knows this, too, and would divide in float32 if it saw that nothing lies between division and rounding.
    with jax.enable_x64(True):
        quotient = lax.div(lax.convert_element_type(x, jnp.float64), lax.convert_element_type(divisor, jnp.float64))
        return lax.convert_element_type(sealed(quotient), jnp.float32)


def padded(w: QuantizedWeight) -> QuantizedWeight:
    """Returns a weight whose last block of columns is whole."""
    missing = round_up(w.format.columns, _block(w)) - w.codes.shape[-1]
    return dataclasses.replace(w, codes=jnp.pad(w.codes, [(0, 0)] * (w.ndim - 1) + [(0, missing)]))


def sums(x: Array, shared: _Shared) -> Array:
    """Returns the biased sums of a tile, float32 `[rows, 1, N]`, or `[rows, 2, N]` for gate and up."""
    w, bias = shared
    matrices = [w] if w.ndim == 2 else [w.matrix(0), w.matrix(1)]
    z = jnp.stack([_sum(x, matrix) for matrix in matrices], axis=1)
    return z if bias is None else z + bias.astype(ACCUMULATOR).reshape(1, *z.shape[1:])


def forward(operands: MatmulOperands, *, epilogue: Epilogue, out_dtype: DTypeLike) -> Array:
    """Returns rows `[*B, N]` for rows `[*B, K]`; see `detjax.ops.matmul` for the operands and options."""
    x, w, bias, residual = operands

    def tile(rows: tuple[Array, Array | None], shared: _Shared) -> Array:
        x, residual = rows
        y = activated(parts(sums(x, shared)), epilogue)
        if residual is not None:
            y = y + residual.astype(ACCUMULATOR)
        return rounded(y, out_dtype)

    flat_residual = None if residual is None else flat_rows(residual)
    y = map_rows(tile, (flat_rows(x), flat_residual), (padded(w), bias))
    return y.reshape(*x.shape[:-1], y.shape[-1])


def backward(
    operands: MatmulOperands, dy: Array, bias_sum: Array | None = None, *, epilogue: Epilogue
) -> tuple[Array, Array | None]:
    """Returns the gradients of x and of the bias, or its next sum if it has one; see `contract`."""
    x, w, bias, _ = operands
    if not w.is_computed:
        # Backends that multiply codes with plain rows may leave the gradients to this one.
        dense = operands._replace(w=widened(w))
        dx, _, dbias = plain_backward(dense, dy, (None, bias_sum), layout="nk", epilogue=epilogue)
        return dx, dbias

    def accumulator_gradient(rows: tuple[Array, Array], shared: _Shared) -> Array:
        x, dy = rows
        return gradient_of_sums(sums(x, shared), dy, x.dtype, epilogue)

    dz = map_rows(accumulator_gradient, (flat_rows(x), flat_rows(dy)), (padded(w), bias))
    return gradients(operands, dz, bias_sum)


def gradients(operands: MatmulOperands, dz: Array, bias_sum: Array | None) -> tuple[Array, Array | None]:
    """Returns the gradients of x and of the bias, given the gradient of the biased sums, `[M, parts, N]`."""
    x, w, bias, _ = operands
    dx = map_rows(functools.partial(input_gradient, layout="nk"), dz, widened(w)).reshape(x.shape)
    if bias is None:
        return dx, None
    start = initial_sum(bias_sum, dz.shape[1:])
    dbias = fold_rows(
        lambda total, dz, _: total + sum_of_rows(dz), start, dz.astype(ACCUMULATOR), None, size=WEIGHT_GRADIENT_TOKENS
    )
    return dx, final_sum(dbias, bias_sum, bias)


def grouped_forward(operands: GroupedOperands, *, epilogue: Epilogue, out_dtype: DTypeLike, unit: int) -> Array:
    """Returns rows `[M, N]` for rows `[M, K]` that are sorted by expert; see `detjax.ops.grouped_matmul`."""
    del unit
    x, w, bias, group_sizes, _ = operands

    def tile(x: Array, expert: Array, shared: _Shared) -> Array:
        return rounded(activated(parts(sums(x, _at(shared, expert))), epilogue), out_dtype)

    return map_groups(tile, x, (padded(w), bias), group_tiles(group_sizes, len(x), PORTABLE_ROWS))


def grouped_backward(
    operands: GroupedOperands, dy: Array, bias_sum: Array | None = None, *, epilogue: Epilogue, unit: int
) -> tuple[Array, Array | None]:
    """Returns the gradients of x and of the bias, or its next sum if it has one; see `backward`."""
    del unit
    x, w, bias, group_sizes, _ = operands

    def accumulator_gradient(rows: tuple[Array, Array], expert: Array, shared: _Shared) -> Array:
        x, dy = rows
        return gradient_of_sums(sums(x, _at(shared, expert)), dy, x.dtype, epilogue)

    tiles = group_tiles(group_sizes, len(x), PORTABLE_ROWS)
    return grouped_gradients(operands, map_groups(accumulator_gradient, (x, dy), (padded(w), bias), tiles), bias_sum)


def grouped_gradients(operands: GroupedOperands, dz: Array, bias_sum: Array | None) -> tuple[Array, Array | None]:
    """Returns the gradients of x and of the bias, given the gradient of the biased sums, `[M, parts, N]`."""
    x, w, bias, group_sizes, sequences = operands

    def row_gradient(dz: Array, expert: Array, w: QuantizedWeight) -> Array:
        return input_gradient(dz, widened(_at(w, expert)), "nk")

    tiles = group_tiles(group_sizes, len(x), PORTABLE_ROWS)
    dx = map_groups(row_gradient, dz, w, tiles)
    if bias is None:
        return dx, None
    steps = group_tiles(group_sizes, len(x), WEIGHT_GRADIENT_TOKENS, sequences)
    start = initial_sum(bias_sum, (len(w), *dz.shape[1:]))
    dbias = fold_groups(
        lambda total, dz: total + sum_of_rows(dz), start, dz.astype(ACCUMULATOR), steps, WEIGHT_GRADIENT_TOKENS
    )
    return dx, final_sum(dbias, bias_sum, bias)


def _at[T](tree: T, expert: Array) -> T:
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, expert, 0, keepdims=False), tree)


def _block(w: QuantizedWeight) -> int:
    """The columns of a block."""
    return w.format.group if w.format.activations == "group" else FP8_BLOCK


def _sum(x: Array, w: QuantizedWeight) -> Array:
    """Returns the float32 sums `[rows, N]` of a tile with one matrix."""
    if w.format.activations == "group":
        return _sum_in_groups(*quantized_rows(x, w.format.group), w)
    if w.input_scales is None:
        return _sum_by_rows(*quantized_rows(x, x.shape[-1]), w)
    by_source = [_sum_by_rows(*quantized_rows(x, x.shape[-1], scale), w) for scale in w.input_scales]
    return by_source[0] if w.source is None else _chosen_by_source(by_source, w.source)


def _chosen_by_source(by_source: Sequence[Array], source: Array) -> Array:
    """Chooses each output from the results for its source."""
    y = by_source[0]
    for number, one in enumerate(by_source[1:], start=1):
        y = jnp.where(source[None] == number, one, y)
    return y


def _sum_in_groups(numbers: Array, scales: Array, w: QuantizedWeight) -> Array:
    weight_scales = scales_of(w)

    def step(block: Array, acc: Array) -> Array:
        factor = sealed(_column(scales, block) * _column(weight_scales, block).T)
        return fused_multiply_add(_partial(numbers[:, block], w, block), factor, acc)

    return _by_blocks(step, numbers, w)


def _sum_by_rows(numbers: Array, scales: Array, w: QuantizedWeight) -> Array:
    flat = numbers.reshape(len(numbers), -1)
    blocks = jnp.pad(flat, [(0, 0), (0, w.codes.shape[-1] - flat.shape[-1])]).reshape(len(flat), -1, FP8_BLOCK)
    acc = _by_blocks(lambda block, acc: acc + _partial(blocks[:, block], w, block), blocks, w)
    return sealed(scales[:, :1] * sealed(scales_of(w).T * acc))


def _by_blocks(step: Callable[[Array, Array], Array], numbers: Array, w: QuantizedWeight) -> Array:
    """Adds the blocks' products, ascending."""
    start = jnp.zeros((len(numbers), w.codes.shape[-2]), ACCUMULATOR)
    return sealed(varying.fori_loop(0, numbers.shape[1], step, start))


def _partial(numbers: Array, w: QuantizedWeight, block: Array) -> Array:
    """Returns the products of a tile and one block of columns, in a fresh accumulator."""
    size = numbers.shape[-1]
    codes = lax.dynamic_slice_in_dim(w.codes, block * size, size, axis=-1)
    # bfloat16 holds e4m3 numbers exactly.
    weights = lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.bfloat16)
    return lax.optimization_barrier(dot(numbers.astype(jnp.bfloat16), weights, (1, 1)))


def _column(x: Array, index: Array) -> Array:
    return lax.dynamic_slice_in_dim(x, index, 1, axis=-1)
