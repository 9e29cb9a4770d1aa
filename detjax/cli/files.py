"""Files that commands write: they are there when the command has ended without an error, and else as they were."""

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def written_at_the_end(option: str, path: Path) -> Iterator[Path]:
    """A temporary file that replaces `path` when the context ends without an error.

    It is created at once, so that a path that cannot be written is reported before the work begins.

    Raises:
        ValueError: the path cannot be written; the message calls it `option`.
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
    """Returns the temporary file of an option that may be left out; see `written_at_the_end`."""
    return None if path is None else files.enter_context(written_at_the_end(option, path))


def write_json(file: Path, content: Any) -> None:
    """Writes a file of JSON."""
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
