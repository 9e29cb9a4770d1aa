"""Runs the measurements of `benchmarks/measurements.toml` for a number of GPUs, each in a process of its own.

    python tools/measure.py --devices 4 --out DIR [--minutes 9] [--only NAME ...] [--tiny]

They run in the order of the file, which is the order of their worth. NAME.json in DIR is a measurement's result and
NAME.log its output; with several GPUs, names end in their number. table.txt says what passed, failed or was left, and
ran.json what a later call with the same DIR need not run again: what passed or failed. `--only` runs such measurements
again.

A measurement is interrupted after twice its expected time, as by Ctrl-C, so that it can still report its progress. One
that does not fit into the rest of `--minutes` is left for a later call. Whatever a measurement started ends with it,
such as a server in a session of its own. `--tiny` runs small sizes on simulated devices of the CPU. The exit code is 1
unless all have passed.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import tomllib
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

ROOT: Final = Path(__file__).parents[1]
LIST: Final = ROOT / "benchmarks" / "measurements.toml"
GRACE: Final = 30
"""Time limit for an interrupted measurement to exit, in seconds."""
MARK: Final = "DETJAX_MEASUREMENT"
"""The environment variable by which the processes of a measurement are known, whatever session they are in."""
KEPT: Final = ROOT / ".jax_cache" / "measurements"
"""Compiled programs of measurements whose results do not depend on how long compilation takes."""
TINY_SECONDS: Final = 60
"""The expected duration of small sizes, mostly compilation."""
PASSED, FAILED, INTERRUPTED, LEFT = "passed", "failed", "interrupted", "left"


@dataclasses.dataclass(frozen=True)
class Measurement:
    """A command and its expected duration.

    Attributes:
        name: the name of the measurement, its log and its result.
        command: a command line; `{out}` stands for the result's file, and `{devices}` for the number of devices.
        seconds: the expected duration, including compilation.
        devices: the number of devices.
        tiny: the command of `--tiny`; empty: there is nothing that a CPU can run in seconds.
        keeps_programs: keep compiled programs for other measurements and later calls.
    """

    name: str
    command: str
    seconds: int
    devices: int = 1
    tiny: str = ""
    keeps_programs: bool = False

    def run(self, folder: Path, limit: float, *, tiny: bool = False) -> tuple[str, str]:
        """Runs the command for at most `limit` seconds, and returns its outcome and what explains it."""
        out = shlex.quote(str(folder / f"{self.name}.json"))
        words = shlex.split((self.tiny if tiny else self.command).format(out=out, devices=self.devices))
        if words[0] == "python":
            words[0] = sys.executable
        mark, log = uuid.uuid4().hex, folder / f"{self.name}.log"
        process: subprocess.Popen[bytes] | None = None
        try:
            with log.open("wb") as output, _taking_interrupts():
                # A separate session, so that an interrupt also reaches its child processes.
                process = subprocess.Popen(
                    words,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    cwd=ROOT,
                    env=self._environment(mark, tiny=tiny),
                    start_new_session=True,
                )
            code = process.wait(max(0.0, limit))
        except subprocess.TimeoutExpired:
            assert process is not None
            _interrupt(process)
            return INTERRUPTED, f"after {limit:.0f} s; {_last_line(log)}"
        finally:
            _kill_all(process, mark)
        if code == 0:
            return PASSED, ""
        return FAILED, f"exit code {code}; {_last_line(log)}"

    def _environment(self, mark: str, *, tiny: bool) -> dict[str, str]:
        changed = {MARK: mark}
        if self.keeps_programs:
            KEPT.mkdir(parents=True, exist_ok=True)
            changed["JAX_COMPILATION_CACHE_DIR"] = str(KEPT)
        if tiny:
            flags = f"--xla_force_host_platform_device_count={self.devices} --xla_backend_optimization_level=0"
            # Threads that stand for devices wait long for one another if they outnumber the processors.
            flags += " --xla_cpu_collective_call_terminate_timeout_seconds=600"
            changed |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
        return {**os.environ, **changed}


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


def _interrupt(process: subprocess.Popen[bytes]) -> None:
    """Interrupts a process and all of its session, and gives it some time to exit."""
    os.killpg(process.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)


def _kill_all(process: subprocess.Popen[bytes] | None, mark: str) -> None:
    """Kills what is left of a measurement, and waits until it has gone, so that the devices' memory is free."""
    if process is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    end = time.monotonic() + GRACE
    while (left := _marked(mark)) and time.monotonic() < end:
        for number in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        time.sleep(0.05)


def _marked(mark: str) -> list[int]:
    """Returns the processes whose environment has the mark, from Linux's /proc; none on other systems."""
    wanted, numbers = f"{MARK}={mark}".encode(), []
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if wanted in file.read_bytes().split(b"\0"):
                numbers.append(int(file.parent.name))
    return numbers


def _last_line(log: Path) -> str:
    """Returns the last line of a log that is not empty: the error's, where there was one."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"


def measurements(file: Path, devices: int, names: Sequence[str] = ()) -> list[Measurement]:
    """Returns the measurements of a file for a number of devices, or the named ones of them, in the file's order.

    Raises:
        ValueError: a name is unknown, or nothing is listed for this number of devices.
    """
    known: dict[str, Measurement] = {}
    listed = tomllib.loads(file.read_text())
    for name, fields in listed.items():
        if devices in fields.pop("devices", [1]):
            known[name] = _read(name if devices == 1 else f"{name}-{devices}", devices, fields)
    if not known:
        raise ValueError(f"{file.name} has nothing for --devices {devices}")
    accepted = known | {one.name: one for one in known.values()}
    if unknown := [name for name in names if name not in accepted]:
        raise ValueError(
            f"{file.name} has no measurement {', '.join(unknown)} for --devices {devices}; accepted: {', '.join(known)}"
        )
    chosen = [accepted[name] for name in names]
    return [one for one in known.values() if not names or one in chosen]


def _read(name: str, devices: int, fields: Mapping[str, Any]) -> Measurement:
    """Returns an entry of the list. Studies have small sizes of their own; others name a command for `--tiny`."""
    one = Measurement(name, devices=devices, **fields)
    has_sizes = one.command.startswith(("python -m benchmarks ", "python -m detjax.bench run"))
    return dataclasses.replace(one, tiny=f"{one.command} --small") if has_sizes and not one.tiny else one


class Record:
    """The outcomes of earlier calls and this one, in DIR/ran.json; each change is written at once.

    Attributes:
        ends: by name of the measurement, its outcome, its explanation and its seconds.
    """

    def __init__(self, folder: Path, *, tiny: bool) -> None:
        """Reads the record of a folder, which is made if it does not exist.

        Raises:
            ValueError: the folder has results of other sizes.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._file, self._tiny = folder / "ran.json", tiny
        self.ends: dict[str, dict[str, Any]] = {}
        if self._file.exists():
            content = json.loads(self._file.read_text())
            if content["tiny"] != tiny:
                sizes = "tiny" if content["tiny"] else "full"
                raise ValueError(f"{folder} has results of {sizes} sizes; accepted: another folder")
            self.ends = content["measurements"]

    def note(self, name: str, outcome: str, says: str = "", seconds: float = 0.0) -> None:
        """Records how a measurement ended, or that it runs; if this process is killed, that stands as interrupted."""
        self.ends[name] = {"outcome": outcome, "says": says, "seconds": round(seconds, 1)}
        # Replaced at once: a reader never sees half of it.
        part = self._file.with_suffix(".part")
        part.write_text(json.dumps({"tiny": self._tiny, "measurements": self.ends}, indent=1) + "\n")
        part.replace(self._file)

    def outcome(self, name: str) -> str:
        """Returns a measurement's outcome so far."""
        return self.ends.get(name, {"outcome": LEFT})["outcome"]


def in_order(chosen: Sequence[Measurement], record: Record, *, again: bool) -> list[Measurement]:
    """Returns the measurements that are to run: those that never ran, and then those that were interrupted.

    Args:
        chosen: measurements.
        record: what has run.
        again: whether all of them run, whatever the record says.
    """
    if again:
        return list(chosen)
    return [one for outcome in (LEFT, INTERRUPTED) for one in chosen if record.outcome(one.name) == outcome]


def run_all(
    chosen: Sequence[Measurement], folder: Path, record: Record, deadline: float, *, tiny: bool = False
) -> None:
    """Runs measurements in sequence until the deadline, in seconds of `time.monotonic`."""
    is_first = True
    for one in chosen:
        if tiny and not one.tiny:
            continue
        began = time.monotonic()
        left = deadline - began
        # The first one runs in any case, or none that is longer than a call ever would.
        expected = min(TINY_SECONDS, one.seconds) if tiny else one.seconds
        if left < expected and not is_first:
            print(f"{one.name}: left: it takes {expected} s, and {max(0.0, left):.0f} s are left", flush=True)
            continue
        is_first = False
        # Small sizes and what took too long once get all the time there is.
        limit = left if tiny or record.outcome(one.name) == INTERRUPTED else min(left, 2 * one.seconds)
        record.note(one.name, INTERRUPTED, "this process was ended")
        outcome, says = one.run(folder, limit, tiny=tiny)
        record.note(one.name, outcome, says, time.monotonic() - began)
        print(f"{one.name}: {outcome} ({time.monotonic() - began:.0f} s) {says}".rstrip(), flush=True)


def table(chosen: Sequence[Measurement], record: Record, *, tiny: bool = False) -> str:
    """Returns a line for each measurement: its name, outcome, seconds, and what explains the outcome."""
    rows = [("measurement", "outcome", "seconds", "what it says")]
    for one in chosen:
        if tiny and not one.tiny:
            rows.append((one.name, LEFT, "", "it has no small sizes"))
        elif (end := record.ends.get(one.name)) is None:
            rows.append((one.name, LEFT, "", f"it takes about {one.seconds} s"))
        else:
            rows.append((one.name, end["outcome"], f"{end['seconds']:.0f}", end["says"]))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        "  ".join((name.ljust(widths[0]), outcome.ljust(widths[1]), seconds.rjust(widths[2]), says)).rstrip()
        for name, outcome, seconds, says in rows
    ]
    return "\n".join(lines) + "\n"


def gpus() -> int:
    """Returns the number of this machine's NVIDIA GPUs, without initializing one in this process."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):  # containers may lack it
        return len(list(Path("/dev").glob("nvidia[0-9]*")))
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def main(arguments: Sequence[str]) -> int:
    """Runs the measurements for the devices named on the command line."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(description="Run the measurements for a number of GPUs, each with a time limit.")
    parser.add_argument("--devices", type=int, default=1, help="the number of GPUs: 1, 2, 4 or 8; default: 1")
    parser.add_argument("--out", type=Path, required=True, help="the folder of logs and results")
    parser.add_argument("--only", nargs="+", default=(), metavar="NAME", help="these measurements, even if they ran")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="time limit for all of them")
    parser.add_argument("--tiny", action="store_true", help="small sizes on simulated devices of the CPU")
    parser.add_argument("--list", type=Path, default=LIST, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    folder = options.out.resolve()
    try:
        chosen = measurements(options.list, options.devices, options.only)
        record = Record(folder, tiny=options.tiny)
    except ValueError as error:
        parser.error(str(error))
    if not options.tiny and (present := gpus()) < options.devices:
        parser.error(
            f"--devices is {options.devices}; accepted: up to {present}, the GPUs of this machine, "
            "or --tiny, which simulates devices on the CPU"
        )
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        run_all(
            in_order(chosen, record, again=bool(options.only)),
            folder,
            record,
            began + 60 * options.minutes,
            tiny=options.tiny,
        )
    finally:
        signal.signal(signal.SIGTERM, before)
        text = table(chosen, record, tiny=options.tiny)
        (folder / "table.txt").write_text(text)
        print(f"\n{text}", end="", flush=True)
    expected = [one for one in chosen if one.tiny or not options.tiny]
    return int(any(record.outcome(one.name) != PASSED for one in expected))


def _exit(number: int, _: Any) -> NoReturn:
    """Ends this process as an exception, so that a measurement in progress is ended too."""
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
