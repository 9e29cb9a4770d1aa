"""Penalties, biases and `min_tokens`: what they choose, and that no bit of them depends on other requests."""

import dataclasses
import functools
import random
from collections import Counter
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax import SamplingParams, generate
from detjax.engine import Completion, Engine, Generation, Request, SamplingVariant
from detjax.models import Decoder, load
from tests.contract import emulation
from tests.support.bits import assert_same_bits

FIXTURES = Path(__file__).parents[1] / "fixtures"
VOCABULARY = 515
EVERYTHING = SamplingParams(
    repetition_penalty=1.3,
    frequency_penalty=0.4,
    presence_penalty=-0.3,
    logit_bias=((7, 2.5), (11, -3.0), (514, 1.5)),
    min_tokens=4,
    ignore_eos=True,
)


@functools.cache
def model() -> Decoder:
    return load(FIXTURES / "qwen3", dtype="bfloat16", progress=False)[0]


def engine(**options: Any) -> Engine:
    return Engine(model(), **({"max_samples": 8, "token_budget": 64, "max_length": 400} | options))


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
    for index in range(24):
        prompt = [*(prefix if index % 5 == 0 else []), *(draw.randrange(VOCABULARY) for _ in range(1 + 5 * index))]
        fields = choices[index % 3] | {"seed": index, "max_tokens": draw.randint(5, 12), "ignore_eos": True}
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
    with engine(prefix_cache=False) as one:
        return [one.generate([request])[0] for request in requests()]


@functools.cache
def _forward() -> Any:
    return detjax.jit(lambda tokens: model()(tokens))


def logits_after(tokens: list[int]) -> np.ndarray:
    """The model's logits for the token after those given."""
    padded = np.zeros((1, 256), np.int32)
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


LIKELY = SamplingParams(logit_bias=((40, 9.0), (41, 8.7), (42, 8.4)), max_tokens=16, ignore_eos=True)
"""Biases that make a model without training repeat itself, so that penalties matter."""
PARAMS = {
    "repetition": {"repetition_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.9},
    "rewards after a penalty": {"repetition_penalty": 1.6, "frequency_penalty": -0.1, "presence_penalty": -0.3},
    "presence": {"presence_penalty": 1.9},
    "bias": {"logit_bias": ((40, 9.0), (41, 9.5), (42, -9.0))},
    "all": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": -0.3},
}


@pytest.mark.sampled(0)
@pytest.mark.parametrize("name", PARAMS)
def test_greedy_tokens_are_those_of_the_adjusted_logits(name: str) -> None:
    prompt = [5, 9, 9, 300, 12, 42]
    params = dataclasses.replace(LIKELY, **PARAMS[name])
    adjusted, likely = (_completion(prompt, params) for params in (params, LIKELY))
    assert list(adjusted.tokens) == expected(prompt, params)
    assert adjusted.tokens != likely.tokens


@pytest.mark.sampled(0)
def test_no_token_ends_a_sample_before_it_has_min_tokens() -> None:
    prompt = [5, 9, 9, 300, 12]
    (free,) = generate(model(), [prompt], SamplingParams(max_tokens=1, ignore_eos=True))
    stops = (*free.completions[0].tokens, *range(0, VOCABULARY, 3))
    params = SamplingParams(max_tokens=30, ignore_eos=True, stop_token_ids=stops[:200])
    for min_tokens in (0, 1, 2, 7):
        (generation,) = generate(model(), [prompt], dataclasses.replace(params, min_tokens=min_tokens))
        completion = generation.completions[0]
        assert list(completion.tokens) == expected(prompt, dataclasses.replace(params, min_tokens=min_tokens))
        assert completion.finish_reason == "stop"
        assert len(completion.tokens) > min_tokens or min_tokens == 0


@pytest.mark.sampled(0)
def test_the_models_end_tokens_are_held_back_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = [5, 9, 9, 300, 12]
    free = _completion(prompt, SamplingParams(max_tokens=6, ignore_eos=True))
    ends = dataclasses.replace(model().generation_defaults, eos_token_ids=(free.tokens[0],))
    monkeypatch.setattr(model(), "generation_defaults", ends)
    assert _completion(prompt, SamplingParams(max_tokens=6)).tokens == free.tokens[:1]
    held_back = _completion(prompt, SamplingParams(max_tokens=6, min_tokens=3))
    assert free.tokens[0] not in held_back.tokens[:3]


def _completion(prompt: list[int], params: SamplingParams) -> Completion:
    return generate(model(), [prompt], params)[0].completions[0]


def test_logprobs_are_those_of_the_model_before_the_adjustments() -> None:
    prompt = [5, 9, 9, 300, 12]
    params = dataclasses.replace(EVERYTHING, max_tokens=6, temperature=0.9, top_logprobs=3)
    completion = _completion(prompt, params)
    tokens = [*prompt, *completion.tokens]
    padded = np.zeros((1, 256), np.int32)
    padded[0, : len(tokens)] = tokens
    scored = detjax.jit(lambda tokens: detjax.ops.log_softmax(model()(tokens)))(jnp.asarray(padded))[0]
    rows = np.asarray(scored)[len(prompt) - 1 : len(tokens) - 1]
    assert_same_bits(np.float32(completion.logprobs), rows[np.arange(6), completion.tokens])
    top = np.asarray(completion.top_logprobs)[..., 1].astype(np.float32)
    assert_same_bits(top, -np.sort(-rows, axis=1)[:, :3])


@pytest.mark.sampled(0)
@pytest.mark.parametrize(
    "options",
    [{}, {"token_budget": 1, "max_samples": 3}, {"token_budget": 512, "max_samples": 64}],
    ids=["defaults", "a token a step", "512 tokens a step"],
)
def test_adjusted_requests_alone_and_together_have_the_same_bits(options: dict[str, Any]) -> None:
    order = random.Random(1).sample(range(24), 24)
    with engine(**options) as one:
        together = one.generate([requests()[i] for i in order])
    assert_same_bits(bits_of(together), bits_of([alone()[i] for i in order]))


@pytest.mark.sampled(0)
@pytest.mark.parametrize("prefill_chunk", [1, 30])
def test_the_bits_are_those_of_generate_in_chunks_of_any_size(prefill_chunk: int) -> None:
    some = requests()[:9]
    prompts, params = [request.prompt for request in some], [request.sampling for request in some]
    made = generate(model(), prompts, params, prefill_chunk=prefill_chunk)
    assert_same_bits(bits_of(made), bits_of(alone()[:9]))


@pytest.mark.sampled(0)
def test_requests_without_adjustments_have_the_bits_of_a_program_without_them() -> None:
    plain = [request for request in requests() if not request.sampling.adjusted]
    prompts, params = [request.prompt for request in plain], [request.sampling for request in plain]
    expected = [a for a, request in zip(alone(), requests(), strict=True) if not request.sampling.adjusted]
    assert_same_bits(bits_of(generate(model(), prompts, params)), bits_of(expected))


@pytest.mark.sampled(0)
def test_preempted_requests_have_the_same_bits() -> None:
    # Each of these requests needs one more page for the tokens that it generates.
    params = dataclasses.replace(EVERYTHING, temperature=1.0, max_tokens=14)
    crowd = [Request([index] * (121 + index), dataclasses.replace(params, seed=index)) for index in range(6)]
    with engine() as one:
        expected = one.generate(crowd)
    with engine(num_pages=5) as one:
        crowded = one.generate([*crowd, *requests()[:8]])
        assert one.stats().preemptions > 0
    assert_same_bits(bits_of(crowded), bits_of([*expected, *alone()[:8]]))


@pytest.mark.sampled(0)
def test_samples_of_one_request_count_their_own_tokens() -> None:
    params = dataclasses.replace(EVERYTHING, temperature=1.0, n=3, max_tokens=10, seed=5)
    prompt = list(range(150))
    (expected,) = generate(model(), [prompt], params)
    with engine() as one:
        assert_same_bits(bits_of(one.generate([Request(prompt, params)])), bits_of([expected]))
        (three,) = one.generate([Request(prompt, dataclasses.replace(params, n=3, max_tokens=4))])
    assert [c.tokens for c in three.completions] == [c.tokens[:4] for c in expected.completions]


def test_a_prompt_of_many_different_tokens_is_noted_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detjax.engine.step_programs, "_SEEN_ENTRIES", 16)  # pyright: ignore[reportAttributeAccessIssue]
    prompt = random.Random(0).sample(range(VOCABULARY), 100)
    params = SamplingParams(repetition_penalty=3.0, max_tokens=8, ignore_eos=True)
    assert list(_completion(prompt, params).tokens) == expected(prompt, params)


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
        generate(model(), [[1]], SamplingParams(logit_bias=((3, 1.0), (515, 1.0))))


def test_the_most_biases_and_stop_tokens_fit_into_a_row() -> None:
    stops = tuple(range(300, 500))
    biases = tuple((token, 0.5) for token in range(300))
    params = SamplingParams(logit_bias=biases, min_tokens=2, stop_token_ids=stops, max_tokens=3, ignore_eos=True)
    assert list(_completion([1, 2], params).tokens) == expected([1, 2], params)
