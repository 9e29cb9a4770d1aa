"""Runs the measurements of `benchmarks/measurements.toml` in sequence, each with a time limit.

    python tools/measure.py --out results [--seconds 540] [NAME ...]

Each measurement writes its output to NAME.log and its result to NAME.json. After twice its expected time it is
interrupted, as by Ctrl-C, so that it can still report its progress. A measurement that does not fit into the rest of
`--seconds` is skipped. The exit code is 1 if one failed or was skipped.
"""

import argparse
import contextlib
import dataclasses
import os
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
GRACE = 30
"""Time limit for an interrupted measurement to exit, in seconds."""


@dataclasses.dataclass(frozen=True)
class Measurement:
    """A command and its expected duration.

    Attributes:
        name: the name of the measurement, its log and its result.
        command: a shell command line; `{out}` stands for the result's file.
        seconds: the expected duration, including compilation.
    """

    name: str
    command: str
    seconds: int

    def run(self, folder: Path, limit: float) -> str:
        """Runs the command for at most `limit` seconds, and returns "passed" or the reason of its failure."""
        words = shlex.split(self.command.format(out=shlex.quote(str(folder / f"{self.name}.json"))))
        if words[0] == "python":
            words[0] = sys.executable
        with (folder / f"{self.name}.log").open("wb") as log:
            # A separate session, so that an interrupt also reaches its child processes.
            with _taking_interrupts():
                process = subprocess.Popen(
                    words, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True
                )
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                _end(process)
                return f"interrupted after {limit:.0f} s"
        return "passed" if code == 0 else f"exit code {code}"


@contextlib.contextmanager
def _taking_interrupts() -> Iterator[None]:
    """A context whose child processes can be interrupted.

    Processes that a shell runs in the background ignore interrupts. Children inherit that, but not a handler.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def measurements(file: Path, names: Sequence[str] = ()) -> list[Measurement]:
    """Returns the named measurements of a file, in that order, or all.

    Raises:
        ValueError: a name is unknown.
    """
    known = {name: Measurement(name, **fields) for name, fields in tomllib.loads(file.read_text()).items()}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"{file.name} has no measurement {', '.join(unknown)}; accepted: {', '.join(known)}")
    return [known[name] for name in names or known]


def run_all(chosen: Sequence[Measurement], folder: Path, seconds: float) -> dict[str, str]:
    """Runs measurements in sequence, and returns the outcome of each."""
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + seconds
    ends: dict[str, str] = {}
    for one in chosen:
        began = time.monotonic()
        left = deadline - began
        # The first one always runs, since the user asked for it.
        fits = not ends or left > one.seconds
        ends[one.name] = one.run(folder, min(left, 2 * one.seconds)) if fits else f"left out: {left:.0f} s were left"
        print(f"{one.name}: {ends[one.name]} ({time.monotonic() - began:.0f} s)", flush=True)
    return ends


def main(arguments: Sequence[str]) -> int:
    """Runs the measurements named on the command line."""
    parser = argparse.ArgumentParser(description="Run measurements in sequence, each with a time limit.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="measurements; default: all")
    parser.add_argument("--out", type=Path, required=True, help="the folder of logs and results")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time limit for all of them")
    parser.add_argument("--list", type=Path, default=ROOT / "benchmarks" / "measurements.toml", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        chosen = measurements(options.list, options.names)
    except ValueError as error:
        parser.error(str(error))
    ends = run_all(chosen, options.out.resolve(), options.seconds)
    return int(any(end != "passed" for end in ends.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
