"""The lists of planted faults fit the code: each entry's text stands in its file, and its tests exist."""

from pathlib import Path

import pytest

from tools.mutants import ROOT, Mutant, read_mutants

MUTANTS = read_mutants()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_fault_changes_its_file_and_names_tests_that_exist(mutant: Mutant) -> None:
    text = (ROOT / mutant.file).read_text()
    planted = mutant.planted_in(text)
    if mutant.file.endswith(".py"):
        compile(planted, mutant.file, "exec")
    files = [argument.partition("::") for argument in mutant.tests if argument.startswith("tests/")]
    assert files, "no test is named"
    for file, _, name in files:
        assert Path(ROOT / file).exists(), file
        if name:
            function = name.partition("[")[0].rpartition("::")[2]
            assert f"def {function}(" in (ROOT / file).read_text(), name


def test_names_of_planted_faults_are_unique() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(names) == len(set(names))
