"""Quantization of rows in groups of columns on Hopper, in one kernel. XLA takes four for the same bits."""

from typing import Any, Final

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.mosaic.gpu import utils as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector
from jaxlib.mlir.dialects import math as math_dialect
from jaxtyping import DTypeLike

from detjax.contract import ACCUMULATOR, FP8_LARGEST
from detjax.operands.numerics import ceil_div, round_up
from detjax.operands.quantized_weight import QuantizedWeight
from detjax.pallas.hopper.device import WARP, WARPGROUP
from detjax.pallas.hopper.mosaic import no_twin, primitive, with_twin
from detjax.pallas.hopper.mosaic.layouts import NUMBER
from detjax.pallas.hopper.mosaic.registers import as_index, element, i32, int32, packed, warp_and_lane
from detjax.pallas.hopper.quantized.exact_rows import numbers_of_pair
from detjax.pallas.hopper.rows import NO_AUTO_BARRIERS
from detjax.portable.quantized_matmul import quantized_rows

E4M3: Final = jnp.dtype("float8_e4m3fn")
"""The dtype of codes of rows."""

_WARPS = WARPGROUP // WARP
_TOKEN_UNIT = 8
"""Scales of a group are padded to a multiple of this number, so that the copy engine can address them."""


def _plain_quantized_groups(x: Array, group: int, dtype: DTypeLike = "bfloat16") -> tuple[Array, Array]:
    numbers, scales = quantized_rows(x, group)
    missing = -len(x) % _TOKEN_UNIT
    return numbers.reshape(len(x), -1).astype(dtype), jnp.pad(scales.T, ((0, 0), (0, missing)))


@with_twin(_plain_quantized_groups)
def quantized_groups(x: Array, group: int, dtype: DTypeLike = "bfloat16") -> tuple[Array, Array]:
    """Returns the numbers of the codes of rows, and the scales of their groups, with the bits of `quantized_rows`.

    Args:
        x: `[M, K]`, K in sixteens.
        group: columns of a group, 64 or 128.
        dtype: dtype of the numbers, bfloat16, float16 or float8_e4m3fn. All are exact.

    Returns:
        Numbers, `[M, K]` with K padded to whole groups, and float32 scales, `[groups, M]` with M padded to
        eights, whose last columns are undefined.
    """
    m, k = x.shape
    groups, is_codes = ceil_div(k, group), jnp.dtype(dtype) == E4M3

    def body(x: Any, numbers: Any, scales: Any) -> None:
        _quantize(x, numbers, scales, lax.axis_index("row"), lax.axis_index("part") * _WARPS, group=group)

    numbers, scales = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((m, groups * group), jnp.uint8 if is_codes else dtype),
            jax.ShapeDtypeStruct((groups, round_up(m, _TOKEN_UNIT)), ACCUMULATOR),
        ),
        grid=(ceil_div(groups, _WARPS), m),
        grid_names=("part", "row"),
        kernel_name="quantized_groups",
        compiler_params=NO_AUTO_BARRIERS,
    )(x)
    return lax.bitcast_convert_type(numbers, E4M3) if is_codes else numbers, scales


def quantized_tokens(
    x: Array, w: QuantizedWeight, block: int, dtype: DTypeLike, *, source: int = 0
) -> tuple[Array, Array]:
    """Returns the numbers of the codes of rows `[M, K]`, and their scales as the kernels of products load them.

    Args:
        x: the rows.
        w: the weight. Its format says whether groups of columns have scales, or rows.
        block: columns of a group.
        dtype: dtype of the numbers; see `quantized_groups`.
        source: which static scale, if the weight has any.

    Returns:
        Numbers `[M, K]`, with K padded to whole groups if these have scales, and float32 scales `[groups, M]` or
        `[1, M]`, with M padded to eights.
    """
    if w.format.activations == "group":
        return quantized_groups(x, block, dtype)
    static = None if w.input_scales is None else w.input_scales[source]
    numbers, scales = quantized_rows(x, x.shape[1], static)
    return numbers.reshape(x.shape).astype(dtype), jnp.pad(scales.T, ((0, 0), (0, -len(x) % _TOKEN_UNIT)))


@primitive(twin=no_twin("_quantize"), args=(plgpu.RefType(), plgpu.RefType(), plgpu.RefType(), NUMBER, NUMBER))
def _quantize(x: Any, numbers: Any, scales: Any, row: Any, first: Any, *, group: int) -> None:
    """Quantizes a group of a row with each warp: the groups from `first` on."""
    f32, width, columns = ir.F32Type.get(), group // WARP, x.type.shape[1]
    warp, lane = warp_and_lane()
    this_row, this_group = row.registers.item(), arith.addi(first.registers.item(), warp)
    column = arith.addi(arith.muli(this_group, int32(group)), arith.muli(lane, int32(width)))
    is_present = arith.cmpi(arith.CmpIPredicate.slt, column, int32(columns))
    # Columns after the last one are zeros.
    place = as_index(arith.select(is_present, column, int32(0)))
    loaded = vector.load(ir.VectorType.get((width,), x.type.element_type), x, [as_index(this_row), place])
    zero, one = _float(0.0), _float(1.0)
    values = [element(loaded, i) for i in range(width)]
    values = [value if value.type == f32 else arith.extf(f32, value) for value in values]
    values = [arith.select(is_present, value, zero) for value in values]
    largest = zero
    for value in values:
        largest = arith.maximumf(largest, math_dialect.absf(value))
    for distance in (1, 2, 4, 8, 16):
        largest = arith.maximumf(largest, mgpu.shfl_bfly(largest, distance))
    scale = _quotient(largest, _float(FP8_LARGEST))
    scale = arith.select(_is_zero(scale), one, scale)
    # A zero stays one even if the group has a NaN.
    quotients = [arith.select(_is_zero(value), value, _quotient(value, scale)) for value in values]
    dtype = numbers.type.element_type
    pairs = [_e4m3_pair(quotients[i], quotients[i + 1], dtype) for i in range(0, width, 2)]
    if width == 4 and pairs[0].type != i32():  # codes, which one store writes as a word
        low, high = (arith.extui(i32(), pair) for pair in pairs)
        pairs = [arith.ori(low, arith.shli(high, int32(16)))]
    stored = mgpu.bitcast(packed(pairs), ir.VectorType.get((width,), dtype))
    with mgpu.when(arith.cmpi(arith.CmpIPredicate.slt, this_group, int32(scales.type.shape[0]))):
        vector.store(stored, numbers, [as_index(this_row), as_index(column)])
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.eq, lane, int32(0))):
            memref.store(scale, scales, [as_index(this_group), as_index(this_row)])


def _float(value: float) -> Any:
    return mgpu.c(value, ir.F32Type.get())


def _is_zero(x: Any) -> Any:
    return arith.cmpf(arith.CmpFPredicate.OEQ, x, _float(0.0))


def _quotient(x: Any, y: Any) -> Any:
    """Returns the correctly rounded quotient."""
    return mgpu.inline_ptx("div.rn.f32 $0, $1, $2;", x, y, result_types=ir.F32Type.get())


def _e4m3_pair(low: Any, high: Any, dtype: Any) -> Any:
    """Returns a word of two numbers of a dtype, or two codes: the nearest e4m3 numbers, ties to even, held at the
    largest."""
    i16 = ir.IntegerType.get_signless(16)
    codes = mgpu.inline_ptx("cvt.rn.satfinite.e4m3x2.f32 $0, $1, $2;", high, low, result_types=i16)
    return codes if dtype == ir.IntegerType.get_signless(8) else numbers_of_pair(codes, dtype)
