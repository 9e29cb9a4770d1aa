"""What the environment of a process asks of compilers and libraries: flags, files of flags, environment variables."""

import fnmatch
import functools
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

import jax


class EnvironmentContradiction(RuntimeError):
    """The process environment asks for something that a contract forbids. The message says what to change.

    Example:
        >>> with jax.disable_jit():
        ...     try:
        ...         ops.softmax(jnp.ones(3))
        ...     except detjax.EnvironmentContradiction as error:
        ...         print(error)
        ...
        the JAX option jax_disable_jit is True; accepted: False, because operations would run uncompiled ...
    """


FLAG_VARIABLES: Final = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
"""The environment variables that hold flags of compilers."""

_CONTRADICTING_VARIABLES: Final[Mapping[str, tuple[str, str]]] = {
    # variable: (value that contradicts the contract, why)
    "NVIDIA_TF32_OVERRIDE": ("1", "it makes cuBLAS round float32 operands to TF32"),
}

_FLAGS_ELSEWHERE: Final = frozenset(("flagfile", "fromenv", "tryfromenv"))
"""The flags with which libtpu reads further flags from files and other environment variables."""

HASHED_VARIABLES: Final[Mapping[str, tuple[str, ...]]] = {
    "cpu": (
        "XLA_*",
        "LIBTPU_INIT_ARGS",
        "JAX_*",
        "TF_CUBLAS*",
        "TF_CUDA*",
        "TF_CUDNN*",
        "TF_DETERMINISTIC_OPS",
        "TF_DISABLE_*",
        "TF_ENABLE_*",
        "TF_GPU_*",
        "TF_XLA_*",
        "PJRT_*",
        "LLVM_*",
        "MLIR_*",
        "TRITON_*",
        "DNNL_*",
        "ONEDNN_*",
        "MKL_*",
        "NPY_*",
        "GLIBC_TUNABLES",
        "LD_PRELOAD",
    ),
    "gpu": (
        "CUDA_*",
        "CUBLAS*",
        "CUDNN_*",
        "NVIDIA_*",
        "NVCC_*",
        "NVPTX_*",
        "MOSAIC_*",
        "DISABLE_LLVM_OPT",
        "DISABLE_PTXAS_OPT",
        "LD_LIBRARY_PATH",
    ),
    "tpu": ("LIBTPU_*", "TPU_*", "MEGASCALE_*", "MOSAIC_*"),
}
"""Patterns of the environment variables that enter the fingerprint: on all devices those of "cpu", and those of the
device's platform."""

HARMLESS_VARIABLES: Final[Mapping[str, tuple[str, ...]]] = {
    "It decides what is logged or dumped.": (
        "JAX_TRACEBACK_FILTERING",
        "MLIR_ENABLE_DIAGNOSTICS",
        "MLIR_ENABLE_DUMP",
        "MLIR_ENABLE_TIMING",
        "MOSAIC_GPU_DUMP_*",
        "NVPTX_ENABLE_DUMP",
        "TF_DISABLE_PROFILING",
        "TPU_MIN_LOG_LEVEL",
        "TPU_STDERR_LOG_LEVEL",
        "TPU_VMODULE",
    ),
    "It decides how much memory is taken, and how files are read.": (
        "CUDA_CACHE_DISABLE",
        "CUDA_CACHE_MAXSIZE",
        "CUDA_CACHE_PATH",
        "TF_GPU_ALLOCATOR",
        "XLA_CLIENT_MEM_FRACTION",
        "XLA_PYTHON_CLIENT_*",
    ),
    "It decides how many threads compute. Contracts hold with any number.": ("PJRT_NPROC",),
    "It decides when kernels are loaded and how long the host waits for them.": (
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "CUDA_LAUNCH_BLOCKING",
        "CUDA_MODULE_LOADING",
    ),
    "It chooses devices, or says how hosts meet. The fingerprint names the kind of device that serves.": (
        "CUDA_DEVICE_ORDER",
        "CUDA_VISIBLE_DEVICES",
        "JAX_COORDINATOR_*",
        "JAX_FORCE_TPU_INIT",
        "JAX_LOCAL_DEVICE_IDS",
        "JAX_PARTITION_INDEX",
        "JAX_SLICE_INDEX",
        "NVIDIA_VISIBLE_DEVICES",
        "TPU_ACCELERATOR_TYPE",
        "TPU_CHIPS_*",
        "TPU_HOST_BOUNDS",
        "TPU_NAME",
        "TPU_PROCESS_*",
        "TPU_SKIP_MDS_QUERY",
        "TPU_TOPOLOGY*",
        "TPU_VISIBLE_*",
        "TPU_WORKER_*",
        "XLA_DISTRIBUTED_TOPOLOGY_NETWORK_NODES",
    ),
    "It describes a container or a package. The fingerprint names the versions that run.": (
        "CUDA_VERSION",
        "NVIDIA_DRIVER_CAPABILITIES",
        "NVIDIA_PRODUCT_NAME",
        "NVIDIA_REQUIRE_*",
        "TPU_ML_PLATFORM*",
    ),
    "JAX sets it itself when its Mosaic modules are imported.": (
        "MOSAIC_GPU_CUDA_ROOT",
        "MOSAIC_GPU_NVSHMEM_*",
        "MOSAIC_GPU_RUNTIME_LIB_PATH",
    ),
}
"""Patterns of the environment variables that change no bit, by the reason."""

_HARMLESS_PATTERNS: Final = tuple(pattern for patterns in HARMLESS_VARIABLES.values() for pattern in patterns)


def variables(device_platform: str) -> dict[str, str]:
    """Returns the environment variables that enter the fingerprint on "cpu", "gpu" or "tpu", with their values.

    The contents of a file of flags stand in place of its path. Variables of JAX's options are left out, because the
    fingerprint has the options themselves.

    Raises:
        EnvironmentContradiction: a file of flags cannot be read.
    """
    patterns = (*HASHED_VARIABLES["cpu"], *HASHED_VARIABLES[device_platform])
    options = jax.config.values
    hashed = {
        name: value
        for name, value in os.environ.items()
        if value and _matches(name, patterns) and not _matches(name, _HARMLESS_PATTERNS) and name.lower() not in options
    }
    return dict(sorted((name, flag_text(name, value)) for name, value in hashed.items()))


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def contradictions(pinned: Mapping[str, bool | int]) -> Iterator[str]:
    """Yields what the environment variables ask for against the contract, and what to do.

    Args:
        pinned: the options that programs are compiled with.

    Raises:
        EnvironmentContradiction: a file of flags cannot be read.
    """
    for variable in FLAG_VARIABLES:
        text = os.environ.get(variable)
        if not text:
            continue
        for name, value in flags(variable, text).items():
            if name in pinned and _flag_value(value) != int(pinned[name]):
                yield (
                    f"{variable} has --{name}={value}; the contract needs {str(pinned[name]).lower()} on "
                    f"{jax.default_backend()}. Remove the flag: detjax gives it to each of its programs itself."
                )
            if name in _FLAGS_ELSEWHERE and variable == "LIBTPU_INIT_ARGS":
                yield (
                    f"{variable} has --{name}={value}, which reads flags from another place; accepted: the flags "
                    f"themselves, because bits may depend on them. Write them into {variable}."
                )
    for variable, (value, reason) in _CONTRADICTING_VARIABLES.items():
        if os.environ.get(variable) == value:
            yield f"{variable}={value} is set and {reason}. Unset it."


@functools.lru_cache(maxsize=16)
def flags(variable: str, text: str) -> Mapping[str, str]:
    """Returns the flags that an environment variable with this value holds. Its caller must not change them.

    Raises:
        EnvironmentContradiction: the value names a file of flags that cannot be read.
    """
    return dict(_parsed(flag_text(variable, text)))


_FLAG: Final = re.compile(r"""(-[-\w]*)(?:=(?:"((?:\\.|[^"\\])*)"?|'([^']*)'?)|(\S*))""", re.ASCII | re.DOTALL)


def _parsed(text: str) -> Iterator[tuple[str, str]]:
    """Yields names and values as XLA reads them. What follows a word that is no flag is not read."""
    position = 0
    while match := _FLAG.match(text, len(text) - len(text[position:].lstrip(" \t\r\n"))):
        name, in_double_quotes, in_quotes, rest = match.groups()
        if in_double_quotes is not None:
            value = re.sub(r"\\(.)", r"\1", in_double_quotes, flags=re.DOTALL)
        else:
            value = rest.removeprefix("=") if in_quotes is None else in_quotes
        yield name.lstrip("-"), value or "true"
        position = match.end()


@functools.lru_cache(maxsize=64)
def flag_text(variable: str, value: str) -> str:
    """Returns the text of flags that an environment variable stands for: its value, or what a file says.

    XLA takes a value of XLA_FLAGS that does not begin with a dash for the path of a file, which it reads once.

    Raises:
        EnvironmentContradiction: the file cannot be read.
    """
    if variable != "XLA_FLAGS" or value.lstrip(" \t\r\n")[:1] in ("-", ""):
        return value
    try:
        return Path(value).read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise EnvironmentContradiction(
            f"XLA_FLAGS is {value!r}, which XLA takes for a file of flags, because it does not begin with a dash; the "
            f"file cannot be read ({error.strerror}), so nobody can tell which flags hold. Write the flags into "
            "XLA_FLAGS."
        ) from error


def _flag_value(text: str) -> int | str:
    lowered = text.lower()
    if lowered in ("true", "false"):
        return int(lowered == "true")
    return int(lowered) if lowered.lstrip("-").isdigit() else lowered
