"""Tunix' GRPO learner with detjax as model and rollout, in an environment of its own, which `make test-tunix` makes."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".tunix" / "bin" / "python"

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="Tunix' environment is missing: make test-tunix")


def grpo(*arguments: str) -> tuple[int, int, int]:
    """The exit code, the tokens with unequal logprobs, and all tokens of a run of the example."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [str(PYTHON), "examples/tunix_grpo.py", *arguments]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    counts = re.search(r"^(\d+) of (\d+) tokens have unequal logprobs$", run.stdout, re.MULTILINE)
    moved = re.search(r"steps, (\d+) of \d+ weights moved$", run.stdout, re.MULTILINE)
    assert counts and moved and int(moved[1]) > 0, run.stdout + run.stderr
    return run.returncode, int(counts[1]), int(counts[2])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("steps", [5, 100])
def test_no_token_of_tunix_own_learner_has_unequal_logprobs(steps: int) -> None:
    code, unequal, tokens = grpo("--steps", str(steps))
    assert (code, unequal) == (0, 0)
    assert tokens > 20 * steps


def test_tunix_own_formula_differs() -> None:
    code, unequal, tokens = grpo("--steps", "3", "--tunix-formula")
    assert code == 1 and unequal > 0.05 * tokens
