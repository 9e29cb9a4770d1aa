"""Trees of arrays in one array of 32-bit words, which is copied between host and device at once."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int32

from detjax.operands.pytrees import array_dataclass
from detjax.operands.sampling_arrays import Arrays


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of an array among the words.

    Attributes:
        first: the number of its first word.
        shape: the array's shape.
        dtype: its dtype, of 32 bits.
    """

    first: int
    shape: tuple[int, ...]
    dtype: np.dtype

    def __len__(self) -> int:
        """The array's length."""
        return self.shape[0]

    @property
    def words(self) -> slice:
        """The array's words."""
        return slice(self.first, self.first + math.prod(self.shape))


class Layout:
    """The places of a tree's arrays. Equal layouts are one object, so it takes no time to compare them.

    Attributes:
        tree: the tree with a `Place` for each array.
    """

    def __init__(self, structure: Any, arrays: tuple[tuple[tuple[int, ...], np.dtype], ...]) -> None:
        """The layout of arrays of these shapes and dtypes, one after another; `layout_of` makes layouts."""
        places, first = [], 0
        for shape, dtype in arrays:
            if dtype.itemsize != np.dtype(np.int32).itemsize:
                raise TypeError(f"Layout: an array has the dtype {dtype}; accepted: dtypes of 32 bits")
            places.append(Place(first, shape, dtype))
            first = places[-1].words.stop
        self.tree: Any = jax.tree.unflatten(structure, places)
        self._structure, self._places = structure, places

    def __repr__(self) -> str:
        """The places alone: names of compiled programs depend on it."""
        return f"Layout({self.tree!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Makes copies in the same process the same object."""
        return layout_of, (self.tree,)

    def filled(self, read: Any) -> Any:
        """Returns the tree with the result of `read` for each place."""
        return jax.tree.unflatten(self._structure, [read(place) for place in self._places])


_layout = functools.cache(Layout)


def layout_of(tree: Any) -> Layout:
    """Returns the layout of a tree of arrays, or of anything else with shapes and dtypes."""
    leaves, structure = jax.tree.flatten(tree)
    return _layout(structure, tuple((x.shape, x.dtype) for x in leaves))


@array_dataclass
@dataclasses.dataclass(frozen=True)
class Packed[T]:
    """A tree of arrays in one array.

    Attributes:
        words: the arrays' numbers, one array after another.
        layout: where they are.

    Example:
        >>> packed = Packed.on_host({"position": np.array([[3, 4]], np.int32), "top_p": np.array([0.5], np.float32)})
        >>> packed.words.shape, packed.read()["top_p"].tolist()
        ((3,), [0.5])
    """

    words: Int32[Arrays, "n"]
    layout: Layout = dataclasses.field(metadata={"static": True})

    @classmethod
    def on_host(cls, tree: T) -> "Packed[T]":
        """Packs NumPy arrays."""
        leaves, structure = jax.tree.flatten(tree)
        words = np.concatenate([x.reshape(-1).view(np.int32) for x in leaves])
        return cls(words, _layout(structure, tuple((x.shape, x.dtype) for x in leaves)))

    @classmethod
    def in_program(cls, tree: T) -> "Packed[T]":
        """Packs arrays of a program that is traced."""
        leaves = [_alone(x) for x in jax.tree.leaves(tree)]
        words = [lax.bitcast_convert_type(x, jnp.int32).reshape(-1) for x in leaves]
        return cls(jnp.concatenate(words), layout_of(tree))

    def unpacked(self) -> T:
        """Returns the tree, for tracing in a program."""

        def read(place: Place) -> Any:
            words = lax.slice_in_dim(jnp.asarray(self.words), place.words.start, place.words.stop)
            return _alone(lax.bitcast_convert_type(words, place.dtype).reshape(place.shape))

        return self.layout.filled(read)

    def read(self) -> T:
        """Waits for the words and returns the tree on the host."""
        words = np.asarray(self.words)
        return self.layout.filled(lambda place: words[place.words].view(place.dtype).reshape(place.shape))


def _alone(x: Array) -> Array:
    """Returns an array of a program. What computes or reads it is compiled as if it were a result or an argument.

    Integers need no such care, and their slices cost no kernel where they become part of what reads them.
    """
    return lax.optimization_barrier(x) if jnp.issubdtype(x.dtype, jnp.floating) else x
