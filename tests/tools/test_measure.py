"""Measurements run one after the other, each within its time, and those that are listed exist."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.commands import is_command
from tests.server.running_server import wait_until
from tests.support.waits import HANGS_AFTER
from tools import measure
from tools.measure import FAILED, INTERRUPTED, LIST, PASSED, ROOT, Measurement, Record, in_order, main, measurements

COUNTS = (1, 2, 4, 8)
LISTED = [one for devices in COUNTS for one in measurements(LIST, devices)]


def python(name: str, code: str, seconds: int = 60) -> Measurement:
    return Measurement(name, f"python -c {shlex.quote(code)}", seconds)


def run_all(chosen: list[Measurement], folder: Path, seconds: float, *, again: bool = False) -> dict[str, str]:
    record = Record(folder, tiny=False)
    measure.run_all(in_order(chosen, record, again=again), folder, record, time.monotonic() + seconds)
    return {name: end["outcome"] for name, end in Record(folder, tiny=False).ends.items()}


def test_each_measurement_has_its_log_and_says_how_it_ended(tmp_path: Path) -> None:
    write = Measurement("written", f"{sys.executable} -c \"open('{{out}}', 'w').write('[{{devices}}]')\"", 60, 4)
    failing = python("failed", "print('the reason'); raise SystemExit(3)")
    chosen = [python("said", "print('so')"), failing, write]
    assert run_all(chosen, tmp_path, 600) == {"said": PASSED, "failed": FAILED, "written": PASSED}
    assert (tmp_path / "said.log").read_text() == "so\n"
    assert (tmp_path / "written.json").read_text() == "[4]"
    lines = measure.table(chosen, Record(tmp_path, tiny=False)).splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["said", PASSED], ["failed", FAILED], ["written", PASSED]]
    assert lines[2].endswith("exit code 3; the reason")


@pytest.mark.parametrize("disposition", [signal.default_int_handler, signal.SIG_IGN], ids=["here", "in background"])
def test_what_takes_too_long_is_interrupted_and_what_does_not_fit_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], disposition: Any
) -> None:
    wait = "import time; print('begun', flush=True); time.sleep(10_000)"
    code = f"try:\n    {wait}\nexcept KeyboardInterrupt:\n    print('so far')"
    log = tmp_path / "long.log"

    class Begun(subprocess.Popen):
        """A process whose time is over as soon as it has begun, however long it takes to begin."""

        def wait(self, timeout: float | None = None) -> int:
            if timeout == 20:
                wait_until(lambda: log.read_text())
                timeout = 0.1
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Begun)
    monkeypatch.setattr(measure, "GRACE", HANGS_AFTER)
    before = signal.signal(signal.SIGINT, disposition)
    chosen = [python("long", code, seconds=10), python("late", "print()", seconds=10_000)]
    try:
        ends = run_all(chosen, tmp_path, 9_000)
    finally:
        signal.signal(signal.SIGINT, before)
    assert ends == {"long": INTERRUPTED}
    assert log.read_text() == "begun\nso far\n"
    assert "late: left: it takes 10000 s" in capsys.readouterr().out
    assert not (tmp_path / "late.log").exists()
    assert "late         left" in measure.table(chosen, Record(tmp_path, tiny=False))


_SERVER = """
import subprocess, sys, time
server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(10_000)"], start_new_session=True)
print(server.pid, flush=True)
{end}
"""


@pytest.mark.parametrize("end", ["", "raise SystemExit(1)"], ids=["passed", "failed"])
def test_a_server_in_another_session_ends_with_its_measurement(tmp_path: Path, end: str) -> None:
    run_all([python("serves", _SERVER.format(end=end))], tmp_path, 600)
    assert not is_running(int((tmp_path / "serves.log").read_text()))


def test_what_runs_ends_with_the_tool_and_counts_as_interrupted(tmp_path: Path) -> None:
    listed = tmp_path / "list.toml"
    code = _SERVER.format(end="time.sleep(10_000)")
    command = f"python -c {shlex.quote(code)}"
    listed.write_text(f"[waits]\ncommand = {json.dumps(command)}\ntiny = {json.dumps(command)}\nseconds = 60\n")
    out = tmp_path / "out"
    words = [sys.executable, "tools/measure.py", "--tiny", "--list", str(listed), "--out", str(out)]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as tool:
        wait_until(lambda: (out / "waits.log").exists() and (out / "waits.log").read_text().endswith("\n"))
        server = int((out / "waits.log").read_text())
        assert is_running(server)
        tool.terminate()
        assert tool.wait(HANGS_AFTER) == 128 + signal.SIGTERM
    assert not is_running(server)
    assert Record(out, tiny=True).outcome("waits") == INTERRUPTED
    assert "this process was ended" in (out / "table.txt").read_text()


def is_running(process: int) -> bool:
    """Returns whether a process exists that is not a zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_second_call_runs_what_was_left_and_then_what_was_interrupted(tmp_path: Path) -> None:
    chosen = [python(name, f"print('{name}')") for name in ("passed", "failed", "cut", "left")]
    record = Record(tmp_path, tiny=False)
    for name, outcome in (("passed", PASSED), ("failed", FAILED), ("cut", INTERRUPTED)):
        record.note(name, outcome)
    again = Record(tmp_path, tiny=False)
    assert [one.name for one in in_order(chosen, again, again=False)] == ["left", "cut"]
    assert [one.name for one in in_order(chosen, again, again=True)] == ["passed", "failed", "cut", "left"]
    assert run_all(chosen, tmp_path, 600) == {"passed": PASSED, "failed": FAILED, "cut": PASSED, "left": PASSED}
    assert sorted(file.name for file in tmp_path.glob("*.log")) == ["cut.log", "left.log"]


def test_what_was_interrupted_gets_all_the_time_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []
    monkeypatch.setattr(Measurement, "run", lambda self, folder, limit, tiny: limits.append(limit) or (PASSED, ""))
    record = Record(tmp_path, tiny=False)
    record.note("cut", INTERRUPTED)
    run_all([python("cut", ""), python("new", "")], tmp_path, 5_000)
    new, cut = limits
    assert new == 120 and 4_000 < cut <= 5_000


def test_small_sizes_run_on_as_many_simulated_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed = tmp_path / "list.toml"
    code = "import os; print(os.environ['XLA_FLAGS'], os.environ['JAX_PLATFORMS'])"
    command = json.dumps(f"python -c {shlex.quote(code)}")
    listed.write_text(
        f"[flags]\ncommand = 'python missing.py'\ntiny = {command}\nseconds = 9\ndevices = [4]\n"
        "[large]\ncommand = 'python missing.py'\nseconds = 9\ndevices = [4]\n"
    )
    arguments = ["--devices", "4", "--list", str(listed), "--out", str(tmp_path / "out")]
    assert main([*arguments, "--tiny"]) == 0
    assert "device_count=4" in (tmp_path / "out" / "flags-4.log").read_text()
    assert "it has no small sizes" in (tmp_path / "out" / "table.txt").read_text()
    with pytest.raises(SystemExit):
        main(arguments)
    assert "has results of tiny sizes; accepted: another folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "noise-h100"], "no measurement noise-h100 for --devices 1; accepted: noise,"),
        (
            ["--devices", "4", "--only", "noise"],
            "no measurement noise for --devices 4; accepted: mesh-bits-exp",
        ),
        (["--devices", "3"], "measurements.toml has nothing for --devices 3"),
        (["--devices", "8"], "--devices is 8; accepted: up to 2, the GPUs of this machine, or --tiny"),
    ],
)
def test_what_cannot_run_is_refused_with_what_can(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nprintf 'GPU 0: NVIDIA H100\\n  MIG\\nGPU 1: NVIDIA H100\\n'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path / "out"), *arguments])
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("out/*.log"))


def test_names_of_several_devices_end_in_their_number_and_need_not_be_given_with_it() -> None:
    both = measurements(LIST, 4, ["mesh-speed-8b", "mesh-bits-8b-4"])
    assert [one.name for one in both] == ["mesh-bits-8b-4", "mesh-speed-8b-4"]
    assert both[0].tiny == f"{both[0].command} --small" and both[0].devices == 4


@pytest.mark.parametrize("one", LISTED, ids=lambda one: one.name)
def test_what_is_listed_names_commands_and_files_that_there_are(one: Measurement) -> None:
    words = shlex.split(one.command)
    assert is_command(" ".join(words[:4])) or words[:3] == ["python", "-m", "pytest"]
    assert all((ROOT / word).is_file() for word in words if word.endswith(".py"))
    assert ("{out}" in one.command) != one.name.startswith("tests-")
    assert one.devices == 1 or ("{devices}" in one.command and one.tiny)
    assert not one.tiny or is_command(" ".join(shlex.split(one.tiny)[:4]))
    # A call of ten minutes has nine for measurements.
    assert one.seconds <= 540
