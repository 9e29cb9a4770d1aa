"""What keeps one request from harming the others: room for so many, a time limit, and an eye on who is still there."""

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator
from typing import Any

from starlette.types import Receive

from detjax.server.errors import ApiError


class ClientGone(Exception):
    """Nobody is there to be answered."""


class Guard:
    """Admits requests, and ends those that take too long, whose client has left, or that a shutdown does not wait for.

    Attributes:
        capacity: samples on their way at most.
        on_their_way: samples that were admitted.
        is_draining: no more are admitted.
    """

    def __init__(self, capacity: int, seconds: float) -> None:
        self.capacity = capacity
        self.on_their_way = 0
        self.is_draining = False
        self._seconds = seconds
        self._stopped: asyncio.Future[None] | None = None
        self._is_stopped = False

    @contextlib.contextmanager
    def admitted(self, samples: int) -> Iterator[float]:
        """A context in which so many samples are on their way, and until when they may be, by the loop's clock.

        Raises:
            ApiError: there is no room for them, or no more are admitted.
        """
        if self.is_draining:
            raise ApiError(503, "the server is shutting down; ask another one", headers={"Connection": "close"})
        if samples > self.capacity:
            raise ApiError(
                400, f"the request has {samples} samples; accepted: up to {self.capacity} at once", param="n"
            )
        if self.on_their_way + samples > self.capacity:
            raise ApiError(
                429,
                f"the queue is full: {self.on_their_way} samples are on their way, of {self.capacity}; ask again",
                code="queue_full",
                headers={"Retry-After": "1"},
            )
        self.on_their_way += samples
        try:
            yield asyncio.get_running_loop().time() + self._seconds
        finally:
            self.on_their_way -= samples

    def drain(self) -> None:
        """Admits no more."""
        self.is_draining = True

    def stop(self) -> None:
        """Ends what is on its way."""
        self._is_stopped = True
        if self._stopped is not None and not self._stopped.done():
            self._stopped.set_result(None)

    async def watch[T](self, receive: Receive, work: Coroutine[Any, Any, T], until: float) -> T:
        """What `work` returns. It is cancelled where nobody waits for it any more.

        Raises:
            ClientGone: the client has left.
            ApiError: the time is over, or the server stops.
        """
        loop = asyncio.get_running_loop()
        if self._stopped is None:
            self._stopped = loop.create_future()
            if self._is_stopped:
                self._stopped.set_result(None)
        working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait(
                {working, leaving, self._stopped},
                timeout=max(0, until - loop.time()),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if working.done():
                return working.result()
            if leaving.done():
                raise ClientGone
            if self._stopped.done():
                raise ApiError(503, "the server is shutting down before the request was answered")
            raise ApiError(504, f"the request took longer than {self._seconds:g} s, the server's limit", code="timeout")
        finally:
            for task in (working, leaving):
                task.cancel()
            await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
