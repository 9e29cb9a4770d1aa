"""NVIDIA GPUs as kernels see them: the compute capability that kernels are traced for, and its limits."""

import contextlib
from typing import Final

import jax

from detjax.runtime import contexts

Architecture = tuple[int, int]
"""A compute capability: major and minor number."""

OLDEST: Final[Architecture] = (8, 0)
"""The first compute capability with `mma.sync.m16n8k16` on bfloat16."""

_KIB: Final = 1024

SHARED_MEMORY_RESERVED: Final = 2 * _KIB
"""Bytes of shared memory that kernels with one CTA per multiprocessor leave for barriers and alignment."""

_SHARED_MEMORY: Final[dict[Architecture, int]] = {
    (8, 0): 163 * _KIB,
    (8, 6): 99 * _KIB,
    (8, 7): 163 * _KIB,
    (8, 9): 99 * _KIB,
    (9, 0): 227 * _KIB,
    (10, 0): 227 * _KIB,
    (10, 3): 227 * _KIB,
    (11, 0): 227 * _KIB,
    (12, 0): 99 * _KIB,
    (12, 1): 99 * _KIB,
}
"""Bytes of shared memory that a CTA may use (CUDA's programming guide, table of compute capabilities)."""

_WITHOUT_A_GPU: Final[Architecture] = (9, 0)
"""The compute capability where JAX has no GPU: Mosaic GPU's own choice."""


def architecture() -> Architecture:
    """Returns the compute capability that kernels are traced for: `tracing_for`'s, else the default device's."""
    chosen = contexts.architecture.value
    if chosen is not None:
        return chosen
    capability = getattr(jax.devices()[0], "compute_capability", None)
    return _WITHOUT_A_GPU if capability is None else parsed(capability)


def parsed(capability: str) -> Architecture:
    """Returns a compute capability from JAX's text, such as "8.9".

    Raises:
        ValueError: the text is not a compute capability.
    """
    major, _, minor = capability.partition(".")
    if not (major.isdecimal() and minor.isdecimal()):
        raise ValueError(f"compute capability {capability!r}; accepted: two numbers, such as '8.9'")
    return int(major), int(minor)


def tracing_for(architecture: Architecture) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which kernels are traced for a compute capability whose device may be absent."""
    return contexts.architecture(architecture)


def shared_memory_of_cta() -> int:
    """Returns the bytes of shared memory that a CTA may use on the traced architecture.

    An architecture that is not listed has at least the smallest of the listed sizes.
    """
    return _SHARED_MEMORY.get(architecture(), min(_SHARED_MEMORY.values()))


def shared_memory() -> int:
    """Returns the bytes of shared memory that a CTA's buffers may take."""
    return shared_memory_of_cta() - SHARED_MEMORY_RESERVED


def shared_memory_of_multiprocessor() -> int:
    """Returns the bytes of a multiprocessor's shared memory, for the buffers of all its CTAs and 1 KiB for each CTA."""
    return shared_memory_of_cta() + _KIB


def has_copy_engine() -> bool:
    """Returns whether a copy engine (TMA) fills shared memory: since 9.0. Before, threads do, by `cp.async`."""
    return architecture() >= (9, 0)
