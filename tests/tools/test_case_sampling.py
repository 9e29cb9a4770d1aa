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

@pytest.mark.sampled(0)
@pytest.mark.parametrize("z", range(2))
def test_costliest(z): pass

@pytest.mark.sampled(0)
def test_as_costly(): pass

def test_cheap(): pass
"""


def collected(folder: Path, *options: str) -> set[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "tests.support.case_sampling"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    result = subprocess.run(
        [*command, *options, str(folder)], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    return {line.partition("::")[2] for line in result.stdout.splitlines() if "::" in line}


def test_shares_have_every_case_and_those_that_follow_each_other_have_every_test(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    everything, sample = collected(tmp_path, "--all-cases"), collected(tmp_path)
    assert len(everything) == 15 and len(sample) == 4
    shares = [collected(tmp_path, "--share", f"{part}/4") - sample for part in range(4)]
    # Each of them has a case of one of the tests that the sample leaves out, and a part of the ten other cases.
    assert [("test_costliest[0]" in one, "test_as_costly" in one) for one in shares[:2]] == [
        (True, False),
        (False, True),
    ]
    assert sum(map(len, shares)) >= 11
    assert sample.union(*shares) == everything


@pytest.mark.parametrize("text", ["3/3", "1", "-1/2", "a/b", "0/0"])
def test_a_share_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="accepted: I/N, such as 0/12, with I below N"):
        case_sampling.share(text)
