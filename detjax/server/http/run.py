"""The server as a process: its socket, its signals and its shutdown."""

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

from detjax.server.http.connections import Connection, ConnectionConfig
from detjax.server.http.hosts import default_hosts, is_loopback
from detjax.server.http.settings import ConnectionSettings, Settings

EXIT_CODE_OF_A_FAILED_ENGINE: Final = 70
"""The code that sysexits.h has for a defect of the program. Supervisors restart the server when they see it."""
_SECONDS_AFTER_STOP: Final = 5
"""Seconds in which clients are told that their requests were ended."""
_SECONDS_AFTER_SECOND_SIGNAL: Final = 0.5
"""The same after a second signal."""
_OTHER_FILES: Final = 100
"""Descriptors that the process needs beside its connections."""
_log: Final = logging.getLogger(__name__)


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


def url(bound: socket.socket, settings: ConnectionSettings) -> str:
    """The address of a server on a socket, as clients on this machine write it."""
    address, port = bound.getsockname()[:2]
    scheme = "http" if settings.certificate is None else "https"
    return f"{scheme}://[{address}]:{port}" if ":" in address else f"{scheme}://{address}:{port}"


def protected(settings: Settings, bound: socket.socket) -> Settings:
    """Returns the settings with the hosts that a server on a socket accepts, and warns where everybody may use it."""
    address = bound.getsockname()[0]
    if not settings.api_keys and not is_loopback(address):
        _log.warning(
            "clients on other machines can use the server without a key: it listens on %s. Set a key with --api-key or "
            "DETJAX_API_KEY, or listen on 127.0.0.1",
            address,
        )
    hosts = default_hosts(address, needs_key=bool(settings.api_keys))
    if settings.allowed_hosts is not None:
        hosts = (*settings.allowed_hosts, *(hosts or ()))
    return dataclasses.replace(settings, allowed_hosts=hosts)


class Server(uvicorn.Server):
    """Serves an application until `should_exit` is set, which SIGINT and SIGTERM do, or until the engine fails.

    Then it admits no further requests, and gives those in flight a grace period before it ends them. A second signal
    ends them at once.

    Attributes:
        exit_code: the exit code for the process: 0 after one signal, 128 plus the signal's number after a second one,
            and `EXIT_CODE_OF_A_FAILED_ENGINE` after the engine failed.
    """

    def __init__(self, app: Starlette, settings: ConnectionSettings | None = None) -> None:
        """A server of what `create_app` returned."""
        self._settings = settings or ConnectionSettings()
        self._limits = ConnectionConfig(app, self._settings, self._settings.grace + _SECONDS_AFTER_STOP)
        super().__init__(self._limits)
        self._engine, self._guard = app.state.engine, app.state.guard
        self.exit_code = 0

    def serve_on(self, bound: socket.socket, on_ready: Callable[[], None] = lambda: None) -> int:
        """Serves on a socket until the end, and calls `on_ready` as soon as clients are answered.

        Returns:
            The exit code for the process; see `exit_code`.
        """
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
        """Returns whether the server has to end. uvicorn asks ten times a second."""
        return self._has_failed_engine() or await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Requests of a failed engine have ended with it; their clients are still reading that.
        has_failed = self._has_failed_engine()
        grace = 0 if has_failed else self._settings.grace
        if self._guard.in_flight and not has_failed:
            _log.info("the server ends; %d samples in flight have %g s", self._guard.in_flight, grace)
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
            self._has_failed_engine()  # it may have failed meanwhile

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handles SIGINT and SIGTERM: the first one begins the grace period, and the second one ends it."""
        self._captured_signals.append(sig)
        if not self.should_exit:
            self.should_exit = True
        elif not self.exit_code:
            self.exit_code = 128 + sig
            self._event_loop.call_soon_threadsafe(self._end_grace)
            # A thread that tokenizes a long prompt would hold up the process.
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
        """Whether the engine has failed, which is logged once and decides the exit code."""
        if self._engine.failure is None:
            return False
        if self.exit_code != EXIT_CODE_OF_A_FAILED_ENGINE:
            self.exit_code = EXIT_CODE_OF_A_FAILED_ENGINE
            _log.critical("the server ends with exit code %d, because the engine failed", self.exit_code)
        return True


def _affordable_connections(wanted: int) -> int:
    """Raises the process's limit of open files, and returns how many connections it leaves room for.

    Each connection takes a descriptor, and shells often leave a process 1024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    if soft == resource.RLIM_INFINITY:
        return wanted
    return max(1, min(wanted, soft - _OTHER_FILES))
