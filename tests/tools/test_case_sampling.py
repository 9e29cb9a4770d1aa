"""The cases of costly tests that a run has: a sample, a share of the rest, or all."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import case_sampling

ROOT = Path(__file__).parents[2]
TESTS = """
import pytest

@pytest.mark.sampled(2)
@pytest.mark.parametrize("x", range(7))
def test_costly(x): pass

@pytest.mark.sampled(1)
@pytest.mark.parametrize("y", range(4))
def test_costlier(y): pass

@pytest.mark.parametrize("z", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_large(z): pass

def test_cheap(): pass
"""


def collected(folder: Path, *options: str, name: str = "") -> set[str]:
    """Returns the cases of a folder, or of the test with this name, that pytest would run."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "tests.support.case_sampling", *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    result = subprocess.run(
        [*command, name or "."], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    return {line.partition("::")[2] for line in result.stdout.splitlines() if "::" in line}


def test_each_case_is_in_ci_or_in_a_share(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    everything, sample = collected(tmp_path, "--all-cases"), collected(tmp_path)
    assert len(everything) == 14
    assert {"test_large[0]", "test_cheap"} < sample and len(sample) == 5
    shares = [collected(tmp_path, "--share", f"{part}/4") for part in range(4)]
    assert all(one > sample for one in shares)
    assert sum(len(one - sample) for one in shares) == 9
    assert sample.union(*shares) == everything


def test_a_named_test_runs_whole_unless_cis_cases_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    name = "test_some.py::test_costly"
    assert len(collected(tmp_path, name=name)) == 7
    assert len(collected(tmp_path, "--ci-cases", name=name)) == 2


@pytest.mark.parametrize("mark", ["nightly", "sampled(0)"])
def test_a_test_without_a_case_in_ci_is_refused(mark: str, tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(f"import pytest\n@pytest.mark.{mark}\ndef test_large(): pass\n")
    assert collected(tmp_path, "--all-cases") == {"test_large"}
    with pytest.raises(subprocess.CalledProcessError) as refused:
        collected(tmp_path)
    assert "test_some.py::test_large has no case in CI; accepted: at least one" in refused.value.stderr


@pytest.mark.parametrize("text", ["3/3", "1", "-1/2", "a/b", "0/0"])
def test_a_share_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="accepted: I/N, such as 0/12, with I below N"):
        case_sampling.share(text)
