"""The options that `python -m detjax.bench` and `python -m benchmarks` have in common, and their errors."""

import os
from pathlib import Path
from typing import Annotated, Final

from rich.console import Console

from detjax.cli.options import Option

Small = Annotated[bool, Option("Measure sizes that take a CPU seconds.")]
Out = Annotated[Path | None, Option("Write the result as JSON.")]
Tokens = Annotated[list[int] | None, Option("Tokens in a call.", name="--tokens", minimum=1, default="1 to 8192")]

REDIRECTED_COLUMNS: Final = 160
"""The width of tables that are printed to no terminal."""


def console() -> Console:
    """Returns what tables are printed to: as wide as the terminal or `COLUMNS`, else 160 columns, as in a file."""
    terminal = Console()
    return terminal if terminal.is_terminal or "COLUMNS" in os.environ else Console(width=REDIRECTED_COLUMNS)


def print_line(text: str) -> None:
    """Prints a line as it is: without markup, and cut nowhere."""
    Console().print(text, markup=False, highlight=False, soft_wrap=True)
