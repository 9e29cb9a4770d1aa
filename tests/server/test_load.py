"""Many at once: none is lost, all have the bits that they have alone, and the end is orderly."""

import asyncio
import json
import urllib.error
import urllib.request

import numpy as np
import openai
import pytest

from detjax.engine import Engine, Request, SamplingParams
from detjax.models import Decoder, Tokenizer
from tests.server.running_server import MODEL, Running, serving
from tests.support.bits import assert_same_bits

CLIENTS = 500
DISTINCT = 50


def params(index: int) -> SamplingParams:
    return SamplingParams(max_tokens=3 + index % 5, seed=index, temperature=1.0, ignore_eos=True)


def prompt(index: int) -> list[int]:
    return [1 + index % 7] * (1 + 13 * index % 50)


async def streamed(client: openai.AsyncOpenAI, index: int) -> np.ndarray:
    own = params(index)
    asked = {"max_tokens": own.max_tokens, "seed": own.seed, "temperature": own.temperature, "logprobs": 0}
    extra = {"ignore_eos": True}
    stream = await client.completions.create(model=MODEL, prompt=prompt(index), stream=True, **asked, extra_body=extra)
    found, reason = [], None
    async for chunk in stream:
        (choice,) = chunk.choices
        found += choice.logprobs.token_logprobs
        reason = choice.finish_reason
    assert reason == "length"
    return np.float32(found)


def test_five_hundred_streams_have_the_bits_of_requests_alone(server: Running, engine: Engine) -> None:
    async def all_at_once() -> list[np.ndarray]:
        async with server.client(openai.AsyncOpenAI, timeout=120) as client:
            return await asyncio.gather(*(streamed(client, index % DISTINCT) for index in range(CLIENTS)))

    alone = []
    for index in range(DISTINCT):
        engine.forget_prefixes()
        (generation,) = engine.generate([Request(prompt(index), params(index))])
        alone.append(np.float32(generation.completions[0].logprobs))
    found = asyncio.run(all_at_once())
    assert_same_bits(found, [alone[index % DISTINCT] for index in range(CLIENTS)])
    assert engine.stats().pages_in_use == 0


LONG = {"max_tokens": 390, "temperature": 0, "extra_body": {"ignore_eos": True}}


def test_a_full_queue_is_told_and_empties_again(engine: Engine, loaded: tuple[Decoder, Tokenizer]) -> None:
    with serving(engine, loaded, max_on_their_way=2) as running, running.client() as client:
        stream = client.completions.create(model=MODEL, prompt="x", n=2, stream=True, **LONG)
        next(iter(stream))
        with pytest.raises(openai.RateLimitError, match="the queue is full") as told:
            client.completions.create(model=MODEL, prompt="x", **LONG)
        assert told.value.response.headers["Retry-After"] == "1"
        assert client.models.list().data
        for _ in stream:
            pass
        assert client.completions.create(model=MODEL, prompt="x", max_tokens=1).choices


def test_a_shutdown_finishes_what_runs(engine: Engine, loaded: tuple[Decoder, Tokenizer]) -> None:
    with serving(engine, loaded, grace=30) as running, running.client() as client:
        chunks = iter(client.completions.create(model=MODEL, prompt="x", stream=True, **LONG))
        text = next(chunks).choices[0].text
        running.server.should_exit = True
        last = None
        for last in chunks:
            text += last.choices[0].text
        assert last is not None
        assert last.choices[0].finish_reason == "length"
        running.thread.join()
    (alone,) = engine.generate([Request("x", SamplingParams(max_tokens=390, ignore_eos=True))])
    assert text == alone.completions[0].text


def test_a_shutdown_that_does_not_wait_says_so(engine: Engine, loaded: tuple[Decoder, Tokenizer]) -> None:
    async def one(running: Running) -> None:
        async with running.client(openai.AsyncOpenAI) as client:
            asked = {"model": MODEL, "prompt": "x", "n": 4} | LONG
            whole = asyncio.create_task(client.completions.create(**asked))
            stream = await client.completions.create(**asked, stream=True)
            await anext(aiter(stream))
            running.server.should_exit = True
            with pytest.raises(openai.APIError, match="shutting down"):
                async for _ in stream:
                    pass
            with pytest.raises(openai.InternalServerError, match="shutting down"):
                await whole

    with serving(engine, loaded, grace=0) as running:
        asyncio.run(one(running))
    assert engine.generate([Request("x")])
    assert engine.stats().pages_in_use == 0


def test_a_defect_is_told_without_its_traceback(
    engine: Engine, loaded: tuple[Decoder, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def defect(_: object) -> None:
        raise RuntimeError("a secret")

    with serving(engine, loaded) as running, running.client() as client:
        with monkeypatch.context() as patch:
            patch.setattr(engine, "generate_async", defect)
            with pytest.raises(openai.InternalServerError, match="the server has a defect") as told:
                client.completions.create(model=MODEL, prompt="x")
        assert "secret" not in told.value.response.text
        assert client.completions.create(model=MODEL, prompt="x", max_tokens=1).choices
    assert running.app.state.guard.on_their_way == 0


def test_a_failed_engine_is_told(loaded: tuple[Decoder, Tokenizer]) -> None:
    with Engine(*loaded, max_samples=1, token_budget=8, max_length=64) as broken:
        with serving(broken, loaded) as running:
            broken.close()
            for path, data in (("/health", None), ("/v1/completions", {"model": MODEL, "prompt": "x"})):
                body = None if data is None else json.dumps(data).encode()
                request = urllib.request.Request(running.url + path, body, {"Content-Type": "application/json"})
                with pytest.raises(urllib.error.HTTPError) as told:
                    urllib.request.urlopen(request)
                with told.value as answer:
                    assert answer.status == 503
