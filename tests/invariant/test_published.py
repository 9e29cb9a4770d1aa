"""Published models under `batch_invariant`, in an environment of their own, which `make test-models` makes."""

import json
import os
import subprocess
from pathlib import Path

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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_a_published_models_rows_have_one_set_of_bits(name: str, dtype: str) -> None:
    if MODELS[name].package == "jax-bonsai" and not _is_installed("jax-bonsai"):
        pytest.skip("bonsai is in no package index: make test-models BONSAI_SOURCE=...")
    done = subprocess.run(
        [str(PYTHON), "-m", "tests.invariant.published", name, "--dtype", dtype],
        cwd=ROOT,
        env=_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["invariant"] == [] and seen["invariant_gradients"] == [], seen
    assert seen["invariant_outcome"] == "proven", seen
    assert (seen["stock_outcome"] == "refuted") or not seen["stock"], seen
    if dtype == "float32":
        changes = seen["stock"] or seen["stock_gradients"]
        assert changes, "stock XLA changes no bit: the comparison says nothing"
        assert seen["distance"] < 1e-5 and seen["gradient_distance"] < 1e-4, seen
