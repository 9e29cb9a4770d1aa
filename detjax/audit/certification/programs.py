"""Compares the programs of one function for two batch sizes, and finds the first equation that differs.

A function may use its number of rows, in Python or through a shape. Then the program of one batch proves nothing for
another. Two programs are the same if they have the same equations in the same order, which read results of
corresponding equations, with the same parameters and constants. Sizes may be the same multiple of the batch size.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core

from detjax.audit.certification.contracts import contract_of
from detjax.invariant import equations
from detjax.invariant.equations import aval

_NAMES: Final = frozenset(("name", "debug_info", "jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd", "num_consts", "out_trees"))
"""Parameters that do not affect the computation, or that JAX creates for every trace."""


@dataclasses.dataclass(frozen=True)
class Change:
    """An equation of the second program that differs from the first program's, and the difference."""

    eqn: core.JaxprEqn
    why: str


class Comparison:
    """A comparison of programs for `first` and for `second` rows."""

    def __init__(self, first: int, second: int) -> None:
        self._sizes = first, second

    def change(self, first: core.Jaxpr, second: core.Jaxpr) -> Change | None:
        """Returns the first difference of the second program; None if the programs are the same."""
        batch, other = self._sizes
        numbers: tuple[dict[Any, int], dict[Any, int]] = ({}, {})

        def name(variables: Sequence[Any], known: dict[Any, int]) -> None:
            known.update((v, len(known) + k) for k, v in enumerate(variables))

        name(first.all_invars, numbers[0])
        name(second.all_invars, numbers[1])
        constants = all(map(self._is_same_array, first.consts, second.consts))
        is_alike = constants and len(first.consts) == len(second.consts) and self._alike(first.invars, second.invars)
        for one, two in zip(first.eqns, second.eqns, strict=False):
            if not is_alike:
                return Change(two, f"belongs to a program with other constants for {other} rows than for {batch}")
            if one.primitive is not two.primitive:
                why = f"is {two.primitive.name} for a batch of {other} and {one.primitive.name} for one of {batch}"
                return Change(two, why)
            if not self._alike(one.outvars, two.outvars) or not self._alike(one.invars, two.invars):
                return Change(two, f"has other shapes for a batch of {other} than for one of {batch}")
            contracts = contract_of(one), contract_of(two)
            if contracts[0] != contracts[1]:
                return Change(two, f"is under another contract for a batch of {other} than for one of {batch}")
            # Literals within an operation may come from its schedule.
            sees_literals = contracts[0] is None and not self._is_index(one, two, second)
            if (why := self._other_operand(one, two, numbers, sees_literals)) is not None:
                return Change(two, why)
            if contracts[0] is None and (within := self._other_parameter(one, two)) is not None:
                return within
            name(one.outvars, numbers[0])
            name(two.outvars, numbers[1])
        if len(first.eqns) != len(second.eqns):
            longer = max(first.eqns, second.eqns, key=len)
            eqn = longer[min(len(first.eqns), len(second.eqns))]
            rows = self._sizes[longer is second.eqns]
            return Change(eqn, f"exists for a batch of {rows}, but not for one of {batch + other - rows}")
        results = zip(first.outvars, second.outvars, strict=True)
        if second.eqns and any(_number(a, numbers[0]) != _number(b, numbers[1]) for a, b in results):
            return Change(second.eqns[-1], f"ends a program with other results for {other} rows than for {batch}")
        return None

    def _is_size(self, one: int, two: int) -> bool:
        """Returns whether two sizes are equal, or the same multiple of the batch size."""
        return one == two or one * self._sizes[1] == two * self._sizes[0]

    def _alike(self, first: Sequence[Any], second: Sequence[Any]) -> bool:
        """Returns whether arrays have the same dtypes, and the same shapes except for the number of rows."""
        if len(first) != len(second):
            return False
        for a, b in zip(map(aval, first), map(aval, second), strict=True):
            shapes = getattr(a, "shape", ()), getattr(b, "shape", ())
            if getattr(a, "dtype", None) != getattr(b, "dtype", None) or len(shapes[0]) != len(shapes[1]):
                return False
            if not all(map(self._is_size, *shapes)):
                return False
        return True

    def _other_operand(
        self,
        one: core.JaxprEqn,
        two: core.JaxprEqn,
        numbers: tuple[dict[Any, int], dict[Any, int]],
        sees_literals: bool,
    ) -> str | None:
        batch, other = self._sizes
        for a, b in zip(one.invars, two.invars, strict=True):
            first, second = _number(a, numbers[0]), _number(b, numbers[1])
            if first == second:
                continue
            if isinstance(a, core.Literal) and isinstance(b, core.Literal):
                if not sees_literals:
                    continue
                return f"computes with {b.val} for a batch of {other} and with {a.val} for one of {batch}"
            return f"reads other numbers for a batch of {other} than for one of {batch}"
        return None

    def _is_index(self, one: core.JaxprEqn, two: core.JaxprEqn, jaxpr: core.Jaxpr) -> bool:
        """Returns whether an equation adds the length of an axis to an index, as for negative indices."""
        if two.primitive.name != "add" or equations.is_inexact(two.outvars[0]):
            return False
        pairs = zip(one.invars, two.invars, strict=True)
        literals = [(a, b) for a, b in pairs if isinstance(a, core.Literal) and isinstance(b, core.Literal)]
        return all(self._is_size(int(a.val), int(b.val)) for a, b in literals) and _is_index(two.outvars[0], jaxpr)

    def _other_parameter(self, one: core.JaxprEqn, two: core.JaxprEqn) -> Change | None:
        batch, other = self._sizes
        for key in one.params.keys() | two.params.keys():
            if key in _NAMES:
                continue
            a, b = one.params.get(key), two.params.get(key)
            difference = self._other_value(a, b)
            if isinstance(difference, Change):
                return difference
            if difference:
                return Change(two, f"has another {key} for a batch of {other} than for one of {batch}")
        return None

    def _other_value(self, a: Any, b: Any) -> Change | bool:
        """Returns whether two values of a parameter differ; for programs, the difference."""
        if isinstance(a, core.Jaxpr) and isinstance(b, core.Jaxpr):
            return self.change(a, b) or False
        if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
            if len(a) != len(b):
                return True
            return next(filter(None, map(self._other_value, a, b)), False)
        if isinstance(a, (bool, np.bool_)) or isinstance(b, (bool, np.bool_)):
            return a is not b and bool(a != b)
        if isinstance(a, (int, np.integer)) and isinstance(b, (int, np.integer)):
            return not self._is_size(int(a), int(b))
        if isinstance(a, (float, np.floating)) and isinstance(b, (float, np.floating)):
            return repr(a) != repr(b)
        if isinstance(a, (np.ndarray, jax.Array)) and isinstance(b, (np.ndarray, jax.Array)):
            return not self._is_same_array(a, b)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            return a.keys() != b.keys() or next(filter(None, (self._other_value(a[k], b[k]) for k in a)), False)
        if type(a) is not type(b):
            return True
        if dataclasses.is_dataclass(a):
            pairs = ((getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
            return next(filter(None, (self._other_value(x, y) for x, y in pairs)), False)
        if isinstance(a, Callable) and not isinstance(a, type):
            return False  # created by a trace, with a jaxpr next to it
        try:
            return bool(a != b)
        except Exception:  # values that cannot be compared count as different
            return True

    def _is_same_array(self, a: Any, b: Any) -> bool:
        """Returns whether two constants have the same numbers where they overlap."""
        shapes = np.shape(a), np.shape(b)
        if len(shapes[0]) != len(shapes[1]) or not all(map(self._is_size, *shapes)):
            return False
        if isinstance(a, Tracer) or isinstance(b, Tracer) or jnp.issubdtype(a.dtype, jax.dtypes.extended):
            return True
        if a is b:
            return True
        both = tuple(slice(min(x, y)) for x, y in zip(*shapes, strict=True))
        first, second = (np.ascontiguousarray(np.asarray(x)[both]) for x in (a, b))
        return first.dtype == second.dtype and first.tobytes() == second.tobytes()


_READERS: Final = frozenset("gather scatter scatter-add scatter_add".split())
"""Primitives whose second operand is an array of indices."""
_INDEX_MOVES: Final = frozenset("select_n broadcast_in_dim reshape concatenate convert_element_type squeeze".split())


def _is_index(var: Any, jaxpr: core.Jaxpr) -> bool:
    """Returns whether a program reads a variable only as an index."""
    if any(var is result for result in jaxpr.outvars):
        return False
    for eqn in jaxpr.eqns:
        operands = [k for k, v in enumerate(eqn.invars) if v is var]
        is_read = operands == [1] and eqn.primitive.name in _READERS
        is_moved = operands and eqn.primitive.name in _INDEX_MOVES and all(_is_index(v, jaxpr) for v in eqn.outvars)
        if operands and not is_read and not is_moved:
            return False
    return True


def _number(atom: Any, numbers: dict[Any, int]) -> Any:
    """Returns an identity that is comparable between programs: a variable's number, or a literal's bytes."""
    if not isinstance(atom, core.Literal):
        return numbers[atom]
    return np.asarray(atom.val).tobytes(), str(getattr(aval(atom), "dtype", ""))
