"""Measurements run one after the other, each within its time, and those that are listed exist."""

import shlex
import sys
from pathlib import Path

import pytest

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


def test_what_takes_too_long_is_interrupted_and_what_does_not_fit_is_left_out(tmp_path: Path) -> None:
    wait = "import time; print('begun', flush=True); time.sleep(600)"
    code = f"try:\n    {wait}\nexcept KeyboardInterrupt:\n    print('so far')"
    ends = run_all([python("long", code, seconds=10), python("late", "print()")], tmp_path, 30)
    assert ends["long"] == "interrupted after 20 s"
    assert (tmp_path / "long.log").read_text() == "begun\nso far\n"
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
def test_what_is_listed_names_files_that_there_are(one: Measurement) -> None:
    files = [word for word in shlex.split(one.command) if word.endswith(".py")]
    assert files or "-m detjax.bench" in one.command
    assert all((ROOT / file).is_file() for file in files)
    assert ("{out}" in one.command) != one.name.startswith("tests-")
