"""Registers and threads in the compiler's terms: what the functions that emit MLIR have in common."""

from typing import Any

import numpy as np
from jax.experimental.mosaic.gpu import utils as mgpu
from jax.experimental.mosaic.gpu.fragmented_array import FragmentedArray
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from detjax.pallas.hopper.device import WARPGROUP


def int32(value: int) -> Any:
    """An int32 constant."""
    return mgpu.c(value, ir.IntegerType.get_signless(32))


def index(value: int) -> Any:
    """A constant that indexes memory."""
    return mgpu.c(value, ir.IndexType.get())


def as_index(value: Any) -> Any:
    """An integer as an index of memory."""
    return arith.index_cast(ir.IndexType.get(), value)


def element(register: Any, place: int = 0) -> Any:
    """One number of a register that holds several."""
    return vector.extract(register, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([place]))


def packed(numbers: list[Any]) -> Any:
    """A register of several numbers."""
    return vector.from_elements(ir.VectorType.get((len(numbers),), numbers[0].type), numbers)


def array(registers: Any, layout: Any, is_signed: bool | None = None) -> Any:
    """The array that has these registers in each thread."""
    return FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=is_signed)


def empty_registers(layout: Any, shape: tuple[int, ...]) -> Any:
    """Room for the registers in which a thread holds its part of an array."""
    return np.empty(layout.to_mgpu().registers_shape(shape), dtype=object)


def first_row_and_lane() -> tuple[Any, Any]:
    """In the layout of the matrix unit's results: the first of the thread's two rows of 64, and which of the four
    threads of these rows it is."""
    thread = mgpu.thread_idx()

    def constant(value: int) -> Any:
        return mgpu.c(value, thread.type)

    thread = arith.remui(thread, constant(128))
    warp, lane = arith.divui(thread, constant(32)), arith.remui(thread, constant(32))
    row = arith.addi(arith.muli(warp, constant(16)), arith.divui(lane, constant(4)))
    return row, arith.remui(lane, constant(4))


def unhoisted_thread() -> Any:
    """The thread's number in its warpgroup, which the compiler takes for another one each time.

    So addresses that are made of it do not stay in registers from one turn of a loop to the next.
    """
    i32 = ir.IntegerType.get_signless(32)
    thread = llvm.inline_asm(i32, [], "mov.u32 $0, %tid.x;", "=r", asm_dialect=0, has_side_effects=True)
    return arith.remui(thread, int32(WARPGROUP))


def offset_address(pointer: Any, offset: Any, dtype: Any) -> Any:
    """The address `offset` elements after a pointer."""
    dynamic = [-(1 << 31)]  # LLVM's mark of an index that is not a constant
    return llvm.getelementptr(pointer.type, pointer, [offset], dynamic, dtype, llvm.GEPNoWrapFlags.none)
