"""A server of made-up responses, for tests of connections and signals that need no model.

`python -m tests.server.stub_server` prints its port and serves until a signal ends it.
"""

import asyncio
import contextlib
import sys
import threading
from collections.abc import AsyncGenerator, Iterator
from types import SimpleNamespace
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from detjax.server import ConnectionSettings, LogSettings, Server, bound_socket, logging_to_stderr
from detjax.server.http.errors import to_api_error
from detjax.server.http.guard import ClientGone, Guard
from detjax.server.http.streaming import EventStream
from tests.server.running_server import wait_until

EVENT = b"~" * (1 << 16)


def stub_app(guard: Guard) -> Starlette:
    """An application whose streams have as many events as the query says, of 64 KiB each, and then one sample less.

    `/held` is a stream that never ends after its first event, `/waits` a response that never comes, and `/whole` one
    that has as many bytes as the query says.
    """

    async def events(count: int, admission: Any) -> AsyncGenerator[bytes]:
        for _ in range(count):
            yield EVENT
        admission.give_back()

    async def endless() -> AsyncGenerator[bytes]:
        await asyncio.Event().wait()
        yield b""

    def respond(stream: AsyncGenerator[bytes], stack: contextlib.ExitStack, deadline: float) -> Response:
        return EventStream(guard, b"first\n", stream, deadline, stack.pop_all())

    async def stream(request: Request) -> Response:
        with contextlib.ExitStack() as stack:
            admission = stack.enter_context(guard.admitted(1))
            chunks = events(int(request.query_params["events"]), admission)
            return respond(chunks, stack, admission.deadline)

    async def held(request: Request) -> Response:
        with contextlib.ExitStack() as stack:
            admission = stack.enter_context(guard.admitted(1))
            return respond(endless(), stack, admission.deadline)

    async def waits(request: Request) -> Response:
        try:
            with guard.admitted(1) as admission:
                return await guard.watch(request.receive, asyncio.Event().wait(), admission.deadline)  # pyright: ignore
        except ClientGone:
            return Response(status_code=499)
        except Exception as error:
            return to_api_error(error).response()

    async def whole(request: Request) -> Response:
        return Response(b"x" * int(request.query_params["bytes"]))

    routes = [Route(f"/{handler.__name__}", handler) for handler in (stream, held, waits, whole)]
    app = Starlette(routes=routes)
    app.state.guard, app.state.engine = guard, SimpleNamespace(failure=None)
    return app


@contextlib.contextmanager
def stub_serving(guard: Guard | None = None, **settings: Any) -> Iterator[tuple[int, Server, Guard]]:
    """A server in a thread: its port, itself and its guard."""
    guard = guard or Guard(capacity=1000, seconds=10_000)
    server = Server(stub_app(guard), ConnectionSettings(**{"grace": 0.0} | settings))
    with contextlib.closing(bound_socket("127.0.0.1", 0)) as bound:
        thread = threading.Thread(target=server.serve_on, args=(bound,))
        thread.start()
        wait_until(lambda: server.started)
        try:
            yield bound.getsockname()[1], server, guard
        finally:
            server.should_exit = True
            thread.join()


if __name__ == "__main__":
    socket = bound_socket("127.0.0.1", 0)
    running = Server(stub_app(Guard(capacity=1000, seconds=10_000)), ConnectionSettings(grace=10_000))
    with logging_to_stderr(LogSettings(level="warning")):
        sys.exit(running.serve_on(socket, lambda: print(socket.getsockname()[1], flush=True)))
