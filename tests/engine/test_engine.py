"""The engine on the small checkpoint: no bit of a request depends on other requests, order, budget or cache."""

import asyncio
import dataclasses
import functools
import gc
import random
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import detjax
from detjax import SamplingParams, ops
from detjax.engine import (
    Engine,
    EngineClosed,
    EngineConfig,
    EngineStats,
    Generation,
    NotFinite,
    Request,
    StepLoop,
    Token,
)
from detjax.engine import sequence as engine_sequence
from detjax.engine.sampling_variant import SamplingVariant, run_variants
from detjax.engine.text_stream import TextStream
from detjax.models import GenerationDefaults, load
from tests.support.bits import assert_same_bits, same_bits
from tests.support.compiled_programs import compiled_programs
from tests.support.memory import allocated
from tests.support.small_loops import FIXTURE, small_engine, small_model, small_tokenizer
from tests.support.waits import HANGS_AFTER

COUNT = 22


@functools.cache
def requests() -> list[Request]:
    """Prompts of 1 to 291 tokens, many with the same prefix; greedy, sampled and filtered."""
    draw = random.Random(0)
    prefixes = [[draw.randrange(515) for _ in range(length)] for length in (128, 140, 261)]
    styles = (
        SamplingParams(),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_k=20),
        SamplingParams(temperature=1.3, top_p=0.8, min_p=0.01, top_logprobs=2),
    )
    result = []
    for index in range(COUNT):
        shared = prefixes[index % 6] if index % 6 < 3 else []
        prompt = [*shared, *(draw.randrange(515) for _ in range(draw.choice([1, 2, 7, 30])))]
        params = dataclasses.replace(styles[index % 4], seed=index, max_tokens=draw.randint(1, 7), ignore_eos=True)
        result.append(Request(prompt, params))
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


@pytest.fixture(scope="module")
def shared() -> Iterator[Engine]:
    """An engine for the tests that leave it idle."""
    with small_engine() as one:
        yield one


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefix_cache": False},
        {"token_budget": 1},
        pytest.param({"token_budget": 512, "max_samples": 64}, marks=pytest.mark.nightly),
    ],
    ids=["defaults", "no prefix cache", "a token a step", "512 tokens a step"],
)
def test_requests_alone_and_together_have_the_same_bits(options: dict[str, Any]) -> None:
    count = 9 if options.get("token_budget") == 1 else COUNT
    with small_engine(**options) as one:
        assert_same_bits(bits_of(one.generate(requests()[:count])), bits_of(alone()[:count]))
        assert one.stats().pages_in_use == 0


def test_order_and_a_warm_prefix_cache_do_not_matter(shared: Engine) -> None:
    for seed in range(2):
        order = random.Random(seed).sample(range(COUNT), COUNT)
        shuffled = shared.generate([requests()[i] for i in order])
        assert_same_bits(bits_of(shuffled), bits_of([alone()[i] for i in order]))


def test_answers_and_streams_say_how_many_tokens_of_the_prompt_were_in_the_cache() -> None:
    params = SamplingParams(max_tokens=3, n=2, temperature=1.0, ignore_eos=True)
    first, longer = Request([5] * 256, params), Request([5] * 256 + [6] * 10, params)
    scored = dataclasses.replace(longer, sampling=dataclasses.replace(params, prompt_logprobs=True))
    salted = dataclasses.replace(longer, cache_salt="another client's")
    with small_engine() as one:
        expected = [(first, 0), (first, 128), (longer, 256), (scored, 0), (salted, 0), (salted, 256)]
        answers = [one.generate([request])[0] for request, _ in expected]
        assert [answer.cached_tokens for answer in answers] == [count for _, count in expected]
        assert answers[0] == answers[1] and answers[2] == answers[4] == answers[5]
        assert_same_bits(bits_of(answers[:1]), bits_of(answers[1:2]))
        for request, count in ((longer, 256), (scored, 0)):
            assert {token.cached_tokens for token in asyncio.run(listen(one, request))} == {count}
    with small_engine(prefix_cache=False) as one:
        assert [one.generate([longer])[0].cached_tokens for _ in range(2)] == [0, 0]


def test_preempted_requests_have_the_same_bits() -> None:
    # Each of these requests needs one more page for the tokens that it generates.
    params = SamplingParams(temperature=1.0, max_tokens=14, ignore_eos=True)
    crowd = [Request([index] * (121 + index), dataclasses.replace(params, seed=index)) for index in range(4)]
    with small_engine() as one:
        expected = one.generate(crowd)
    with small_engine(pages=4) as one:
        crowded = one.generate([*crowd, *requests()[:8]])
        assert one.stats().preemptions > 0
        assert one.stats().pages_in_use == 0
    assert_same_bits(bits_of(crowded), bits_of([*expected, *alone()[:8]]))


async def listen(engine: Engine, request: Request, until: int | None = None) -> list[Token]:
    tokens = []
    stream: AsyncIterator[Token] = engine.stream(request)
    async for token in stream:
        tokens.append(token)
        if len(tokens) == until:
            break
    await stream.aclose()  # pyright: ignore[reportAttributeAccessIssue]
    return tokens


def assert_same_tokens(tokens: list[Token], expected: Generation) -> None:
    (completion,) = expected.completions
    count = len(tokens)
    assert tuple(token.token for token in tokens) == completion.tokens[:count]
    assert_same_bits(np.float32([token.logprob for token in tokens]), np.float32(completion.logprobs[:count]))
    assert tuple(token.top_logprobs for token in tokens) == completion.top_logprobs[:count]


def test_requests_that_arrive_over_time_while_half_are_cancelled_have_the_same_bits(shared: Engine) -> None:
    draw = random.Random(3)
    until = [draw.randint(1, 4) if index % 2 else None for index in range(COUNT)]

    async def one(index: int) -> list[Token]:
        await asyncio.sleep(draw.random() * 0.2)
        return await listen(shared, requests()[index], until[index])

    async def all_of_them() -> list[list[Token]]:
        return await asyncio.gather(*(one(index) for index in range(COUNT)))

    for index, tokens in enumerate(asyncio.run(all_of_them())):
        assert_same_tokens(tokens, alone()[index])
        if until[index] is None:
            assert tokens[-1].finish_reason == "length"
    assert shared.generate([requests()[0]]) == alone()[:1]
    assert shared.stats().pages_in_use == 0


def test_stock_xla_fails_the_test_of_requests_alone_and_together() -> None:
    some = [requests()[index] for index in (0, 1, 4, 5, 8)]
    with detjax.use_backend("stock"), small_engine() as one:
        together = one.generate(some)
        alone = [one.generate([request])[0] for request in some]
    assert not same_bits([c[1] for c in bits_of(together)], [c[1] for c in bits_of(alone)])


def test_the_bits_are_those_of_generate(shared: Engine) -> None:
    params = SamplingParams(temperature=1.0, n=3, max_tokens=6, ignore_eos=True, seed=5)
    some = [*requests()[:4], Request(list(range(200)), params)]
    expected = detjax.generate(small_model(), [r.prompt for r in some], [r.sampling for r in some])
    assert_same_bits(bits_of(shared.generate(some)), bits_of(expected))
    assert len({completion.tokens for completion in expected[-1].completions}) == 3


def test_a_prompts_logprobs_are_those_of_the_training_forward(shared: Engine) -> None:
    model, lengths, positions = small_model(), (1, 2, 41, 66, 130), 136
    tokens = np.random.default_rng(1).integers(0, 515, (len(lengths), positions)).astype(np.int32)
    logprobs = np.asarray(detjax.jit(lambda tokens: ops.log_softmax(model(tokens)))(jnp.asarray(tokens)))
    params = SamplingParams(max_tokens=2, ignore_eos=True, prompt_logprobs=True, top_logprobs=3)
    some = [Request(row[:length].tolist(), params) for row, length in zip(tokens, lengths, strict=True)]
    for _ in range(2):  # the second time with the prompts' pages in the cache
        for row, length, generation in zip(range(len(lengths)), lengths, shared.generate(some), strict=True):
            assert generation.prompt is not None
            expected = logprobs[row, np.arange(length - 1), tokens[row, 1:length]]
            assert_same_bits(np.float32(generation.prompt.logprobs), expected)
            top = np.asarray(generation.prompt.top_logprobs).reshape(length - 1, 3, 2)
            assert_same_bits(top[..., 1].astype(np.float32), -np.sort(-logprobs[row, : length - 1])[:, :3])


def test_a_future_holds_the_generation_and_cancelling_it_ends_the_request(shared: Engine) -> None:
    expected = alone()[1]
    long = Request([1, 2], SamplingParams(max_tokens=290, ignore_eos=True))
    is_started = threading.Event()
    cancelled = shared.submit(long, lambda _: is_started.set())
    tokens: list[Token] = []
    future = shared.submit(requests()[1], tokens.append)
    assert is_started.wait(HANGS_AFTER) and cancelled.cancel()
    assert future.result(HANGS_AFTER) == expected
    assert_same_tokens(tokens, expected)
    # The next request is answered, and the cancelled one has left no page in use.
    assert shared.generate([requests()[2]]) == [alone()[2]]
    assert shared.stats().pages_in_use == 0


def test_an_exception_of_a_listener_ends_its_request_alone(shared: Engine) -> None:
    def listen(token: Token) -> None:
        raise ArithmeticError(f"token {token.token}")

    future = shared.submit(Request([1, 2], SamplingParams(max_tokens=290, ignore_eos=True)), listen)
    assert shared.generate([requests()[1]]) == [alone()[1]]
    with pytest.raises(ArithmeticError, match="token"):
        future.result(HANGS_AFTER)
    assert shared.stats().pages_in_use == 0


def test_streams_of_several_requests_say_whose_each_token_is_and_end_with_their_generations(shared: Engine) -> None:
    some = [requests()[index] for index in (3, 1, 7)]
    params = SamplingParams(n=2, max_tokens=3, temperature=1.0, ignore_eos=True)
    some.append(Request([1, 2], params))

    async def events() -> list[tuple[int, Token | Generation]]:
        return [event async for event in shared.stream_events(some)]

    async def tokens() -> list[tuple[int, Token]]:
        return [event async for event in shared.stream_all(some)]

    expected = asyncio.run(shared.generate_async(some))
    assert expected == shared.generate(some)
    seen = asyncio.run(events())
    for number, generation in enumerate(expected):
        *streamed, last = [event for index, event in seen if index == number]
        assert last == generation
        by_sample: dict[int, list[int]] = {}
        for token in streamed:
            assert isinstance(token, Token)
            by_sample.setdefault(token.sample, []).append(token.token)
        assert [tuple(by_sample[sample]) for sample in range(len(by_sample))] == [
            completion.tokens for completion in generation.completions
        ]
    assert Counter(number for number, _ in asyncio.run(tokens())) == Counter(
        number for number, event in seen if isinstance(event, Token)
    )


def test_cancelling_a_task_cancels_its_requests(shared: Engine) -> None:
    long, expected = Request([1, 2], SamplingParams(max_tokens=290, ignore_eos=True)), shared.generate(requests()[2:3])

    async def cancelled() -> None:
        started = asyncio.create_task(shared.generate_async([long, long]))
        async for _ in shared.stream(requests()[1]):  # the others have been submitted before
            pass
        started.cancel()
        with pytest.raises(asyncio.CancelledError):
            await started

    asyncio.run(cancelled())
    assert shared.generate(requests()[2:3]) == expected
    assert shared.stats()[:2] == (0, 0) and shared.stats().pages_in_use == 0


def test_no_request_is_started_if_one_of_them_cannot_be_served(shared: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "_start", None)
    with pytest.raises(ValueError, match="request 1 has no tokens"):
        shared.generate([Request([1]), Request([])])
    with pytest.raises(ValueError, match="the request has no tokens"):
        shared.submit(Request([]))


def test_statistics_are_those_of_the_requests_in_flight(shared: Engine) -> None:
    stats, busy, hold = list[EngineStats](), list[float](), threading.Event()

    def listen(token: Token) -> None:
        if not stats:
            assert hold.wait(HANGS_AFTER)
            time.sleep(0.002)
        stats.append(shared.stats())
        busy.append(shared.busy_seconds)

    # Two samples of a page each, and one of two pages, fill the three slots.
    many = SamplingParams(max_tokens=5, n=2, temperature=1.0, ignore_eos=True)
    futures = [shared.submit(Request([1, 2], many), listen)]
    futures += [shared.submit(Request([3] * length, dataclasses.replace(many, n=1))) for length in (130, 4, 5)]
    hold.set()
    for future in futures:
        future.result(HANGS_AFTER)
    assert max(one.running for one in stats) == 3 and max(one.waiting for one in stats) in (2, 3)
    assert all(one.running + one.waiting <= 5 for one in stats)
    assert all(one.pages_in_use >= one.running for one in stats)
    assert {(one.num_pages, one.snapshots, one.snapshot_bytes, one.snapshot_hits) for one in stats} == {(9, 0, 0, 0)}
    assert busy[0] >= 0.002 and min(busy) > 0
    shared.generate([requests()[0]])
    while shared._busy_since is not None:  # the thread notes soon that it has nothing to do
        time.sleep(0.001)
    assert shared.busy_seconds == 0


@pytest.mark.parametrize("is_in_lockstep", [False, True])
def test_engines_in_lockstep_start_a_call_when_all_earlier_ones_are_answered(is_in_lockstep: bool) -> None:
    order, hold = list[str](), threading.Event()

    def listen(name: str, token: Token) -> None:
        assert hold.wait(HANGS_AFTER)
        order.append(name)

    params = SamplingParams(max_tokens=4, ignore_eos=True)
    with small_engine() as one:
        assert one._in_lockstep is False
        one._in_lockstep = is_in_lockstep
        futures = [one.submit(Request([1, 2, 3], params), functools.partial(listen, name)) for name in "ab"]
        hold.set()
        assert len({future.result(HANGS_AFTER) for future in futures}) == 1
    assert (order == [*"aaaabbbb"]) is is_in_lockstep and Counter(order) == Counter(a=4, b=4)


def test_the_samples_of_a_request_share_what_has_its_size(shared: Engine) -> None:
    params = SamplingParams(n=128, max_tokens=50, stop=("x" * 200,), stop_token_ids=tuple(range(400)))
    prompt = list(range(240))

    def job() -> Any:
        return shared._job("the request", Request(prompt, params))

    first, *others = job().samples
    assert all(one.prompt is first.prompt and one.context is first.context for one in others)
    with allocated() as whole:
        kept = job()
    assert len(kept.samples) == 128
    # The set of end tokens alone takes 16 KB.
    assert whole[0] < 128 * 8_000


def test_a_listener_that_waits_for_the_engine_is_refused(shared: Engine) -> None:
    calls = (
        lambda: shared.generate([Request([3])]),
        shared.warm_up,
        lambda: shared.update_weights({}),
        shared.forget_prefixes,
    )
    for call in calls:
        with pytest.raises(RuntimeError, match="accepted in on_token: submit"):
            shared.submit(Request([1, 2]), lambda _, call=call: call()).result(HANGS_AFTER)


def test_a_listener_may_submit_a_request(shared: Engine) -> None:
    futures, expected = [], shared.generate(requests()[1:2])

    def listen(token: Token) -> None:
        if token.finish_reason is not None:
            futures.append(shared.submit(requests()[1]))

    shared.submit(requests()[0], listen).result(HANGS_AFTER)
    assert [future.result(HANGS_AFTER) for future in futures] == expected


def test_the_streamed_text_is_that_of_the_completion(shared: Engine) -> None:
    tokenizer = small_tokenizer()
    free = shared.generate([Request("Hello", SamplingParams(max_tokens=12, ignore_eos=True))])[0].completions[0]
    assert free.text == tokenizer.decode(list(free.tokens))
    stop = free.text[4:6]
    for params in (SamplingParams(max_tokens=12, ignore_eos=True), SamplingParams(max_tokens=12, stop=(stop,))):
        request = Request("Hello", params)
        (expected,) = shared.generate([request])[0].completions
        tokens = asyncio.run(listen(shared, request))
        assert "".join(token.text or "" for token in tokens) == expected.text
        assert tokens[-1].finish_reason == expected.finish_reason
    assert (expected.text, expected.finish_reason) == (free.text[: free.text.index(stop)], "stop")


def test_new_weights_give_new_answers_and_forget_cached_pages() -> None:
    model = small_model()
    prompt, params = list(range(260)), SamplingParams(max_tokens=5, ignore_eos=True)
    request = Request(prompt, params)
    graph, state = nnx.split(model)
    changed = jax.tree.map(lambda leaf: (leaf * 1.25).astype(leaf.dtype), state)
    with small_engine() as one:
        (before,) = one.generate([request])
        one.update_weights(changed)
        # They are used where they are, without a copy.
        places = [
            {x.unsafe_buffer_pointer() for x in jax.tree.leaves(arrays)}
            for arrays in (changed, one._loop._runner._parameters.weights)
        ]
        assert places[0] == places[1]
        (after,) = one.generate([request])
        assert after.cached_tokens == 0
        one.update_weights(state)
        assert one.generate([request]) == [before]
        other = nnx.merge(graph, changed)
        with Engine(other, None, dataclasses.replace(one.config, prefix_cache=False)) as new:
            (expected,) = new.generate([request])
    assert_same_bits(bits_of([after]), bits_of([expected]))
    assert after != before


def test_weights_are_not_replaced_while_a_request_is_in_flight(shared: Engine) -> None:
    state = nnx.split(small_model())[1]

    async def while_streaming() -> None:
        stream = shared.stream(Request([1, 2], SamplingParams(max_tokens=290, ignore_eos=True)))
        await anext(stream)
        with pytest.raises(RuntimeError, match="update_weights: 1 samples are in flight; accepted: none"):
            shared.update_weights(state)
        with pytest.raises(RuntimeError, match="warm_up: 1 samples are in flight; accepted: none"):
            shared.warm_up()
        await stream.aclose()  # pyright: ignore[reportAttributeAccessIssue]

    asyncio.run(while_streaming())
    shared.update_weights(state)


def test_weights_of_another_shape_are_refused(shared: Engine) -> None:
    other = nnx.split(load(FIXTURE.parent / "llama3", dtype="bfloat16", progress=False)[0])[1]
    with pytest.raises(ValueError, match=r"update_weights: .* is .*; accepted: "):
        shared.update_weights(other)


def test_closing_an_engine_ends_streams_with_an_error() -> None:
    one = small_engine()
    started = threading.Event()

    async def stream() -> None:
        async for _ in one.stream(Request([1, 2], SamplingParams(max_tokens=290, ignore_eos=True))):
            started.set()

    errors: list[BaseException] = []

    def listen_on() -> None:
        try:
            asyncio.run(stream())
        except EngineClosed as error:
            errors.append(error)

    listener = threading.Thread(target=listen_on)
    listener.start()
    assert started.wait(HANGS_AFTER)
    one.close()
    listener.join(HANGS_AFTER)
    assert len(errors) == 1
    with pytest.raises(EngineClosed, match="it was closed"):
        one.generate([Request([1])])
    one.close()


def test_a_failure_in_the_thread_is_logged_once_and_ends_every_request_without_its_details(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failure, listeners = MemoryError("no memory left"), list[BaseException | None]()
    with small_engine() as one:
        assert (one.failure, one.closed.done(), one.closed.cancel()) == (None, False, False)
        one.closed.add_done_callback(lambda closed: listeners.append(closed.exception()))
        steps = 0
        step = one._loop.step

        def broken() -> Any:
            nonlocal steps
            steps += 1
            if steps == 3:
                raise failure
            return step()

        monkeypatch.setattr(one._loop, "step", broken)
        futures = [one.submit(Request([index], SamplingParams(max_tokens=290))) for index in range(3)]
        errors = [future.exception(HANGS_AFTER) for future in futures]
        with pytest.raises(EngineClosed) as late:
            one.generate([Request([1])])
        assert one.closed.exception(HANGS_AFTER) is failure
    for error in (*errors, late.value):
        assert isinstance(error, EngineClosed)
        assert "it has failed" in str(error) and "memory" not in str(error)
        assert error.__cause__ is failure
    assert (one.failure, one.is_open, listeners) == (failure, False, [failure])
    (record,) = (record for record in caplog.records if record.name == "detjax.engine")
    assert record.levelname == "CRITICAL"
    assert record.exc_info and record.exc_info[1] is failure


def test_requests_that_a_failing_engine_has_not_taken_yet_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    is_stepping, fails = threading.Event(), threading.Event()
    with small_engine() as one:

        def broken() -> None:
            is_stepping.set()
            assert fails.wait(HANGS_AFTER)
            raise MemoryError

        monkeypatch.setattr(one._loop, "step", broken)
        futures = [one.submit(Request([1]))]
        assert is_stepping.wait(HANGS_AFTER)
        futures.append(one.submit(Request([2])))
        fails.set()
        assert isinstance(one.closed.exception(HANGS_AFTER), MemoryError)
        assert all(future.done() for future in futures)
        assert [type(future.exception()) for future in futures] == [EngineClosed, EngineClosed]


def test_a_closed_engine_has_not_failed(caplog: pytest.LogCaptureFixture) -> None:
    one = small_engine()
    one.close()
    assert (one.closed.result(HANGS_AFTER), one.failure, one.is_open) == (None, None, False)
    assert not caplog.records


@pytest.mark.parametrize(
    "when", ["the sample grows", "the stream grows", "the sample has ended", "the request is submitted"]
)
def test_a_failure_of_one_sample_ends_its_request_alone(
    shared: Engine, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    expected = alone()[:4]
    victim = SamplingParams(max_tokens=290, n=3, ignore_eos=True, temperature=1.0, seed=99)
    add, completion, submit = TextStream.add, engine_sequence.Sequence.completion, StepLoop.submit
    calls = 0

    class Panic(BaseException):
        """The tokenizer library's panic is not an Exception either."""

    def failing_add(stream: TextStream, token: int, *, may_stop: bool = True) -> bool:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise Panic("the fault of one sample")
        return add(stream, token, may_stop=may_stop)

    def failing_completion(sequence: engine_sequence.Sequence) -> Any:
        if sequence.params.seed == 99:
            raise Panic("the fault of one sample")
        return completion(sequence)

    def failing_submit(loop: StepLoop, sequence: engine_sequence.Sequence) -> None:
        if sequence.params.seed == 99 and sequence.index == 2:
            raise Panic("the fault of one sample")
        submit(loop, sequence)

    if when.endswith("grows"):
        if when == "the sample grows":
            victim = dataclasses.replace(victim, stop=("a stop string that never comes",))
        monkeypatch.setattr(TextStream, "add", failing_add)
    elif when == "the sample has ended":
        victim = dataclasses.replace(victim, max_tokens=3)
        monkeypatch.setattr(engine_sequence.Sequence, "completion", failing_completion)
    else:
        monkeypatch.setattr(StepLoop, "submit", failing_submit)
    listener = (lambda token: None) if when == "the stream grows" else None
    future = shared.submit(Request([1, 2, 3], victim), listener)
    assert_same_bits(bits_of(shared.generate(requests()[:4])), bits_of(expected))
    with pytest.raises(Panic, match="the fault of one sample"):
        future.result(HANGS_AFTER)
    assert shared.stats()[:4] == (0, 0, shared.stats().num_pages, 0)
    assert not shared._jobs
    assert shared.is_open


def test_weights_that_give_nan_are_an_error_and_leave_nothing_behind() -> None:
    model = small_model()
    state = nnx.split(model)[1]
    broken = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), state)
    request, some = Request([1] * 130, SamplingParams(n=2, temperature=1.0)), requests()[:2]
    with small_engine() as one:
        one.update_weights(broken)
        for listener in (None, lambda _: None):
            with pytest.raises(NotFinite, match=r"logits for position 130 hold NaN or infinity; .*Check the weights"):
                one.submit(request, listener).result(HANGS_AFTER)
        assert one.stats()[:4] == (0, 0, one.config.num_pages, 0)
        one.update_weights(state)
        assert_same_bits(bits_of(one.generate(some)), bits_of(alone()[:2]))


def test_forgotten_prefixes_are_computed_again() -> None:
    prompt = Request([7] * 200, SamplingParams(max_tokens=3))
    with small_engine() as one:
        expected = one.generate([prompt])
        pool = one._loop.scheduler.pool
        assert pool._page_by_digest
        one.forget_prefixes()
        assert not pool._page_by_digest
        assert one.generate([prompt]) == expected


@pytest.mark.parametrize("is_whole", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_warming_up_compiles_every_program_side_by_side_and_nothing_is_compiled_after_it(
    monkeypatch: pytest.MonkeyPatch, is_whole: bool
) -> None:
    variants = SamplingVariant.for_serving(2)
    variants = variants if is_whole else (variants[0], variants[-1])
    monkeypatch.setattr(SamplingVariant, "for_serving", lambda top_logprobs: variants)
    samples = 2 if is_whole else 1
    with (
        small_engine(max_samples=samples, token_budget=16, runs_of=samples, num_pages=3) as one,
        compiled_programs() as compiled,
    ):
        shapes = list(one._loop._shapes)
        layers, samplers = len(shapes), len(variants) * len({shape.sampled for shape in shapes})
        scorers = len({shape.rows for shape in shapes if shape.rows})
        runs = len(run_variants(variants)) * samples  # of one decode, and of two
        threshold = gc.get_threshold()
        gc.set_threshold(700, 11, 12)
        one.warm_up()
        assert gc.get_threshold() == (20_000, 11, 12)
        gc.set_threshold(*threshold)
        counts = Counter(compiled)
        names = "_forward", "_sample", "_score", "_take_rows", "_score_drawn", "_note_seen", "_decode_run"
        assert [counts[f"jit({name})"] for name in names] == [layers, samplers, scorers, scorers, 1, 1, runs]
        assert sys.getswitchinterval() <= 0.0005
        # It does not include programs that the first steps would have to compile in sequence.
        assert len(one._loop._runner._compiled) == layers + samplers + 2 * scorers + 2 + runs
        del compiled[:]
        one.generate([Request([1, 2, 3], SamplingParams(max_tokens=3, seed=seed)) for seed in range(3)])
        one.generate([Request([1, 2, 3], SamplingParams(max_tokens=9))])
        one.generate([Request([1, 2, 3], SamplingParams(prompt_logprobs=True, max_tokens=3))])
        drawn = SamplingParams(prompt_logprobs=True, sampling_logprobs=True, temperature=0.9, max_tokens=3)
        one.generate([Request([1, 2, 3], drawn)])
        one.generate([Request([1, 2, 3], SamplingParams(repetition_penalty=1.1, min_tokens=2, max_tokens=3))])
        one.generate([Request([1, 2, 3], SamplingParams(temperature=0.9, sampling_logprobs=True, max_tokens=3))])
        assert compiled == []
        cache = weakref.ref(jax.tree.leaves(one._loop._runner._state)[0])
    # The warm-up hid the engine from the garbage collector; the next one needs its memory.
    del one, shapes
    gc.collect()
    assert cache() is None


def test_the_cache_of_an_engine_is_quantized_as_asked_for() -> None:
    dtypes = []
    for kv_cache_dtype in (None, "int8"):
        with small_engine(kv_cache_dtype=kv_cache_dtype) as one:
            assert one.config.kv_cache_dtype == kv_cache_dtype
            dtypes.append({leaf.dtype for leaf in jax.tree.leaves(one._loop._runner._state)})
    assert dtypes[0] == {jnp.dtype("bfloat16")} and jnp.dtype("int8") in dtypes[1]


def test_a_setting_that_does_not_exist_is_refused() -> None:
    with pytest.raises(TypeError, match="max_tokens"):
        small_engine(max_tokens=64)


def test_settings_come_from_a_config_or_from_options() -> None:
    config = EngineConfig(max_samples=3, max_length=64, top_logprobs=2)
    with Engine(small_model(), None, config, token_budget=16) as one:
        assert (one.config.max_samples, one.config.token_budget, one.max_length) == (3, 16, 64)
        assert one.stats() == EngineStats(running=0, waiting=0, num_pages=3, pages_in_use=0, preemptions=0)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request([]), "request 0 has no tokens; accepted: a prompt of at least one token"),
        (Request([515]), "request 0 has token 515; accepted: ids 0 to 514"),
        (Request([1] * 200, SamplingParams(max_tokens=101)), "accepted: 300 in all, the engine's max_length"),
        (Request([1], SamplingParams(top_logprobs=4)), "top_logprobs is 4; accepted: up to 3, the engine's"),
        (
            Request([1], SamplingParams(min_tokens=1, stop_token_ids=(1 << 40,))),
            "request 0: its sampling parameters do not fit into a step: Python integer 1099511627776 out of bounds",
        ),
    ],
)
def test_bad_requests_are_refused(shared: Engine, request_: Request, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shared.generate([request_])


def test_more_tokens_than_a_step_can_hold_back_are_refused(shared: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = GenerationDefaults(eos_token_ids=tuple(range(20)))
    monkeypatch.setattr(shared, "_defaults", defaults)
    biases = tuple((token, 1.0) for token in range(100, 400))
    params = SamplingParams(min_tokens=1, logit_bias=biases, stop_token_ids=tuple(range(400, 515)))
    shared._job("the request", Request([1], params))
    params = dataclasses.replace(params, stop_token_ids=(*range(400, 515), *range(20, 100)))
    with pytest.raises(ValueError, match="515 tokens have a bias or are held back by min_tokens; accepted: up to 512"):
        shared.generate([Request([1], params)])
