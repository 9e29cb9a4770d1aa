"""JSON responses that are made and sent piece by piece, because an answer may have tens of megabytes."""

import asyncio
import itertools
import json
from collections.abc import Iterator
from typing import Any, Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from detjax.server.http.connections import abort_of
from detjax.server.http.errors import ApiError
from detjax.server.http.guard import ClientGone, Guard

TURN_BYTES: Final = 1 << 14
"""Bytes, about, that are made and sent before others have a turn: a millisecond or two of work."""
_LONG: Final = 1 << 14
"""Characters of a string from which on it is made in slices."""
_AT_ONCE: Final = 32
"""Items of a list that are made at once: a call of the encoder for each number of a list takes most of the time."""

# The form that starlette's JSONResponse gives to JSON.
_encode: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def pieces(content: Any) -> Iterator[str]:
    """Yields the JSON text of `content` in pieces.

    A list that grows with the answer is given as an iterator, which is read as the pieces are made. Everything else is
    as `json.dumps` takes it.
    """
    if isinstance(content, Iterator):
        yield "["
        for index, items in enumerate(itertools.batched(content, _AT_ONCE)):
            if index:
                yield ","
            if any(map(_is_long, items)):
                for place, item in enumerate(items):
                    if place:
                        yield ","
                    yield from pieces(item)
            else:
                yield _encode(items)[1:-1]
        yield "]"
    elif isinstance(content, str) and len(content) > _LONG:
        yield '"'
        for start in range(0, len(content), _LONG):
            yield _encode(content[start : start + _LONG])[1:-1]
        yield '"'
    elif isinstance(content, dict) and _is_long(content):
        yield "{"
        for index, (key, value) in enumerate(content.items()):
            yield f"{',' if index else ''}{_encode(key)}:"
            yield from pieces(value)
        yield "}"
    else:
        yield _encode(content)


def _is_long(content: Any) -> bool:
    """Whether something has parts that are made in pieces."""
    if isinstance(content, dict):
        return any(map(_is_long, content.values()))
    return isinstance(content, Iterator) or (isinstance(content, str) and len(content) > _LONG)


def parts(content: Any) -> Iterator[bytes]:
    """Yields the JSON text of `content` in parts of about `TURN_BYTES` bytes."""
    joined: list[str] = []
    size = 0
    for piece in pieces(content):
        joined.append(piece)
        size += len(piece)
        if size >= TURN_BYTES:
            yield "".join(joined).encode()
            joined, size = [], 0
    yield "".join(joined).encode()


class JsonPieces(Response):
    """A response of JSON, sent while it is made, so that others have turns between its parts.

    A small response is made at once and has a length.
    """

    media_type = "application/json"

    def __init__(self, guard: Guard, content: Any, seconds: float) -> None:
        """A response that its client has so many seconds to read; `content` as `pieces` takes it."""
        made = parts(content)
        self._first, self._second = next(made), next(made, None)
        super().__init__(self._first if self._second is None else b"")
        if self._second is not None:
            del self.headers["content-length"]
        self._guard, self._rest, self._seconds = guard, made, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._second is None:
            return await super().__call__(scope, receive, send)
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            deadline = asyncio.get_running_loop().time() + self._seconds
            await self._guard.watch(receive, self._send_parts(send), deadline)
        except ClientGone:
            return
        except ApiError:  # there is no place for an error within JSON, so the response ends before its end
            abort_of(scope)()
            return
        await send({"type": "http.response.body", "body": b""})

    async def _send_parts(self, send: Send) -> None:
        for part in itertools.chain((self._first, self._second), self._rest):
            await send({"type": "http.response.body", "body": part, "more_body": True})
            await asyncio.sleep(0)
