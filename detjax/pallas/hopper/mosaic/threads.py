"""Work of single threads of a warpgroup (Mosaic GPU): each thread has its own numbers, and loads and stores them.

A kernel's scalars are registers of each thread, so what is computed from `thread()` differs between the threads. A
thread's index may be anywhere in an array. In Pallas' interpreter such scalars are arrays of one number per thread.
"""

from typing import Any, Final

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.mosaic.gpu import utils as mgpu
from jaxlib.mlir.dialects import math, memref

from detjax.pallas.hopper.device import WARP, WARPGROUP
from detjax.pallas.hopper.mosaic import primitive, with_twin
from detjax.pallas.hopper.mosaic.layouts import NUMBER
from detjax.pallas.hopper.mosaic.registers import as_index, i32, number, offset_address, thread_of_warpgroup
from detjax.pallas.hopper.mosaic.warps import warp_prefix_sum

_INT32: Final = plgpu.ShapeDtypeStruct((), jnp.int32, layout=NUMBER)


def _plain_meet() -> None:
    """Does nothing: the interpreter's threads are whole warpgroups."""


@primitive(twin=_plain_meet)
def meet() -> None:
    """Makes all threads of the warpgroup wait for one another.

    Unlike `barriers.meet`, this is for code that branches by thread: it says that the instruction must not be copied
    into branches, where the threads of a warp would wait at different copies.
    """
    barrier = mgpu.warpgroup_barrier_idx(sync=False)
    mgpu.inline_ptx(f"bar.sync $0, {WARPGROUP};", barrier, has_side_effects=True, convergent=True)


def _plain_thread() -> Array:
    return jnp.arange(WARPGROUP, dtype=jnp.int32)


@primitive(twin=_plain_thread, out=_INT32)
def thread() -> Any:
    """Returns the number of the thread within its warpgroup, int32."""
    return number(thread_of_warpgroup())


def _plain_load(ref: Any, *index: Array) -> Array:
    return ref[...][index]


@with_twin(_plain_load)
def load(ref: Any, *index: Array) -> Array:
    """Returns the number at the thread's index, which must be inside the array."""
    return ref[index]


def _plain_store(ref: Any, condition: Array, value: Array, *index: Array) -> None:
    first = jnp.where(condition, index[0], ref.shape[0])
    ref[...] = ref[...].at[(first, *index[1:])].set(value, mode="drop")


@primitive(twin=_plain_store, args=lambda ref, *numbers: (plgpu.RefType(), *(NUMBER,) * len(numbers)))
def store(ref: Any, condition: Any, value: Any, *index: Any) -> None:
    """Stores a thread's number at the thread's index, where the condition holds."""
    with mgpu.when(condition.registers.item()):
        memref.store(value.registers.item(), ref, [as_index(i.registers.item()) for i in index])


def _plain_store_vector(ref: Any, x: Array, *, layout: Any) -> None:
    ref[...] = x


@primitive(twin=_plain_store_vector, args=lambda ref, x, *, layout: (plgpu.RefType(), layout))
def store_vector(ref: Any, x: Any, *, layout: Any) -> None:
    """Stores a vector of any length, number by number. Pallas' own store cannot be planned for a single number."""
    x.store_untiled(ref, optimized=False)


def _plain_or_into(ref: Any, condition: Array, bits: Array, index: Array) -> None:
    # The interpreter's callers set each bit once, so that a sum is a disjunction.
    ref[...] = ref[...].at[jnp.where(condition, index, ref.shape[0])].add(bits, mode="drop")


@primitive(twin=_plain_or_into, args=(plgpu.RefType(), NUMBER, NUMBER, NUMBER))
def or_into(ref: Any, condition: Any, bits: Any, index: Any) -> None:
    """Sets bits of an int32 in shared memory, where the condition holds. Threads do not need to wait for one another.

    No two threads may set the same bit, and it must not be set yet.
    """
    address = offset_address(mgpu.memref_ptr(ref), index.registers.item(), i32())
    with mgpu.when(condition.registers.item()):
        mgpu.inline_ptx("red.shared.or.b32 [$0], $1;", address, bits.registers.item(), has_side_effects=True)


def _plain_count_bits(x: Array) -> Array:
    return lax.population_count(x)


@primitive(twin=_plain_count_bits, args=(NUMBER,), out=_INT32)
def count_bits(x: Any) -> Any:
    """Returns the number of bits of an int32 that are set."""
    return number(math.ctpop(x.registers.item()))


def _plain_sum_up_to(x: Array) -> Array:
    return jnp.cumsum(x.reshape(-1, WARP), axis=1, dtype=jnp.int32).reshape(-1)


@with_twin(_plain_sum_up_to)
def sum_up_to(x: Array) -> Array:
    """Returns the sum of the int32 numbers of a warp's threads up to the thread itself."""
    return warp_prefix_sum(x)
