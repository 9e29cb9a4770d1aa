"""The guard of requests: what it admits, when it cancels, and how much may wait for clients that read slowly."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from detjax.server.http.backlog import SENT_TOGETHER, Backlog
from detjax.server.http.errors import ApiError
from detjax.server.http.guard import ClientGone, Guard
from detjax.server.http.streaming import EventStream, event
from tests.support.waits import HANGS_AFTER


async def connected() -> dict[str, str]:
    """The messages of a client that stays."""
    await asyncio.Event().wait()
    return {}


async def endless() -> None:
    await asyncio.Event().wait()


def later(seconds: float = HANGS_AFTER) -> float:
    return asyncio.get_running_loop().time() + seconds


def error_of(guard: Guard, act: Callable[[], None], deadline: float = HANGS_AFTER) -> dict[str, Any]:
    """The error of endless work, during which something happens."""

    async def watch() -> dict[str, Any]:
        asyncio.get_running_loop().call_soon(act)
        with pytest.raises(ApiError) as raised:
            await guard.watch(connected, endless(), later(deadline))
        return {"status": raised.value.status} | raised.value.body["error"]

    return asyncio.run(watch())


STOPPING = "the server is shutting down and could not finish the request; send it to another server"


def test_a_guard_that_stops_cancels_what_it_watches() -> None:
    guard = Guard(capacity=1, seconds=HANGS_AFTER)
    expected = {"status": 503, "message": STOPPING, "type": "server_error", "param": None, "code": None}
    assert error_of(guard, guard.stop) == expected


@pytest.mark.parametrize("times", [1, 2])
def test_a_guard_that_was_stopped_before_its_first_request_cancels_it(times: int) -> None:
    guard = Guard(capacity=1, seconds=HANGS_AFTER)
    for _ in range(times):
        guard.stop()
    assert error_of(guard, lambda: None)["message"] == STOPPING


def test_a_guard_that_stops_twice_cancels_later_requests_too() -> None:
    async def watch() -> None:
        guard = Guard(capacity=1, seconds=HANGS_AFTER)
        watching = [asyncio.ensure_future(guard.watch(connected, endless(), later())) for _ in range(2)]
        await asyncio.sleep(0)
        guard.stop()
        guard.stop()
        for one in (*watching, guard.watch(connected, endless(), later())):
            with pytest.raises(ApiError, match="could not finish the request"):
                await one

    asyncio.run(watch())


def test_a_deadline_ends_work_and_says_the_limit() -> None:
    message = "the request took longer than 2.5 s, the server's limit. Ask for fewer tokens."
    for deadline in (0.0, -1.0):
        given = error_of(Guard(capacity=1, seconds=2.5), lambda: None, deadline)
        assert given == {"status": 504, "message": message, "type": "server_error", "param": None, "code": "timeout"}


def test_work_that_is_done_counts_whatever_else_has_happened() -> None:
    async def gone() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def messages() -> dict[str, str]:
        await asyncio.sleep(0)
        return {"type": next(kinds)}

    async def done() -> int:
        return 3

    async def watch() -> None:
        guard = Guard(capacity=1, seconds=HANGS_AFTER)
        assert await guard.watch(connected, done(), later()) == 3
        guard.stop()
        assert await guard.watch(gone, done(), later()) == 3
        with pytest.raises(KeyError):
            await guard.watch(connected, fails(), later())
        fresh = Guard(capacity=1, seconds=HANGS_AFTER)
        with pytest.raises(ClientGone):
            await fresh.watch(messages, endless(), later())

    async def fails() -> None:
        raise KeyError

    kinds = iter(["http.request", "http.request", "http.disconnect"])
    asyncio.run(watch())
    assert next(kinds, None) is None


def test_samples_are_given_back_once() -> None:
    async def admit() -> None:
        guard = Guard(capacity=5, seconds=7)
        before = later(7)
        with guard.admitted(3) as admission, guard.admitted(2):
            assert before <= admission.deadline <= later(7)
            assert guard.in_flight == 5
            admission.give_back()
            assert guard.in_flight == 4
            admission.give_back(7)
            assert guard.in_flight == 2
            admission.give_back()
            admission.close()
            assert guard.in_flight == 2
        assert guard.in_flight == 0
        with contextlib.suppress(KeyError), guard.admitted(5):
            raise KeyError
        assert guard.in_flight == 0

    asyncio.run(admit())


# --- events that wait for slow clients --------------------------------------------------------------------------------


def test_the_largest_stream_is_aborted_beyond_the_limit_and_not_at_it() -> None:
    async def fill() -> None:
        aborted: list[str] = []
        backlog = Backlog(10)
        small, large = (backlog.open(lambda name=name: aborted.append(name)) for name in ("small", "large"))
        small.put(b"1234")
        large.put(b"123456")
        assert (backlog.size, small.size, large.size, aborted) == (10, 4, 6, [])
        small.put(b"5")
        assert (backlog.size, aborted) == (11, ["large"])
        backlog.close(large)
        assert backlog.size == 5
        small.put(b"67890")
        assert aborted == ["large"]
        backlog.close(small)
        assert backlog.size == 0

    asyncio.run(fill())


def test_events_are_joined_in_their_order_up_to_a_size() -> None:
    async def read() -> None:
        backlog = Backlog(1 << 30)
        queue = backlog.open(lambda: None)
        half = SENT_TOGETHER // 2
        for letter, size in ((b"a", half), (b"b", half - 1), (b"c", 1), (b"d", 1)):
            queue.put(letter * size)
        parts, last = [], []
        async for part in queue.parts():
            parts.append(part)
            last.append(backlog.size)
            if len(parts) == 2:
                queue.put(b"e")
                queue.complete()
        assert [len(part) for part in parts] == [SENT_TOGETHER, 1, 1]
        assert b"".join(parts) == b"a" * half + b"b" * (half - 1) + b"cde"
        assert last == [1, 0, 0]
        assert queue.size == 0

    asyncio.run(read())


def test_an_event_is_json_in_one_line() -> None:
    assert event({"a": "é\n", "b": [1, None]}) == 'data: {"a":"é\\n","b":[1,null]}\n\n'.encode()


def streamed(guard: Guard, events: AsyncGenerator[bytes], deadline: float, receive: Any = connected) -> list[bytes]:
    """The bodies of a stream whose first event is 1. Its three samples are in flight until its end."""
    bodies: list[bytes] = []

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            bodies.append(message["body"])
            if b"error" in message["body"]:
                assert guard.in_flight == 0, "the client may take a while to read the error"

    async def answer() -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(guard.admitted(3))
            response = EventStream(guard, b"1", events, later(deadline), stack.pop_all())
        await response({"type": "http"}, receive, send)
        assert (guard.in_flight, guard.backlog.size) == (0, 0)

    asyncio.run(answer())
    return bodies


def test_a_stream_ends_with_its_events_an_error_or_its_client() -> None:
    async def two() -> AsyncGenerator[bytes]:
        yield b"2"
        yield b"3"

    async def broken() -> AsyncGenerator[bytes]:
        yield b"2"
        raise ValueError("too much")

    ended = list[bool]()

    async def held() -> AsyncGenerator[bytes]:
        try:
            yield b"2"
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def leaves() -> dict[str, str]:
        await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    def guard() -> Guard:
        return Guard(capacity=3, seconds=HANGS_AFTER)

    bodies = streamed(guard(), two(), HANGS_AFTER)
    assert (b"".join(bodies), bodies[-1]) == (b"123", b"")
    *bodies, error, last = streamed(guard(), broken(), HANGS_AFTER)
    assert (b"".join(bodies), last) == (b"12", b"")
    assert error.startswith(b'data: {"error":{"message":"too much"')
    *bodies, error, last = streamed(guard(), held(), 0.01)
    assert (b"".join(bodies), last, ended) == (b"12", b"", [True])
    assert b'"code":"timeout"' in error
    assert b"".join(streamed(guard(), held(), HANGS_AFTER, leaves)) == b"12"
    assert ended == [True, True]


def test_others_have_turns_while_events_come_without_a_pause() -> None:
    """Nobody reads the stream, so that its events wait."""

    async def fast() -> AsyncGenerator[bytes]:
        for _ in range(50):
            yield b"x" * (SENT_TOGETHER // 4)

    async def answer() -> int:
        guard, turns = Guard(capacity=3, seconds=HANGS_AFTER, max_pending_bytes=1 << 30), 0
        response = EventStream(guard, b"1", fast(), later(), contextlib.ExitStack())
        queue = guard.backlog.open(lambda: None)
        filling = asyncio.ensure_future(response._fill(queue))
        while not filling.done():
            turns += 1
            await asyncio.sleep(0)
        return turns

    assert asyncio.run(answer()) > 40
