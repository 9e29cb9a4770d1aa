"""Scores of prompts under the distribution that a request draws from."""

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest

from detjax.engine import Completion, Constraint, FieldError, Generation, PromptLogprobs, Request, SamplingParams
from tests.support.bits import assert_same_bits, same_bits
from tests.support.small_loops import small_engine, small_tokenizer

PROMPT = [5, 9, 300, 9, 17, 5]
TOKENS = 70
"""Tokens of an answer: more than a program scores at once."""
BASE = SamplingParams(max_tokens=TOKENS, ignore_eos=True, sampling_logprobs=True, top_logprobs=2)
SAMPLING: dict[str, dict[str, Any]] = {
    "everything": {
        "temperature": 0.9,
        "top_p": 0.95,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.4,
        "presence_penalty": -0.3,
        "logit_bias": ((7, 2.5), (11, -3.0)),
        "min_tokens": 5,
        "stop_token_ids": (7, 40),
        "bad_words": ("the", "xy"),
        "seed": 3,
    },
    "plain": {"temperature": 1.0, "seed": 1},
    "greedy": {"repetition_penalty": 1.2},
    "filters": {"temperature": 0.7, "top_k": 20, "min_p": 0.01, "seed": 2},
    "allowed": {"temperature": 1.1, "allowed_token_ids": tuple(range(1, 515, 3)), "frequency_penalty": 1.0, "seed": 5},
}


def params(name: str) -> SamplingParams:
    return dataclasses.replace(BASE, **SAMPLING[name])


@functools.cache
def answers() -> dict[str, Completion]:
    with small_engine() as engine:
        made = engine.generate([Request(PROMPT, params(name)) for name in SAMPLING])
    return {name: generation.completions[0] for name, generation in zip(SAMPLING, made, strict=True)}


def scoring(name: str, tokens: tuple[int, ...], answer: int) -> Request:
    """A request to score a prompt that ends with an answer."""
    least = max(1, params(name).min_tokens)
    asked = dataclasses.replace(params(name), prompt_logprobs=True, scored_answer=answer, max_tokens=least)
    return Request(tokens, asked)


def scores(generation: Generation) -> PromptLogprobs:
    assert generation.prompt is not None
    return generation.prompt


@functools.cache
def scored() -> list[PromptLogprobs]:
    """The score of each answer after its prompt, one request at a time."""
    with small_engine(prefix_cache=False) as engine:
        return [
            scores(engine.generate([scoring(name, (*PROMPT, *one.tokens), len(one.tokens))])[0])
            for name, one in answers().items()
        ]


def test_an_answer_has_the_score_that_it_was_drawn_with() -> None:
    for (name, one), prompt in zip(answers().items(), scored(), strict=True):
        count = len(one.tokens)
        assert count == TOKENS or name == "everything"
        assert_same_bits(np.float32(prompt.sampling_logprobs[-count:]), np.float32(one.sampling_logprobs))
        assert prompt.sampling_top_logprobs[-count:] == one.sampling_top_logprobs
        assert_same_bits(np.float32(prompt.logprobs[-count:]), np.float32(one.logprobs))
        assert len(prompt.sampling_logprobs) == len(prompt.logprobs) == len(PROMPT) - 1 + count


def test_the_likeliest_tokens_are_those_of_the_distribution() -> None:
    for name, one in answers().items():
        for token, logprob, top in zip(one.tokens, one.sampling_logprobs, one.sampling_top_logprobs, strict=True):
            assert len(top) == 2
            assert top[0][1] >= max(top[1][1], logprob)
            assert dict(top).get(token, logprob) == logprob
            if name == "greedy":
                assert top[0] == (token, 0.0)
                assert top[1][1] == -np.inf


@pytest.mark.parametrize("options", [{}, {"token_budget": 7}], ids=["defaults", "few tokens a step"])
def test_scores_have_the_same_bits_in_a_crowd(options: dict[str, Any]) -> None:
    asked = [scoring(name, (*PROMPT, *one.tokens), len(one.tokens)) for name, one in answers().items()]
    with small_engine(**options) as engine:
        together = engine.generate([*asked[::-1], Request(PROMPT, params("plain"))])
    assert [scores(one) for one in together[:-1]][::-1] == scored()


def test_a_token_counts_as_the_first_of_an_answer_by_default() -> None:
    name = "everything"
    tokens = (*PROMPT, *answers()[name].tokens[:6])
    with small_engine() as engine:
        (whole,) = engine.generate([scoring(name, tokens, 0)])
        parts = engine.generate([scoring(name, tokens[: end + 1], 1) for end in range(1, len(tokens))])
    expected = [scores(part).sampling_logprobs[-1] for part in parts]
    assert_same_bits(np.float32(scores(whole).sampling_logprobs), np.float32(expected))
    as_answer = answers()[name].sampling_logprobs[:6]
    assert expected[len(PROMPT) - 1] == as_answer[0]
    assert not same_bits(np.float32(expected[-6:]), np.float32(as_answer))  # frequencies differ


def test_tokens_that_cannot_be_drawn_have_no_probability() -> None:
    (letter,) = small_tokenizer().encode("a")
    given = SamplingParams(1, temperature=1.0, prompt_logprobs=True, sampling_logprobs=True)
    cases = (
        dataclasses.replace(given, allowed_token_ids=(3, 4)),
        dataclasses.replace(given, bad_words=("a",)),
        dataclasses.replace(given, top_k=1),
        dataclasses.replace(given, temperature=0.0),
        dataclasses.replace(given, min_tokens=1, stop_token_ids=(letter,)),
    )
    with small_engine() as engine:
        made = engine.generate([Request([3, letter, 3], one) for one in cases])
    for one, generation in zip(cases, made, strict=True):
        assert scores(generation).sampling_logprobs[0] == -np.inf, one
        assert np.isfinite(scores(generation).logprobs).all()


def test_several_samples_share_the_scores_of_their_prompt() -> None:
    asked = dataclasses.replace(params("filters"), n=3, max_tokens=2, prompt_logprobs=True)
    with small_engine() as engine:
        several, one = engine.generate([Request(PROMPT, asked), Request(PROMPT, dataclasses.replace(asked, n=1))])
        (plain,) = engine.generate([Request(PROMPT, dataclasses.replace(asked, sampling_logprobs=False))])
    assert several.prompt == one.prompt
    assert plain.prompt == dataclasses.replace(scores(several), sampling_logprobs=(), sampling_top_logprobs=())


def test_what_has_no_score_is_refused() -> None:
    with pytest.raises(FieldError, match="scored_answer is 1; accepted: 0, or with prompt_logprobs"):
        SamplingParams(scored_answer=1)
    with pytest.raises(FieldError, match="given with a constraint") as raised:
        SamplingParams(prompt_logprobs=True, sampling_logprobs=True, constraint=Constraint.choice(["a"]))
    assert raised.value.field == "sampling_logprobs"
    beyond = SamplingParams(1, prompt_logprobs=True, sampling_logprobs=True, scored_answer=2)
    with small_engine() as engine, pytest.raises(FieldError, match="scored_answer is 2; accepted: up to 1"):
        engine.submit(Request([3, 4], beyond))
