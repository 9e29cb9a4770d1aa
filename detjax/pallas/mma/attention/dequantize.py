"""Quantized pages in the kernel: copies of codes and scales, and dequantization to a slot for the matrix unit.

A part of a page has 64 columns. Its codes are rows of 64 bytes in shared memory, or of 32 with two codes in a byte. A
thread dequantizes a row of the page, so it needs one scale, or one for each group of columns. Chunks of 16 bytes are
swizzled: eight threads, which access memory at once, find the same chunk of their rows in different banks.
"""

from typing import Any, Final

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.mosaic.gpu import utils as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

from detjax.contract import KV_BLOCK, Q4_GROUP
from detjax.operands.options import KVQuantization
from detjax.operands.quantized_pages import dequantized, quantized_layout
from detjax.pallas.hopper.device import WARPGROUP
from detjax.pallas.hopper.mosaic import primitive
from detjax.pallas.hopper.mosaic.layouts import NUMBER, swizzled
from detjax.pallas.hopper.mosaic.quantized import NIBBLE, numbers_of_bytes
from detjax.pallas.hopper.mosaic.registers import element, i32, int32, packed, unhoisted_thread
from detjax.pallas.mma.attention.rows import CHUNK, SLOT_WIDTH, slot_place

_CHUNK_BYTES: Final = 16
_SCALE_BYTES: Final = 4
"""Bytes of scales that a thread copies: one number, or two of 2 bytes."""


def page_buffers(kind: KVQuantization, count: int) -> tuple[Any, Any]:
    """Returns shared memory for codes and scales of `count` parts of pages."""
    codes, scales = quantized_layout((count, 1, KV_BLOCK, SLOT_WIDTH), kind)
    return tuple(plgpu.SMEM((count, *x.shape[2:]), x.dtype) for x in (codes, scales))  # pyright: ignore[reportReturnType]


def part_of_page(kind: KVQuantization, codes: Any, scales: Any, first: int, columns: int) -> tuple[Any, Any]:
    """Returns the codes and the scales of some columns of a page in memory.

    Args:
        kind: the kind of the page.
        codes: `[KV_BLOCK, n]`.
        scales: `[KV_BLOCK]`, or with "q4_0" `[groups, KV_BLOCK]`.
        first: a multiple of `SLOT_WIDTH`.
        columns: at most `SLOT_WIDTH`.
    """
    if kind == "q4_0":
        groups = pl.ds(first // Q4_GROUP, columns // Q4_GROUP)
        return codes.at[:, pl.ds(first // 2, columns // 2)], scales.at[groups]
    return codes.at[:, pl.ds(first, columns)], scales


def _plain_copy(codes: Any, scales: Any, code_slot: Any, scale_slot: Any, count: Array) -> None:
    is_kept = lax.broadcasted_iota(jnp.int32, (KV_BLOCK,), 0) < count
    x = codes[...]
    code_slot[:, pl.ds(0, codes.shape[1])] = jnp.where(is_kept[:, None], x, jnp.zeros_like(x))
    if scales.ndim == 1:
        scale_slot[...] = scales[...]
    else:
        scale_slot[pl.ds(0, scales.shape[0]), :] = scales[...]


@primitive(twin=_plain_copy, args=(*(plgpu.RefType(),) * 4, NUMBER))
def copy_codes(codes: Any, scales: Any, code_slot: Any, scale_slot: Any, count: Any) -> None:
    """Starts to copy a part of a page from memory, as `rows.copy_rows`; codes from row `count` on are not read.

    Args:
        codes: see `part_of_page`.
        scales: see `part_of_page`.
        code_slot: shared memory, see `page_buffers`.
        scale_slot: shared memory, see `page_buffers`.
        count: the number of rows that belong to the request.
    """
    thread, byte = unhoisted_thread(), ir.IntegerType.get_signless(8)
    rows, width = codes.type.shape
    (stride, _), _ = codes.type.get_strides_and_offset()
    row_chunks, chunks = code_slot.type.shape[1] // _CHUNK_BYTES, width // _CHUNK_BYTES
    origin = _global(codes)
    for first in range(0, rows * chunks, WARPGROUP):
        number = arith.addi(thread, int32(first))
        row, chunk = arith.divui(number, int32(chunks)), arith.remui(number, int32(chunks))
        offset = arith.addi(arith.muli(row, int32(stride)), arith.muli(chunk, int32(_CHUNK_BYTES)))
        is_kept = arith.cmpi(arith.CmpIPredicate.slt, row, count.registers.item())
        nvvm.cp_async_shared_global(
            mgpu.getelementptr(mgpu.memref_ptr(code_slot), [_code_place(row, chunk, row_chunks)], byte),
            mgpu.getelementptr(origin, [offset], byte),
            _CHUNK_BYTES,
            nvvm.LoadCacheModifierKind.CG,
            cp_size=arith.select(is_kept, int32(_CHUNK_BYTES), int32(0)),
        )
    # Each thread copies one word: a row's scale, or the scales of a group of columns in two rows.
    shape = scales.type.shape
    words = KV_BLOCK if len(shape) == 1 else shape[0] * KV_BLOCK // 2
    with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, thread, int32(words))):
        offset = arith.muli(thread, int32(_SCALE_BYTES))
        nvvm.cp_async_shared_global(
            mgpu.getelementptr(mgpu.memref_ptr(scale_slot), [offset], byte),
            mgpu.getelementptr(_global(scales), [offset], byte),
            _SCALE_BYTES,
            nvvm.LoadCacheModifierKind.CA,
        )


def _global(ref: Any) -> Any:
    return llvm.addrspacecast(llvm.PointerType.get(address_space=1), mgpu.memref_ptr(ref))


def _code_place(row: Any, chunk: Any, chunks: int) -> Any:
    """Returns the offset in bytes of a chunk of a row of `chunks`, 2 or 4."""
    rows_of_line = 8 // chunks  # rows in all 32 banks
    swizzle = arith.remui(arith.divui(row, int32(rows_of_line)), int32(chunks))
    number = arith.addi(arith.muli(row, int32(chunks)), arith.xori(chunk, swizzle))
    return arith.muli(number, int32(_CHUNK_BYTES))


def _plain_dequantize(
    codes: Any, scales: Any, target: Any, count: Array, *, kind: KVQuantization, columns: int
) -> None:
    is_kept = lax.broadcasted_iota(jnp.int32, (KV_BLOCK,), 0) < count
    if kind == "q4_0":
        codes, scales = codes[:, pl.ds(0, columns // 2)], scales[pl.ds(0, columns // Q4_GROUP), :]
    else:
        codes, scales = codes[:, pl.ds(0, columns)], scales[...]
    numbers = dequantized(codes, scales, kind, target.dtype)
    target[:, pl.ds(0, columns)] = jnp.where(is_kept[:, None], numbers, jnp.zeros_like(numbers))


@primitive(
    twin=_plain_dequantize,
    args=lambda codes, scales, target, count, *, kind, columns: (
        plgpu.RefType(),
        plgpu.RefType(),
        plgpu.RefType(swizzled(SLOT_WIDTH)),
        NUMBER,
    ),
)
def dequantize(codes: Any, scales: Any, target: Any, count: Any, *, kind: KVQuantization, columns: int) -> None:
    """Dequantizes a part of a page; rows from `count` on become zeros.

    Args:
        codes: shared memory that `copy_codes` has filled.
        scales: the same for scales.
        target: a slot; threads must meet before another thread's row is read.
        count: the number of rows that belong to the request.
        kind: the kind of the page.
        columns: columns of the part.
    """
    row, byte = unhoisted_thread(), ir.IntegerType.get_signless(8)
    is_kept = arith.cmpi(arith.CmpIPredicate.slt, row, count.registers.item())
    float32, dtype = ir.F32Type.get(), target.type.element_type
    zero = arith.constant(float32, ir.FloatAttr.get(float32, 0.0))
    in_chunk = _CHUNK_BYTES * (2 if kind == "q4_0" else 1)
    for chunk in range(columns // in_chunk):
        # What lies after the request's last row may be NaN, and 0 * NaN is not 0.
        scale = arith.select(is_kept, _scale(kind, scales, row, chunk), zero)
        place = _code_place(row, int32(chunk), codes.type.shape[1] // _CHUNK_BYTES)
        source = mgpu.getelementptr(mgpu.memref_ptr(codes), [place], byte)
        four = llvm.load(ir.VectorType.get((4,), i32()), source)
        numbers = _numbers(kind, [element(four, i) for i in range(4)])
        rounded = [arith.truncf(dtype, arith.mulf(number, scale)) for number in numbers]
        for i in range(0, in_chunk, CHUNK):
            offset = slot_place(row, int32((chunk * in_chunk + i) // CHUNK))
            words = vector.bitcast(ir.VectorType.get((4,), i32()), packed(rounded[i : i + CHUNK]))
            llvm.store(words, mgpu.getelementptr(mgpu.memref_ptr(target), [offset], byte))


def _scale(kind: KVQuantization, scales: Any, row: Any, chunk: int) -> Any:
    """Returns the scale of a row's chunk, float32; for "fp8_e4m3" times the power by which its numbers are too small.

    No such product overflows: a scale is at most the largest number over 448.
    """
    float32 = ir.F32Type.get()
    if kind == "q4_0":
        pointer = mgpu.getelementptr(
            mgpu.memref_ptr(scales), [arith.addi(row, int32(chunk * KV_BLOCK))], ir.F16Type.get()
        )
        return arith.extf(float32, llvm.load(ir.F16Type.get(), pointer))
    scale = llvm.load(float32, mgpu.getelementptr(mgpu.memref_ptr(scales), [row], float32))
    if kind == "int8":
        return scale
    return arith.mulf(scale, arith.constant(float32, ir.FloatAttr.get(float32, 256.0)))


def _numbers(kind: KVQuantization, words: list[Any]) -> list[Any]:
    """Returns the numbers of the codes in four words, float32; for "fp8_e4m3" they are 256 times too small."""
    if kind == "fp8_e4m3":
        return [number for word in words for number in _small_numbers(word)]
    float32 = ir.F32Type.get()
    power, places, shift = (0x43000000, "7{}54", NIBBLE) if kind == "q4_0" else (0x4B000000, "754{}", 2.0**23 + 128)
    if kind == "q4_0":
        # A group's first half is in the low four bits of its bytes, and the second one in the high four bits.
        low = [arith.andi(word, int32(0x0F0F0F0F)) for word in words]
        high = [arith.andi(arith.shrui(word, int32(4)), int32(0x0F0F0F0F)) for word in words]
        words = low + high
    else:
        words = [arith.xori(word, int32(-0x7F7F7F80)) for word in words]  # adds 128 to each byte
    offset = arith.constant(float32, ir.FloatAttr.get(float32, shift))
    return [arith.subf(x, offset) for word in words for x in numbers_of_bytes(word, power, places)]


def _small_numbers(word: Any) -> list[Any]:
    """Returns four e4m3 codes as float32 numbers that are 256 times too small.

    float16 has the same bits for such a number: one more bit of exponent, whose bias is 15 instead of 7. Subnormal
    numbers stay exact. Only since 8.9 has the hardware an instruction for codes.
    """
    pair, float32 = ir.VectorType.get((2,), ir.F16Type.get()), ir.F32Type.get()
    numbers = []
    for places in (0x1404, 0x3424):  # two bytes, each in the upper half of 16 bits
        bits = mgpu.inline_ptx("prmt.b32 $0, $1, $2, $3;", word, int32(0), int32(places), result_types=i32())
        magnitude = arith.shrui(arith.andi(bits, int32(0x7F007F00)), int32(1))
        halves = arith.ori(magnitude, arith.andi(bits, int32(-0x7FFF8000)))
        both = vector.bitcast(pair, packed([halves]))
        numbers += [arith.extf(float32, element(both, i)) for i in range(2)]
    return numbers
