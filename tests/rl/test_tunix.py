"""Tunix' learners with detjax as model and rollout, in an environment of their own, which `make test-tunix` makes."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / os.environ.get("DETJAX_TUNIX", ".tunix") / "bin" / "python"

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="Tunix' environment is missing: make test-tunix")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """A command of Python in Tunix' environment."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [str(PYTHON), *command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def grpo(*arguments: str) -> tuple[int, int, int]:
    """The exit code, the tokens with unequal logprobs, and all tokens of a run of the example."""
    done = run("examples/tunix_grpo.py", *arguments)
    counts = re.search(r"^(\d+) of (\d+) tokens have unequal logprobs$", done.stdout, re.MULTILINE)
    moved = re.search(r"steps, (\d+) of \d+ weights moved$", done.stdout, re.MULTILINE)
    assert counts and moved and int(moved[1]) > 0, done.stdout + done.stderr
    return done.returncode, int(counts[1]), int(counts[2])


def learned(case: str, steps: int, folder: Path) -> dict[str, Any]:
    """Returns the result of a case of the study, whose every rollout has to be compared."""
    out = folder / "result.json"
    done = run("-m", "benchmarks", "tunix_learners", "--case", case, "--steps", str(steps), "--out", str(out))
    assert out.exists(), done.stdout + done.stderr
    (result,) = json.loads(out.read_text())["results"]
    assert result["steps"] == steps and result["tokens"] > 0 and result["weights_moved"] > 0
    assert not result["rollouts_not_compared"]
    assert done.returncode == 0
    return result


@pytest.mark.sampled(1)
@pytest.mark.parametrize("steps", [5, 100])
def test_no_token_of_tunix_own_learner_has_unequal_logprobs(steps: int) -> None:
    code, unequal, tokens = grpo("--steps", str(steps))
    assert (code, unequal) == (0, 0)
    assert tokens > 20 * steps


def test_tunix_own_formula_differs() -> None:
    code, unequal, tokens = grpo("--steps", "3", "--tunix-formula")
    assert code == 1 and unequal > 0.05 * tokens


@pytest.mark.parametrize("learner", ["grpo", "ppo", "agentic"])
def test_the_gradient_is_computed_of_the_logprobs_that_were_sampled_by(learner: str, tmp_path: Path) -> None:
    result = learned(f"{learner}-detjax-bfloat16", 4, tmp_path)
    assert result["unequal_tokens"] == 0
    # The agentic learner compares rollouts and trainer too, by the weights of the last synchronization.
    assert result["largest_difference_that_tunix_logs"] == (0 if learner == "agentic" else None)


def test_tunix_own_model_and_sampler_differ(tmp_path: Path) -> None:
    result = learned("grpo-tunix-bfloat16", 3, tmp_path)
    assert result["unequal_tokens"] > 0.05 * result["tokens"]


def test_rollouts_depend_on_prompts_and_synchronizations_and_not_on_the_calls() -> None:
    done = run("tests/rl/tunix_rollouts.py")
    assert done.returncode == 0, done.stderr
    digests = dict(line.split() for line in done.stdout.splitlines())
    assert digests["in_threads"] == digests["together"] != digests["after_synchronization"]
    # Later versions than 0.1.7 compute logprobs in chunks.
    assert digests.get("chunks_of_3") == digests.get("chunks_of_0")
