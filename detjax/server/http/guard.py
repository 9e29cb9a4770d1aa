"""Protection of requests from each other: a limit on samples in flight, timeouts and cancellation."""

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator
from typing import Any

from starlette.types import Receive

from detjax.server.http.backlog import Backlog
from detjax.server.http.errors import ApiError


class ClientGone(Exception):
    """The client has disconnected."""


class Admission:
    """The admitted samples of one request, released one by one as they end, or all at once when the request ends.

    Attributes:
        deadline: the request's deadline on the event loop's clock.
    """

    def __init__(self, guard: "Guard", samples: int, deadline: float) -> None:
        self.deadline = deadline
        self._guard, self._samples = guard, samples
        guard.in_flight += samples

    def give_back(self, samples: int = 1) -> None:
        """Releases samples that have ended, so that others can start however slowly the client reads."""
        samples = min(samples, self._samples)
        self._samples -= samples
        self._guard.in_flight -= samples

    def close(self) -> None:
        """Releases the remaining samples."""
        self.give_back(self._samples)


class Guard:
    """Admits requests, and cancels those that time out, lose their client, or outlast the grace period of a shutdown.

    Attributes:
        capacity: maximum number of samples in flight.
        in_flight: admitted samples that have not ended.
        is_draining: True if the guard rejects all new requests.
        backlog: the buffered events of streams.
    """

    def __init__(self, capacity: int, seconds: float, max_pending_bytes: int = 64 << 20) -> None:
        """Limits samples in flight, seconds per request, and the bytes of all streams that wait for slow clients."""
        self.capacity = capacity
        self.backlog = Backlog(max_pending_bytes)
        self.in_flight = 0
        self.is_draining = False
        self._seconds = seconds
        self._stopped: asyncio.Future[None] | None = None
        self._is_stopped = False

    @contextlib.contextmanager
    def admitted(self, samples: int) -> Iterator[Admission]:
        """Counts samples as in flight until they are released, at the latest at the end of the context.

        Raises an ApiError if the samples exceed the capacity, or the server is shutting down.
        """
        if self.is_draining:
            raise ApiError(
                503,
                "the server is shutting down; send the request to another server",
                headers={"Connection": "close"},
            )
        if samples > self.capacity:
            raise ApiError(
                400, f"the request has {samples} samples; accepted: up to {self.capacity} at once", param="n"
            )
        if self.in_flight + samples > self.capacity:
            raise ApiError(
                429,
                f"the queue is full: {self.in_flight} samples are in flight and the request has {samples}; accepted: "
                f"up to {self.capacity} in total. Retry later.",
                code="queue_full",
                headers={"Retry-After": "1"},
            )
        admission = Admission(self, samples, asyncio.get_running_loop().time() + self._seconds)
        try:
            yield admission
        finally:
            admission.close()

    def drain(self) -> None:
        """Stops admitting requests."""
        self.is_draining = True

    def stop(self) -> None:
        """Cancels all requests in flight."""
        self._is_stopped = True
        if self._stopped is not None and not self._stopped.done():
            self._stopped.set_result(None)

    async def watch[T](self, receive: Receive, work: Coroutine[Any, Any, T], deadline: float) -> T:
        """Returns the result of `work`, or cancels it when nobody needs the result any more.

        Raises:
            ClientGone: a disconnect arrived on the ASGI channel `receive`.
            ApiError: the deadline has passed, or the server is stopping.
        """
        loop = asyncio.get_running_loop()
        if self._stopped is None:
            self._stopped = loop.create_future()
            if self._is_stopped:
                self._stopped.set_result(None)
        working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnection(receive))
        try:
            await asyncio.wait(
                {working, leaving, self._stopped},
                timeout=max(0, deadline - loop.time()),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if working.done():
                return working.result()
            if leaving.done():
                raise ClientGone
            if self._stopped.done():
                raise ApiError(
                    503, "the server is shutting down and could not finish the request; send it to another server"
                )
            raise ApiError(
                504,
                f"the request took longer than {self._seconds:g} s, the server's limit. Ask for fewer tokens.",
                code="timeout",
            )
        finally:
            for task in (working, leaving):
                task.cancel()
            await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnection(receive: Receive) -> None:
    """Waits until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass
