"""The decoder on the backend `mma`: which kernels serve it, and that its bits follow neither batch nor phase."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax.models import Decoder, KVCache
from detjax.pallas import nvidia
from tests.pallas.hopper.interpreter import kernels_interpreted
from tests.pallas.hopper.test_decoder import QWEN, decoder, kernel_counts
from tests.support.bits import assert_same_bits

OLD, NEW = (8, 0), (12, 0)
"""Architectures whose threads copy, and whose copy engine does."""


@pytest.fixture(scope="module")
def model() -> Decoder:
    return decoder(QWEN, 1)


def on_mma(fn: Any, architecture: nvidia.Architecture = OLD) -> Any:
    with detjax.use_backend("mma"), nvidia.tracing_for(architecture), kernels_interpreted():
        return jax.tree.map(np.asarray, fn())


def test_kernels_serve_every_linear_layer_norm_and_attention(model: Decoder) -> None:
    tokens = jnp.zeros((2, 3), jnp.int32)
    with detjax.use_backend("mma"), nvidia.tracing_for(OLD):
        counts = kernel_counts(jax.make_jaxpr(lambda tokens: model(tokens))(tokens).jaxpr)
    assert counts["scatter"] == counts["dot"] == 0
    assert counts["mma_matmul"] == 4 + 1
    assert counts["rms_norm"] == 2 + 1
    assert counts["norm_rope_append_kv"] == 1
    assert counts["attention"] == 1


@pytest.mark.parametrize("length", [2, pytest.param(18, marks=pytest.mark.nightly)])
def test_a_token_has_the_same_bits_in_any_batch_and_phase(model: Decoder, length: int) -> None:
    tokens = np.random.default_rng(0).integers(0, QWEN["vocab_size"], (2, length)).astype(np.int32)

    def logits(tokens: Any) -> Any:
        return detjax.jit(lambda tokens: model(tokens))(jnp.asarray(tokens))

    def last_by_decoding() -> Any:
        step = detjax.jit(lambda tokens, cache: model(tokens, cache))
        cache = KVCache.empty(model.config, 1, 32, jnp.bfloat16)
        _, cache = step(jnp.asarray(tokens[1:, :-1]), cache)
        return step(jnp.asarray(tokens[1:, -1:]), cache)[0]

    together = on_mma(lambda: logits(tokens))
    assert_same_bits(on_mma(last_by_decoding, NEW), together[1:, -1:])
    with detjax.use_backend("portable"):
        np.testing.assert_allclose(together, logits(tokens), atol=0.05)
