"""Which backend serves, the compiler options that every program is given, and the environment's fingerprint."""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform as host
import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, overload

import jax
from jax._src.core import trace_state_clean  # JAX has no public name for "nothing is being traced"

from detjax.contract import CONTRACT_VERSION
from detjax.version import __version__

BACKENDS: Final = ("hopper", "tpu", "portable")
"""Backends under contract, in order of preference: kernels for compute capability 9.0, kernels for TPUs, and plain JAX,
which runs anywhere."""

_DEVICES: Final[Mapping[str, str]] = {
    "hopper": "GPUs of compute capability 9.0 (H100, H200)",
    "tpu": "TPUs",
}
"""Where backends run that don't run anywhere."""

STOCK: Final = "stock"
"""XLA's own operations, under no contract: what detjax is compared with. Served only where it is asked for by name."""

BACKEND_VARIABLE: Final = "DETJAX_BACKEND"

_chosen = jax.make_user_context(None)
_pinned = jax.make_user_context(False)
_target = jax.make_user_context(None)

PINNED_OPTIONS: Final[Mapping[str, Mapping[str, bool | int]]] = {
    "cpu": {
        "xla_allow_excess_precision": False,
        "xla_cpu_enable_fast_math": False,
        "xla_cpu_enable_fast_min_max": False,
    },
    "gpu": {
        "xla_allow_excess_precision": False,
        "xla_gpu_deterministic_ops": True,
        "xla_gpu_exclude_nondeterministic_ops": True,
        "xla_gpu_autotune_level": 0,
        # Else a kernel is given the address of a slice in place of a copy, and refuses it where 256 does not divide it.
        "xla_gpu_enable_dynamic_slice_fusion": False,
    },
    "tpu": {
        "xla_allow_excess_precision": False,
        # libtpu 0.0.48 takes these as options of a program. None is documented; by their names they add in another
        # order, or compute in another precision than the program says. Collectives need no option, as none that adds is
        # used (`ops.psum`), nor does the precision of products, which every dot names itself.
        "xla_jf_accumulation_reassociation": False,
        "xla_tpu_force_excess_precision_bf16": False,
        "xla_tpu_auto_reduce_precision": False,
        "xla_tpu_enable_mixed_precision_add_transform": False,
    },
}
"""Per platform, what every program is compiled with. Options of a program beat environment variables."""

_ENVIRONMENT_OF_LIBRARIES: Final[Mapping[str, tuple[str, str]]] = {
    # variable: (value that contradicts the contract, why)
    "NVIDIA_TF32_OVERRIDE": ("1", "it makes cuBLAS round float32 operands to TF32"),
}


class EnvironmentContradiction(RuntimeError):
    """The process environment asks for what a contract forbids."""


def backend() -> str:
    """The backend that serves: the one `use_backend` chose, else `DETJAX_BACKEND`, else the best this device has.

    Raises:
        ValueError: `DETJAX_BACKEND` names no backend.
    """
    chosen = _chosen.value
    if chosen is not None:
        return chosen
    forced = os.environ.get(BACKEND_VARIABLE)
    if forced:
        return _checked(forced, f"environment variable {BACKEND_VARIABLE}")
    return next(name for name in BACKENDS if runs_here(name))


@functools.cache
def runs_here(backend: str) -> bool:
    """Whether the default device runs the kernels of a backend of `BACKENDS`."""
    device = jax.devices()[0]
    if backend == "hopper":
        return device.platform == "gpu" and getattr(device, "compute_capability", None) == "9.0"
    return backend == "portable" or device.platform == backend


@contextlib.contextmanager
def use_backend(name: str | None) -> Iterator[None]:
    """A context in which the backend `name` serves; None leaves the choice as it is.

    The choice is part of JAX's compilation cache key, so one function may be jitted under several backends.

    Raises:
        ValueError: `name` is no backend.
    """
    if name is None:
        yield
        return
    with _chosen(_checked(name, "use_backend")):
        yield


def _checked(name: str, source: str) -> str:
    if name not in (*BACKENDS, STOCK):
        accepted = ", ".join((*BACKENDS, STOCK))
        raise ValueError(f"{source}: {name!r} is no backend of this release; accepted: {accepted}")
    return name


def target() -> str:
    """The platform that programs are traced for: "cpu", "gpu" or "tpu"."""
    return _target.value or jax.default_backend()


def tracing_for(device_platform: str) -> contextlib.AbstractContextManager[None]:
    """A context in which programs are traced for a platform whose devices need not be there; none of them can run."""
    return _target(device_platform)


def device_name() -> str:
    """The default device as errors name it, as in "cuda:0 (NVIDIA H200)"."""
    device = jax.devices()[0]
    return f"{device.platform}:{device.id} ({device_kind()})"


def compiler_options(device_platform: str | None = None) -> dict[str, bool | int]:
    """The options that programs are compiled with on "cpu", "gpu" or "tpu"; default: see `target`."""
    name = device_platform or target()
    if name not in PINNED_OPTIONS:
        raise ValueError(f"compiler_options: platform {name!r} is unknown; accepted: {', '.join(PINNED_OPTIONS)}")
    return dict(PINNED_OPTIONS[name])


def options_of(backend: str, device_platform: str) -> dict[str, bool | int]:
    """The options that a backend's programs are compiled with; stock programs are given none."""
    return {} if backend == STOCK else compiler_options(device_platform)


def check_environment() -> None:
    """Returns if nothing in the process environment contradicts the contracts.

    Raises:
        EnvironmentContradiction: a flag in `XLA_FLAGS` or `LIBTPU_INIT_ARGS` sets a pinned option to another value, a
            library's variable changes its rounding, or a JAX option takes compilation or random bits out of contract.
    """
    pinned = compiler_options()
    for variable in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"):
        for name, value in _flags(os.environ.get(variable, "")).items():
            if name in pinned and _flag_value(value) != int(pinned[name]):
                raise EnvironmentContradiction(
                    f"{variable} has --{name}={value}; the contract needs {str(pinned[name]).lower()} on "
                    f"{jax.default_backend()}. Remove the flag: detjax gives it to each of its programs itself."
                )
    for variable, (value, reason) in _ENVIRONMENT_OF_LIBRARIES.items():
        if os.environ.get(variable) == value:
            raise EnvironmentContradiction(f"{variable}={value} is set and {reason}. Unset it.")
    if jax.config.jax_disable_jit:
        raise EnvironmentContradiction(
            "jax_disable_jit is on: operations would run uncompiled and in other bits. Turn it off (JAX_DISABLE_JIT=0)."
        )
    if not jax.config.jax_threefry_partitionable:
        raise EnvironmentContradiction(
            "jax_threefry_partitionable is off: sampled tokens would depend on the vocabulary's layout. Turn it on."
        )


def _flags(text: str) -> dict[str, str]:
    flags = {}
    for word in shlex.split(text):
        name, _, value = word.lstrip("-").partition("=")
        flags[name] = value or "true"
    return flags


def _flag_value(text: str) -> int | str:
    lowered = text.lower()
    if lowered in ("true", "false"):
        return int(lowered == "true")
    return int(lowered) if lowered.lstrip("-").isdigit() else lowered


_COMPILED: Final = "_detjax_compiled"
"""Where a function of `jit` has what `compiled` calls."""


@overload
def jit[**P, R](fn: Callable[P, R], /, **jit_arguments: Any) -> Callable[P, R]: ...
@overload
def jit[**P, R](**jit_arguments: Any) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def jit(fn: Callable[..., Any] | None = None, /, **jit_arguments: Any) -> Any:
    """`jax.jit(fn)` with the pinned compiler options: how every program under contract is compiled. Stock programs are
    compiled with XLA's own, as others would.

    Takes `jax.jit`'s own keyword arguments. Called inside another program's trace it becomes part of that program,
    whose options then hold. The environment is checked at every call.

    Raises:
        EnvironmentContradiction: see `check_environment`; when called.
        RuntimeError: the backend that was chosen has no kernels for this device; when called.
    """
    if fn is None:
        return functools.partial(jit, **jit_arguments)

    nested = jax.jit(fn, **jit_arguments)

    @functools.cache
    def program(device_platform: str, backend: str) -> Any:
        return jax.jit(fn, compiler_options=options_of(backend, device_platform), **jit_arguments)

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        # JAX takes compiler options at the outermost program alone, and refuses them below it.
        if not trace_state_clean():
            return nested(*args, **kwargs)
        with _under_contract():
            return program(jax.default_backend(), backend())(*args, **kwargs)

    def compiled(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        with _under_contract():
            return program(jax.default_backend(), backend()).lower(*args, **kwargs).compile()

    setattr(call, _COMPILED, compiled)
    return call


def compiled(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """The program that a function of `jit` runs on arguments like these, without their static ones.

    It is compiled here and now, for the backend chosen here, which takes as many threads as call this. The function
    itself does not come to know of it.

    Args:
        fn: what `jit` returned.
        args: arrays, or `jax.ShapeDtypeStruct`.
        kwargs: likewise.

    Raises:
        EnvironmentContradiction: see `check_environment`.
        RuntimeError: the backend that was chosen has no kernels for this device.
    """
    return getattr(fn, _COMPILED)(*args, **kwargs)


@contextlib.contextmanager
def _under_contract() -> Iterator[None]:
    """Where an outermost program is traced, compiled and called."""
    check_environment()
    # The backend is read here, so that DETJAX_BACKEND is part of the compilation cache's key as well.
    with _chosen(backend()), _pinned(True), _explained():
        yield


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Says which backend was meant where Pallas finds that it cannot run a kernel here."""
    try:
        yield
    except ValueError as error:
        name = backend()
        if name not in _DEVICES or runs_here(name) or "interpret mode" not in str(error):
            raise
        raise RuntimeError(
            f"backend {name!r} is chosen on {device_name()}; accepted: {_DEVICES[name]}. Choose 'portable' with "
            f"detjax.use_backend or {BACKEND_VARIABLE}, or neither: the best one then serves."
        ) from error


def require_pinned_program(operation: str) -> None:
    """Returns if the program being traced was given the pinned options, or does not need them.

    XLA's GPU compiler picks library algorithms by timing them; without the pinned options the portable backend's dots
    would be other algorithms in another process. On CPU the portable tiles leave it nothing to choose.

    Raises:
        RuntimeError: `operation` is traced for a GPU outside of `detjax.jit`.
    """
    if target() == "gpu" and not _pinned.value:
        raise RuntimeError(
            f"{operation}: traced for the portable backend on {jax.devices()[0].device_kind} by a program without the "
            "pinned compiler options; accepted: programs compiled with detjax.jit. Put detjax.jit around the outermost "
            "function in place of jax.jit (and around eager grad or vmap)."
        )


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """What bits depend on besides request and weights. Equal fingerprints promise equal bits."""

    contract_version: int
    detjax: str
    backend: str
    device_kind: str
    driver: str
    jax: str
    jaxlib: str
    plugin: str
    flags: str
    compiler_options: str

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits that stand for all fields."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def fingerprint(device: Any = None) -> Fingerprint:
    """The fingerprint of a JAX device, by default of this process's first, and of the backend that would serve."""
    device = device or jax.devices()[0]
    flags = {name: os.environ[name] for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS") if os.environ.get(name)}
    return Fingerprint(
        contract_version=CONTRACT_VERSION,
        detjax=__version__,
        backend=backend(),
        device_kind=device_kind(device),
        driver=_driver(device.platform),
        jax=jax.__version__,
        jaxlib=importlib.metadata.version("jaxlib"),
        plugin=device.client.platform_version.strip(),
        flags=json.dumps(flags, sort_keys=True),
        compiler_options=json.dumps(options_of(backend(), device.platform), sort_keys=True),
    )


def device_kind(device: Any = None) -> str:
    """The kind of a JAX device, by default of the first, as fingerprints and tables of schedules name it.

    XLA's CPU compiler emits code for the processor it finds, so "cpu" alone would not tell two machines apart.
    """
    device = device or jax.devices()[0]
    return _processor() if device.platform == "cpu" else device.device_kind


@functools.cache
def _processor() -> str:
    model = host.processor() or host.machine()
    with contextlib.suppress(OSError, KeyError):
        lines = (line.partition(":") for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines())
        info = {name.strip(): value.strip() for name, _, value in lines}
        model = f"{info['model name']} family {info['cpu family']} model {info['model']}"
    return f"{model}, {os.cpu_count()} cores"


def _driver(device_platform: str) -> str:
    if device_platform == "gpu":
        with contextlib.suppress(OSError):
            return pathlib.Path("/proc/driver/nvidia/version").read_text().splitlines()[0].strip()
    return "none"
