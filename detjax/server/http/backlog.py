"""Backpressure for streams: buffered events of slow clients, with a limit on their total size."""

import asyncio
import collections
from collections.abc import AsyncGenerator, Callable
from typing import Final

SENT_TOGETHER: Final = 1 << 16
"""Approximate number of bytes of buffered events to send at once."""


class Backlog:
    """The buffered events of all streams, with a limit on their bytes.

    When the limit is exceeded, the stream with the most buffered bytes is aborted: its client reads too slowly.

    Attributes:
        size: total bytes of buffered events.
    """

    def __init__(self, limit: int) -> None:
        self.size = 0
        self._limit = limit
        self._queues: set[EventQueue] = set()

    def open(self, abort: Callable[[], None]) -> "EventQueue":
        """Returns a queue for one stream's events. `abort` closes the connection of the stream's client."""
        queue = EventQueue(self, abort)
        self._queues.add(queue)
        return queue

    def close(self, queue: "EventQueue") -> None:
        """Drops a queue and its events."""
        self._queues.discard(queue)
        self.size -= queue.size

    def grow(self, size: int) -> None:
        """Adds to the buffered bytes, and aborts the largest stream if they exceed the limit."""
        self.size += size
        if self.size > self._limit:
            max(self._queues, key=lambda queue: queue.size).abort()


class EventQueue:
    """The buffered events of one stream.

    Attributes:
        size: bytes of the events.
        abort: closes the connection of the stream's client.
    """

    def __init__(self, backlog: Backlog, abort: Callable[[], None]) -> None:
        self.size = 0
        self.abort = abort
        self._backlog = backlog
        self._events = collections.deque[bytes]()
        self._changed = asyncio.Event()
        self._is_complete = False

    def put(self, event: bytes) -> None:
        """Appends an event."""
        self._events.append(event)
        self.size += len(event)
        self._backlog.grow(len(event))
        self._changed.set()

    def complete(self) -> None:
        """Marks the end of the events."""
        self._is_complete = True
        self._changed.set()

    async def parts(self) -> AsyncGenerator[bytes]:
        """Yields events until the queue is complete, joining buffered ones into parts of about 64 KiB."""
        while not self._is_complete or self._events:
            await self._changed.wait()
            while self._events:
                part = bytearray()
                while self._events and len(part) < SENT_TOGETHER:
                    part += self._events.popleft()
                self.size -= len(part)
                self._backlog.size -= len(part)
                yield bytes(part)
            if not self._is_complete:
                self._changed.clear()
