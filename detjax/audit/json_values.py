"""Reads JSON files with one value per line, or one value in the whole file."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def json_values(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields the values of a JSON file, each with its position: one per line or list entry, or the whole file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not JSON; the message names the line.
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
                    message = f"{path}: line {number} is not JSON ({error}); accepted: one JSON value per line"
                    raise ValueError(message) from None
        return
    if isinstance(whole, list):
        yield from ((f"entry {number}", value) for number, value in enumerate(whole))
    else:
        yield "line 1", whole
