"""Generation: no bit of a request's tokens and logprobs depends on what else is in the batch."""

import dataclasses
import random
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax import SamplingParams, generate, ops
from detjax.engine import Completion, Generation
from detjax.models import Decoder, Tokenizer, load
from tests.support.bits import assert_same_bits, same_bits
from tests.support.compiled_programs import compiled_programs

FIXTURES = Path(__file__).parents[1] / "fixtures"


@pytest.fixture(scope="module")
def loaded() -> tuple[Decoder, Tokenizer]:
    model, tokenizer = load(FIXTURES / "qwen3", dtype="bfloat16", progress=False)
    assert tokenizer is not None
    return model, tokenizer


@pytest.fixture(scope="module")
def model(loaded: tuple[Decoder, Tokenizer]) -> Decoder:
    return loaded[0]


@pytest.fixture(scope="module")
def tokenizer(loaded: tuple[Decoder, Tokenizer]) -> Tokenizer:
    return loaded[1]


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Prompts of 1 to 150 tokens; greedy, plainly sampled, filtered, with several samples."""
    draw = random.Random(0)
    lengths = (1, 17, 64, 127, 128, 150)
    styles = (
        SamplingParams(),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_k=20),
        SamplingParams(temperature=1.3, top_p=0.8, n=2),
        SamplingParams(temperature=0.9, min_p=0.05, top_logprobs=3),
    )
    return [
        (
            [draw.randrange(515) for _ in range(length)],
            dataclasses.replace(styles[i % len(styles)], seed=i, max_tokens=draw.randint(4, 12), ignore_eos=True),
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


@pytest.mark.sampled(0)
def test_requests_alone_and_together_have_the_same_bits(model: Decoder) -> None:
    together = answers(model, requests())
    for index in (0, 3, 4):  # each compiles programs of its own
        (alone,) = answers(model, [requests()[index]])
        assert_same_bits(bits_of([alone]), bits_of([together[index]]))


@pytest.mark.sampled(0)
def test_the_order_of_requests_does_not_matter(model: Decoder) -> None:
    together = answers(model, requests())
    order = random.Random(1).sample(range(len(together)), len(together))
    shuffled = answers(model, [requests()[i] for i in order])
    assert_same_bits(bits_of(shuffled), bits_of([together[i] for i in order]))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("prefill_chunk", [1, 7, 64, 1000])
def test_the_size_of_prefill_chunks_does_not_matter(model: Decoder, prefill_chunk: int) -> None:
    some = requests()[2::3]
    assert_same_bits(bits_of(answers(model, some, prefill_chunk=prefill_chunk)), bits_of(answers(model, some)))


@pytest.mark.sampled(0)
def test_stock_xla_fails_the_test_of_requests_alone_and_together(model: Decoder) -> None:
    with detjax.use_backend("stock"):
        together = answers(model, requests())
        alone = answers(model, requests()[3:4])
    assert not same_bits([c[1] for c in bits_of(together[3:4])], [c[1] for c in bits_of(alone)])


@pytest.mark.sampled(0)
def test_logprobs_are_those_of_the_training_forward(model: Decoder) -> None:
    training_forward = detjax.jit(lambda tokens: ops.log_softmax(model(tokens)))
    for generation, (_, params) in zip(answers(model, requests()), requests(), strict=True):
        for completion in generation.completions:
            tokens = np.zeros(192, np.int32)
            length = len(generation.prompt_tokens) + len(completion.tokens)
            tokens[:length] = (*generation.prompt_tokens, *completion.tokens)
            logprobs = np.asarray(training_forward(jnp.asarray(tokens[None]))[0])
            positions = np.arange(len(generation.prompt_tokens), length)
            assert_same_bits(np.float32(completion.logprobs), logprobs[positions - 1, tokens[positions]])
            top = np.asarray(completion.top_logprobs).reshape(len(positions), params.top_logprobs, 2)
            expected = np.take_along_axis(logprobs[positions - 1], top[..., 0].astype(int), axis=-1)
            assert_same_bits(top[..., 1].astype(np.float32), expected)


@pytest.mark.sampled(0)
def test_a_sample_depends_on_seed_and_index(model: Decoder) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=16, n=3, ignore_eos=True)
    prompt = [5, 6, 7]
    first, again, other = generate(model, [prompt] * 3, [params, params, dataclasses.replace(params, seed=2**63 + 1)])
    assert_same_bits(bits_of([first]), bits_of([again]))
    assert len({c.tokens for c in (*first.completions, *other.completions)}) == 6


@pytest.mark.sampled(0)
def test_samples_of_one_request_are_the_first_samples_of_a_larger_one(model: Decoder) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
    (one,) = generate(model, [[9, 8]], params)
    (three,) = generate(model, [[9, 8]], dataclasses.replace(params, n=3))
    assert_same_bits(bits_of([one]), bits_of([three])[:1])


def greedy(model: Decoder, tokenizer: Tokenizer | None = None, **fields: object) -> Completion:
    params = SamplingParams(**({"max_tokens": 12, "ignore_eos": True} | fields))
    return generate(model, [[5, 6, 7]], params, tokenizer=tokenizer)[0].completions[0]


def test_a_stop_token_ends_the_sample_and_stays_in_it(model: Decoder) -> None:
    free = greedy(model)
    assert (len(free.tokens), free.finish_reason) == (12, "length")
    end = free.tokens[4]
    stopped = greedy(model, stop_token_ids=(end,))
    length = free.tokens.index(end) + 1
    assert (stopped.tokens, stopped.finish_reason) == (free.tokens[:length], "stop")
    assert stopped.logprobs == free.logprobs[:length]


@pytest.mark.sampled(0)
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


@pytest.mark.sampled(0)
def test_text_prompts_are_encoded(model: Decoder, tokenizer: Tokenizer) -> None:
    params = SamplingParams(max_tokens=4)
    from_text, from_ids = generate(model, ["Hello", tokenizer.encode("Hello")], params, tokenizer=tokenizer)
    assert from_text.prompt_tokens == from_ids.prompt_tokens == tuple(tokenizer.encode("Hello"))
    assert_same_bits(bits_of([from_text]), bits_of([from_ids]))


def test_top_logprobs_begin_with_the_greedy_token(model: Decoder) -> None:
    completion = greedy(model, top_logprobs=4)
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


@pytest.mark.sampled(0)
def test_prompt_logprobs_are_those_of_the_training_forward_in_chunks_of_any_size(model: Decoder) -> None:
    prompt = [3 * index % 515 for index in range(70)]
    params = SamplingParams(max_tokens=2, ignore_eos=True, prompt_logprobs=True, top_logprobs=2, n=2)
    training_forward = detjax.jit(lambda tokens: ops.log_softmax(model(tokens)))
    logprobs = np.asarray(training_forward(jnp.asarray([prompt], jnp.int32))[0])
    for chunk in (1, 9, 128):
        (generation,) = generate(model, [prompt], params, prefill_chunk=chunk)
        assert generation.prompt is not None
        assert_same_bits(np.float32(generation.prompt.logprobs), logprobs[np.arange(69), prompt[1:]])
        assert [len(top) for top in generation.prompt.top_logprobs] == [2] * 69
    (unscored,) = generate(model, [prompt], dataclasses.replace(params, prompt_logprobs=False))
    assert unscored.prompt is None
    assert_same_bits(bits_of([unscored]), bits_of([generation]))


@pytest.mark.sampled(0)
def test_calls_of_one_size_compile_two_programs_of_the_layers_and_one_that_samples(model: Decoder) -> None:
    jax.clear_caches()
    with compiled_programs() as compiled:
        answers(model, requests(), prefill_chunk=64)
    counts = Counter(compiled)
    assert [counts[f"jit({name})"] for name in ("_forward", "_sample", "_score")] == [2, 1, 0]
    with compiled_programs() as compiled:
        answers(model, requests()[::-1], prefill_chunk=64)
    assert compiled == []


@pytest.mark.sampled(0)
def test_other_requests_do_not_matter_with_a_quantized_cache(model: Decoder) -> None:
    asked = requests()[:4]
    together = answers(model, asked, kv_cache_dtype="int8")
    assert together != answers(model, asked)
    assert answers(model, asked[2:3], kv_cache_dtype="int8", prefill_chunk=20) == together[2:3]


def test_an_impossible_cache_dtype_is_refused(model: Decoder) -> None:
    with pytest.raises(ValueError, match=r"generate: .*q4_0 of 80 numbers; accepted: multiples of 32\. Choose int8 or"):
        generate(model, [[1]], kv_cache_dtype="q4_0")
