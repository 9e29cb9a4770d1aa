"""Places: the axis and the order of the batch's rows in an array, and what its integers point to.

An order is a word. Each sort defines a letter, and gathering an array by the sort's permutation appends that letter. A
letter and its inverse cancel, so rows that have returned to their positions have the empty word again.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Final

from detjax.invariant.equations import aval


@dataclasses.dataclass(frozen=True)
class Letter:
    """The permutation of a numbered sort, or its inverse."""

    sort: int
    inverse: bool = False


@dataclasses.dataclass(frozen=True)
class Picked:
    """Rows of the batch, by index, in this order."""

    rows: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Written:
    """Rows that were written one by one, so far, all by one recipe (see `recipes`)."""

    rows: frozenset[int]
    recipe: Any


type Order = tuple[Letter | Picked | Written, ...]


def composed(*orders: Order) -> Order:
    """Returns the order of rows that were moved by several orders in sequence."""
    word: list[Letter | Picked | Written] = []
    for letter in (letter for order in orders for letter in order):
        last = word[-1] if word else None
        if isinstance(letter, Letter) and last == Letter(letter.sort, not letter.inverse):
            word.pop()
        else:
            word.append(letter)
    return tuple(word)


def inverted(order: Order) -> Order:
    """Returns the order that undoes another."""
    return tuple(Letter(x.sort, not x.inverse) if isinstance(x, Letter) else x for x in reversed(order))


@dataclasses.dataclass(frozen=True)
class Rows:
    """An array whose `axis` has `outer * B * inner` elements; element i belongs to row `i // inner % B`.

    Rows are in the batch's order if `order` is empty, and moved by it otherwise.
    """

    axis: int
    outer: int = 1
    inner: int = 1
    order: Order = ()

    def on(self, axis: int) -> "Rows":
        """Returns the same rows on another axis."""
        return dataclasses.replace(self, axis=axis)

    def moved(self, order: Order) -> "Rows":
        """Returns the rows after a further move."""
        return dataclasses.replace(self, order=composed(self.order, order))


@dataclasses.dataclass(frozen=True)
class Grid:
    """Integers that number elements: element i of the flattened array is `i // step % size`."""

    step: int
    size: int


@dataclasses.dataclass(frozen=True)
class Shared:
    """An array without rows, whose elements are equal along the axes `uniform`.

    Attributes:
        uniform: these axes.
        grid: the grid that its integers form, if any.
        number: the integer that every element equals, if known.
        sized: whether its numbers are computed from the number of rows.
    """

    uniform: frozenset[int] = frozenset()
    grid: Grid | None = None
    number: int | None = None
    sized: bool = False

    @property
    def plain(self) -> "Shared":
        """The same without `grid` and `number`."""
        return Shared(self.uniform, sized=self.sized)


@dataclasses.dataclass(frozen=True)
class Single:
    """An array of one row, identified by its index, or by a tuple of the value number of that index."""

    row: Any


@dataclasses.dataclass(frozen=True)
class Index:
    """Integers that point each element of a moved array to its source element: `order(i) // step % size`."""

    order: Order
    step: int
    size: int


@dataclasses.dataclass(frozen=True)
class Counts:
    """The number of rows with each key, or an intermediate value of the chain that turns counts into each row's key.

    Attributes:
        keys: the value number of the keys; see `IndexRules.keys`.
        step: "counts", "cut", "rolled", "before", "starts", "marks" or "groups".
        cut: the start and limit of a slice, for the step "cut".
    """

    keys: Any
    step: str = "counts"
    cut: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True)
class Vector:
    """Vectors of indices, with components along the last axis and a place for each component."""

    components: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Draft:
    """An intermediate value in making an index positive. If anything else reads it, `finding` is reported."""

    finding: Any


class _Unknown:
    """An array whose rows are at unknown positions."""


UNKNOWN: Final = _Unknown()

type Place = Rows | Shared | Single | Index | Counts | Vector | Draft | _Unknown


def whole(atom: Any) -> Shared:
    """Returns the place of an array without rows, if nothing else is known about it."""
    return Shared(single(atom))


def single(atom: Any) -> frozenset[int]:
    """Returns the axes of size 1."""
    return frozenset(axis for axis, size in enumerate(getattr(aval(atom), "shape", ())) if size == 1)


def grid_axis(grid: Grid, shape: tuple[int, ...]) -> int | None:
    """Returns the axis along which the integers of an array of this shape count from 0; None if no axis fits."""
    for axis, size in enumerate(shape):
        if size == grid.size and math.prod(shape[axis + 1 :]) == grid.step:
            return axis
    return None


def first_rows(places: Sequence[Place]) -> Rows:
    """Returns the first place with rows."""
    return next(place for place in places if isinstance(place, Rows))


def is_moved(place: Place) -> bool:
    """Returns whether rows are in another order than the batch's."""
    return isinstance(place, Rows) and bool(place.order)
