"""Measurements run one after the other, each within its time, and those that are listed exist."""

import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.commands import is_command
from tests.server.running_server import wait_until
from tests.support.waits import HANGS_AFTER
from tools import measure
from tools.measure import ROOT, Measurement, main, measurements, run_all

LISTED = measurements(ROOT / "benchmarks" / "measurements.toml")


def python(name: str, code: str, seconds: int = 60) -> Measurement:
    return Measurement(name, f"python -c {shlex.quote(code)}", seconds)


def test_each_measurement_has_its_log_and_says_how_it_ended(tmp_path: Path) -> None:
    write = Measurement("written", f"{sys.executable} -c \"open('{{out}}', 'w').write('[]')\"", 60)
    ends = run_all([python("said", "print('so')"), python("failed", "raise SystemExit(3)"), write], tmp_path, 600)
    assert ends == {"said": "passed", "failed": "exit code 3", "written": "passed"}
    assert (tmp_path / "said.log").read_text() == "so\n"
    assert (tmp_path / "written.json").read_text() == "[]"


@pytest.mark.parametrize("disposition", [signal.default_int_handler, signal.SIG_IGN], ids=["here", "in background"])
def test_what_takes_too_long_is_interrupted_and_what_does_not_fit_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disposition: Any
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
    try:
        ends = run_all([python("long", code, seconds=10), python("late", "print()", seconds=10_000)], tmp_path, 9_000)
    finally:
        signal.signal(signal.SIGINT, before)
    assert ends["long"] == "interrupted after 20 s"
    assert log.read_text() == "begun\nso far\n"
    assert ends["late"].startswith("left out: ")
    assert not (tmp_path / "late.log").exists()


def test_an_unknown_name_is_refused_with_those_that_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path), "delta-rule-h100"])
    message = capsys.readouterr().err
    assert "no measurement delta-rule-h100" in message
    assert "delta-rule-h200" in message


@pytest.mark.parametrize("one", LISTED, ids=lambda one: one.name)
def test_what_is_listed_names_commands_and_files_that_there_are(one: Measurement) -> None:
    words = shlex.split(one.command)
    assert is_command(" ".join(words[:4])) or words[:3] == ["python", "-m", "pytest"]
    assert all((ROOT / word).is_file() for word in words if word.endswith(".py"))
    assert ("{out}" in one.command) != one.name.startswith("tests-")
