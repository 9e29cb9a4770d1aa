"""JSON responses that are encoded and sent incrementally, since an answer may have tens of megabytes."""

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
"""Approximate number of bytes to encode and send before yielding to other requests: a millisecond or two of work."""
_LONG: Final = 1 << 14
"""Characters above which a string is encoded in slices."""
_AT_ONCE: Final = 32
"""List items per call of the encoder; one call per number would dominate the time."""

# The same format as Starlette's JSONResponse.
_encode: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def pieces(content: Any) -> Iterator[str]:
    """Yields the JSON text of `content` in pieces.

    An iterator is encoded as a list, read incrementally. Everything else is as in `json.dumps`.
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
    """Returns whether a value has parts that are encoded in pieces."""
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
    """A JSON response that is encoded while it is sent, yielding to other requests between its parts.

    A small response is sent at once, with a Content-Length.
    """

    media_type = "application/json"

    def __init__(self, guard: Guard, content: Any, seconds: float) -> None:
        """A response that the client must read within `seconds`; `content` as in `pieces`."""
        encoded = parts(content)
        self._first, self._second = next(encoded), next(encoded, None)
        super().__init__(self._first if self._second is None else b"")
        if self._second is not None:
            del self.headers["content-length"]
        self._guard, self._rest, self._seconds = guard, encoded, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._second is None:
            return await super().__call__(scope, receive, send)
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            deadline = asyncio.get_running_loop().time() + self._seconds
            await self._guard.watch(receive, self._send_parts(send), deadline)
        except ClientGone:
            return
        except ApiError:  # JSON has no room for an error, so the response is cut off
            abort_of(scope)()
            return
        await send({"type": "http.response.body", "body": b""})

    async def _send_parts(self, send: Send) -> None:
        for part in itertools.chain((self._first, self._second), self._rest):
            await send({"type": "http.response.body", "body": part, "more_body": True})
            await asyncio.sleep(0)
