"""The decoder against transformers, and against itself: one set of bits in prefill, chunks, decode and training."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import detjax
from detjax import ops
from detjax.contract import KV_BLOCK
from detjax.models import Decoder, KVCache, load
from tests.models.hugging_face import FIXTURES
from tests.models.shallow_models import reference, shallow
from tests.support import towers
from tests.support.bits import assert_same_bits, same_bits

NAMES = sorted(path.name for path in FIXTURES.iterdir() if (path / "reference.npz").is_file())
TEXT_NAMES = [name for name in NAMES if name not in (*towers.NAMES, towers.VIDEO_NAME)]
"""Fixtures without images; those with images have tests of their own."""
TOLERANCE = 2e-4
LENGTH = 163
"""The tokens of a reference."""
PIECE = 41
"""Tokens of a piece. The fourth one begins in the first page, 5 tokens before its end, and ends in the second."""
CAPACITY = 2 * KV_BLOCK


@functools.cache
def model(name: str, dtype: str = "float32") -> Decoder:
    return load(FIXTURES / name, dtype=dtype, progress=False)[0]


@functools.cache
def programs(decoder: Decoder) -> tuple[Callable, Callable]:
    """The compiled model without and with a cache."""
    graphdef, state = nnx.split(decoder)

    @detjax.jit
    def whole(state, tokens):
        return nnx.merge(graphdef, state)(tokens)

    @detjax.jit
    def cached(state, tokens, cache, counts):
        return nnx.merge(graphdef, state)(tokens, cache, counts)

    return functools.partial(whole, state), functools.partial(cached, state)


def tokens_of(name: str, batch: int = 1, length: int | None = None) -> jax.Array:
    """Row 0 is the reference's sequence, the others are random."""
    return with_random_rows(name, reference(name)["tokens"][:length], batch)


def with_random_rows(name: str, tokens: np.ndarray, batch: int) -> jax.Array:
    vocabulary = model(name).config.vocab_size
    others = np.random.default_rng(batch).integers(0, vocabulary, (batch - 1, len(tokens)))
    return jnp.asarray(np.concatenate([tokens[None], others]), jnp.int32)


def in_pieces(decoder: Decoder, tokens: jax.Array, *sizes: int, quantized: Any = None) -> np.ndarray:
    """Logits of the tokens, in pieces of these sizes through the cache; the last size is repeated.

    A piece with fewer tokens than its size is padded.
    """
    (_, cached), (batch, length) = programs(decoder), tokens.shape
    cache = KVCache.empty(decoder.config, batch, CAPACITY, decoder.dtype, quantized=quantized)
    logits, start = [], 0
    for size in itertools.chain(sizes, itertools.repeat(sizes[-1])):
        if start == length:
            break
        count = min(size, length - start)
        piece = jnp.pad(tokens[:, start : start + count], ((0, 0), (0, size - count)), constant_values=1)
        out, cache = cached(piece, cache, jnp.full(batch, count, jnp.int32))
        logits.append(np.asarray(out)[:, :count])
        start += count
    assert_same_bits(cache.lengths, np.full(batch, length, np.int32))
    return np.concatenate(logits, axis=1)


# --- transformers -----------------------------------------------------------------------------------------------------


def cases(*small: Any, large: Sequence[Any]) -> list[Any]:
    """The cases that always run, and large ones."""
    return [*small, *(pytest.param(*case, marks=pytest.mark.nightly) for case in large)]


def logits_of(name: str, tokens: np.ndarray, backend: str) -> np.ndarray:
    """Logits of one sequence, by a program that takes as many tokens as a reference has."""
    padded = np.pad(tokens, (0, LENGTH - len(tokens)), constant_values=1)
    with detjax.use_backend(backend):  # pyright: ignore[reportArgumentType]
        return np.asarray(programs(model(name))[0](jnp.asarray(padded[None], jnp.int32)))[0, : len(tokens)]


by_backend = pytest.mark.parametrize(
    ("name", "backend"),
    cases(*((name, "stock") for name in TEXT_NAMES), large=[(name, "portable") for name in TEXT_NAMES]),
)
"""All families, with operations of XLA, which compile fast: the network is the same with any."""


@by_backend
def test_logits_are_those_of_transformers(name: str, backend: str) -> None:
    logits = logits_of(name, reference(name)["tokens"], backend)
    np.testing.assert_allclose(logits, reference(name)["logits"], rtol=0, atol=TOLERANCE)


@by_backend
def test_greedy_continuations_are_those_of_transformers(name: str, backend: str) -> None:
    """The likeliest token after each beginning of a continuation, which is what a greedy sampler takes."""
    prompt, continuation = reference(name)["prompt"], reference(name)["continuation"]
    logits = logits_of(name, np.concatenate([prompt, continuation[:-1]]), backend)[len(prompt) - 1 :]
    assert logits.argmax(axis=-1).tolist() == continuation.tolist()


# --- one set of bits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "first", "stop", "dtype", "sizes"),
    cases(
        ("qwen3", 0, 2, "bfloat16", (PIECE, PIECE, PIECE, 1)),
        ("gemma2", 0, 1, "float32", (PIECE,)),
        ("deepseek-v3", 1, 2, "bfloat16", (PIECE,)),
        ("glm4-moe", 1, 2, "bfloat16", (PIECE,)),
        ("granite", 0, 1, "bfloat16", (PIECE,)),
        ("smollm3", 1, 2, "bfloat16", (PIECE,)),
        large=[
            *(("qwen3", 0, 2, "bfloat16", (size,)) for size in (1, 7, 64, LENGTH)),
            ("mistral", 0, 2, "bfloat16", (64,)),
            *((name, 0, 1, "bfloat16", (PIECE,)) for name in ("gpt-oss", "mixtral", "glm4", "phi3")),
            *((name, 0, 4, "float32", (size,)) for name in NAMES for size in (1, 64)),
        ],
    ),
)
def test_chunks_and_decode_give_the_bits_of_prefill(
    name: str, first: int, stop: int, dtype: str, sizes: tuple[int, ...]
) -> None:
    """The request is alone in the prefill, and the second of three otherwise."""
    tokens, decoder = jnp.roll(tokens_of(name, batch=3), 1, axis=0), shallow(name, first, stop, dtype)
    whole = np.asarray(programs(decoder)[0](tokens[1:2]))
    assert_same_bits(in_pieces(decoder, tokens, *sizes)[1], whole[0])
    if decoder.config.layers == model(name).config.layers and name in TEXT_NAMES:
        expected = reference(name)["logits"]
        limit = 1e-5 if dtype == "float32" else 0.03
        assert np.linalg.norm(whole[0] - expected) / np.linalg.norm(expected) < limit


@functools.cache
def trained(name: str, first: int, stop: int, dtype: str, length: int) -> tuple[Any, Any, Any, Callable]:
    """Logits, logprobs and gradients of a training step, and the step."""
    graphdef, state = nnx.split(shallow(name, first, stop, dtype))
    tokens = tokens_of(name, 2, length)

    def loss(state):
        logits = nnx.merge(graphdef, state)(tokens)
        logprobs = ops.log_softmax(logits)
        chosen = jnp.take_along_axis(logprobs[:, :-1], tokens[:, 1:, None], axis=-1)
        return -jnp.mean(chosen), (logits, logprobs)

    def step(state):
        return jax.value_and_grad(loss, has_aux=True)(state)

    compiled = functools.partial(detjax.jit(step), state)
    (_, (logits, logprobs)), gradients = compiled()

    def plainly() -> Any:
        with detjax.use_backend("stock"):
            # A program of its own, since JAX would take the one under contract from its cache.
            return detjax.jit(lambda state: step(state)[1])(state)

    assert_same_bits(compiled()[1], gradients)
    return logits, logprobs, gradients, plainly


@pytest.mark.parametrize(
    ("name", "first", "stop", "dtype", "length"),
    cases(("qwen3", 0, 1, "float32", 131), large=[("qwen3", 0, 2, dtype, LENGTH) for dtype in ("float32", "bfloat16")]),
)
def test_the_training_forward_gives_the_bits_of_prefill(
    name: str, first: int, stop: int, dtype: str, length: int
) -> None:
    logits, logprobs, gradients, _ = trained(name, first, stop, dtype, length)
    whole = programs(shallow(name, first, stop, dtype))[0](tokens_of(name, 2, length))
    assert_same_bits(logits, whole)
    assert_same_bits(logprobs, ops.log_softmax(whole))
    assert all(bool(jnp.isfinite(leaf).all()) and bool((leaf != 0).any()) for leaf in jax.tree.leaves(gradients))


@pytest.mark.parametrize(
    ("name", "first", "stop", "dtype", "length"),
    cases(
        ("qwen3", 0, 1, "float32", 131),
        large=[
            *((name, 0, 2, "float32", LENGTH) for name in ("qwen2", "llama3", "qwen3", "qwen3-5-moe", "deepseek-v3")),
            *((name, 0, 2, "float32", LENGTH) for name in ("glm4", "glm4-moe", "granite", "phi3", "smollm3")),
            ("qwen3-next", 0, 4, "float32", LENGTH),
            *((name, 0, 3, "float32", 140) for name in ("gemma2", "gemma3")),
        ],
    ),
)
def test_gradients_of_the_model_are_those_of_plain_jax(
    name: str, first: int, stop: int, dtype: str, length: int
) -> None:
    *_, gradients, plainly = trained(name, first, stop, dtype, length)
    for (path, a), e in zip(jax.tree.leaves_with_path(gradients), jax.tree.leaves(plainly()), strict=True):
        size = np.linalg.norm(np.asarray(e))  # 0 for parameters that only decide a choice
        error = np.linalg.norm(np.asarray(a - e)) / (size if size else 1.0)
        assert error < 2e-4, f"{jax.tree_util.keystr(path)}: relative error {error:.1e}"


@pytest.mark.parametrize(
    ("name", "first", "stop", "dtype", "batch", "length"),
    cases(
        ("qwen3", 0, 1, "bfloat16", 17, 131),
        large=[
            ("deepseek-v3", 0, 2, "bfloat16", 5, 43),
            ("qwen3", 0, 2, "float32", 2, LENGTH),
            ("qwen3", 0, 2, "bfloat16", 17, LENGTH),
            ("qwen3", 0, 2, "bfloat16", 257, 130),
            ("qwen3", 0, 2, "float32", 1024, 9),
            *((name, 0, 3, "bfloat16", batch, 140) for name in ("gemma2", "gemma3") for batch in (2, 17)),
            *(("qwen3-next", 0, 4, "bfloat16", batch, 70) for batch in (5, 33)),
            *((name, 0, 3, "bfloat16", 17, 140) for name in ("glm4", "glm4-moe", "granite", "phi3", "smollm3")),
        ],
    ),
)
def test_a_request_is_the_same_in_every_batch_and_slot(
    name: str, first: int, stop: int, dtype: str, batch: int, length: int
) -> None:
    whole, _ = programs(shallow(name, first, stop, dtype))
    alone = whole(tokens_of(name, 1, length))[0]
    tokens = tokens_of(name, batch, length)
    for slot in (0, batch // 2, batch - 1):
        assert_same_bits(whole(jnp.roll(tokens, slot, axis=0))[slot], alone)


def test_stock_xla_fails_the_tests_of_batches_and_of_chunks() -> None:
    decoder = shallow("qwen3", 0, 1)
    with detjax.use_backend("stock"):
        whole, _ = programs(decoder)
        tokens = tokens_of("qwen3", 17)
        alone, together = whole(tokens[:1])[0], whole(tokens)
        assert not same_bits(together[0], alone)
        assert not same_bits(in_pieces(decoder, tokens[:1], PIECE)[0], alone)


# --- the cache --------------------------------------------------------------------------------------------------------


def continued(change: Callable[[KVCache], KVCache] = lambda cache: cache) -> jax.Array:
    """Logits of three requests' next tokens, with a cache that is changed first."""
    decoder, tokens = shallow("mistral", 0, 1), tokens_of("mistral", 3, 140)
    _, cached = programs(decoder)
    cache = KVCache.empty(decoder.config, 3, CAPACITY, jnp.float32)
    _, cache = cached(tokens[:, :131], cache, jnp.full(3, 131, jnp.int32))
    return cached(tokens[:, 131:], change(cache), jnp.full(3, 9, jnp.int32))[0]


def test_what_the_neighbours_have_in_the_cache_does_not_matter() -> None:
    expected = continued()[1]
    for poison in (np.nan, np.inf, 3e38):

        def poisoned(cache: KVCache, poison: float = poison) -> KVCache:
            # The pages of both neighbours, and the places after the length in the request's own.
            foreign = jnp.asarray([0, 1, 4, 5])
            state = jax.tree.map(lambda x: x.at[foreign].set(poison).at[3, :, 131 - 128 :].set(poison), cache.state)
            return dataclasses.replace(cache, state=state)

        assert_same_bits(continued(poisoned)[1], expected)


def test_pages_may_lie_anywhere() -> None:
    def moved(cache: KVCache) -> KVCache:
        order = jnp.asarray([3, 0, 5, 1, 4, 2], jnp.int32)
        state = jax.tree.map(lambda x: jnp.zeros_like(x).at[order].set(x), cache.state)
        return dataclasses.replace(cache, state=state, page_table=order[cache.page_table])

    assert_same_bits(continued(moved), continued())


def test_a_cache_of_pages_goes_back_to_any_length() -> None:
    decoder, tokens = shallow("mistral", 0, 1), tokens_of("mistral", 3, 140)
    _, cached = programs(decoder)
    cache = KVCache.empty(decoder.config, 3, CAPACITY, jnp.float32)
    assert cache.oldest is None and cache.lost is None
    whole, full = cached(tokens[:, :131], cache, jnp.full(3, 131, jnp.int32))
    for lengths in ([3, 0, 122], [131, 1, 121]):
        lowered = dataclasses.replace(full, lengths=jnp.asarray(lengths, jnp.int32))
        following = jnp.stack([row[start : start + 9] for row, start in zip(tokens, lengths, strict=True)])
        logits, _ = cached(following, lowered, jnp.full(3, 9, jnp.int32))
        for row, start in enumerate(lengths):
            if start + 9 <= 131:
                assert_same_bits(logits[row], whole[row, start : start + 9])


def test_vmap_of_the_model_gives_the_bits_of_the_model() -> None:
    tokens = tokens_of("gemma2", 2)
    whole, _ = programs(shallow("gemma2", 0, 1))
    mapped = detjax.jit(jax.vmap(lambda row: whole(row[None])[0]))
    assert_same_bits(mapped(tokens)[0], whole(tokens[:1])[0])


def test_tokens_after_the_capacity_are_dropped() -> None:
    decoder, tokens = shallow("qwen2", 0, 1), tokens_of("qwen2", 2)
    _, cached = programs(decoder)
    piece, cache = tokens[:, :PIECE], KVCache.empty(decoder.config, 2, CAPACITY, jnp.float32)
    assert cache.capacity == CAPACITY
    for _ in range(CAPACITY // PIECE):
        _, cache = cached(piece, cache, jnp.full(2, PIECE, jnp.int32))
    rest = CAPACITY % PIECE
    _, filled = cached(piece, cache, jnp.full(2, rest, jnp.int32))
    _, over = cached(piece, cache, jnp.full(2, rest + 1, jnp.int32))
    assert filled.lengths.tolist() == [CAPACITY] * 2
    assert_same_bits(over, filled)
    assert_same_bits(cached(piece, filled, jnp.full(2, PIECE, jnp.int32))[1], filled)


@pytest.mark.parametrize(
    ("name", "layers", "dtype", "kind"),
    cases(
        ("mistral", 1, "float32", "fp8_e4m3"),
        large=[
            ("mistral", 2, "bfloat16", "fp8_e4m3"),
            ("llama3", 2, "bfloat16", "q4_0"),
            *((name, 3, "float32", "int8") for name in ("gemma2", "gemma3")),
        ],
    ),
)
def test_a_quantized_cache_gives_the_same_bits_in_every_batch_and_in_chunks(
    name: str, layers: int, dtype: str, kind: str
) -> None:
    decoder, tokens = shallow(name, 0, layers, dtype), tokens_of(name, 3, 131)
    alone = in_pieces(decoder, tokens[:1], 131, quantized=kind)[0]
    assert_same_bits(in_pieces(decoder, jnp.roll(tokens, 1, axis=0), PIECE, quantized=kind)[1], alone)
    plain = in_pieces(decoder, tokens, 131)[0]
    limit = {"int8": 0.03, "fp8_e4m3": 0.2, "q4_0": 0.6}[kind]
    assert 0 < np.linalg.norm(alone - plain) / np.linalg.norm(plain) < limit


def test_a_quantized_cache_of_another_head_size_is_refused() -> None:
    with pytest.raises(ValueError, match="KVCache: q4_0 of 80 numbers; accepted: multiples of 32"):
        KVCache.empty(model("qwen3").config, 1, 8, jnp.float32, quantized="q4_0")
