"""Pauses, aborts and sleep of an engine: no bit of an answer depends on them."""

import asyncio
import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from detjax import SamplingParams, models
from detjax.engine import Aborted, Constraint, Engine, EngineClosed, Generation, Request
from detjax.engine.device_weights import DeviceWeights
from detjax.models.checkpoint.digest import array_digest
from detjax.models.checkpoint.weight_updates import UpdatableWeights
from detjax.models.network import split
from tests.support.compiled_programs import compiled_programs
from tests.support.small_loops import FIXTURE, small_engine, small_model, small_tokenizer
from tests.support.waits import HANGS_AFTER

LONG = SamplingParams(max_tokens=120, temperature=0.9, seed=3, ignore_eos=True)
KINDS: dict[str, SamplingParams] = {
    "sampled": LONG,
    "penalized": SamplingParams(max_tokens=120, temperature=0.9, seed=4, ignore_eos=True, repetition_penalty=1.3),
    "constrained": SamplingParams(
        max_tokens=60, temperature=0.9, seed=5, constraint=Constraint("regex", "[a-z ]{200}")
    ),
    "scored": SamplingParams(max_tokens=60, prompt_logprobs=True, ignore_eos=True, n=2),
}
REQUESTS = [Request([7, 8, 9] * 50, params, id=name) for name, params in KINDS.items()]


@pytest.fixture(scope="module")
def shared() -> Iterator[Engine]:
    with small_engine(max_samples=4) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(shared: Engine) -> list[Generation]:
    return shared.generate(REQUESTS)


def begun(engine: Engine, requests: list[Request]) -> list[Any]:
    """Futures of requests, after some of their tokens."""
    tokens = [0]

    def count(_: Any) -> None:
        tokens[0] += 1

    futures = [engine.submit(request, count) for request in requests]
    while tokens[0] < 20:
        gc.collect(0)
    return futures


@pytest.mark.parametrize(("sleeps", "is_ahead"), [(False, False), (True, False), (True, True)])
def test_requests_that_were_frozen_or_put_to_sleep_have_the_same_bits(
    shared: Engine, expected: list[Generation], monkeypatch: pytest.MonkeyPatch, sleeps: bool, is_ahead: bool
) -> None:
    if is_ahead:
        monkeypatch.setattr(shared._loop, "samples_for_a_thread", 1)
        monkeypatch.setattr(shared._loop, "late_steps", 0)
    futures = begun(shared, REQUESTS)
    shared.pause()
    assert not all(future.done() for future in futures)
    if not sleeps:
        before = shared.stats()
        shared.forget_prefixes()
        assert shared.stats() == before
    else:
        shared.sleep()
        futures.append(shared.submit(REQUESTS[0]))
        with pytest.raises(RuntimeError, match="it is asleep"):
            shared.sleep()
        shared.wake_up(["kv_cache"])
        shared.wake_up()
    shared.resume()
    assert [future.result(HANGS_AFTER) for future in futures] == [*expected, *expected[:1]][: len(futures)]


def test_an_abort_leaves_a_beginning_of_the_answer_and_other_requests_alone(
    shared: Engine, expected: list[Generation]
) -> None:
    futures = begun(shared, REQUESTS)
    shared.pause()
    late = shared.submit(Request([1], LONG, id="late"))
    assert shared.abort(["sampled", "scored", "late", "unknown"]) == 3
    shared.resume()
    for future, whole in zip(futures, expected, strict=True):
        answer = future.result(HANGS_AFTER)
        if whole in (expected[0], expected[3]):
            for part, completion in zip(answer.completions, whole.completions, strict=True):
                count = len(part.tokens)
                assert part.finish_reason == "abort" and count < len(completion.tokens)
                assert part.tokens == completion.tokens[:count] and part.logprobs == completion.logprobs[:count]
        else:
            assert answer == whole
    assert late.result(HANGS_AFTER).completions[0].tokens == ()
    assert shared.stats().pages_in_use == 0


@pytest.mark.parametrize(("samples_for_a_thread", "late_steps"), [(1, 0), (1, 4), (128, 4)])
def test_an_aborted_answer_has_the_logprobs_of_its_tokens(
    shared: Engine, monkeypatch: pytest.MonkeyPatch, samples_for_a_thread: int, late_steps: int
) -> None:
    """Tokens of large steps are reported after the next step has been started."""
    monkeypatch.setattr(shared._loop, "samples_for_a_thread", samples_for_a_thread)
    monkeypatch.setattr(shared._loop, "late_steps", late_steps)
    for attempt in range(5):
        name, has_begun = f"{samples_for_a_thread}, {late_steps}, {attempt}", threading.Event()
        future = shared.submit(Request([1, 2], LONG, id=name), lambda _, begun=has_begun: begun.set())
        assert has_begun.wait(HANGS_AFTER)
        shared.abort([name])
        (part,) = future.result(HANGS_AFTER).completions
        assert part.finish_reason == "abort" and len(part.logprobs) == len(part.tokens) > 0


def test_a_request_that_arrives_after_its_abort_ends_at_once(shared: Engine) -> None:
    assert shared.abort(["not yet there"]) == 0
    request = Request("A prompt", LONG, id="not yet there")
    (generation,) = shared.generate([request])
    assert (generation.completions[0].tokens, generation.completions[0].finish_reason) == ((), "abort")

    async def events() -> list[Any]:
        return [event async for event in shared.stream_events([request])]

    assert asyncio.run(events()) == [(0, Aborted(0, "")), (0, generation)]


def test_weights_are_replaced_only_in_an_idle_engine_that_has_them(shared: Engine) -> None:
    new = {0: np.zeros_like(np.asarray(shared.weight(0)))}
    shared.pause()
    future = shared.submit(Request([1, 2], LONG))
    with pytest.raises(RuntimeError, match="1 samples are in flight"):
        shared.replace_weights(new)
    future.cancel()
    shared.resume()
    shared.sleep()
    with pytest.raises(RuntimeError, match=r"the weights are asleep. Wake them up with wake_up\(\['weights'\]\) first"):
        shared.replace_weights(new)
    with pytest.raises(RuntimeError, match="the weights are asleep"):
        shared.update_weights(split(small_model())[0].state(split(small_model())[1]))
    with pytest.raises(Exception, match="'disk'"):  # of the engine, or of the test's checks of types
        shared.wake_up(["disk"])  # pyright: ignore[reportArgumentType]
    shared.wake_up()


def test_lost_weights_are_missing_until_all_are_replaced(expected: list[Generation]) -> None:
    weights = split(small_model())[1]
    with small_engine(max_samples=4) as engine:
        engine.sleep(keeps_weights=False)
        engine.wake_up()
        assert engine.weight(0) is None
        future = engine.submit(REQUESTS[0])
        future.cancel()
        held = engine.submit(REQUESTS[1])
        assert engine.abort(["penalized"]) == 1
        assert held.result(HANGS_AFTER).completions[0].finish_reason == "abort"
        engine.replace_weights(dict(enumerate(map(np.asarray, weights))))
        assert engine.generate(REQUESTS[2:3]) == expected[2:3]


def test_a_device_that_fails_while_weights_change_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    with small_engine() as engine:
        weight = engine.weight(0)
        assert weight is not None

        def fail(*_: Any) -> None:
            raise MemoryError("the device is full")

        monkeypatch.setattr(DeviceWeights, "replace", fail)
        with pytest.raises(MemoryError, match="the device is full"):
            engine.replace_weights({0: weight})
        with pytest.raises(MemoryError):
            engine.closed.result(HANGS_AFTER)
        with pytest.raises(EngineClosed):
            engine.generate(REQUESTS[:1])


def test_an_engine_that_ends_asleep_ends_the_requests_that_wait() -> None:
    with small_engine() as engine:
        engine.sleep()
        future = engine.submit(REQUESTS[0])
    with pytest.raises(EngineClosed):
        future.result(HANGS_AFTER)


def test_sleep_frees_the_memory_of_an_engine_that_alone_has_its_model() -> None:
    def live() -> int:
        gc.collect()
        return sum(array.nbytes for array in jax.live_arrays() if array.sharding.memory_kind != "pinned_host")

    before = live()
    with Engine(models.load(FIXTURE, dtype="bfloat16", progress=False)[0], max_samples=2, max_length=128) as engine:
        awake = live() - before
        engine.sleep()
        assert live() - before < awake / 100
        engine.wake_up()
        assert live() - before <= awake


def test_weights_that_were_read_again_have_the_digest_of_the_model(tmp_path: Path) -> None:
    model, tokenizer = small_model(), small_tokenizer()
    models.save(model, tmp_path / "copy", tokenizer=tokenizer)
    weights = UpdatableWeights(model, tokenizer)
    update = weights.read(tmp_path / "copy", lambda number: None)
    assert update.is_whole
    assert update.digest.value == weights.digest.value == models.digest(model, tokenizer)
    number, x = next(iter(update.weights.items()))
    assert weights.digest.with_weights({number: array_digest(x)}) == weights.digest
    assert weights.digest.with_weights({number: array_digest(x + x)}) != weights.digest


def test_weights_for_which_there_is_no_pinned_memory_sleep_in_the_hosts_other_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = Request([1, 2, 3], SamplingParams(max_tokens=8))
    device_put = jax.device_put

    def refusing(x: Any, device: Any = None, **options: Any) -> Any:
        if getattr(device, "memory_kind", None) == "pinned_host":
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")
        return device_put(x, device, **options)

    with small_engine() as engine:
        expected = engine.generate([request])
        monkeypatch.setattr(jax, "device_put", refusing)
        engine.sleep()
        engine.wake_up()
        assert engine.generate([request]) == expected


def test_no_program_is_compiled_again_after_sleep_or_new_weights() -> None:
    request = Request([1, 2, 3], SamplingParams(max_tokens=4))
    with small_engine() as engine:
        engine.generate([request])
        weight = engine.weight(0)
        assert weight is not None
        times = []
        for _ in range(2):
            with compiled_programs() as compiled:
                engine.sleep()
                engine.wake_up()
                engine.generate([request])
                engine.replace_weights({0: weight})
                engine.generate([request])
            times.append(compiled)
        first, second = times
        # The first time in a process compiles operations outside the steps' programs.
        assert not [name for name in first if name.startswith("jit(_")], first
        assert not second
