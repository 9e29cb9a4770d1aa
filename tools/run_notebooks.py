"""Runs notebooks from the first cell to the last, and compares their outputs with the stored ones.

    python tools/run_notebooks.py [--write] notebooks/*.ipynb

The exit code is 1 if a cell fails, if stored cells were not run in order, or if a cell's text differs from the stored
one. Two tags allow a cell's text to differ: `timing` always, and `machine` if the notebook was written in another
environment, that is, under another fingerprint of processor, JAX and flags that bits depend on. Images and plots are
not compared. `--write` stores the cells' outputs in the notebook, without their execution times.

nbval could not replace it: it compares a cell always or never, on any machine, and writes nothing.
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
"""Time limit of a cell, in seconds."""

TIMING: Final = "timing"
"""The tag of cells whose text is never compared."""

MACHINE: Final = "machine"
"""The tag of cells whose text is compared only in the environment in which it was written."""

ENVIRONMENT: Final = "detjax_environment"
"""The key in a notebook's metadata for the digest of the environment in which it was written."""


def unexecuted(notebook: nbformat.NotebookNode) -> list[int]:
    """Returns the numbers of the code cells, from 1, that were not run in sequence."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [number for number, cell in enumerate(cells, 1) if cell.execution_count != number]


def environment_of(notebook: nbformat.NotebookNode) -> str | None:
    """Returns the digest of this environment, or None for a notebook whose texts do not depend on it."""
    if not any(MACHINE in cell.metadata.get("tags", ()) for cell in notebook.cells):
        return None
    from detjax.runtime.fingerprints import fingerprint  # imports JAX, which takes seconds

    return fingerprint().digest


def printed(cell: nbformat.NotebookNode) -> str:
    """Returns the text that a cell prints and displays, without images, plots and HTML."""
    texts = []
    for output in cell.outputs:
        data = output.get("data", {})
        texts.append(output.get("text") or data.get("text/markdown") or data.get("text/plain") or "")
    return "".join(text if text.endswith("\n") else f"{text}\n" for text in texts if text)


def with_whole_streams(outputs: Iterable[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Merges consecutive streams of a cell's outputs.

    A kernel sends printed text in pieces whose boundaries depend on timing. A rewritten file must change only where the
    text does.
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
    """Returns the differences between the stored and the new texts, one per cell.

    Args:
        kept: the stored notebook.
        run: the same notebook after its run.
        environment: the digest of the run's environment; see `environment_of`.
    """
    ignored = {TIMING} if kept.metadata.get(ENVIRONMENT) == environment else {TIMING, MACHINE}
    pairs = [pair for pair in zip(kept.cells, run.cells, strict=True) if pair[0].cell_type == "code"]
    messages = []
    for number, (before, after) in enumerate(pairs, 1):
        if ignored.isdisjoint(before.metadata.get("tags", ())) and printed(before) != printed(after):
            texts = printed(before).splitlines(), printed(after).splitlines()
            lines = difflib.unified_diff(texts[0], texts[1], "kept", "printed", lineterm="")
            messages.append("\n".join([f"cell {number} differs from the stored text:", *lines]))
    return messages


def execute(file: Path, *, write: bool = False) -> None:
    """Runs a notebook, and either stores its outputs or compares them with the stored ones.

    Raises:
        CellExecutionError: a cell fails.
        ValueError: without `write`, stored cells were not run in order, or texts differ.
    """
    notebook = nbformat.read(file, as_version=4)
    kept = nbformat.read(file, as_version=4)
    if not write and (numbers := unexecuted(notebook)):
        raise ValueError(f"{file}: cells {numbers} were not run in order; accepted: a notebook that --write has run")
    # In the notebook's folder, as in Jupyter, so that it can import modules next to it.
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
        # The kernel communicates through sockets in a folder that other users cannot read.
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
        raise ValueError("\n".join([f"{file}: outputs differ; --write stores them if they are right", *messages]))


def main(arguments: list[str]) -> int:
    """Runs the named notebooks, and returns 1 if one fails."""
    parser = argparse.ArgumentParser(description="Run notebooks from the first cell to the last.")
    parser.add_argument("files", type=Path, nargs="+", help="notebooks")
    parser.add_argument("--write", action="store_true", help="store the cells' outputs")
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
