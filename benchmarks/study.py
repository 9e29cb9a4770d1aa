"""The interface between a study and the command that runs it, and shared options.

A study is a module `benchmarks/studies/NAME.py`, or `benchmarks/studies/NAME/study.py`. Its docstring is the text of
`--help`, and its function `study` takes a `Run` and keyword options and returns a `Result`. A study with plots has a
dictionary `PICTURES` from file name suffixes to functions of the result's content and the file.
"""

import collections
import dataclasses
import functools
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import jax

from detjax.bench import command_line, presets, provenance
from detjax.cli.options import Option
from detjax.engine import EngineConfig
from detjax.models import Decoder
from detjax.models.network import abstract, parameters
from detjax.runtime import backends

ON_A_CPU: Final = "`--small` on the portable backend: a check that the benchmark runs, not a measurement of kernels"
"""The note in results of `--small` on devices without the kernels."""
INTERPRETED: Final = "Pallas' interpreter: a check that the benchmark runs, not a measurement"
"""The note in results of `--small` with interpreted kernels."""


@dataclasses.dataclass(frozen=True)
class Run:
    """A run of a study.

    Attributes:
        command: the command line without output files.
        small: whether to measure sizes that run on a CPU in seconds.
        out: the file of the result.
    """

    command: str
    small: bool = False
    out: Path | None = None

    @functools.cached_property
    def heading(self) -> dict[str, Any]:
        """The first fields of the result.

        They initialize the device, so a study whose processes share its memory reads them after the processes ended.
        """
        note = {"note": ON_A_CPU} if self.small and backends.backend() == "portable" else {}
        return provenance.heading(self.command) | note

    def save(self, content: Mapping[str, Any]) -> None:
        """Writes the result so far, in case the machine goes away before the study ends."""
        if self.out is not None:
            provenance.write(self.out, {**self.heading, **content})


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a study.

    Attributes:
        content: the fields of the result's file after its heading.
        problem: the reason for exit code 1; empty: success.
    """

    content: Mapping[str, Any]
    problem: str = ""


@dataclasses.dataclass(frozen=True)
class EngineSettings:
    """The settings of an engine whose model has a preset's shape and random weights.

    Attributes:
        preset: the model's shape.
        layers: number of layers; None: the preset's own.
        max_samples: see `EngineConfig`.
        token_budget: see `EngineConfig`.
        max_length: see `EngineConfig`.
        num_pages: see `EngineConfig`.
    """

    preset: str = "Qwen3-8B"
    layers: int | None = None
    max_samples: int = 256
    token_budget: int = 2048
    max_length: int = 4096
    num_pages: int | None = 2048

    def decoder(self) -> Decoder:
        """Returns the model."""
        return presets.decoder(self.preset, self.layers)

    def config(self) -> EngineConfig:
        """Returns the engine's configuration."""
        names = ("max_samples", "token_budget", "max_length", "num_pages")
        return EngineConfig(**{name: getattr(self, name) for name in names})


SMALL_ENGINE: Final = EngineSettings("tiny", 1, 2, 16, 64, 4)
"""The settings of an engine for `--small`."""


def layers_that_fit(preset: str, share: float, bytes_a_layer: int = 0) -> int:
    """Returns the most layers of a preset that fit into a share of a device's memory; all of them on a CPU.

    Args:
        preset: the model's shape.
        share: the share of the memory.
        bytes_a_layer: what each layer takes besides its weights, such as its cache.
    """
    layers = presets.config(preset).layers
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    if limit is None:
        return layers
    weights = collections.Counter[int | None]()
    for path, weight in parameters(abstract(lambda: presets.decoder(preset))).items():
        weights[path[1] if path[0] == "layers" else None] += weight.size * weight.dtype.itemsize
    free = share * limit - weights[None]
    for layer in range(layers):
        free -= weights[layer] + bytes_a_layer
        if free < 0:
            return max(1, layer)
    return layers


def counts(devices: int) -> list[int]:
    """Returns the numbers of devices that a study compares: 1, 2, 4 and so on, and `devices`."""
    return list(dict.fromkeys([*(2**power for power in range(devices.bit_length()) if 2**power < devices), devices]))


def names(accepted: Collection[str], text: str = "Measure this only") -> Option:
    """Returns a repeatable option for some of the accepted names. Default: all of them."""
    return Option(text, accepted=accepted)


Preset = Annotated[str, Option("The model's shape", accepted=presets.MODELS)]
Layers = Annotated[int | None, Option("The number of layers.", minimum=1, default="the preset's own")]
Tokens = command_line.Tokens
Torch = Annotated[bool, Option("Measure PyTorch too, if it is installed.", name="--torch/--skip-torch")]
Calls = Annotated[int, Option("Calls per measurement, which is their median.", minimum=1)]
RoundCount = Annotated[int, Option("Alternating rounds of all measurements.", name="--rounds", minimum=1)]
