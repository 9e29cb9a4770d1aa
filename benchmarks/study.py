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

from detjax.bench import command_line, presets, provenance
from detjax.cli.options import Option
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


def names(accepted: Collection[str], text: str = "Measure this only") -> Option:
    """An option that can be repeated, for some of these names. Its default is all of them."""
    return Option(text, accepted=accepted)


Preset = Annotated[str, Option("The model's shape", accepted=presets.MODELS)]
Layers = Annotated[int | None, Option("The number of layers.", minimum=1, default="the preset's own")]
Tokens = command_line.Tokens
Torch = Annotated[bool, Option("Measure PyTorch too, if it is installed.", name="--torch/--skip-torch")]
Calls = Annotated[int, Option("The calls that a measurement takes the median of.", minimum=1)]
RoundCount = Annotated[int, Option("The rounds in which all that is measured takes turns.", name="--rounds", minimum=1)]
