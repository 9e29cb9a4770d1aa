"""Quantization of rows on Hopper: in groups of columns by one kernel, where XLA takes four for the same bits."""

from typing import Any, Final

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.mosaic.gpu import utils as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, vector
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
    shared_address,
    shared_pointer,
    times,
    warp_and_lane,
)
from detjax.pallas.hopper.rows import NO_AUTO_BARRIERS
from detjax.portable.quantized_matmul import quantized_rows

E4M3: Final = jnp.dtype("float8_e4m3fn")
"""The dtype of codes of rows."""

_WARPS = WARPGROUP // WARP
_WIDTH = FP8_BLOCK // WARP
"""Columns of a group in each thread of a warp."""
_CHUNK = 16
"""Bytes that the swizzle moves at once."""
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
        out_type=(
            jax.ShapeDtypeStruct((m, groups * FP8_BLOCK), jnp.uint8),
            jax.ShapeDtypeStruct((groups, round_up(m, _TOKEN_UNIT)), ACCUMULATOR),
        ),
        grid=(ceil_div(groups, _WARPS), m),
        grid_names=("part", "row"),
        kernel_name="quantized_groups",
        compiler_params=NO_AUTO_BARRIERS,
    )(x)
    return lax.bitcast_convert_type(codes, E4M3), scales


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
        return quantized_groups(in_column_units(x))
    numbers, scales = quantized_rows(x, x.shape[1], static)
    return numbers.reshape(x.shape).astype(E4M3), _in_units(scales)


def in_column_units(x: Array) -> Array:
    """Returns rows with K padded to sixteens: threads load several columns at once.

    Further zeros change neither scales nor codes.
    """
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % _COLUMN_UNIT)))


def _in_units(scales: Array) -> Array:
    return jnp.pad(scales.T, ((0, 0), (0, -len(scales) % _TOKEN_UNIT)))


@primitive(twin=no_twin("_quantize"), args=(plgpu.RefType(), plgpu.RefType(), plgpu.RefType(), NUMBER, NUMBER))
def _quantize(x: Any, codes: Any, scales: Any, row: Any, first: Any) -> None:
    """Quantizes a group of a row with each warp: the groups from `first` on."""
    warp, lane = warp_and_lane()
    this_row, this_group = row.registers.item(), arith.addi(first.registers.item(), warp)
    word, scale = _quantized(_loaded(x, this_row, this_group))
    column = plus(times(this_group, FP8_BLOCK), times(lane, _WIDTH))
    stored = mgpu.bitcast(packed([word]), ir.VectorType.get((_WIDTH,), codes.type.element_type))
    with mgpu.when(arith.cmpi(arith.CmpIPredicate.slt, this_group, int32(scales.type.shape[0]))):
        vector.store(stored, codes, [as_index(this_row), as_index(column)])
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.eq, lane, int32(0))):
            memref.store(scale, scales, [as_index(this_group), as_index(this_row)])


def _plain_quantize_stage(x: Any, codes: Any, scales: Any, first: Array, group: Array, *, tokens: int) -> None:
    _, columns = codes.shape
    rows = jnp.minimum(first + jnp.arange(tokens), x.shape[0] - 1)
    padded = jnp.pad(x[...], ((0, 0), (0, columns + -x.shape[1] % FP8_BLOCK)))
    some = lax.dynamic_slice_in_dim(padded[rows], group * FP8_BLOCK, columns, axis=1)
    numbers, by_group = quantized_rows(some, FP8_BLOCK)
    codes[pl.ds(0, tokens)] = numbers.reshape(tokens, columns).astype(E4M3)
    scales[:, pl.ds(0, tokens)] = by_group.T


@primitive(
    twin=_plain_quantize_stage,
    args=(plgpu.RefType(), plgpu.RefType(swizzled_lines(FP8_BLOCK, 1)), plgpu.RefType(), NUMBER, NUMBER),
)
def quantize_stage(x: Any, codes: Any, scales: Any, first: Any, group: Any, *, tokens: int) -> None:
    """Quantizes groups of some rows; the matrix unit sees the codes once shared memory is committed.

    Args:
        x: `[M, K]` in device memory, K in sixteens.
        codes: e4m3 `[tokens or more, columns]` in shared memory, swizzled in lines of a group.
        scales: float32 `[groups, tokens or more]` in shared memory.
        first: the first row. Rows after the last one of x take its numbers.
        group: the first group. Groups after the last one of a row are zeros.
        tokens: number of rows.
    """
    _, groups, eight, line = codes.type.shape
    (down, across, _, _), _ = codes.type.get_strides_and_offset()
    warp, lane = warp_and_lane()
    last, jobs = int32(x.type.shape[0] - 1), groups * tokens
    places = []
    for begin in range(0, jobs, _WARPS):
        # The last warps may repeat a job: they store the same numbers.
        job = arith.minui(plus(warp, int32(begin)), int32(jobs - 1))
        places.append((arith.divui(job, int32(tokens)), arith.remui(job, int32(tokens))))
    # All loads come first, so that they wait together.
    loaded = [
        _loaded(x, arith.minui(plus(first.registers.item(), token), last), plus(group.registers.item(), at))
        for at, token in places
    ]
    target = shared_address(codes)
    for values, (at, token) in zip(loaded, places, strict=True):
        word, scale = _quantized(values)
        row = arith.remui(token, int32(eight))
        # The hardware's swizzle: chunk c of 16 bytes of row r is at chunk c ^ r.
        in_line = arith.xori(times(lane, _WIDTH), times(row, _CHUNK))
        tile = plus(times(arith.divui(token, int32(eight)), down), times(at, across))
        llvm.store(word, shared_pointer(plus(target, tile, times(row, line), in_line)))
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.eq, lane, int32(0))):
            memref.store(scale, scales, [as_index(at), as_index(token)])


def _loaded(x: Any, row: Any, group: Any) -> list[Any]:
    """Loads the thread's numbers of a group of a row, in float32. Columns after the last one are zeros."""
    _, lane = warp_and_lane()
    f32, column = ir.F32Type.get(), plus(times(group, FP8_BLOCK), times(lane, _WIDTH))
    is_present = arith.cmpi(arith.CmpIPredicate.slt, column, int32(x.type.shape[1]))
    place = as_index(arith.select(is_present, column, int32(0)))
    loaded = vector.load(ir.VectorType.get((_WIDTH,), x.type.element_type), x, [as_index(row), place])
    values = [element(loaded, i) for i in range(_WIDTH)]
    values = [value if value.type == f32 else arith.extf(f32, value) for value in values]
    return [arith.select(is_present, value, _float(0.0)) for value in values]


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
