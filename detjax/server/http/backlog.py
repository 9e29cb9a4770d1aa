"""Events of streams that wait for their clients to read."""

import asyncio
import collections
from collections.abc import AsyncGenerator, Callable
from typing import Final

SENT_TOGETHER: Final = 1 << 16
"""Bytes of events, about, that are sent together where events wait to be sent."""


class Backlog:
    """Events of all streams that wait for their clients to read, up to a number of bytes.

    Where they exceed it, the stream with the most bytes is ended: its client reads too slowly.

    Attributes:
        size: bytes of the events that wait.
    """

    def __init__(self, limit: int) -> None:
        """A backlog of up to `limit` bytes."""
        self.size = 0
        self._limit = limit
        self._queues: set[EventQueue] = set()

    def open(self, abort: Callable[[], None]) -> "EventQueue":
        """A queue for the events of one stream. `abort` closes the connection of the stream's client."""
        queue = EventQueue(self, abort)
        self._queues.add(queue)
        return queue

    def close(self, queue: "EventQueue") -> None:
        """Forgets a queue with its events."""
        self._queues.discard(queue)
        self.size -= queue.size

    def grow(self, size: int) -> None:
        """Counts events that a queue was given, and ends the largest stream if they are too many."""
        self.size += size
        if self.size > self._limit:
            max(self._queues, key=lambda queue: queue.size).abort()


class EventQueue:
    """Events of a stream that its client has not read.

    Attributes:
        size: their bytes.
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
        """Tells that no event will follow."""
        self._is_complete = True
        self._changed.set()

    async def parts(self) -> AsyncGenerator[bytes]:
        """Yields the events until the queue is complete. Those that wait are joined to parts of some 64 KiB."""
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
