"""Barriers between warps, and prefetches to the L2 cache."""

import functools
import math
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array
from jax.experimental.mosaic.gpu import utils as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from detjax.operands.numerics import ceil_div
from detjax.pallas.hopper.mosaic import no_twin, primitive, with_twin
from detjax.pallas.hopper.mosaic.layouts import NUMBER
from detjax.pallas.hopper.mosaic.registers import element, i32, int32, offset_address
from detjax.pallas.nvidia import has_copy_engine

_CACHE_LINE = 128
"""Bytes."""


def _named_barrier_of_the_interpreter(operation: str, barrier: Array | int, num_threads: int) -> None:
    """Emits a barrier that Pallas' interpreter recognizes by the emitting function's name and closure."""
    emit = lambda *_: (operation, num_threads)  # noqa: E731 - tests wrap each `def` in a type check, which hides this
    emit.__qualname__ = "bar_op"
    inline: Any = plgpu.inline_mgpu(arg_types=(NUMBER,))
    inline(emit)(jnp.int32(barrier))


@primitive(twin=no_twin("a barrier's instruction"), args=lambda *barrier, text: (NUMBER,) * len(barrier))
def _instruction(*barrier: Any, text: str) -> None:
    mgpu.inline_ptx(text, *(x.registers.item() for x in barrier), has_side_effects=True)


@with_twin(_named_barrier_of_the_interpreter)
def _named_barrier(operation: str, barrier: Array | int, num_threads: int) -> None:
    if isinstance(barrier, int):
        _instruction(text=f"bar.{operation} {barrier}, {num_threads};")
    else:
        _instruction(barrier, text=f"bar.{operation} $0, {num_threads};")


def arrive(barrier: Array | int, num_threads: int) -> None:
    """Arrives at one of the hardware's 16 barriers, which `num_threads` threads use, without waiting."""
    _named_barrier("arrive", barrier, num_threads)


def sync(barrier: Array | int, num_threads: int) -> None:
    """Arrives at one of the hardware's 16 barriers, which `num_threads` threads use, and waits for the others."""
    _named_barrier("sync", barrier, num_threads)


def _plain_meet() -> None:
    """Does nothing: the interpreter's threads are whole warpgroups."""


@primitive(twin=_plain_meet)
def meet() -> None:
    """Makes all threads of the warpgroup wait for one another; unlike `commit_smem` it waits for no load."""
    mgpu.warpgroup_barrier()


def commit_smem() -> None:
    """Makes the threads' stores to shared memory visible to all of them, and to the copy engine if there is one."""
    if has_copy_engine():
        plgpu.commit_smem()
    else:
        meet()


def _plain_await_loads(*loaded: Array, layouts: tuple[Any, ...]) -> None:
    """Does nothing: the interpreter loads at once."""


@primitive(twin=_plain_await_loads, args=lambda *_, layouts: layouts)
def await_loads(*loaded: Any, layouts: tuple[Any, ...]) -> None:
    """Makes a thread wait until it has loaded arrays from shared memory, which the copy engine may then overwrite.

    Neither an arrival at a barrier nor a meeting waits for loads. So a buffer can be free, and be overwritten, while a
    load from it is still queued: on an H200, loads of scales were held up so long by other warps' loads from device
    memory that they returned the scales of the next tile, in one of 100 products of 8192 rows.

    Buffers that only the matrix unit reads do not need this, nor do numbers that a thread has since stored, shuffled or
    given to the matrix unit. Arithmetic in registers is not enough: the compiler moves it after the arrival.

    Args:
        loaded: the arrays, or arrays that were computed from all of their elements. Not all of their bits are 1.
        layouts: their layouts.
    """
    words = [word for x in loaded for register in x.registers.flat for word in _words(register)]
    # Only a condition on the numbers makes the compiler wait for them before what follows. It is never met, and this
    # prefetch would do nothing. With a fence instead, the compiler branches: large products took up to 13% longer.
    text = """{ .reg .pred p; .reg .b64 a; mov.b64 a, 0; cvta.shared.u64 a, a;
    setp.eq.u32 p, $0, 0xffffffff; @p prefetch.L2 [a]; }"""
    mgpu.inline_ptx(text, functools.reduce(arith.andi, words), has_side_effects=True)


def _words(register: Any) -> list[Any]:
    """Returns the 32-bit words of a register: a number, or a vector of numbers."""
    if not isinstance(register.type, ir.VectorType):
        return [arith.bitcast(i32(), register)]
    count = math.prod(register.type.shape) * mgpu.bitwidth(register.type.element_type) // 32
    words = vector.bitcast(ir.VectorType.get((count,), i32()), register)
    return [element(words, i) for i in range(count)]


def _plain_prefetch(ref: Any, part: Array, *, parts: int, threads: int) -> None:
    """Does nothing: the interpreter has no cache."""


@primitive(twin=_plain_prefetch, args=(plgpu.RefType(), NUMBER))
def prefetch(ref: Any, part: Any, *, parts: int, threads: int) -> None:
    """Prefetches part number `part` of an array in memory to the L2 cache.

    Args:
        ref: the array, of 4-byte elements.
        part: the number of the part.
        parts: number of parts of the array.
        threads: number of threads that call this.
    """
    pointer = mgpu.memref_ptr(ref)

    lines = ceil_div(math.prod(ref.type.shape) * 4, _CACHE_LINE)
    lines_of_part = ceil_div(lines, parts)
    thread = mgpu.thread_idx()
    for first in range(0, lines_of_part, threads):
        in_part = arith.addi(thread, int32(first))
        line = arith.addi(arith.muli(part.registers.item(), int32(lines_of_part)), in_part)
        is_inside = arith.andi(
            arith.cmpi(arith.CmpIPredicate.ult, in_part, int32(lines_of_part)),
            arith.cmpi(arith.CmpIPredicate.ult, line, int32(lines)),
        )
        with mgpu.when(is_inside):
            address = offset_address(pointer, arith.muli(line, int32(_CACHE_LINE)), ir.IntegerType.get_signless(8))
            mgpu.inline_ptx("prefetch.global.L2 [$0];", address, has_side_effects=True)
