"""Calls that lose replicas, event by event, and the messages between a front and its replicas. Nothing is computed."""

import asyncio
import contextlib
import dataclasses
import fcntl
import logging
import multiprocessing.connection
import os
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

import pytest

from detjax.engine import (
    Completion,
    EngineClosed,
    EngineConfig,
    Generation,
    PromptLogprobs,
    Request,
    SamplingParams,
    Token,
)
from detjax.models import ModelMetadata
from detjax.server.replicas import process
from detjax.server.replicas.engine import ReplicaOptions, _compile_lock
from detjax.server.replicas.messages import Alive, Answer, Call, End, Outbox
from detjax.server.replicated_engine import MAX_LOSSES, ReplicaLost, ReplicatedEngine, completion_of

TWO: Final = Request([5], SamplingParams(n=2, max_tokens=3))


def token(sample: int, number: int, **fields: Any) -> tuple[int, Token]:
    """The event of a token of the first request."""
    made = Token(sample, 10 * sample + number, -1.0 * number, (), f"{number}", "length" if number == 3 else None, 1)
    return 0, dataclasses.replace(made, **fields)


def generation(cached: int = 0, scores: PromptLogprobs | None = None) -> tuple[int, Generation]:
    """The event of the first request's end, which has only the tokens of the last replica."""
    last = Completion((99,), (-9.0,), ((),), "last", "length")
    return 0, Generation((5,), (last, last), scores, cached)


class Written:
    """Replicas whose answers are written: lists of batches, each for a call.

    A call without a generation is lost at its end.

    Attributes:
        asked: the requests of each call.
    """

    failure: BaseException | None = None

    def __init__(self, *answers: list[Any]) -> None:
        self.asked: list[list[Request]] = []
        self._answers = [*answers]

    async def stream(self, requests: Sequence[Request], *, is_whole: bool) -> AsyncGenerator[Any]:
        self.asked.append([*requests])
        if not self._answers:
            raise ReplicaLost("there is no more")
        ends = False
        for batch in self._answers.pop(0):
            ends = isinstance(batch, list) and any(isinstance(event, Generation) for _, event in batch)
            yield batch
        if not ends:
            raise ReplicaLost("its batches are over")


def engine(metadata: ModelMetadata, *answers: list[Any]) -> tuple[ReplicatedEngine, Written]:
    written = Written(*answers)
    return ReplicatedEngine(written, metadata, None, EngineConfig(max_length=400, top_logprobs=0)), written


def streamed(one: ReplicatedEngine, *requests: Request) -> list[tuple[int, Token]]:
    async def stream() -> list[tuple[int, Token]]:
        return [event async for event in one.stream_all(requests or [TWO])]

    return asyncio.run(stream())


ALL: Final = [token(sample, number) for sample in (0, 1) for number in (1, 2, 3)]


def test_a_stream_goes_on_with_the_tokens_that_every_sample_has(metadata: ModelMetadata) -> None:
    one, written = engine(metadata, [ALL[:2], [ALL[3]]], [[ALL[2]], ALL[4:], [generation()]])
    assert streamed(one) == [*ALL[:2], ALL[3], ALL[2], *ALL[4:]]
    assert written.asked == [[TWO], [dataclasses.replace(TWO, generated=[(1, 2), (11,)])]]
    assert one.losses == 1


def test_tokens_that_a_request_brings_come_before_those_of_its_replicas(metadata: ModelMetadata) -> None:
    resumed = dataclasses.replace(TWO, generated=[(7,)])
    one, written = engine(metadata, [ALL[3:4]], [[*ALL[:3], *ALL[4:], generation()]])
    streamed(one, resumed)
    asked = [dataclasses.replace(TWO, generated=generated) for generated in ([(7,), ()], [(7,), (11,)])]
    assert written.asked == [[one] for one in asked]


def test_requests_that_have_ended_are_not_asked_again(metadata: ModelMetadata) -> None:
    other = Request([6], SamplingParams(max_tokens=3))

    def at(index: int, events: Sequence[Any]) -> list[Any]:
        return [(index, event) for _, event in events]

    end = Generation((6,), (Completion((99,), (-9.0,), ((),), "last", "length"),))
    one, written = engine(metadata, [[*ALL, generation()], at(1, ALL[:1])], [at(0, ALL[1:3]), [(0, end)]])
    assert streamed(one, TWO, other) == [*ALL, *at(1, ALL[:3])]
    assert written.asked[1] == [dataclasses.replace(other, generated=[(1,)])]


def test_prompts_that_are_scored_begin_again_and_their_tokens_are_compared(metadata: ModelMetadata) -> None:
    scored = dataclasses.replace(TWO, sampling=dataclasses.replace(TWO.sampling, prompt_logprobs=True))
    other_batch = [(0, dataclasses.replace(event, batch=7, cached_tokens=4)) for _, event in ALL]
    one, written = engine(metadata, [ALL[:2]], [[*other_batch, generation()]])
    got = streamed(one, scored)
    assert [(event.sample, event.token, event.cached_tokens) for _, event in got] == [
        (event.sample, event.token, 0) for _, event in ALL
    ]
    assert written.asked == [[scored], [scored]]
    for field, value in (
        ("token", 4),
        ("logprob", -1.5),
        ("text", "x"),
        ("top_logprobs", ((1, -1.0),)),
        ("finish_reason", "stop"),
    ):
        one, _ = engine(metadata, [ALL[:1]], [[token(0, 1, **{field: value})]])
        with pytest.raises(RuntimeError, match="replicas give different bits"):
            streamed(one, scored)


def test_clients_see_the_cache_hits_of_the_first_replica(metadata: ModelMetadata) -> None:
    begin = [token(0, 1, cached_tokens=5)]
    rest = [token(0, 2, cached_tokens=9), token(0, 3, cached_tokens=9), *ALL[3:], generation(cached=9)]
    one, _ = engine(metadata, [begin], [rest])
    assert [event.cached_tokens for _, event in streamed(one)] == [5] * 6


def test_a_whole_answer_is_that_of_its_last_replica(metadata: ModelMetadata) -> None:
    scores = PromptLogprobs((-1.0,), ((),))
    one, written = engine(metadata, [], [[generation(cached=3, scores=scores)]])
    (got,) = asyncio.run(one.generate_async([TWO]))
    assert got == generation(scores=scores)[1]
    assert (got.cached_tokens, got.prompt, one.losses) == (3, scores, 1)
    assert written.asked == [[TWO], [TWO]]


def test_losses_are_counted_from_the_last_token_and_pauses_grow(metadata: ModelMetadata) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(round(seconds, 6))

    with mock.patch("detjax.server.replicated_engine.asyncio.sleep", sleep):
        one, written = engine(metadata, *[[]] * (MAX_LOSSES - 1), [ALL[:1]], *[[]] * MAX_LOSSES)
        message = "the request has lost 8 replicas in a row before it got a token; retry later"
        with pytest.raises(EngineClosed, match=message):
            streamed(one)
    assert (one.losses, len(written.asked)) == (2 * MAX_LOSSES - 1, 2 * MAX_LOSSES - 1)
    first = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    assert slept == [*first, *first]


def test_errors_of_requests_end_the_call_and_an_ended_engine_does_not(metadata: ModelMetadata) -> None:
    one, written = engine(metadata, [EngineClosed("gone")], [ALL, [generation()]])
    assert streamed(one) == ALL
    assert (one.losses, len(written.asked)) == (1, 2)
    one, written = engine(metadata, [ValueError("bad")])
    with pytest.raises(ValueError, match="bad"):
        streamed(one)
    assert (one.losses, len(written.asked)) == (0, 1)
    assert one.is_open and one.failure is None
    written.failure = RuntimeError("lost")
    assert (one.is_open, one.failure) == (False, written.failure)


def test_a_completion_is_made_of_the_tokens_of_a_stream() -> None:
    tokens = [
        token(0, number, sampling_logprob=-2.0 * number, top_logprobs=((number, -0.5),))[1] for number in (1, 2, 3)
    ]
    assert completion_of(tokens) == Completion(
        (1, 2, 3), (-1.0, -2.0, -3.0), (((1, -0.5),), ((2, -0.5),), ((3, -0.5),)), "123", "length", (-2.0, -4.0, -6.0)
    )
    silent = [dataclasses.replace(one, text=None, sampling_logprob=None) for one in tokens]
    assert (completion_of(silent).text, completion_of(silent).sampling_logprobs) == (None, ())


# --- messages and replicas --------------------------------------------------------------------------------------------


def test_an_outbox_sends_what_waits_together_and_ends_after_the_last() -> None:
    here, there = multiprocessing.connection.Pipe()
    with here, there:
        sent: list[Any] = []
        outbox = Outbox(here)
        for number in range(3):
            outbox.put(Call(number, None))
        outbox.close(60)
        while there.poll():
            sent += there.recv()
        assert [call.number for call in sent] == [0, 1, 2]
        assert not outbox._thread.is_alive()
        outbox.put(End())
        assert not there.poll(0.01)
    closed = Outbox(here)
    closed.put(Alive())
    closed.close(60)
    assert not closed._thread.is_alive()


def test_replicas_compile_for_one_cache_in_turn(tmp_path: Path) -> None:
    def is_free() -> bool:
        directory = os.open(tmp_path / "cache", os.O_RDONLY)
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(directory)
        return True

    with _compile_lock(tmp_path / "cache"):
        assert (tmp_path / "cache").is_dir()
        assert not is_free()
    assert is_free()
    with contextlib.suppress(KeyError), _compile_lock(tmp_path / "cache"):
        raise KeyError
    assert is_free()
    with _compile_lock(None):
        pass
    with mock.patch("fcntl.flock", side_effect=OSError), _compile_lock(tmp_path / "cache"):
        pass


def test_a_replica_on_a_tpu_is_refused() -> None:
    with mock.patch.object(process.jax, "default_backend", lambda: "tpu"):
        with pytest.raises(ValueError, match="the device is a TPU, which processes cannot share"):
            process._started_here(ReplicaOptions(Path()))


def test_a_defect_in_a_replica_goes_to_its_log_alone(caplog: pytest.LogCaptureFixture) -> None:
    async def answer(call: Call) -> list[Any]:
        sent: list[Any] = []
        replica: Any = object.__new__(process.Replica)
        replica._engine, replica._answering = mock.Mock(spec=process.Engine), {call.number: None}
        replica._outbox = SimpleNamespace(put=sent.append)
        await replica._answer(call)
        assert replica._answering == {}
        return sent

    async def defect(*_: Any, **__: Any) -> AsyncGenerator[Any]:
        yield [ALL[0]]
        raise KeyError("a secret")

    async def works(*_: Any, **__: Any) -> AsyncGenerator[Any]:
        yield [ALL[0]]

    caplog.set_level(logging.ERROR)
    with mock.patch.object(process, "batches", works):
        assert asyncio.run(answer(Call(3, [TWO]))) == [Answer(3, [ALL[0]]), Answer(3, None)]
    assert caplog.text == ""
    with mock.patch.object(process, "batches", defect):
        first, last = asyncio.run(answer(Call(4, [TWO])))
    assert (first, last.number, str(last.batch)) == (
        Answer(4, [ALL[0]]),
        4,
        "a bug in a replica; its log has the details",
    )
    assert "a secret" in caplog.text
