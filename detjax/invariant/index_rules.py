"""Rules for arrays that point to rows: sorts, permutations and their inverses, lookups, and counts of rows per key.

A mixture of experts sorts tokens of all rows by expert, multiplies each group by its expert's weight, and returns the
tokens to their positions. These rules prove that every row returns to itself.
"""

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Final

from jax.extend import core

from detjax.invariant import equations
from detjax.invariant.equations import aval
from detjax.invariant.places import (
    Counts,
    Draft,
    Grid,
    Index,
    Letter,
    Order,
    Place,
    Rows,
    Shared,
    Vector,
    composed,
    grid_axis,
    inverted,
)
from detjax.invariant.recipes import Recipes
from detjax.invariant.uniform import is_uniform_along

_RENAMES: Final = frozenset(
    "reshape squeeze expand_dims convert_element_type copy stop_gradient broadcast_in_dim transpose".split()
)
"""Primitives that keep the elements of an array in order, if the array has as many elements afterwards."""

_NOT_NEGATIVE: Final = frozenset("iota argmax argmin".split())


@dataclasses.dataclass(frozen=True)
class Sort:
    """A sort of rows: its keys, the order before it, the place of the rows, and the length of the axis."""

    keys: Any
    before: Order
    rows: Rows
    size: int


class IndexRules(Recipes):
    """Facts about indices and keys by value number: equal equations of equal values share a value number."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[core.Var, Any] = {}
        self._known: dict[Any, int] = {}
        self._made_by: dict[int, tuple[str, tuple[Any, ...]]] = {}
        self._keys: dict[Any, Any] = {}
        self._not_negative: set[Any] = set()
        self._hot: dict[Any, tuple[Any, int]] = {}  # one-hot arrays: their keys, and the axis of the keys' values
        self._sorts: dict[int, Sort] = {}
        self._numbers: dict[core.Var, int] = {}
        self._grids: dict[core.Var, Grid] = {}
        self.sorted_at: dict[int, Any] = {}
        self._fresh = 0

    # Values -----------------------------------------------------------------------------------------------------------

    def value(self, atom: Any) -> Any:
        """Returns the value number of a variable or literal."""
        if isinstance(atom, core.Literal):
            number = self._number(atom)
            return "literal", str(getattr(aval(atom), "dtype", "")), repr(atom.val) if number is None else number
        if atom not in self._values:
            self._values[atom] = self.fresh()
        return self._values[atom]

    def parts_of_value(self, value: Any) -> Sequence[Any]:
        """See `Recipes`."""
        return self._made_by.get(value, ("", ()))[1]

    def fresh(self) -> int:
        """Returns a new value number."""
        self._fresh += 1
        return self._fresh

    def set_values(self, variables: Sequence[core.Var], values: Sequence[Any] | None) -> None:
        """Sets the value numbers of a jaxpr's arguments; new ones if none are known."""
        values = [self.fresh() for _ in variables] if values is None else values
        self._values.update(zip(variables, values, strict=True))

    def number_results(self, eqn: core.JaxprEqn) -> None:
        """Assigns value numbers to the results of an equation."""
        name = eqn.primitive.name
        if equations.is_call(eqn):
            body = equations.body(eqn)
            self._values.update(zip(eqn.outvars, [self.value(v) for v in body.outvars], strict=True))
            return
        operands = tuple(map(self.value, eqn.invars))
        if name == "convert_element_type" and aval(eqn.invars[0]).dtype == aval(eqn.outvars[0]).dtype:
            self._values[eqn.outvars[0]] = operands[0]
            return
        try:
            params = [
                (k, id(v) if isinstance(v, core.Jaxpr) else v) for k, v in eqn.params.items() if k != "update_jaxpr"
            ]
            key = name, operands, tuple(sorted(params))
            hash(key)
        except TypeError:
            key = self.fresh(), operands, ()
        for index, var in enumerate(eqn.outvars):
            number = self._known.get((key, index))
            if number is None:
                number = self._known[key, index] = self.fresh()
                self._made_by[number] = name, operands
            self._values[var] = number
        if eqn.outvars:  # a print has no result
            self._follow_keys(eqn, operands)

    def _follow_keys(self, eqn: core.JaxprEqn, operands: tuple[Any, ...]) -> None:
        name, result = eqn.primitive.name, self.value(eqn.outvars[0])
        if name in _NOT_NEGATIVE:
            self._not_negative.add(result)
        if name in ("top_k", "approx_top_k"):
            self._not_negative.add(self.value(eqn.outvars[1]))
        if name in _RENAMES and math.prod(aval(eqn.invars[0]).shape) == math.prod(aval(eqn.outvars[0]).shape):
            self._keys[result] = self.keys(operands[0])
            if operands[0] in self._not_negative:
                self._not_negative.add(result)
        if name in ("max", "min") and not equations.is_inexact(eqn.outvars[0]):
            for one, other in ((0, 1), (1, 0)):
                number = self._number(eqn.invars[other])
                if number is not None and not isinstance(eqn.invars[one], core.Literal):
                    self._keys[result] = self.keys(operands[one])  # which is monotonic in the operand
                    if (name == "max" and number >= 0) or operands[one] in self._not_negative:
                        self._not_negative.add(result)
        if name == "sort":
            self._keys.update((self.value(v), self.keys(x)) for v, x in zip(eqn.outvars, operands, strict=True))
        if name == "eq":
            self._find_one_hot(eqn, result)
        if name == "convert_element_type" and operands[0] in self._hot:
            self._hot[result] = self._hot[operands[0]]
        if name == "reduce_sum" and operands[0] in self._hot:
            keys, axis = self._hot[operands[0]]
            axes = eqn.params["axes"]
            if axis not in axes:
                self._hot[result] = keys, axis - sum(k < axis for k in axes)

    def _find_one_hot(self, eqn: core.JaxprEqn, result: Any) -> None:
        """Records keys that are compared with the numbers 0, 1, ... along an axis of their own."""
        for keys, numbers in (eqn.invars, reversed(eqn.invars)):
            grid = self._grids.get(numbers) if not isinstance(numbers, core.Literal) else None
            shape = getattr(aval(numbers), "shape", ())
            axis = grid_axis(grid, shape) if grid is not None else None
            spread = aval(eqn.outvars[0]).shape
            if (
                grid is None
                or axis is None
                or isinstance(keys, core.Literal)
                or math.prod(shape) not in (grid.size, math.prod(spread))
            ):
                continue
            self._hot[result] = self.keys(self._before_spread(keys, axis)), axis

    def _before_spread(self, keys: Any, axis: int) -> Any:
        """Returns the value number of keys before they were repeated along an axis."""
        number = self.value(keys)
        shape = aval(keys).shape
        if shape[axis] == 1:
            return number
        name, operands = self._made_by.get(number, ("", ()))
        return operands[0] if name == "broadcast_in_dim" else number

    def unspread(self, value: Any) -> Any:
        """Returns the value number of a number before it was broadcast."""
        while (made := self._made_by.get(value)) is not None and made[0] in ("broadcast_in_dim", "reshape"):
            value = made[1][0]
        return value

    def keys(self, value: Any) -> Any:
        """Returns a value that arrays share if they hold the same keys in any order, or monotonic functions of them."""
        return self._keys.get(value, value)

    def _number(self, atom: Any) -> int | None:
        """Returns the integer that every element of an array equals, if known."""
        if isinstance(atom, core.Literal):
            is_integer = not equations.is_inexact(atom) and not aval(atom).shape
            return int(atom.val) if is_integer else None
        return self._numbers.get(atom)

    def positive_index(self, eqn: core.JaxprEqn, places: Sequence[Place]) -> Place | None:
        """Returns the place of `where(i < 0, i + n, i)`, which is the place of i; None for other equations."""
        if eqn.primitive.name != "select_n" or len(eqn.invars) != 3:
            return None
        asked, index, moved = map(self.value, eqn.invars)
        if isinstance(asked, tuple) or isinstance(moved, tuple):
            return None
        name, operands = self._made_by.get(asked, ("", ()))
        if name != "lt" or operands[0] != index or not isinstance(operands[1], tuple) or operands[1][2] != 0:
            return None
        name, operands = self._made_by.get(moved, ("", ()))
        if name != "add" or operands[0] != index:
            return None
        place = places[1]
        is_known = index in self._not_negative or isinstance(place, (Index, Counts))
        if is_known or (isinstance(place, Shared) and place.grid is not None):
            self._values[eqn.outvars[0]] = index
        return place

    def is_index(self, value: Any, counter: Any) -> bool:
        """Returns whether a value is a counter from 0, also after `where(i < 0, i + n, i)`."""
        name, operands = self._made_by.get(value, ("", ()))
        if name == "select_n" and operands[1] == counter:
            name, asked = self._made_by.get(operands[0], ("", ()))
            return name == "lt" and asked[0] == counter and isinstance(asked[1], tuple) and asked[1][2] == 0
        return value == counter

    # Sorts ------------------------------------------------------------------------------------------------------------

    def sorted_rows(self, eqn: core.JaxprEqn, places: list[Place]) -> list[Place] | None:
        """Returns the places of the results of a sort of rows, or of a permutation; None for other sorts."""
        shape = aval(eqn.invars[0]).shape
        if len(shape) != 1:
            return None
        first = places[0]
        counts = lambda place: isinstance(place, Shared) and place.grid == Grid(1, shape[0])  # noqa: E731
        if isinstance(first, Index) and first.step == 1 and first.size == shape[0] and eqn.params["num_keys"] == 1:
            # An argsort of a permutation is its inverse.
            if all(map(counts, places[1:])):
                back = Index(inverted(first.order), 1, shape[0])
                return [Shared(grid=Grid(1, shape[0])), *[back] * len(places[1:])]
            return None
        if not isinstance(first, Rows) or not all(place == first or counts(place) for place in places):
            return None
        keys = tuple(self.value(v) for v in eqn.invars[: eqn.params["num_keys"]])
        number = self._known.setdefault(("sort", keys, first.order, eqn.params["is_stable"]), self.fresh())
        roots = tuple(self.keys(value) for value in keys)
        root = roots[0] if len(roots) == 1 else roots
        self._sorts[number] = Sort(root, first.order, first, shape[0])
        self.sorted_at[number] = self.described(eqn)
        step: Order = (Letter(number),)
        return [Index(step, 1, shape[0]) if counts(place) else first.moved(step) for place in places]

    @abc.abstractmethod
    def described(self, eqn: core.JaxprEqn) -> Any:
        """Returns the finding for a sort or count from which rows do not return."""

    # Lookups and writes -----------------------------------------------------------------------------------------------

    def components(self, atom: Any, place: Place) -> list[Place]:
        """Returns the place of each component of an array of index vectors."""
        return list(place.components) if isinstance(place, Vector) else [place] * aval(atom).shape[-1]

    def looked_up(self, eqn: core.JaxprEqn, places: list[Place]) -> Place | None:
        """Returns the place of rows that a gather reads at indices; None if these may point to other rows."""
        operand, indices = places
        numbers, shape = eqn.params["dimension_numbers"], aval(eqn.invars[0]).shape
        if numbers.operand_batching_dims:
            return None
        *leading, _ = aval(eqn.invars[1]).shape
        parts = dict(zip(numbers.start_index_map, self.components(eqn.invars[1], indices), strict=True))
        batch_axes = [k for k in range(aval(eqn.outvars[0]).ndim) if k not in numbers.offset_dims]
        if isinstance(operand, Shared):
            return self._permuted_numbers(eqn, operand, indices)
        if (
            not isinstance(operand, Rows)
            or operand.axis not in parts
            or operand.axis not in numbers.collapsed_slice_dims
        ):
            return None
        at, axis = parts.pop(operand.axis), operand.axis
        if isinstance(at, Shared) and at.grid is not None:
            along = grid_axis(at.grid, tuple(leading))
            if along is not None and at.grid.size == shape[axis]:
                is_own = all(
                    place == Rows(along, operand.outer, operand.inner, operand.order)
                    or (isinstance(place, Shared) and along in place.uniform)
                    for place in parts.values()
                )
                return operand.on(batch_axes[along]) if is_own else None
            at = Index((), at.grid.step, at.grid.size)
        if not isinstance(at, Index) or parts or len(leading) != 1 or at.size != shape[axis]:
            return None
        if at.step == 1 and leading[0] == shape[axis]:
            number = self.value(eqn.outvars[0])
            self._keys[number] = self.keys(self.value(eqn.invars[0]))
            return operand.on(batch_axes[0]).moved(at.order)
        if operand.order or operand.outer != 1 or leading[0] != at.step * at.size:
            return None
        return Rows(batch_axes[0], 1, operand.inner * at.step, at.order)

    def _permuted_numbers(self, eqn: core.JaxprEqn, operand: Shared, indices: Place) -> Place | None:
        """Returns the place of integers that number elements, looked up by a permutation of them."""
        shape = aval(eqn.invars[0]).shape
        if len(shape) != 1 or not isinstance(indices, Index) or operand.grid is None:
            return None
        if (indices.step, indices.size) != (1, shape[0]):
            return None
        return Index(indices.order, operand.grid.step, operand.grid.size)

    def written(self, eqn: core.JaxprEqn, places: list[Place]) -> Place | None:
        """Returns the place of rows that a scatter writes at indices; None if these may point to other rows."""
        operand, indices, updates = places
        numbers, shape = eqn.params["dimension_numbers"], aval(eqn.invars[0]).shape
        if numbers.operand_batching_dims or not isinstance(operand, (Shared, Rows)):
            return None
        *leading, _ = aval(eqn.invars[1]).shape
        targets = dict(zip(numbers.scatter_dims_to_operand_dims, self.components(eqn.invars[1], indices), strict=True))
        scattered = [k for k in range(aval(eqn.invars[2]).ndim) if k not in numbers.update_window_dims]
        for axis, at in targets.items():
            if not isinstance(at, Index) and not (isinstance(at, Shared) and at.grid is not None):
                continue
            if axis not in numbers.inserted_window_dims:
                return None
            others = [place for k, place in targets.items() if k != axis]
            pointer = Index((), at.grid.step, at.grid.size) if isinstance(at, Shared) and at.grid is not None else at
            assert isinstance(pointer, Index)
            along = None if isinstance(at, Index) else grid_axis(Grid(pointer.step, pointer.size), tuple(leading))
            if pointer.size != shape[axis]:
                return None
            rows: Rows | None = None
            if along is not None:
                rows = self._put_along(eqn, places, others, axis, (along, scattered[along]))
            elif len(leading) == 1 and not others:
                rows = self._put_back(eqn, pointer, updates, axis)
            is_same = operand == rows or is_uniform_along(operand, eqn.invars[0], axis)
            return rows if is_same else None
        return None

    @staticmethod
    def _put_along(
        eqn: core.JaxprEqn, places: list[Place], others: list[Place], axis: int, along: tuple[int, int]
    ) -> Rows | None:
        """Returns the place of rows that are written at their own index, with other indices per row or uniform."""
        operand, _, updates = places
        rows: Rows | None = None
        if isinstance(updates, Rows) and updates.axis == along[1]:
            rows = updates.on(axis)
        elif is_uniform_along(updates, eqn.invars[2], along[1]):
            rows = next((place.on(axis) for place in (*others, operand) if isinstance(place, Rows)), None)
        if rows is None:
            return None
        is_own = [
            place == rows.on(along[0]) or (isinstance(place, Shared) and along[0] in place.uniform) for place in others
        ]
        return rows if all(is_own) else None

    def _put_back(self, eqn: core.JaxprEqn, at: Index, updates: Place, axis: int) -> Rows | None:
        """Returns the place of moved rows that are written to, or added at, their source elements."""
        count = aval(eqn.invars[1]).shape[0]
        if not isinstance(updates, Rows):
            return None
        if at.step == 1 and at.size == count:
            return dataclasses.replace(updates, axis=axis, order=composed(updates.order, inverted(at.order)))
        is_added = eqn.primitive.name in ("scatter-add", "scatter_add")
        if not is_added or updates.order != at.order or count != at.step * at.size or updates.inner % at.step:
            return None
        return Rows(axis, updates.outer, updates.inner // at.step)

    def counted(self, eqn: core.JaxprEqn, places: list[Place]) -> Place | None:
        """Returns the counts of keys, if a scatter adds one per row at the row's key; otherwise None."""
        operand, indices, updates = places
        is_counting = (
            eqn.primitive.name in ("scatter-add", "scatter_add")
            and aval(eqn.invars[0]).ndim == 1
            and isinstance(indices, Rows)
            and aval(eqn.invars[1]).shape[-1] == 1
            and isinstance(operand, Shared)
            and operand.number == 0
            and isinstance(updates, Shared)
            and updates.number == 1
        )
        return Counts(self.keys(self.value(eqn.invars[1]))) if is_counting else None

    # Other equations of indices ---------------------------------------------------------------------------------------

    def with_indices(self, eqn: core.JaxprEqn, places: list[Place]) -> list[Place] | None:
        """Returns the places of results of an equation that reads indices or counts of keys; None if unknown."""
        name, count = eqn.primitive.name, len(eqn.outvars)
        first = next(place for place in places if isinstance(place, (Index, Counts, Vector)))
        if name == "sort":
            return self.sorted_rows(eqn, places)
        if name == "gather":
            place = self.looked_up(eqn, places)
            return None if place is None else [place]
        if name.startswith("scatter"):
            return self._scattered(eqn, places)
        if name in _RENAMES and math.prod(aval(eqn.invars[0]).shape) == math.prod(aval(eqn.outvars[0]).shape):
            return None if any(map(equations.is_inexact, eqn.outvars)) else [*[first] * count]
        if name == "concatenate" and isinstance(first, Counts):
            return self._rolled(places)
        if name == "concatenate" and is_vector(eqn):
            return [Vector(tuple(places))]
        if name == "slice" and isinstance(first, Counts):
            return [Counts(first.keys, "cut", (eqn.params["start_indices"][0], eqn.params["limit_indices"][0]))]
        if name == "cumsum" and isinstance(first, Counts):
            if eqn.params["reverse"] or first.step not in ("before", "marks"):
                return None
            return [Counts(first.keys, "starts" if first.step == "before" else "groups")]
        if name in ("lt", "add") and all(isinstance(place, (Index, Counts, Shared)) for place in places):
            return [*[Draft(self.described(eqn))] * count]
        if name == "sub" and isinstance(first, Counts) and first.step == "groups" and self._number(eqn.invars[1]) == 1:
            return self._groups(first)
        if name in ("div", "rem") and isinstance(first, Index):
            return self.divided(name, places)
        if name in ("max", "min", "clamp") and isinstance(first, Index):
            numbers = [place.number for place in places if isinstance(place, Shared)]
            low, high = {"max": (0, None), "min": (None, 0), "clamp": (0, -1)}[name]
            covers = (low is None or (numbers[low] or 0) <= 0) and (
                high is None or (numbers[high] is not None and numbers[high] >= first.size - 1)
            )
            return [first] if covers and None not in numbers else None
        if name == "ragged_dot_general":
            return self._grouped(eqn, places)
        return None

    def divided(self, name: str, places: Sequence[Place]) -> list[Place] | None:
        """Returns the place of indices divided by a number, or of the remainder."""
        index, by = places[0], places[1]
        if not isinstance(by, Shared) or by.number is None or by.number < 1:
            return None
        at = index.grid if isinstance(index, Shared) else index
        if not isinstance(at, (Grid, Index)) or at.size % by.number:
            return None
        whole = name in ("div", "floor_divide")
        step, size = (at.step * by.number, at.size // by.number) if whole else (at.step, by.number)
        if isinstance(at, Index):
            return [Index(at.order, step, size)]
        return [Shared(grid=Grid(step, size))]

    def _scattered(self, eqn: core.JaxprEqn, places: list[Place]) -> list[Place] | None:
        operand, indices, updates = places
        shape = aval(eqn.invars[0]).shape
        if isinstance(operand, Counts) and operand.step == "rolled" and eqn.primitive.name == "scatter":
            is_first = all(isinstance(p, Shared) and p.number == 0 for p in (indices, updates))
            return [Counts(operand.keys, "before")] if is_first and aval(eqn.invars[2]).ndim == 0 else None
        if isinstance(indices, Counts) and indices.step == "starts" and eqn.primitive.name == "scatter-add":
            numbers = [p.number if isinstance(p, Shared) else None for p in (operand, updates)]
            return [Counts(indices.keys, "marks")] if numbers == [0, 1] and len(shape) == 1 else None
        if isinstance(indices, Index) and isinstance(updates, Shared) and updates.grid == Grid(1, *shape[:1]):
            is_whole = len(shape) == 1 and (indices.step, indices.size) == (1, shape[0])
            return [Index(inverted(indices.order), 1, shape[0])] if is_whole else None
        place = self.written(eqn, places)
        return None if place is None else [place]

    @staticmethod
    def _rolled(places: list[Place]) -> list[Place] | None:
        """Returns the place of counts rolled by one, as by `jnp.roll`."""
        if len(places) != 2 or not all(isinstance(p, Counts) and p.step == "cut" and p.cut for p in places):
            return None
        one, other = places
        assert isinstance(one, Counts) and isinstance(other, Counts) and one.cut and other.cut
        is_rolled = one.cut[1] == one.cut[0] + 1 and other.cut == (0, one.cut[0]) and one.keys == other.keys
        return [Counts(one.keys, "rolled")] if is_rolled else None

    def _groups(self, counts: Counts) -> list[Place] | None:
        """Returns the place of sorted rows' keys, computed from the counts of each key."""
        for number, sort in self._sorts.items():
            if sort.keys == counts.keys:
                return [sort.rows.moved((Letter(number),))]
        return None

    def _grouped(self, eqn: core.JaxprEqn, places: list[Place]) -> list[Place] | None:
        """Returns the place of rows that are multiplied by their group's weight, if groups follow the rows' keys."""
        rows, weights, counts = places
        if not isinstance(rows, Rows) or not isinstance(weights, Shared) or not isinstance(counts, Counts):
            return None
        last = rows.order[-1] if rows.order else None
        if rows.axis != 0 or counts.step != "counts" or not isinstance(last, Letter) or last.inverse:
            return None
        sort = self._sorts[last.sort]
        is_sorted = sort.keys == counts.keys and rows.order == (*sort.before, last)
        return [rows] if is_sorted and aval(eqn.invars[0]).ndim == 2 else None

    def counted_one_hot(self, eqn: core.JaxprEqn) -> Place | None:
        """Returns the counts of keys, if one-hot integers are added over all rows; None for other sums."""
        known = self._hot.get(self.value(eqn.invars[0]))
        axes = set(range(aval(eqn.invars[0]).ndim)) - set(eqn.params["axes"])
        if eqn.primitive.name != "reduce_sum" or known is None or axes != {known[1]}:
            return None
        return None if any(map(equations.is_inexact, eqn.outvars)) else Counts(known[0])


def is_vector(eqn: core.JaxprEqn) -> bool:
    """Returns whether integers are joined along their last axis, where each array has size 1."""
    is_last = eqn.params["dimension"] == aval(eqn.outvars[0]).ndim - 1
    is_integer = not equations.is_inexact(eqn.outvars[0])
    return is_last and is_integer and all(aval(v).shape[-1] == 1 for v in eqn.invars)
