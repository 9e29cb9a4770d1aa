"""Norms, gates, decays and rates of single rows on Hopper GPUs (Mosaic GPU).

A CTA is one warpgroup that loads its rows into registers, as in `norm`, and computes a function of them there, so each
array is read once and written once. The steps of a function and their roundings are specified by
`detjax.portable.row_functions`.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import PyTree

from detjax.contract import ACCUMULATOR, LANE_GROUP, LANES
from detjax.operands.numerics import LOWEST, ceil_div
from detjax.pallas.hopper import device
from detjax.pallas.hopper.device import WARPGROUP
from detjax.pallas.hopper.mosaic.tiles import fma
from detjax.pallas.hopper.mosaic.vectors import log1p
from detjax.pallas.hopper.rows import (
    NO_AUTO_BARRIERS,
    broadcast,
    layout,
    load_weight,
    logistic,
    rounded_squares,
    row_sums,
)
from detjax.portable import row_functions as portable
from detjax.runtime import compilation

type Arrays = tuple[Array, ...]

MIN_COLUMNS: Final = 16
"""Least power of two that must divide a width for a kernel to serve it."""

MAX_HELD: Final = 48
"""Most elements of rows that a thread holds."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """The rows that a function takes."""

    rows: int
    width: int
    arrays: int
    """Input arrays of such rows."""
    elementwise: bool = False
    """True if columns are independent, so that each CTA takes one piece of its rows."""

    @property
    def columns(self) -> int:
        """Columns of a piece: the largest power of two that divides the width, up to a warpgroup's columns."""
        return min(LANES, self.width & -self.width)

    @property
    def threads(self) -> int:
        """Threads that share a row."""
        return self.columns // LANE_GROUP

    @property
    def pieces(self) -> int:
        """Pieces of a row."""
        return self.width // self.columns

    @property
    def held(self) -> int:
        """Elements that a thread holds of the rows that the warpgroup processes at the same time."""
        return self.arrays * LANE_GROUP * (1 if self.elementwise else self.pieces)

    @property
    def served(self) -> bool:
        """True if a kernel serves the problem."""
        return self.columns >= MIN_COLUMNS and self.held <= MAX_HELD


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The distribution of rows over CTAs; no bit depends on it."""

    turns: int
    """Sets of rows of a CTA; the warpgroup processes the rows of a set at the same time."""

    def __post_init__(self) -> None:
        """Raises ValueError if the schedule fits no problem."""
        if self.turns < 1:
            raise ValueError(f"Schedule: turns is {self.turns}; accepted: 1 or more")

    def rows_at_once(self, problem: Problem) -> int:
        """Returns the rows that the warpgroup processes at the same time."""
        return min(WARPGROUP // problem.threads, 1 << (problem.rows.bit_length() - 1))

    def rows(self, problem: Problem) -> int:
        """Returns the rows of a CTA."""
        return self.turns * self.rows_at_once(problem)

    def check(self, problem: Problem) -> None:
        """Raises ValueError if a kernel of this schedule cannot compute the problem."""
        if problem.rows < self.rows(problem):
            raise ValueError(
                f"Schedule: {self.rows(problem)} rows of a CTA; accepted: at most the {problem.rows} rows of the "
                "problem. Take fewer turns"
            )
        if self.turns * problem.held > MAX_HELD:
            raise ValueError(
                f"Schedule: {self.turns * problem.held} elements of rows in the registers of a thread; accepted: at "
                f"most {MAX_HELD}. Take fewer turns"
            )


def default_schedule(problem: Problem) -> Schedule:
    """Returns the schedule for a problem: with many rows, a CTA loads several sets before it computes."""
    turns = max(1, MAX_HELD // problem.held)
    while turns > 1 and problem.rows < 8 * device.multiprocessors() * Schedule(turns).rows(problem):
        turns //= 2
    return Schedule(turns)


def problem_of(rows: Arrays, function: str) -> Problem | None:
    """Returns the problem of a function's kernel, or None if the portable program serves it.

    The choice does not depend on the number of rows, so a row meets the same program in every phase.
    """
    arrays = rows[0].shape[1] if function == "weighted_sum" else sum(x.shape == rows[0].shape for x in rows)
    problem = Problem(rows[0].shape[0], rows[0].shape[-1], arrays, function in _ELEMENTWISE)
    # For other widths the mean is a product with a reciprocal, which XLA may fuse with the addition of epsilon.
    exact = function != "gated_rms_norm" or problem.width & (problem.width - 1) == 0
    return problem if function in _FUNCTIONS and exact and problem.served else None


def forward(
    rows: Arrays, weights: Arrays, *, function: str, schedule: Schedule | None = None, **options: Any
) -> PyTree[Array]:
    """Returns the results `[M, ...]` of a function for rows `[M, ...]`; see `detjax.portable.row_functions.forward`."""
    problem = problem_of(rows, function)
    if problem is None:
        compilation.require_pinned_program(function)
        return portable.forward(rows, weights, function=function, **options)
    schedule = schedule or default_schedule(problem)
    schedule.check(problem)
    dtypes = (ACCUMULATOR, ACCUMULATOR) if function == "decay_and_rate" else (rows[0].dtype,)
    results = _kernel(problem, schedule, functools.partial(_FUNCTIONS[function], **options), rows, weights, dtypes)
    first, *others = results
    return results if others else first


def backward(
    rows: Arrays,
    weights: Arrays,
    sums: tuple[Array | None, ...],
    gradients: PyTree[Array],
    *,
    function: str,
    **options: Any,
) -> tuple[Arrays, Arrays]:
    """Returns the gradients; see `detjax.portable.row_functions.backward`, which computes them."""
    compilation.require_pinned_program(function)
    return portable.backward(rows, weights, sums, gradients, function=function, **options)


def _kernel(
    problem: Problem,
    schedule: Schedule,
    function: Callable[..., Sequence[list[Array]]],
    rows: Arrays,
    weights: Arrays,
    dtypes: Sequence[Any],
) -> tuple[Array, ...]:
    """Returns the results `[M, width]` of the function in these dtypes."""
    name: str = function.func.__name__.strip("_")  # pyright: ignore

    def body(*refs: Any) -> None:
        operands, results = refs[: -len(dtypes)], refs[-len(dtypes) :]
        first = jnp.minimum(lax.axis_index("tile") * schedule.rows(problem), problem.rows - schedule.rows(problem))
        at_once = schedule.rows_at_once(problem)
        turns = [_Rows(problem, at_once, first + turn * at_once) for turn in range(schedule.turns)]
        loaded = [turn.load_all(operands[: len(rows)]) for turn in turns]
        for turn, arrays in zip(turns, loaded, strict=True):
            shared = [turn.load_weight(ref) for ref in operands[len(rows) :]]
            for ref, result in zip(results, function(turn, *arrays, *shared), strict=True):
                turn.store(ref, result)

    return tuple(
        plgpu.kernel(
            body,
            out_type=[jax.ShapeDtypeStruct((problem.rows, problem.width), dtype) for dtype in dtypes],
            grid=(ceil_div(problem.rows, schedule.rows(problem)), problem.pieces if problem.elementwise else 1),
            grid_names=("tile", "piece"),
            kernel_name=name,
            compiler_params=NO_AUTO_BARRIERS,
        )(*rows, *weights)
    )


class _Rows:
    """Rows that a warpgroup processes at the same time, in float32 pieces of `problem.columns` columns."""

    def __init__(self, problem: Problem, count: int, first: Array) -> None:
        self.width = problem.width
        self.shape = count, problem.columns
        self.layout = layout(count, problem.threads)
        self.here = pl.ds(first, count)
        starts = [lax.axis_index("piece")] if problem.elementwise else range(problem.pieces)
        self.pieces = [pl.ds(start * problem.columns, problem.columns) for start in starts]

    def load_all(self, refs: Sequence[Any]) -> list[Any]:
        """Returns the pieces of arrays `[M, width]`. For `[M, n, width]` and `[M, n]`, returns the pieces of each of
        the n rows, and for each of the n numbers a piece that repeats it."""
        first, *others = refs
        if len(first.shape) == 3:
            (factors,) = others
            return [[self.load(first, index) for index in range(first.shape[1])], self.load_columns(factors)]
        return [self.load(ref) if ref.shape[1] == self.width else self.load_columns(ref) for ref in refs]

    def load(self, ref: Any, *index: int) -> list[Array]:
        places = (ref.at[(self.here, *index, piece)] for piece in self.pieces)
        return [plgpu.load(place, layout=self.layout, optimized=False).astype(ACCUMULATOR) for place in places]

    def load_columns(self, ref: Any) -> list[Array]:
        """Returns for each column of `[M, n]` a piece that repeats it."""
        columns = [
            plgpu.load(ref.at[self.here, index], layout=self.layout.reduce(1), optimized=False)
            for index in range(ref.shape[1])
        ]
        return [self.spread(column.astype(ACCUMULATOR)) for column in columns]

    def load_weight(self, ref: Any) -> list[Array]:
        """Returns the pieces of a vector, repeated in every row."""
        return [load_weight(ref.at[piece], 0.0, self.shape, self.layout) for piece in self.pieces]

    def store(self, ref: Any, result: list[Array]) -> None:
        for piece, part in zip(self.pieces, result, strict=True):
            ref[self.here, piece] = part.astype(ref.dtype)

    def spread(self, numbers: Array) -> Array:
        """Returns a piece that repeats each row's number in every column."""
        return broadcast(numbers, self.shape, 0, self.layout)

    def squares(self, x: list[Array]) -> Array:
        return row_sums([rounded_squares(part) for part in x])

    def mean(self, total: Array) -> Array:
        """Returns `total / width` as XLA divides by a constant, rounded before anything is added to it."""
        # XLA multiplies by the reciprocal. The explicit fma with 0 is one instruction that rounds the product, so that
        # ptxas cannot fuse it with the addition of epsilon.
        number = self.layout.reduce(1)
        reciprocal, zero = (plgpu.layout_cast(jnp.full_like(total, c), number) for c in (1 / np.float32(self.width), 0))
        # fma(-0, r, +0) is +0, so zeros keep their sign by the selection.
        return jnp.where(total == 0, total, fma(total, reciprocal, zero, layout=number))


def _l2_norm(rows: _Rows, x: list[Array], *, eps: float) -> Sequence[list[Array]]:
    scale = rows.spread(lax.rsqrt(rows.squares(x) + eps))
    return ([part * scale for part in x],)


def _gated_rms_norm(
    rows: _Rows, x: list[Array], gate: list[Array], weight: list[Array], *, eps: float
) -> Sequence[list[Array]]:
    scale = rows.spread(lax.rsqrt(rows.squares(x) / rows.width + eps))
    normalized = [part * scale * w for part, w in zip(x, weight, strict=True)]
    return ([part * (g * logistic(g)) for part, g in zip(normalized, gate, strict=True)],)


def _sigmoid_gated(rows: _Rows, x: list[Array], gate: list[Array]) -> Sequence[list[Array]]:
    gate = [logistic(part) for part in gate]
    return ([part * g for part, g in zip(x, gate if len(gate) == len(x) else gate * len(x), strict=True)],)


def _decay_and_rate(
    rows: _Rows, a: list[Array], b: list[Array], log_rate: list[Array], bias: list[Array]
) -> Sequence[list[Array]]:
    def softplus(x: Array) -> Array:
        return jnp.maximum(x, 0.0) + log1p(jnp.exp(-jnp.abs(x)), layout=rows.layout)

    pieces = zip(a, log_rate, bias, strict=True)
    return [-jnp.exp(log) * softplus(part + bias) for part, log, bias in pieces], [logistic(part) for part in b]


def _layer_norm(
    rows: _Rows, x: list[Array], weight: list[Array], bias: list[Array], *, eps: float
) -> Sequence[list[Array]]:
    mean = rows.spread(rows.mean(row_sums(x)))
    centered = [part - mean for part in x]
    scale = rows.spread(lax.rsqrt(rows.mean(rows.squares(centered)) + eps))
    pieces = zip(centered, weight, bias, strict=True)
    return ([jnp.maximum(part * scale * w, LOWEST) + b for part, w, b in pieces],)


def _weighted_sum(rows: _Rows, x: list[list[Array]], factors: list[Array]) -> Sequence[list[Array]]:
    terms = [[jnp.maximum(part * f, LOWEST) for part in parts] for parts, f in zip(x, factors, strict=True)]
    return ([functools.reduce(jnp.add, parts) for parts in zip(*terms, strict=True)],)


_FUNCTIONS: Final[Mapping[str, Callable[..., Sequence[list[Array]]]]] = {
    "l2_norm": _l2_norm,
    "gated_rms_norm": _gated_rms_norm,
    "sigmoid_gated": _sigmoid_gated,
    "decay_and_rate": _decay_and_rate,
    "layer_norm": _layer_norm,
    "weighted_sum": _weighted_sum,
}
_ELEMENTWISE: Final = frozenset({"sigmoid_gated", "decay_and_rate", "weighted_sum"})
"""The functions whose columns are independent of one another."""
