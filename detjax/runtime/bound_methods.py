"""Methods whose object is an argument of the program, so that each call uses the object's current arrays."""

import inspect
import itertools
import types
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.tree_util import register_pytree_node_class

_READS_OBJECT: Final = "_detjax_reads_object"
"""The attribute of functions that `reads_object` marked."""


def reads_object[F: Callable[..., Any]](fn: F) -> F:
    """Marks a function that does not modify its first argument, a pytree, so that `jit` may trace the argument."""
    setattr(fn, _READS_OBJECT, True)
    return fn


def method(fn: Callable[..., Any]) -> types.MethodType | None:
    """Returns the method that a call of `fn` runs if its function has the mark of `reads_object`, else None."""
    candidate = fn if inspect.ismethod(fn) else getattr(fn, "__call__", None)  # noqa: B004
    if not inspect.ismethod(candidate) or isinstance(candidate.__self__, type):
        return None
    return candidate if getattr(candidate.__func__, _READS_OBJECT, False) else None


class _Known(NamedTuple):
    """The static part of an object, on which a traced program depends: everything except its arrays.

    Attributes:
        structure: its pytree structure.
        is_array: for each leaf, whether it is an array.
        static: the other leaves.
    """

    structure: Any
    is_array: tuple[bool, ...]
    static: tuple[Any, ...]


@register_pytree_node_class
class Argument:
    """An object as an argument of `jax.jit`: its arrays are traced, and everything else is static."""

    def __init__(self, arrays: Sequence[Any], known: _Known) -> None:
        self._arrays, self._known = arrays, known

    @classmethod
    def from_object(cls, value: Any) -> "Argument":
        """Returns a pytree as an argument."""
        leaves, structure = jax.tree.flatten(value)
        is_array = are_arrays(leaves)
        static = tuple([leaf for leaf, array in zip(leaves, is_array, strict=True) if not array])
        return cls(list(itertools.compress(leaves, is_array)), _Known(structure, is_array, static))

    def value(self) -> Any:
        """Returns the object with the argument's current arrays."""
        arrays, static = iter(self._arrays), iter(self._known.static)
        leaves = [next(arrays if array else static) for array in self._known.is_array]
        return jax.tree.unflatten(self._known.structure, leaves)

    def tree_flatten(self) -> tuple[Sequence[Any], _Known]:
        return self._arrays, self._known

    @classmethod
    def tree_unflatten(cls, known: _Known, arrays: Sequence[Any]) -> "Argument":
        return cls(arrays, known)


def are_arrays(leaves: Sequence[Any]) -> tuple[bool, ...]:
    """Returns for each leaf whether it is an array.

    Answers are cached by type, because an `isinstance` check for `jax.Array` takes a microsecond and a module has
    hundreds of weights. Tracers are excluded, because only some of one type are arrays.
    """
    by_type: dict[type, bool] = {}
    answers = []
    for leaf in leaves:
        answer = by_type.get(type(leaf))
        if answer is None:
            answer = isinstance(leaf, (jax.Array, np.ndarray))
            if not isinstance(leaf, Tracer):
                by_type[type(leaf)] = answer
        answers.append(answer)
    return tuple(answers)


def shifted(jit_arguments: dict[str, Any], count: int) -> dict[str, Any]:
    """Returns the arguments of `jax.jit` for a function with one additional leading argument.

    Args:
        jit_arguments: the arguments without the additional one.
        count: number of positional arguments of the call, without the additional one.
    """
    moved = dict(jit_arguments)
    for name in ("static_argnums", "donate_argnums"):
        if (given := moved.get(name)) is not None:
            numbers = [given] if isinstance(given, int) else given
            moved[name] = tuple(number + (number >= 0) for number in numbers)
    if (given := moved.get("in_shardings")) is not None:
        shardings = given if isinstance(given, tuple | list) else [given] * count
        moved["in_shardings"] = (_AS_IT_IS, *shardings)
    return moved


_AS_IT_IS: Final = inspect.signature(jax.jit).parameters["in_shardings"].default
"""The sharding of an argument that is not moved."""
