"""The program that a text worker runs: `python process.py`.

It imports the tokenizer without JAX, which the parent packages would import: so a worker starts in a fraction of a
second, takes little memory, and never touches the accelerator.
"""

import importlib
import sys
import types
from pathlib import Path


def _declare_bare_packages() -> None:
    """Registers packages without running their `__init__`, so that their modules can be imported individually."""
    root = Path(__file__).parents[2]
    for name, directory in (
        ("detjax", root),
        ("detjax.models", root / "models"),
        ("detjax.server", root / "server"),
    ):
        package = types.ModuleType(name)
        package.__path__ = [str(directory)]
        sys.modules[name] = package


if __name__ == "__main__":
    _declare_bare_packages()
    importlib.import_module("detjax.server.text.worker").serve()
