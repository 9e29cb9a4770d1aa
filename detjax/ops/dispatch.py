"""Dispatches operations to the modules of backends, and gives them their behaviour under `jax.vmap`."""

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from detjax.operands.accumulated_weight import with_fresh_sum
from detjax.runtime import backends, compilation, fusions


def backend_modules(
    name: str, *, kernels: Sequence[str] = ("hopper", "tpu"), mma: Literal["mma", "hopper"] | None = None
) -> dict[str, str]:
    """Returns an operation's modules of a name by backend; the portable module serves chips without `kernels`.

    Args:
        name: the name of the modules.
        kernels: the chips with kernels of their own.
        mma: the package with the kernels of the backend "mma": its own, or Hopper's if these run on every NVIDIA GPU.
    """
    modules = dict.fromkeys(backends.BACKENDS, f"detjax.portable.{name}") | {"stock": f"detjax.stock.{name}"}
    modules |= {chip: f"detjax.pallas.{chip}.{name}" for chip in kernels}
    return modules if mma is None else modules | {"mma": f"detjax.pallas.{mma}.{name}"}


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation and its module on each backend.

    A module implements an operation in one of two ways. Modules under contract provide *kernels*: functions such as
    `forward` and `backward`, which the operation's `custom_vjp` and vmap rule call. A module with
    `DIFFERENTIATED_BY_JAX = True` provides the *whole operation*, a function of the operation's name, which JAX
    differentiates and batches itself. Only `call` and `taking` distinguish the two.

    Attributes:
        name: the operation's name in errors.
        modules: the module path of each backend. A module is imported on first use, so a machine without a GPU never
            loads Mosaic GPU.
        part_of: names of the operations that this one is a part of. Backends that compute these operations as a whole
            have no module for it.
    """

    name: str
    modules: Mapping[str, str]
    part_of: Sequence[str] = ()

    def module(self) -> ModuleType:
        """Returns the module of the current backend, or the portable one if the operation's fusion is off.

        Raises:
            NotImplementedError: the backend has no module for this operation.
        """
        backend = fusions.serving_backend(self.name)
        if backend not in self.modules:
            raise NotImplementedError(
                f"{self.name}: no kernels for backend {backend!r} on {backends.device_name()}; accepted: "
                f"{', '.join(self.modules)}. Choose one with detjax.use_backend or {backends.BACKEND_VARIABLE}."
            )
        # The first call may happen during tracing: constants of the module must not become part of the trace.
        with jax.ensure_compile_time_eval():
            return importlib.import_module(self.modules[backend])

    def is_served(self) -> bool:
        """Returns whether one backend serves the operation and all operations that it is a part of."""
        serving = {fusions.serving_backend(name) for name in (self.name, *self.part_of)}
        return len(serving) == 1 and serving <= self.modules.keys()

    def kernels(self) -> ModuleType:
        """Returns the module of the current backend, for a call of its kernels.

        Raises:
            NotImplementedError: see `module`.
            RuntimeError: see `compilation.require_pinned_program`.
        """
        module = self.module()
        if self.modules[fusions.serving_backend(self.name)] == self.modules["portable"]:
            compilation.require_pinned_program(self.name)
        return module

    def call(self, under_contract: Callable[..., Any], *operands: Any, **options: Any) -> Any:
        """Calls the module's whole operation if it has one, otherwise `under_contract`.

        Both take the same operands by position and the same options by name.
        """
        module = self.module()
        if getattr(module, "DIFFERENTIATED_BY_JAX", False):
            return getattr(module, self.name)(*operands, **options)
        return under_contract(*operands, **options)

    def taking[W](self, weight: W) -> W:
        """Returns a weight of the operation in the form that the backend's module takes.

        A module that JAX differentiates takes a plain weight. The rounded gradient of the call is then added to the
        weight's sum, which differs from the contract.
        """
        taken: Any = with_fresh_sum(weight) if getattr(self.module(), "DIFFERENTIATED_BY_JAX", False) else weight
        return taken


def with_vmap_rule(
    fn: Callable[..., Any], rows: Sequence[bool], at_once: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Returns `fn` with a vmap rule that makes `vmap(fn)(xs)[i]` equal to `fn(xs[i])` in every bit.

    Args:
        fn: a function of positional arrays (or None). Its results have the leading axes of its row arguments.
        rows: for each argument, whether it holds rows. A batch axis of rows becomes one more leading axis, and `fn` is
            called once. If any other argument is batched, `fn` is called sequentially for each example.
        at_once: returns the results of `fn` for all examples, given arguments that are all batched along their first
            axis. It replaces sequential calls where it is given.
    """

    @custom_vmap
    def call(*args: Any) -> Any:
        return fn(*args)

    @call.def_vmap
    def rule(axis_size: int, in_batched: Sequence[Any], *args: Any) -> tuple[Any, Any]:
        batched = [any(jax.tree.leaves(b)) for b in in_batched]
        if at_once is not None and all(b or arg is None for b, arg in zip(batched, args, strict=True)):
            out = with_vmap_rule(at_once, (False,) * len(args))(*args)
        elif any(b and not row for b, row in zip(batched, rows, strict=True)):
            mapped = [arg if b else None for arg, b in zip(args, batched, strict=True)]

            def call_for_example(example: Sequence[Any]) -> Any:
                return call(*(x if b else arg for x, b, arg in zip(example, batched, args, strict=True)))

            out = lax.map(call_for_example, mapped)
        else:
            spread = [
                jnp.broadcast_to(arg, (axis_size, *arg.shape)) if row and not b and arg is not None else arg
                for arg, b, row in zip(args, batched, rows, strict=True)
            ]
            out = call(*spread)
        return out, jax.tree.map(lambda _: True, out)

    return call


def one_by_one(fn: Callable[..., Any], operands: tuple[Any, ...]) -> Any:
    """Returns `fn(*operands)`; under `vmap`, calls it sequentially for each example, whichever arrays are batched."""
    leaves, tree = jax.tree.flatten(operands)
    flat = with_vmap_rule(lambda *leaves: fn(*jax.tree.unflatten(tree, leaves)), rows=(False,) * len(leaves))
    return flat(*leaves)
