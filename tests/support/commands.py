"""Commands, run in this process."""

import contextlib
import io
import os
from collections.abc import Callable, Mapping
from typing import NamedTuple, NoReturn
from unittest import mock


class Result(NamedTuple):
    """The output of a command, and its exit code."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        """All that was printed."""
        return self.stdout + self.stderr


def run(
    main: Callable[[list[str]], NoReturn], *arguments: object, text: str = "", env: Mapping[str, str] | None = None
) -> Result:
    """Runs a command line, with `text` on its standard input."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, env or {}),
        mock.patch("sys.stdin", io.StringIO(text)),
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
    ):
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as end:
            code = end.code
    assert isinstance(code, int | None)
    return Result(code or 0, stdout.getvalue(), stderr.getvalue())
