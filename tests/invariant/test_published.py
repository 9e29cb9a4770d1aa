"""Published models under `batch_invariant`, in an environment of their own, which `make test-models` makes."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.invariant.published_models import MODELS

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / os.environ.get("DETJAX_MODELS", ".models") / "bin" / "python"

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="the models' environment is missing: make test-models")


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}


def _is_installed(package: str) -> bool:
    program = f"import importlib.metadata as m; m.version({package!r})"
    return subprocess.run([str(PYTHON), "-c", program], capture_output=True, check=False).returncode == 0


def _printed(module: str, *arguments: str) -> list[dict[str, Any]]:
    """The lines of JSON that a module prints in the models' environment."""
    command = [str(PYTHON), "-m", module, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_a_published_models_rows_have_one_set_of_bits(name: str, dtype: str) -> None:
    if MODELS[name].package == "jax-bonsai" and not _is_installed("jax-bonsai"):
        pytest.skip("bonsai is in no package index: make test-models BONSAI_SOURCE=...")
    (seen,) = _printed("tests.invariant.published", name, "--dtype", dtype)
    assert seen["invariant"] == [] and seen["invariant_gradients"] == [], seen
    assert seen["invariant_outcome"] == "proven", seen
    assert (seen["stock_outcome"] == "refuted") or not seen["stock"], seen
    if dtype == "float32":
        changes = seen["stock"] or seen["stock_gradients"]
        assert changes, "stock XLA changes no bit: the comparison says nothing"
        assert seen["distance"] < 1e-5 and seen["gradient_distance"] < 1e-4, seen


def test_experts_in_bfloat16_are_those_of_the_original_that_rounds_after_each_operation() -> None:
    seen = {(one["program"], one["reference"]): one for one in _printed("tests.invariant.published_experts")}
    rounded = seen["batch_invariant", "operations"]
    # Sums have another order, which may choose otherwise where two scores are nearly equal.
    assert rounded["chosen_otherwise"] < rounded["tokens"] / 200, rounded
    assert rounded["distance_with_experts"] < 0.02, rounded
    # The control: under `jax.jit` XLA leaves roundings out, and other experts are chosen.
    assert seen["jit", "operations"]["chosen_otherwise"] > rounded["tokens"] / 50, seen
