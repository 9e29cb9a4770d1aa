"""The decoder against transformers, and against itself: one set of bits in prefill, chunks, decode and training."""

import dataclasses
import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import detjax
from detjax import ops
from detjax.models import Decoder, KVCache, load
from tests.support import towers
from tests.support.bits import assert_same_bits, same_bits

FIXTURES = Path(__file__).parents[1] / "fixtures"
NAMES = sorted(path.name for path in FIXTURES.iterdir() if (path / "reference.npz").is_file())
TEXT_NAMES = [name for name in NAMES if name not in (*towers.NAMES, towers.VIDEO_NAME)]
"""Fixtures without images; those with images have tests of their own."""
TOLERANCE = 2e-4


@functools.cache
def model(name: str, dtype: str = "float32") -> Decoder:
    return load(FIXTURES / name, dtype=dtype, progress=False)[0]


@functools.cache
def reference(name: str) -> dict[str, np.ndarray]:
    return dict(np.load(FIXTURES / name / "reference.npz"))


@functools.cache
def programs(name: str, dtype: str = "float32") -> tuple[Callable, Callable]:
    """The compiled model without and with a cache."""
    graphdef, state = nnx.split(model(name, dtype))

    @detjax.jit
    def whole(state, tokens):
        return nnx.merge(graphdef, state)(tokens)

    @detjax.jit
    def cached(state, tokens, cache, counts):
        return nnx.merge(graphdef, state)(tokens, cache, counts)

    return functools.partial(whole, state), functools.partial(cached, state)


def tokens_of(name: str, batch: int = 1, length: int | None = None) -> jax.Array:
    """Row 0 is the reference's sequence, the others are random."""
    tokens = reference(name)["tokens"][:length]
    vocabulary = model(name).config.vocab_size
    others = np.random.default_rng(batch).integers(0, vocabulary, (batch - 1, len(tokens)))
    return jnp.asarray(np.concatenate([tokens[None], others]), jnp.int32)


def in_chunks(name: str, tokens: jax.Array, size: int, dtype: str = "float32") -> np.ndarray:
    """Logits of the tokens, `size` at a time through the cache; the last chunk is padded."""
    _, cached = programs(name, dtype)
    batch, length = tokens.shape
    cache = KVCache.empty(model(name).config, batch, length, dtype)
    logits = []
    for start in range(0, length, size):
        count = min(size, length - start)
        chunk = jnp.pad(tokens[:, start : start + count], ((0, 0), (0, size - count)), constant_values=1)
        out, cache = cached(chunk, cache, jnp.full(batch, count, jnp.int32))
        logits.append(np.asarray(out)[:, :count])
    assert_same_bits(cache.lengths, np.full(batch, length, np.int32))
    return np.concatenate(logits, axis=1)


@pytest.mark.sampled(0)
@pytest.mark.parametrize("name", TEXT_NAMES)
def test_logits_are_those_of_transformers(name: str) -> None:
    logits = programs(name)[0](tokens_of(name))
    np.testing.assert_allclose(logits[0], reference(name)["logits"], rtol=0, atol=TOLERANCE)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", TEXT_NAMES)
def test_greedy_continuations_are_those_of_transformers(name: str) -> None:
    prompt, continuation = reference(name)["prompt"], reference(name)["continuation"]
    params = detjax.SamplingParams(max_tokens=len(continuation), ignore_eos=True)
    (generation,) = detjax.generate(model(name), [prompt.tolist()], params)
    assert generation.completions[0].tokens == tuple(continuation.tolist())


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "dtype"), [("qwen3", "bfloat16"), ("mistral", "bfloat16"), *((name, "float32") for name in NAMES)]
)
def test_chunks_and_decode_give_the_bits_of_prefill(name: str, dtype: str) -> None:
    tokens = tokens_of(name, batch=2)
    whole = programs(name, dtype)[0](tokens)
    for size in (1, 7, 64, tokens.shape[1]) if name == "qwen3" else (1, 64):
        assert_same_bits(in_chunks(name, tokens, size, dtype), whole)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_training_forward_gives_the_bits_of_prefill(dtype: str) -> None:
    graphdef, state = nnx.split(model("qwen3", dtype))
    tokens = tokens_of("qwen3", batch=2)

    @detjax.jit
    def training_step(state):
        def loss(state):
            logits = nnx.merge(graphdef, state)(tokens)
            logprobs = ops.log_softmax(logits)
            chosen = jnp.take_along_axis(logprobs[:, :-1], tokens[:, 1:, None], axis=-1)
            return -jnp.mean(chosen), (logits, logprobs)

        return jax.value_and_grad(loss, has_aux=True)(state)

    (_, (logits, logprobs)), gradients = training_step(state)
    whole = programs("qwen3", dtype)[0](tokens)
    assert_same_bits(logits, whole)
    assert_same_bits(logprobs, ops.log_softmax(whole))
    assert all(bool(jnp.isfinite(leaf).all()) and bool((leaf != 0).any()) for leaf in jax.tree.leaves(gradients))
    assert_same_bits(training_step(state)[1], gradients)


@pytest.mark.sampled(0)
@pytest.mark.parametrize("name", ["qwen2", "llama3", "qwen3", "qwen3-next", "qwen3-5-moe", "deepseek-v3"])
def test_gradients_of_the_model_are_those_of_plain_jax(name: str) -> None:
    graphdef, state = nnx.split(model(name))
    tokens = tokens_of(name, batch=2)

    def loss(state):
        logprobs = ops.log_softmax(nnx.merge(graphdef, state)(tokens))
        return -jnp.mean(jnp.take_along_axis(logprobs[:, :-1], tokens[:, 1:, None], axis=-1))

    gradients = detjax.jit(jax.grad(loss))(state)
    with detjax.use_backend("stock"):
        expected = detjax.jit(jax.grad(loss))(state)
    for (path, a), e in zip(jax.tree.leaves_with_path(gradients), jax.tree.leaves(expected), strict=True):
        size = np.linalg.norm(np.asarray(e))  # 0 for parameters that only decide a choice
        error = np.linalg.norm(np.asarray(a - e)) / (size if size else 1.0)
        assert error < 1e-4, f"{jax.tree_util.keystr(path)}: relative error {error:.1e}"


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("batch", "length", "dtype"),
    [(2, 163, "float32"), (17, 163, "bfloat16"), (257, 130, "bfloat16"), (1024, 9, "float32")],
)
def test_a_request_is_the_same_in_every_batch_and_slot(batch: int, length: int, dtype: str) -> None:
    whole, _ = programs("qwen3", dtype)
    alone = whole(tokens_of("qwen3", 1, length))[0]
    tokens = tokens_of("qwen3", batch, length)
    for slot in (0, batch // 2, batch - 1):
        assert_same_bits(whole(jnp.roll(tokens, slot, axis=0))[slot], alone)


def test_stock_xla_fails_the_test_of_batches() -> None:
    with detjax.use_backend("stock"):
        whole, _ = programs("qwen3")
        alone = whole(tokens_of("qwen3", 1))[0]
        equal = [same_bits(whole(tokens_of("qwen3", batch))[0], alone) for batch in (2, 17)]
    assert not any(equal)


def test_stock_xla_fails_the_test_of_chunks() -> None:
    tokens = tokens_of("qwen3", batch=2)
    with detjax.use_backend("stock"):
        whole = programs("qwen3")[0](tokens)
        equal = [same_bits(in_chunks("qwen3", tokens, size), whole) for size in (1, 7, 64)]
    assert not any(equal)


@pytest.mark.sampled(0)
@pytest.mark.parametrize("poison", [np.nan, np.inf, 3e38])
def test_what_the_neighbours_have_in_the_cache_does_not_matter(poison: float) -> None:
    name = "mistral"
    _, cached = programs(name)
    prompt, following = tokens_of(name, 3, 131), tokens_of(name, 3, 140)[:, 131:]
    config = model(name).config

    def continued(poison: float | None) -> jax.Array:
        cache = KVCache.empty(config, 3, 256, jnp.float32)
        _, cache = cached(prompt, cache, jnp.full(3, 131, jnp.int32))
        if poison is not None:  # the pages of both neighbours, and the slots after the length in the request's own
            foreign = jnp.asarray([0, 1, 4, 5])
            state = jax.tree.map(lambda x: x.at[foreign].set(poison).at[3, :, 131 - 128 :].set(poison), cache.state)
            cache = dataclasses.replace(cache, state=state)
        return cached(following, cache, jnp.full(3, following.shape[1], jnp.int32))[0][1]

    assert_same_bits(continued(poison), continued(None))


def test_pages_may_lie_anywhere() -> None:
    name = "llama3"
    _, cached = programs(name)
    tokens = tokens_of(name, 2)
    counts = jnp.full(2, tokens.shape[1], jnp.int32)
    cache = KVCache.empty(model(name).config, 2, 256, jnp.float32)
    in_order, _ = cached(tokens, cache, counts)
    shuffled = dataclasses.replace(cache, page_table=jnp.asarray([[3, 0], [2, 1]], jnp.int32))
    assert_same_bits(cached(tokens, shuffled, counts)[0], in_order)


@pytest.mark.sampled(0)
def test_vmap_of_the_model_gives_the_bits_of_the_model() -> None:
    tokens = tokens_of("qwen2", 3)
    whole, _ = programs("qwen2")
    mapped = detjax.jit(jax.vmap(lambda row: whole(row[None])[0]))
    assert_same_bits(mapped(tokens), whole(tokens))


def test_tokens_after_the_capacity_are_dropped() -> None:
    _, cached = programs("qwen3")
    tokens = tokens_of("qwen3", 2, 130)
    cache = KVCache.empty(model("qwen3").config, 2, 128, jnp.float32)
    _, filled = cached(tokens[:, :128], cache, jnp.full(2, 128, jnp.int32))
    _, after = cached(tokens[:, 128:], filled, jnp.full(2, 2, jnp.int32))
    assert_same_bits(after, filled)


_DIGEST = """
import hashlib, sys
import numpy as np
sys.path[:0] = sys.argv[1:]
from tests.models.test_decoder import programs, tokens_of
logits = np.asarray(programs("qwen3", "bfloat16")[0](tokens_of("qwen3", 3)))
print(hashlib.sha256(logits.tobytes()).hexdigest())
"""


@pytest.mark.sampled(0)
def test_another_process_gives_the_same_bits() -> None:
    import hashlib

    here = hashlib.sha256(np.asarray(programs("qwen3", "bfloat16")[0](tokens_of("qwen3", 3))).tobytes()).hexdigest()
    command = [sys.executable, "-c", _DIGEST, str(Path(__file__).parents[2])]
    there = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert there == here


@pytest.mark.sampled(0)
@pytest.mark.parametrize(("name", "kind"), [("mistral", "fp8_e4m3"), ("llama3", "q4_0")])
def test_a_quantized_cache_gives_the_same_bits_in_every_batch_and_in_chunks(name: str, kind: str) -> None:
    _, cached = programs(name, "bfloat16")
    tokens = tokens_of(name, 3, 140)

    def logits(tokens: jax.Array, size: int) -> np.ndarray:
        batch, length = tokens.shape
        cache = KVCache.empty(model(name).config, batch, length, "bfloat16", quantized=kind)  # pyright: ignore
        chunks = []
        for start in range(0, length, size):
            out, cache = cached(tokens[:, start : start + size], cache, jnp.full(batch, size, jnp.int32))
            chunks.append(np.asarray(out))
        return np.concatenate(chunks, axis=1)

    expected = logits(tokens[:1], 140)
    for size in (140, 20, 1):
        together = logits(jnp.roll(tokens, 1, axis=0), size)
        assert_same_bits(together[1], expected[0])
    plain = np.asarray(programs(name, "bfloat16")[0](tokens[:1]))
    limit = {"int8": 0.03, "fp8_e4m3": 0.2, "q4_0": 0.6}[kind]
    assert 0 < np.linalg.norm(expected - plain) / np.linalg.norm(plain) < limit


def test_a_quantized_cache_of_another_head_size_is_refused() -> None:
    with pytest.raises(ValueError, match="KVCache: q4_0 of 80 numbers; accepted: multiples of 32"):
        KVCache.empty(model("qwen3").config, 1, 8, jnp.float32, quantized="q4_0")
