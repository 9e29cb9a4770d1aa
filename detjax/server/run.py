"""The server as a process: its socket, its signals and its shutdown."""

import asyncio
import contextlib
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Final

import uvicorn
from starlette.applications import Starlette

_SECONDS_AFTER_STOP: Final = 5
"""Seconds in which clients are told that their requests were ended."""


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket bound to an address, on which nobody is answered yet. Port 0 takes any that is free.

    Raises:
        OSError: the address is taken, or it is not an address of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except (OSError, OverflowError) as error:
        bound.close()
        reason = getattr(error, "strerror", None) or error
        raise OSError(f"{host} port {port}: {reason}; accepted: a free port of this machine") from error
    return bound


@contextlib.contextmanager
def _signals_ignored_at_the_end() -> Iterator[None]:
    """A context in which uvicorn may repeat the signals that ended it.

    uvicorn raises them again after its shutdown. They would end the process before the engine is closed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


class Server(uvicorn.Server):
    """Serves an application until `should_exit` is set, which SIGINT and SIGTERM do.

    Then it admits no further requests, and gives those in flight a grace period before it ends them. A second signal
    ends it at once.
    """

    def __init__(self, app: Starlette, *, grace: float = 30) -> None:
        """A server of what `create_app` returned. Its grace period has `grace` seconds."""
        end = int(grace) + _SECONDS_AFTER_STOP
        super().__init__(
            uvicorn.Config(app, log_level="warning", lifespan="off", server_header=False, timeout_graceful_shutdown=end)
        )
        self._guard, self._grace = app.state.guard, grace

    def serve_on(self, bound: socket.socket, on_ready: Callable[[], None] = lambda: None) -> None:
        """Serves on a socket until the end, and calls `on_ready` as soon as clients are answered."""
        self._on_ready = on_ready
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:  # each client takes a descriptor, and shells often leave a process 1024
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        with _signals_ignored_at_the_end():
            self.run(sockets=[bound])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._guard.drain()
        stopping = asyncio.get_running_loop().call_later(self._grace, self._guard.stop)
        try:
            await super().shutdown(sockets)
        finally:
            stopping.cancel()
