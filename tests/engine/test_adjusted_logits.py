"""Penalties, biases and `min_tokens`: what they choose, and that no bit of them depends on other requests."""

import dataclasses
import functools
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax import SamplingParams, generate
from detjax.engine import Completion, Engine, Generation, Request, SamplingVariant
from detjax.models import GenerationDefaults
from tests.contract import emulation
from tests.support.bits import assert_same_bits
from tests.support.small_loops import small_engine, small_model

VOCABULARY = 515
LENGTH = 112
"""Tokens of the whole forward pass, padding included."""
EVERYTHING = SamplingParams(
    repetition_penalty=1.3,
    frequency_penalty=0.4,
    presence_penalty=-0.3,
    logit_bias=((7, 2.5), (11, -3.0), (514, 1.5)),
    min_tokens=4,
    ignore_eos=True,
)


COUNT = 14


@pytest.fixture(scope="module")
def shared() -> Iterator[Engine]:
    """An engine for the tests that leave it idle."""
    with small_engine() as one:
        yield one


@functools.cache
def requests() -> list[Request]:
    """Requests with each of the adjustments, with all and with none; greedy, sampled and filtered."""
    draw = random.Random(0)
    prefix = [draw.randrange(VOCABULARY) for _ in range(140)]
    adjusted = (
        EVERYTHING,
        SamplingParams(frequency_penalty=1.5),
        SamplingParams(),
        SamplingParams(repetition_penalty=0.8),
        SamplingParams(logit_bias=((3, 4.0),)),
        SamplingParams(presence_penalty=2.0),
        SamplingParams(),
        SamplingParams(min_tokens=5, stop_token_ids=tuple(range(200))),
    )
    choices = ({}, {"temperature": 1.0, "top_logprobs": 2}, {"temperature": 0.8, "top_p": 0.9})
    result = []
    for index in range(COUNT):
        prompt = [*(prefix if index % 5 == 0 else []), *(draw.randrange(VOCABULARY) for _ in range(1 + 8 * index))]
        fields = choices[index % 3] | {"seed": index, "max_tokens": draw.randint(5, 8), "ignore_eos": True}
        result.append(Request(prompt, dataclasses.replace(adjusted[index % len(adjusted)], **fields)))
    return result


def bits_of(generations: list[Generation]) -> list:
    """Everything that was generated, as arrays."""
    return [
        (np.asarray(c.tokens), np.float32(c.logprobs), np.asarray(c.top_logprobs, np.float64))
        for generation in generations
        for c in generation.completions
    ]


@functools.cache
def alone() -> list[Generation]:
    """Each request's answer from an engine without a prefix cache that serves one request at a time."""
    with small_engine(prefix_cache=False) as one:
        return [one.generate([request])[0] for request in requests()]


@functools.cache
def _forward() -> Any:
    return detjax.jit(lambda tokens: small_model()(tokens))


def logits_after(tokens: list[int]) -> np.ndarray:
    """The model's logits for the token after those given."""
    padded = np.zeros((1, LENGTH), np.int32)
    padded[0, : len(tokens)] = tokens
    return np.asarray(_forward()(jnp.asarray(padded)))[0, len(tokens) - 1]


def expected(prompt: list[int], params: SamplingParams) -> list[int]:
    """The tokens that a greedy request must get."""
    tokens: list[int] = []
    while len(tokens) < params.max_tokens and not {*tokens[-1:]} & {*params.stop_token_ids}:
        request = emulation.Adjustments(
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
            dict(params.logit_bias),
            frozenset(params.stop_token_ids if len(tokens) < params.min_tokens else ()),
        )
        adjusted = emulation.adjusted(logits_after([*prompt, *tokens]), prompt, Counter(tokens), request)
        tokens.append(int(np.argmax(adjusted)))
    return tokens


LIKELY = SamplingParams(logit_bias=((40, 9.0), (41, 8.7), (42, 8.4)), max_tokens=12, ignore_eos=True)
"""Biases that make a model without training repeat itself, so that penalties matter."""
PARAMS = {
    "repetition": {"repetition_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.9},
    "rewards after a penalty": {"repetition_penalty": 1.6, "frequency_penalty": -0.1, "presence_penalty": -0.3},
    "presence": {"presence_penalty": 1.9},
    "bias": {"logit_bias": ((40, 9.0), (41, 9.5), (42, -9.0))},
    "all": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": -0.3},
}


@pytest.mark.parametrize("name", PARAMS)
def test_greedy_tokens_are_those_of_the_adjusted_logits(shared: Engine, name: str) -> None:
    prompt = [5, 9, 9, 300, 12, 42]
    params = dataclasses.replace(LIKELY, **PARAMS[name])
    adjusted, likely = (_completion(shared, prompt, params) for params in (params, LIKELY))
    assert list(adjusted.tokens) == expected(prompt, params)
    assert adjusted.tokens != likely.tokens


def test_no_token_ends_a_sample_before_it_has_min_tokens(shared: Engine) -> None:
    prompt = [5, 9, 9, 300, 12]
    free = _completion(shared, prompt, SamplingParams(max_tokens=1, ignore_eos=True))
    stops = (*free.tokens, *range(0, VOCABULARY, 3))
    params = SamplingParams(max_tokens=30, ignore_eos=True, stop_token_ids=stops[:200])
    for min_tokens in (0, 1, 2, 7):
        completion = _completion(shared, prompt, dataclasses.replace(params, min_tokens=min_tokens))
        assert list(completion.tokens) == expected(prompt, dataclasses.replace(params, min_tokens=min_tokens))
        assert completion.finish_reason == "stop"
        assert len(completion.tokens) > min_tokens or min_tokens == 0


def test_the_models_end_tokens_are_held_back_as_well(shared: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = [5, 9, 9, 300, 12]
    free = _completion(shared, prompt, SamplingParams(max_tokens=6, ignore_eos=True))
    monkeypatch.setattr(shared, "_defaults", GenerationDefaults(eos_token_ids=(free.tokens[0],)))
    assert _completion(shared, prompt, SamplingParams(max_tokens=6)).tokens == free.tokens[:1]
    held_back = _completion(shared, prompt, SamplingParams(max_tokens=6, min_tokens=3))
    assert free.tokens[0] not in held_back.tokens[:3]


def _completion(engine: Engine, prompt: list[int], params: SamplingParams) -> Completion:
    return engine.generate([Request(prompt, params)])[0].completions[0]


def test_logprobs_are_those_of_the_model_before_the_adjustments(shared: Engine) -> None:
    prompt = [5, 9, 9, 300, 12]
    params = dataclasses.replace(EVERYTHING, max_tokens=6, temperature=0.9, top_logprobs=3)
    completion = _completion(shared, prompt, params)
    tokens = [*prompt, *completion.tokens]
    rows = np.stack([logits_after(tokens[:length]) for length in range(len(prompt), len(tokens))])
    rows = np.asarray(detjax.jit(detjax.ops.log_softmax)(jnp.asarray(rows)))
    assert_same_bits(np.float32(completion.logprobs), rows[np.arange(6), completion.tokens])
    top = np.asarray(completion.top_logprobs)[..., 1].astype(np.float32)
    assert_same_bits(top, -np.sort(-rows, axis=1)[:, :3])


@pytest.mark.parametrize(
    "options",
    [{}, {"token_budget": 1}, pytest.param({"token_budget": 512, "max_samples": 64}, marks=pytest.mark.nightly)],
    ids=["defaults", "a token a step", "512 tokens a step"],
)
def test_adjusted_requests_alone_and_together_have_the_same_bits(options: dict[str, Any]) -> None:
    order = random.Random(1).sample(range(COUNT), COUNT)
    with small_engine(**options) as one:
        together = one.generate([requests()[i] for i in order])
    assert_same_bits(bits_of(together), bits_of([alone()[i] for i in order]))


@pytest.mark.parametrize("prefill_chunk", [1, pytest.param(30, marks=pytest.mark.nightly)])
def test_the_bits_are_those_of_generate_in_chunks_of_any_size(prefill_chunk: int) -> None:
    some, count = requests()[1:5], 4
    prompts, params = [request.prompt for request in some], [request.sampling for request in some]
    made = generate(small_model(), prompts, params, prefill_chunk=prefill_chunk)
    assert_same_bits(bits_of(made), bits_of(alone()[1 : 1 + count]))


def test_preempted_requests_have_the_same_bits() -> None:
    # Each of these requests needs one more page for the tokens that it generates.
    params = dataclasses.replace(EVERYTHING, temperature=1.0, max_tokens=14)
    crowd = [Request([index] * (121 + index), dataclasses.replace(params, seed=index)) for index in range(4)]
    with small_engine() as one:
        expected = one.generate(crowd)
    with small_engine(pages=4) as one:
        crowded = one.generate([*crowd, *requests()[:5]])
        assert one.stats().preemptions > 0
    assert_same_bits(bits_of(crowded), bits_of([*expected, *alone()[:5]]))


def test_samples_of_one_request_count_their_own_tokens(shared: Engine) -> None:
    params = dataclasses.replace(EVERYTHING, temperature=1.0, n=3, max_tokens=10, seed=5)
    request = Request(list(range(150)), params)
    with small_engine(token_budget=1) as other:
        expected = other.generate([request])
    assert_same_bits(bits_of(shared.generate([request])), bits_of(expected))
    (shorter,) = shared.generate([dataclasses.replace(request, sampling=dataclasses.replace(params, max_tokens=4))])
    assert [c.tokens for c in shorter.completions] == [c.tokens[:4] for c in expected[0].completions]
    assert len({c.tokens for c in shorter.completions}) == 3


def test_a_prompt_of_many_different_tokens_is_noted_whole(shared: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detjax.engine.sampling_programs, "_SEEN_ENTRIES", 16)  # pyright: ignore[reportAttributeAccessIssue]
    prompt = random.Random(0).sample(range(VOCABULARY), 100)
    params = SamplingParams(repetition_penalty=3.0, max_tokens=8, ignore_eos=True)
    assert list(_completion(shared, prompt, params).tokens) == expected(prompt, params)


def test_only_requests_with_adjustments_need_programs_with_them() -> None:
    needed = [SamplingVariant.needed_by([request.sampling]) for request in requests()]
    assert [variant.adjusted for variant in needed] == [request.sampling.adjusted for request in requests()]
    assert not SamplingParams(min_tokens=0, logit_bias=()).adjusted
    variants = SamplingVariant.for_serving(20)
    assert next(v for v in variants if v.serves(SamplingVariant(False, 0))) == SamplingVariant(False, 0, False)

    def first(*needed: Any) -> SamplingVariant:
        return next(variant for variant in variants if variant.serves(SamplingVariant(*needed)))

    # Filters and likeliest tokens take long, so that samples without them have programs without them.
    assert first(False, 0, True) == SamplingVariant(False, 0, adjusted=True, constrained=True)
    assert first(False, 3, True) == SamplingVariant(True, 20, adjusted=True, constrained=True)
    assert first(False, 0, False, True) == SamplingVariant(False, 0, constrained=True)
    assert first(True, 0, False, True) == SamplingVariant(True, 0, constrained=True)


def test_a_bias_of_a_token_outside_of_the_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match=r"prompt 0: logit_bias has token 515; accepted: ids 0 to 514"):
        generate(small_model(), [[1]], SamplingParams(logit_bias=((3, 1.0), (515, 1.0))))


def test_the_most_biases_and_stop_tokens_fit_into_a_row(shared: Engine) -> None:
    stops = tuple(range(300, 500))
    biases = tuple((token, 0.5) for token in range(300))
    params = SamplingParams(logit_bias=biases, min_tokens=2, stop_token_ids=stops, max_tokens=3, ignore_eos=True)
    assert list(_completion(shared, [1, 2], params).tokens) == expected([1, 2], params)
