"""Recipes: how the numbers of one row were made, whichever row it is.

A function may take rows out of the batch and join them again. Every row must then go through the same computation, with
the same numbers that all rows share. Arrays of different rows have the same recipe if the same equations made them,
except for the index at which the row was taken.
"""

import abc
from collections.abc import Sequence
from typing import Any, Final

from jax.extend import core

from detjax.invariant import equations
from detjax.invariant.places import Picked, Place, Rows, Shared, Single

_SIZES: Final = frozenset("shape new_sizes start_indices limit_indices strides slice_sizes sizes".split())
"""Parameters with a number for each axis of the result."""


def is_picked(place: Place) -> bool:
    """Returns whether an array has some rows of the batch, in known positions."""
    return isinstance(place, Single) or (isinstance(place, Rows) and any(isinstance(x, Picked) for x in place.order))


class Recipes(abc.ABC):
    """The recipes of a function's arrays; without one, an array's value number is its recipe."""

    def __init__(self) -> None:
        self._recipes: dict[core.Var, Any] = {}
        self._numbers_of_recipes: dict[Any, int] = {}
        self._parts: dict[int, tuple[Any, ...]] = {}
        self._has_picked = False

    @abc.abstractmethod
    def value(self, atom: Any) -> Any:
        """Returns the value number of a variable or literal."""

    @abc.abstractmethod
    def parts_of_value(self, value: Any) -> Sequence[Any]:
        """Returns the value numbers that a value was computed from."""

    def recipe(self, atom: Any) -> Any:
        """Returns the recipe of a variable or literal."""
        known = None if isinstance(atom, core.Literal) else self._recipes.get(atom)
        return self.value(atom) if known is None else known

    def set_recipes(self, variables: Sequence[core.Var], recipes: Sequence[Any] | None) -> None:
        """Sets the recipes of a jaxpr's arguments; none if they are unknown."""
        for var in variables:
            self._recipes.pop(var, None)
        if recipes is not None:
            self._recipes.update(zip(variables, recipes, strict=True))

    def note_recipes(self, eqn: core.JaxprEqn, places: Sequence[Place], results: Sequence[Place]) -> None:
        """Records the recipes of an equation's results, given the places of its operands and results."""
        self.set_recipes(eqn.outvars, None)
        self._has_picked = self._has_picked or any(map(is_picked, results))
        if not self._has_picked:
            return
        if equations.is_call(eqn):
            self._recipes.update(zip(eqn.outvars, [self.recipe(v) for v in equations.body(eqn).outvars], strict=True))
            return
        operand = places[0] if places else None
        name, atoms = eqn.primitive.name, eqn.invars
        for index, (var, place) in enumerate(zip(eqn.outvars, results, strict=True)):
            axes: frozenset[int] = frozenset()
            if is_picked(place) and isinstance(operand, Rows) and not operand.order:
                kept = [v for k, v in enumerate(atoms) if name != "dynamic_slice" or k != 1 + operand.axis]
                params = {} if name in ("split", "unstack") else _without(eqn.params, frozenset((operand.axis,)))
                key: Any = "row", "dynamic_slice" == name, tuple(map(self.recipe, kept)), _plain(params)
            elif isinstance(place, Shared) or is_picked(place):
                axes = frozenset((place.axis,)) if isinstance(place, Rows) else frozenset()
                if isinstance(place, Shared):
                    is_cut = name in ("slice", "dynamic_slice") and isinstance(operand, Shared)
                    axes = operand.uniform if is_cut else place.uniform  # pyright: ignore
                # A cut through numbers that are all equal along an axis may be anywhere.
                cuts = name == "dynamic_slice" and isinstance(operand, Shared)
                kept = [v for k, v in enumerate(atoms) if not (cuts and k and k - 1 in operand.uniform)]  # pyright: ignore
                if name == "unstack" and isinstance(operand, Shared) and eqn.params["axis"] in operand.uniform:
                    index = 0
                key = name, tuple(map(self.recipe, kept)), index, _plain(_without(eqn.params, axes))
            else:
                continue
            self._recipes[var] = self._numbered(key)
            self._parts[self._recipes[var]] = tuple(map(self.recipe, kept))

    def _numbered(self, key: Any) -> int:
        # Negative, so that no value number is equal to it.
        return self._numbers_of_recipes.setdefault(key, -1 - len(self._numbers_of_recipes))

    def reads(self, recipe: Any, value: Any) -> bool:
        """Returns whether numbers were computed from a value."""
        open_ones, seen = [recipe], set[Any]()
        while open_ones:
            one = open_ones.pop()
            if one == value:
                return True
            if one not in seen:
                seen.add(one)
                open_ones += self._parts[one] if one in self._parts else self.parts_of_value(one)
        return False


def _without(params: dict[str, Any], axes: frozenset[int]) -> dict[str, Any]:
    """Returns an equation's parameters without the sizes along some axes."""
    return {
        name: tuple(None if k in axes else x for k, x in enumerate(value)) if name in _SIZES and value else value
        for name, value in params.items()
    }


def _plain(value: Any) -> Any:
    """Returns something that can be compared, and is equal for equal parameters of equations."""
    if isinstance(value, dict):
        return tuple((name, _plain(part)) for name, part in sorted(value.items()))
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    if isinstance(value, core.Jaxpr):
        return str(value), tuple(map(id, value.consts))
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value
