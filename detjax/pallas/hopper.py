"""What the kernels need to know of a Hopper chip."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array
from jax.experimental.mosaic.gpu import utils as mgpu
from jax.experimental.mosaic.gpu.fragmented_array import FragmentedArray
from jax.extend import backend
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

SHARED_MEMORY = 232448
"""Bytes of shared memory a CTA may use."""
SHARED_MEMORY_RESERVED = 2048
"""Of these, kept for barriers and alignment."""
_H200_MULTIPROCESSORS = 132


def multiprocessors() -> int:
    """Multiprocessors of the device that a kernel is traced for; an H200's where that is no GPU."""
    if abstract_device := jax.sharding.get_abstract_mesh().abstract_device:
        return abstract_device.num_cores or _H200_MULTIPROCESSORS
    device = backend.get_default_device()
    return device.core_count if device.platform == "gpu" else _H200_MULTIPROCESSORS


def resident_clusters(size: int) -> int:
    """Clusters of `size` CTAs, one to a multiprocessor, that run at the same time.

    A cluster lives within one group of multiprocessors, of which some have a number that 4 does not divide: an H200
    holds 66 clusters of 2, 30 of 4 and 15 of 8 (cudaOccupancyMaxActiveClusters).
    """
    usable = multiprocessors() if size <= 2 else multiprocessors() * 10 // 11
    return max(1, usable // size)


def kernel(
    body: Callable[..., None], *, ahead: Callable[..., None] | None = None, **options: Any
) -> Callable[..., Any]:
    """`plgpu.kernel`, started while the stream's kernel before it still runs (programmatic dependent launch).

    Its CTAs take the room that those of the kernel before leave, and wait there until that one, and so all before it,
    has ended and its results are in memory. In the same way the next kernel is let in.

    Args:
        body: as for `plgpu.kernel`.
        ahead: is called as `body` is, while others run that may still write to any memory: it may ask for memory to be
            brought to the L2 cache (`prefetch`, `plgpu.async_prefetch`), and read by `Peeked`.
        options: as for `plgpu.kernel`.
    """

    def waiting(*refs: Any, **scratch: Any) -> None:
        begin(functools.partial(ahead, *refs, **scratch) if ahead else None)
        body(*refs, **scratch)

    return plgpu.kernel(waiting, **options)


def begin(ahead: Callable[[], None] | None) -> None:
    """What a kernel of `kernel` begins with, in all threads."""
    if ahead is not None:
        ahead()
    plgpu.griddepcontrol_wait()
    plgpu.griddepcontrol_launch_dependents()


class Peeked:
    """An array of int32 in memory that may be being written: its elements are anything.

    They are read past the L1 cache, where what is read before it is written would be found again. Of an index that is
    out of range, as it may be if computed from such elements, the nearest that is not is taken.
    """

    def __init__(self, ref: Any) -> None:
        self._ref = ref

    def __getitem__(self, index: Any) -> Array:
        def load(_: Any, ref: Any, *indices: Any) -> Any:
            i64 = ir.IntegerType.get_signless(64)
            strides, _ = ir.MemRefType(ref.type).get_strides_and_offset()
            place = arith.constant(i64, 0)
            for number, stride, size in zip(indices, strides, ref.type.shape, strict=True):
                number = number.registers.item()
                number = arith.maxsi(arith.minsi(number, mgpu.c(size - 1, number.type)), mgpu.c(0, number.type))
                number = arith.extsi(i64, number)
                place = arith.addi(place, arith.muli(number, arith.constant(i64, 4 * stride)))
            pointer = llvm.ptrtoint(i64, mgpu.memref_ptr(ref))
            i32 = ir.IntegerType.get_signless(32)
            text = "ld.relaxed.gpu.global.b32 $0, [$1];"
            address = arith.addi(pointer, place)
            value = llvm.inline_asm(i32, [address], text, "=r,l", asm_dialect=0, has_side_effects=True)
            return FragmentedArray.splat(value, (), is_signed=True)

        indices = index if isinstance(index, tuple) else (index,)
        arg_types = plgpu.RefType(), *(plgpu.Layout.WG_SPLAT,) * len(indices)
        result = plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT)
        inlined: Any = plgpu.inline_mgpu(arg_types=arg_types, return_type=result)(load)
        return inlined(self._ref, *(jnp.asarray(number, jnp.int32) for number in indices))
