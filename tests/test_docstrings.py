"""Every public name has an example, and all examples in docstrings run and give what they say."""

import ast
import doctest
import importlib
import inspect
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax import ops
from tools.site import api

PACKAGE = Path(detjax.__file__).parent
# Readers of the reference know these names; the pages say so.
GLOBALS = {"jax": jax, "jnp": jnp, "np": np, "detjax": detjax, "ops": ops}


def public_names() -> list[str]:
    """The names of detjax and detjax.ops, as the reference lists them."""
    return [f"{module}.{name}" for module in ("detjax", "detjax.ops") for name in api.public_names(module)]


def cleaned(name: str) -> str:
    """The docstring of a public name without its indentation, and without what a class inherits."""
    module, _, attribute = name.rpartition(".")
    return inspect.cleandoc(inspect.unwrap(getattr(importlib.import_module(module), attribute)).__doc__ or "")


def definitions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, str]]:
    """The functions and classes within a node, as qualified names with their docstrings."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            yield prefix + child.name, ast.get_docstring(child) or ""
            yield from definitions(child, f"{prefix}{child.name}.")


def docstrings_with_examples() -> Iterator[tuple[str, str]]:
    """The docstrings of the package that have examples which run, by the place in it. Nothing is imported."""
    for file in sorted(PACKAGE.rglob("*.py")):
        for name, docstring in definitions(ast.parse(file.read_text())):
            if any(">>>" in line and "doctest: +SKIP" not in line for line in docstring.split("\n")):
                yield f"{file.relative_to(PACKAGE)}:{name}", docstring


EXAMPLES = dict(docstrings_with_examples())
# Examples of public names are short; some of the others load a model and train it.
_DOCSTRINGS = {cleaned(name) for name in public_names()}
PUBLIC = {place for place, docstring in EXAMPLES.items() if docstring in _DOCSTRINGS}


COSTLY = {
    "audit/verification/verify.py:verify",
    "engine/engine.py:Engine",
    "engine/step_loop.py:StepLoop",
    "models/mesh.py:sharded",
    "ops/delta_rule.py:gated_delta_rule",
}
"""Examples that compile for seconds."""


def cases(places: Iterable[str]) -> list[Any]:
    """The places in order. Costly ones are left to the night."""
    return [pytest.param(place, marks=pytest.mark.nightly) if place in COSTLY else place for place in sorted(places)]


def test_costly_examples_are_there() -> None:
    assert COSTLY < EXAMPLES.keys()


def test_every_public_name_has_an_example_among_those_that_run() -> None:
    assert [name for name in public_names() if cleaned(name) not in EXAMPLES.values()] == []


@pytest.mark.parametrize("place", cases(PUBLIC))
def test_examples_of_public_names_are_true(place: str) -> None:
    check(place)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("place", cases(EXAMPLES.keys() - PUBLIC))
def test_other_examples_are_true(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # one writes a file
    check(place)


def check(place: str) -> None:
    report: list[str] = []
    parsed = doctest.DocTestParser().get_doctest(EXAMPLES[place], dict(GLOBALS), place, None, None)
    outcome = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(parsed, out=report.append)
    assert outcome.attempted > 0
    assert outcome.failed == 0, "".join(report)
