"""The meaning of packed arrays, and the instructions that widen their codes in registers, rounding each number once.

The hardware converts integers at a quarter of the speed of other instructions, so a code is placed into the bits of a
power of two instead.
"""

import dataclasses
from typing import Any, Final

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.mosaic.gpu import utils as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from detjax.contract import ACCUMULATOR
from detjax.operands.quantized_weight import INT4_ZERO, CodeNumbers
from detjax.pallas.hopper.device import SWIZZLE_BYTES
from detjax.pallas.hopper.mosaic.layouts import swizzled_lines
from detjax.pallas.hopper.mosaic.registers import i32, int32

LINE: Final = SWIZZLE_BYTES // 2
"""Widened numbers of a swizzled line."""

SCALE_BYTES: Final = 16
"""Bytes of scales that the copy engine loads at least for each row, and whose multiples its columns start at.

On an H100, a copy whose first column lies between two multiples ends the kernel with an illegal instruction.
"""


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
    """Returns the float32 products `[rows, columns]` that are rounded to widened numbers.

    Args:
        codes: `[rows, bytes]`.
        scales: `[rows, groups]`: whole units of the copy engine. The first unit has the tile's first group.
        group: the number of the tile's first group in the whole row.
        zeros: zero points `[rows, groups]`, bytes.
        packing: the meaning of the arrays.
        columns: columns of the tile.
    """

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

    @property
    def constants(self) -> _Constants:
        """The constants of the widened numbers' dtype."""
        return _BF16 if self.packing.dtype == "bfloat16" else _F16

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
            pair = _ptx("cvt.rn.f16x2.e4m3x2 $0, $1;", arith.trunci(_i16(), alone))
            return self._rounded(_pair_from_half(pair), scale_word)
        pair = self._e2m1(alone) if self.packing.numbers == "e2m1" else self._int4(alone, negative_powers)
        if self._scales_pairs(mgpu.dtype_to_ir_type(self.packing.scale_dtype)):
            return _ptx(f"mul.rn.{self.constants.name}x2 $0, $1, $2;", pair, scale_word)
        return self._rounded(self._in_float32(pair), scale_word)

    def _scales_pairs(self, scale_type: Any) -> bool:
        """Returns whether a product of two numbers of the result's dtype is the widened number."""
        # Such a product is rounded once. Other scales take float32, where the product is rounded as when weights are
        # widened at load.
        return str(scale_type) == self.constants.name and self.packing.numbers != "e4m3"

    def negative_powers(self, zero: Any) -> Any:
        """Returns -(power + zero point), twice, which is exact as the zero point is less than the power."""
        negative = self.constants.power | 0x80008000
        if zero is None:
            return int32(negative | INT4_ZERO * 0x00010001)
        return arith.ori(_twice(arith.extui(_i16(), zero)), int32(negative))

    def _int4(self, alone: Any, negative_powers: Any) -> Any:
        """Returns the two integers of a byte in an otherwise empty word, less their zero points."""
        powers = self.negative_powers(None) if negative_powers is None else negative_powers
        # The product has the byte at two places, 12 bits from each other: between the two codes are 16 bits.
        spread = arith.muli(alone, int32(0x1001))
        # One instruction, which the compiler does not make of two constants: `(spread & mask) | power`.
        bits = _ptx("lop3.b32 $0, $1, $2, $3, 0xEA;", spread, int32(0x000F000F), int32(self.constants.power))
        return _ptx(f"add.rn.{self.constants.name}x2 $0, $1, $2;", bits, powers)

    def _e2m1(self, alone: Any) -> Any:
        """Returns the two numbers of a byte in an otherwise empty word."""
        constants = self.constants
        magnitudes = arith.andi(arith.muli(alone, int32(constants.e2m1_shifts)), int32(constants.e2m1_mask))
        signs = arith.andi(arith.muli(alone, int32(0x01001000)), int32(0x80008000))
        bits = arith.ori(magnitudes, signs)
        return _ptx(f"mul.rn.{constants.name}x2 $0, $1, $2;", bits, int32(constants.e2m1_power))

    def _in_float32(self, pair: Any) -> list[Any]:
        if self.constants.name == "f16":
            return _pair_from_half(pair)
        low, high = arith.shli(pair, int32(16)), arith.andi(pair, int32(0xFFFF0000))
        return [arith.bitcast(_f32(), low), arith.bitcast(_f32(), high)]

    def _rounded(self, pair: list[Any], scale_word: Any) -> Any:
        """Returns the rounded products of two float32 numbers with a float32 scale."""
        low, high = (arith.mulf(x, arith.bitcast(_f32(), scale_word)) for x in pair)
        return _ptx(f"cvt.rn.{self.constants.name}x2.f32 $0, $1, $2;", high, low)


def _f32() -> Any:
    return ir.F32Type.get()


def _i16() -> Any:
    return ir.IntegerType.get_signless(16)


def _ptx(text: str, *operands: Any) -> Any:
    return mgpu.inline_ptx(text, *operands, result_types=i32())


def _twice(half: Any) -> Any:
    return arith.muli(arith.extui(i32(), half), int32(0x00010001))


def _pair_from_half(pair: Any) -> list[Any]:
    """Converts the two float16 numbers of a word to float32."""
    halves = (arith.trunci(_i16(), arith.shrui(pair, int32(16 * place))) for place in range(2))
    return [arith.extf(_f32(), arith.bitcast(ir.F16Type.get(), half)) for half in halves]
