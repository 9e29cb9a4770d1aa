"""Runs each layer of a function with another run's inputs to it, to isolate the layer's own difference."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from detjax.audit.bisection import digests, flat_programs
from detjax.audit.bisection.flat_programs import FlatProgram, Key, Step
from detjax.audit.bisection.traces import Run, Trace
from detjax.audit.comparison.divergence import ulp_distances, unequal_bits
from detjax.invariant import equations
from detjax.invariant.places import Rows


@dataclasses.dataclass(frozen=True)
class IsolatedLayer:
    """The results of a layer of the second function for the first run's inputs to it.

    Attributes:
        layer: the names of its scopes; empty for equations outside of scopes.
        line: the user's line of its first equation, in the second function.
        compared: the number of results that were compared.
        unequal: the share of their elements with other bits than in the first run.
        ulps: their largest distance, in units in the last place.
    """

    layer: str
    line: str
    compared: int
    unequal: float
    ulps: int


@dataclasses.dataclass(frozen=True, eq=False)
class _Segment:
    """Consecutive steps of one layer, and the results that other steps read, by value number."""

    layer: str
    steps: tuple[Step, ...]
    results: dict[int, tuple[Step, int]]


def isolated_layers(first: Trace, second: Trace, rows: tuple[int, int] | None) -> Iterator[IsolatedLayer]:
    """Yields the results of each layer of the second function for the first run's inputs.

    Args:
        first: a trace with its function, not read from a file.
        second: another such trace.
        rows: a row of each run; None for all of them.

    Raises:
        ValueError: a trace has no function, or the two functions have different layers.
    """
    if first.run is None or second.run is None:
        raise ValueError("bisect: isolate needs both functions; accepted: traces of this process, not read from files")
    one, other = _segments(first.run.program), _segments(second.run.program)
    if [part.layer for part in one] != [part.layer for part in other]:
        k = next(
            (k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a.layer != b.layer),
            min(len(one), len(other)),
        )
        names = [repr(parts[k].layer) if k < len(parts) else "no layer" for parts in (one, other)]
        raise ValueError(
            f"bisect: isolate finds {names[0]} in the first function where the second has {names[1]}; accepted: "
            "functions with the same layers in the same order"
        )
    matched = [_matched(first.run, second.run, a, b) for a, b in zip(one, other, strict=True)]
    keys = {(step.number, k): None for pairs in matched for (step, k), _ in pairs.values()}
    row = None if rows is None else rows[0]
    expected = first.run.values(list(keys), [row] * len(keys))
    fed = {number: expected[step.number, k] for pairs in matched for number, ((step, k), _) in pairs.items()}
    results = _isolated(second.run, other, fed, None if rows is None else rows[1])
    for segment, pairs in zip(other, matched, strict=True):
        unequal, total, steps = 0, 0, 0
        for number in pairs:
            a, b = fed[number].reshape(-1), results[number].reshape(-1)
            total += a.size
            unequal += int(unequal_bits(a, b).sum())
            steps = max(steps, int(ulp_distances(a, b).max(initial=0)))
        yield IsolatedLayer(segment.layer, segment.steps[0].line, len(pairs), unequal / max(total, 1), steps)


def _segments(program: FlatProgram) -> list[_Segment]:
    """Returns the segments in order. A layer that is interrupted by another one has two."""
    segments = []
    for layer, group in itertools.groupby(program.steps, lambda step: step.layer):
        steps = tuple(group)
        keys = {number: (step, k) for step in steps for k, number in enumerate(step.outputs)}
        inside = {id(step) for step in steps}
        read = {
            atom
            for atom in (
                *(atom for step in program.steps if id(step) not in inside for atom in step.inputs),
                *program.results,
            )
            if isinstance(atom, int)
        }
        segments.append(_Segment(layer, steps, {number: key for number, key in keys.items() if number in read}))
    return segments


def _matched(
    first: Run, second: Run, one: _Segment, other: _Segment
) -> dict[int, tuple[tuple[Step, int], tuple[Step, int]]]:
    """Maps values that leave a segment of the second function to their counterparts; empty if they do not match."""
    sides = [
        {number: key for number, key in segment.results.items() if _is_hidden(run, *key)}
        for run, segment in ((first, one), (second, other))
    ]
    kinds = [[_kind(run, *key) for key in side.values()] for run, side in zip((first, second), sides, strict=True)]
    if kinds[0] != kinds[1]:
        return {}
    pairs = zip(sides[0].values(), sides[1].items(), strict=True)
    return {number: (key, other_key) for key, (number, other_key) in pairs}


def _is_hidden(run: Run, step: Step, k: int) -> bool:
    """Returns whether a value is a hidden state: floating-point numbers, of rows if the batch has several."""
    var = step.eqn.outvars[k]
    dtype = getattr(equations.aval(var), "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        return False
    return run.batch is None or run.batch == 1 or isinstance(step.places[k], Rows)


def _kind(run: Run, step: Step, k: int) -> tuple[int, str]:
    aval: Any = equations.aval(step.eqn.outvars[k])
    rows = run.batch if run.batch is not None and isinstance(step.places[k], Rows) else 1
    return aval.size // rows, str(aval.dtype)


def _isolated(run: Run, segments: list[_Segment], fed: dict[int, np.ndarray], row: int | None) -> dict[int, np.ndarray]:
    """Returns the results of every segment for values of the other run in `fed`, and its own run's other values."""
    places = {number: step.places[k] for part in segments for number, (step, k) in part.results.items()}

    def visit(step: Step, outputs: list[Any]) -> tuple[list[Any], dict[Key, Any]]:
        return run.sealed(step, outputs), {}

    def cut(x: Any, number: int) -> Any:
        rows = digests.in_rows(x, places[number], run.batch)
        return rows if row is None else rows[min(row, rows.shape[0] - 1)]

    def program(leaves: tuple[Any, ...], fed: dict[int, Any]) -> dict[int, Any]:
        env, results = run.program.begin(leaves), {}
        for segment in segments:
            inside = dict(env)
            read = {atom for step in segment.steps for atom in step.inputs if isinstance(atom, int)}
            for number in sorted(read & set(fed) & set(env)):
                inside[number] = lax.optimization_barrier(
                    _fed(env[number], places[number], run.batch, row, fed[number])
                )
            for step in segment.steps:
                flat_programs.run_step(step, env, visit)
                flat_programs.run_step(step, inside, visit)
            results |= {number: cut(inside[number], number) for number in segment.results if number in fed}
        return results

    return {number: np.asarray(x) for number, x in run.jit(program)(run.leaves, fed).items()}


def _fed(merged: Any, place: Any, batch: int | None, row: int | None, value: Any) -> Any:
    """Returns a value of this run with all rows, or one row, replaced by the other run's."""
    if not isinstance(place, Rows) or batch is None:
        return jnp.reshape(value, merged.shape)
    for number in range(batch) if row is None else (row,):
        merged = digests.with_row(merged, place, batch, number, value[number] if row is None else value)
    return merged
