"""Requests whose replicas die go on at others: same tokens, same logprobs, one unbroken stream."""

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from detjax.audit import Origin
from detjax.engine import Engine, EngineClosed, NotFinite, Request, SamplingParams, Token
from detjax.models import Decoder, ModelMetadata, Tokenizer
from detjax.server import Settings, create_app
from detjax.server.app import app_of
from detjax.server.replicated_engine import MAX_LOSSES, Batch, ReplicaLost, ReplicatedEngine, batches
from tests.server.running_server import MODEL
from tests.support.bits import assert_same_bits

PENALIZED = SamplingParams(
    max_tokens=12, temperature=1.0, seed=3, frequency_penalty=1.0, top_logprobs=2, n=2, ignore_eos=True
)
SCORED = SamplingParams(max_tokens=6, prompt_logprobs=True, ignore_eos=True)
REQUESTS = [Request([5, 6, 7], PENALIZED), Request([9, 8, 7, 6, 5], SCORED)]


class MortalReplicas:
    """Replicas in this process. Each dies after a given number of events of a call; the last one lives.

    Attributes:
        asked: the requests of each call.
    """

    failure = None

    def __init__(self, engine: Engine, lives: Sequence[int]) -> None:
        self.asked: list[list[Request]] = []
        self._engine, self._lives = engine, [*lives]

    async def stream(self, requests: Sequence[Request], *, is_whole: bool) -> AsyncGenerator[Batch]:
        self.asked.append([*requests])
        left = self._lives.pop(0) if self._lives else None
        async with contextlib.aclosing(batches(self._engine, requests, is_whole=is_whole)) as answered:
            async for batch in answered:
                if isinstance(batch, Exception):
                    yield batch
                    return
                if left is not None and len(batch) >= left:
                    yield batch[:left]
                    raise ReplicaLost("planned")
                left = None if left is None else left - len(batch)
                yield batch


class OtherReplicas:
    """Replicas that all answer a call in the same way."""

    failure = None

    def __init__(self, answer: Any) -> None:
        self.answer, self.calls = answer, 0

    async def stream(self, requests: Sequence[Request], *, is_whole: bool) -> AsyncGenerator[Batch]:
        self.calls += 1
        for batch in self.answer(requests):
            yield batch


def replicated(replicas: Any, engine: Engine, loaded: tuple[Decoder, Tokenizer]) -> ReplicatedEngine:
    return ReplicatedEngine(replicas, ModelMetadata.from_model(loaded[0]), loaded[1], engine.config)


async def streamed(engine: Engine | ReplicatedEngine, requests: Sequence[Request]) -> list[tuple[int, Token]]:
    return [event async for event in engine.stream_all(requests)]


def by_sample(tokens: list[tuple[int, Token]]) -> dict[tuple[int, int], list[Token]]:
    samples: dict[tuple[int, int], list[Token]] = {}
    for number, token in tokens:
        # The batch size of a step is not part of the answer.
        samples.setdefault((number, token.sample), []).append(dataclasses.replace(token, batch=0))
    return samples


@pytest.mark.sampled(4)
@pytest.mark.parametrize("lives", [[5], [2, 3], [30], [0], [1], [17], [1, 1, 1, 1], [29], [31]])
def test_lost_replicas_leave_no_trace_in_a_stream(
    engine: Engine, loaded: tuple[Decoder, Tokenizer], lives: list[int]
) -> None:
    expected = by_sample(asyncio.run(streamed(engine, REQUESTS)))
    assert sum(map(len, expected.values())) == 30
    replicas = MortalReplicas(engine, lives)
    answered = replicated(replicas, engine, loaded)
    got = by_sample(asyncio.run(streamed(answered, REQUESTS)))
    assert got == expected
    for place, tokens in expected.items():
        assert_same_bits(*(np.float32([token.logprob for token in one]) for one in (got[place], tokens)))
    assert answered.losses == len(lives) == len(replicas.asked) - 1


@pytest.mark.sampled(3)
@pytest.mark.parametrize("lives", [[1, 1], [], [0], [2]])
def test_lost_replicas_leave_no_trace_in_generations(
    engine: Engine, loaded: tuple[Decoder, Tokenizer], lives: list[int]
) -> None:
    expected = engine.generate(REQUESTS)
    got = asyncio.run(replicated(MortalReplicas(engine, lives), engine, loaded).generate_async(REQUESTS))
    assert got == expected
    assert got[1].prompt is not None and expected[1].prompt is not None
    assert_same_bits(np.float32(got[1].prompt.logprobs), np.float32(expected[1].prompt.logprobs))


def test_the_next_replica_computes_no_token_again(engine: Engine, loaded: tuple[Decoder, Tokenizer]) -> None:
    replicas = MortalReplicas(engine, [7])
    tokens = asyncio.run(streamed(replicated(replicas, engine, loaded), REQUESTS[:1]))
    first, rest = replicas.asked
    assert first == REQUESTS[:1]
    given = [tuple(token.token for _, token in tokens[:7] if token.sample == sample) for sample in range(2)]
    assert rest[0].generated == given


def test_other_bits_of_another_replica_are_an_error(engine: Engine, loaded: tuple[Decoder, Tokenizer]) -> None:
    """Replicas that begin again repeat tokens, so bits that differ are seen."""
    replicas = MortalReplicas(engine, [4])
    answered = replicated(replicas, engine, loaded)
    stream = replicas.stream

    async def changed(requests: Sequence[Request], *, is_whole: bool) -> AsyncGenerator[Batch]:
        is_second = len(replicas.asked) == 1
        async for batch in stream(requests, is_whole=is_whole):
            assert isinstance(batch, list)
            yield [
                (number, dataclasses.replace(event, logprob=float(np.nextafter(np.float32(event.logprob), 1))))
                if is_second and isinstance(event, Token)
                else (number, event)
                for number, event in batch
            ]

    replicas.stream = changed
    with pytest.raises(RuntimeError, match="replicas give different bits"):
        asyncio.run(streamed(answered, REQUESTS[1:]))


def test_requests_that_lose_every_replica_end(
    engine: Engine, loaded: tuple[Decoder, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("detjax.server.replicated_engine._PAUSE", 0)
    for answer in (lambda _: [EngineClosed("Engine: it has failed")], lambda _: []):
        replicas = OtherReplicas(answer)
        with pytest.raises(EngineClosed, match=f"has lost {MAX_LOSSES} replicas in a row"):
            asyncio.run(streamed(replicated(replicas, engine, loaded), REQUESTS))
        assert replicas.calls == MAX_LOSSES


def test_what_a_request_is_to_blame_for_is_not_tried_again(engine: Engine, loaded: tuple[Decoder, Tokenizer]) -> None:
    for error in (ValueError("the request is too long"), NotFinite("the model's logits hold NaN")):
        replicas = OtherReplicas(lambda _, error=error: [error])
        with pytest.raises(type(error), match=str(error)):
            asyncio.run(streamed(replicated(replicas, engine, loaded), REQUESTS))
        assert replicas.calls == 1
    one = Request([1], SamplingParams(max_tokens=1_000_000))
    with pytest.raises(ValueError, match="request 1 has 1 tokens and asks for 1000000 more; accepted: "):
        asyncio.run(streamed(replicated(MortalReplicas(engine, []), engine, loaded), [REQUESTS[0], one]))


def responses(app: Any) -> list[Any]:
    """Returns a response without its ids and times, which are unique."""
    body = {"model": MODEL, "prompt": [[5, 6, 7], [8, 9]], "max_tokens": 10, "temperature": 1, "logprobs": 2, "n": 2}
    streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 10, "logprobs": True}
    got = []
    with TestClient(app) as client:
        for path, one in (("completions", body), ("completions", streamed), ("chat/completions", chat)):
            answer = client.post(f"/v1/{path}", json=one)
            assert answer.status_code == 200, answer.text
            lines = [line.removeprefix("data: ") for line in answer.text.split("\n") if line]
            parts = [json.loads(line) for line in lines if line != "[DONE]"]
            assert ("[DONE]" in lines) == bool(one.get("stream"))
            parts = [{key: value for key, value in part.items() if key not in ("id", "created")} for part in parts]
            got.append(sorted(parts, key=lambda part: [choice["index"] for choice in part["choices"]]))
    return got


def test_clients_get_the_same_responses_from_replicas_that_die(
    engine: Engine, loaded: tuple[Decoder, Tokenizer]
) -> None:
    settings = Settings(MODEL, unseeded="fixed")
    whole = create_app(engine, *loaded, settings)
    origin = Origin.here(*loaded)
    replicas = replicated(MortalReplicas(engine, [1, 0, 1, 0, 1, 1, 1]), engine, loaded)
    broken = app_of(replicas, ModelMetadata.from_model(loaded[0]), loaded[1], settings, origin)
    with contextlib.closing(whole.state.texts), contextlib.closing(broken.state.texts):
        assert whole.state.fingerprint == broken.state.fingerprint
        assert responses(broken) == responses(whole)
        with TestClient(broken) as client:
            assert "detjax_lost_replicas_total 7.0" in client.get("/metrics").text
            assert client.get("/health").json() == {"status": "ok"}
