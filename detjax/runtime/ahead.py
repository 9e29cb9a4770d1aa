"""Compilation of programs before their first call, side by side.

XLA compiles the kernels of a program one after another, in the thread that compiles the program. `compile_ahead` has
each kernel compiled in a thread of its own, while further programs are traced and lowered: a kernel that this process
has compiled once is compiled for no other program. Kernels and programs are the same as without it.
"""

import contextlib
import gc
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxlib.mlir import ir

from detjax.runtime import compilation

KERNEL_CALL: Final = "mosaic_gpu_v2"
"""The name by which programs call kernels on GPUs."""

_MOST: Final = 32
"""Threads that compile kernels; each holds the memory of a compiler."""

_compiled_kernels: Final[dict[bytes, Any]] = {}
"""Programs that call one kernel each, by the kernel's hash. XLA may forget kernels of programs that no longer exist."""


class Call(NamedTuple):
    """A call of a function of `compilation.jit`.

    Attributes:
        fn: the function.
        args: arrays, or `jax.ShapeDtypeStruct` with the sharding that the arrays of the call will have.
        options: its keyword arguments.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    options: dict[str, Any] = {}  # noqa: RUF012 - a default of a tuple, which nothing changes


def compile_ahead(calls: Iterable[Call]) -> None:
    """Compiles the programs of calls, in whose arrays only shape, dtype and sharding matter.

    The calls themselves then find their programs compiled. Calls are traced in order, so the one that takes longest to
    compile should be the first.

    Raises:
        EnvironmentContradiction: see `compilation.check_environment`.
        RuntimeError: the chosen backend has no kernels for this device.
    """
    threads, known = min(os.cpu_count() or 1, _MOST), set()
    programs: list[Future[None]] = []
    started: dict[bytes, Future[None]] = {}
    pools = ThreadPoolExecutor(threads), ThreadPoolExecutor(threads)
    with pools[0] as kernel_threads, pools[1] as program_threads, _without_collector():
        for call in calls:
            if (key := _signature(call)) in known:
                continue
            known.add(key)
            lowered = compilation.lowered(call.fn, *call.args, **call.options)
            attributes_by_kernel = kernels(lowered)
            for name in attributes_by_kernel.keys() - started.keys():
                started[name] = kernel_threads.submit(_compile_kernel, name, attributes_by_kernel[name])
            waits = [started[name] for name in attributes_by_kernel]
            programs.append(program_threads.submit(_compile_program, lowered, waits))
        for program in programs:
            program.result()


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """A context without garbage collection, which would visit the many objects of programs again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _signature(call: Call) -> Any:
    """Returns what a call's program depends on."""
    leaves, tree = jax.tree.flatten(call.args)
    types = tuple((jnp.shape(x), jnp.result_type(x), str(getattr(x, "sharding", None))) for x in leaves)
    return call.fn, tree, types, tuple(sorted(call.options.items()))


def _compile_program(lowered: jax.stages.Lowered, waits: list[Future[None]]) -> None:
    for kernel in waits:
        kernel.exception()  # if it has failed, the program's compilation compiles the kernel again, or says why not
    lowered.compile()


def kernels(lowered: jax.stages.Lowered) -> dict[bytes, dict[str, Any]]:
    """Returns the attributes of a lowered program's different kernels on a GPU, by a kernel's hash.

    Kernels that exchange data between devices are left out: XLA looks at the operands of their calls.
    """
    module: Any = lowered.compiler_ir("stablehlo")
    attributes_by_kernel: dict[bytes, dict[str, Any]] = {}
    for operation in _operations(module.operation):
        if operation.name != "stablehlo.custom_call" or _text(operation.attributes["call_target_name"]) != KERNEL_CALL:
            continue
        config = ir.DictAttr(operation.attributes["mhlo.backend_config"])
        attributes: dict[str, Any] = {config[index].name: _value(config[index].attr) for index in range(len(config))}
        if "xla_replica_ids" not in attributes and not attributes["uses_xla_collective_metadata"]:
            attributes_by_kernel.setdefault(attributes["kernel_hash"], attributes)
    return attributes_by_kernel


def _operations(operation: Any) -> Iterator[Any]:
    for region in operation.regions:
        for block in region:
            for inner in block:
                yield inner.operation
                yield from _operations(inner.operation)


def _text(attribute: Any) -> str:
    return ir.StringAttr(attribute).value


def _value(attribute: Any) -> bytes | bool:
    """Returns the value of an attribute, as `jax.ffi.ffi_call` takes it."""
    is_text = isinstance(attribute, ir.StringAttr)
    return ir.StringAttr(attribute).value_bytes if is_text else ir.BoolAttr(attribute).value


def _compile_kernel(name: bytes, attributes: dict[str, Any]) -> None:
    """Compiles a program that consists of a kernel's call. It is never run, so it needs no operands."""
    if name not in _compiled_kernels:
        result = jax.ShapeDtypeStruct((), jnp.float32)
        call = jax.ffi.ffi_call(KERNEL_CALL, result, custom_call_api_version=4)
        _compiled_kernels[name] = jax.jit(lambda: call(**attributes)).lower().compile()
