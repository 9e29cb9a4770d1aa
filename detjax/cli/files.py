"""Files that commands write. They appear only if the command succeeds; after an error, existing files are unchanged."""

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def written_at_the_end(option: str, path: Path) -> Iterator[Path]:
    """Yields a temporary file that replaces `path` when the context ends without an error.

    A path that is not writable raises a ValueError, which names `option`, before the work begins.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        partial = path.with_name(f".{path.name}.partial")
        partial.touch()
    except OSError as error:
        raise ValueError(
            f"{option} is {str(path)!r}, which cannot be written ({error.strerror}); accepted: a file in a "
            "directory that exists and is writable"
        ) from error
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def opened(files: contextlib.ExitStack, option: str, path: Path | None) -> Path | None:
    """Enters `written_at_the_end` for an optional path, and returns the temporary file."""
    return None if path is None else files.enter_context(written_at_the_end(option, path))


def write_json(file: Path, content: Any) -> None:
    """Writes indented JSON."""
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
