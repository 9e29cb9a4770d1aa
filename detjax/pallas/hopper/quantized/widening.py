"""The primitive that widens a tile of codes in shared memory to the matrix unit's operand, rounding each number once.

A thread takes eight neighbouring columns at a time: it loads their codes and their scale, and stores 16 bytes. A
quarter of a warp so stores a whole swizzled line, which is free of bank conflicts. The hardware converts integers at a
quarter of the speed of other instructions, so a code is placed into the bits of a power of two instead.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable
from typing import Any, Final

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.mosaic.gpu import utils as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from detjax.contract import ACCUMULATOR
from detjax.operands.quantized_weight import INT4_ZERO, CodeNumbers
from detjax.pallas.hopper.device import SWIZZLE_BYTES
from detjax.pallas.hopper.mosaic import primitive
from detjax.pallas.hopper.mosaic.layouts import NUMBER, swizzled, swizzled_lines
from detjax.pallas.hopper.mosaic.registers import (
    i32,
    int32,
    plus,
    shared_address,
    shared_pointer,
    times,
    warp_and_lane,
)

LINE: Final = SWIZZLE_BYTES // 2
"""Widened numbers of a swizzled line."""

SCALE_BYTES: Final = 16
"""Bytes of scales that the copy engine loads at least for each row, and whose multiples its columns start at.

On an H100, a copy whose first column lies between two multiples ends the kernel with an illegal instruction.
"""

_VECTOR: Final = 8
"""Neighbouring columns that a thread widens at once."""

_WARPS: Final = 4
_ROWS_OF_WARP: Final = 8
"""Rows of a line that a warp widens in turn: four at a time, each by eight threads."""


@dataclasses.dataclass(frozen=True)
class Codes:
    """The packed arrays of a weight: what a kernel depends on.

    Attributes:
        numbers: the numbers of codes.
        group: consecutive columns that share a scale.
        scale_dtype: dtype of the scales, a floating-point one.
        has_zeros: whether integers have zero points, from 0 to 16, other than `INT4_ZERO`.
        dtype: the name of the widened numbers' dtype.
    """

    numbers: CodeNumbers
    group: int
    scale_dtype: jnp.dtype
    has_zeros: bool
    dtype: str = "bfloat16"

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 8 if self.numbers == "e4m3" else 4

    def row_bytes(self, columns: int) -> int:
        """Returns the bytes of a row of codes."""
        return columns * self.bits // 8

    def groups(self, columns: int) -> int:
        """Returns the groups of a tile's columns."""
        return max(1, columns // self.group)

    def box(self, columns: int, itemsize: int) -> int:
        """Returns the groups that are copied for a tile: its columns' groups, in whole units of the copy engine."""
        return -(-self.groups(columns) * itemsize // SCALE_BYTES) * SCALE_BYTES // itemsize

    def unit(self, itemsize: int) -> int:
        """Returns the groups of one unit of the copy engine. A tile's groups lie in one unit, or are whole units."""
        return SCALE_BYTES // itemsize

    def transforms(self, columns: int) -> tuple[Any, ...]:
        """Returns the transforms by which a tile of codes lies in shared memory."""
        row = self.row_bytes(columns)
        return swizzled_lines(row, 1) if row == SWIZZLE_BYTES else ()


def plain_numbers(codes: Any, scales: Any, group: Array, zeros: Any = None, *, packing: Codes, columns: int) -> Array:
    """Returns the float32 products `[rows, columns]` that are rounded to widened numbers; see `widen`'s operands."""

    def by_column(values: Any) -> Array:
        groups = packing.groups(columns)
        first = lax.rem(group, jnp.int32(packing.unit(values.dtype.itemsize)))
        first = first if groups < values.shape[1] else 0  # whole units begin with the tile
        values = lax.dynamic_slice_in_dim(values[...], first, groups, axis=1)
        return jnp.repeat(values, columns // values.shape[1], axis=1)

    packed = codes[...]
    if packing.numbers == "e4m3":
        numbers = lax.bitcast_convert_type(packed, jnp.float8_e4m3fn).astype(ACCUMULATOR)
    else:
        nibbles = jnp.stack([packed & 15, packed >> 4], axis=2).reshape(packed.shape[0], columns)
        nibbles = nibbles.astype(jnp.int32)
        if packing.numbers == "e2m1":
            exponent, fraction = (nibbles >> 1) & 3, nibbles & 1
            doubled = jnp.where(exponent == 0, fraction, lax.shift_left(2 + fraction, jnp.maximum(exponent - 1, 0)))
            numbers = doubled.astype(ACCUMULATOR) * jnp.where(nibbles < 8, np.float32(0.5), np.float32(-0.5))
        else:
            zero = INT4_ZERO if zeros is None else by_column(zeros).astype(jnp.int32)
            numbers = (nibbles - zero).astype(ACCUMULATOR)
    return numbers * by_column(scales).astype(ACCUMULATOR)


def _plain_widen(codes: Any, scales: Any, target: Any, group: Array, zeros: Any = None, *, packing: Codes) -> None:
    products = plain_numbers(codes, scales, group, zeros, packing=packing, columns=target.shape[1])
    target[pl.ds(0, codes.shape[0])] = lax.optimization_barrier(products).astype(target.dtype)


def _types(codes: Any, scales: Any, target: Any, group: Any, zeros: Any = None, *, packing: Codes) -> tuple[Any, ...]:
    refs = [plgpu.RefType(packing.transforms(target.shape[1])), plgpu.RefType(), plgpu.RefType(swizzled(LINE)), NUMBER]
    return tuple(refs if zeros is None else [*refs, plgpu.RefType()])


@primitive(twin=_plain_widen, args=_types)
def widen(codes: Any, scales: Any, target: Any, group: Any, zeros: Any = None, *, packing: Codes) -> None:
    """Stores the widened numbers of a tile; the matrix unit sees them once shared memory is committed.

    Args:
        codes: `[rows, bytes]` in shared memory, with the transforms that `packing` gives; rows come in eights.
        scales: `[rows, groups]`: whole units of the copy engine. The first unit has the tile's first group.
        target: numbers `[rows or more, columns]` in swizzled lines; columns are 1, 2 or 4 lines.
        group: the number of the tile's first group in the whole row.
        zeros: zero points `[rows, groups]`, bytes.
        packing: the meaning of the arrays.
    """
    _, lines, _, _ = target.type.shape
    columns = lines * LINE
    first_group = group.registers.item()
    arithmetic = arithmetic_of(packing, target.type.element_type)

    def load_group(ref: Any, row: Any, column: Any) -> Any:
        """Loads the number of a column's group from an array `[rows, groups]`."""
        dtype, (_, groups) = ref.type.element_type, ref.type.shape
        size = mgpu.bytewidth(dtype)
        column_group = int32(0) if packing.group >= columns else arith.divui(column, int32(packing.group))
        start = arith.remui(first_group, int32(packing.unit(size)))
        here = column_group if packing.groups(columns) == groups else plus(start, column_group)
        return llvm.load(dtype, shared_pointer(plus(shared_address(ref), times(plus(times(row, groups), here), size))))

    def products(words: list[Any], row: Any, column: Any) -> list[Any]:
        scale = load_group(scales, row, column)
        zero = None if zeros is None else load_group(zeros, row, column)
        return arithmetic.products(words, scale, zero)

    _store_vectors(codes, target, packing, products)


def _store_vectors(codes: Any, target: Any, packing: Codes, pairs: Callable[[list[Any], Any, Any], list[Any]]) -> None:
    """Stores the vectors of a tile: `pairs(codes, row, column)` gives the eight numbers from a column on, in words."""
    _, lines, _, _ = target.type.shape
    (down, across, _, _), _ = target.type.get_strides_and_offset()
    row_bytes = packing.row_bytes(lines * LINE)
    rows = _elements(codes) // row_bytes
    warp, lane = warp_and_lane()
    line = arith.remui(warp, int32(lines))
    row = plus(times(arith.divui(warp, int32(lines)), _ROWS_OF_WARP), arith.divui(lane, int32(_VECTOR)))
    chunk = arith.remui(lane, int32(_VECTOR))
    column = plus(times(line, LINE), times(chunk, _VECTOR))
    code_bytes = packing.row_bytes(_VECTOR)
    code_column = arith.divui(times(column, packing.bits), int32(8))
    bases = [shared_address(ref) for ref in (codes, target)]

    def widen_vector(first: int, half: int) -> None:
        this_row = plus(row, int32(first + half * _ROWS_OF_WARP // 2))
        in_eight = arith.remui(this_row, int32(8))
        # The hardware's swizzle: chunk c of 16 bytes of row r is at chunk c ^ r.
        swizzle = times(in_eight, 16)
        at = arith.xori(code_column, swizzle) if row_bytes == SWIZZLE_BYTES else code_column
        words = _load_words(plus(bases[0], times(this_row, row_bytes), at), code_bytes // 4)
        place = plus(
            bases[1],
            times(arith.divui(this_row, int32(8)), 2 * down),
            times(in_eight, SWIZZLE_BYTES),
            times(line, 2 * across),
            arith.xori(times(chunk, 16), swizzle),
        )
        numbers = pairs(words, this_row, column)
        llvm.store(vector.from_elements(ir.VectorType.get((4,), i32()), numbers), shared_pointer(place))

    step = _ROWS_OF_WARP * _WARPS // lines
    for first in range(0, rows, step):
        # Warps whose rows are beyond the tile's end would read other arrays.
        is_whole = first + step <= rows
        present = arith.cmpi(arith.CmpIPredicate.ult, row, int32(rows - first))
        with contextlib.nullcontext() if is_whole else mgpu.when(present):
            for half in range(2):
                widen_vector(first, half)


# --- addresses --------------------------------------------------------------------------------------------------------


def _elements(ref: Any) -> int:
    return math.prod(ref.type.shape)


def _load_words(address: Any, count: int) -> list[Any]:
    if count == 1:
        return [llvm.load(i32(), shared_pointer(address))]
    words = llvm.load(ir.VectorType.get((count,), i32()), shared_pointer(address))
    return [vector.extract(words, dynamic_position=[], static_position=[i]) for i in range(count)]


# --- arithmetic -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Constants:
    """Constants of a 2-byte dtype, as the bits of two numbers in a word.

    Attributes:
        name: the dtype's name in PTX.
        power: a power of two whose last bits count in steps of 1, twice.
        e2m1_shifts: factors that shift the codes of a byte to the bits of their exponent and fraction.
        e2m1_mask: these bits.
        e2m1_power: the power of two that a number with these bits lacks, twice.
    """

    name: str
    power: int
    e2m1_shifts: int
    e2m1_mask: int
    e2m1_power: int


_BF16: Final = _Constants("bf16", 0x43004300, 0x00040040, 0x01C001C0, 0x7E807E80)
_F16: Final = _Constants("f16", 0x64006400, 0x00200200, 0x0E000E00, 0x74007400)


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """The instructions that make numbers of codes, two in a word."""

    packing: Codes
    constants: _Constants

    def products(self, words: list[Any], scale: Any, zero: Any) -> list[Any]:
        """Returns four words with the widened numbers of eight columns."""
        if self.packing.numbers == "e4m3":
            return self._rounded(_e4m3_numbers(words), scale)
        if self.packing.numbers == "e2m1":
            pairs = [self._e2m1(_permuted(words[0], int32(0), byte, 4, 4, 4)) for byte in range(4)]
        else:
            high, powers = arith.shrui(words[0], int32(4)), self.negative_powers(zero)
            pairs = [self._int4(words[0], high, byte, powers) for byte in range(4)]
        name = self.constants.name
        if self._scales_pairs(scale.type):
            twice = self.scale_word(scale)
            return [_ptx(f"mul.rn.{name}x2 $0, $1, $2;", pair, twice) for pair in pairs]
        return self._rounded([self._in_float32(pair) for pair in pairs], scale)

    def scale_word(self, scale: Any) -> Any:
        """Returns a scale as a word: twice, if it is of the result's dtype, or in float32."""
        if self._scales_pairs(scale.type):
            return _twice(arith.bitcast(_i16(), scale))
        return arith.bitcast(i32(), scale if scale.type == _f32() else arith.extf(_f32(), scale))

    def selector(self, thread: Any) -> Any:
        """Returns the selector of `prmt` that finds two codes in a word of a row, for one of the row's four threads."""
        if self.packing.numbers == "e4m3":
            return arith.addi(arith.muli(arith.andi(thread, int32(1)), int32(0x22)), int32(0x4410))
        return arith.ori(thread, int32(0x4440))

    def bytes_of_word(self, word: Any, selector: Any) -> Any:
        """Returns the bytes of a word that a selector chooses, in an otherwise empty word."""
        return _ptx("prmt.b32 $0, $1, $2, $3;", word, int32(0), selector)

    def pair_of_word(self, word: Any, selector: Any, scale_word: Any, negative_powers: Any) -> Any:
        """Returns the widened numbers of two codes, the lower one first.

        Args:
            word: eight codes of four bits, or four of a byte.
            selector: the thread's `selector`.
            scale_word: the `scale_word` of the codes.
            negative_powers: the `negative_powers` of their zero points; None: of the default.
        """
        alone = self.bytes_of_word(word, selector)
        if self.packing.numbers == "e4m3":
            half = arith.trunci(_i16(), alone)
            wide = _pair_from_half(_ptx("cvt.rn.f16x2.e4m3x2 $0, $1;", half))
            return self._rounded([wide], arith.bitcast(_f32(), scale_word))[0]
        if self.packing.numbers == "e2m1":
            pair = self._e2m1(alone)
        else:
            # The product has the byte at two places, 12 bits from each other: between the two codes are 16 bits.
            powers = self.negative_powers(None) if negative_powers is None else negative_powers
            pair = self._less_powers(self._powered(arith.muli(alone, int32(0x1001))), powers)
        if self._scales_pairs(_scale_type(self.packing)):
            return _ptx(f"mul.rn.{self.constants.name}x2 $0, $1, $2;", pair, scale_word)
        return self._rounded([self._in_float32(pair)], arith.bitcast(_f32(), scale_word))[0]

    def _scales_pairs(self, scale_type: Any) -> bool:
        """Returns whether a product of two numbers of the result's dtype is the widened number."""
        # Such a product is rounded once. Other scales take float32, where the product is rounded as when weights are
        # widened at load.
        return str(scale_type) == self.constants.name and self.packing.numbers != "e4m3"

    def _int4(self, word: Any, high: Any, byte: int, negative_powers: Any) -> Any:
        """Returns the two integers of a byte, less their zero points; `high` is the word shifted by four bits."""
        spread = _permuted(word, high, byte, byte, 4 + byte, 4 + byte)
        return self._less_powers(self._powered(spread), negative_powers)

    def _powered(self, spread: Any) -> Any:
        """Returns the power plus the integers of four bits at the bottom of each half of a word."""
        # One instruction, which the compiler does not make of two constants: `(spread & mask) | power`.
        return _ptx("lop3.b32 $0, $1, $2, $3, 0xEA;", spread, int32(0x000F000F), int32(self.constants.power))

    def _less_powers(self, bits: Any, negative_powers: Any) -> Any:
        return _ptx(f"add.rn.{self.constants.name}x2 $0, $1, $2;", bits, negative_powers)

    def negative_powers(self, zero: Any) -> Any:
        """Returns -(power + zero point), twice, which is exact as the zero point is less than the power."""
        negative = self.constants.power | 0x80008000
        if zero is None:
            return int32(negative | INT4_ZERO * 0x00010001)
        return arith.ori(_twice(arith.extui(_i16(), zero)), int32(negative))

    def _e2m1(self, alone: Any) -> Any:
        """Returns the two numbers of a byte in an otherwise empty word."""
        constants = self.constants
        magnitudes = arith.andi(arith.muli(alone, int32(constants.e2m1_shifts)), int32(constants.e2m1_mask))
        signs = arith.andi(arith.muli(alone, int32(0x01001000)), int32(0x80008000))
        bits = arith.ori(magnitudes, signs)
        return _ptx(f"mul.rn.{constants.name}x2 $0, $1, $2;", bits, int32(constants.e2m1_power))

    def _in_float32(self, pair: Any) -> tuple[Any, Any]:
        if self.constants.name == "f16":
            return _from_half(pair, 0), _from_half(pair, 1)
        low, high = arith.shli(pair, int32(16)), arith.andi(pair, int32(0xFFFF0000))
        return arith.bitcast(_f32(), low), arith.bitcast(_f32(), high)

    def _rounded(self, pairs: list[tuple[Any, Any]], scale: Any) -> list[Any]:
        wide = scale if scale.type == _f32() else arith.extf(_f32(), scale)
        return [self._pair(*(arith.mulf(x, wide) for x in pair)) for pair in pairs]

    def _pair(self, low: Any, high: Any) -> Any:
        return _ptx(f"cvt.rn.{self.constants.name}x2.f32 $0, $1, $2;", high, low)


def arithmetic_of(packing: Codes, dtype: Any) -> Arithmetic:
    """Returns the instructions for codes that are widened to a dtype, given by its name or as a type."""
    return Arithmetic(packing, _BF16 if str(dtype) in ("bf16", "bfloat16") else _F16)


def _scale_type(packing: Codes) -> Any:
    return mgpu.dtype_to_ir_type(packing.scale_dtype)


def _f32() -> Any:
    return ir.F32Type.get()


def _i16() -> Any:
    return ir.IntegerType.get_signless(16)


def _ptx(text: str, *operands: Any) -> Any:
    return mgpu.inline_ptx(text, *operands, result_types=i32())


def _permuted(word: Any, other: Any, *places: int) -> Any:
    """Returns a word of four bytes, the lowest first, each at a place 0 to 3 of a word, or 4 to 7 of the other."""
    selector = sum(place << 4 * i for i, place in enumerate(places))
    return _ptx("prmt.b32 $0, $1, $2, $3;", word, other, int32(selector))


def _twice(half: Any) -> Any:
    return arith.muli(arith.extui(i32(), half), int32(0x00010001))


def _e4m3_numbers(words: list[Any]) -> list[tuple[Any, Any]]:
    """Converts e4m3 codes to pairs of float32 numbers."""
    halves = [arith.trunci(_i16(), arith.shrui(w, int32(16 * i))) for w in words for i in range(2)]
    pairs = [_ptx("cvt.rn.f16x2.e4m3x2 $0, $1;", half) for half in halves]
    return [_pair_from_half(pair) for pair in pairs]


def _pair_from_half(pair: Any) -> tuple[Any, Any]:
    return _from_half(pair, 0), _from_half(pair, 1)


def _from_half(pair: Any, place: int) -> Any:
    """Converts one of two float16 numbers of a word to float32."""
    half = arith.trunci(_i16(), arith.shrui(pair, int32(16 * place)))
    return arith.extf(_f32(), arith.bitcast(ir.F16Type.get(), half))
