"""Registers and threads in MLIR, for the functions that emit it."""

import functools
from typing import Any

import numpy as np
from jax.experimental.mosaic.gpu import utils as mgpu
from jax.experimental.mosaic.gpu.fragmented_array import FragmentedArray
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from detjax.pallas.hopper.device import WARP, WARPGROUP


def i32() -> Any:
    """Returns the type of 32-bit integers."""
    return ir.IntegerType.get_signless(32)


def int32(value: int) -> Any:
    """Emits an int32 constant."""
    return mgpu.c(value, i32())


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


def number(register: Any) -> Any:
    """Returns a register as a kernel's int32 scalar, though it may differ between threads."""
    return FragmentedArray.splat(register, (), is_signed=True)


def thread_of_warpgroup() -> Any:
    """Returns the number of the thread in its warpgroup."""
    return arith.remui(mgpu.thread_idx(), int32(WARPGROUP))


def warp_and_lane() -> tuple[Any, Any]:
    """Returns the number of the thread's warp in its warpgroup, and of the thread in its warp."""
    thread = thread_of_warpgroup()
    return arith.divui(thread, int32(WARP)), arith.remui(thread, int32(WARP))


def first_row_and_lane() -> tuple[Any, Any]:
    """Returns the first of the thread's two rows in a `MATRIX` tile, and its number among the row's four threads."""
    warp, lane = warp_and_lane()
    row = arith.addi(arith.muli(warp, int32(16)), arith.divui(lane, int32(4)))
    return row, arith.remui(lane, int32(4))


def unhoisted_thread() -> Any:
    """Returns the thread's number in its warpgroup, opaque to the compiler at each use.

    So addresses that depend on it are recomputed in each iteration of a loop, rather than kept in registers.
    """
    # The claim of side effects keeps LLVM from merging two of these or moving one out of a loop.
    thread = llvm.inline_asm(i32(), [], "mov.u32 $0, %tid.x;", "=r", asm_dialect=0, has_side_effects=True)
    return arith.remui(thread, int32(WARPGROUP))


def offset_address(pointer: Any, offset: Any, dtype: Any) -> Any:
    """Returns the address `offset` elements after a pointer."""
    dynamic = [-(1 << 31)]  # LLVM's mark of an index that is not a constant
    return llvm.getelementptr(pointer.type, pointer, [offset], dynamic, dtype, llvm.GEPNoWrapFlags.none)


def shared_address(ref: Any) -> Any:
    """Returns the address of an array in shared memory, as an int32."""
    return llvm.ptrtoint(i32(), mgpu.memref_ptr(ref))


def shared_pointer(address: Any) -> Any:
    """Returns the pointer to an address in shared memory."""
    return llvm.inttoptr(ir.Type.parse("!llvm.ptr<3>"), address)


def times(value: Any, factor: int) -> Any:
    """Multiplies an int32 by a constant."""
    return arith.muli(value, int32(factor))


def plus(*values: Any) -> Any:
    """Adds integers."""
    return functools.reduce(arith.addi, values)
