"""Hopper GPUs as the kernels see them: constants of the chip, and how many CTAs and clusters run at the same time."""

from typing import Final

import jax
from jax.extend import backend

DTYPES: Final = ("bfloat16", "float16")
"""Dtypes of the operands that kernels give to the matrix unit."""

WARP: Final = 32
"""Threads of a warp."""

WARPGROUP: Final = 128
"""Threads of a warpgroup: the four warps that issue a `wgmma` together."""

SWIZZLE_BYTES: Final = 128
"""Bytes of the longest line in shared memory that the copy engine swizzles."""

SHARED_MEMORY: Final = 227 * 1024
"""Bytes of shared memory that a CTA may use."""

SHARED_MEMORY_OF_MULTIPROCESSOR: Final = 228 * 1024
"""Bytes of shared memory that the CTAs of a multiprocessor share."""

SHARED_MEMORY_RESERVED: Final = 2 * 1024
"""Bytes of `SHARED_MEMORY` that kernels of one CTA per multiprocessor leave for their barriers and for alignment."""

MAX_CLUSTER: Final = 8
"""CTAs of the largest cluster that every Hopper GPU can place."""

_H200_MULTIPROCESSORS: Final = 132

_REGISTERS: Final = 64 * 1024
"""Registers of a multiprocessor, of 4 bytes."""

_REGISTER_UNIT: Final = 8
"""A thread's registers are a multiple of this number."""


def shared_registers(*counts: int) -> tuple[int, ...]:
    """Returns `counts`, which the warpgroups of a CTA can have at the same time: registers of a thread of each.

    A CTA has what its threads were given when it began, the same number each. A warpgroup that asks for more than the
    others have left waits forever, which neither the interpreter nor the compiler tells.

    Raises:
        ValueError: they are more than a CTA of so many warpgroups has.
    """
    given = _REGISTERS // (len(counts) * WARPGROUP) // _REGISTER_UNIT * _REGISTER_UNIT
    if sum(counts) > len(counts) * given:
        raise ValueError(
            f"shared_registers: {counts} are {sum(counts)} for the {len(counts)} warpgroups of a CTA; accepted: "
            f"{len(counts) * given} or fewer, since a thread begins with {given}"
        )
    return counts


def multiprocessors() -> int:
    """The number of multiprocessors of the device that a kernel is traced for; an H200's if that is not a GPU."""
    if abstract_device := jax.sharding.get_abstract_mesh().abstract_device:
        return abstract_device.num_cores or _H200_MULTIPROCESSORS
    device = backend.get_default_device()
    return device.core_count if device.platform == "gpu" else _H200_MULTIPROCESSORS


def resident_clusters(size: int, ctas_per_multiprocessor: int = 1) -> int:
    """The number of clusters of `size` CTAs that run at the same time.

    A cluster lives within one group of multiprocessors, and some groups have a number of multiprocessors that 4 does
    not divide: an H200 holds 66 clusters of 2, 30 of 4 and 15 of 8 CTAs (cudaOccupancyMaxActiveClusters).

    Args:
        size: the number of CTAs in a cluster.
        ctas_per_multiprocessor: the number of these CTAs that a multiprocessor has room for.
    """
    usable = multiprocessors() if size <= 2 else multiprocessors() * 10 // 11
    return max(1, usable * ctas_per_multiprocessor // size)
