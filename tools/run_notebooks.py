"""Runs notebooks from their first cell to their last, and compares what they print with what is kept.

    python tools/run_notebooks.py [--write] [--pick NUMBER] notebooks/*.ipynb

A notebook ends the command with exit code 1 if a cell fails, if it is kept with cells that were not run in order, or if
a cell prints something else than what is kept. Two tags of a cell say that its text may differ: `timing` always, and
`machine` where the notebook was written in another environment, which is the fingerprint of processor, JAX and flags
that bits depend on. Images and plots are not compared. `--write` keeps what the cells print in the notebook's file,
without the times at which they ran. `--pick` runs one notebook only, the one with this number modulo their count.

nbval could not take its place: it compares a cell always or never, whichever machine wrote it, and writes nothing.
"""

import argparse
import difflib
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import nbclient
import nbformat
from nbclient.exceptions import CellExecutionError

SECONDS: Final = 600
"""The longest that a cell may take."""

TIMING: Final = "timing"
"""The tag of cells whose text is never compared."""

MACHINE: Final = "machine"
"""The tag of cells whose text is compared in the environment alone in which it was written."""

ENVIRONMENT: Final = "detjax_environment"
"""Where a notebook's metadata keep the digest of the environment in which it was written."""


def unexecuted(notebook: nbformat.NotebookNode) -> list[int]:
    """Returns the numbers of the cells of code, from 1, that were not run in their order, one after the other."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [number for number, cell in enumerate(cells, 1) if cell.execution_count != number]


def environment_of(notebook: nbformat.NotebookNode) -> str | None:
    """Returns the digest of this environment, or None for a notebook whose texts do not depend on it."""
    if not any(MACHINE in cell.metadata.get("tags", ()) for cell in notebook.cells):
        return None
    from detjax.runtime.fingerprints import fingerprint  # with JAX, which takes seconds

    return fingerprint().digest


def printed(cell: nbformat.NotebookNode) -> str:
    """Returns the text that a cell prints and displays, without images, plots and pages."""
    texts = []
    for output in cell.outputs:
        data = output.get("data", {})
        texts.append(output.get("text") or data.get("text/markdown") or data.get("text/plain") or "")
    return "".join(text if text.endswith("\n") else f"{text}\n" for text in texts if text)


def with_whole_streams(outputs: Iterable[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Returns a cell's outputs with one stream in place of streams that follow one another.

    A kernel sends what a cell prints in pieces, and the machine's speed decides where they end. A file that is written
    again is to change only where a cell prints something else.
    """
    whole: list[nbformat.NotebookNode] = []
    for output in outputs:
        last = whole[-1] if whole else None
        if last is not None and last.output_type == output.output_type == "stream" and last.name == output.name:
            last.text += output.text
        else:
            whole.append(output)
    return whole


def differences(kept: nbformat.NotebookNode, run: nbformat.NotebookNode, environment: str | None) -> list[str]:
    """Returns the differences between what cells printed and what is kept of them, one text for each cell.

    Args:
        kept: the notebook as its file has it.
        run: the same notebook after it has run.
        environment: the digest of the environment in which it ran; see `environment_of`.
    """
    ignored = {TIMING} if kept.metadata.get(ENVIRONMENT) == environment else {TIMING, MACHINE}
    pairs = [pair for pair in zip(kept.cells, run.cells, strict=True) if pair[0].cell_type == "code"]
    messages = []
    for number, (before, after) in enumerate(pairs, 1):
        if ignored.isdisjoint(before.metadata.get("tags", ())) and printed(before) != printed(after):
            texts = printed(before).splitlines(), printed(after).splitlines()
            lines = difflib.unified_diff(texts[0], texts[1], "kept", "printed", lineterm="")
            messages.append("\n".join([f"cell {number} prints something else than what is kept:", *lines]))
    return messages


def execute(file: Path, *, write: bool = False) -> None:
    """Runs a notebook, and either keeps what its cells print or compares it with what is kept.

    Raises:
        CellExecutionError: a cell fails.
        ValueError: the notebook is not to be written, and has cells that were not run in order, or prints something
            else than what is kept.
    """
    notebook = nbformat.read(file, as_version=4)
    kept = nbformat.read(file, as_version=4)
    if not write and (numbers := unexecuted(notebook)):
        raise ValueError(f"{file}: cells {numbers} were not run in order; accepted: a notebook that --write has run")
    # In the notebook's folder, as in Jupyter, so that it can import what lies beside it.
    resources = {"metadata": {"path": str(file.resolve().parent)}}
    client = nbclient.NotebookClient(
        notebook,
        timeout=SECONDS,
        startup_timeout=SECONDS,
        kernel_name="python3",
        record_timing=False,
        resources=resources,
    )
    with tempfile.TemporaryDirectory() as folder:
        # The kernel talks through sockets in a folder that other users cannot read.
        manager = client.create_kernel_manager()
        manager.transport, manager.ip = "ipc", str(Path(folder) / "kernel")
        client.execute()
    environment = environment_of(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = with_whole_streams(cell.outputs)
    if write:
        notebook.metadata.pop(ENVIRONMENT, None)
        if environment is not None:
            notebook.metadata[ENVIRONMENT] = environment
        nbformat.write(notebook, file)
    elif messages := differences(kept, notebook, environment):
        raise ValueError("\n".join([f"{file}: other outputs; --write keeps them if they are right", *messages]))


def main(arguments: list[str]) -> int:
    """Runs the notebooks that are named, and returns 1 if one fails."""
    parser = argparse.ArgumentParser(description="Run notebooks from their first cell to their last.")
    parser.add_argument("files", type=Path, nargs="+", help="notebooks")
    parser.add_argument("--write", action="store_true", help="keep what the cells print")
    parser.add_argument("--pick", type=int, metavar="NUMBER", help="run only one: this number modulo their count")
    options = parser.parse_args(arguments)
    files = options.files if options.pick is None else [options.files[options.pick % len(options.files)]]
    failures = 0
    for file in files:
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
