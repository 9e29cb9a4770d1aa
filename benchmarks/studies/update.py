"""The time to replace an engine's weights from the files of a checkpoint, against the time to read these files.

    python -m benchmarks update --directory /local/disk --out benchmarks/results/update-h200.json

An engine of Qwen3-8B's shape with random weights is saved to a directory that is deleted at the end. Then the files are
read, and the weights are updated from them, in alternating rounds: from the disk, after the operating system has
dropped its copies of the files, and from these copies. An update is what `POST /update_weights_from_disk` runs: it
reads and checks the tensors, computes the model's digest, and copies the weights to the devices. Reading the files
takes as many threads, which keep nothing.

The answer to a request is compared with the answer before: equal after each update, and different after one weight was
changed, as a control.

`--small` runs on a CPU in seconds.
"""

import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np

from benchmarks import study as options
from benchmarks.study import SMALL_ENGINE, EngineSettings, Result, Run
from detjax import models
from detjax.cli.options import Option
from detjax.engine import Engine, Request, SamplingParams
from detjax.engine.commands import Commit, EngineCommands, Prepare
from detjax.models.checkpoint.weight_updates import UpdatableWeights
from detjax.runtime.threads import in_threads

_PART: Final = 1 << 26
"""The bytes of a file that a thread reads at once."""


def study(
    run: Run,
    *,
    preset: options.Preset = EngineSettings.preset,
    layers: options.Layers = None,
    directory: Annotated[Path | None, Option("Where to write the checkpoint.", default="the system's own")] = None,
    rounds: options.RoundCount = 3,
) -> Result:
    updater = SMALL_ENGINE if run.small else EngineSettings(preset, layers)
    decoder = updater.decoder()
    weights = UpdatableWeights(decoder)
    with tempfile.TemporaryDirectory(dir=directory) as temporary:
        checkpoint = Path(temporary) / "checkpoint"
        models.save(decoder, checkpoint)
        with Engine(decoder, config=updater.config()) as engine:
            del decoder  # the engine alone has the weights
            content = _measured(engine, EngineCommands(engine, weights), checkpoint, 1 if run.small else rounds)
    problem = "" if content["has_the_same_bits"] and content["control_differs"] else "an answer has other bits"
    return Result({"updater": dataclasses.asdict(updater), **content}, problem)


def _measured(engine: Engine, commands: EngineCommands, checkpoint: Path, rounds: int) -> dict[str, Any]:
    """Returns the seconds of each round, and whether the answers were as expected."""
    request = Request([1, 2, 3], SamplingParams(max_tokens=8, temperature=0.8, seed=1))
    files = sorted(checkpoint.glob("*.safetensors"))
    expected = engine.generate([request])
    answers, control = [], []
    steps: dict[str, Callable[[], Any]] = {
        "read": lambda: read(files),
        "prepare": lambda: commands.run(Prepare(checkpoint)),
        "commit": lambda: commands.run(Commit()),
    }
    seconds: dict[str, dict[str, list[float]]] = {}
    for source in ("disk", "memory"):
        taken = seconds[source] = {name: list[float]() for name in steps}
        for _ in range(rounds):
            _change(engine)
            control.append(engine.generate([request]) != expected)
            for name, step in steps.items():
                if source == "disk" and name != "commit":
                    forget(files)
                begin = time.perf_counter()
                step()
                taken[name].append(time.perf_counter() - begin)
            answers.append(engine.generate([request]) == expected)
    ratios = {
        source: statistics.median(
            (prepare + commit) / reading
            for reading, prepare, commit in zip(taken["read"], taken["prepare"], taken["commit"], strict=True)
        )
        for source, taken in seconds.items()
    }
    return {
        "bytes": sum(file.stat().st_size for file in files),
        "seconds": seconds,
        "update_over_read": ratios,
        "has_the_same_bits": all(answers),
        "control_differs": all(control),
    }


def _change(engine: Engine) -> None:
    """Doubles one weight."""
    weight = engine.weight(0)
    assert weight is not None
    engine.replace_weights({0: weight + weight})


def read(files: list[Path]) -> int:
    """Reads all bytes of files, and returns their number."""
    parts = [(file, begin) for file in files for begin in range(0, file.stat().st_size, _PART)]
    return sum(in_threads(lambda part: _read_part(*part), parts))


def _read_part(file: Path, begin: int) -> int:
    with file.open("rb", buffering=0) as stream:
        buffer, filled = np.empty(_PART, np.uint8), 0
        while count := os.preadv(stream.fileno(), [buffer[filled:].data], begin + filled):
            filled += count
        return filled


def forget(files: list[Path]) -> None:
    """Makes the operating system drop its copies of files in memory."""
    for file in files:
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
