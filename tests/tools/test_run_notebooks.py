"""Notebooks run from the first cell to the last, and print what is kept of them."""

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from tools.run_notebooks import ENVIRONMENT, MACHINE, differences, printed, unexecuted, with_whole_streams

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
    variables = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=variables)


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


def outputs(*texts: str, tags: list[str], environment: str | None = None) -> nbformat.NotebookNode:
    """A notebook whose cells have printed these texts and have these tags."""
    kept = notebook(*("pass" for _ in texts))
    for cell, text in zip(kept.cells[1:], texts, strict=True):
        cell.metadata["tags"] = tags
        cell.outputs = [nbformat.v4.new_output("stream", text=text)]
    if environment is not None:
        kept.metadata[ENVIRONMENT] = environment
    return kept


@pytest.mark.parametrize(
    ("tags", "environment", "compared"),
    [
        ([], None, True),
        ([], "here", True),
        (["timing"], "here", False),
        (["machine"], "here", True),
        (["machine"], "elsewhere", False),
        (["machine"], None, False),
        (["machine", "timing"], "here", False),
    ],
)
def test_tags_say_which_texts_are_compared(tags: list[str], environment: str | None, compared: bool) -> None:
    kept = outputs("1\n", "2\n", tags=tags, environment=environment)
    assert differences(kept, outputs("1\n", "2\n", tags=tags), "here") == []
    messages = differences(kept, outputs("1\n", "3\n", tags=tags), "here")
    assert [text.splitlines()[0] for text in messages] == (["cell 2 differs from the stored text:"] if compared else [])
    assert not compared or {"-2", "+3"} <= set(messages[0].splitlines())


def test_an_output_that_is_missing_is_a_difference() -> None:
    assert differences(outputs("1\n", tags=[]), notebook("pass"), "here") != []


def test_texts_are_compared_and_images_are_not() -> None:
    def displayed(**data: str) -> str:
        cell = nbformat.v4.new_code_cell()
        cell.outputs = [
            nbformat.v4.new_output("display_data", data={name.replace("_", "/"): text for name, text in data.items()})
        ]
        return printed(cell)

    assert displayed(text_plain="a plot", image_png="QQ==") == displayed(text_plain="a plot", image_png="Qg==")
    assert displayed(text_plain="<Markdown object>", text_markdown="| 1 |") == "| 1 |\n"
    assert displayed(text_plain="1") != displayed(text_plain="2")


def test_streams_that_follow_one_another_are_kept_as_one() -> None:
    def stream(text: str, name: str = "stdout") -> nbformat.NotebookNode:
        return nbformat.v4.new_output("stream", text=text, name=name)

    plot = nbformat.v4.new_output("display_data", data={"image/png": "QQ=="})
    pieces = [stream("1\n"), stream("2"), stream("\n"), plot, stream("3\n"), stream("4\n", "stderr"), stream("5\n")]
    whole = [stream("1\n2\n"), plot, stream("3\n"), stream("4\n", "stderr"), stream("5\n")]
    assert with_whole_streams(pieces) == whole


def test_a_notebook_that_prints_something_else_fails_the_command(tmp_path: Path) -> None:
    file = tmp_path / "path.ipynb"
    nbformat.write(notebook("import beside", "print(beside.NUMBER)"), file)
    beside = tmp_path / "beside.py"
    beside.write_text("NUMBER = 42\n")
    written = run(file, "--write")
    assert written.returncode == 0, written.stderr
    beside.write_text("NUMBER = 4242\n")
    before = file.read_bytes()
    result = run(file)
    assert result.returncode == 1
    assert {"-42", "+4242"} <= set(result.stdout.splitlines())
    assert file.read_bytes() == before


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_kept_notebooks_have_run_without_a_failure(file: Path) -> None:
    kept = nbformat.read(file, as_version=4)
    nbformat.validate(kept)
    assert unexecuted(kept) == []
    shown = [output for cell in kept.cells if cell.cell_type == "code" for output in cell.outputs]
    assert shown
    assert {output.output_type for output in shown} <= {"stream", "display_data", "execute_result"}
    assert {output.name for output in shown if output.output_type == "stream"} <= {"stdout"}
    assert file.stat().st_size < 2_000_000
    cells = [cell for cell in kept.cells if cell.cell_type == "code"]
    assert all(with_whole_streams(cell.outputs) == cell.outputs for cell in cells)
    # Without its environment, a notebook's cells of one machine would never be compared.
    assert ENVIRONMENT in kept.metadata or not any(MACHINE in cell.metadata.get("tags", []) for cell in cells)
