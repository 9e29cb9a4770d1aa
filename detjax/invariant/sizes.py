"""Finds the numbers of a program that come from the number of rows, by comparing the programs of two batches."""

from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core

from detjax.invariant import equations
from detjax.invariant.equations import aval


class Sizes:
    """Literals, constants and axes of one program that differ in the program of another batch.

    Attributes:
        is_same: whether both programs have the same equations.
    """

    def __init__(self) -> None:
        self.is_same = True
        self._kept: list[core.Jaxpr] = []  # keeps the ids of their equations from being reused
        self._literals: set[tuple[int, int]] = set()
        self._constants: dict[int, list[core.Var]] = {}
        self._equations: set[int] = set()
        self._axes: dict[int, frozenset[int]] = {}

    @classmethod
    def between(cls, first: core.Jaxpr, second: core.Jaxpr) -> "Sizes":
        """Returns the numbers of the first program that differ in the second."""
        sizes = cls()
        sizes._kept = [first, second]
        sizes._compare(first, second)
        if not sizes.is_same:
            sizes._compare_lines(first, second)
        return sizes

    def is_literal(self, eqn: core.JaxprEqn, at: int) -> bool:
        """Returns whether the operand at an index is a literal that comes from the number of rows."""
        return (id(eqn), at) in self._literals

    def is_parameter(self, eqn: core.JaxprEqn) -> bool:
        """Returns whether a parameter of an equation comes from the number of rows, such as a scan's length."""
        return id(eqn) in self._equations

    def constants(self, jaxpr: core.Jaxpr) -> Sequence[core.Var]:
        """Returns the constants of a program that come from the number of rows."""
        return self._constants.get(id(jaxpr), ())

    def axes(self, eqn: core.JaxprEqn) -> frozenset[int]:
        """Returns the axes of an equation's first operand that grow with the number of rows."""
        return self._axes.get(id(eqn), frozenset())

    def _compare(self, first: core.Jaxpr, second: core.Jaxpr) -> None:
        if len(first.eqns) != len(second.eqns) or len(first.consts) != len(second.consts):
            self.is_same = False
            return
        for var, one, two in zip(first.constvars, first.consts, second.consts, strict=True):
            if _differ(one, two):
                self._constants.setdefault(id(first), []).append(var)
        for one, two in zip(first.eqns, second.eqns, strict=True):
            if one.primitive is not two.primitive or len(one.invars) != len(two.invars):
                self.is_same = False
                return
            for at, (a, b) in enumerate(zip(one.invars, two.invars, strict=True)):
                if isinstance(a, core.Literal) and isinstance(b, core.Literal) and _differ(a.val, b.val):
                    self._literals.add((id(one), at))
            if one.invars:
                shapes = (getattr(aval(eqn.invars[0]), "shape", ()) for eqn in (one, two))
                grown = frozenset(k for k, (x, y) in enumerate(zip(*shapes, strict=False)) if x != y)
                self._axes[id(one)] = self._axes.get(id(one), frozenset()) | grown
            if one.primitive.name in (*equations.ELEMENTWISE, "scan") and _parameters(one) != _parameters(two):
                self._equations.add(id(one))
            bodies = list(equations.bodies(one)), list(equations.bodies(two))
            if len(bodies[0]) != len(bodies[1]):
                self.is_same = False
                return
            for part, other in zip(*bodies, strict=True):
                self._compare(part, other)

    def _compare_lines(self, first: core.Jaxpr, second: core.Jaxpr) -> None:
        """Compares programs with different equations: records a line's literals that differ in the other program."""
        known = [_numbers_by_line(jaxpr) for jaxpr in (first, second)]
        for position, numbers in known[0].items():
            others = known[1].get(position, {})
            if others and numbers.keys() != others.keys():
                for operands in numbers.values():
                    self._literals.update((id(eqn), at) for eqn, at in operands)


_SCALARS: Final = (bool, int, float, np.integer, np.floating)


def _parameters(eqn: core.JaxprEqn) -> dict[str, Any]:
    return {name: value for name, value in eqn.params.items() if isinstance(value, _SCALARS)}


def _differ(one: Any, two: Any) -> bool:
    """Returns whether two numbers or arrays differ. Arrays of different shapes are compared where they overlap."""
    if one is two or isinstance(one, Tracer) or isinstance(two, Tracer):
        return False
    if isinstance(one, jax.Array) and jnp.issubdtype(one.dtype, jax.dtypes.extended):
        return False
    a, b = np.asarray(one), np.asarray(two)
    if a.ndim != b.ndim or a.dtype != b.dtype:
        return True
    both = tuple(slice(min(x, y)) for x, y in zip(a.shape, b.shape, strict=True))
    return np.ascontiguousarray(a[both]).tobytes() != np.ascontiguousarray(b[both]).tobytes()


def _numbers_by_line(jaxpr: core.Jaxpr) -> dict[Any, dict[str, list[tuple[core.JaxprEqn, int]]]]:
    """Maps each line, primitive and operand index to the literals there and the operands that hold them."""
    known: dict[Any, dict[str, list[tuple[core.JaxprEqn, int]]]] = {}
    for eqn in equations.all_equations(jaxpr):
        for at, atom in enumerate(eqn.invars):
            if isinstance(atom, core.Literal):
                position = equations.source_line(eqn), eqn.primitive.name, at
                known.setdefault(position, {}).setdefault(repr(atom.val), []).append((eqn, at))
    return known
