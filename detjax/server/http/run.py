"""The server process: its socket, signals and shutdown."""

import asyncio
import contextlib
import dataclasses
import logging
import os
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Final, cast

import uvicorn
from starlette.applications import Starlette

from detjax.engine.watchdog import EXIT_CODE_OF_A_FAILED_ENGINE
from detjax.server.http.connections import Connection, ConnectionConfig
from detjax.server.http.hosts import default_hosts, is_loopback
from detjax.server.http.settings import ConnectionSettings, Settings

_SECONDS_AFTER_STOP: Final = 5
"""Seconds for clients to receive the error of their cancelled requests."""
_SECONDS_AFTER_SECOND_SIGNAL: Final = 0.5
"""The same after a second signal."""
_OTHER_FILES: Final = 100
"""File descriptors that the process needs in addition to its connections."""
_log: Final = logging.getLogger(__name__)


def bound_socket(host: str, port: int) -> socket.socket:
    """Returns a socket that is bound to an address but does not listen yet. Port 0 picks a free port.

    Raises:
        OSError: the address is in use, or is not an address of this machine.
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
    """Ignores signals that uvicorn raises again after its shutdown, which would end the process too early."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def url(bound: socket.socket, settings: ConnectionSettings) -> str:
    """Returns the URL of a server on a socket, for clients on this machine."""
    address, port = bound.getsockname()[:2]
    scheme = "http" if settings.certificate is None else "https"
    return f"{scheme}://[{address}]:{port}" if ":" in address else f"{scheme}://{address}:{port}"


def protected(settings: Settings, bound: socket.socket) -> Settings:
    """Returns the settings with the hosts that a server on a socket accepts. Warns if anyone can use the server."""
    address = bound.getsockname()[0]
    if not settings.api_keys and not is_loopback(address):
        _log.warning(
            "anyone on the network can use the server without a key: it listens on %s. Set a key with --api-key or "
            "DETJAX_API_KEY, or listen on 127.0.0.1",
            address,
        )
    hosts = default_hosts(address, needs_key=bool(settings.api_keys))
    if settings.allowed_hosts is not None:
        hosts = (*settings.allowed_hosts, *(hosts or ()))
    return dataclasses.replace(settings, allowed_hosts=hosts)


class Server(uvicorn.Server):
    """Serves an application until `should_exit` is set, for example by SIGINT or SIGTERM, or until the engine fails.

    It then stops admitting requests, and cancels requests in flight after a grace period, or immediately at a second
    signal.

    Attributes:
        exit_code: the process's exit code: 0 after one signal, 128 plus the signal number after two, and
            `EXIT_CODE_OF_A_FAILED_ENGINE` after a failure of the engine.
    """

    def __init__(self, app: Starlette, settings: ConnectionSettings | None = None) -> None:
        """Wraps an application from `create_app`."""
        self._settings = settings or ConnectionSettings()
        self._limits = ConnectionConfig(app, self._settings, self._settings.grace + _SECONDS_AFTER_STOP)
        super().__init__(self._limits)
        self._engine, self._guard = app.state.engine, app.state.guard
        self.exit_code = 0

    def serve_on(self, bound: socket.socket, on_ready: Callable[[], None] = lambda: None) -> int:
        """Serves on a socket, calls `on_ready` once clients can connect, and returns `exit_code` at the end."""
        self._on_ready = on_ready
        self._limits.max_connections = _affordable_connections(self._settings.max_connections)
        with _signals_ignored_at_the_end():
            self.run(sockets=[bound])
        return self.exit_code

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._event_loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self._on_ready()

    async def on_tick(self, counter: int) -> bool:
        """Returns whether the server should shut down; uvicorn calls this ten times a second."""
        return self._has_failed_engine() or await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # A failed engine has ended its requests; clients only have to read the error.
        has_failed = self._has_failed_engine()
        grace = 0 if has_failed else self._settings.grace
        if self._guard.in_flight and not has_failed:
            _log.info("shutting down; %d samples in flight have %g s to finish", self._guard.in_flight, grace)
        self._guard.drain()
        timers = [
            self._event_loop.call_later(grace, self._guard.stop),
            self._event_loop.call_later(grace + _SECONDS_AFTER_STOP, self._abort_connections),
        ]
        try:
            await super().shutdown(sockets)
        finally:
            for timer in timers:
                timer.cancel()
            self._has_failed_engine()  # it may have failed during the shutdown

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handles SIGINT and SIGTERM: the first begins the grace period, the second ends it."""
        self._captured_signals.append(sig)
        if not self.should_exit:
            self.should_exit = True
        elif not self.exit_code:
            self.exit_code = 128 + sig
            self._event_loop.call_soon_threadsafe(self._end_grace)
            # A thread that tokenizes a long prompt could delay the exit.
            last_resort = threading.Timer(_SECONDS_AFTER_STOP, os._exit, [self.exit_code])
            last_resort.daemon = True
            last_resort.start()

    def _end_grace(self) -> None:
        self._guard.stop()
        self._event_loop.call_later(_SECONDS_AFTER_SECOND_SIGNAL, self._abort_connections)

    def _abort_connections(self) -> None:
        for connection in list(self.server_state.connections):
            cast(Connection, connection).abort()

    def _has_failed_engine(self) -> bool:
        """Returns whether the engine has failed; the first time, logs it and sets the exit code."""
        if self._engine.failure is None:
            return False
        if self.exit_code != EXIT_CODE_OF_A_FAILED_ENGINE:
            self.exit_code = EXIT_CODE_OF_A_FAILED_ENGINE
            _log.critical("exiting with code %d because the engine failed", self.exit_code)
        return True


def _affordable_connections(wanted: int) -> int:
    """Raises the process's limit on open files, and returns how many connections fit under it.

    Each connection needs a file descriptor, and shells often limit processes to 1024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    if soft == resource.RLIM_INFINITY:
        return wanted
    return max(1, min(wanted, soft - _OTHER_FILES))
