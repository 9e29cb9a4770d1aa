"""Names the layers of NNX modules, which have no scopes: a module's path becomes its scope while it is traced."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx


@contextlib.contextmanager
def named_layers(arguments: Any) -> Iterator[None]:
    """Returns a context in which calls of the arguments' NNX modules open scopes named after their paths.

    Within the call of an outer module, a scope has the rest of the path, so that names nest as modules do. The modules'
    classes are patched within the context. Linen modules name their layers themselves.
    """
    paths: dict[int, tuple[str, ...]] = {}
    classes: set[type] = set()
    for module in jax.tree.leaves(arguments, is_leaf=lambda x: isinstance(x, nnx.Module)):
        if isinstance(module, nnx.Module):
            for path, part in nnx.iter_modules(module):
                paths[id(part)] = (type(module).__name__, *map(str, path))
                classes.update(cls for cls in type(part).__mro__ if "__call__" in vars(cls))
    around: list[tuple[str, ...]] = [()]

    def named(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def inside(self: Any, *args: Any, **kwargs: Any) -> Any:
            path, outer = paths.get(id(self), ()), around[-1]
            if not path or path == outer:  # another module, or the call of a base class
                return call(self, *args, **kwargs)
            name = path[len(outer) :] if path[: len(outer)] == outer else path
            around.append(path)
            try:
                with jax.named_scope(".".join(name)):
                    return call(self, *args, **kwargs)
            finally:
                around.pop()

        return inside

    calls = {cls: vars(cls)["__call__"] for cls in classes if callable(vars(cls)["__call__"])}
    try:
        for cls, call in calls.items():
            setattr(cls, "__call__", named(call))  # noqa: B010
        yield
    finally:
        for cls, call in calls.items():
            setattr(cls, "__call__", call)  # noqa: B010
