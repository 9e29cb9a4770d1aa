"""The time from the start until all requests can be served, with an empty and a filled cache of programs.

    python -m benchmarks ready --out benchmarks/results/ready-h200.json

Starts two processes in sequence, each with an engine of Qwen3-8B's shape and 1024 samples. The result lists every
program with its purpose.

`--small` runs on a CPU in seconds.
"""

import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import jax

from benchmarks import study as options
from benchmarks.study import Result, Run
from detjax.bench import presets
from detjax.engine import Engine, EngineConfig
from detjax.models.network import split

STEPS: Final = ("model", "ready", "complete")
"""The stages of a start: weights are loaded, all requests can be served, all programs are compiled."""


@dataclasses.dataclass(frozen=True)
class Start:
    """The settings of a start.

    Attributes:
        preset: the shape of the model, whose weights are random.
        layers: number of layers; None: the preset's own.
        max_samples: see `EngineConfig`.
        token_budget: see `EngineConfig`.
        max_length: see `EngineConfig`.
    """

    preset: str = "Qwen3-8B"
    layers: int | None = None
    max_samples: int = 1024
    token_budget: int = 8192
    max_length: int = 384


SMALL: Final = Start("tiny", 1, 2, 16, 64)


def _started(start: Start, cache: str) -> dict[str, Any]:
    arguments = [sys.executable, "-m", __name__, json.dumps(dataclasses.asdict(start)), cache]
    begin, reached = time.perf_counter(), dict[str, Any]()
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            name, _, content = line.strip().partition(" ")
            if name in STEPS:
                reached[name] = time.perf_counter() - begin
            elif name == "programs":
                reached[name] = json.loads(content)
    if process.returncode or set(reached) != {*STEPS, "programs"}:
        raise RuntimeError(f"a start ended with code {process.returncode} after {', '.join(reached) or 'nothing'}")
    return reached


def _main(settings: Mapping[str, Any], cache: Path) -> None:
    """Starts once, and prints a line at each stage."""
    start = Start(**settings)
    decoder = presets.decoder(start.preset, start.layers)
    jax.block_until_ready(split(decoder)[1])
    print("model", flush=True)
    config = EngineConfig(max_samples=start.max_samples, token_budget=start.token_budget, max_length=start.max_length)
    with Engine(decoder, config=config) as engine:
        engine.warm_up(cache=cache, in_background=True)
        print("ready", flush=True)
        engine.wait_for_programs()
        print("complete", flush=True)
        programs = [{"purpose": one.purpose, "before_ready": one.is_essential} for one in engine.programs()]
        print("programs", json.dumps(programs), flush=True)


def study(run: Run, *, preset: options.Preset = Start.preset) -> Result:
    start = SMALL if run.small else Start(preset)
    with tempfile.TemporaryDirectory() as cache:
        seconds = {name: _started(start, cache) for name in ("from nothing", "with the cache")}
        size = sum(path.stat().st_size for path in Path(cache).rglob("*.program"))
    programs = seconds["from nothing"].pop("programs")
    seconds["with the cache"].pop("programs")
    content = {"start": dataclasses.asdict(start), "seconds": seconds, "cache_bytes": size, "programs": programs}
    return Result(content)


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]), Path(sys.argv[2]))
