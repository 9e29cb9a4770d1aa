"""Runs a function with a row in several batches, and compares the row's bits with the smallest batch."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, tree_util

from detjax.audit.comparison.divergence import ulps, unequal_bits

NEIGHBOURS: Final = ("other rows", "large numbers", "the row itself")
"""The other rows of a batch: other given rows; the same with floating-point numbers times -1000; copies of the compared
row."""


@dataclasses.dataclass(frozen=True)
class Counterexample:
    """A row with other bits in a batch than in the smallest one.

    Attributes:
        batch: the size of the batch; no smaller batch that was tried differs.
        alone: the size of the smallest batch.
        row: the index of the row among the given rows.
        position: its position in the batch.
        neighbours: the other rows; see `NEIGHBOURS`.
        result: the path of the result, "" for a single result.
        element: the first element of the row that differs.
        expected: the number in the smallest batch.
        given: the number in this batch.
        ulps: their distance in units in the last place of their dtype; for integers, their difference.
        dtype: their dtype.
        differing: the number of elements of the row that differ.
        elements: the number of elements of the row.
    """

    batch: int
    alone: int
    row: int
    position: int
    neighbours: str
    result: str
    element: tuple[int, ...]
    expected: float | int
    given: float | int
    ulps: int
    dtype: str
    differing: int
    elements: int

    def __str__(self) -> str:
        element = f"[{', '.join(map(str, self.element))}]" if self.element else ""
        return (
            f"row {self.row} at position {self.position} of a batch of {self.batch} (neighbours: {self.neighbours}): "
            f"result{self.result}{element} is {self.given!r}, but {self.expected!r} in a batch of {self.alone}: "
            f"{self.ulps} ulp of {self.dtype}; {self.differing} of {self.elements} elements of the row differ"
        )


@dataclasses.dataclass(frozen=True)
class Trial:
    """A batch with a row at a position among neighbours."""

    batch: int
    row: int
    position: int
    neighbours: str


def trials(batch: int, rows: int) -> Iterator[Trial]:
    """Yields the trials of a batch size: two rows, at the first, middle and last position, with all neighbours."""
    for row in range(min(rows, 2)):
        for position in sorted({0, batch // 2, batch - 1}):
            for neighbours in NEIGHBOURS[: 1 if batch == 1 else None]:
                yield Trial(batch, row, position, neighbours)


class Rows:
    """The given rows, which can be arranged in any batch."""

    def __init__(self, arrays: Sequence[Array], axes: Sequence[int | None]) -> None:
        self._arrays = list(arrays)
        self._axes = list(axes)

    def batch(self, trial: Trial) -> list[Array]:
        """Returns the arguments of a trial."""
        return [
            x if axis is None else self._rows(x, axis, trial) for x, axis in zip(self._arrays, self._axes, strict=True)
        ]

    @staticmethod
    def _rows(x: Array, axis: int, trial: Trial) -> Array:
        count = x.shape[axis]
        others = np.arange(trial.batch) + trial.row + 1 + trial.position
        order = np.where(np.arange(trial.batch) == trial.position, trial.row, others % count)
        if trial.neighbours == NEIGHBOURS[2]:
            order[:] = trial.row
        batch = x.take(order, axis=axis)
        if trial.neighbours != NEIGHBOURS[1] or not jnp.issubdtype(x.dtype, np.inexact):
            return batch
        is_other = np.arange(trial.batch) != trial.position
        shape = [trial.batch if k == axis % x.ndim else 1 for k in range(x.ndim)]
        return jnp.where(is_other.reshape(shape), batch * np.asarray(-1000, x.dtype), batch)


class Runs:
    """Compares a function's results for a row in several batches with the smallest batch."""

    def __init__(self, run: Callable[..., Any], rows: Rows, out_axes: Sequence[int | None], smallest: int) -> None:
        """Args:
        run: the compiled function of all arrays.
        rows: its arguments.
        out_axes: the axis of the rows in each array among its results; None: no rows, not compared.
        smallest: the smallest batch size.
        """
        self._run = run
        self._rows = rows
        self._out_axes = list(out_axes)
        self._smallest = smallest
        self._alone: dict[int, list[np.ndarray]] = {}

    def counterexample(self, trial: Trial) -> Counterexample | None:
        """Returns the first difference of a row from the same row in the smallest batch; None if all bits agree."""
        if trial.row not in self._alone:
            self._alone[trial.row] = self._row(Trial(self._smallest, trial.row, 0, NEIGHBOURS[0]))[1]
        paths, rows = self._row(trial)
        for path, given, expected in zip(paths, rows, self._alone[trial.row], strict=True):
            unequal = np.asarray(unequal_bits(given, expected))
            if not unequal.any():
                continue
            element = tuple(int(k) for k in np.unravel_index(int(unequal.argmax()), given.shape))
            return Counterexample(
                batch=trial.batch,
                alone=self._smallest,
                row=trial.row,
                position=trial.position,
                neighbours=trial.neighbours,
                result=path,
                element=element,
                expected=_number(expected[element]),
                given=_number(given[element]),
                ulps=_distance(given[element], expected[element]),
                dtype=str(given.dtype),
                differing=int(unequal.sum()),
                elements=unequal.size,
            )
        return None

    def _row(self, trial: Trial) -> tuple[list[str], list[np.ndarray]]:
        results = tree_util.tree_leaves_with_path(self._run(*self._rows.batch(trial)))
        paths, rows = [], []
        for (path, x), axis in zip(results, self._out_axes, strict=True):
            if axis is not None:
                x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
                paths.append(tree_util.keystr(path))
                rows.append(np.ascontiguousarray(np.take(np.asarray(x), trial.position, axis=axis)))
        return paths, rows


def _number(x: Any) -> float | int:
    if np.iscomplexobj(x):
        return float(x.real)
    return float(x) if _is_floating(x) else int(x)


def _distance(first: Any, second: Any) -> int:
    if np.iscomplexobj(first):
        return max(ulps(first.real, second.real), ulps(first.imag, second.imag))
    return ulps(first, second) if _is_floating(first) else abs(int(first) - int(second))


def _is_floating(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, np.floating)
