"""A whole decoder on the backend `tpu`, its kernels in Pallas' interpreter."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental.pallas import tpu as pltpu

from detjax import backends
from detjax.bench import presets
from detjax.models.cache import KVCache
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

    return jax.jit(
        fn, compiler_options={"xla_backend_optimization_level": 0}
    )  # nearly all of the time is the compiler's


def logits(tokens: np.ndarray, chunks: tuple[int, ...], backend: str = "tpu") -> np.ndarray:
    """Of all positions, `chunks` tokens of each request at a time."""
    assert sum(chunks) == tokens.shape[1]
    params = pltpu.InterpretParams(uninitialized_memory="nan")
    cache = KVCache.empty(CONFIG, len(tokens), tokens.shape[1], jnp.bfloat16)
    found, start = [], 0
    with backends.use_backend(backend), pltpu.force_tpu_interpret_mode(params):
        for count in chunks:
            made, cache = step(backend)(jnp.asarray(tokens[:, start : start + count]), cache)
            found.append(np.asarray(made))
            start += count
    return np.concatenate(found, axis=1)


def test_prefill_chunks_and_decode_have_the_same_bits_in_any_batch() -> None:
    expected = logits(TOKENS, (16,))
    assert_same_bits(logits(TOKENS, (15, 1)), expected)
    assert_same_bits(logits(TOKENS[1:2], (16,)), expected[1:2])
    # The negative control: XLA's own operations have nearly the same numbers, and other bits.
    by_xla = logits(TOKENS, (16,), "stock")
    np.testing.assert_allclose(expected, by_xla, atol=0.1)
    assert not same_bits(by_xla, expected)
