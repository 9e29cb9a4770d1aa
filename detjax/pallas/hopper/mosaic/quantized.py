"""The primitive that dequantizes codes of quantized pages."""

import functools
from typing import Any, Final

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.mosaic.gpu import utils as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector
from jaxlib.mlir.dialects import math as math_dialect

from detjax.contract import ACCUMULATOR, Q4_GROUP
from detjax.operands.options import KVQuantization
from detjax.pallas.hopper.mosaic import primitive
from detjax.pallas.hopper.mosaic.layouts import ROWS
from detjax.pallas.hopper.mosaic.registers import array, i32, int32, packed


def _codes_in_byte(kind: KVQuantization) -> int:
    return 2 if kind == "q4_0" else 1


def _plain_products(codes: Array, *scales: Array, kind: KVQuantization, layout: Any) -> Array:
    if kind != "q4_0":
        return codes.astype(ACCUMULATOR) * scales[0][:, None]
    # The low nibbles of a group's bytes are its first half of codes, the high ones its second half.
    groups = codes.astype(jnp.int32).reshape(codes.shape[0], -1, Q4_GROUP // 2)
    numbers = jnp.concatenate([groups & 15, lax.shift_right_logical(groups, 4) & 15], axis=2) - 8
    return (numbers.astype(ACCUMULATOR) * jnp.stack(scales, axis=1)[:, :, None]).reshape(codes.shape[0], -1)


@primitive(
    twin=_plain_products,
    args=lambda codes, *scales, kind, layout: (layout, *(layout.reduce(1),) * len(scales)),
    out=lambda codes, *scales, kind, layout: plgpu.ShapeDtypeStruct(
        (ROWS, codes.shape[1] * _codes_in_byte(kind)), ACCUMULATOR, layout=layout
    ),
)
def products(codes: Any, *scales: Any, kind: KVQuantization, layout: Any) -> Any:
    """Returns codes times scales, float32 `[ROWS, n]`, rounded once.

    Args:
        codes: `[ROWS, n]`; with "q4_0" two per byte, `[ROWS, n / 2]`.
        scales: float32 `[ROWS]`; with "q4_0" one array per group of columns.
        kind: the kind of the codes.
        layout: the layout of codes and products. Scales have its reduction to rows.
    """
    matrix = layout.to_mgpu()
    columns = codes.shape[1] * _codes_in_byte(kind) // len(scales)

    def by_column(row_numbers: Any) -> Any:
        # A group's columns are neighbours, as registers are.
        spread = [x.broadcast_in_dim((ROWS, columns), (0,), matrix) for x in row_numbers]
        return np.concatenate([x.registers for x in spread], axis=1)

    factors = by_column(scales)
    if kind == "q4_0":
        # Exact: code and scale have 4 and 11 bits, and `NIBBLE` times the scale, 16.
        offsets = by_column([scale * -NIBBLE for scale in scales])
        registers = _map(math_dialect.fma, _nibbles(codes), factors, offsets)
    else:
        registers = _map(arith.mulf, _bytes(kind, codes), factors)
    return array(registers, layout)


# The hardware converts integers at a quarter of the speed of other instructions. Instead, a code is placed into the
# bits of a power of two whose last bits count in steps of 1: the number is the code plus this power.


def _bytes(kind: KVQuantization, codes: Any) -> Any:
    """Converts registers of int8 or float8_e4m3fn codes to float32."""
    if kind == "fp8_e4m3":
        return codes.astype(ir.F16Type.get()).astype(ir.F32Type.get()).registers
    float32 = ir.F32Type.get()
    offset = arith.constant(float32, ir.FloatAttr.get(float32, float(2**23 + 128)))

    def numbers(register: Any) -> Any:
        converted = []
        for word in _words(register):
            word = arith.xori(word, int32(0x80808080))  # adds 128 to each byte
            converted += [arith.subf(x, offset) for x in numbers_of_bytes(word, 0x4B000000, "754{}")]
        return packed(converted)

    return _map(numbers, codes.registers)


NIBBLE: Final = 128.0 + 8.0
"""The number that `_nibbles` adds to a code."""


def _nibbles(codes: Any) -> Any:
    """Converts registers of two codes per byte to float32, each with `NIBBLE` added."""

    def numbers(shift: int, register: Any) -> Any:
        (word,) = _words(register)
        word = arith.andi(arith.shrui(word, int32(shift)) if shift else word, int32(0x0F0F0F0F))
        return packed(numbers_of_bytes(word, 0x43000000, "7{}54"))

    # A group's 16 bytes are one column of registers: all low nibbles come first, then the high ones.
    halves = [_map(functools.partial(numbers, shift), codes.registers) for shift in (0, 4)]
    both = np.stack(halves, axis=2)
    return both.reshape(both.shape[0], -1, *both.shape[3:])


def numbers_of_bytes(word: Any, power: int, places: str) -> list[Any]:
    """Returns float32 numbers with the bits of `power` and one of the word's bytes in the place of "{}"."""

    def number(byte: int) -> Any:
        selector = int32(int(places.format(byte), 16))
        bits = mgpu.inline_ptx("prmt.b32 $0, $1, $2, $3;", word, int32(power), selector, result_types=i32())
        return arith.bitcast(ir.F32Type.get(), bits)

    return [number(byte) for byte in range(4)]


def _words(register: Any) -> list[Any]:
    """Returns the bytes of a vector, four per word."""
    count = ir.VectorType(register.type).shape[0] // 4
    words = mgpu.bitcast(register, ir.VectorType.get((count,), i32()))
    return [vector.extract(words, dynamic_position=[], static_position=[i]) for i in range(count)]


def _map(fn: Any, *registers: Any) -> Any:
    out = np.empty_like(registers[0])
    for place in np.ndindex(out.shape):
        out[place] = fn(*(x[place] for x in registers))
    return out
