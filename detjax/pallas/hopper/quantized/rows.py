"""Quantization of rows on Hopper: in groups of columns by one kernel, where XLA takes four for the same bits."""

from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.mosaic.gpu import utils as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector
from jaxlib.mlir.dialects import math as math_dialect

from detjax.contract import ACCUMULATOR, FP8_BLOCK, FP8_LARGEST
from detjax.operands.numerics import ceil_div, round_up
from detjax.operands.quantized_weight import QuantizedWeight
from detjax.pallas.hopper.device import WARP, WARPGROUP
from detjax.pallas.hopper.mosaic import no_twin, primitive, with_twin
from detjax.pallas.hopper.mosaic.layouts import NUMBER, swizzled_lines
from detjax.pallas.hopper.mosaic.registers import (
    as_index,
    element,
    i32,
    int32,
    packed,
    plus,
    times,
    warp_and_lane,
)
from detjax.pallas.hopper.rows import NO_AUTO_BARRIERS
from detjax.portable.quantized_matmul import quantized_rows

E4M3: Final = jnp.dtype("float8_e4m3fn")
"""The dtype of codes of rows."""

_WARPS = WARPGROUP // WARP
_GROUPS_AT_ONCE = 8
"""Groups of a row that a warp loads together."""
_LINES = swizzled_lines(FP8_BLOCK, 1)
"""The transforms of codes in the stages of a product."""
_WIDTH = FP8_BLOCK // WARP
"""Columns of a group in each thread of a warp."""
_COLUMN_UNIT = 16
"""Columns of rows that are quantized in groups are a multiple of this number."""
_TOKEN_UNIT = 8
"""Scales of a group are padded to a multiple of this number, so that the copy engine can address them."""


def _plain_quantized_groups(x: Array) -> tuple[Array, Array]:
    numbers, scales = quantized_rows(x, FP8_BLOCK)
    return numbers.reshape(len(x), -1).astype(E4M3), _in_units(scales)


@with_twin(_plain_quantized_groups)
def quantized_groups(x: Array) -> tuple[Array, Array]:
    """Returns the codes of rows, and the scales of their groups of `FP8_BLOCK` columns: the bits of `quantized_rows`.

    Args:
        x: `[M, K]`, K in sixteens.

    Returns:
        Codes, e4m3 `[M, K]` with K padded to whole groups, and float32 scales, `[groups, M]` with M padded to eights,
        whose last columns are undefined.
    """
    m, k = x.shape
    groups = ceil_div(k, FP8_BLOCK)

    def body(x: Any, codes: Any, scales: Any) -> None:
        _quantize(x, codes, scales, lax.axis_index("row"), lax.axis_index("part") * _WARPS)

    codes, scales = plgpu.kernel(
        body,
        out_type=code_types(m, groups),
        grid=(ceil_div(groups, _WARPS), m),
        grid_names=("part", "row"),
        kernel_name="quantized_groups",
        compiler_params=NO_AUTO_BARRIERS,
    )(x)
    return lax.bitcast_convert_type(codes, E4M3), scales


def code_types(rows: int, groups: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Returns the shapes and dtypes of codes, in bytes, and of scales, as kernels write them."""
    codes = jax.ShapeDtypeStruct((rows, groups * FP8_BLOCK), jnp.uint8)
    return codes, jax.ShapeDtypeStruct((groups, round_up(rows, _TOKEN_UNIT)), ACCUMULATOR)


def quantized_tokens(x: Array, w: QuantizedWeight, static: Array | None) -> tuple[Array, Array]:
    """Returns the codes of rows `[M, K]`, and their scales as the kernel of products loads them.

    Args:
        x: the rows.
        w: the weight. Its format says whether groups of columns have scales, or rows.
        static: the checkpoint's scale, or one for each row, `[M, 1]`, if scales are static.

    Returns:
        Codes `[M, K]`, with K padded to whole groups if these have scales, and float32 scales `[groups, M]` or
        `[1, M]`, with M padded to eights.
    """
    if w.format.activations == "group":
        # Threads load several columns at once. Further zeros change neither scales nor codes.
        return quantized_groups(jnp.pad(x, ((0, 0), (0, -x.shape[1] % _COLUMN_UNIT))))
    numbers, scales = quantized_rows(x, x.shape[1], static)
    return numbers.reshape(x.shape).astype(E4M3), _in_units(scales)


def _in_units(scales: Array) -> Array:
    return jnp.pad(scales.T, ((0, 0), (0, -len(scales) % _TOKEN_UNIT)))


@primitive(twin=no_twin("_quantize"), args=(plgpu.RefType(), plgpu.RefType(), plgpu.RefType(), NUMBER, NUMBER))
def _quantize(x: Any, codes: Any, scales: Any, row: Any, first: Any) -> None:
    """Quantizes a group of a row with each warp: the groups from `first` on."""
    warp, _ = warp_and_lane()
    this_row, this_group = row.registers.item(), arith.addi(first.registers.item(), warp)
    quantized = _quantized(_loaded(x, this_row, this_group))
    with mgpu.when(arith.cmpi(arith.CmpIPredicate.slt, this_group, int32(scales.type.shape[0]))):
        _store(quantized, codes, scales, this_row, this_group)


def _plain_quantize_piece(piece: Array, codes: Any, scales: Any, row: Array, column: Array, *, layout: Any) -> None:
    del layout
    rows, columns = piece.shape
    numbers, by_group = quantized_rows(piece, FP8_BLOCK)
    stored = lax.bitcast_convert_type(numbers.reshape(rows, columns).astype(E4M3), codes.dtype)
    codes[pl.ds(row, rows), pl.ds(column, columns)] = stored
    scales[pl.ds(column // FP8_BLOCK, columns // FP8_BLOCK), pl.ds(row, rows)] = by_group.T


@primitive(
    twin=_plain_quantize_piece,
    args=lambda *_, layout: (layout, plgpu.RefType(), plgpu.RefType(), NUMBER, NUMBER),
)
def quantize_piece(piece: Any, codes: Any, scales: Any, row: Any, column: Any, *, layout: Any) -> None:
    """Stores the codes and scales of whole groups of some rows: the bits of `quantized_groups`.

    Args:
        piece: `[rows, columns]`. A warp holds a group of a row, and a thread four neighbouring columns.
        codes: bytes `[M, K]` in device memory.
        scales: float32 `[groups, M or more]` in device memory.
        row: the first row of the piece.
        column: its first column.
        layout: its layout, of `detjax.pallas.hopper.rows`.
    """
    del layout
    values = [_wide(element(piece.registers.item(), i)) for i in range(_WIDTH)]
    ((row_in_piece, column_in_piece),) = piece.layout.thread_idxs(piece.shape)
    this_row = plus(row.registers.item(), arith.index_cast(i32(), row_in_piece))
    this_column = plus(column.registers.item(), arith.index_cast(i32(), column_in_piece))
    _store(_quantized(values), codes, scales, this_row, arith.divui(this_column, int32(FP8_BLOCK)))


def _plain_quantize_row(x: Any, codes: Any, scales: Any) -> None:
    _plain_quantize_piece_of_row(x[...], codes, scales, 0, layout=None)


@with_twin(_plain_quantize_row)
def quantize_row(x: Any, codes: Any, scales: Any) -> None:
    """Quantizes a row `[1, K]` in device memory with one warpgroup; see `quantize_piece_of_row`."""
    groups = x.shape[1] // FP8_BLOCK
    count = min(_GROUPS_AT_ONCE, ceil_div(groups, _WARPS))

    @pl.loop(0, ceil_div(groups, _WARPS * count))
    def _(step: Array) -> None:
        _quantize_groups(x, codes, scales, step * (_WARPS * count), count=count)


@primitive(
    twin=no_twin("_quantize_groups"),
    args=lambda *_, **__: (plgpu.RefType(), plgpu.RefType(_LINES), plgpu.RefType(), NUMBER),
)
def _quantize_groups(x: Any, codes: Any, scales: Any, first: Any, *, count: int) -> None:
    """Quantizes `count` groups of a row with each warp, which take the groups from `first` on in turn."""
    warp, _ = warp_and_lane()
    first_group = arith.addi(first.registers.item(), warp)
    groups = [plus(first_group, int32(_WARPS * i)) for i in range(count)]
    # All loads are issued before the first group waits for its numbers.
    loaded = [_loaded(x, int32(0), group) for group in groups]
    for group, numbers in zip(groups, loaded, strict=True):
        quantized = _quantized(numbers)
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.slt, group, int32(x.type.shape[1] // FP8_BLOCK))):
            _store_in_stages(quantized, codes, scales, group)


def _plain_quantize_piece_of_row(piece: Array, codes: Any, scales: Any, column: Any, *, layout: Any) -> None:
    del layout
    numbers, by_group = quantized_rows(piece, FP8_BLOCK)
    tile_k, blocks = codes.shape[-1], scales.shape[1]
    for index in range(by_group.shape[1]):
        group = column // FP8_BLOCK + index
        stored = numbers.reshape(-1, FP8_BLOCK)[index].astype(codes.dtype)
        codes[group // blocks, 0, 0, pl.ds(group * FP8_BLOCK % tile_k, FP8_BLOCK)] = stored
        scales[group // blocks, group % blocks, 0] = by_group[0, index]


@primitive(
    twin=_plain_quantize_piece_of_row,
    args=lambda *_, layout: (layout, plgpu.RefType(_LINES), plgpu.RefType(), NUMBER),
)
def quantize_piece_of_row(piece: Any, codes: Any, scales: Any, column: Any, *, layout: Any) -> None:
    """Stores the codes and scales of whole groups of the only row of a product: the bits of `quantized_groups`.

    Args:
        piece: `[1, columns]`. A warp holds a group, and a thread four neighbouring columns.
        codes: the stages of the product's tokens in shared memory, `[stages, 1, tokens, columns]` in swizzled lines of
            128 bytes.
        scales: the stages of their scales in shared memory, float32 `[stages, blocks, tokens]`.
        column: the first column of the piece.
        layout: its layout, of `detjax.pallas.hopper.rows`.
    """
    del layout
    values = [_wide(element(piece.registers.item(), i)) for i in range(_WIDTH)]
    ((_, column_in_piece),) = piece.layout.thread_idxs(piece.shape)
    this_column = plus(column.registers.item(), arith.index_cast(i32(), column_in_piece))
    _store_in_stages(_quantized(values), codes, scales, arith.divui(this_column, int32(FP8_BLOCK)))


def _store_in_stages(quantized: tuple[Any, Any], codes: Any, scales: Any, group: Any) -> None:
    """Stores the codes and the scale of a group that the warp holds; see `quantize_piece_of_row`."""
    _, _, _, blocks, _, line = codes.type.shape
    assert line == FP8_BLOCK and blocks == scales.type.shape[1]
    stage, block = (divide(group, int32(blocks)) for divide in (arith.divui, arith.remui))
    # A line has the codes of a group. The swizzle leaves the chunks of the first row in their order.
    zero = int32(0)
    _store_at(quantized, codes, (stage, zero, zero, block, zero, zero), scales, (stage, block, zero))


def _store(quantized: tuple[Any, Any], codes: Any, scales: Any, row: Any, group: Any) -> None:
    """Stores the codes and the scale of a group of a row that the warp holds."""
    _store_at(quantized, codes, (row, times(group, FP8_BLOCK)), scales, (group, row))


def _store_at(quantized: tuple[Any, Any], codes: Any, first: Sequence[Any], scales: Any, place: Sequence[Any]) -> None:
    """Stores the thread's codes of a group, whose first one has a place, and the scale by one thread of the warp."""
    (word, scale), (*outer, column) = quantized, first
    _, lane = warp_and_lane()
    stored = mgpu.bitcast(packed([word]), ir.VectorType.get((_WIDTH,), codes.type.element_type))
    vector.store(stored, codes, [as_index(x) for x in (*outer, plus(column, times(lane, _WIDTH)))])
    with mgpu.when(arith.cmpi(arith.CmpIPredicate.eq, lane, int32(0))):
        memref.store(scale, scales, [as_index(x) for x in place])


def _loaded(x: Any, row: Any, group: Any) -> list[Any]:
    """Loads the thread's numbers of a group of a row, in float32. Columns after the last one are zeros."""
    _, lane = warp_and_lane()
    column = plus(times(group, FP8_BLOCK), times(lane, _WIDTH))
    is_present = arith.cmpi(arith.CmpIPredicate.slt, column, int32(x.type.shape[1]))
    place = as_index(arith.select(is_present, column, int32(0)))
    loaded = vector.load(ir.VectorType.get((_WIDTH,), x.type.element_type), x, [as_index(row), place])
    return [arith.select(is_present, _wide(element(loaded, i)), _float(0.0)) for i in range(_WIDTH)]


def _wide(value: Any) -> Any:
    """Returns a number in float32."""
    f32 = ir.F32Type.get()
    return value if value.type == f32 else arith.extf(f32, value)


def _quantized(values: list[Any]) -> tuple[Any, Any]:
    """Quantizes a group that a warp holds: returns the thread's codes in a word, and the scale."""
    zero, one = _float(0.0), _float(1.0)
    largest = zero
    for value in values:
        largest = arith.maximumf(largest, math_dialect.absf(value))
    for distance in (1, 2, 4, 8, 16):
        largest = arith.maximumf(largest, mgpu.shfl_bfly(largest, distance))
    scale = _quotient(largest, _float(FP8_LARGEST))
    scale = arith.select(_is_zero(scale), one, scale)
    # A zero stays one even if the group has a NaN.
    quotients = [arith.select(_is_zero(value), value, _quotient(value, scale)) for value in values]
    low, high = (arith.extui(i32(), _e4m3_pair(*quotients[i : i + 2])) for i in range(0, _WIDTH, 2))
    return arith.ori(low, arith.shli(high, int32(16))), scale


def _float(value: float) -> Any:
    return mgpu.c(value, ir.F32Type.get())


def _is_zero(x: Any) -> Any:
    return arith.cmpf(arith.CmpFPredicate.OEQ, x, _float(0.0))


def _quotient(x: Any, y: Any) -> Any:
    """Returns the correctly rounded quotient."""
    return mgpu.inline_ptx("div.rn.f32 $0, $1, $2;", x, y, result_types=ir.F32Type.get())


def _e4m3_pair(low: Any, high: Any) -> Any:
    """Returns two codes: the nearest e4m3 numbers, ties to even, held at the largest."""
    result = ir.IntegerType.get_signless(16)
    return mgpu.inline_ptx("cvt.rn.satfinite.e4m3x2.f32 $0, $1, $2;", high, low, result_types=result)
