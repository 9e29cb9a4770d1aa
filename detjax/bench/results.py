"""The files that `run` and `compile` write and `compare` reads."""

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from rich import box
from rich.table import Column, Table

from detjax.bench import provenance
from detjax.bench.cases import Case
from detjax.bench.failures import reason
from detjax.bench.fitting import FittedTable
from detjax.bench.peaks import Peak
from detjax.runtime.backends import STOCK
from detjax.runtime.fingerprints import Fingerprint

FORMAT: Final = "detjax bench"
VERSION: Final = 1

type Kind = Literal["measured", "compiled"]

KINDS: Final[Mapping[str, str]] = {"measured": "run", "compiled": "compile"}
"""The command that writes each kind of file."""
ACCEPTED: Final = "files that `python -m detjax.bench run --out` and `compile --out` write"

MUCH_SPREAD: Final = 0.5
"""Rounds whose spread is a larger share of their median were disturbed."""

SAMPLED: Final = 64
"""The number of sampled elements of each output."""


class ResultError(ValueError):
    """A file that `compare` does not accept."""


@dataclasses.dataclass(frozen=True)
class Result:
    """The content of a file.

    Attributes:
        file: its path.
        kind: measured or compiled.
        created: the UTC time of creation.
        command: the command that wrote it.
        commit: the commit of the code, see `provenance.commit`; None: unknown.
        fingerprint: the fields of a `Fingerprint`.
        device: kind, platform, number and memory of the devices.
        peak: the fields of the device's `Peak`, if known.
        settings: the options of the command.
        versions: the versions of libraries.
        rows: the row of each case, by operation and name.
        unrecorded: the fingerprint's fields that the writing release did not record.
    """

    file: str
    kind: Kind
    created: str
    command: str
    commit: str | None
    fingerprint: dict[str, Any]
    device: dict[str, Any]
    peak: dict[str, Any] | None
    settings: dict[str, Any]
    versions: dict[str, str]
    rows: dict[str, dict[str, Any]]
    unrecorded: tuple[str, ...] = ()

    @property
    def backend(self) -> str:
        """The name of the backend."""
        return self.fingerprint["backend"]

    @property
    def digest(self) -> str:
        """The digest of the fingerprint."""
        return Fingerprint(**self.fingerprint).digest

    @property
    def under_contract(self) -> bool:
        """True if equal fingerprints promise equal bits. Unrecorded fields may differ, so they void the promise."""
        return self.kind == "measured" and self.backend != STOCK and not self.unrecorded

    @property
    def chip(self) -> str:
        """A short name of the device."""
        if self.peak:
            return self.peak["chip"]
        return "CPU" if self.device.get("platform") == "cpu" else self.device["kind"]


@dataclasses.dataclass(frozen=True)
class Header:
    """The fields of a file before its rows.

    Attributes:
        kind: measured or compiled.
        command: the command that writes the file.
        fingerprint: the fingerprint of the measured or compiled programs.
        device: kind, platform, number and memory of the devices.
        peak: the device's peak rates; None: unknown.
        settings: the options of the command.
    """

    kind: Kind
    command: str
    fingerprint: Fingerprint
    device: Mapping[str, Any]
    peak: Peak | None
    settings: Mapping[str, Any]


def write(file: Path | None, header: Header, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns a file's content as JSON values, and writes it to `file` if not None."""
    content = {
        "format": FORMAT,
        "version": VERSION,
        "kind": header.kind,
        **provenance.heading(header.command, header.fingerprint),
        "device": dict(header.device),
        "peak": None if header.peak is None else dataclasses.asdict(header.peak),
        "settings": dict(header.settings),
        "rows": list(rows),
    }
    if file is not None:
        provenance.write(file, content)
    return json.loads(json.dumps(content))


def gather(
    file: Path | None,
    header: Header,
    cases: Iterable[Case],
    measure: Callable[[Case], dict[str, Any]],
    report: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Measures each case, and returns the file's content. Writes it after each case, so aborted runs keep their rows.

    Args:
        file: the JSON file to write, if any.
        measure: returns the fields of a case's row, see `row`.
        report: called with each row.
    """
    rows: list[dict[str, Any]] = []
    content = write(file, header, rows)
    for case in cases:
        rows.append(row(case, measure))
        report(rows[-1])
        content = write(file, header, rows)
    return content


def row(case: Case, measure: Callable[[Case], dict[str, Any]]) -> dict[str, Any]:
    """Returns a case's description with its measurements or the reason of its failure, which does not end the run."""
    head = {"operation": case.operation, "name": case.name, "arguments": case.arguments}
    head |= {"bytes": case.bytes, "flops": case.flops}
    try:
        return head | measure(case)
    except Exception as failure:
        return head | {"failed": reason(failure), "refused": isinstance(failure, NotImplementedError | TypeError)}


def table_by_operation(
    title: str,
    rows: Iterable[Mapping[str, Any]],
    columns: tuple[Sequence[str], Column],
    cells: Callable[[Mapping[str, Any]], list[str]],
    optional: Sequence[str] = (),
) -> FittedTable:
    """Returns a table with a section per operation and a line per case.

    Args:
        columns: the names of the numeric columns, and the last column, which is text.
        cells: returns the cells of a row, one per column.
        optional: numeric columns that may be dropped if space is short, in this order.
    """
    numbers, last = columns
    lines = list(rows)

    def table(left_out: Collection[str]) -> Table:
        right = [Column(name, justify="right", no_wrap=True) for name in numbers if name not in left_out]
        shown = [*(name not in left_out for name in numbers), True]
        table = Table(
            Column(no_wrap=True), *right, last, title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
        )
        operation = None
        for row in lines:
            if row["operation"] != operation:
                operation = row["operation"]
                table.add_section()
                table.add_row(f"[bold]{operation}")
            table.add_row(f"  {row['name']}", *itertools.compress(cells(row), shown))
        return table

    return FittedTable(table, optional)


def spread_text(row: Mapping[str, Any]) -> str:
    """Returns the spread of a case's rounds as a share of their median, highlighted if it is large."""
    spread = row["seconds"]["spread"]
    return f"[bold yellow]±{spread:.0%}[/]" if spread > MUCH_SPREAD else f"±{spread:.0%}"


def spread_warning(rows: Iterable[Mapping[str, Any]], label: str | None = None) -> str | None:
    """Returns a line about the cases with disturbed rounds, with the result's label if given; None without any."""
    spreads = {f"{row['operation']} {row['name']}": row["seconds"]["spread"] for row in rows if "seconds" in row}
    wide = {name: spread for name, spread in spreads.items() if spread > MUCH_SPREAD}
    if not wide:
        return None
    name = max(wide, key=lambda name: wide[name])
    suffix = "" if label is None else f" ({label})"
    return (
        f"Warning{suffix}: rounds of {len(wide)} of {len(spreads)} cases spread over more than {MUCH_SPREAD:.0%} of "
        f"their median, {name} over {wide[name]:.0%}. Times on a busy machine are unreliable; measure again"
    )


def output(x: np.ndarray) -> dict[str, Any]:
    """Returns an output's record: dtype, shape, digest, and the bits of evenly spaced elements in hexadecimal."""
    x = np.ascontiguousarray(x)
    words = x.reshape(-1).view(f"u{x.dtype.itemsize}")
    chosen = words[np.linspace(0, words.size - 1, min(SAMPLED, words.size)).astype(np.int64)]
    digits = 2 * x.dtype.itemsize
    return {
        "dtype": x.dtype.name,
        "shape": list(x.shape),
        "sha256": hashlib.sha256(x.tobytes()).hexdigest(),
        "sample": [f"{int(word):0{digits}x}" for word in chosen],
    }


def read(file: Path) -> Result:
    """Reads a file of `run` or `compile`.

    Raises:
        ResultError: the file cannot be read, or is something else; names the file, its content, and what is accepted.
    """
    try:
        content = json.loads(file.read_text())
    except OSError as error:
        raise ResultError(f"{file}: {error.strerror or error}; accepted: {ACCEPTED}") from error
    except UnicodeDecodeError as error:
        raise ResultError(f"{file} is not text; accepted: {ACCEPTED}") from error
    except json.JSONDecodeError as error:
        size = file.stat().st_size
        what = "is empty" if size == 0 else f"is not JSON, or was truncated ({error}; {size} bytes)"
        raise ResultError(f"{file} {what}; accepted: {ACCEPTED}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ResultError(f"{file} is {_foreign(content)}; accepted: {ACCEPTED}")
    if content.get("version") != VERSION:
        raise ResultError(f"{file} has version {content.get('version')!r} of the format; accepted: version {VERSION}")
    if content.get("kind") not in KINDS:
        raise ResultError(f"{file} is of kind {content.get('kind')!r}; accepted: {', '.join(KINDS)}")
    try:
        return _checked(str(file), content)
    except _Damage as damage:
        raise ResultError(f"{file} is damaged: {damage}; accepted: unmodified {ACCEPTED}") from damage


def _foreign(content: Any) -> str:
    """A description of a JSON file that `compare` does not take."""
    if not isinstance(content, dict):
        return f"a JSON {type(content).__name__}"
    if {"workload", "runs"} <= content.keys():
        return "a result of `python -m detjax.bench serve`"
    keys = ", ".join(map(repr, list(content)[:6])) or "none"
    return f"another JSON file, with the keys {keys}"


class _Damage(Exception):
    """The defect of a file that claims to be a result of this package."""


def _checked(file: str, content: Mapping[str, Any]) -> Result:
    fingerprint = _field(content, "fingerprint", dict)
    required = {field.name for field in dataclasses.fields(Fingerprint) if field.default is dataclasses.MISSING}
    later = {field.name: field.default for field in dataclasses.fields(Fingerprint) if field.name not in required}
    missing, unknown = sorted(required - fingerprint.keys()), sorted(fingerprint.keys() - required - later.keys())
    if missing or unknown:
        raise _Damage(f"its fingerprint lacks {missing} and has the unknown fields {unknown}")
    device = _field(content, "device", dict)
    _field(device, "kind", str, "device")
    peak = content.get("peak")
    if peak is not None:
        for name, kind in (("chip", str), ("flops", int | float), ("bytes", int | float)):
            _field(_field(content, "peak", dict), name, kind, "peak")
    return Result(
        file=file,
        kind=content["kind"],
        created=_field(content, "created", str),
        command=_field(content, "command", str),
        # Earlier releases recorded no commit and fewer fields.
        commit=None if content.get("commit") is None else _field(content, "commit", str),
        fingerprint=later | fingerprint,
        unrecorded=tuple(name for name in later if fingerprint.get(name, later[name]) == later[name]),
        device=device,
        peak=peak,
        settings=_field(content, "settings", dict),
        versions=_field(content, "versions", dict),
        rows=_checked_rows(content),
    )


def _checked_rows(content: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for index, row in enumerate(_field(content, "rows", list)):
        place = f"row {index + 1}"
        if not isinstance(row, dict):
            raise _Damage(f"{place} is {row!r}")
        name = f"{_field(row, 'operation', str, place)} | {_field(row, 'name', str, place)}"
        if name in rows:
            raise _Damage(f"{place} repeats {name}")
        _check_row(row, name, content["kind"])
        rows[name] = row
    return rows


def _check_row(row: Mapping[str, Any], name: str, kind: str) -> None:
    _field(row, "arguments", list, name)
    if isinstance(row.get("failed"), str):
        return
    if kind == "compiled":
        _field(row, "memory", dict, name)
        return
    for field in ("bytes", "flops"):
        _field(row, field, int | float, name)
    for field in ("seconds", "stock_seconds"):
        if row.get(field) is not None or field == "seconds":
            rounds = _field(_field(row, field, dict, name), "rounds", list, name)
            if not rounds or not all(isinstance(value, float) and value > 0 for value in rounds):
                raise _Damage(f"{name}: {field} are {rounds}")
            _field(row[field], "median", int | float, name)
            _field(row[field], "spread", int | float, name)
    for output in _field(row, "outputs", list, name):
        _check_output(output, name)
    _field(row, "inputs", int, name)


def _check_output(output: Any, name: str) -> None:
    if not isinstance(output, dict):
        raise _Damage(f"{name}: an output is {output!r}")
    digest = _field(output, "sha256", str, name)
    if len(digest) != 64 or set(digest) - set("0123456789abcdef"):
        raise _Damage(f"{name}: the sha256 {digest!r} is not a digest")
    _field(output, "dtype", str, name)
    try:
        [int(word, 16) for word in _field(output, "sample", list, name)]
    except (TypeError, ValueError) as error:
        raise _Damage(f"{name}: its sample is not hexadecimal") from error


def _field(record: Mapping[str, Any], name: str, kind: Any, place: str | None = None) -> Any:
    """Returns a field of a record after checking its type."""
    if not isinstance(record.get(name), kind):
        value = repr(record[name]) if name in record else "missing"
        raise _Damage(f"{name} {f'of {place} ' if place else ''}is {value}")
    return record[name]
