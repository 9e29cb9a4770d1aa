"""The choice of the backend that serves, the platform that programs are traced for, and the names of devices."""

import contextlib
import functools
import os
import pathlib
import platform
from collections.abc import Iterator, Mapping
from typing import Any, Final

import jax

BACKENDS: Final = ("hopper", "tpu", "portable")
"""The backends under contract, in order of preference: kernels for GPUs of compute capability 9.0, kernels for TPUs,
and plain JAX, which runs anywhere."""

DEVICES: Final[Mapping[str, str]] = {
    "hopper": "GPUs of compute capability 9.0 (H100, H200)",
    "tpu": "TPUs",
}
"""The devices of each backend that does not run everywhere, as errors name them."""

STOCK: Final = "stock"
"""The backend of XLA's own operations, under no contract, which detjax is compared with.

It serves only where it is asked for by name."""

BACKEND_VARIABLE: Final = "DETJAX_BACKEND"
"""The environment variable that chooses the backend of a process."""

_TRANSFER_GUARDS: Final = (
    "jax_transfer_guard",
    "jax_transfer_guard_host_to_device",
    "jax_transfer_guard_device_to_host",
    "jax_transfer_guard_device_to_device",
)
"""JAX's options that can forbid transfers of arrays."""

chosen_backend = jax.make_user_context(None)
_target = jax.make_user_context(None)


def backend() -> str:
    """Returns the name of the backend that serves.

    It is the choice of `use_backend`, else that of `DETJAX_BACKEND`, else the best backend that this device runs.

    Raises:
        ValueError: `DETJAX_BACKEND` names no backend.

    Example:
        >>> with detjax.use_backend("portable"):
        ...     detjax.backend()
        ...
        'portable'
    """
    chosen = chosen_backend.value
    if chosen is not None:
        return chosen
    forced = os.environ.get(BACKEND_VARIABLE)
    if forced:
        return _check_name(forced, f"environment variable {BACKEND_VARIABLE}")
    return next(name for name in BACKENDS if runs_here(name))


@functools.cache
def runs_here(backend: str) -> bool:
    """Returns whether the default device runs the kernels of a backend of `BACKENDS`."""
    device = jax.devices()[0]
    if backend == "hopper":
        return device.platform == "gpu" and getattr(device, "compute_capability", None) == "9.0"
    return backend == "portable" or device.platform == backend


def check_device() -> None:
    """Checks that the chosen backend runs on the default device, and that JAX moves arrays to it.

    Raises:
        ValueError: it does not, or JAX finds no device.
    """
    try:
        device = device_name()
    except (RuntimeError, AssertionError) as error:  # JAX asserts that it has found a device
        raise ValueError(
            f"JAX finds no device for JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')!r} ({error}). Unset it, or "
            "install what JAX needs for the device"
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
                f"{option.upper()} is {value!r}, with which no weights reach the device; accepted: allow, log. Unset it"
            )


@contextlib.contextmanager
def use_backend(name: str | None) -> Iterator[None]:
    """Makes the backend `name` serve within the context; None leaves the choice as it is.

    The choice is part of JAX's compilation cache key, so one function may be jitted under several backends.

    Raises:
        ValueError: no backend has this name.

    Example:
        >>> with detjax.use_backend("stock"):
        ...     detjax.backend()
        ...
        'stock'
    """
    if name is None:
        yield
        return
    with chosen_backend(_check_name(name, "use_backend")):
        yield


def _check_name(name: str, source: str) -> str:
    if name not in (*BACKENDS, STOCK):
        accepted = ", ".join((*BACKENDS, STOCK))
        raise ValueError(f"{source}: {name!r} is no backend of this release; accepted: {accepted}")
    return name


def target() -> str:
    """Returns the platform that programs are traced for: "cpu", "gpu" or "tpu"."""
    return _target.value or jax.default_backend()


def tracing_for(device_platform: str) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which programs are traced for a platform whose devices may be absent.

    Such a program can be lowered and, with the platform's compiler, compiled, but it cannot run here.
    """
    return _target(device_platform)


def device_name() -> str:
    """Returns the default device's name in errors, such as "cuda:0 (NVIDIA H200)"."""
    device = jax.devices()[0]
    return f"{device.platform}:{device.id} ({device_kind()})"


def device_kind(device: Any = None) -> str:
    """Returns the kind of a JAX device, by default of the first, as fingerprints and tables of schedules name it.

    XLA's CPU compiler emits code for the processor of its machine, so "cpu" alone would not tell two machines apart.
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
