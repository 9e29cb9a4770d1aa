"""Compiler flags and environment variables of a process that bits depend on."""

import fnmatch
import functools
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

import jax


class EnvironmentContradiction(RuntimeError):
    """The process environment contradicts a contract. The message says what to change.

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
"""Environment variables that hold compiler flags."""

_FLAGS_ELSEWHERE: Final = frozenset(("flagfile", "fromenv", "tryfromenv"))
"""Flags that make libtpu read further flags from files and other environment variables."""

HASHED_VARIABLES: Final[Mapping[str, tuple[str, ...]]] = {
    platform: tuple(names.split())
    for platform, names in {
        "cpu": """
            XLA_* LIBTPU_INIT_ARGS JAX_* TF_CUBLAS* TF_CUDA* TF_CUDNN* TF_DETERMINISTIC_OPS
            TF_DISABLE_* TF_ENABLE_* TF_GPU_* TF_XLA_* PJRT_* LLVM_* MLIR_* TRITON_* DNNL_* ONEDNN_*
            MKL_* NPY_* GLIBC_TUNABLES LD_PRELOAD
        """,
        "gpu": """
            CUDA_* CUBLAS* CUDNN_* NVIDIA_* NVCC_* NVPTX_* MOSAIC_* DISABLE_LLVM_OPT DISABLE_PTXAS_OPT
            LD_LIBRARY_PATH
        """,
        "tpu": """
            LIBTPU_* TPU_* MEGASCALE_* MOSAIC_*
        """,
    }.items()
}
"""Patterns of the environment variables in the fingerprint: those for "cpu" on all devices, and those for the device's
platform."""

HARMLESS_VARIABLES: Final[Mapping[str, tuple[str, ...]]] = {
    reason: tuple(names.split())
    for reason, names in {
        "It controls logs and dumps.": """
            JAX_TRACEBACK_FILTERING MLIR_ENABLE_DIAGNOSTICS MLIR_ENABLE_DUMP MLIR_ENABLE_TIMING
            MOSAIC_GPU_DUMP_* NVPTX_ENABLE_DUMP TF_DISABLE_PROFILING TPU_MIN_LOG_LEVEL
            TPU_STDERR_LOG_LEVEL TPU_VMODULE
        """,
        "It controls memory allocation and file access.": """
            CUDA_CACHE_DISABLE CUDA_CACHE_MAXSIZE CUDA_CACHE_PATH TF_GPU_ALLOCATOR
            XLA_CLIENT_MEM_FRACTION XLA_PYTHON_CLIENT_*
        """,
        "It sets the number of threads. Contracts hold with any number.": """
            PJRT_NPROC
        """,
        "It controls when kernels are loaded and how the host waits for them.": """
            CUDA_DEVICE_MAX_CONNECTIONS CUDA_LAUNCH_BLOCKING CUDA_MODULE_LOADING
        """,
        "It chooses devices, or connects hosts. The fingerprint names the kind of device.": """
            CUDA_DEVICE_ORDER CUDA_VISIBLE_DEVICES JAX_COORDINATOR_* JAX_FORCE_TPU_INIT
            JAX_LOCAL_DEVICE_IDS JAX_PARTITION_INDEX JAX_SLICE_INDEX NVIDIA_VISIBLE_DEVICES
            TPU_ACCELERATOR_TYPE TPU_CHIPS_* TPU_HOST_BOUNDS TPU_NAME TPU_PROCESS_* TPU_SKIP_MDS_QUERY
            TPU_TOPOLOGY* TPU_VISIBLE_* TPU_WORKER_* XLA_DISTRIBUTED_TOPOLOGY_NETWORK_NODES
        """,
        "It describes a container or a package. The fingerprint names the versions in use.": """
            CUDA_VERSION NVIDIA_DRIVER_CAPABILITIES NVIDIA_PRODUCT_NAME NVIDIA_REQUIRE_*
            TPU_ML_PLATFORM*
        """,
        "JAX sets it when its Mosaic modules are imported.": """
            MOSAIC_GPU_CUDA_ROOT MOSAIC_GPU_NVSHMEM_* MOSAIC_GPU_RUNTIME_LIB_PATH
        """,
    }.items()
}
"""Patterns of environment variables that change no bit, by reason."""

_HARMLESS_PATTERNS: Final = tuple(pattern for patterns in HARMLESS_VARIABLES.values() for pattern in patterns)


def variables(device_platform: str) -> dict[str, str]:
    """Returns the environment variables in the fingerprint for "cpu", "gpu" or "tpu", with their values.

    The path of a file of flags is replaced by its contents. Variables of JAX options are left out, because the
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
    """Yields an error for each environment variable that contradicts the contract.

    Args:
        pinned: the compiler options of programs.

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
                    f"{jax.default_backend()}. Remove the flag: detjax passes it to each of its programs."
                )
            if name in _FLAGS_ELSEWHERE and variable == "LIBTPU_INIT_ARGS":
                yield (
                    f"{variable} has --{name}={value}, which reads flags from elsewhere; accepted: the flags "
                    f"themselves, because bits may depend on them. Write them into {variable}."
                )
    if os.environ.get("NVIDIA_TF32_OVERRIDE") == "1":
        yield "NVIDIA_TF32_OVERRIDE=1 is set and it makes cuBLAS round float32 operands to TF32. Unset it."


@functools.lru_cache(maxsize=16)
def flags(variable: str, text: str) -> Mapping[str, str]:
    """Returns the flags of an environment variable with this value. The caller must not change them.

    Raises:
        EnvironmentContradiction: the value names a file of flags that cannot be read.
    """
    return dict(_parsed(flag_text(variable, text)))


_FLAG: Final = re.compile(r"""(-[-\w]*)(?:=(?:"((?:\\.|[^"\\])*)"?|'([^']*)'?)|(\S*))""", re.ASCII | re.DOTALL)


def _parsed(text: str) -> Iterator[tuple[str, str]]:
    """Yields names and values as XLA reads them: it stops at the first word that is not a flag."""
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
    """Returns the flags of an environment variable: its value, or the content of a file.

    XLA treats a value of XLA_FLAGS that does not begin with a dash as the path of a file, which it reads once.

    Raises:
        EnvironmentContradiction: the file cannot be read.
    """
    if variable != "XLA_FLAGS" or value.lstrip(" \t\r\n")[:1] in ("-", ""):
        return value
    try:
        return Path(value).read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise EnvironmentContradiction(
            f"XLA_FLAGS is {value!r}, which XLA treats as the path of a file of flags, because it does not begin with "
            f"a dash; the file cannot be read ({error.strerror}), so its flags are unknown. Write the flags into "
            "XLA_FLAGS."
        ) from error


def _flag_value(text: str) -> int | str:
    lowered = text.lower()
    if lowered in ("true", "false"):
        return int(lowered == "true")
    return int(lowered) if lowered.lstrip("-").isdigit() else lowered
