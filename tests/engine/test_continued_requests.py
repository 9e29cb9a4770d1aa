"""Requests that continue another engine's tokens: the rest has the bits of an uninterrupted run."""

import dataclasses
from collections.abc import Iterator
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
import pytest

from detjax.engine import Constraint, Engine, Generation, Request, SamplingParams, Token
from detjax.models import Tokenizer
from tests.support.bits import assert_same_bits
from tests.support.small_loops import small_engine, small_tokenizer

LONG = "O Romeo, Romeo! wherefore art thou Romeo? Deny thy father and refuse thy name. " * 2
REQUESTS = {
    "greedy": Request("ROMEO:", SamplingParams(max_tokens=16)),
    "sampled": Request(
        LONG, SamplingParams(max_tokens=20, ignore_eos=True, temperature=1.0, top_p=0.9, seed=3, top_logprobs=3)
    ),
    "penalties": Request(
        "JULIET:",
        SamplingParams(
            max_tokens=20,
            presence_penalty=1.5,
            frequency_penalty=1.5,
            repetition_penalty=1.3,
            logit_bias=((40, 6.0), (41, 5.7)),
            ignore_eos=True,
            sampling_logprobs=True,
        ),
    ),
    "least tokens": Request(
        "ROMEO:", SamplingParams(max_tokens=30, temperature=0.9, min_tokens=20, stop_token_ids=tuple(range(100, 300)))
    ),
    "constraint": Request(
        "JULIET:",
        SamplingParams(max_tokens=40, temperature=1.0, seed=2, constraint=Constraint("regex", "[A-Z]{4}: [a-z ]{20}")),
    ),
    "stop string": Request("ROMEO:", SamplingParams(max_tokens=40, temperature=1.0, seed=5)),
    "samples": Request("ROMEO:", SamplingParams(max_tokens=20, temperature=1.0, seed=1, n=3)),
}


class Answer(NamedTuple):
    """A generation, and the streamed text of each sample."""

    generation: Generation
    streams: list[list[Token]]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with small_engine() as one:
        yield one


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return small_tokenizer()


def answers(engine: Engine, requests: list[Request]) -> list[Answer]:
    streams = [[[] for _ in range(request.sampling.n)] for request in requests]
    futures: list[Future[Generation]] = [
        engine.submit(request, lambda token, heard=heard: heard[token.sample].append(token))
        for request, heard in zip(requests, streams, strict=True)
    ]
    return [Answer(future.result(), heard) for future, heard in zip(futures, streams, strict=True)]


def cut(request: Request, whole: Answer, lengths: list[int]) -> Request:
    given = [completion.tokens[:length] for completion, length in zip(whole[0].completions, lengths, strict=False)]
    return dataclasses.replace(request, generated=given)


def request_of(engine: Engine, name: str) -> Request:
    """Returns a request; with a stop string in the middle of its first sample's text if the name says so."""
    request = REQUESTS[name]
    if name not in ("stop string", "samples"):
        return request
    text = engine.generate([request])[0].completions[0].text
    assert text is not None
    start = next(start for start in range(8, len(text)) if text.find(text[start : start + 2]) == start)
    stopped = dataclasses.replace(request.sampling, stop=("a text that never comes", text[start : start + 2]))
    return dataclasses.replace(request, sampling=stopped)


@pytest.mark.parametrize("name", REQUESTS)
def test_the_rest_has_the_bits_of_an_unbroken_run(engine: Engine, name: str) -> None:
    request = request_of(engine, name)
    (whole,) = answers(engine, [request])
    counts = [len(completion.tokens) for completion in whole.generation.completions]
    assert min(counts) > 3
    is_stopped = [completion.finish_reason == "stop" for completion in whole.generation.completions]
    assert any(is_stopped) or name not in ("least tokens", "constraint", "stop string", "samples")
    cuts = [[length] * len(counts) for length in (1, 2, 7, max(counts) // 2)]
    # Samples that have ended already, and samples that have nothing yet.
    cuts += [counts, [counts[0]], [0, 5]]
    given = [[min(pair) for pair in zip(lengths, counts, strict=False)] for lengths in cuts]
    rests = answers(engine, [cut(request, whole, lengths) for lengths in given])
    for lengths, rest in zip(given, rests, strict=True):
        for index, expected in enumerate(whole.generation.completions):
            got, known = rest.generation.completions[index], lengths[index] if index < len(lengths) else 0
            assert got.tokens == expected.tokens[known:]
            assert_same_bits(np.float32(got.logprobs), np.float32(expected.logprobs[known:]))
            assert_same_bits(np.float32(got.sampling_logprobs), np.float32(expected.sampling_logprobs[known:]))
            assert got.top_logprobs == expected.top_logprobs[known:]
            assert got.finish_reason == expected.finish_reason
            streamed_text = "".join(token.text or "" for token in whole.streams[index][:known])
            assert expected.text is not None and streamed_text + (got.text or "") == expected.text
            # The stream continues piece by piece, not only as a whole.
            assert [token.text for token in rest.streams[index]] == [
                token.text for token in whole.streams[index][known:]
            ]


@pytest.mark.parametrize("name", ["penalties", "least tokens", "constraint"])
def test_a_prompt_with_the_tokens_behind_it_is_another_request(engine: Engine, tokenizer: Tokenizer, name: str) -> None:
    """The negative control: a longer prompt is not a continuation if something depends on generated tokens."""
    request = REQUESTS[name]
    assert isinstance(request.prompt, str)
    (whole,) = answers(engine, [request])
    tokens, known = whole.generation.completions[0].tokens, 8
    params = dataclasses.replace(request.sampling, max_tokens=request.sampling.max_tokens - known)
    (rest,) = answers(engine, [Request([*tokenizer.encode(request.prompt), *tokens[:known]], params)])
    assert rest.generation.completions[0].tokens != tokens[known:]


def test_what_cannot_be_gone_on_from_is_refused(engine: Engine) -> None:
    params = SamplingParams(max_tokens=4, stop_token_ids=(7,))
    for generated, sampling, message in (
        ([[1], [2]], params, r"generated tokens of 2 samples; accepted: up to n, which is 1"),
        ([[1] * 5], params, r"has 5 generated tokens for sample 0; accepted: up to 4, its max_tokens"),
        ([[1, 10**6]], params, r"the generated token 1000000 for sample 0; accepted: ids 0 to"),
        ([[1, 7, 2]], params, r"generated has 3 tokens for sample 0, which ends after 2 of them \(stop\)"),
        ([[1]], dataclasses.replace(params, prompt_logprobs=True), r"asks for prompt_logprobs; accepted: one of them"),
    ):
        with pytest.raises(ValueError, match=f"the request:? .*{message}"):
            engine.submit(Request([1, 2], sampling, generated=generated))
