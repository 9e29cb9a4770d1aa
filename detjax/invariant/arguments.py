"""Arguments of a function of a batch: the axis of the rows in each array, and the number of rows."""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax import tree_util

from detjax.runtime import bound_methods


class NoArray(TypeError):
    """An argument with rows is not an array."""


class Leaves(NamedTuple):
    """The static description of a call's arguments, which a program is made for.

    Attributes:
        tree: the structure of the positional and keyword arguments.
        axes: the axis of the rows for each leaf.
        is_array: whether each leaf is an array.
        static: the other leaves; None in place of arrays.
    """

    tree: Any
    axes: tuple[int | None, ...]
    is_array: tuple[bool, ...]
    static: tuple[Any, ...]

    @classmethod
    def from_call(
        cls, caller: str, batch_axes: Any, args: Sequence[Any], kwargs: dict[str, Any], shared: int = 0
    ) -> tuple["Leaves", tuple[Any, ...]]:
        """Returns the description of a call's arguments, and the arrays among them.

        Args:
            caller: the function that errors name.
            batch_axes: the axes of the positional arguments after the shared ones; see `spread`.
            args: the positional arguments.
            kwargs: the keyword arguments, which all rows share.
            shared: the number of leading positional arguments that all rows share.

        Raises:
            NoArray: a leaf with rows is not an array.
            ValueError: the axes do not fit the arguments.
        """
        # Each argument is flattened once: flattening a module costs more than computing with a small one.
        parts, options = [jax.tree.flatten(argument) for argument in args], jax.tree.flatten(kwargs)
        tree = tree_util.treedef_tuple((tree_util.treedef_tuple(part[1] for part in parts), options[1]))
        leaves = [leaf for part in (*parts, options) for leaf in part[0]]
        argument_axes = spread_flat(caller, "batch_axes", batch_axes, args[shared:], parts[shared:])
        fixed = sum(len(part[0]) for part in parts[:shared])
        axes = (*[None] * fixed, *argument_axes, *[None] * len(options[0]))
        is_array = bound_methods.are_arrays(leaves)
        for leaf, axis, array in zip(leaves, axes, is_array, strict=True):
            if not array and axis is not None:
                raise NoArray(
                    f"{caller}: an argument with rows is {type(leaf).__name__}; accepted: arrays, or None in "
                    "batch_axes for it"
                )
        static = tuple(None if array else leaf for leaf, array in zip(leaves, is_array, strict=True))
        return cls(tree, axes, is_array, static), tuple(itertools.compress(leaves, is_array))

    @property
    def array_axes(self) -> list[int | None]:
        """The axis of the rows for each array."""
        return [axis for axis, array in zip(self.axes, self.is_array, strict=True) if array]

    def with_arrays(self, arrays: Sequence[Any]) -> list[Any]:
        """Returns all leaves, with these arrays among them."""
        values = iter(arrays)
        return [next(values) if array else leaf for array, leaf in zip(self.is_array, self.static, strict=True)]


def spread(caller: str, name: str, axes: Any, values: Any) -> list[int | None]:
    """Returns the axis of the rows for each leaf of a tree.

    Args:
        caller: the function that errors name.
        name: its name for the axes.
        axes: integers or None, in a tree that is a prefix of `values`.
        values: the tree.

    Raises:
        ValueError: the axes are not a prefix of the values.
    """
    is_none = lambda x: x is None  # noqa: E731
    if isinstance(axes, list):
        axes = tuple(axes)
    try:
        by_leaf = jax.tree.map(
            lambda axis, part: jax.tree.map(lambda _: _Axis(axis), part), axes, values, is_leaf=is_none
        )
    except ValueError as error:
        raise ValueError(f"{caller}: {name} does not fit the arguments: {error}") from None
    return [axis.number for axis in jax.tree.leaves(by_leaf, is_leaf=lambda x: isinstance(x, _Axis))]


def spread_flat(
    caller: str, name: str, axes: Any, values: Sequence[Any], parts: Sequence[tuple[list[Any], Any]]
) -> list[int | None]:
    """Returns what `spread` does for several values, given the leaves and the structure of each in `parts`."""
    if axes is None or isinstance(axes, int):
        axes = [axes] * len(parts)
    if not isinstance(axes, list | tuple) or len(axes) != len(parts):
        return spread(caller, name, axes, tuple(values))
    by_value = [
        [axis] * len(leaves) if axis is None or isinstance(axis, int) else spread(caller, name, axis, value)
        for axis, value, (leaves, _) in zip(axes, values, parts, strict=True)
    ]
    return [axis for leaf_axes in by_value for axis in leaf_axes]


class _Axis:
    """An axis, or None, which pytrees would drop."""

    def __init__(self, number: int | None) -> None:
        self.number = number


def distinct_batch(sizes: Iterable[int]) -> int:
    """Returns the smallest prime number of rows above 10 that divides none of the sizes."""
    batch, sizes = 11, set(sizes) - {0}
    while any(batch % k == 0 for k in range(2, math.isqrt(batch) + 1)) or any(size % batch == 0 for size in sizes):
        batch += 1
    return batch


def count_rows(caller: str, arrays: Sequence[Any], axes: Sequence[int | None]) -> int:
    """Returns the number of rows of a batch.

    Raises:
        ValueError: arrays have different numbers of rows, or no rows.
    """
    counts = {x.shape[axis] for x, axis in zip(arrays, axes, strict=True) if axis is not None}
    if len(counts) != 1 or counts == {0}:
        given = "no argument has rows" if not counts else f"batches have {', '.join(map(str, sorted(counts)))} rows"
        raise ValueError(f"{caller}: {given}; accepted: one number of rows, at least 1, along batch_axes")
    return counts.pop()
