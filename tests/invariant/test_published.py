"""Published models under `batch_invariant`, in an environment of their own, which `make test-models` makes."""

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / os.environ.get("DETJAX_MODELS", ".models") / "bin" / "python"

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="the models' environment is missing: make test-models")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "vit", "t5", "equinox"])
def test_a_published_models_rows_have_one_set_of_bits(name: str, dtype: str) -> None:
    gradients = ["--gradients"] if dtype == "float32" else []
    done = subprocess.run(
        [str(PYTHON), "-m", "tests.invariant.published", name, "--dtype", dtype, *gradients],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["invariant"] == []
    assert seen["invariant_outcome"] == "proven"
    # 64 rows are beyond what is certified.
    assert (seen["stock_outcome"] == "refuted") == bool(set(seen["stock"]) - {64}), seen
    if dtype == "float32":
        assert seen["stock"], "stock XLA changes no bit: the comparison says nothing"
        assert seen["distance"] < 1e-5 and seen["gradients"]
