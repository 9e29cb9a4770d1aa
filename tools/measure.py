"""Runs the measurements of `benchmarks/measurements.toml` one after the other, each within a time of its own.

    python tools/measure.py --out results [--seconds 540] [NAME ...]

Each measurement writes what it prints to NAME.log and its result to NAME.json. One that takes more than twice its time
is interrupted, as by Ctrl-C, so that it can still say how far it came. A measurement that would not fit into what is
left of `--seconds` is left out. The exit code is 1 if one failed or was left out.
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
"""Seconds that an interrupted measurement has to end."""


@dataclasses.dataclass(frozen=True)
class Measurement:
    """A command, and about how many seconds it takes.

    Attributes:
        name: its name, which its log and its result get.
        command: as for a shell; `{out}` stands for the result's file.
        seconds: what it takes, compilation included.
    """

    name: str
    command: str
    seconds: int

    def run(self, folder: Path, limit: float) -> str:
        """Runs the command for at most `limit` seconds, and returns how it ended: "passed" or what else it did."""
        words = shlex.split(self.command.format(out=shlex.quote(str(folder / f"{self.name}.json"))))
        if words[0] == "python":
            words[0] = sys.executable
        with (folder / f"{self.name}.log").open("wb") as log:
            # A session of its own, so that an interrupt reaches the processes that it has started.
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
    """A context in which processes are started that can be interrupted.

    A shell has what it runs in the background ignore interrupts, and processes inherit that, but no handler.
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
    """Returns the measurements of a file, those that are named, in that order, or all.

    Raises:
        ValueError: there is none of a name.
    """
    known = {name: Measurement(name, **fields) for name, fields in tomllib.loads(file.read_text()).items()}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"{file.name} has no measurement {', '.join(unknown)}; accepted: {', '.join(known)}")
    return [known[name] for name in names or known]


def run_all(chosen: Sequence[Measurement], folder: Path, seconds: float) -> dict[str, str]:
    """Runs measurements one after the other, and returns how each ended."""
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + seconds
    ends: dict[str, str] = {}
    for one in chosen:
        began = time.monotonic()
        left = deadline - began
        # The first has the whole time: nobody would name it otherwise.
        fits = not ends or left > one.seconds
        ends[one.name] = one.run(folder, min(left, 2 * one.seconds)) if fits else f"left out: {left:.0f} s were left"
        print(f"{one.name}: {ends[one.name]} ({time.monotonic() - began:.0f} s)", flush=True)
    return ends


def main(arguments: Sequence[str]) -> int:
    """Runs what the command line names."""
    parser = argparse.ArgumentParser(description="Run measurements one after the other, each within its time.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="measurements; all if none is named")
    parser.add_argument("--out", type=Path, required=True, help="the folder of logs and results")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="the time that all of them may take")
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
