"""Compares results: speed, bits that must be equal, and distances where nothing is promised."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from detjax.bench.results import MUCH_SPREAD, Result, ResultError, read, spread_text, spread_warning

COMPILED: Final = "compiled, not measured"
_LETTERS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_FLOATS: Final = ("bfloat16", "float16", "float32")


@dataclasses.dataclass(frozen=True)
class Bits:
    """A comparison of one case's bits in two results.

    Attributes:
        first: the label of the reference result.
        second: the label of the result compared with it.
        promised: whether bits must be equal, because fingerprints are equal and under contract.
        equal: whether all bits of all outputs are equal.
        ulp: the largest distance among the sampled floating-point numbers, in units in the last place of their dtype;
            None if a number is NaN in one result only.
        others: the number of sampled integers, such as tokens, that differ.
        missing: the reason why the two cannot be compared; then the other fields are meaningless.
    """

    first: str
    second: str
    promised: bool = False
    equal: bool = False
    ulp: int | None = 0
    others: int = 0
    missing: str | None = None

    @property
    def broken(self) -> bool:
        """True if promised bits differ."""
        return self.missing is None and self.promised and not self.equal

    @property
    def text(self) -> str:
        """The outcome in a few words, for the second result's row."""
        if self.missing is not None:
            return f"not comparable with {self.first}"
        if self.equal:
            return f"equal to {self.first}" + (", promised" if self.promised else "")
        distance = "NaN in one only" if self.ulp is None else f"{self.ulp:,} ulp"
        distance += f", {self.others} different tokens" if self.others else ""
        distance = distance if self.ulp != 0 or self.others else "0 ulp in the samples"
        return f"NOT EQUAL to {self.first}: {distance}" if self.promised else f"{distance} from {self.first}"


@dataclasses.dataclass(frozen=True)
class Line:
    """One case in all results.

    Attributes:
        operation: the operation, such as "matmul".
        name: the name of the case.
        cells: the case's row of each result that has one, by label.
        bits: a comparison for each measured result after the first.
    """

    operation: str
    name: str
    cells: Mapping[str, dict[str, Any]]
    bits: Sequence[Bits]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Several results side by side.

    Attributes:
        results: the results, by label, a letter.
        lines: a line for each case.
    """

    results: Mapping[str, Result]
    lines: Sequence[Line]

    @property
    def measured(self) -> dict[str, Result]:
        """The results with times and bits."""
        return {label: result for label, result in self.results.items() if result.kind == "measured"}

    @property
    def pairs(self) -> list[tuple[Line, Bits]]:
        """All possible comparisons of bits."""
        return [(line, bits) for line in self.lines for bits in line.bits if bits.missing is None]

    @property
    def broken(self) -> list[tuple[Line, Bits]]:
        """The comparisons whose promised bits differ."""
        return [(line, bits) for line, bits in self.pairs if bits.broken]

    @property
    def operations(self) -> dict[str, list[Line]]:
        """Lines by operation."""
        return {name: list(lines) for name, lines in itertools.groupby(self.lines, lambda line: line.operation)}

    @property
    def missing(self) -> dict[str, list[str]]:
        """The cases that cannot be compared, by reason."""
        cases: dict[str, list[str]] = {}
        for line in self.lines:
            reasons = [bits.missing for bits in line.bits if bits.missing is not None]
            reasons += [f"{label}: {row['failed']}" for label, row in line.cells.items() if "failed" in row]
            absent = [label for label in self.results if label not in line.cells]
            reasons += [f"not in {' and '.join(absent)}"] if absent else []
            for reason in dict.fromkeys(reasons):
                cases.setdefault(reason, []).append(f"{line.operation} {line.name}")
        return cases

    @property
    def warnings(self) -> list[str]:
        """A line for each result with disturbed times."""
        lines = (spread_warning(result.rows.values(), label) for label, result in self.measured.items())
        return [line for line in lines if line is not None]

    @property
    def verdict(self) -> str:
        """One sentence about bits."""
        promised = [bits for _, bits in self.pairs if bits.promised]
        if self.broken:
            return f"{len(self.broken)} of {len(promised)} results that must have equal bits differ"
        if promised:
            return f"All {len(promised)} results that must have equal bits are equal"
        if not self.pairs:
            return "No two results can be compared bit by bit"
        return "No two results must have equal bits: their fingerprints differ, or their backend promises nothing"

    @property
    def differing_fields(self) -> list[str]:
        """The names of the fingerprints' fields that differ."""
        values = [result.fingerprint for result in self.results.values()]
        return [name for name in values[0] if len({str(fields[name]) for fields in values}) > 1]


def compare(files: Sequence[Path]) -> Comparison:
    """Compares files of `run` and `compile`.

    Raises:
        ResultError: a file is not such a result, or the number of files is out of range.
    """
    if not 2 <= len(files) <= len(_LETTERS):
        raise ResultError(f"{len(files)} files; accepted: 2 to {len(_LETTERS)}")
    return compared([read(file) for file in files])


def compared(results: Sequence[Result]) -> Comparison:
    """Compares results."""
    labelled = dict(zip(_LETTERS, results, strict=False))
    names = dict.fromkeys(itertools.chain.from_iterable(result.rows for result in results))
    lines = []
    for key in names:
        cells = {label: result.rows[key] for label, result in labelled.items() if key in result.rows}
        row = next(iter(cells.values()))
        lines.append(Line(row["operation"], row["name"], cells, _compared_bits(labelled, cells)))
    order = {name: index for index, name in enumerate(dict.fromkeys(line.operation for line in lines))}
    return Comparison(labelled, sorted(lines, key=lambda line: order[line.operation]))


def _compared_bits(results: Mapping[str, Result], cells: Mapping[str, dict[str, Any]]) -> list[Bits]:
    """Compares each measured result with the first one of equal fingerprint, or else with the first result.

    Equality is transitive, so this detects every broken promise.
    """
    measured = [label for label, row in cells.items() if results[label].kind == "measured" and "failed" not in row]
    comparisons = []
    for index, second in enumerate(measured[1:], 1):
        result = results[second]
        same = (label for label in measured[:index] if results[label].fingerprint == result.fingerprint)
        first = next(same, None)
        promised = first is not None and result.under_contract
        first = first or measured[0]
        comparisons.append(_bits(first, second, cells[first], cells[second], promised))
    return comparisons


def _bits(first: str, second: str, a: dict[str, Any], b: dict[str, Any], promised: bool) -> Bits:
    missing = None
    if a["arguments"] != b["arguments"]:
        missing = f"{first} and {second} have arguments of different shapes"
    elif a["inputs"] != b["inputs"]:
        missing = f"{first} and {second} have different inputs"
    elif [_form(x) for x in a["outputs"]] != [_form(x) for x in b["outputs"]]:
        missing = f"{first} and {second} have results of different shapes or dtypes"
    if missing is not None:
        return Bits(first, second, missing=missing)
    equal = all(x["sha256"] == y["sha256"] for x, y in zip(a["outputs"], b["outputs"], strict=True))
    ulp: int | None = 0
    others = 0
    for x, y in zip(a["outputs"], b["outputs"], strict=True):
        if x["dtype"] in _FLOATS:
            distance = ulps(x["sample"], y["sample"], x["dtype"])
            ulp = None if ulp is None or distance is None else max(ulp, distance)
        else:
            others += sum(i != j for i, j in zip(x["sample"], y["sample"], strict=True))
    return Bits(first, second, promised, equal, ulp, others)


def _form(output: Mapping[str, Any]) -> tuple[Any, ...]:
    return output["dtype"], tuple(output["shape"]), len(output["sample"])


def ulps(a: Sequence[str], b: Sequence[str], dtype: str) -> int | None:
    """Returns the largest distance between floating-point numbers, in representable numbers of their dtype.

    Args:
        a: the bits of numbers, in hexadecimal.
        b: the bits of as many other numbers.
        dtype: the dtype of all numbers.

    Returns:
        The distance; None if a number is NaN and its counterpart is not.
    """
    bits, exponent = {"bfloat16": (16, 0x7F80), "float16": (16, 0x7C00), "float32": (32, 0x7F800000)}[dtype]
    words = [np.array([int(word, 16) for word in words], np.int64) for words in (a, b)]
    nan = [(x & ((1 << bits - 1) - 1)) > exponent for x in words]
    if (nan[0] != nan[1]).any():
        return None
    # Magnitudes are ordered like their bits as integers; both zeros map to the same integer.
    ordered = [np.where(x >> (bits - 1), -(x & ((1 << bits - 1) - 1)), x) for x in words]
    return int(np.where(nan[0], 0, np.abs(ordered[0] - ordered[1])).max(initial=0))


def report(comparison: Comparison) -> RenderableType:
    """Renders the list of results, the table, the cases that cannot be compared, and the verdict."""
    files = Table("", "file", "device", "backend", "fingerprint", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in files.columns:
        column.overflow = "fold"
    for label, result in comparison.results.items():
        files.add_row(label, result.file, result.chip, result.backend, result.digest)
    differing = comparison.differing_fields
    fields = Text(f"Fingerprints differ in: {', '.join(differing)}" if differing else "All fingerprints are equal")
    older = [
        Text(f"{label} is older: its release did not record {', '.join(result.unrecorded)}, so no bits are promised")
        for label, result in comparison.results.items()
        if result.unrecorded
    ]
    missing = [
        Text(f"Not compared, {reason}: " + (cases[0] if len(cases) == 1 else f"{len(cases)} cases, such as {cases[0]}"))
        for reason, cases in comparison.missing.items()
    ]
    verdict = Text(comparison.verdict, style="bold red" if comparison.broken else "bold")
    return Group(files, _table(comparison), fields, *older, *missing, *map(Text, comparison.warnings), verdict)


def _table(comparison: Comparison) -> Table:
    """A row for each case and result, so that any number of results fits."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", min_width=20)
    table.add_column("")
    for name in ("µs", "share", "× stock"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("bits and distances", min_width=16)
    for operation, lines in comparison.operations.items():
        table.add_row(f"[bold]{operation}")
        for line in lines:
            for index, (label, result) in enumerate(comparison.results.items()):
                bits = next((bits for bits in line.bits if bits.second == label), None)
                cells = _cells(result, line.cells.get(label), bits)
                style = "bold red" if bits is not None and bits.broken else None
                table.add_row(f"  {line.name}" if not index else "", label, *cells, style=style)
        table.add_section()
    return table


def _cells(result: Result, row: Mapping[str, Any] | None, bits: Bits | None) -> list[str]:
    if row is None:
        return ["", "", "", "missing"]
    if "failed" in row:
        return ["", "", "", "refused" if row.get("refused") else "FAILED"]
    if result.kind == "compiled":
        return ["", "", "", COMPILED]
    share, stock = row.get("share_of_peak"), row.get("speed_over_stock")
    is_disturbed = row["seconds"]["spread"] > MUCH_SPREAD
    return [
        f"{row['seconds']['median'] * 1e6:.1f}" + (f" {spread_text(row)}" if is_disturbed else ""),
        "" if share is None else f"{share:.0%}",
        "" if stock is None else f"{stock:.2f}",
        "" if bits is None else bits.text,
    ]
