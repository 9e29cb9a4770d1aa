"""The values of a file of JSON: one in each line, or one in the whole file."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def json_values(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields the values of a file of JSON, each with its place: those of lines, or of a list, or the whole file's.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no JSON; the message says where.
    """
    text = path.read_text(encoding="utf-8")
    try:
        whole = json.loads(text)
    except ValueError:
        for number, line in enumerate(text.splitlines(), start=1):
            if line.strip():
                try:
                    yield f"line {number}", json.loads(line)
                except ValueError as error:
                    message = f"{path}: line {number} is no JSON ({error}); accepted: one JSON value in each line"
                    raise ValueError(message) from None
        return
    if isinstance(whole, list):
        yield from ((f"entry {number}", value) for number, value in enumerate(whole))
    else:
        yield "line 1", whole
