"""Numbers that differ between a warp's threads (Mosaic GPU): 32 of them are worked on at once.

What a kernel computes from scalars, each thread computes for itself. Where one of them is `lane()`, each thread has
another number from there on, until `warp_sum` makes it the same in all again.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.mosaic.gpu import utils as mgpu
from jax.experimental.mosaic.gpu.fragmented_array import FragmentedArray
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, nvvm

WARP: Final = 32
_KEPT: Final = 8
"""Numbers that a thread holds in registers, at most, to look at them twice."""
_NUMBER: Final = plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT)


def lane() -> Array:
    """Which thread of its warp a thread is, int32."""

    def number(_: Any) -> Any:
        thread = mgpu.thread_idx()
        return _splat(arith.remui(thread, mgpu.c(WARP, thread.type)))

    inlined: Any = plgpu.inline_mgpu(return_type=_NUMBER)(number)
    return inlined()


def warp() -> Array:
    """Which warp of its warpgroup a thread is in, int32."""

    def number(_: Any) -> Any:
        thread = mgpu.thread_idx()
        in_warpgroup = arith.remui(thread, mgpu.c(4 * WARP, thread.type))
        return _splat(arith.divui(in_warpgroup, mgpu.c(WARP, thread.type)))

    inlined: Any = plgpu.inline_mgpu(return_type=_NUMBER)(number)
    return inlined()


def warp_sum(x: Array) -> Array:
    """The sum of int32 numbers of a warp's threads."""

    def added(_: Any, x: Any) -> Any:
        x = x.registers.item()
        return _splat(mgpu.redux(x, mgpu.c(0xFFFFFFFF, x.type), mgpu.ReductionKind.ADD))

    inlined: Any = plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT,), return_type=_NUMBER)(added)
    return inlined(x)


def warp_sums_up_to(x: Array) -> Array:
    """Of each thread of a warp: the sum of its int32 number and of those of the threads before it."""

    def added(_: Any, x: Any) -> Any:
        x = x.registers.item()
        thread = arith.remui(mgpu.thread_idx(), mgpu.c(WARP, x.type))
        for distance in (1, 2, 4, 8, 16):
            other = from_lanes_below(x, distance)
            is_there = arith.cmpi(arith.CmpIPredicate.uge, thread, mgpu.c(distance, x.type))
            x = arith.select(is_there, arith.addi(x, other), x)
        return _splat(x)

    inlined: Any = plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT,), return_type=_NUMBER)(added)
    return inlined(x)


def find_places(
    amount: Callable[[Array], Array], count: int, positions: Callable[[Array], Sequence[Array]]
) -> tuple[Array, list[tuple[Array, Array]]]:
    """Where positions lie among neighbours, of which number i is `amount(i)` long.

    Returns:
        the whole length; and for each of `positions(length)` the neighbour it lies in, and its distance from where that
        begins. Positions behind all are at 0 of the first.
    """
    chunks = -(-count // WARP)
    own = lane()

    def length(chunk: Any) -> Array:
        """Of the thread's own neighbour among 32."""
        index = chunk * WARP + own
        return jnp.where(index < count, amount(jnp.minimum(index, count - 1)), 0)

    # Where they are few, all lengths are loaded before the first is needed.
    lengths = [length(chunk) for chunk in range(chunks)] if chunks <= _KEPT else None

    def fold(step: Callable[[Any, Array, Any], Any], carry: Any) -> Any:
        if lengths is None:
            return lax.fori_loop(0, chunks, lambda chunk, carry: step(chunk, length(chunk), carry), carry)
        for chunk, known in enumerate(lengths):
            carry = step(chunk, known, carry)
        return carry

    total = warp_sum(fold(lambda _, length, total: total + length, jnp.zeros_like(own)))
    wanted = positions(total)

    def find(chunk: Any, length: Array, carry: tuple[Array, list[tuple[Array, Array]]]) -> Any:
        passed, found = carry
        end = passed + warp_sums_up_to(length)
        begin, index = end - length, chunk * WARP + own

        def added(to: tuple[Array, Array], position: Array) -> tuple[Array, Array]:
            is_here = (begin <= position) & (position < end)
            here = jnp.where(is_here, index, 0), jnp.where(is_here, position - begin, 0)
            return to[0] + warp_sum(here[0]), to[1] + warp_sum(here[1])

        is_last = isinstance(chunk, int) and chunk + 1 == chunks
        passed = passed if is_last else passed + warp_sum(length)
        return passed, [added(*pair) for pair in zip(found, wanted, strict=True)]

    nowhere = jnp.int32(0), jnp.int32(0)
    return total, fold(find, (jnp.int32(0), [nowhere for _ in wanted]))[1]


def from_lanes_below(x: Any, distance: int) -> Any:
    """What the lane so far below has, of 4 bytes in the compiler's terms; the first lanes have their own."""
    i32 = ir.IntegerType.get_signless(32)
    bits = x if x.type == i32 else arith.bitcast(i32, x)
    bits = nvvm.shfl_sync(mgpu.c(0xFFFFFFFF, i32), bits, mgpu.c(distance, i32), mgpu.c(0, i32), nvvm.ShflKind.up)
    return bits if x.type == i32 else arith.bitcast(x.type, bits)


def _splat(x: Any) -> Any:
    """As a kernel's scalar, though it may differ between threads."""
    return FragmentedArray.splat(x, (), is_signed=True)
