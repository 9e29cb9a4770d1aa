"""The examples in the docstrings of public functions run, and give what they say."""

import doctest
import importlib
import inspect
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax import ops
from tools.site import api

# Readers of the reference know these names; the pages say so.
GLOBALS = {"jax": jax, "jnp": jnp, "np": np, "detjax": detjax, "ops": ops}

# What a call of it needs fills a page: state of requests, all arrays of a step, or another function's derivative.
WITHOUT_EXAMPLE = {
    "detjax.EnvironmentContradiction",
    "detjax.UnsafeFunctionWarning",
    "detjax.ops.DeltaState",
    "detjax.ops.LogitAdjustments",
    "detjax.ops.PackedRows",
    "detjax.ops.SeenTokens",
    "detjax.ops.adjust_logits",
    "detjax.ops.causal_convolution",
    "detjax.ops.gated_delta_rule",
    "detjax.ops.token_logprobs_and_gradients",
}
# These load a model, so the tests of the engine and of audits run them.
TESTED_ELSEWHERE = {"detjax.Engine", "detjax.SamplingParams", "detjax.generate", "detjax.verify"}


def public_names() -> Iterator[str]:
    for module in ("detjax", "detjax.ops"):
        yield from (f"{module}.{name}" for name in api.public_names(module))


def documented(name: str) -> object:
    module, _, attribute = name.rpartition(".")
    return inspect.unwrap(getattr(importlib.import_module(module), attribute))


def examples(name: str) -> doctest.DocTest:
    """The examples of an object's own docstring, without those of its methods."""
    text = inspect.getdoc(documented(name)) or ""
    return doctest.DocTestParser().get_doctest(text, dict(GLOBALS), name, None, None)


def test_every_public_function_has_an_example() -> None:
    without = {name for name in public_names() if not examples(name).examples}
    assert without == WITHOUT_EXAMPLE


@pytest.mark.sampled(20)
@pytest.mark.parametrize("name", sorted(set(public_names()) - WITHOUT_EXAMPLE - TESTED_ELSEWHERE))
def test_examples_are_true(name: str) -> None:
    report: list[str] = []
    outcome = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(examples(name), out=report.append)
    assert outcome.attempted > 0
    assert outcome.failed == 0, "".join(report)
