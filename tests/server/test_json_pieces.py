"""Large answers are encoded and sent in pieces, with the same bytes as in one piece."""

import asyncio
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.responses import JSONResponse

from detjax.server.http.guard import Guard
from detjax.server.http.json_pieces import TURN_BYTES, JsonPieces, parts
from detjax.server.http.streaming import event
from tests.support.waits import HANGS_AFTER

TEXT = 'é你 "quoted" \\ \n \x01 \U0001f600 '


def made(make: Any) -> Any:
    """An answer whose long lists `make` makes of the entries."""
    choices = (
        {
            "index": index,
            "message": {"role": "assistant", "content": TEXT * 3000, "refusal": None},
            "logprobs": {"content": make({"token": TEXT, "top": [{"a": 1}, {}, None]} for _ in range(400))},
            "token_ids": make(range(1000)),
            "nothing": make(()),
        }
        for index in range(5)
    )
    return {"id": "x", TEXT: 1.5, "choices": make(choices), "usage": {"total": 3, "details": {}}, "empty": make(())}


def as_iterator(entries: Any) -> Iterator[Any]:
    return iter(entries)


def test_pieces_are_the_bytes_of_the_json_at_once() -> None:
    expected = JSONResponse(made(list)).body
    pieces = list(parts(made(as_iterator)))
    assert b"".join(pieces) == expected
    assert len(expected) > 100 * TURN_BYTES / 16
    assert (
        max(map(len, pieces)) < 8 * TURN_BYTES
    )  # a part ends with the piece that fills it, whose characters have 4 bytes
    for small in ({}, [], {"a": [1, 2]}, {"a": {"b": None}}, "x", 3):
        assert b"".join(parts(small)) == JSONResponse(small).body
    with pytest.raises(ValueError, match="not JSON compliant"):
        list(parts({"a": iter([math.inf])}))


def answered(response: JsonPieces, receive: Any = None) -> tuple[list[dict[str, Any]], int]:
    """Returns the messages to an ASGI server, and how often other tasks ran in between."""
    sent: list[dict[str, Any]] = []
    turns = 0

    async def never() -> None:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    async def answer() -> None:
        nonlocal turns
        answering = asyncio.create_task(response({"type": "http"}, receive or never, send))
        while not answering.done():
            turns += 1
            await asyncio.sleep(0)
        await answering

    asyncio.run(answer())
    return sent, turns


def test_others_have_turns_while_a_large_answer_is_sent() -> None:
    response = JsonPieces(Guard(1, HANGS_AFTER, 1), made(as_iterator), HANGS_AFTER)
    (start, *bodies), turns = answered(response)
    expected = JSONResponse(made(list)).body
    assert dict(start["headers"]) == {b"content-type": b"application/json"}
    assert b"".join(body["body"] for body in bodies) == expected
    assert [body.get("more_body", False) for body in bodies] == [True] * (len(bodies) - 1) + [False]
    assert len(bodies) > 20
    assert turns >= len(bodies) - 5


def test_a_small_answer_has_a_length() -> None:
    (start, body), _ = answered(JsonPieces(Guard(1, HANGS_AFTER, 1), {"a": iter([1, 2])}, HANGS_AFTER))
    assert dict(start["headers"])[b"content-length"] == b"11"
    assert json.loads(body["body"]) == {"a": [1, 2]}


def test_nothing_more_is_made_for_a_client_that_left() -> None:
    entries_made = 0

    def entries() -> Iterator[str]:
        nonlocal entries_made
        for _ in range(10**6):
            entries_made += 1
            yield "x" * 1000

    async def disconnect() -> dict[str, str]:
        await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    sent, _ = answered(JsonPieces(Guard(1, HANGS_AFTER, 1), {"a": entries()}, HANGS_AFTER), disconnect)
    assert entries_made < 10**4
    assert sent[-1].get("more_body", True)


def test_an_answer_that_is_not_read_in_time_is_cut_off() -> None:
    is_aborted = False

    def abort() -> None:
        nonlocal is_aborted
        is_aborted = True

    async def blocked(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def never() -> None:
        await asyncio.Event().wait()

    response = JsonPieces(Guard(1, 1, 1), {"a": iter(["x" * 1000] * 100)}, 0.01)
    asyncio.run(response({"type": "http", "state": {"detjax.abort": abort}}, never, blocked))  # pyright: ignore
    assert is_aborted


def test_an_event_is_one_line_however_a_client_splits_lines() -> None:
    content = {"text": "".join(map(chr, range(0x3000)))}
    line, *rest = event(content).decode().splitlines()
    assert rest == [""]
    assert json.loads(line.removeprefix("data: ")) == content
    assert "é" in event({"text": "é"}).decode()
