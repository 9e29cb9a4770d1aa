"""Devices of several processes that share a model: bits of training and of answers, and the end if one is lost.

    python -m benchmarks processes --out benchmarks/results/processes-two-h100.json

Each process has one device. Together they train three steps with a sharded state, and answer requests with engines in
lockstep; gradients, logprobs, weights, state and answers must have the bits of one device, in every process. Then one
process kills itself amid requests. The engines of the others have to fail: by the watchdog, whose processes end with
exit code 70, or because a collective fails before. The exit code is 1 if bits differ, if another order of the batch has
the same bits, or if a process outlives the lost one.

The model has four layers, and each part compiles its own programs, in all processes at the same time. `--small` takes a
minute on a CPU.
"""

import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any, Final

from benchmarks import study as options
from benchmarks.devices import environment
from benchmarks.studies.processes.worker import FAILURE, PARTS, SMALL, Sizes
from benchmarks.study import Result, Run
from detjax.bench import command_line
from detjax.cli.options import Option
from detjax.engine.watchdog import EXIT_CODE_OF_A_FAILED_ENGINE

PART_SECONDS: Final = 240
"""Time limit of a part, in seconds."""
MARGIN: Final = 30
"""Seconds that a process may take to end after the limit for a step."""


def study(
    run: Run,
    *,
    processes: Annotated[int, Option("Processes, each with a device; a power of two.", minimum=2)] = 2,
    part: Annotated[list[str], options.names(PARTS)],
) -> Result:
    sizes = SMALL if run.small else Sizes()
    content: dict[str, Any] = {"processes": processes, "preset": sizes.preset, "layers": sizes.layers}
    problems = []
    for name in part:
        content[name] = (
            lost(sizes, processes, small=run.small) if name == "lost" else _computed(name, processes, small=run.small)
        )
        text = problem(name, content[name], sizes)
        problems += [f"{name}: {text}"] * bool(text)
        command_line.print_line(f"{name}: {text or 'as promised'}")
    return Result(content, "; ".join(problems))


def problem(part: str, content: Any, sizes: Sizes) -> str:
    """Returns what is wrong with the result of a part; empty: nothing."""
    if part == "lost":
        late = [one for one in content["survivors"] if one["seconds"] > sizes.step_seconds + MARGIN]
        wrong = [one for one in content["survivors"] if one["exit_code"] in (0, None) or not one["says"]]
        return f"processes outlived the lost one, or ended for another reason: {late or wrong}" if late or wrong else ""
    if part == "answers":
        digests = {one[arm] for one in content for arm in ("one", "several")}
        return "" if len(digests) == 1 else f"bits differ: {content}"
    digests = [one[arm]["digests"] for one in content for arm in ("one", "several")]
    if different := [key for key in digests[0] if len({one[key] for one in digests}) > 1]:
        return f"bits differ: {', '.join(different)}"
    control = [one["several, another order"]["digests"]["gradients"] for one in content]
    has_control = digests[0]["gradients"] not in control
    return "" if has_control else "another order of the batch has the same bits"


def _computed(part: str, processes: int, *, small: bool) -> list[Any]:
    """The results of all processes of a part."""
    with _started(part, processes, small=small) as (running, folder):
        end = time.monotonic() + PART_SECONDS
        codes = [process.wait(max(0.1, end - time.monotonic())) for process in running]
        if any(codes):
            logs = "\n".join(_log(folder, number)[-2000:] for number, code in enumerate(codes) if code)
            raise RuntimeError(f"processes: {part} ended with exit codes {codes}: {logs}")
        return [json.loads((folder / f"{number}.json").read_text()) for number in range(processes)]


def lost(sizes: Sizes, processes: int, *, small: bool) -> dict[str, Any]:
    """Returns the exit code of each process after the last one was killed, and the seconds until then."""
    survivors: list[dict[str, Any]] = []
    with _started("lost", processes, small=small) as (running, folder):
        running[-1].wait(PART_SECONDS)
        begin = time.monotonic()
        end = begin + sizes.step_seconds + 2 * MARGIN
        for number, process in enumerate(running[:-1]):
            code: int | None = None
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(max(0.1, end - time.monotonic()))
            survivors.append(
                {
                    "exit_code": code,
                    "by_the_watchdog": code == EXIT_CODE_OF_A_FAILED_ENGINE,
                    "seconds": time.monotonic() - begin,
                    "answered_before": "answering" in _log(folder, number),
                    "says": _said(_log(folder, number)),
                }
            )
    return {"step_seconds": sizes.step_seconds, "survivors": survivors}


def _said(log: str) -> str:
    """The reason of an engine's failure, as its process wrote it."""
    return next((line.removeprefix(FAILURE)[:300] for line in log.splitlines() if line.startswith(FAILURE)), "")


@contextlib.contextmanager
def _started(part: str, processes: int, *, small: bool) -> Any:
    """Runs a part in several processes, and yields them and the folder of their logs and results."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        folder, running = Path(directory), []
        for number in range(processes):
            out = folder / f"{number}.json"
            words = ["-m", "benchmarks.studies.processes.worker", part, port, number, processes, int(small), out]
            log = stack.enter_context((folder / f"{number}.log").open("wb"))
            process = subprocess.Popen(
                [sys.executable, *map(str, words)], env=environment(number), stdout=log, stderr=subprocess.STDOUT
            )
            running.append(stack.enter_context(process))
            stack.callback(process.kill)
        yield running, folder


def _log(folder: Path, number: int) -> str:
    return (folder / f"{number}.log").read_text(errors="replace")
