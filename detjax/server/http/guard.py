"""Protection of requests from one another: a limit on samples in flight, a time limit, and cancellation."""

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator
from typing import Any

from starlette.types import Receive

from detjax.server.http.backlog import Backlog
from detjax.server.http.errors import ApiError


class ClientGone(Exception):
    """The client disconnected, so nobody waits for the response."""


class Admission:
    """Samples that a guard admitted. A request gives them back one by one as they end, and the rest when it ends.

    Attributes:
        deadline: when the request's time is over, by the loop's clock.
    """

    def __init__(self, guard: "Guard", samples: int, deadline: float) -> None:
        self.deadline = deadline
        self._guard, self._samples = guard, samples
        guard.in_flight += samples

    def give_back(self, samples: int = 1) -> None:
        """Tells that samples have ended, so that others take their place however slowly the client reads."""
        samples = min(samples, self._samples)
        self._samples -= samples
        self._guard.in_flight -= samples

    def close(self) -> None:
        """Gives back the samples that are left."""
        self.give_back(self._samples)


class Guard:
    """Admits requests, and ends those that take too long, lose their client, or outlast a shutdown's grace period.

    Attributes:
        capacity: samples in flight at most.
        in_flight: samples that were admitted and have not ended.
        is_draining: whether the guard refuses all further requests.
        backlog: events of streams that wait for their clients.
    """

    def __init__(self, capacity: int, seconds: float, max_pending_bytes: int = 64 << 20) -> None:
        """A guard that admits `capacity` samples at once and gives each request so many seconds.

        Streams together may have `max_pending_bytes` bytes that wait for their clients.
        """
        self.capacity = capacity
        self.backlog = Backlog(max_pending_bytes)
        self.in_flight = 0
        self.is_draining = False
        self._seconds = seconds
        self._stopped: asyncio.Future[None] | None = None
        self._is_stopped = False

    @contextlib.contextmanager
    def admitted(self, samples: int) -> Iterator[Admission]:
        """A context in which the samples count as in flight until they are given back.

        Raises:
            ApiError: the samples do not fit, or the server is shutting down.
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
                f"up to {self.capacity} in all. Send the request again later.",
                code="queue_full",
                headers={"Retry-After": "1"},
            )
        admission = Admission(self, samples, asyncio.get_running_loop().time() + self._seconds)
        try:
            yield admission
        finally:
            admission.close()

    def drain(self) -> None:
        """Admits no further requests."""
        self.is_draining = True

    def stop(self) -> None:
        """Ends all requests in flight."""
        self._is_stopped = True
        if self._stopped is not None and not self._stopped.done():
            self._stopped.set_result(None)

    async def watch[T](self, receive: Receive, work: Coroutine[Any, Any, T], deadline: float) -> T:
        """Returns the result of `work`, which is cancelled when its result is no longer needed.

        Args:
            receive: the request's ASGI channel, which tells when the client disconnects.
            work: the computation of the response, or of a part of it.
            deadline: when the request's time is over, by the loop's clock.

        Raises:
            ClientGone: the client disconnected.
            ApiError: the deadline passed, or the server stopped.
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
                    503, "the server is shutting down and did not finish the request; send it to another server"
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
