"""How long a server takes until it can answer: from nothing, and with the programs that the start before left.

A start is a process of its own: it imports the package, makes the model, and compiles or loads the programs.
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

from detjax.bench import presets, provenance
from detjax.engine import Engine, EngineConfig
from detjax.models.network import split

STEPS: Final = ("model", "ready", "complete")
"""What a start reaches: the weights are there, every request can be served, every program is there."""


@dataclasses.dataclass(frozen=True)
class Start:
    """What is started.

    Attributes:
        preset: the shape of the model, whose weights are random.
        layers: layers of the model; None: its own.
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


def measured(start: Start, command: str) -> dict[str, Any]:
    """Returns the content of a result: seconds from the start of the process to each step, and every program."""
    with tempfile.TemporaryDirectory() as cache:
        runs = {name: _started(start, cache) for name in ("from nothing", "with the cache")}
        size = sum(path.stat().st_size for path in Path(cache).rglob("*.program"))
    programs = runs["from nothing"].pop("programs")
    runs["with the cache"].pop("programs")
    return provenance.heading(command) | {
        "start": dataclasses.asdict(start),
        "seconds": runs,
        "cache_bytes": size,
        "programs": programs,
    }


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
    """Starts once, and prints a line at each step."""
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


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]), Path(sys.argv[2]))
