"""Generation: no bit of a request's tokens and logprobs depends on what else is in the batch."""

import dataclasses
import functools
import random
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax import SamplingParams, generate, ops
from detjax.engine import Completion, Generation
from detjax.models import Decoder, Tokenizer
from tests.support.bits import assert_same_bits
from tests.support.compiled_programs import compiled_programs
from tests.support.small_loops import small_model, small_tokenizer


@pytest.fixture(scope="module")
def model() -> Decoder:
    return small_model()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return small_tokenizer()


@functools.cache
def requests() -> list[tuple[list[int], SamplingParams]]:
    """Prompts of 1 to 150 tokens; greedy, plainly sampled, filtered, with several samples: eight in all."""
    draw = random.Random(0)
    lengths = (1, 17, 64, 127, 128, 150)
    styles = (
        SamplingParams(),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_k=20, n=2),
        SamplingParams(temperature=1.3, top_p=0.8, n=2),
        SamplingParams(temperature=0.9, min_p=0.05, top_logprobs=4),
        SamplingParams(top_logprobs=4),
    )
    return [
        (
            [draw.randrange(515) for _ in range(length)],
            dataclasses.replace(styles[i], seed=i, max_tokens=draw.randint(4, 8), ignore_eos=True),
        )
        for i, length in enumerate(lengths)
    ]


def answers(model: Decoder, asked: list[tuple[list[int], SamplingParams]], **options: Any) -> list[Generation]:
    prompts, params = zip(*asked, strict=True)
    return generate(model, list(prompts), list(params), **options)


def bits_of(generations: list[Generation]) -> list:
    """Everything that was generated, as arrays."""
    return [
        (np.asarray(c.tokens), np.float32(c.logprobs), np.asarray(c.top_logprobs, np.float64))
        for generation in generations
        for c in generation.completions
    ]


@functools.cache
def together() -> list[Generation]:
    return answers(small_model(), requests(), prefill_chunk=40)


@pytest.mark.parametrize("index", [5, *(pytest.param(index, marks=pytest.mark.nightly) for index in (0, 3, 4))])
def test_requests_alone_and_together_have_the_same_bits(model: Decoder, index: int) -> None:
    (alone,) = answers(model, [requests()[index]])
    assert_same_bits(bits_of([alone]), bits_of([together()[index]]))


def test_the_order_of_requests_does_not_matter(model: Decoder) -> None:
    order = random.Random(1).sample(range(6), 6)
    shuffled = answers(model, [requests()[i] for i in order], prefill_chunk=40)
    assert_same_bits(bits_of(shuffled), bits_of([together()[i] for i in order]))


@pytest.mark.parametrize("prefill_chunk", [1, 7, pytest.param(1000, marks=pytest.mark.nightly)])
def test_the_size_of_prefill_chunks_does_not_matter(model: Decoder, prefill_chunk: int) -> None:
    assert_same_bits(bits_of(answers(model, requests(), prefill_chunk=prefill_chunk)), bits_of(together()))


def test_logprobs_are_those_of_the_training_forward(model: Decoder) -> None:
    training_forward = detjax.jit(lambda tokens: ops.log_softmax(model(tokens)))
    for generation, (_, params) in zip(together(), requests(), strict=True):
        for completion in generation.completions:
            tokens = np.zeros(160, np.int32)
            length = len(generation.prompt_tokens) + len(completion.tokens)
            tokens[:length] = (*generation.prompt_tokens, *completion.tokens)
            logprobs = np.asarray(training_forward(jnp.asarray(tokens[None]))[0])
            positions = np.arange(len(generation.prompt_tokens), length)
            assert_same_bits(np.float32(completion.logprobs), logprobs[positions - 1, tokens[positions]])
            top = np.asarray(completion.top_logprobs).reshape(len(positions), params.top_logprobs, 2)
            expected = np.take_along_axis(logprobs[positions - 1], top[..., 0].astype(int), axis=-1)
            assert_same_bits(top[..., 1].astype(np.float32), expected)


def test_a_sample_depends_on_seed_and_index(model: Decoder) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=12, n=3, ignore_eos=True)
    one = dataclasses.replace(params, n=1)
    others = [dataclasses.replace(one, seed=seed) for seed in (2**63 + 1, 2**32)]
    first, again, *other = generate(model, [[5, 6, 7]] * 4, [params, one, *others])
    # A larger request begins with the samples of a smaller one.
    assert_same_bits(bits_of([again]), bits_of([first])[:1])
    assert len({c.tokens for generation in (first, *other) for c in generation.completions}) == 5


def greedy(model: Decoder, tokenizer: Tokenizer | None = None, **fields: object) -> Completion:
    params = SamplingParams(**({"max_tokens": 12, "ignore_eos": True, "top_logprobs": 4} | fields))
    return generate(model, [[5, 6, 7]], params, tokenizer=tokenizer)[0].completions[0]


def test_a_stop_token_ends_the_sample_and_stays_in_it(model: Decoder) -> None:
    free = greedy(model)
    assert (len(free.tokens), free.finish_reason) == (12, "length")
    end = free.tokens[4]
    stopped = greedy(model, stop_token_ids=(end,))
    length = free.tokens.index(end) + 1
    assert (stopped.tokens, stopped.finish_reason) == (free.tokens[:length], "stop")
    assert stopped.logprobs == free.logprobs[:length]


def test_the_models_own_end_tokens_end_a_sample(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    end = greedy(model).tokens[3]
    monkeypatch.setattr(
        model, "generation_defaults", dataclasses.replace(model.generation_defaults, eos_token_ids=(end,))
    )
    assert greedy(model, ignore_eos=False).tokens[-1] == end
    assert greedy(model).finish_reason == "length"


def test_a_stop_string_cuts_the_text_before_it(model: Decoder, tokenizer: Tokenizer) -> None:
    free = greedy(model, tokenizer)
    assert free.text == tokenizer.decode(list(free.tokens))
    stop = free.text[3:5]
    stopped = greedy(model, tokenizer, stop=("not there", stop))
    assert (stopped.text, stopped.finish_reason) == (free.text[: free.text.index(stop)], "stop")
    assert len(stopped.tokens) < len(free.tokens)
    assert stopped.tokens == free.tokens[: len(stopped.tokens)]


def test_text_prompts_are_encoded(model: Decoder, tokenizer: Tokenizer) -> None:
    params = SamplingParams(max_tokens=4, top_logprobs=4)
    (from_text,), (from_ids,) = (
        generate(model, [prompt], params, tokenizer=tokenizer) for prompt in ("Hello", tokenizer.encode("Hello"))
    )
    assert from_text.prompt_tokens == from_ids.prompt_tokens == tuple(tokenizer.encode("Hello"))
    assert_same_bits(bits_of([from_text]), bits_of([from_ids]))


def test_top_logprobs_begin_with_the_greedy_token(model: Decoder) -> None:
    completion = greedy(model)
    for token, logprob, top in zip(completion.tokens, completion.logprobs, completion.top_logprobs, strict=True):
        assert top[0] == (token, logprob)
        assert [lp for _, lp in top] == sorted((lp for _, lp in top), reverse=True)
        assert len(top) == 4


def test_no_prompts_give_no_generations(model: Decoder) -> None:
    assert generate(model, []) == []


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([[]], SamplingParams(), "prompt 0 has no tokens; accepted: a prompt of at least one token"),
        ([[1], [2, 515]], SamplingParams(), "prompt 1 has token 515; accepted: ids 0 to 514"),
        ([[-1]], SamplingParams(), "prompt 0 has token -1"),
        (["text"], SamplingParams(), "prompt 0 is text and there is no tokenizer"),
        ([[1]], SamplingParams(stop=("x",)), "prompt 0 has stop strings and there is no tokenizer"),
        ("text", SamplingParams(), "prompts is one string"),
        ([[1], [2]], [SamplingParams()], "2 prompts and 1 sampling parameters"),
        ([[1] * 100_000], SamplingParams(), "accepted: .* in all, the model's max_position_embeddings"),
        ([[1]], SamplingParams(top_logprobs=516), "top_logprobs is 516; accepted: up to 515"),
    ],
)
def test_bad_requests_are_refused(model: Decoder, prompts: list, params: SamplingParams, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(model, prompts, params)


def test_a_chunk_of_no_tokens_is_refused(model: Decoder) -> None:
    with pytest.raises(ValueError, match="prefill_chunk is 0; accepted: at least 1"):
        generate(model, [[1]], prefill_chunk=0)


def test_prompt_logprobs_are_those_of_the_training_forward_in_chunks_of_any_size(model: Decoder) -> None:
    prompt = [3 * index % 515 for index in range(70)]
    params = SamplingParams(max_tokens=2, ignore_eos=True, prompt_logprobs=True, top_logprobs=4)
    training_forward = detjax.jit(lambda tokens: ops.log_softmax(model(tokens)))
    logprobs = np.asarray(training_forward(jnp.asarray([prompt], jnp.int32))[0])
    made = []
    for chunk in (9, 128):
        (generation,) = generate(model, [prompt], params, prefill_chunk=chunk)
        assert generation.prompt is not None
        assert_same_bits(np.float32(generation.prompt.logprobs), logprobs[np.arange(69), prompt[1:]])
        assert [len(top) for top in generation.prompt.top_logprobs] == [4] * 69
        made.append(generation)
    (unscored,) = generate(model, [prompt], dataclasses.replace(params, prompt_logprobs=False))
    assert unscored.prompt is None
    assert_same_bits(bits_of([unscored] * 2), bits_of(made))


def test_calls_of_one_size_compile_two_programs_of_the_layers_and_one_that_samples(model: Decoder) -> None:
    some = [requests()[0], requests()[1]]
    jax.clear_caches()  # other tests of this process may have compiled the same programs
    with compiled_programs() as compiled:
        answers(model, some, prefill_chunk=13)
    counts = Counter(compiled)
    assert [counts[f"jit({name})"] for name in ("_forward", "_sample", "_score")] == [2, 1, 0]
    with compiled_programs() as compiled:
        answers(model, some[::-1], prefill_chunk=13)
    assert compiled == []


def test_other_requests_do_not_matter_with_a_quantized_cache(model: Decoder) -> None:
    asked = [([9, 8, 7], requests()[0][1]), requests()[0]]
    pair = answers(model, asked, kv_cache_dtype="int8", prefill_chunk=1)
    assert pair != answers(model, asked, prefill_chunk=1)
    assert answers(model, asked[::-1], kv_cache_dtype="int8", prefill_chunk=1) == pair[::-1]


def test_an_impossible_cache_dtype_is_refused(model: Decoder) -> None:
    with pytest.raises(ValueError, match=r"generate: .*q4_0 of 80 numbers; accepted: multiples of 32\. Choose int8 or"):
        generate(model, [[1]], kv_cache_dtype="q4_0")
