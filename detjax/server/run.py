"""The process's part of serving: its socket, its signals, its orderly end."""

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

_AFTER_STOP: Final = 5
"""Seconds for clients to be told, once what was on its way has been ended."""


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket at this address, on which nobody is answered yet; port 0: any that is free.

    Raises:
        OSError: the address is taken, or not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    own = socket.socket(family)
    own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        own.bind((host, port))
    except (OSError, OverflowError) as error:
        own.close()
        why = getattr(error, "strerror", None) or error
        raise OSError(f"{host} port {port}: {why}; accepted: a free port of this machine") from error
    return own


@contextlib.contextmanager
def _signals_are_not_the_end() -> Iterator[None]:
    """uvicorn raises again, when it has ended, what it was told to end by: there is more to be closed than it knows."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Server(uvicorn.Server):
    """Serves an application until `should_exit` is set, which SIGINT and SIGTERM do.

    No more requests are admitted then; those on their way have a while until they are told that the server stops. A
    second signal ends it at once.
    """

    def __init__(self, app: Starlette, *, grace: float = 30) -> None:
        """A server of what `create_app` returned, which gives requests `grace` seconds at its end."""
        end = int(grace) + _AFTER_STOP
        super().__init__(
            uvicorn.Config(app, log_level="warning", lifespan="off", server_header=False, timeout_graceful_shutdown=end)
        )
        self._guard, self._grace = app.state.guard, grace

    def serve_on(self, own: socket.socket, on_ready: Callable[[], None] = lambda: None) -> None:
        """Serves on this socket, to the end; calls `on_ready` once clients are answered."""
        self._on_ready = on_ready
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:  # each client takes a descriptor, and shells often leave a process 1024
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        with _signals_are_not_the_end():
            self.run(sockets=[own])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._guard.drain()
        ending = asyncio.get_running_loop().call_later(self._grace, self._guard.stop)
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()
