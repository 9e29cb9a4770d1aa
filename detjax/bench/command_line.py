"""Options and console output that `python -m detjax.bench` and `python -m benchmarks` share."""

import os
from pathlib import Path
from typing import Annotated, Final

from rich.console import Console

from detjax.cli.options import Option

Small = Annotated[bool, Option("Measure sizes that run on a CPU in seconds.")]
Out = Annotated[Path | None, Option("Write the result as JSON.")]
Tokens = Annotated[list[int] | None, Option("Tokens per call.", name="--tokens", minimum=1, default="1 to 8192")]

REDIRECTED_COLUMNS: Final = 160
"""The width of tables in output that is not a terminal."""


def console() -> Console:
    """Returns a console as wide as the terminal or `COLUMNS`, or 160 columns if output is redirected."""
    terminal = Console()
    return terminal if terminal.is_terminal or "COLUMNS" in os.environ else Console(width=REDIRECTED_COLUMNS)


def print_line(text: str) -> None:
    """Prints a line without markup or wrapping."""
    Console().print(text, markup=False, highlight=False, soft_wrap=True)
