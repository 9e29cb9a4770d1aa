"""The primitive that makes e4m3 codes the matrix unit's row operand in registers, without scales, so that all is exact.

`ExactFill` says which rows of codes take which place of the operand, as `fragments.Fill` does. A thread has two
neighbouring columns of every eight: it loads two codes at once, and one instruction converts both to float16. The loads
of a warp are free of bank conflicts, as the swizzle puts the eight rows of a block into different banks.
"""

import dataclasses
from typing import Any, Final

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.mosaic.gpu import utils as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from detjax.pallas.hopper.device import SWIZZLE_BYTES
from detjax.pallas.hopper.mosaic import primitive
from detjax.pallas.hopper.mosaic.layouts import MATRIX, ROWS, UNIT
from detjax.pallas.hopper.mosaic.registers import (
    array,
    empty_registers,
    i32,
    int32,
    plus,
    shared_address,
    shared_pointer,
    times,
    warp_and_lane,
)
from detjax.pallas.hopper.quantized.fragments import BLOCK, PLACES, WARPS
from detjax.pallas.hopper.quantized.widening import E4M3

_CHUNK: Final = 16
"""Bytes that the swizzle moves at once."""


@dataclasses.dataclass(frozen=True)
class ExactFill:
    """The rows of codes that fill an operand.

    Attributes:
        rows: rows of each part, in eights. Places that they leave are filled with the last eight; nobody reads these.
        columns: columns of a stage.
        dtype: the name of the numbers' dtype.
        is_spread: whether the blocks of each part take one place in every warp, gate's the first and up's the second,
            rather than both places of one warp after the other.
    """

    rows: int
    columns: int
    dtype: str
    is_spread: bool

    def block(self, warp: Any, place: int) -> Any:
        """Returns the block of eight rows of a warp's place, which may be beyond the last one."""
        return warp if self.is_spread else warp * PLACES + place


def source_rows(fill: ExactFill, place: int) -> Array:
    """Returns the rows of codes in a place of all warps, `[warps, rows of a block]`."""
    blocks = jnp.minimum(fill.block(jnp.arange(WARPS), place), fill.rows // BLOCK - 1)
    return blocks[:, None] * BLOCK + jnp.arange(BLOCK)[None]


def source_of_place[T](arrays: tuple[T, ...], fill: ExactFill, place: int) -> T | None:
    """Returns the part's array whose rows take a place; None if the place stays empty."""
    if not fill.is_spread:
        return arrays[0]
    return arrays[place] if place < len(arrays) else None


def _plain_exact_rows(*codes: Any, fill: ExactFill) -> Array:
    blocks = []
    for place in range(PLACES):
        source = source_of_place(codes, fill, place)
        rows = jnp.zeros((WARPS, 1, BLOCK, fill.columns), fill.dtype)
        if source is not None:
            numbers = lax.bitcast_convert_type(source[...], jnp.float8_e4m3fn).astype(fill.dtype)
            rows = numbers[source_rows(fill, place)][:, None]
        blocks.append(rows)
    return jnp.concatenate(blocks, axis=1).reshape(ROWS, fill.columns)


@primitive(
    twin=_plain_exact_rows,
    args=lambda *codes, fill: [plgpu.RefType(E4M3.transforms(fill.columns))] * len(codes),
    out=lambda *_, fill: plgpu.ShapeDtypeStruct((ROWS, fill.columns), jnp.dtype(fill.dtype), layout=MATRIX),
)
def exact_rows(*codes: Any, fill: ExactFill) -> Any:
    """Returns the row operand `[ROWS, columns]` of the numbers of codes.

    Args:
        codes: the codes of each part, `[rows, columns]` in shared memory; one part's, unless they are spread.
        fill: the rows that fill the operand.
    """
    warp, lane = warp_and_lane()
    row_of_block, thread = arith.divui(lane, int32(4)), arith.remui(lane, int32(4))
    registers = empty_registers(MATRIX, (ROWS, fill.columns))
    units = registers.reshape(fill.columns // UNIT, PLACES)
    dtype = mgpu.dtype_to_ir_type(jnp.dtype(fill.dtype))
    pair, one = ir.VectorType.get((2,), dtype), ir.VectorType.get((1,), i32())
    swizzle = times(row_of_block, _CHUNK)
    is_swizzled = fill.columns == SWIZZLE_BYTES
    for place in range(PLACES):
        source = source_of_place(codes, fill, place)
        if source is None:
            zero = vector.bitcast(pair, vector.from_elements(one, [int32(0)]))
            units[:, place] = [zero] * len(units)
            continue
        block = warp if fill.is_spread else plus(times(warp, PLACES), int32(place))
        block = arith.minui(block, int32(fill.rows // BLOCK - 1))
        row = plus(times(block, BLOCK), row_of_block)
        base = plus(shared_address(source), times(row, fill.columns), times(thread, 2))
        for unit in range(len(units)):
            chunk, half = divmod(unit * UNIT, _CHUNK)
            # The hardware's swizzle: chunk c of 16 bytes of row r is at chunk c ^ r.
            at = arith.xori(swizzle, int32(chunk * _CHUNK)) if is_swizzled else int32(chunk * _CHUNK)
            two = llvm.load(ir.IntegerType.get_signless(16), shared_pointer(plus(base, at, int32(half))))
            units[unit, place] = vector.bitcast(pair, vector.from_elements(one, [numbers_of_pair(two, dtype)]))
    return array(registers, MATRIX)


def numbers_of_pair(codes: Any, dtype: Any) -> Any:
    """Returns a word with the bfloat16 or float16 numbers of two e4m3 codes."""
    halves = mgpu.inline_ptx("cvt.rn.f16x2.e4m3x2 $0, $1;", codes, result_types=i32())
    if dtype == ir.F16Type.get():
        return halves
    f32, i16 = ir.F32Type.get(), ir.IntegerType.get_signless(16)
    low, high = (
        arith.extf(f32, arith.bitcast(ir.F16Type.get(), arith.trunci(i16, arith.shrui(halves, int32(shift)))))
        for shift in (0, 16)
    )
    return mgpu.inline_ptx("cvt.rn.bf16x2.f32 $0, $1, $2;", high, low, result_types=i32())
