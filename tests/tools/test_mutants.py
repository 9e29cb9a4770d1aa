"""The runner of planted faults tells a caught fault from a survivor and from a broken entry."""

from pathlib import Path

import pytest

from tools.mutants import Mutant, run_tests, try_mutant

SOURCE = "def double(x):\n    return 2 * x\n"
TEST = "from double import double\n\n\ndef test_double():\n    assert double(2) == 4\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "double.py").write_text(SOURCE)
    (tmp_path / "test_double.py").write_text(TEST)
    (tmp_path / "conftest.py").write_text(
        'def pytest_addoption(parser):\n    parser.addoption("--ci-cases", action="store_true")\n'
    )
    return tmp_path


def mutant(old: str, new: str, *tests: str) -> Mutant:
    return Mutant("a fault", "double.py", old, new, tests or ("test_double.py",), "list.toml")


@pytest.mark.parametrize(
    ("planted", "outcome"),
    [
        (mutant("2 * x", "3 * x"), "caught"),
        (mutant("2 * x", "x * 2"), "survived"),
        (mutant("2 * x", "2 *"), "error"),
        (mutant("4 * x", "2 * x"), "error"),
        (mutant("2 * x", "2 * x"), "error"),
        (mutant("2 * x", "3 * x", "test_missing.py"), "error"),
        (mutant("2 * x", "3 * x", "test_double.py", "-k", "nothing"), "error"),
    ],
    ids=["caught", "survives", "no Python", "old text is missing", "no change", "no such test", "no test is chosen"],
)
def test_the_outcome_says_what_became_of_the_fault(checkout: Path, planted: Mutant, outcome: str) -> None:
    assert try_mutant(planted, checkout, timeout=300).outcome == outcome
    assert (checkout / "double.py").read_text() == SOURCE


def test_a_test_without_end_is_stopped(checkout: Path) -> None:
    (checkout / "test_double.py").write_text("import time\n\n\ndef test_wait():\n    time.sleep(600)\n")
    assert run_tests(("test_double.py",), checkout, timeout=5)[0] is None
