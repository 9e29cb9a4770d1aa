"""Many requests at once: none is lost, all have the bits that they have alone, and shutdowns are orderly."""

import asyncio
import json
import threading
import unittest.mock
import urllib.error
import urllib.request

import numpy as np
import openai
import pytest

from detjax.engine import Engine, NotFinite, Request, SamplingParams
from detjax.models import Decoder, Tokenizer
from detjax.server.http.errors import ApiError
from detjax.server.http.guard import ClientGone, Guard
from tests.server.running_server import MODEL, Running, serving, streams_held, wait_until
from tests.support.bits import assert_same_bits
from tests.support.waits import HANGS_AFTER


def params(index: int) -> SamplingParams:
    return SamplingParams(max_tokens=3 + index % 5, seed=index, temperature=1.0, ignore_eos=True)


def prompt(index: int) -> list[int]:
    return [1 + index % 7] * (1 + 13 * index % 50)


async def streamed(client: openai.AsyncOpenAI, index: int) -> np.ndarray:
    sampling = params(index)
    asked = {
        "max_tokens": sampling.max_tokens,
        "seed": sampling.seed,
        "temperature": sampling.temperature,
        "logprobs": 0,
    }
    extra = {"ignore_eos": True}
    stream = await client.completions.create(model=MODEL, prompt=prompt(index), stream=True, **asked, extra_body=extra)
    logprobs, reason = [], None
    async for chunk in stream:
        (choice,) = chunk.choices
        logprobs += choice.logprobs.token_logprobs
        reason = choice.finish_reason
    assert reason == "length"
    return np.float32(logprobs)


@pytest.mark.parametrize(("clients", "distinct"), [(90, 15), pytest.param(500, 50, marks=pytest.mark.nightly)])
def test_many_streams_have_the_bits_of_requests_alone(
    server: Running, engine: Engine, clients: int, distinct: int
) -> None:
    async def all_at_once() -> list[np.ndarray]:
        async with server.client(openai.AsyncOpenAI, timeout=HANGS_AFTER) as client:
            return await asyncio.gather(*(streamed(client, index % distinct) for index in range(clients)))

    alone = []
    for index in range(distinct):
        engine.forget_prefixes()
        (generation,) = engine.generate([Request(prompt(index), params(index))])
        alone.append(np.float32(generation.completions[0].logprobs))
    answers = asyncio.run(all_at_once())
    assert_same_bits(answers, [alone[index % distinct] for index in range(clients)])
    assert engine.stats().pages_in_use == 0


LONG = {"max_tokens": 40, "temperature": 0, "extra_body": {"ignore_eos": True}}


def test_a_full_queue_is_told_and_empties_again(engine: Engine, loaded: tuple[Decoder, Tokenizer]) -> None:
    with (
        streams_held(engine) as released,
        serving(engine, loaded, max_in_flight=2) as running,
        running.client() as client,
    ):
        stream = client.completions.create(model=MODEL, prompt="x", n=2, stream=True, **LONG)
        next(iter(stream))
        with pytest.raises(openai.RateLimitError, match="the queue is full") as raised:
            client.completions.create(model=MODEL, prompt="x", **LONG)
        assert raised.value.response.headers["Retry-After"] == "1"
        assert client.models.list().data
        released.set()
        for _ in stream:
            pass
        wait_until(lambda: not running.app.state.guard.in_flight)
        assert client.completions.create(model=MODEL, prompt="x", max_tokens=1).choices


def test_a_shutdown_finishes_what_runs(engine: Engine, loaded: tuple[Decoder, Tokenizer]) -> None:
    with (
        streams_held(engine) as released,
        serving(engine, loaded, grace=HANGS_AFTER) as running,
        running.client() as client,
    ):
        chunks = iter(client.completions.create(model=MODEL, prompt="x", stream=True, **LONG))
        text = next(chunks).choices[0].text
        running.server.should_exit = True
        wait_until(lambda: running.app.state.guard.is_draining)
        released.set()
        last = None
        for last in chunks:
            text += last.choices[0].text
        assert last is not None
        assert last.choices[0].finish_reason == "length"
        running.thread.join()
    (alone,) = engine.generate([Request("x", SamplingParams(max_tokens=40, ignore_eos=True))])
    assert text == alone.completions[0].text


def test_a_shutdown_that_does_not_wait_says_so(engine: Engine, loaded: tuple[Decoder, Tokenizer]) -> None:
    async def never(_: object) -> None:
        await asyncio.Event().wait()

    async def one(running: Running) -> None:
        async with running.client(openai.AsyncOpenAI) as client:
            whole = asyncio.create_task(client.completions.create(model=MODEL, prompt="x"))
            stream = await client.completions.create(model=MODEL, prompt="x", n=4, stream=True, **LONG)
            await anext(aiter(stream))
            while running.app.state.guard.in_flight < 5:
                await asyncio.sleep(0.01)
            running.server.should_exit = True
            with pytest.raises(openai.APIError, match="shutting down"):
                async for _ in stream:
                    pass
            with pytest.raises(openai.InternalServerError, match="shutting down"):
                await whole

    with (
        streams_held(engine),
        unittest.mock.patch.object(engine, "generate_async", never),
        serving(engine, loaded, grace=0) as running,
    ):
        asyncio.run(one(running))
    assert engine.generate([Request("x")])
    assert engine.stats().pages_in_use == 0
    assert running.app.state.guard.in_flight == 0


def test_a_stream_that_its_client_leaves_gives_everything_back(
    engine: Engine, loaded: tuple[Decoder, Tokenizer]
) -> None:
    with streams_held(engine), serving(engine, loaded, max_in_flight=3) as running, running.client() as client:
        for _ in range(2):  # the second stream finds room only if the first one gave its room back
            stream = client.completions.create(model=MODEL, prompt="x", n=3, stream=True, **LONG)
            next(iter(stream))
            assert running.app.state.guard.in_flight == 3
            assert engine.stats().pages_in_use > 0
            stream.close()
            wait_until(lambda: engine.stats().pages_in_use == 0 and not running.app.state.guard.in_flight)


def test_a_whole_answer_whose_client_leaves_is_cancelled(engine: Engine, loaded: tuple[Decoder, Tokenizer]) -> None:
    is_started, is_cancelled = threading.Event(), threading.Event()

    async def never(_: object) -> None:
        is_started.set()
        try:
            await asyncio.Event().wait()
        finally:
            is_cancelled.set()

    async def leave(running: Running) -> None:
        async with running.client(openai.AsyncOpenAI) as client:
            whole = asyncio.create_task(client.completions.create(model=MODEL, prompt="x", n=2))
            while not is_started.is_set():  # samples are in flight already while their prompt is encoded
                await asyncio.sleep(0.01)
            whole.cancel()

    with unittest.mock.patch.object(engine, "generate_async", never), serving(engine, loaded) as running:
        asyncio.run(leave(running))
        wait_until(is_cancelled.is_set)
        wait_until(lambda: not running.app.state.guard.in_flight)


def test_work_for_a_client_that_left_is_cancelled_at_once() -> None:
    is_cancelled = threading.Event()

    async def never() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            is_cancelled.set()

    async def disconnect() -> dict[str, str]:
        await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    async def watch() -> None:
        deadline = asyncio.get_running_loop().time() + HANGS_AFTER
        with pytest.raises(ClientGone):
            await Guard(capacity=1, seconds=HANGS_AFTER).watch(disconnect, never(), deadline)
        assert is_cancelled.is_set()

    asyncio.run(watch())


def test_a_queue_that_is_just_full_is_served_and_a_server_that_shuts_down_admits_nothing() -> None:
    async def fill() -> None:
        guard = Guard(capacity=3, seconds=60)
        with guard.admitted(2), guard.admitted(1):
            assert guard.in_flight == 3
            with pytest.raises(ApiError, match="the queue is full: 3 samples are in flight and the request has 1"):
                guard.admitted(1).__enter__()
        with pytest.raises(ApiError, match="the request has 4 samples; accepted: up to 3"):
            guard.admitted(4).__enter__()
        assert guard.in_flight == 0
        guard.drain()
        with pytest.raises(ApiError, match="shutting down"):
            guard.admitted(1).__enter__()
        assert guard.in_flight == 0

    asyncio.run(fill())


def test_a_defect_is_told_without_its_traceback(
    engine: Engine, loaded: tuple[Decoder, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def defect(_: object) -> None:
        raise RuntimeError("a secret")

    with serving(engine, loaded) as running, running.client() as client:
        with monkeypatch.context() as patch:
            patch.setattr(engine, "generate_async", defect)
            with pytest.raises(openai.InternalServerError, match="internal error: this is a bug") as raised:
                client.completions.create(model=MODEL, prompt="x")
        assert "secret" not in raised.value.response.text
        assert client.completions.create(model=MODEL, prompt="x", max_tokens=1).choices
    assert running.app.state.guard.in_flight == 0


def test_a_model_that_computes_nan_is_told(
    engine: Engine, loaded: tuple[Decoder, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def damaged(_: object) -> None:
        raise NotFinite("the model's logits hold NaN; check the weights")

    with serving(engine, loaded) as running, running.client() as client:
        monkeypatch.setattr(engine, "generate_async", damaged)
        with pytest.raises(openai.InternalServerError, match="logits hold NaN; check the weights"):
            client.completions.create(model=MODEL, prompt="x")


def test_a_failed_engine_is_told(loaded: tuple[Decoder, Tokenizer]) -> None:
    with Engine(*loaded, max_samples=1, token_budget=8, max_length=64) as broken:
        with serving(broken, loaded) as running:
            broken.close()
            for path, data in (("/health", None), ("/v1/completions", {"model": MODEL, "prompt": "x"})):
                body = None if data is None else json.dumps(data).encode()
                request = urllib.request.Request(running.url + path, body, {"Content-Type": "application/json"})
                with pytest.raises(urllib.error.HTTPError) as raised:
                    urllib.request.urlopen(request)
                with raised.value as answer:
                    assert answer.status == 503
