"""The options that `python -m detjax.bench` and `python -m benchmarks` have in common, and their errors."""

import contextlib
import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

Small = Annotated[bool, typer.Option("--small", help="Measure sizes that take a CPU seconds.")]
Out = Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write the result as JSON.")]
Models = Annotated[
    list[str] | None,
    typer.Option("--model", metavar="NAME", help="Measure this model's linear layers; repeatable.", show_default="all"),
]
Tokens = Annotated[
    list[int] | None,
    typer.Option("--tokens", min=1, metavar="M", help="Tokens in a call; repeatable.", show_default="1 to 8192"),
]

REDIRECTED_COLUMNS: Final = 160
"""The width of tables that are printed to no terminal."""


def check_names(option: str, given: Iterable[str] | None, accepted: Collection[str]) -> list[str]:
    """The names given, or all that are accepted if none is.

    Raises:
        ValueError: a name is not accepted.
    """
    given = list(given or ())
    for name in given:
        if name not in accepted:
            raise ValueError(f"{option} {name!r} is unknown; accepted: {', '.join(accepted)}")
    return given or list(accepted)


@contextlib.contextmanager
def bad_parameters() -> Iterator[None]:
    """Turns a ValueError into an error about the command line."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def console() -> Console:
    """Returns what tables are printed to: as wide as the terminal or `COLUMNS`, else 160 columns, as in a file."""
    terminal = Console()
    return terminal if terminal.is_terminal or "COLUMNS" in os.environ else Console(width=REDIRECTED_COLUMNS)


def print_line(text: str) -> None:
    """Prints a line as it is: without markup, and cut nowhere."""
    Console().print(text, markup=False, highlight=False, soft_wrap=True)
