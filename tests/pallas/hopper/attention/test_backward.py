"""Gradients of Hopper attention in Pallas' interpreter."""

import jax.experimental.pallas.mosaic_gpu as plgpu
import pytest

from tests.support.attention_requests import (
    INTERPRETER,
    OPTIONS,
    Requests,
    assert_gradients_close,
    in_the_interpreter,
    mask_of_heads,
)
from tests.support.bits import assert_same_bits


@pytest.mark.sampled(0)
@in_the_interpreter
@pytest.mark.parametrize("name", ["causal", "everything"])
def test_small_gradients_are_those_of_the_portable_backend(name: str) -> None:
    requests = Requests.random((70,), 2, 1, 16, dtype="bfloat16", **OPTIONS[name])
    with plgpu.force_gpu_interpret_mode(INTERPRETER):
        gradients = requests.gradients("hopper")
    assert_gradients_close(gradients, requests.gradients("portable"))


@pytest.mark.sampled(0)
@in_the_interpreter
@pytest.mark.parametrize("name", ["causal", "everything"])
def test_gradients_are_those_of_the_portable_backend(name: str) -> None:
    requests = Requests.random((150, 40), 2, 1, dtype="bfloat16", **OPTIONS[name])
    with plgpu.force_gpu_interpret_mode(INTERPRETER):
        gradients, alone = requests.gradients("hopper"), requests.gradients("hopper", slice(1, 2))
    assert_gradients_close(gradients, requests.gradients("portable"))
    for name in ("q", "k", "v"):
        assert_same_bits(alone[name], gradients[name][1:2])


@pytest.mark.sampled(0)
@in_the_interpreter
def test_gradients_with_a_mask_are_those_of_the_portable_backend() -> None:
    requests = Requests.random((150, 40), 2, 1, dtype="bfloat16")
    mask = mask_of_heads(requests)
    with plgpu.force_gpu_interpret_mode(INTERPRETER):
        gradients = requests.gradients("hopper", mask=mask)
    assert_gradients_close(gradients, requests.gradients("portable", mask=mask))
