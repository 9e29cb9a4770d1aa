"""Hopper's kernels of rows on GPUs without a copy engine: they give the bits of GPUs that have one."""

from typing import Any

import jax.numpy as jnp
import pytest

from detjax.operands.sampling_arrays import SamplingArrays
from detjax.pallas import nvidia
from detjax.pallas.hopper import norm, sampling, softmax, token_sums
from tests.pallas.hopper.interpreter import interpreted, normal
from tests.support.bits import assert_same_bits

READ_TWICE = softmax.Schedule(0, 3, 2)
WIDE, ROWS = normal(2, 4996), normal(1100, 40)


def sampled(x: Any) -> Any:
    arrays = SamplingArrays(
        noise_key=jnp.arange(8, dtype=jnp.uint32).reshape(2, 4),
        position=jnp.array([3, 7], jnp.int32),
        temperature=jnp.array([0.0, 1.3], jnp.float32),
        top_k=jnp.zeros(2, jnp.int32),
        top_p=jnp.ones(2, jnp.float32),
        min_p=jnp.zeros(2, jnp.float32),
    )
    return sampling.block_candidates(x, arrays, jnp.int32(0))


CASES: dict[str, tuple[Any, ...]] = {
    "log_softmax": (lambda x: softmax.log_softmax(x, READ_TWICE), WIDE),
    "logsumexp": (softmax.logsumexp, WIDE),
    "row sums": (softmax.row_sums, WIDE),
    "candidates": (sampled, WIDE),
    "token sums of 40 columns": (token_sums.token_sums, normal(40), ROWS),
    "token sums of 128 columns": (token_sums.token_sums, normal(128), normal(1100, 128)),
    "gradient of a norm": (
        lambda h, w, dy: norm.backward(h, w, dy, None, eps=1e-6, weight_offset=0.0),
        normal(40, 64, dtype="bfloat16"),
        normal(64, dtype="bfloat16"),
        normal(40, 64, dtype="bfloat16", seed=1),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_threads_that_read_for_themselves_give_the_bits_of_the_copy_engine(name: str) -> None:
    fn, *operands = CASES[name]
    results = []
    for capability in ((9, 0), (8, 0)):
        with nvidia.tracing_for(capability):
            results.append(interpreted(lambda *x: fn(*x), *operands))
    assert_same_bits(*results)


def test_rows_are_read_twice_where_no_cluster_can_hold_them() -> None:
    problem = softmax.Problem(64, 32000, jnp.dtype("float32"), rewritten=True)
    with nvidia.tracing_for((9, 0)):
        assert softmax.default_schedule(problem).cluster > 0
    with nvidia.tracing_for((8, 9)):
        assert softmax.default_schedule(problem).cluster == 0
    with nvidia.tracing_for((12, 0)):
        schedule = softmax.default_schedule(problem)
        assert schedule.slots * 2048 * 4 <= nvidia.shared_memory()
