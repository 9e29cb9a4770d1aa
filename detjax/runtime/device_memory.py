"""The share of a GPU's memory that JAX allocates, chosen for commands that serve a model.

JAX takes three quarters by default, so that other programs can share the GPU. An engine has the GPU to itself, apart
from the processes that compile its programs, and every further page of its cache is a token that need not wait.
"""

import ctypes
import os
from typing import Final

VARIABLES: Final = "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"
"""The environment variables that tell JAX the share; the first one is JAX's own."""

MAX_COMPILERS: Final = 16
"""Maximum number of threads or processes that compile programs."""

_BYTES_OF_A_COMPILER: Final = 1 << 29
"""Bytes on the GPU of a process that compiles: its CUDA context."""
_BYTES_BESIDES: Final = 1 << 30
"""Bytes of this process that JAX does not allocate: its CUDA context, kernels and graphs."""
_SHARES: Final = 0.75, 0.92
"""The smallest share, which is JAX's default, and the largest."""
_LIBRARY: Final = "libnvidia-ml.so.1"
"""NVIDIA's management library. It comes with the driver, and reads a GPU's memory without using the GPU."""


def use_most() -> None:
    """Makes JAX allocate what the processes that compile programs leave of each GPU, but at least its default.

    It takes effect if JAX has not used a GPU yet. A share that the environment names is kept, and so is JAX's default
    without an NVIDIA GPU.
    """
    if not any(name in os.environ for name in VARIABLES) and (total := smallest_memory()) is not None:
        os.environ[VARIABLES[0]] = f"{share_of(total, os.cpu_count() or 1):.3f}"


def share_of(total: int, processors: int) -> float:
    """Returns JAX's share of a GPU with `total` bytes. Every processor of the host may run a process that compiles."""
    least, most = _SHARES
    others = _BYTES_BESIDES + _BYTES_OF_A_COMPILER * min(MAX_COMPILERS, processors)
    return min(max(least, 1 - others / total), most)


def smallest_memory(library: str = _LIBRARY) -> int | None:
    """Returns the bytes of the host's NVIDIA GPU with the least memory; None without such a GPU or its driver."""
    try:
        nvml = ctypes.CDLL(library)
    except OSError:
        return None
    count, handle, memory = ctypes.c_uint(), ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()  # total, free, used
    if nvml.nvmlInit_v2():
        return None
    try:
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return None
        totals: list[int] = []
        for index in range(count.value):
            if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)):
                continue
            if not nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)):
                totals.append(memory[0])
        return min(totals, default=None)
    finally:
        nvml.nvmlShutdown()
