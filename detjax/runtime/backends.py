"""The choice of the backend, the platform that programs are traced for, and the names of devices."""

import contextlib
import functools
import os
import pathlib
import platform
from collections.abc import Iterator, Mapping
from typing import Any, Final

import jax

from detjax.runtime import contexts

BACKENDS: Final = ("hopper", "mma", "tpu", "portable")
"""The backends under contract, in order of preference: kernels for GPUs of compute capability 9.0, kernels for all
NVIDIA GPUs since 8.0, kernels for TPUs, and plain JAX, which runs anywhere."""

DEVICES: Final[Mapping[str, str]] = {
    "hopper": "GPUs of compute capability 9.0 (H100, H200)",
    "mma": "NVIDIA GPUs of compute capability 8.0 and above",
    "tpu": "TPUs",
}
"""Devices in error messages, for each backend that does not run everywhere."""

STOCK: Final = "stock"
"""The backend of XLA's own operations, for comparison, under no contract. It must be chosen by name."""

BACKEND_VARIABLE: Final = "DETJAX_BACKEND"
"""The environment variable that chooses the backend of a process."""

_TRANSFER_GUARDS: Final = (
    "jax_transfer_guard",
    "jax_transfer_guard_host_to_device",
    "jax_transfer_guard_device_to_host",
    "jax_transfer_guard_device_to_device",
)
"""JAX options that can forbid transfers of arrays."""


def backend() -> str:
    """Returns the name of the current backend: from `use_backend`, else `DETJAX_BACKEND`, else the device's best one.

    Raises:
        ValueError: `DETJAX_BACKEND` is not a backend.

    Example:
        >>> with detjax.use_backend("portable"):
        ...     detjax.backend()
        ...
        'portable'
    """
    chosen = contexts.chosen_backend.value
    if chosen is not None:
        return chosen
    forced = os.environ.get(BACKEND_VARIABLE)
    if forced:
        return _check_name(forced, f"environment variable {BACKEND_VARIABLE}")
    return next(name for name in BACKENDS if runs_here(name))


@functools.cache
def runs_here(backend: str) -> bool:
    """Returns whether the default device can run a backend of `BACKENDS`."""
    device = jax.devices()[0]
    if backend in ("hopper", "mma"):
        capability = str(getattr(device, "compute_capability", None)) if device.platform == "gpu" else ""
        if backend == "hopper":
            return capability == "9.0"
        # Devices of another vendor have names of architectures, such as "gfx942".
        major, _, minor = capability.partition(".")
        return major.isdecimal() and minor.isdecimal() and int(major) >= 8
    return backend == "portable" or device.platform == backend


def check_device() -> None:
    """Checks that the chosen backend runs on the default device, and that JAX may transfer arrays.

    Raises:
        ValueError: it does not, or JAX finds no device.
    """
    try:
        device = device_name()
    except (RuntimeError, AssertionError) as error:  # JAX asserts that it has found a device
        raise ValueError(
            f"JAX finds no device for JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')!r} ({error}). Unset it, or "
            "install JAX's support for the device"
        ) from error
    name = backend()
    if name in DEVICES and not runs_here(name):
        raise ValueError(
            f"the backend is {name!r}, which serves {DEVICES[name]}; this device is {device}. Choose portable "
            "with --backend, or leave the option out"
        )
    for option in _TRANSFER_GUARDS:
        value = getattr(jax.config, option, None)
        if value is not None and value.startswith("disallow"):
            raise ValueError(
                f"{option.upper()} is {value!r}, so no weights can reach the device; accepted: allow, log. Unset it"
            )


@contextlib.contextmanager
def use_backend(name: str | None) -> Iterator[None]:
    """Selects a backend within the context; None keeps the current one.

    The choice is part of JAX's compilation cache key, so one function may be jitted under several backends.

    Raises:
        ValueError: the backend is unknown.

    Example:
        >>> with detjax.use_backend("stock"):
        ...     detjax.backend()
        ...
        'stock'
    """
    if name is None:
        yield
        return
    with contexts.chosen_backend(_check_name(name, "use_backend")):
        yield


def _check_name(name: str, source: str) -> str:
    if name not in (*BACKENDS, STOCK):
        accepted = ", ".join((*BACKENDS, STOCK))
        raise ValueError(f"{source}: {name!r} is not a backend; accepted: {accepted}")
    return name


def target() -> str:
    """Returns the platform that programs are traced for: "cpu", "gpu" or "tpu"."""
    return contexts.target.value or jax.default_backend()


def tracing_for(device_platform: str) -> contextlib.AbstractContextManager[None]:
    """Returns a context that traces programs for a platform, whose devices may be absent.

    Without devices, such programs can be lowered and, with the platform's compiler, compiled, but not run.
    """
    return contexts.target(device_platform)


def device_name() -> str:
    """Returns the default device's name for errors, such as "cuda:0 (NVIDIA H200)"."""
    device = jax.devices()[0]
    return f"{device.platform}:{device.id} ({device_kind()})"


def device_kind(device: Any = None) -> str:
    """Returns the kind of a JAX device, by default the first one, as used in fingerprints and tables of schedules.

    XLA's CPU compiler emits code for the machine's processor, so the kind of a CPU names its model and cores.
    """
    device = device or jax.devices()[0]
    return _processor() if device.platform == "cpu" else device.device_kind


@functools.cache
def _processor() -> str:
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, KeyError):
        lines = (line.partition(":") for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines())
        info = {name.strip(): value.strip() for name, _, value in lines}
        model = f"{info['model name']} family {info['cpu family']} model {info['model']}"
    return f"{model}, {os.cpu_count()} cores"
