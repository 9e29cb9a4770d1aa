"""Results as text: a table per list of records, and a line of the remaining fields."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

MAX_ROWS: Final = 300
"""Maximum number of printed rows per table."""


def display(content: Mapping[str, Any]) -> None:
    """Prints a result without wrapping lines. Lists within records are only in the result's file."""
    Console(width=10_000).print(*_parts("result", content), sep="\n")


def _parts(title: str, content: Any) -> Iterator[Table | Text]:
    if _is_records(content):
        yield _table(title, content)
    elif isinstance(content, Mapping):
        nested = [name for name, value in content.items() if isinstance(value, Mapping) or _is_records(value)]
        fields = [f"{name} {_cell(value)}" for name, value in content.items() if name not in nested]
        if fields:
            yield Text(f"{title}: {', '.join(fields)}")
        for name in nested:
            yield from _parts(name if title == "result" else f"{title}, {name}", content[name])


def _is_records(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(record, Mapping) for record in value)


def _table(title: str, records: list[dict[str, Any]]) -> Table:
    rows = [dict(_fields(record)) for record in records[:MAX_ROWS]]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(*columns, title=title, box=None, title_justify="left")
    for row in rows:
        table.add_row(*(row.get(name, "") for name in columns))
    return table


def _fields(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """The fields of a record and its nested mappings, as text."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from _fields(value, f"{prefix}{name} ")
        elif not isinstance(value, list | tuple):
            yield f"{prefix}{name}", _cell(value)


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
