"""A whole decoder on the backend `tpu`, its kernels in Pallas' interpreter."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental.pallas import tpu as pltpu

from detjax.bench import presets
from detjax.models.cache import KVCache
from detjax.runtime import backends
from tests.pallas.tpu.interpreter import COMPILER_OPTIONS
from tests.support.bits import assert_same_bits, same_bits

CONFIG = presets.config("tiny")
TOKENS = np.random.default_rng(0).integers(0, 256, (3, 16)).astype(np.int32)


@functools.cache
def decoder() -> tuple[Any, Any]:
    return nnx.split(presets.decoder("tiny"))


@functools.cache
def step(backend: str) -> Any:
    graph, state = decoder()

    def fn(tokens: jax.Array, cache: KVCache) -> tuple[jax.Array, KVCache]:
        return nnx.merge(graph, state)(tokens, cache)

    return jax.jit(fn, compiler_options=COMPILER_OPTIONS)


def logits(tokens: np.ndarray, chunks: tuple[int, ...], backend: str = "tpu") -> np.ndarray:
    """Returns the logits of all positions, computed in chunks of these numbers of tokens of each request."""
    assert sum(chunks) == tokens.shape[1]
    params = pltpu.InterpretParams(uninitialized_memory="nan")
    cache = KVCache.empty(CONFIG, len(tokens), tokens.shape[1], jnp.bfloat16)
    parts, start = [], 0
    with backends.use_backend(backend), pltpu.force_tpu_interpret_mode(params):
        for count in chunks:
            part, cache = step(backend)(jnp.asarray(tokens[:, start : start + count]), cache)
            parts.append(np.asarray(part))
            start += count
    return np.concatenate(parts, axis=1)


def test_prefill_chunks_and_decode_have_the_same_bits_in_any_batch() -> None:
    expected = logits(TOKENS, (16,))
    assert_same_bits(logits(TOKENS, (15, 1)), expected)
    assert_same_bits(logits(TOKENS[1:2], (16,)), expected[1:2])
    # The negative control: XLA's own operations have nearly the same numbers, but different bits.
    by_xla = logits(TOKENS, (16,), "stock")
    np.testing.assert_allclose(expected, by_xla, atol=0.1)
    assert not same_bits(by_xla, expected)
