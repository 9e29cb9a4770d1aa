"""The files that `run` and `compile` write and that `compare` reads."""

import dataclasses
import datetime
import hashlib
import importlib.metadata
import json
import platform as host
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from detjax.backends import STOCK
from detjax.bench.cases import Case
from detjax.fingerprints import Fingerprint

FORMAT: Final = "detjax bench"
VERSION: Final = 1

type Kind = Literal["measured", "compiled"]

KINDS: Final[Mapping[str, str]] = {"measured": "run", "compiled": "compile"}
"""Of files, with the commands that write them."""
ACCEPTED: Final = "files that `python -m detjax.bench run --out` and `compile --out` write"

SAMPLED: Final = 64
"""Numbers of each result that are kept."""

_VERSIONS: Final = ("detjax", "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu", "numpy")


class ResultError(ValueError):
    """A file is not what `compare` takes."""


@dataclasses.dataclass(frozen=True)
class Result:
    """What a file says; its fields are those of the file."""

    file: str
    kind: Kind
    created: str
    command: str
    fingerprint: dict[str, Any]
    device: dict[str, Any]
    peak: dict[str, Any] | None
    settings: dict[str, Any]
    versions: dict[str, str]
    rows: dict[str, dict[str, Any]]
    """By operation and name."""

    @property
    def backend(self) -> str:
        """Which served."""
        return self.fingerprint["backend"]

    @property
    def digest(self) -> str:
        """Of the fingerprint."""
        return Fingerprint(**self.fingerprint).digest

    @property
    def under_contract(self) -> bool:
        """Whether equal fingerprints promise equal bits."""
        return self.kind == "measured" and self.backend != STOCK

    @property
    def chip(self) -> str:
        """A short name of the device."""
        if self.peak:
            return self.peak["chip"]
        return "CPU" if self.device.get("platform") == "cpu" else self.device["kind"]


def written(
    file: Path | None,
    kind: Kind,
    command: str,
    fingerprint: Fingerprint,
    device: Mapping[str, Any],
    peak: Any,
    settings: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """The content of a file, which is also written to `file` where there is one."""
    content = {
        "format": FORMAT,
        "version": VERSION,
        "kind": kind,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command,
        "fingerprint": dataclasses.asdict(fingerprint),
        "device": dict(device),
        "peak": None if peak is None else dataclasses.asdict(peak),
        "settings": dict(settings),
        "versions": versions(),
        "rows": list(rows),
    }
    text = json.dumps(content, indent=1) + "\n"
    if file is not None:
        file.write_text(text)
    return json.loads(text)


def gathered(
    file: Path | None,
    kind: Kind,
    about: tuple[str, Fingerprint, Mapping[str, Any], Any, Mapping[str, Any]],
    cases: Iterable[Case],
    found: Callable[[Case], dict[str, Any]],
    report: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """The content of a file with a row for every case, written after each: what there is outlives a run cut short.

    Args:
        file: see `written`.
        kind: likewise.
        about: what `written` takes between kind and rows.
        cases: in the order of the rows.
        found: of a case, see `row`.
        report: is called with every row.
    """
    rows: list[dict[str, Any]] = []
    content = written(file, kind, *about, rows)
    for case in cases:
        rows.append(row(case, found))
        report(rows[-1])
        content = written(file, kind, *about, rows)
    return content


def row(case: Case, found: Callable[[Case], dict[str, Any]]) -> dict[str, Any]:
    """What a case is, and what was found of it; or why there is nothing, which says nothing of other cases."""
    head = {"operation": case.operation, "name": case.name, "arguments": case.arguments}
    head |= {"bytes": case.bytes, "flops": case.flops}
    try:
        return head | found(case)
    except Exception as failure:
        return head | {"failed": said(failure), "refused": isinstance(failure, NotImplementedError | TypeError)}


def said(failure: Exception) -> str:
    """The kind of a failure and the first line of what it says."""
    lines = str(failure).strip().splitlines() or [""]
    return f"{type(failure).__name__}: {lines[0][:400]}"


def versions() -> dict[str, str]:
    """Of Python and of the libraries that matter, those that are installed."""
    found = {"python": host.python_version()}
    for name in _VERSIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def output(x: np.ndarray) -> dict[str, Any]:
    """What is kept of a result: its digest, and the bits of some of its numbers, evenly spread, in hexadecimal."""
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
    """What a file says.

    Raises:
        ResultError: it cannot be read, or is something else; names the file, what it is, and what is accepted.
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
    """What a JSON file is that `compare` does not take."""
    if not isinstance(content, dict):
        return f"JSON of another kind, {type(content).__name__}"
    if {"workload", "runs"} <= content.keys():
        return "a result of `python -m detjax.bench serve`"
    keys = ", ".join(map(repr, list(content)[:6])) or "none"
    return f"JSON that neither of these commands wrote, with the keys {keys}"


class _Damage(Exception):
    """What is wrong with a file that says it is one of ours."""


def _checked(file: str, content: Mapping[str, Any]) -> Result:
    fingerprint = _field(content, "fingerprint", dict)
    fields = {field.name for field in dataclasses.fields(Fingerprint)}
    if fingerprint.keys() != fields:
        missing, unknown = sorted(fields - fingerprint.keys()), sorted(fingerprint.keys() - fields)
        raise _Damage(f"its fingerprint lacks {missing} and has {unknown} besides")
    device = _field(content, "device", dict)
    _field(device, "kind", str, "device")
    peak = content.get("peak")
    if peak is not None:
        for name, of in (("chip", str), ("flops", int | float), ("bytes", int | float)):
            _field(_field(content, "peak", dict), name, of, "peak")
    rows: dict[str, dict[str, Any]] = {}
    for index, row in enumerate(_field(content, "rows", list)):
        where = f"row {index + 1}"
        if not isinstance(row, dict):
            raise _Damage(f"{where} is {row!r}")
        name = f"{_field(row, 'operation', str, where)} | {_field(row, 'name', str, where)}"
        if name in rows:
            raise _Damage(f"{where} is there twice: {name}")
        _check_row(row, name, content["kind"])
        rows[name] = row
    of_file = {field.name: _field(content, field.name, str) for field in dataclasses.fields(Result)[2:4]}
    rest = {name: _field(content, name, dict) for name in ("settings", "versions")}
    return Result(
        file=file, kind=content["kind"], fingerprint=fingerprint, device=device, peak=peak, rows=rows, **of_file, **rest
    )


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
        if not isinstance(output, dict):
            raise _Damage(f"{name}: an output is {output!r}")
        digest = _field(output, "sha256", str, name)
        if len(digest) != 64 or set(digest) - set("0123456789abcdef"):
            raise _Damage(f"{name}: the sha256 {digest!r} is none")
        _field(output, "dtype", str, name)
        try:
            [int(word, 16) for word in _field(output, "sample", list, name)]
        except (TypeError, ValueError) as error:
            raise _Damage(f"{name}: its sample is no hexadecimal") from error
    _field(row, "inputs", int, name)


def _field(of: Mapping[str, Any], name: str, kind: Any, where: str | None = None) -> Any:
    if not isinstance(of.get(name), kind):
        given = repr(of[name]) if name in of else "missing"
        raise _Damage(f"{name} {f'of {where} ' if where else ''}is {given}")
    return of[name]
