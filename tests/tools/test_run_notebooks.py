"""Notebooks run from the first cell to the last, and those that are kept have been run so."""

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from tools.run_notebooks import unexecuted

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def notebook(*sources: str, counts: list[int | None] | None = None) -> nbformat.NotebookNode:
    """A notebook of cells of code, with their numbers of execution."""
    cells = [nbformat.v4.new_code_cell(source, id=f"cell-{index}") for index, source in enumerate(sources)]
    for cell, count in zip(cells, counts or [None] * len(cells), strict=True):
        cell.execution_count = count
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("A lesson.", id="lesson"), *cells])


def run(file: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "tools" / "run_notebooks.py", *options, file]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("counts", "numbers"), [([1, 2, 3], []), ([1, 3, 2], [2, 3]), ([None, 2, 3], [1])])
def test_cells_that_were_not_run_in_order_have_their_numbers_reported(
    counts: list[int | None], numbers: list[int]
) -> None:
    assert unexecuted(notebook("1", "2", "3", counts=counts)) == numbers


def test_what_cells_print_is_kept_if_it_is_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "sum.ipynb"
    nbformat.write(notebook("x = 20 + 1", "print(2 * x)"), file)
    refused = run(file)
    assert refused.returncode == 1
    assert "cells [1, 2] were not run in order" in refused.stdout
    written = run(file, "--write")
    assert written.returncode == 0, written.stderr
    kept = nbformat.read(file, as_version=4)
    assert [output.text for output in kept.cells[-1].outputs] == ["42\n"]
    assert unexecuted(kept) == []
    before = file.read_bytes()
    assert run(file).returncode == 0
    assert file.read_bytes() == before


def test_a_cell_that_fails_fails_the_command(tmp_path: Path) -> None:
    file = tmp_path / "wrong.ipynb"
    nbformat.write(notebook("assert 1 == 2", counts=[1]), file)
    result = run(file)
    assert result.returncode == 1
    assert "AssertionError" in result.stdout


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_kept_notebooks_have_run_without_a_failure(file: Path) -> None:
    kept = nbformat.read(file, as_version=4)
    nbformat.validate(kept)
    assert unexecuted(kept) == []
    outputs = [output for cell in kept.cells if cell.cell_type == "code" for output in cell.outputs]
    assert outputs
    assert {output.output_type for output in outputs} <= {"stream", "display_data", "execute_result"}
    assert {output.name for output in outputs if output.output_type == "stream"} <= {"stdout"}
