"""Another process, another number of cores or threads: the same bits."""

import functools
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax import ops
from tests.ops.cases import MAIN_OPS, in_dtype


@functools.cache
def digests(dtype: str, names: tuple[str, ...]) -> dict[str, str]:
    """A digest of what operations give, long products and attention and its gradients included."""
    chosen = [op for op in MAIN_OPS if op.name in names]
    results: dict[str, Any] = {op.name: op(*op.arguments(33, dtype, 258)) for op in chosen}
    random = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(in_dtype(random.standard_normal(shape), dtype))

    # Long sums for few results: where a library would share the inner axis out to its threads.
    for inputs, outputs in ((4096, 512), (20_000, 3)):
        results[f"matmul of {inputs} by {outputs}"] = ops.matmul(normal(20, inputs), normal(inputs, outputs))
    results["a wide softmax"] = ops.softmax(normal(5, 20_000))

    @detjax.jit
    def gradients(*operands: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        o, pull_back = jax.vjp(ops.dot_product_attention, *operands)
        return o, pull_back(o)

    results["attention's gradients"] = gradients(*(normal(2, 150, heads, 80) for heads in (6, 2, 2)))
    return {name: _digest(result) for name, result in results.items()}


def _digest(result: Any) -> str:
    return hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(result))).hexdigest()


EVERY = tuple(op.name for op in MAIN_OPS)


@pytest.mark.parametrize(
    ("cores", "variables", "dtype", "names"),
    [
        (1, {"PJRT_NPROC": "3"}, "float32", ("rms_norm residual", "sample")),
        pytest.param(os.cpu_count(), {}, "bfloat16", EVERY, marks=pytest.mark.nightly),
        pytest.param(1, {}, "float32", EVERY, marks=pytest.mark.nightly),
        pytest.param(os.cpu_count(), {"PJRT_NPROC": "3"}, "float32", EVERY, marks=pytest.mark.nightly),
    ],
    ids=["one core and 3 threads", "as here", "one core", "3 threads"],
)
def test_another_process_gives_the_same_bits(
    cores: int, variables: dict[str, str], dtype: str, names: tuple[str, ...]
) -> None:
    tests = Path(__file__).parents[1]
    paths = str(tests.parent)
    code = (
        f"import os; os.sched_setaffinity(0, range({cores}))\n"
        "import json, tests.conftest\nfrom tests.ops import test_processes\n"
        f"print(json.dumps(test_processes.digests({dtype!r}, {names!r})))"
    )
    there = subprocess.run(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": paths} | variables,
    )
    assert json.loads(there.stdout) == digests(dtype, names)
