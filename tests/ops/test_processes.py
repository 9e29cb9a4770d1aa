"""Another process, another number of cores or threads: the same bits."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from cases import MAIN_OPS

import detjax
from detjax import ops


def digest() -> str:
    """One digest of what all operations give, attention and its gradients included."""
    results = [op(*op.arguments(33, "float32", 514)) for op in MAIN_OPS]
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((2, 150, heads, 80)).astype(np.float32) for heads in (6, 2, 2))

    @detjax.jit
    def attention(*operands: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        o, pull_back = jax.vjp(ops.dot_product_attention, *operands)
        return o, pull_back(o)

    results.append(attention(q, k, v))
    large = [random.standard_normal(shape).astype(np.float32) for shape in ((40, 4096), (4096, 512))]
    results.append(ops.matmul(*map(jax.numpy.asarray, large)))
    return hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(results))).hexdigest()


@pytest.mark.parametrize(
    ("cores", "flags"),
    [(os.cpu_count(), ""), (1, ""), (os.cpu_count(), "--xla_cpu_multi_thread_eigen=false")],
    ids=["all cores", "one core", "no threads"],
)
def test_another_process_gives_the_same_bits(cores: int, flags: str) -> None:
    start = f"import os; os.sched_setaffinity(0, range({cores}))"
    code = f"{start}; import conftest, ops.test_processes as here; print(here.digest())"
    tests = Path(__file__).parents[1]
    paths = os.pathsep.join([str(tests), str(tests / "ops")])
    there = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": paths, "XLA_FLAGS": flags},
    )
    assert there.stdout.strip() == digest()
