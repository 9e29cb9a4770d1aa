"""Primitives of the decode kernel, in which columns of values are on the matrix unit's rows."""

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.mosaic.gpu import utils as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, scf, vector
from jaxlib.mlir.dialects import math as math_dialect

from detjax.contract import ACCUMULATOR
from detjax.pallas.hopper.delta_rule.substitution import COLUMNS
from detjax.pallas.hopper.mosaic import primitive
from detjax.pallas.hopper.mosaic.layouts import MATRIX, NUMBER, PER_ROW, UNIT, swizzled
from detjax.pallas.hopper.mosaic.registers import (
    array,
    as_index,
    element,
    empty_registers,
    first_row_and_lane,
    index,
    int32,
    packed,
    unhoisted_thread,
)

_STEP = 8
"""Earlier tokens that a thread loads at once: the period of the swizzle, in rows."""


def _plain_load_transposed(source: Any) -> Array:
    return source[...].T


@primitive(
    twin=_plain_load_transposed,
    args=(plgpu.RefType(),),
    out=lambda source: plgpu.ShapeDtypeStruct(source.shape[::-1], ACCUMULATOR, layout=MATRIX),
)
def load_transposed(source: Any) -> Any:
    """Loads the transpose `[64, K]` of float32 memory `[K, 64]`."""
    shape = tuple(source.type.shape)[::-1]
    registers = empty_registers(MATRIX, shape)
    for place, indices in zip(*_transposed_places(registers), strict=True):
        registers[place] = packed([memref.load(source, x) for x in indices])
    return array(registers, MATRIX)


def _plain_store_transposed(x: Array, target: Any) -> None:
    target[...] = x.T


@primitive(twin=_plain_store_transposed, args=(MATRIX, plgpu.RefType()))
def store_transposed(x: Any, target: Any) -> None:
    """Stores the transpose of `[64, K]` in float32 memory `[K, 64]`."""
    for place, indices in zip(*_transposed_places(x.registers), strict=True):
        for i, at in enumerate(indices):
            memref.store(element(x.registers[place], i), target, at)


def _transposed_places(registers: Any) -> tuple[list[Any], list[Any]]:
    """Returns the places of the registers of `[64, K]`, and for each the indices in `[K, 64]` of its two elements."""
    row, lane = first_row_and_lane()
    places, indices = list(np.ndindex(registers.shape)), []
    # Constants are added to index values, so that they become offsets of the instructions instead of separate
    # addresses.
    row, column = as_index(row), as_index(arith.muli(lane, int32(2)))
    for number, _ in enumerate(places):
        group, half = divmod(number, 2)
        columns = [arith.addi(column, index(UNIT * group + i)) for i in range(2)]
        indices.append([[x, arith.addi(row, index(8 * half))] for x in columns])
    return places, indices


def _plain_store_first_row(x: Array, target: Any) -> None:
    target[...] = jnp.zeros(target.shape, target.dtype).at[0].set(x)


@primitive(twin=_plain_store_first_row, args=lambda x, target: (PER_ROW, plgpu.RefType(swizzled(target.shape[1]))))
def store_first_row(x: Any, target: Any) -> None:
    """Stores `[64]` of 2-byte elements as row 0 of swizzled shared memory `[8, 64]`; other rows do not change."""
    row, _ = first_row_and_lane()
    # The swizzle XORs with the row's number, so row 0 is stored unchanged.
    address = llvm.ptrtoint(int32(0).type, mgpu.memref_ptr(target))
    for half, register in enumerate(x.registers.flatten()):
        at = arith.addi(address, arith.muli(arith.addi(row, int32(8 * half)), int32(2)))
        llvm.store(element(register), llvm.inttoptr(ir.Type.parse("!llvm.ptr<3>"), at))


def _plain_substitute_token(rest: Any, weights: Any, updates: Any, token: Array) -> None:
    u, a = updates[...].astype(ACCUMULATOR), weights[...]

    def step(j: Array, total: Array) -> Array:
        # Rounds twice, like `fma`'s twin.
        return total - lax.optimization_barrier(a[j] * u[j])

    total = lax.fori_loop(0, token, step, rest[...])
    updates[token] = total.astype(updates.dtype)


@primitive(
    twin=_plain_substitute_token,
    args=lambda rest, weights, updates, token: (
        plgpu.RefType(),
        plgpu.RefType(),
        plgpu.RefType(swizzled(updates.shape[1])),
        NUMBER,
    ),
)
def substitute_token(rest: Any, weights: Any, updates: Any, token: Any) -> None:
    """Computes the update of one token from its residual; see `substitution.substitute`. A barrier must follow.

    Args:
        rest: the residual, shared memory `[COLUMNS]`, float32.
        weights: the weights of the chunk's tokens, shared memory `[DELTA_CHUNK]`, float32.
        updates: shared memory `[DELTA_CHUNK, COLUMNS]`: the updates of earlier tokens, to which this one is added.
        token: the token's index in the chunk.
    """
    token = token.registers.item()
    thread = unhoisted_thread()
    float32, narrow = ir.F32Type.get(), ir.MemRefType(updates.type).element_type
    (down, _, _, _), _ = updates.type.get_strides_and_offset()
    pointer = ir.Type.parse("!llvm.ptr<3>")
    address = llvm.ptrtoint(int32(0).type, mgpu.memref_ptr(updates))
    piece, in_piece = arith.divui(thread, int32(8)), arith.remui(thread, int32(8))

    def place(first: Any, i: Any) -> Any:
        """Returns the address of the thread's column in row `first + i`, with `first` a multiple of 8 and i below 8."""
        line = arith.addi(address, arith.muli(arith.divui(first, int32(8)), int32(2 * down)))
        line = arith.addi(line, arith.muli(i, int32(128)))
        column = arith.addi(arith.muli(arith.xori(piece, i), int32(16)), arith.muli(in_piece, int32(2)))
        return llvm.inttoptr(pointer, arith.addi(line, column))

    with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, thread, int32(COLUMNS))):
        total = memref.load(rest, [as_index(thread)])
        steps = scf.ForOp(int32(0), token, int32(_STEP), [total])
        with ir.InsertionPoint(steps.body):
            first, (total,) = steps.induction_variable, steps.inner_iter_args
            values = [llvm.load(narrow, place(first, int32(i))) for i in range(_STEP)]
            several = ir.VectorType.get((_STEP,), float32)
            a = vector.load(several, weights, [as_index(first)])
            for i, u in enumerate(values):
                weight = vector.extract(a, [], ir.DenseI64ArrayAttr.get([i]))
                after = math_dialect.fma(arith.negf(weight), arith.extf(float32, u), total)
                is_earlier = arith.cmpi(arith.CmpIPredicate.slt, arith.addi(first, int32(i)), token)
                total = arith.select(is_earlier, after, total)
            scf.yield_([total])
        first = arith.muli(arith.divui(token, int32(8)), int32(8))
        u = arith.truncf(narrow, steps.results[0])
        llvm.store(u, place(first, arith.subi(token, first)))
