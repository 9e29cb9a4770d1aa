"""Runs of a function with a row in several batches: whether the row's bits are those that it has alone."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, tree_util

from detjax.audit.comparison.divergence import ulps

NEIGHBOURS: Final = ("other rows", "large numbers", "the row itself")
"""What the other rows of a batch hold: what was given; the same with floating-point numbers times -1000; copies of the
row that is compared."""


@dataclasses.dataclass(frozen=True)
class Counterexample:
    """A row with other bits in a batch than in the smallest one.

    Attributes:
        batch: how many rows the batch has; no smaller one of those that were tried differs.
        alone: how many the smallest batch has.
        row: which of the given rows it is.
        position: where it stands in the batch.
        neighbours: what the other rows hold; see `NEIGHBOURS`.
        result: which result of the function, "" if it has one.
        element: the first element of the row that differs.
        expected: the number in the smallest batch.
        given: the number in this batch.
        ulps: their distance in units in the last place of their dtype; of integers, their difference.
        dtype: their dtype.
        differing: how many elements of the row differ.
        elements: how many it has.
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
        place = f"result{self.result}[{', '.join(map(str, self.element))}]" if self.element else f"result{self.result}"
        return (
            f"row {self.row} at position {self.position} of a batch of {self.batch} (neighbours: {self.neighbours}): "
            f"{place} is {self.given!r}, and {self.expected!r} in a batch of {self.alone}: {self.ulps} ulp of "
            f"{self.dtype}; {self.differing} of {self.elements} elements of the row differ"
        )


@dataclasses.dataclass(frozen=True)
class Trial:
    """A batch: where which row stands among which neighbours."""

    batch: int
    row: int
    position: int
    neighbours: str


def trials(batch: int, rows: int) -> Iterator[Trial]:
    """Yields the trials of one batch size: two rows, first, in the middle and last, among all kinds of neighbours."""
    for row in range(min(rows, 2)):
        for position in sorted({0, batch // 2, batch - 1}):
            for neighbours in NEIGHBOURS[: 1 if batch == 1 else None]:
                yield Trial(batch, row, position, neighbours)


class Rows:
    """The rows that a function was given, in any batch."""

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
    """A function's results for a row, in the smallest batch and in others."""

    def __init__(self, run: Callable[..., Any], rows: Rows, out_axes: Sequence[int | None], smallest: int) -> None:
        """Args:
        run: the compiled function of all arrays.
        rows: its arguments.
        out_axes: for each array among its results, the axis of its rows; None: it has none, and is not compared.
        smallest: the smallest batch.
        """
        self._run = run
        self._rows = rows
        self._out_axes = list(out_axes)
        self._smallest = smallest
        self._alone: dict[int, list[np.ndarray]] = {}

    def counterexample(self, trial: Trial) -> Counterexample | None:
        """Returns where a row differs from the same row in the smallest batch; None if no bit does."""
        if trial.row not in self._alone:
            self._alone[trial.row] = self._row(Trial(self._smallest, trial.row, 0, NEIGHBOURS[0]))[1]
        paths, made = self._row(trial)
        for path, given, expected in zip(paths, made, self._alone[trial.row], strict=True):
            unequal = np.asarray(_bits(given) != _bits(expected))
            unequal = unequal.reshape(*given.shape, -1).any(axis=-1)
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


def _bits(x: np.ndarray) -> np.ndarray:
    """The bytes of an array, in rows of an element."""
    return np.frombuffer(x.tobytes(), np.uint8).reshape(x.size, x.dtype.itemsize)


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
