"""The files that `run` and `compile` write and that `compare` reads."""

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
"""The kinds of files, with the commands that write them."""
ACCEPTED: Final = "files that `python -m detjax.bench run --out` and `compile --out` write"

MUCH_SPREAD: Final = 0.5
"""Rounds that are further apart than this share of their median were disturbed."""

SAMPLED: Final = 64
"""How many numbers of each output are kept."""


class ResultError(ValueError):
    """A file is not what `compare` takes."""


@dataclasses.dataclass(frozen=True)
class Result:
    """The content of a file.

    Attributes:
        file: its path.
        kind: measured or compiled.
        created: when, in UTC.
        command: the command that made it.
        commit: the commit of the code that made it, see `provenance.commit`; None: unknown.
        fingerprint: the fields of a `Fingerprint`.
        device: kind, platform, number and memory of the devices.
        peak: the fields of the device's `Peak`, if it is known.
        settings: the options of the command.
        versions: the versions of libraries.
        rows: what each case gave, by operation and name.
        unrecorded: the fields of the fingerprint that the release that wrote the file did not record.
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
        """The backend that served."""
        return self.fingerprint["backend"]

    @property
    def digest(self) -> str:
        """The digest of the fingerprint."""
        return Fingerprint(**self.fingerprint).digest

    @property
    def under_contract(self) -> bool:
        """Whether equal fingerprints promise equal bits. Unrecorded fields may differ, so nothing is promised then."""
        return self.kind == "measured" and self.backend != STOCK and not self.unrecorded

    @property
    def chip(self) -> str:
        """A short name of the device."""
        if self.peak:
            return self.peak["chip"]
        return "CPU" if self.device.get("platform") == "cpu" else self.device["kind"]


@dataclasses.dataclass(frozen=True)
class Header:
    """What a file says before its rows.

    Attributes:
        kind: measured or compiled.
        command: the command that makes the file.
        fingerprint: the fingerprint of what is measured or compiled.
        device: kind, platform, number and memory of the devices.
        peak: the most that the device can do; None: unknown.
        settings: the options of the command.
    """

    kind: Kind
    command: str
    fingerprint: Fingerprint
    device: Mapping[str, Any]
    peak: Peak | None
    settings: Mapping[str, Any]


def write(file: Path | None, header: Header, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The content of a file as it is read back. It is also written to `file`, if one is given."""
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
    """The content of a file with a row for every case. It is written after each, so a run cut short keeps its rows.

    Args:
        file: the JSON file to write, if any.
        header: what the file says before its rows.
        cases: in the order of the rows.
        measure: returns the fields of a case's row, see `row`.
        report: is called with every row.
    """
    rows: list[dict[str, Any]] = []
    content = write(file, header, rows)
    for case in cases:
        rows.append(row(case, measure))
        report(rows[-1])
        content = write(file, header, rows)
    return content


def row(case: Case, measure: Callable[[Case], dict[str, Any]]) -> dict[str, Any]:
    """The description of a case and what was measured, or why it failed; a failure does not end the run."""
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
    """A table with a section for each operation and a line for each case.

    Args:
        title: stands above the table.
        rows: the rows of a result.
        columns: the names of the columns of numbers, and the last column, which is text.
        cells: returns the cells of a row, one for each column.
        optional: columns of numbers that are left out where there is no room, the first one first.
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
    """How far apart a case's rounds are, as a share of their median, in the colour of a warning if that is much."""
    spread = row["seconds"]["spread"]
    return f"[bold yellow]±{spread:.0%}[/]" if spread > MUCH_SPREAD else f"±{spread:.0%}"


def spread_warning(rows: Iterable[Mapping[str, Any]], label: str | None = None) -> str | None:
    """A line about the cases whose rounds are far apart; None if none are.

    Args:
        rows: the rows of a result.
        label: the letter of the result, where there are several.
    """
    spreads = {f"{row['operation']} {row['name']}": row["seconds"]["spread"] for row in rows if "seconds" in row}
    wide = {name: spread for name, spread in spreads.items() if spread > MUCH_SPREAD}
    if not wide:
        return None
    name = max(wide, key=lambda name: wide[name])
    suffix = "" if label is None else f" ({label})"
    return (
        f"Warning{suffix}: rounds of {len(wide)} of {len(spreads)} cases are more than {MUCH_SPREAD:.0%} of their "
        f"median apart, {name} {wide[name]:.0%}. Times of a busy machine say little; measure again"
    )


def output(x: np.ndarray) -> dict[str, Any]:
    """What is kept of an output: its digest, and the bits of some of its numbers, evenly spread, in hexadecimal."""
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
    """The content of a file of `run` or `compile`.

    Raises:
        ResultError: the file cannot be read, or is something else; names the file, what it is, and what is accepted.
    """
    try:
        content = json.loads(file.read_text())
    except OSError as error:
        raise ResultError(f"{file}: {error.strerror or error}; accepted: {ACCEPTED}") from error
    except UnicodeDecodeError as error:
        raise ResultError(f"{file} is no text; accepted: {ACCEPTED}") from error
    except json.JSONDecodeError as error:
        size = file.stat().st_size
        what = "is empty" if size == 0 else f"is no JSON, or was cut off ({error}; {size} bytes)"
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
        raise ResultError(f"{file} is damaged: {damage}; accepted: {ACCEPTED}, as they were written") from damage


def _foreign(content: Any) -> str:
    """A description of a JSON file that `compare` does not take."""
    if not isinstance(content, dict):
        return f"JSON of another kind, {type(content).__name__}"
    if {"workload", "runs"} <= content.keys():
        return "a result of `python -m detjax.bench serve`"
    keys = ", ".join(map(repr, list(content)[:6])) or "none"
    return f"JSON that neither of these commands wrote, with the keys {keys}"


class _Damage(Exception):
    """What is wrong with a file that claims to be a result of this package."""


def _checked(file: str, content: Mapping[str, Any]) -> Result:
    fingerprint = _field(content, "fingerprint", dict)
    required = {field.name for field in dataclasses.fields(Fingerprint) if field.default is dataclasses.MISSING}
    later = {field.name: field.default for field in dataclasses.fields(Fingerprint) if field.name not in required}
    missing, unknown = sorted(required - fingerprint.keys()), sorted(fingerprint.keys() - required - later.keys())
    if missing or unknown:
        raise _Damage(f"its fingerprint lacks {missing} and has {unknown} besides")
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
        # Files of earlier releases have no commit.
        commit=None if content.get("commit") is None else _field(content, "commit", str),
        # Files of earlier releases have fewer fields.
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
            raise _Damage(f"{place} is there twice: {name}")
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
        raise _Damage(f"{name}: the sha256 {digest!r} is no digest")
    _field(output, "dtype", str, name)
    try:
        [int(word, 16) for word in _field(output, "sample", list, name)]
    except (TypeError, ValueError) as error:
        raise _Damage(f"{name}: its sample is no hexadecimal") from error


def _field(record: Mapping[str, Any], name: str, kind: Any, place: str | None = None) -> Any:
    """The field of a record, which has to be of some kind."""
    if not isinstance(record.get(name), kind):
        given = repr(record[name]) if name in record else "missing"
        raise _Damage(f"{name} {f'of {place} ' if place else ''}is {given}")
    return record[name]
