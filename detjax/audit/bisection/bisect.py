"""Finds the first equation at which two runs diverge, and how the difference grows from there."""

import dataclasses
import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from rich.table import Column, Table

from detjax.audit.bisection import digests
from detjax.audit.bisection.flat_programs import BACKWARD, FORWARD
from detjax.audit.bisection.isolation import IsolatedLayer, isolated_layers
from detjax.audit.bisection.traces import ARGUMENT, Entry, Trace
from detjax.audit.comparison.divergence import ulp_distances, unequal_bits

type Rows = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first difference between two runs.

    Attributes:
        primitive: the equation's primitive; "argument" if the functions' arguments differ.
        layer: the names of its scopes; an argument's own name.
        lines: the user's line in each function.
        iterations: the iterations of the surrounding scans, outermost first.
        row: the row in the first run, if all rows were compared; otherwise None.
        elements: the indices in a row of the first and last element of the first block that differs.
        index: the first element that differs; None for traces from files.
        values: its values in both runs; None for traces from files.
        ulps: their distance in units in the last place; None for traces from files and for integers.
        repeats: whether another run reproduced the digests; if not, the three fields above stay unset.
    """

    primitive: str
    layer: str
    lines: tuple[str, str]
    iterations: tuple[int, ...]
    row: int | None
    elements: tuple[int, int]
    index: tuple[int, ...] | None = None
    values: tuple[str, str] | None = None
    ulps: int | None = None
    repeats: bool = True

    def __str__(self) -> str:
        if self.primitive == ARGUMENT:
            source = f"argument {self.layer}, which differs between the runs"
        else:
            source = f"{self.primitive} in {self.layer or 'no named layer'}"
        if self.iterations:
            source += f", iteration {', '.join(map(str, self.iterations))}"
        if self.row is not None:
            source += f", row {self.row}"
        lines = [source]
        lines += [f"  at {' and '.join(dict.fromkeys(filter(None, self.lines)))}"] if any(self.lines) else []
        if self.index is not None and self.values is not None:
            distance = "" if self.ulps is None else f", {self.ulps} ulps apart"
            lines.append(f"  element {list(self.index)}: {self.values[0]} and {self.values[1]}{distance}")
        else:
            lines.append(f"  among elements {self.elements[0]} to {self.elements[1]} of the row")
        if not self.repeats:
            lines.append("  another run gave other bits: one of the functions is not reproducible")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Drift:
    """The difference between two runs after a layer. Traces from files have no numbers, so only `blocks` is known.

    Attributes:
        layer: the layer.
        primitive: its last primitive.
        iterations: the iterations of the surrounding scans.
        blocks: the share of blocks of its results that differ.
        largest: the largest difference of two numbers.
        relative: the root mean square of the differences, relative to the root mean square of the first run's numbers.
        ulps: the largest distance in units in the last place.
    """

    layer: str
    primitive: str
    iterations: tuple[int, ...]
    blocks: float
    largest: float | None = None
    relative: float | None = None
    ulps: int | None = None


@dataclasses.dataclass(frozen=True)
class Bisection:
    """The differences between two runs.

    Attributes:
        first: the first difference; None: all compared arrays have the same bits.
        drifts: the differences after each layer, in order.
        compared: the number of compared arrays; iterations of a scan count once.
        alone: the number of arrays of each run without a counterpart in the other.
        environments: the fields of the fingerprints that differ, with both values.
        hidden: whether results differ although all digests agree; False for traces from files. The cause is then a
            fusion that a trace prevents, such as a product and a sum in one instruction.
        isolated: the results of each layer of the second run for the first run's inputs, if requested.
    """

    first: Difference | None
    drifts: tuple[Drift, ...]
    compared: int
    alone: tuple[int, int]
    environments: Mapping[str, tuple[Any, Any]]
    hidden: bool = False
    isolated: tuple[IsolatedLayer, ...] | None = None

    def __str__(self) -> str:
        lines = [
            f"fingerprints differ in {name}: {one!r}, {other!r}" for name, (one, other) in self.environments.items()
        ]
        what = f"{self.compared} arrays were compared"
        if any(self.alone):
            what += f"; {self.alone[0]} and {self.alone[1]} have no counterpart"
        lines.append(what)
        lines.append("All have the same bits" if self.first is None else f"The runs diverge at {self.first}")
        if self.hidden:
            lines.append("Without digests the results differ: XLA fuses equations that digests keep separate")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Returns all fields as a JSON object."""
        return dataclasses.asdict(self)


def bisect(first: Trace, second: Trace, rows: Rows | None = None, *, isolate: bool = False) -> Bisection:
    """Returns the first difference between two runs, and how it grows from there.

    Equations of the two functions are matched in order by layer, primitive and size of a row; either function may have
    further equations. If neither trace is read from a file, both functions run once more to get the values.

    Args:
        first: a trace from `detjax.trace_digests` or `detjax.audit.Trace.load`.
        second: the other trace.
        rows: the row of the first run and the row of the second to compare. None: all rows; batch sizes must agree.
        isolate: whether to also run each layer of the second function with the first run's inputs to that layer. A
            difference that remains originates in the layer. Neither trace may be read from a file, and the functions
            must have the same layers in the same order. A scan over layers counts as one layer.

    Raises:
        ValueError: the batches differ in size and no `rows` are given, a row does not exist, or layers cannot be
            isolated.

    Example:
        >>> traced = detjax.trace_digests(lambda x: jnp.sin(x) + 1, batch_axes=0)
        >>> _, alone = traced(jnp.arange(1.0))
        >>> _, among = traced(jnp.arange(4.0))
        >>> print(detjax.bisect(alone, among, rows=(0, 0)).first)
        None
    """
    _check_rows(first, second, rows)
    pairs = _pairs(first, second)
    comparable = [(i, j) for i, j in pairs if _is_comparable(first, second, i, j, rows)]
    differing = []
    for i, j in comparable:
        unequal = _selected(first, i, rows, 0) != _selected(second, j, rows, 1)
        entry = first.entries[i]
        differing += [(_moment(entry.path, at), i, j, at) for at in _first_unequal(unequal, entry)]
    difference = None
    if differing:
        _, i, j, at = min(differing, key=lambda one: (one[1] >= _arguments(first), one[0], one[1]))
        difference = _difference(first, second, i, j, at, rows)
    fields = dict.fromkeys((*first.fingerprint, *second.fingerprint))
    both = {name: (first.fingerprint.get(name), second.fingerprint.get(name)) for name in fields}
    return Bisection(
        first=difference,
        drifts=tuple(_drifts(first, second, comparable, rows)),
        compared=len(comparable),
        alone=(len(first.entries) - len(comparable), len(second.entries) - len(comparable)),
        environments={name: pair for name, pair in both.items() if pair[0] != pair[1]},
        hidden=difference is None and _results_differ(first, second, rows),
        isolated=tuple(isolated_layers(first, second, rows)) if isolate else None,
    )


def _check_rows(first: Trace, second: Trace, rows: Rows | None) -> None:
    if rows is None and first.batch != second.batch:
        raise ValueError(
            f"bisect: the runs have {first.batch} and {second.batch} rows; accepted: equal numbers of rows, or "
            "rows=(i, j), a row of each run"
        )
    for trace, row in zip((first, second), rows or (), strict=False):
        if not 0 <= row < (trace.batch or 1):
            raise ValueError(f"bisect: rows contains {row}; accepted: 0 to {(trace.batch or 1) - 1}")


def _arguments(trace: Trace) -> int:
    return sum(entry.primitive == ARGUMENT for entry in trace.entries)


def _pairs(first: Trace, second: Trace) -> list[tuple[int, int]]:
    """Returns the indices of matching entries."""
    one, other = ([_kind(entry) for entry in trace.entries] for trace in (first, second))
    if one == other:
        return [(k, k) for k in range(len(one))]
    one, other = (
        [(*_kind(entry), entry.leaves_layer, math.prod(entry.shape), entry.dtype) for entry in trace.entries]
        for trace in (first, second)
    )
    matcher = difflib.SequenceMatcher(None, one, other, autojunk=False)
    pairs = [(a + k, b + k) for a, b, size in matcher.get_matching_blocks() for k in range(size)]
    return sorted([*pairs, *_other_ends(first, second, pairs)])


def _other_ends(first: Trace, second: Trace, pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yields pairs of unmatched results of layers, which the two functions compute by different primitives."""
    ends: list[dict[tuple[Any, ...], list[int]]] = [{}, {}]
    for side, trace in enumerate((first, second)):
        paired = {pair[side] for pair in pairs}
        for k, entry in enumerate(trace.entries):
            if entry.leaves_layer and k not in paired:
                loops = trace.digests[k].ndim
                ends[side].setdefault((entry.layer, math.prod(entry.shape), entry.dtype, loops), []).append(k)
    for kind, numbers in ends[0].items():
        yield from zip(numbers, ends[1].get(kind, ()), strict=False)


def _kind(entry: Entry) -> tuple[Any, ...]:
    return entry.layer, entry.primitive, entry.result, sum(part in (FORWARD, BACKWARD) for part in entry.path)


def _is_comparable(first: Trace, second: Trace, i: int, j: int, rows: Rows | None) -> bool:
    one, other = first.entries[i], second.entries[j]
    loops = first.digests[i].ndim - 2
    return (
        (rows is None or not (one.mixes_rows or other.mixes_rows))
        and math.prod(one.shape) == math.prod(other.shape)
        and one.dtype == other.dtype
        and first.digests[i].shape[:loops] == second.digests[j].shape[:loops]
    )


def _row(trace: Trace, i: int, rows: Rows | None, side: int) -> int | None:
    """Returns the row to compare; 0 for an array without rows; None for all rows."""
    if rows is None:
        return None
    return min(rows[side], trace.digests[i].shape[-2] - 1)


def _selected(trace: Trace, i: int, rows: Rows | None, side: int) -> np.ndarray:
    """Returns digests `[*iterations, B, blocks]` of the rows to compare."""
    row = _row(trace, i, rows, side)
    return trace.digests[i] if row is None else trace.digests[i][..., row : row + 1, :]


def _first_unequal(unequal: np.ndarray, entry: Entry) -> list[tuple[int, ...]]:
    """Returns the iterations, row and block of the first difference, if any."""
    positions = np.argwhere(unequal)
    if not len(positions):
        return []
    backward = [part == BACKWARD for part in entry.path if part in (FORWARD, BACKWARD)]
    order = [
        (*(-t if back else t for t, back in zip(at, backward, strict=False)), *at[len(backward) :]) for at in positions
    ]
    return [tuple(map(int, positions[min(range(len(order)), key=order.__getitem__)]))]


def _moment(path: Sequence[int], at: Sequence[int]) -> tuple[int, ...]:
    """Returns a sort key for the time at which an iteration of an equation is computed."""
    iterations = iter(at)
    return tuple(
        next(iterations) if part == FORWARD else -next(iterations) if part == BACKWARD else part for part in path
    )


def _difference(first: Trace, second: Trace, i: int, j: int, at: tuple[int, ...], rows: Rows | None) -> Difference:
    entry, other = first.entries[i], second.entries[j]
    *iterations, row, block = at
    elements = math.prod(entry.shape)
    size = digests.block_size(elements)
    difference = Difference(
        primitive=entry.primitive,
        layer=entry.layer,
        lines=(entry.line, other.line),
        iterations=tuple(iterations),
        row=row if rows is None and first.batch is not None and first.digests[i].shape[-2] > 1 else None,
        elements=(block * size, min(elements, (block + 1) * size) - 1),
    )
    if first.run is None or second.run is None:
        return difference
    pair = []
    for trace, number, side in ((first, i, 0), (second, j, 1)):
        chosen = _row(trace, number, rows, side)
        chosen = row if chosen is None else chosen
        value = _values(trace, [number], [chosen])[number][tuple(iterations)]
        expected = trace.digests[number][(*iterations, chosen)]
        if not np.array_equal(np.asarray(digests.digest(jnp.asarray(value)[None]))[0], expected):
            return dataclasses.replace(difference, repeats=False)
        pair.append(value)
    a, b = (value.reshape(-1) for value in pair)
    offset = int(np.flatnonzero(unequal_bits(a, b))[0])
    shape = pair[0].shape if (first.batch or 1) >= (second.batch or 1) else pair[1].shape
    return dataclasses.replace(
        difference,
        index=tuple(int(k) for k in np.unravel_index(offset, shape)),
        values=(str(a[offset]), str(b[offset])),
        ulps=int(ulp_distances(a[offset : offset + 1], b[offset : offset + 1])[0]) if _is_real(entry) else None,
    )


def _values(trace: Trace, numbers: Sequence[int], rows: Sequence[int | None]) -> dict[int, np.ndarray]:
    """Runs the function again and returns the values of entries, by index."""
    assert trace.run is not None
    count = _arguments(trace)
    steps = {n: trace.run.keys[n - count] for n in numbers if n >= count}
    results = trace.run.values(list(steps.values()), [row for n, row in zip(numbers, rows, strict=True) if n >= count])
    values = {n: results[key] for n, key in steps.items()}
    for n, row in zip(numbers, rows, strict=True):
        if n < count:
            values[n] = trace.run.argument(n, row)
    return values


def _results_differ(first: Trace, second: Trace, rows: Rows | None) -> bool:
    """Returns whether the results differ in programs that compute nothing else."""
    if first.run is None or second.run is None:
        return False
    results = []
    for run, row in zip((first.run, second.run), rows or (None, None), strict=True):
        values = run.values(run.results, [row] * len(run.results), is_sealed=False)
        results.append([values[key].reshape(-1) for key in run.results])
    pairs = ((a, b) for a, b in zip(*results, strict=False) if a.shape == b.shape and a.dtype == b.dtype)
    return any(unequal_bits(a, b).any() for a, b in pairs)


def _is_real(entry: Entry) -> bool:
    return jnp.issubdtype(jnp.dtype(entry.dtype), jnp.floating) and jnp.dtype(entry.dtype).itemsize > 1


def _drifts(first: Trace, second: Trace, pairs: Sequence[tuple[int, int]], rows: Rows | None) -> Iterator[Drift]:
    """Yields the differences between the runs after each layer."""
    last = {}
    for i, j in pairs:
        entry = first.entries[i]
        if entry.leaves_layer and _is_real(entry):
            last[entry.layer, entry.path[:-1]] = i, j
    ends = list(last.values())
    values: list[dict[int, np.ndarray]] = []
    if first.run is not None and second.run is not None:
        for trace, side in ((first, 0), (second, 1)):
            numbers = [pair[side] for pair in ends]
            values.append(_values(trace, numbers, [_row(trace, n, rows, side) for n in numbers]))
    moments = []
    for i, j in ends:
        entry = first.entries[i]
        one, other = _selected(first, i, rows, 0), _selected(second, j, rows, 1)
        for at in np.ndindex(*one.shape[:-2]):
            drift = Drift(entry.layer, entry.primitive, at, float((one[at] != other[at]).mean()) if one.size else 0.0)
            if values:
                distances = _distances(values[0][i][at].reshape(-1), values[1][j][at].reshape(-1))
                drift = dataclasses.replace(drift, **distances)
            moments.append((_moment(entry.path, at), i, drift))
    yield from (drift for _, _, drift in sorted(moments, key=lambda one: one[:2]))


def _distances(first: np.ndarray, second: np.ndarray) -> dict[str, Any]:
    """Returns the distances between two arrays `[n]`, by the names of fields of `Drift`."""
    one, other = first.astype(np.float64), second.astype(np.float64)
    same = ~unequal_bits(first, second)
    with np.errstate(invalid="ignore", over="ignore"):
        distance = np.where(same, 0.0, np.abs(one - other))
        size = float(np.sqrt(np.mean(np.square(one)))) if one.size else 0.0
        root = float(np.sqrt(np.mean(np.square(distance)))) if one.size else 0.0
    relative = 0.0 if root == 0 else root / size if size else math.inf
    steps = int(ulp_distances(first, second).max(initial=0))
    return {"largest": float(distance.max(initial=0.0)), "relative": relative, "ulps": steps}


def drift_table(bisection: Bisection) -> Table:
    """Returns a table of the differences after each layer; without numbers for traces from files."""
    measured = any(drift.relative is not None for drift in bisection.drifts)
    numbers = ("relative", "largest", "ulps") if measured else ()
    columns = Column("layer", overflow="fold"), "iteration", "unequal blocks", *numbers
    lines = Table(*columns, title="Differences after layers")
    for drift in bisection.drifts:
        values = (f"{getattr(drift, name):.3g}" for name in numbers)
        iteration = ", ".join(map(str, drift.iterations))
        lines.add_row(drift.layer or "(no name)", iteration, f"{drift.blocks:.1%}", *values)
    return lines


def isolation_table(layers: Sequence[IsolatedLayer]) -> Table:
    """Returns a table of the layers that were run with the inputs of the other run."""
    layer = Column("layer", overflow="fold")
    lines = Table(layer, "arrays", "unequal elements", "ulps", "", title="Layers with the inputs of the first run")
    for one in layers:
        verdict = "not compared" if not one.compared else "differs" if one.unequal else "the same bits"
        lines.add_row(one.layer or "(no name)", str(one.compared), f"{one.unequal:.2%}", str(one.ulps), verdict)
    return lines
