"""What the kernels need to know of a Hopper chip."""

import jax
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


def resident_clusters(size: int, ctas_of_multiprocessor: int = 1) -> int:
    """Clusters of `size` CTAs that run at the same time, where a multiprocessor has room for so many CTAs.

    A cluster lives within one group of multiprocessors, of which some have a number that 4 does not divide: an H200
    holds 66 clusters of 2, 30 of 4 and 15 of 8 (cudaOccupancyMaxActiveClusters).
    """
    usable = multiprocessors() if size <= 2 else multiprocessors() * 10 // 11
    return max(1, usable * ctas_of_multiprocessor // size)
