"""Kills a training run with SIGKILL at random moments, and compares its result with an undisturbed run.

    python -m tools.kill_training --kills 20

A run learns from its rollouts. Its processes are killed at a random time after the start of a rollout, a step or a
save, alternately. Each process has another microbatch size and another number of simulated CPU devices. At the end, the
model's files and the log, except for its seconds, must have the same bytes.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
DEVICES: Final = 8
"""Simulated devices per process. Their number is part of the fingerprint; a run uses the first ones."""

PHASES: Final = ("rollouts", "step", "save")
SCHEDULES: Final = tuple(zip((64, 128, 256) * 4, (1, 2, 4, 8) * 3, strict=True))
"""Tokens per microbatch, and devices: twelve pairs. Neighbours differ in both."""

LONGEST_DELAY: Final = 0.4
"""Maximum delay between the start of a phase and the kill, in seconds; saving a small model is faster."""

MAX_SECONDS: Final = 600
"""Time limit of a process, in seconds."""

_START: Final = ("--task", "addition:1", "--task", "brackets:1", "--layers", "1", "--width", "32")
_LEARN: Final = ("--kind", "reinforcement", "--task", "addition:1", "--task", "brackets:1", "--prompts", "4")
_LEARN_MORE: Final = ("--samples", "4", "--max-tokens", "8", "--save-every", "2")


@dataclasses.dataclass(frozen=True)
class Kill:
    """One kill.

    Attributes:
        phase: the phase of the process.
        steps: its number of computed steps.
        microbatch_tokens: its microbatch size.
        devices: its number of devices.
    """

    phase: str
    steps: int
    microbatch_tokens: int
    devices: int


def attack(folder: Path, kills: int, seed: int = 0, report: Callable[[Any], Any] = print) -> list[str]:
    """Returns the differences between a run with `kills` kills and an undisturbed one; empty if they are equal.

    Args:
        folder: the folder of the runs.
        kills: the number of kills.
        seed: the seed of the moments.
        report: called with each kill.

    Raises:
        RuntimeError: a process that was not killed failed.
    """
    # Each process computes at least two steps, so that work remains after the last kill.
    steps, chance = 3 * kills + 4, random.Random(seed)
    start = folder / "start"
    _finish(folder, [str(start), *_START, "--steps", "40", "--prompts", "16", "--learning-rate", "1e-2"])
    learn = [*_LEARN, *_LEARN_MORE, "--model", str(start / "model"), "--steps", str(steps)]
    _finish(folder, [str(folder / "whole"), *learn])
    schedules = itertools.cycle(SCHEDULES)
    for number in range(kills):
        tokens, devices = next(schedules)
        killed = [str(folder / "killed"), *learn, "--microbatch-tokens", str(tokens), "--devices", str(devices)]
        phase = PHASES[number % len(PHASES)]
        done = _kill(folder, killed, phase, chance.randint(1, 2), chance.uniform(0, LONGEST_DELAY))
        report(Kill(phase, done, tokens, devices))
    tokens, devices = next(schedules)
    _finish(folder, [str(folder / "killed"), *learn, "--microbatch-tokens", str(tokens), "--devices", str(devices)])
    return [*_differences(folder / "whole", folder / "killed", start / "model")]


def _differences(whole: Path, killed: Path, start: Path) -> Iterator[str]:
    for name in sorted(path.name for path in (whole / "model").iterdir()):
        if (whole / "model" / name).read_bytes() != (killed / "model" / name).read_bytes():
            yield f"{name} differs"
    if (whole / "model" / "model.safetensors").read_bytes() == (start / "model.safetensors").read_bytes():
        yield "nothing was learned"
    if _log(whole) != _log(killed):
        yield "the logs differ"


def _log(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def _process(folder: Path, arguments: Sequence[str]) -> subprocess.Popen[str]:
    """Starts a process that trains, and prints a line when a phase begins."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
    environment = os.environ | {
        "XLA_FLAGS": flags.strip(),
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
        # Without the cache every process would compile all programs.
        "JAX_COMPILATION_CACHE_DIR": str(folder / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    command = [sys.executable, "-m", "tools.kill_training", "--process", *arguments]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **pipes)


def _finish(folder: Path, arguments: Sequence[str]) -> None:
    with _process(folder, arguments) as process:
        output, _ = process.communicate(timeout=MAX_SECONDS)
    if process.returncode:
        raise RuntimeError(f"training ended with exit code {process.returncode}:\n{output}")


def _kill(folder: Path, arguments: Sequence[str], phase: str, occurrence: int, delay: float) -> int:
    """Kills a process after a phase has begun for the nth time, and returns its number of started steps."""
    steps, output = 0, []
    with _process(folder, arguments) as process:
        assert process.stdout is not None
        for line in process.stdout:
            output.append(line)
            steps += line == "phase step\n"
            occurrence -= line == f"phase {phase}\n"
            if not occurrence:
                break
        else:
            process.wait()
            raise RuntimeError(
                f"training ended with exit code {process.returncode} before its kill:\n{''.join(output)}"
            )
        time.sleep(delay)
        os.killpg(process.pid, signal.SIGKILL)
    return steps


def train(arguments: Sequence[str]) -> None:
    """Runs `detjax train`, and prints a line when a phase begins."""
    from detjax import cli
    from detjax.rl.runs import run
    from detjax.rl.runs.run_state import RunState
    from detjax.rl.trainer.trainer import Trainer

    def announced(phase: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            print(f"phase {phase}", flush=True)
            return fn(*args, **kwargs)

        return call

    run.rollouts = announced("rollouts", run.rollouts)
    Trainer.step = announced("step", Trainer.step)
    RunState.save = announced("save", RunState.save)
    cli.main(["train", *arguments])


def main() -> int:
    """Attacks a run, and returns 1 if its bytes differ from the undisturbed run's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="the number of kills")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the moments")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="detjax-kills-") as folder:
        problems = attack(
            Path(folder), arguments.kills, arguments.seed, lambda kill: print(f"killed: {kill}", flush=True)
        )
    print("; ".join(problems) or f"{arguments.kills} kills: the same bytes")
    return int(bool(problems))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--process"]:
        train(sys.argv[2:])
    else:
        sys.exit(main())
