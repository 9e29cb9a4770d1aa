"""Copies of rows between memory and shared memory or registers, which zero or leave out the rows after a number.

All threads of the warpgroup copy, by `cp.async`, which every GPU since compute capability 8.0 has. So one kernel serves
all of them, and rows that nobody owns become zeros without being read.

A *slot* has rows of `SLOT_WIDTH` elements of 2 bytes in shared memory, swizzled in lines of 128 bytes: chunk `c` of 16
bytes of row `r` is at chunk `c ^ (r % 8)`, so that eight rows of one chunk are in different banks.
"""

from typing import Any, Final

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.mosaic.gpu import utils as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

from detjax.contract import QUERY_UNIT
from detjax.pallas.hopper.device import WARPGROUP
from detjax.pallas.hopper.mosaic import primitive
from detjax.pallas.hopper.mosaic.layouts import MATRIX, NUMBER, PER_ROW, swizzled
from detjax.pallas.hopper.mosaic.registers import element, first_row_and_lane, int32, unhoisted_thread

SLOT_WIDTH: Final = 64
"""Elements of a row of a slot."""
ROW_BYTES: Final = 2 * SLOT_WIDTH
"""Bytes of a row of a slot."""
CHUNK: Final = 8
"""Elements of 16 bytes, which a thread copies at once."""


def slots(count: int, rows: int, dtype: Any) -> Any:
    """Returns shared memory for `count` slots of `rows` rows."""
    return plgpu.SMEM((count, rows, SLOT_WIDTH), dtype, transforms=swizzled(SLOT_WIDTH))


def _units(rows: int, count: Any, copy: Any) -> None:
    """Calls `copy` for the units of 8 rows that begin before row `count`, which may reach beyond an array's end."""
    for first in range(0, rows, QUERY_UNIT):
        pl.when(first < count)(lambda first=first: copy(pl.ds(first, min(QUERY_UNIT, rows - first)), first))


def _plain_copy_rows(source: Any, target: Any, count: Array, *, whole: bool) -> None:
    rows, width = source.shape

    def copy(part: Any, first: int) -> None:
        is_kept = lax.broadcasted_iota(jnp.int32, (part.size, width), 0) + first < count
        x = source[part, :]
        target[part, pl.ds(0, width)] = jnp.where(is_kept, x, jnp.zeros_like(x))

    if whole:
        copy(pl.ds(0, rows), 0)
    else:
        target[:, pl.ds(0, width)] = jnp.zeros((rows, width), target.dtype)
        _units(rows, count, copy)


@primitive(
    twin=_plain_copy_rows,
    args=lambda source, target, count, *, whole: (plgpu.RefType(), plgpu.RefType(swizzled(SLOT_WIDTH)), NUMBER),
)
def copy_rows(source: Any, target: Any, count: Any, *, whole: bool) -> None:
    """Starts to copy rows from memory to a slot, with zeros from row `count` on, which are not read.

    The rows have arrived after `await_copies`, which counts groups of `commit_copies`.

    Args:
        source: `[rows, n]` in memory, n a multiple of 16 and at most `SLOT_WIDTH`; elements of 2 bytes, each row at a
            multiple of 16 bytes.
        target: a slot of as many rows. Columns after the n-th are undefined.
        count: number of rows that are read.
        whole: whether all rows of the source lie within its array, and not only the first `count`.
    """
    rows, width = source.type.shape
    (stride, _), _ = source.type.get_strides_and_offset()
    chunks = width // CHUNK
    origin = llvm.addrspacecast(llvm.PointerType.get(address_space=1), mgpu.memref_ptr(source))
    slot, byte = mgpu.memref_ptr(target), ir.IntegerType.get_signless(8)
    limit, thread = count.registers.item(), unhoisted_thread()
    for first in range(0, rows * chunks, WARPGROUP):
        number = arith.addi(thread, int32(first))
        row, chunk = arith.divui(number, int32(chunks)), arith.remui(number, int32(chunks))
        offset = arith.addi(arith.muli(row, int32(2 * stride)), arith.muli(chunk, int32(2 * CHUNK)))
        size = arith.select(arith.cmpi(arith.CmpIPredicate.slt, row, limit), int32(16), int32(0))
        nvvm.cp_async_shared_global(
            mgpu.getelementptr(slot, [slot_place(row, chunk)], byte),
            mgpu.getelementptr(origin, [offset], byte),
            16,
            nvvm.LoadCacheModifierKind.CG,
            cp_size=size,
        )


def slot_place(row: Any, chunk: Any) -> Any:
    """Returns the offset in bytes of a chunk of a slot's row."""
    swizzled_chunk = arith.xori(chunk, arith.remui(row, int32(8)))
    return arith.addi(arith.muli(row, int32(ROW_BYTES)), arith.muli(swizzled_chunk, int32(2 * CHUNK)))


def _plain_commit() -> None:
    """Does nothing: the interpreter's copies end at once."""


@primitive(twin=_plain_commit)
def commit_copies() -> None:
    """Makes the copies that the threads have started since the last call a group, which may be empty."""
    nvvm.cp_async_commit_group()


def _plain_await(*, unfinished: int) -> None:
    """Does nothing: the interpreter's copies end at once."""


@primitive(twin=_plain_await)
def await_copies(*, unfinished: int) -> None:
    """Waits until at most the last `unfinished` groups of copies are unfinished, and all threads have come here."""
    # A thread waits for its own copies only. The copies of other threads have ended once it has met these threads.
    nvvm.cp_async_wait_group(unfinished)
    mgpu.warpgroup_barrier()


def _plain_store_tile(x: Array, ref: Any, count: Array) -> None:
    rows = ref.shape[0]

    def copy(part: Any, first: int) -> None:
        ref[part, :] = x[first : first + part.size]

    _units(rows, count, copy)


@primitive(twin=_plain_store_tile, args=lambda x, ref, count: (MATRIX, plgpu.RefType(), NUMBER))
def store_tile(x: Any, ref: Any, count: Any) -> None:
    """Stores the first `count` rows of a tile to memory `[rows, n]`, which may have fewer rows than the tile.

    The interpreter stores whole units of 8 rows.
    """
    (stride, _), _ = ref.type.get_strides_and_offset()
    dtype = ref.type.element_type
    row, lane = first_row_and_lane()
    pointer = mgpu.memref_ptr(ref)
    registers = x.registers.reshape(-1, 2)  # of 8 columns; the thread's first row, and the one 8 below
    for half in range(2):
        place = arith.addi(row, int32(8 * half))
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.slt, place, count.registers.item())):
            offset = arith.addi(arith.muli(place, int32(stride)), arith.muli(lane, int32(2)))
            start = mgpu.getelementptr(pointer, [offset], dtype)
            for group, register in enumerate(registers[:, half]):
                llvm.store(register, mgpu.getelementptr(start, [8 * group], dtype))


def _plain_store_numbers(x: Array, ref: Any, count: Array) -> None:
    def copy(part: Any, first: int) -> None:
        ref[part] = x[first : first + part.size]

    _units(ref.shape[0], count, copy)


@primitive(twin=_plain_store_numbers, args=lambda x, ref, count: (PER_ROW, plgpu.RefType(), NUMBER))
def store_numbers(x: Any, ref: Any, count: Any) -> None:
    """Stores the numbers of the first `count` rows to memory `[rows]`; see `store_tile`."""
    dtype = ref.type.element_type
    row, lane = first_row_and_lane()
    pointer = mgpu.memref_ptr(ref)
    is_first = arith.cmpi(arith.CmpIPredicate.eq, lane, int32(0))
    for half, register in enumerate(np.ravel(x.registers)):
        place = arith.addi(row, int32(8 * half))
        is_given = arith.cmpi(arith.CmpIPredicate.slt, place, count.registers.item())
        with mgpu.when(arith.andi(is_first, is_given)):
            llvm.store(element(register), mgpu.getelementptr(pointer, [place], dtype))
