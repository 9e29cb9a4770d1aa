"""Runs notebooks from their first cell to their last.

    python tools/run_notebooks.py [--write] notebooks/*.ipynb

A notebook with a cell that fails ends the command with exit code 1, and so does one that is kept with cells that were
not run in order. `--write` keeps what the cells print in the notebook's file, without the times at which they ran.
"""

import argparse
import sys
from pathlib import Path

import nbclient
import nbformat
from nbclient.exceptions import CellExecutionError

SECONDS = 600
"""The longest that a cell may take."""


def unexecuted(notebook: nbformat.NotebookNode) -> list[int]:
    """Returns the numbers of the cells of code, from 1, that were not run in their order, one after the other."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [number for number, cell in enumerate(cells, 1) if cell.execution_count != number]


def execute(file: Path, *, write: bool = False) -> None:
    """Runs a notebook, and may keep what its cells print.

    Raises:
        CellExecutionError: a cell fails.
        ValueError: the file has cells that were not run in order, and is not to be written.
    """
    notebook = nbformat.read(file, as_version=4)
    if not write and (numbers := unexecuted(notebook)):
        raise ValueError(f"{file}: cells {numbers} were not run in order; accepted: a notebook that --write has run")
    client = nbclient.NotebookClient(notebook, timeout=SECONDS, kernel_name="python3", record_timing=False)
    # The kernel talks through a socket that other users cannot read.
    client.create_kernel_manager().transport = "ipc"
    client.execute()
    if write:
        nbformat.write(notebook, file)


def main(arguments: list[str]) -> int:
    """Runs the notebooks that are named, and returns 1 if one fails."""
    parser = argparse.ArgumentParser(description="Run notebooks from their first cell to their last.")
    parser.add_argument("files", type=Path, nargs="+", help="notebooks")
    parser.add_argument("--write", action="store_true", help="keep what the cells print")
    options = parser.parse_args(arguments)
    failures = 0
    for file in options.files:
        try:
            execute(file, write=options.write)
        except (CellExecutionError, ValueError) as error:
            print(error)
            failures += 1
        else:
            print(f"{file}: every cell has run", flush=True)
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
