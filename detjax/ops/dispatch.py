"""How an operation finds its kernels, and how it behaves under `jax.vmap`."""

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from detjax import backends, compilation


def kernels(operation: str, by_backend: Mapping[str, ModuleType]) -> ModuleType:
    """The module that computes `operation` on the backend that serves.

    Raises:
        NotImplementedError: the backend has no kernels for it.
        RuntimeError: see `compilation.require_pinned_program`.
    """
    name = backends.backend()
    if name not in by_backend:
        raise NotImplementedError(
            f"{operation}: no kernels for backend {name!r} on {backends.device_name()}; accepted: "
            f"{', '.join(by_backend)}. Choose one with detjax.use_backend or {backends.BACKEND_VARIABLE}."
        )
    if by_backend[name] is by_backend["portable"]:
        compilation.require_pinned_program(operation)
    return by_backend[name]


def with_vmap_rule(fn: Callable[..., Any], rows: Sequence[bool]) -> Callable[..., Any]:
    """`fn` of positional array arguments (or None), with `vmap(fn)(xs)[i]` equal to `fn(xs[i])` in every bit.

    Args:
        fn: an operation whose results have the leading axes of its row arguments, or of nothing.
        rows: for each argument, whether it holds rows: a batch axis of rows is one more leading axis, and `fn` is
            called once. If any other argument is batched, `fn` is called for one example after another.
    """

    @custom_vmap
    def call(*args: Any) -> Any:
        return fn(*args)

    @call.def_vmap
    def rule(axis_size: int, in_batched: Sequence[Any], *args: Any) -> tuple[Any, Any]:
        batched = [any(jax.tree.leaves(b)) for b in in_batched]
        if any(b and not row for b, row in zip(batched, rows, strict=True)):
            mapped = [arg if b else None for arg, b in zip(args, batched, strict=True)]

            def one(mapped: Sequence[Any]) -> Any:
                return call(*(m if b else arg for m, b, arg in zip(mapped, batched, args, strict=True)))

            out = lax.map(one, mapped)
        else:
            spread = [
                jnp.broadcast_to(arg, (axis_size, *arg.shape)) if row and not b and arg is not None else arg
                for arg, b, row in zip(args, batched, rows, strict=True)
            ]
            out = call(*spread)
        return out, jax.tree.map(lambda _: True, out)

    return call
