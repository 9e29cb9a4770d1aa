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
from benchmarks.study import SMALL_ENGINE, EngineSettings, Result, Run
from detjax.engine import Compilers, Engine
from detjax.models.network import split

STEPS: Final = ("model", "ready", "complete")
"""The stages of a start: weights are loaded, all requests can be served, all programs are compiled."""


SETTINGS: Final = EngineSettings(max_samples=1024, token_budget=8192, max_length=384, num_pages=None)


def _started(start: EngineSettings, cache: str) -> dict[str, Any]:
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
    start = EngineSettings(**settings)
    compilers = Compilers(cache)
    decoder = start.decoder()
    jax.block_until_ready(split(decoder)[1])
    print("model", flush=True)
    with compilers, Engine(decoder, config=start.config()) as engine:
        engine.warm_up(cache=cache, in_background=True, compilers=compilers)
        print("ready", flush=True)
        engine.wait_for_programs()
        print("complete", flush=True)
        programs = [{"purpose": one.purpose, "before_ready": one.is_essential} for one in engine.programs()]
        print("programs", json.dumps(programs), flush=True)


def study(run: Run, *, preset: options.Preset = SETTINGS.preset) -> Result:
    start = SMALL_ENGINE if run.small else dataclasses.replace(SETTINGS, preset=preset)
    with tempfile.TemporaryDirectory() as cache:
        seconds = {name: _started(start, cache) for name in ("from nothing", "with the cache")}
        size = sum(path.stat().st_size for path in Path(cache).rglob("*.program"))
    programs = seconds["from nothing"].pop("programs")
    seconds["with the cache"].pop("programs")
    content = {"start": dataclasses.asdict(start), "seconds": seconds, "cache_bytes": size, "programs": programs}
    return Result(content)


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]), Path(sys.argv[2]))
