"""The interface between a study and the command that runs it, and the options that several studies have.

A study is a module `benchmarks/studies/NAME.py`, or `benchmarks/studies/NAME/study.py`. Its docstring is the text of
`--help`, and its function `study` takes a `Run` and its options, by keyword, and returns a `Result`. A study that draws
has a dictionary `PICTURES`, by suffix of the file's name, of functions of the result's content and the file.
"""

import dataclasses
import functools
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from detjax.bench import command_line, presets, provenance
from detjax.runtime import backends

ON_A_CPU: Final = "`--small` on the portable backend: a check that the benchmark runs, not a measurement of kernels"
"""The note in results of `--small` where the kernels cannot run."""
INTERPRETED: Final = "Pallas' interpreter: a check that the benchmark runs, not a measurement"
"""The note in results of `--small` whose kernels were interpreted."""


@dataclasses.dataclass(frozen=True)
class Run:
    """A run of a study.

    Attributes:
        command: the command line, without the files that it writes.
        small: whether to measure sizes that take a CPU seconds.
        out: the file of the result.
    """

    command: str
    small: bool = False
    out: Path | None = None

    @functools.cached_property
    def heading(self) -> dict[str, Any]:
        """The fields with which the result begins.

        They name the device, so a study whose processes share its memory must not need them before these have ended.
        """
        note = {"note": ON_A_CPU} if self.small and backends.backend() == "portable" else {}
        return provenance.heading(self.command) | note

    def save(self, content: Mapping[str, Any]) -> None:
        """Writes the result as far as it has come: the machine may be taken away before the study ends."""
        if self.out is not None:
            provenance.write(self.out, {**self.heading, **content})


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a study.

    Attributes:
        content: what the result's file has after its heading.
        problem: why the study fails, with exit code 1; empty: it does not.
    """

    content: Mapping[str, Any]
    problem: str = ""


def names(accepted: Collection[str], text: str = "Measure this only") -> Any:
    """An option that can be repeated, for some of these names. Its default is all of them."""

    def check(given: list[str]) -> list[str]:
        return [_checked(name, accepted) for name in given]

    return typer.Option(
        default_factory=lambda: list(accepted),
        callback=check,
        metavar="NAME",
        show_default="all",
        help=f"{text}; repeatable: {', '.join(accepted)}.",
    )


def name(accepted: Collection[str], text: str) -> Any:
    """An option for one of these names."""
    check = functools.partial(_checked, accepted=accepted)
    return typer.Option(callback=lambda value: check(value), metavar="NAME", help=f"{text}: {', '.join(accepted)}.")


def _checked(given: str, accepted: Collection[str]) -> str:
    if given not in accepted:
        raise typer.BadParameter(f"{given!r} is unknown; accepted: {', '.join(accepted)}")
    return given


Preset = Annotated[str, name(presets.MODELS, "The model's shape")]
Layers = Annotated[int | None, typer.Option(min=1, help="The number of layers.", show_default="the preset's own")]
Tokens = command_line.Tokens
Torch = Annotated[bool, typer.Option("--torch/--skip-torch", help="Measure PyTorch too, if it is installed.")]
Calls = Annotated[int, typer.Option("--calls", min=1, help="The calls that a measurement takes the median of.")]
RoundCount = Annotated[
    int, typer.Option("--rounds", min=1, help="The rounds in which all that is measured takes turns.")
]
