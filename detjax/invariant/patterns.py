"""Recognizes equations that together are an operation of `detjax.ops`.

A pattern is matched equation by equation: each must have the right primitive, axes, shapes and operands, and no other
equation may read an intermediate value.
"""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any, Final

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from detjax.invariant.equations import Program, aval


@dataclasses.dataclass(frozen=True, eq=False)
class Softmax:
    """Softmax over the last axis of a float32 array, with the indices of its equations, the result's last."""

    x: core.Var
    result: core.Var
    equations: tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Uses:
    """Definitions and uses of the values of a program.

    Attributes:
        makers: for each variable the index of the equation that computes it.
        readers: for each variable the indices of the equations that read it, once per read.
        count: the number of reads of each variable, by equations and as a result.
    """

    eqns: Sequence[core.JaxprEqn]
    makers: dict[Any, int]
    readers: dict[Any, list[int]]
    count: collections.Counter[Any]

    @classmethod
    def from_program(cls, program: Program) -> "Uses":
        """Returns the definitions and uses of a program."""
        readers: dict[Any, list[int]] = {}
        for index, eqn in enumerate(program.eqns):
            for atom in eqn.invars:
                if not isinstance(atom, core.Literal):
                    readers.setdefault(atom, []).append(index)
        count = collections.Counter({atom: len(indices) for atom, indices in readers.items()})
        count.update(atom for atom in program.results if not isinstance(atom, core.Literal))
        makers = {var: index for index, eqn in enumerate(program.eqns) for var in eqn.outvars}
        return cls(program.eqns, makers, readers, count)

    def maker(self, atom: Any) -> core.JaxprEqn | None:
        """Returns the equation that computes a value; None for literals, inputs and constants."""
        index = None if isinstance(atom, core.Literal) else self.makers.get(atom)
        return None if index is None else self.eqns[index]


_MAX_BETWEEN: Final = 3
"""Equations between the maximum and the subtraction: a maximum with -inf, the kept axis, and `stop_gradient`."""


def softmaxes(uses: Uses) -> list[Softmax]:
    """Returns the softmaxes of a program, as `jax.nn.softmax` writes them.

    The form is `exp(x - stop_gradient(max(x)))` divided by its sum. Sum and maximum are over the last axis, and no
    other equation reads the shifted values, their exponentials or their sums.
    """
    quotients = (index for index, eqn in enumerate(uses.eqns) if eqn.primitive.name == "div")
    matches = (_Match(uses).softmax(index) for index in quotients)
    return [match for match in matches if match is not None]


class _Match:
    """Matches the equations that end in a quotient, from the last to the first."""

    def __init__(self, uses: Uses) -> None:
        self._uses = uses
        self._taken: list[int] = []

    def softmax(self, quotient: int) -> Softmax | None:
        """Returns the softmax that ends in a division, if any."""
        eqn = self._uses.eqns[quotient]
        above, below = eqn.invars
        exponential = self._made(above, "exp", readers=2)
        spread = self._made(below, "broadcast_in_dim")
        if exponential is None or exponential.params["accuracy"] is not None or spread is None:
            return None
        total = self._made(spread.invars[0], "reduce_sum")
        if total is None or total.invars[0] is not above or not _keeps_last_axis(total, spread):
            return None
        shifted = self._made(exponential.invars[0], "sub")
        if shifted is None:
            return None
        x, largest = shifted.invars
        if isinstance(x, core.Literal) or not _is_softmax_of(x, eqn.outvars[0]):
            return None
        if not self._is_largest(largest, x):
            return None
        return Softmax(x, eqn.outvars[0], (*sorted(self._taken), quotient))

    def _made(self, atom: Any, primitive: str, readers: int = 1) -> core.JaxprEqn | None:
        """Returns the equation that computes a value, if it has this primitive and the value this number of readers."""
        eqn = self._uses.maker(atom)
        if eqn is None or eqn.primitive.name != primitive or self._uses.count[atom] != readers:
            return None
        self._taken.append(self._uses.makers[atom])
        return eqn

    def _is_largest(self, atom: Any, x: core.Var) -> bool:
        """Returns whether a value is the maximum over x's last axis, kept as an axis, under `stop_gradient`."""
        spread: core.JaxprEqn | None = None
        is_constant = False
        for _ in range(_MAX_BETWEEN + 1):
            if (eqn := self._made(atom, "reduce_max")) is not None:
                return is_constant and spread is not None and eqn.invars[0] is x and _keeps_last_axis(eqn, spread)
            if (eqn := self._made(atom, "stop_gradient")) is not None and not is_constant:
                is_constant = True
                atom = eqn.invars[0]
            elif (eqn := self._made(atom, "broadcast_in_dim")) is not None and spread is None:
                spread = eqn
                atom = eqn.invars[0]
            elif (eqn := self._made(atom, "max")) is not None:
                others = [v for v in eqn.invars if not _is_lowest(v)]
                if len(others) != 1:
                    return False
                (atom,) = others
            else:
                return False
        return False


def _keeps_last_axis(reduction: core.JaxprEqn, spread: core.JaxprEqn) -> bool:
    """Returns whether an equation reduces over the last axis, and another restores it with size 1."""
    shape = aval(reduction.invars[0]).shape
    return (
        tuple(reduction.params["axes"]) == (len(shape) - 1,)
        and tuple(spread.params["broadcast_dimensions"]) == tuple(range(len(shape) - 1))
        and tuple(spread.params["shape"]) == (*shape[:-1], 1)
    )


def _is_softmax_of(x: core.Var, result: core.Var) -> bool:
    """Returns whether two arrays are float32, of one shape, and not empty."""
    operand, output = aval(x), aval(result)
    is_float32 = operand.dtype == output.dtype == jnp.float32
    return is_float32 and operand.shape == output.shape and len(operand.shape) > 0 and 0 not in operand.shape


def _is_lowest(atom: Any) -> bool:
    return isinstance(atom, core.Literal) and np.ndim(atom.val) == 0 and bool(np.isneginf(atom.val))
