"""What the kernels need to know of a Hopper chip."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax.extend import backend

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
            brought to the L2 cache by `plgpu.async_prefetch`.
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
