"""Places: where the rows of a batch are in an array, in which order, and what its integers point to.

Orders are words. A sort makes a letter, and an array that is gathered by its permutation has one letter more. A letter
and its inverse cancel, so that rows which are put back where they were have the empty word again.
"""

import dataclasses
import math
from typing import Any, Final

from detjax.invariant.equations import aval


@dataclasses.dataclass(frozen=True)
class Letter:
    """The permutation of a sort, given by its number, or the inverse of it."""

    sort: int
    inverse: bool = False


@dataclasses.dataclass(frozen=True)
class Picked:
    """Rows of the batch by their numbers, in this order."""

    rows: tuple[int, ...]


type Order = tuple[Letter | Picked, ...]


def composed(*orders: Order) -> Order:
    """Returns the order of rows that were moved by one order after the other."""
    word: list[Letter | Picked] = []
    for letter in (letter for order in orders for letter in order):
        last = word[-1] if word else None
        if isinstance(letter, Letter) and last == Letter(letter.sort, not letter.inverse):
            word.pop()
        else:
            word.append(letter)
    return tuple(word)


def inverted(order: Order) -> Order:
    """Returns the order that puts rows back."""
    return tuple(Letter(x.sort, not x.inverse) if isinstance(x, Letter) else x for x in reversed(order))


@dataclasses.dataclass(frozen=True)
class Rows:
    """An array whose `axis` has `outer * B * inner` elements; element i belongs to row `i // inner % B`.

    They stand in this order if `order` is empty, and are moved by it otherwise.
    """

    axis: int
    outer: int = 1
    inner: int = 1
    order: Order = ()

    def on(self, axis: int) -> "Rows":
        """Returns the place of the same rows on another axis."""
        return dataclasses.replace(self, axis=axis)

    def moved(self, order: Order) -> "Rows":
        """Returns the place of the rows after a further move."""
        return dataclasses.replace(self, order=composed(self.order, order))


@dataclasses.dataclass(frozen=True)
class Grid:
    """Integers that count elements: element i of the flattened array is `i // step % size`."""

    step: int
    size: int


@dataclasses.dataclass(frozen=True)
class Shared:
    """An array without rows, whose elements are equal along the axes `uniform`.

    Attributes:
        uniform: these axes.
        grid: how its integers count, if they do.
        number: the integer that every element is, if it is known.
        sized: whether its numbers are computed from the number of rows.
    """

    uniform: frozenset[int] = frozenset()
    grid: Grid | None = None
    number: int | None = None
    sized: bool = False

    @property
    def plain(self) -> "Shared":
        """The same without what its integers are."""
        return Shared(self.uniform, sized=self.sized)


@dataclasses.dataclass(frozen=True)
class Single:
    """An array of one row, which is known by its number, or by the variable that holds it."""

    row: Any


@dataclasses.dataclass(frozen=True)
class Index:
    """Integers that say for each element of a moved array from which element it came: `order(i) // step % size`."""

    order: Order
    step: int
    size: int


@dataclasses.dataclass(frozen=True)
class Counts:
    """The number of rows with each of some keys, or what a chain of steps makes of it on the way to each row's key.

    Attributes:
        keys: the number of the keys' values; see `Follower.keys`.
        step: "counts", "rolled", "before", "starts" or "marks".
    """

    keys: Any
    step: str = "counts"
    cut: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True)
class Vector:
    """Vectors of indices, whose components lie along the last axis: one place for each."""

    components: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Draft:
    """A step of what makes an index positive, which nothing else may read; `finding` says why."""

    finding: Any


class _Unknown:
    """An array whose rows are at unknown places."""


UNKNOWN: Final = _Unknown()

type Place = Rows | Shared | Single | Index | Counts | Vector | Draft | _Unknown


def whole(atom: Any) -> Shared:
    """Returns the place of an array without rows, if nothing else is known about it."""
    return Shared(single(atom))


def single(atom: Any) -> frozenset[int]:
    """Returns the axes of one element."""
    return frozenset(axis for axis, size in enumerate(getattr(aval(atom), "shape", ())) if size == 1)


def grid_axis(grid: Grid, shape: tuple[int, ...]) -> int | None:
    """Returns the axis along which integers of an array of this shape count from 0; None without such an axis."""
    for axis, size in enumerate(shape):
        if size == grid.size and math.prod(shape[axis + 1 :]) == grid.step:
            return axis
    return None


def is_moved(place: Place) -> bool:
    """Returns whether rows stand in another order than in the batch."""
    return isinstance(place, Rows) and bool(place.order)
