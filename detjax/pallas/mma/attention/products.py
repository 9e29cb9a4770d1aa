"""The two products of attention on `mma.sync`: queries by keys, and probabilities by values.

A warp has 16 of the 64 queries on its rows, and multiplies them by whole pages. So a row's maximum and sum need no
other warp, and probabilities are left operands in the very registers in which scores are results.

`plgpu.mma` takes operands whole. A page takes more registers than a thread has, so these primitives load 16 of K at a
time, in ascending order. A step of K is what one instruction adds to the accumulator.
"""

from collections.abc import Sequence
from typing import Any, Final

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.mosaic.gpu import utils as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from detjax.contract import ACCUMULATOR
from detjax.pallas.hopper.device import WARP
from detjax.pallas.hopper.mosaic import like, primitive
from detjax.pallas.hopper.mosaic.layouts import MATRIX, swizzled
from detjax.pallas.hopper.mosaic.registers import array, element, empty_registers, i32, int32, packed, unhoisted_thread
from detjax.pallas.mma.attention.rows import CHUNK, ROW_BYTES, SLOT_WIDTH
from detjax.pallas.mma.fragments import STEP, multiply
from detjax.pallas.mma.matrices import load_matrices

_SLOT: Final = plgpu.RefType(swizzled(SLOT_WIDTH))
_ROWS_BYTES: Final = 16 * ROW_BYTES
"""Bytes of 16 rows of a slot."""


def _plain_add_scores(s: Array, q: Any, k: Any, *, columns: int) -> Array:
    return multiply(s, q[:, pl.ds(0, columns)], k[:, pl.ds(0, columns)].T)


@primitive(twin=_plain_add_scores, args=lambda s, q, k, *, columns: (MATRIX, _SLOT, _SLOT), out=like(MATRIX))
def add_scores(s: Any, q: Any, k: Any, *, columns: int) -> Any:
    """Returns `s + q @ k.T` over the first `columns` of slots.

    Args:
        s: `[64, keys]`, float32.
        q: slot of 64 queries.
        k: slot of the keys.
        columns: a multiple of 16.
    """
    sums = _numbers(s)
    warp, upper, lower, row_of_8 = _parts_of_thread()
    # Threads 8 to 15 point to the rows 8 below for queries, and to the next chunk of columns for keys.
    row = arith.addi(arith.muli(warp, int32(16)), arith.addi(arith.muli(lower, int32(8)), row_of_8))
    key = arith.addi(arith.muli(upper, int32(8)), row_of_8)
    q_places, k_places = _chunks(q, row, upper, 0, columns), _chunks(k, key, lower, 0, columns)
    for q_place, k_place in zip(q_places, k_places, strict=True):
        left = load_matrices(q_place, 0, transposed=False)
        for pair in range(len(sums) // 2):
            right = load_matrices(k_place, pair * _ROWS_BYTES, transposed=False)
            for i in range(2):
                sums[2 * pair + i] = _product(sums[2 * pair + i], left, right[2 * i : 2 * i + 2], q)
    return _tile(sums, s.shape)


def _plain_values(p: Array, v: Any, *, first: int, columns: int) -> Array:
    return multiply(jnp.zeros((p.shape[0], columns), ACCUMULATOR), p, v[:, pl.ds(first, columns)])


@primitive(
    twin=_plain_values,
    args=lambda p, v, *, first, columns: (MATRIX, _SLOT),
    out=lambda p, v, *, first, columns: plgpu.ShapeDtypeStruct((p.shape[0], columns), ACCUMULATOR, layout=MATRIX),
)
def multiply_values(p: Any, v: Any, *, first: int, columns: int) -> Any:
    """Returns `p @ v` over `columns` of a slot of values from column `first` on, from a fresh accumulator.

    Args:
        p: `[64, keys]` of the values' dtype.
        v: slot of the values.
        first: a multiple of 16.
        columns: a multiple of 16.
    """
    zero = arith.constant(ir.F32Type.get(), ir.FloatAttr.get(ir.F32Type.get(), 0.0))
    sums = [[zero] * 4 for _ in range(columns // 8)]
    _, upper, lower, row_of_8 = _parts_of_thread()
    key = arith.addi(arith.muli(lower, int32(8)), row_of_8)
    places = _chunks(v, key, upper, first, columns)
    # Results and left operands hold the same elements in the same threads: 8 columns of a row and of the one 8 below.
    one = ir.VectorType.get((1,), i32())
    operands = [element(vector.bitcast(one, register)) for register in p.registers.flat]
    for step in range(p.shape[1] // STEP):
        left = operands[4 * step : 4 * step + 4]
        for pair, place in enumerate(places):
            right = load_matrices(place, step * _ROWS_BYTES, transposed=True)
            for i in range(2):
                sums[2 * pair + i] = _product(sums[2 * pair + i], left, right[2 * i : 2 * i + 2], v)
    return _tile(sums, (p.shape[0], columns))


def _parts_of_thread() -> tuple[Any, Any, Any, Any]:
    """Returns the thread's warp, and the parts of its number in the warp, of 1, 1 and 3 bits."""
    # Addresses are computed again for each product: a wide tile has no registers to keep them.
    thread = unhoisted_thread()
    warp, lane = arith.divui(thread, int32(WARP)), arith.remui(thread, int32(WARP))
    upper, lower = arith.divui(lane, int32(16)), arith.remui(arith.divui(lane, int32(8)), int32(2))
    return warp, upper, lower, arith.remui(lane, int32(8))


def _chunks(slot: Any, row: Any, chunk: Any, first: int, columns: int) -> list[Any]:
    """Returns pointers to one of the two chunks of 8 columns, in a slot's row, of each 16 columns from `first` on."""
    pointer, byte = mgpu.memref_ptr(slot), ir.IntegerType.get_signless(8)
    start = arith.muli(row, int32(ROW_BYTES))
    swizzle = arith.muli(arith.xori(chunk, arith.remui(row, int32(8))), int32(2 * CHUNK))
    # 16 columns are two chunks, so the number of a chunk is the `xor` of 0 or 1 and an even number.
    places = [arith.addi(start, arith.xori(swizzle, int32(2 * i))) for i in range(first, first + columns, STEP)]
    return [mgpu.getelementptr(pointer, [place], byte) for place in places]


def _numbers(s: Any) -> list[list[Any]]:
    """Returns the sums of each group of 8 columns: two of the thread's first row, and two of the row 8 below."""
    groups = s.registers.reshape(-1, 2)
    return [[element(register, i) for register in group for i in range(2)] for group in groups]


def _tile(sums: Sequence[Sequence[Any]], shape: tuple[int, ...]) -> Any:
    """Returns the tile of these sums."""
    registers = empty_registers(MATRIX, shape)
    pairs = [packed(list(group[i : i + 2])) for group in sums for i in (0, 2)]
    for place, pair in zip(np.ndindex(registers.shape), pairs, strict=True):
        registers[place] = pair
    return array(registers, MATRIX)


def _product(sums: Sequence[Any], left: Sequence[Any], right: Sequence[Any], like_slot: Any) -> list[Any]:
    """Emits `sums + left @ right` of 16 x 8 sums and a step of K."""
    float32 = ir.F32Type.get()
    dtype = like_slot.type.element_type
    text = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    constraints = ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4)
    struct = llvm.StructType.get_literal([float32] * 4)
    result = llvm.inline_asm(struct, [*left, *right, *sums], text, constraints, asm_dialect=0, has_side_effects=False)
    return [llvm.extractvalue(float32, result, [i]) for i in range(4)]
