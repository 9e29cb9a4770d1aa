"""The processor time of tests, by `--cpu-times`."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.cpu_times import by_file

ROOT = Path(__file__).parents[2]
BUSY = """
import time

def work(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
"""
TESTS = """
import subprocess, sys, time
import pytest
from busy import work

@pytest.fixture(scope="module")
def costly(): work(0.5)

def test_that_sets_up(costly): work(0.5)

def test_of_a_process(costly): subprocess.run([sys.executable, "-c", "from busy import work; work(1)"], check=True)
"""


def test_seconds_are_those_of_fixtures_and_processes_and_not_of_waits(tmp_path: Path) -> None:
    (tmp_path / "busy.py").write_text(BUSY)
    (tmp_path / "test_busy.py").write_text(TESTS)
    (tmp_path / "test_idle.py").write_text("import time\n\ndef test_wait(): time.sleep(1)\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.cpu_times", "--cpu-times", "times.jsonl"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    subprocess.run(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, check=True)
    seconds = by_file(tmp_path / "times.jsonl")
    assert list(seconds) == ["test_busy.py", "test_idle.py"]
    assert 1.9 < seconds["test_busy.py"] < 10
    assert seconds["test_idle.py"] < 0.5
