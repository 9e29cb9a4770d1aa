"""Responses that stream server-sent events."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any, Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from detjax.server.http.backlog import SENT_TOGETHER, EventQueue
from detjax.server.http.connections import abort_of
from detjax.server.http.errors import ApiError, NamesFields, to_api_error
from detjax.server.http.guard import ClientGone, Guard

DONE: Final = b"data: [DONE]\n\n"
"""The last event of a stream in OpenAI's API."""
_LINE_BREAKS: Final = str.maketrans({character: f"\\u{ord(character):04x}" for character in "\x85\u2028\u2029"})
"""Unicode's line breaks that JSON does not escape, with their escapes."""


def event(content: dict[str, Any]) -> bytes:
    """Returns a server-sent event with JSON. It is one line also for clients that split at Unicode's line breaks."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text if text.isascii() else text.translate(_LINE_BREAKS)}\n\n".encode()


class EventStream(Response):
    """A response that streams server-sent events. An error after the first event becomes an event.

    Events are read as soon as they exist, even while the client does not read, so that a sample that has ended is
    released immediately. `Guard.backlog` limits the buffered events.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        guard: Guard,
        first: bytes,
        events: AsyncGenerator[bytes],
        deadline: float,
        admission: contextlib.ExitStack,
        error_event: Callable[[ApiError], bytes] = lambda error: event(error.body),
        body: NamesFields | None = None,
    ) -> None:
        """A response with the event `first` and the `events` after it, which `guard` watches until `deadline`.

        `admission` is closed at the end. `error_event` makes the event of an error, which names fields of `body`.
        """
        super().__init__()
        del self.headers["content-length"]
        self.headers["Cache-Control"] = "no-cache"
        self._guard, self._first, self._events, self._deadline = guard, first, events, deadline
        self._admission, self._error_event, self._body = admission, error_event, body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._admission:
            async with contextlib.aclosing(self._events):
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                try:
                    await self._guard.watch(receive, self._send_events(send, abort_of(scope)), self._deadline)
                except ClientGone:
                    return
                except Exception as error:
                    self._admission.close()  # the client may take a while to read the error
                    await _send_part(send, self._error_event(to_api_error(error, self._body)))
                await send({"type": "http.response.body", "body": b""})

    async def _send_events(self, send: Send, abort: Callable[[], None]) -> None:
        queue = self._guard.backlog.open(abort)
        filling = asyncio.create_task(self._fill(queue))
        try:
            async with contextlib.aclosing(queue.parts()) as parts:
                async for part in parts:
                    await _send_part(send, part)
            await filling  # re-raises errors of the events
        finally:
            filling.cancel()
            await asyncio.gather(filling, return_exceptions=True)
            self._guard.backlog.close(queue)

    async def _fill(self, queue: EventQueue) -> None:
        try:
            queue.put(self._first)
            async for one in self._events:
                queue.put(one)
                if queue.size > SENT_TOGETHER:
                    await asyncio.sleep(0)  # tokens that come faster than they are sent would starve other requests
        finally:
            queue.complete()


async def _send_part(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})
