"""The examples in the engine's docstrings run, and give what they say."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize("name", ["engine", "generate", "sampling_params", "step_loop"])
def test_examples_in_docstrings_are_true(name: str) -> None:
    module = importlib.import_module(f"detjax.engine.{name}")
    outcome = doctest.testmod(module)
    assert outcome.attempted > 0
    assert outcome.failed == 0
