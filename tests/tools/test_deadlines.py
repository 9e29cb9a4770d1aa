"""Tests that have not started by a time are left out, by name."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = """
import pytest

@pytest.fixture
def costly(): print("a fixture ran")

def test_one(costly): pass

def test_another(costly): pass
"""


@pytest.mark.parametrize(("later", "result"), [(-1, "2 skipped"), (3600, "2 passed"), (None, "2 passed")])
def test_no_test_starts_after_the_deadline(tmp_path: Path, later: float | None, result: str) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    until = [] if later is None else ["--until", str(time.time() + later)]
    command = [sys.executable, "-m", "pytest", "-ra", "-s", "-p", "tests.support.deadlines", *until]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert result in done.stdout
    is_over = later is not None and later < 0
    assert ("a fixture ran" in done.stdout) != is_over
    for test in ("test_one", "test_another"):
        assert (f"the time of this run is over before test_some.py::{test}" in done.stdout) == is_over
