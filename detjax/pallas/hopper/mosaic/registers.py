"""Registers and threads in MLIR, for the functions that emit it."""

from typing import Any

import numpy as np
from jax.experimental.mosaic.gpu import utils as mgpu
from jax.experimental.mosaic.gpu.fragmented_array import FragmentedArray
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from detjax.pallas.hopper.device import WARPGROUP


def int32(value: int) -> Any:
    """Emits an int32 constant."""
    return mgpu.c(value, ir.IntegerType.get_signless(32))


def index(value: int) -> Any:
    """Emits an index constant."""
    return mgpu.c(value, ir.IndexType.get())


def as_index(value: Any) -> Any:
    """Converts an integer to an index."""
    return arith.index_cast(ir.IndexType.get(), value)


def element(register: Any, place: int = 0) -> Any:
    """Extracts one number of a register that holds several."""
    return vector.extract(register, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([place]))


def packed(numbers: list[Any]) -> Any:
    """Combines numbers in one register."""
    return vector.from_elements(ir.VectorType.get((len(numbers),), numbers[0].type), numbers)


def array(registers: Any, layout: Any, is_signed: bool | None = None) -> Any:
    """Returns the array that has these registers in each thread."""
    return FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=is_signed)


def empty_registers(layout: Any, shape: tuple[int, ...]) -> Any:
    """Returns an empty object array for the registers of a thread's part of an array."""
    return np.empty(layout.to_mgpu().registers_shape(shape), dtype=object)


def first_row_and_lane() -> tuple[Any, Any]:
    """Returns the first of the thread's two rows in a `MATRIX` tile, and its number among the row's four threads."""
    thread = mgpu.thread_idx()

    def constant(value: int) -> Any:
        return mgpu.c(value, thread.type)

    thread = arith.remui(thread, constant(128))
    warp, lane = arith.divui(thread, constant(32)), arith.remui(thread, constant(32))
    row = arith.addi(arith.muli(warp, constant(16)), arith.divui(lane, constant(4)))
    return row, arith.remui(lane, constant(4))


def unhoisted_thread() -> Any:
    """Returns the thread's number in its warpgroup, opaque to the compiler at each use.

    So addresses that depend on it are recomputed in each iteration of a loop, rather than kept in registers.
    """
    i32 = ir.IntegerType.get_signless(32)
    # The claim of side effects keeps LLVM from merging two of these or moving one out of a loop.
    thread = llvm.inline_asm(i32, [], "mov.u32 $0, %tid.x;", "=r", asm_dialect=0, has_side_effects=True)
    return arith.remui(thread, int32(WARPGROUP))


def offset_address(pointer: Any, offset: Any, dtype: Any) -> Any:
    """Returns the address `offset` elements after a pointer."""
    dynamic = [-(1 << 31)]  # LLVM's mark of an index that is not a constant
    return llvm.getelementptr(pointer.type, pointer, [offset], dynamic, dtype, llvm.GEPNoWrapFlags.none)
