"""The compiler options of programs under contract, and `jit`, which compiles programs with them."""

import contextlib
import dataclasses
import functools
import importlib
import itertools
import pickle
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, overload

import jax
import jax.numpy as jnp
from jax._src.core import trace_state_clean  # JAX has no public name for "nothing is being traced"
from jax.experimental import serialize_executable

from detjax.runtime import backends, bound_methods, contexts, environment, fusions, jax_options
from detjax.runtime.environment import EnvironmentContradiction as EnvironmentContradiction

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
        # This fusion passes the address of a slice to a kernel instead of a copy. Kernels refuse addresses that are not
        # multiples of 256.
        "xla_gpu_enable_dynamic_slice_fusion": False,
    },
    "tpu": {
        "xla_allow_excess_precision": False,
        # libtpu 0.0.48 accepts these undocumented options of a program. By their names, they would make the compiler
        # add in another order or compute in another precision than the program says. Collectives need no option,
        # because no program uses one that adds (see `ops.psum`). The precision of products needs none either, because
        # every dot states its own.
        "xla_jf_accumulation_reassociation": False,
        "xla_tpu_force_excess_precision_bf16": False,
        "xla_tpu_auto_reduce_precision": False,
        "xla_tpu_enable_mixed_precision_add_transform": False,
    },
}
"""Options of all programs, by platform. A program's options override environment variables."""

CHAIN_OPTIONS: Final[Mapping[str, Mapping[str, str]]] = {
    "cpu": {},
    # XLA runs a program as a CUDA graph. By default the graph lets independent kernels run concurrently. A serial graph
    # takes less time to update and to start: `python -m benchmarks invariant` measures it. The engine's programs are
    # faster with concurrency, because few of their kernels fill the device.
    "gpu": {"xla_gpu_command_buffer_scheduling_mode": "SERIALIZE"},
    "tpu": {},
}
"""Additional options of programs marked by `chain`. No bit depends on them, so the fingerprint leaves them out."""


def compiler_options(device_platform: str | None = None) -> dict[str, bool | int]:
    """Returns the pinned options of "cpu", "gpu" or "tpu", by default of the platform that programs are traced for.

    Raises:
        ValueError: the platform is unknown.
    """
    name = device_platform or backends.target()
    if name not in PINNED_OPTIONS:
        raise ValueError(f"compiler_options: platform {name!r} is unknown; accepted: {', '.join(PINNED_OPTIONS)}")
    return dict(PINNED_OPTIONS[name])


def options_of(backend: str, device_platform: str) -> dict[str, bool | int]:
    """Returns the compiler options of a backend's programs; stock programs have none."""
    return {} if backend == backends.STOCK else compiler_options(device_platform)


def check_environment() -> None:
    """Raises if the process environment contradicts the contracts.

    Raises:
        EnvironmentContradiction: a flag in `XLA_FLAGS`, in the file that it names, or in `LIBTPU_INIT_ARGS` sets a
            pinned option to another value, a variable changes a library's rounding, or a JAX option changes
            compilation, random bits or the device in a way that contracts forbid.
    """
    problems = (environment.contradictions(compiler_options()), jax_options.refusals(), _other_platforms())
    for problem in itertools.chain.from_iterable(problems):
        raise EnvironmentContradiction(problem)


def _other_platforms() -> Iterator[str]:
    """Yields an error if JAX's default device is on another platform than programs are compiled for."""
    device = jax.config.jax_default_device
    if device is None:
        return
    chosen, served = device if isinstance(device, str) else device.platform, jax.default_backend()
    if chosen != served:
        yield (
            f"the JAX option jax_default_device is {device} of platform {chosen!r}; accepted: devices of platform "
            f"{served!r}, whose options programs get. Choose the platform with the environment variable JAX_PLATFORMS."
        )


_COMPILED: Final = "_detjax_compiled"
"""The attribute of functions of `jit` with their compile function, which `compiled` calls."""


_LOWERED: Final = "_detjax_lowered"
"""The attribute of functions of `jit` with the function that `lowered` calls."""


_CHAIN: Final = "_detjax_chain"
"""The attribute of functions that `chain` marked."""


def is_chained() -> bool:
    """Returns whether programs traced here run their kernels sequentially; see `chained`."""
    return contexts.chained.value


def chained(value: bool) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which, if `value`, traced and compiled programs run their kernels sequentially.

    Kernels that exchange data between devices require it: they must run in the same order on all devices.
    """
    return contexts.chained(value)


def chain[F: Callable[..., Any]](fn: F) -> F:
    """Marks a function whose programs run their kernels sequentially, which is faster if there are many."""
    setattr(fn, _CHAIN, True)
    return fn


@overload
def jit[**P, R](fn: Callable[P, R], /, **jit_arguments: Any) -> Callable[P, R]: ...
@overload
def jit[**P, R](**jit_arguments: Any) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def jit(fn: Callable[..., Any] | None = None, /, **jit_arguments: Any) -> Any:
    """Returns `jax.jit(fn)` with the pinned compiler options of programs under contract.

    It takes the keyword arguments of `jax.jit`. Stock programs are compiled with XLA's own options, like any other JAX
    program. A function called inside another program's trace becomes part of that program and uses its options. Every
    call checks the environment.

    As under `jax.jit`, closures are captured when the function is traced. The weights of an NNX module wrapped by
    `batch_invariant` are an argument of the program: each call uses the current weights.

    Raises:
        EnvironmentContradiction: when called; see `check_environment`.
        RuntimeError: when called, if the chosen backend has no kernels for this device.

    Example:
        >>> detjax.jit(lambda x: 2 * x)(jnp.arange(3))
        Array([0, 2, 4], dtype=int32)
    """
    if fn is None:
        return functools.partial(jit, **jit_arguments)

    if (method := bound_methods.method(fn)) is not None:
        return _jit_of_method(method, jit_arguments)

    nested = jax.jit(fn, **jit_arguments)

    @functools.cache
    def program(device_platform: str, backend: str, is_chain: bool) -> Any:
        contexts.complete(backend)
        options: dict[str, Any] = {**options_of(backend, device_platform)}
        if is_chain and backend != backends.STOCK:
            options |= CHAIN_OPTIONS[device_platform]
        return jax.jit(fn, compiler_options=options, **jit_arguments)

    def chosen() -> Any:
        return program(jax.default_backend(), backends.backend(), is_chained() or getattr(fn, _CHAIN, False))

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        # JAX accepts compiler options only for the outermost program.
        if not trace_state_clean():
            return nested(*args, **kwargs)
        with under_contract():
            return chosen()(*args, **kwargs)

    def lowered(*args: Any, **kwargs: Any) -> jax.stages.Lowered:
        with under_contract():
            return chosen().lower(*args, **kwargs)

    def compiled(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        with under_contract():
            return chosen().lower(*args, **kwargs).compile()

    setattr(call, _LOWERED, lowered)
    setattr(call, _COMPILED, compiled)
    return call


def _jit_of_method(method: types.MethodType, jit_arguments: dict[str, Any]) -> Callable[..., Any]:
    """Returns the result of `jit` for a method whose object is an argument of the program."""

    @functools.wraps(method.__func__)
    def call(argument: bound_methods.Argument, *args: Any, **kwargs: Any) -> Any:
        return method.__func__(argument.value(), *args, **kwargs)

    if getattr(method, _CHAIN, False):
        chain(call)

    @functools.cache
    def jitted(count: int) -> Callable[..., Any]:
        return jit(call, **bound_methods.shifted(jit_arguments, count))

    def argument() -> bound_methods.Argument:
        return bound_methods.Argument.from_object(method.__self__)

    @functools.wraps(method)
    def bound(*args: Any, **kwargs: Any) -> Any:
        return jitted(len(args))(argument(), *args, **kwargs)

    def compiled(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        program = getattr(jitted(len(args)), _COMPILED)(argument(), *args, **kwargs)
        return lambda *args, **kwargs: program(argument(), *args, **kwargs)

    def lowered(*args: Any, **kwargs: Any) -> jax.stages.Lowered:
        return getattr(jitted(len(args)), _LOWERED)(argument(), *args, **kwargs)

    setattr(bound, _LOWERED, lowered)
    setattr(bound, _COMPILED, compiled)
    return bound


def compiled(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """Returns the program of a function of `jit` for such arguments. Calls of the program omit static arguments.

    It is compiled in the calling thread, for the backend chosen there, so several threads can compile in parallel. The
    function's own cache of programs does not change.

    Args:
        fn: a result of `jit`.
        args: arrays, or `jax.ShapeDtypeStruct`.
        kwargs: arrays, or `jax.ShapeDtypeStruct`, and static arguments.

    Raises:
        EnvironmentContradiction: see `check_environment`.
        RuntimeError: the chosen backend has no kernels for this device.
    """
    return getattr(fn, _COMPILED)(*args, **kwargs)


def lowered(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
    """Returns the program of a function of `jit` for such arguments, which is lowered but not compiled.

    Once it is compiled, a call of the function with arguments of the same shapes, dtypes and shardings uses the result.

    Args:
        fn: a result of `jit`.
        args: arrays, or `jax.ShapeDtypeStruct`.
        kwargs: arrays, or `jax.ShapeDtypeStruct`, and static arguments.

    Raises:
        EnvironmentContradiction: see `check_environment`.
        RuntimeError: the chosen backend has no kernels for this device.
    """
    return getattr(fn, _LOWERED)(*args, **kwargs)


class NotSerializable(RuntimeError):
    """A program that XLA cannot serialize, although the program itself works."""


_OBJECT_FILES: Final = b"\x7fELF", b"\xcf\xfa\xed\xfe"
"""The first bytes of object files, ELF and Mach-O in serialized CPU programs."""


def serialized(program: Any) -> bytes:
    """Serializes a result of `compiled`. `loaded` accepts the bytes in any process with an equal fingerprint.

    Raises:
        NotSerializable: a CPU program with a sort that has run, or a CPU program that JAX has loaded from its own
            compilation cache. XLA serializes the latter without its code, so that its first run would fail.
    """
    try:
        content = serialize_executable.serialize(program)
    except jax.errors.JaxRuntimeError as error:
        raise NotSerializable(str(error)) from error
    if backends.target() == "cpu" and not any(start in content[0] for start in _OBJECT_FILES):
        raise NotSerializable("it has no code; programs loaded from JAX's compilation cache lose it in XLA")
    return pickle.dumps(content)


def loaded(content: bytes, devices: Sequence[Any] | None = None) -> Callable[..., Any]:
    """Loads a program from its bytes. They can run any code, so they must come from a trusted source.

    Args:
        content: a result of `serialized`.
        devices: the devices of the program's mesh. Default: JAX's default device, as for `compiled`.
    """
    if backends.target() == "gpu":
        importlib.import_module("jax.experimental.mosaic.gpu")  # sets the path of the library that kernels call
    devices = [next(iter(jnp.zeros(()).devices()))] if devices is None else list(devices)
    return serialize_executable.deserialize_and_load(*pickle.loads(content), execution_devices=devices)


@dataclasses.dataclass(frozen=True)
class ExecutionChoices:
    """A thread's choices, which another thread or process can apply.

    Attributes:
        backend: the backend.
        unfused: the names of the fusions that are switched off.
        is_chain: whether programs run their kernels sequentially; see `chained`.
    """

    backend: str
    unfused: tuple[str, ...]
    is_chain: bool

    @classmethod
    def here(cls) -> "ExecutionChoices":
        """Returns the choices of this thread."""
        return cls(backends.backend(), fusions.unfused(), is_chained())

    @contextlib.contextmanager
    def apply(self) -> Iterator[None]:
        """Applies these choices within the context."""
        with (
            contexts.chosen_backend(self.backend),
            contexts.chosen_fusions(self.unfused),
            chained(self.is_chain),
        ):
            yield


@contextlib.contextmanager
def under_contract() -> Iterator[None]:
    """Returns the context in which outermost programs are traced, compiled and called."""
    check_environment()
    # Reading the choices here makes environment variables part of the compilation cache's key.
    with ExecutionChoices.here().apply(), contexts.pinned(True), _explaining_missing_devices():
        yield


@contextlib.contextmanager
def _explaining_missing_devices() -> Iterator[None]:
    """Replaces Pallas' error about a kernel that cannot run here by an error that names the chosen backend."""
    try:
        yield
    except ValueError as error:
        name = backends.backend()
        if name not in backends.DEVICES or backends.runs_here(name) or "interpret mode" not in str(error):
            raise
        raise RuntimeError(
            f"backend {name!r} is chosen on {backends.device_name()}; accepted: {backends.DEVICES[name]}. Choose "
            f"'portable' with detjax.use_backend or {backends.BACKEND_VARIABLE}, or choose none to get this device's "
            "best backend."
        ) from error


def require_pinned_program(operation: str) -> None:
    """Raises unless the program being traced has the pinned options, or does not need them.

    XLA's GPU compiler picks library algorithms by timing them. Without the pinned options, another process could pick
    other algorithms for the portable backend's dots. On a CPU the portable tiles leave the compiler no choice.

    Raises:
        RuntimeError: `operation` is traced for a GPU outside `detjax.jit`.
    """
    if backends.target() == "gpu" and not contexts.pinned.value:
        raise RuntimeError(
            f"{operation}: traced for the portable backend on {jax.devices()[0].device_kind} by a program without the "
            "pinned compiler options; accepted: programs compiled with detjax.jit. Use detjax.jit instead of jax.jit "
            "for the outermost function (and around eager grad or vmap)."
        )
