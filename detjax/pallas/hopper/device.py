"""Hopper GPUs as the kernels see them: constants of the chip, and the number of CTAs and clusters that fit on it."""

from typing import Final

import jax
from jax.extend import backend

from detjax.pallas.nvidia import SHARED_MEMORY_RESERVED as SHARED_MEMORY_RESERVED

DTYPES: Final = ("bfloat16", "float16")
"""Dtypes of the matrix unit's operands."""

WARP: Final = 32
"""Threads of a warp."""

WARPGROUP: Final = 128
"""Threads of a warpgroup: the four warps that issue a `wgmma` together."""

SWIZZLE_BYTES: Final = 128
"""Bytes of the longest line in shared memory that the copy engine swizzles: one word in each of the 32 banks."""

SHARED_MEMORY: Final = 227 * 1024
"""Bytes of shared memory that a CTA may use."""

SHARED_MEMORY_OF_MULTIPROCESSOR: Final = 228 * 1024
"""Bytes of a multiprocessor's shared memory, for all its CTAs."""

MAX_CLUSTER: Final = 8
"""CTAs of the largest portable cluster."""

_H200_MULTIPROCESSORS: Final = 132

_REGISTERS: Final = 64 * 1024
"""32-bit registers of a multiprocessor."""

_REGISTER_UNIT: Final = 8
"""A thread's registers are a multiple of this number."""


CLOCK: Final = 1.7e9
"""Cycles a second of an H200 under load, for estimates."""
MEMORY_BANDWIDTH: Final = 4.6e12
"""Bytes a second that an H200 reads, for estimates."""


def shared_registers(*counts: int) -> tuple[int, ...]:
    """Returns `counts`, the registers per thread of each warpgroup of a CTA, after checking that the CTA has them.

    A CTA owns the registers that its threads started with, the same number for each. A warpgroup that asks for more
    than the others have released waits forever, and neither the interpreter nor the compiler reports it.

    Raises:
        ValueError: the counts add up to more than the CTA's registers.
    """
    initial = registers_at_start(len(counts))
    if sum(counts) > len(counts) * initial:
        raise ValueError(
            f"shared_registers: {counts} add up to {sum(counts)} for the {len(counts)} warpgroups of a CTA; accepted: "
            f"up to {len(counts) * initial}, since a thread starts with {initial}"
        )
    return counts


def registers_at_start(warpgroups: int) -> int:
    """Returns the registers with which each thread of a CTA of `warpgroups` warpgroups starts."""
    return _REGISTERS // (warpgroups * WARPGROUP) // _REGISTER_UNIT * _REGISTER_UNIT


def multiprocessors() -> int:
    """Returns the number of multiprocessors of the traced device; an H200's if that is not a GPU."""
    if abstract_device := jax.sharding.get_abstract_mesh().abstract_device:
        return abstract_device.num_cores or _H200_MULTIPROCESSORS
    device = backend.get_default_device()
    return device.core_count if device.platform == "gpu" else _H200_MULTIPROCESSORS


def resident_clusters(size: int, ctas_per_multiprocessor: int = 1) -> int:
    """Returns the number of clusters of `size` CTAs that run at the same time.

    A cluster runs within one group of multiprocessors, and the size of some groups is not a multiple of 4: an H200
    holds 66 clusters of 2, 30 of 4 and 15 of 8 CTAs (cudaOccupancyMaxActiveClusters).

    Args:
        size: the number of CTAs in a cluster.
        ctas_per_multiprocessor: CTAs that fit on a multiprocessor.
    """
    usable = multiprocessors() if size <= 2 else multiprocessors() * 10 // 11
    return max(1, usable * ctas_per_multiprocessor // size)
