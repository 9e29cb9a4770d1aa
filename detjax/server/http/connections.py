"""Client connections: limits on their number, and timeouts for reading and writing."""

import asyncio
import json
import ssl
from collections.abc import Callable
from typing import Any, Final

import uvicorn
from starlette.types import ASGIApp, Scope
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from detjax.server.http.settings import ConnectionSettings

_ABORT: Final = "detjax.abort"
"""Key of the function in a request's state that closes its connection."""
_MIN_PROGRESS: Final = 1 << 14
"""Bytes that a client must read within `write_seconds`, so that it cannot hold a connection by reading single bytes."""
_MESSAGE: Final = "the server has reached its maximum number of connections; connect again later"
_BODY: Final = json.dumps(
    {"error": {"message": _MESSAGE, "type": "server_error", "param": None, "code": "too_many_connections"}}
).encode()
_FULL: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(_BODY), _BODY)
)


def abort_of(scope: Scope) -> Callable[[], None]:
    """Returns a function that closes a request's connection immediately, or does nothing under another ASGI server."""
    return scope.get("state", {}).get(_ABORT, lambda: None)


def tls_context(settings: ConnectionSettings) -> ssl.SSLContext | None:
    """Returns the server's TLS context, or None if the settings name no certificate.

    Raises:
        ValueError: the certificate or its key is not readable, or they do not match.
    """
    if settings.certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without a password, OpenSSL would ask for an encrypted key's password on the terminal.
        context.load_cert_chain(settings.certificate, settings.key, password=b"")
    except (OSError, ValueError) as error:  # OSError includes ssl.SSLError
        files = f"{str(settings.certificate)!r}" + (f" with key {str(settings.key)!r}" if settings.key else "")
        raise ValueError(
            f"the TLS certificate {files} cannot be used ({error.args[-1]}); accepted: files in PEM format with a "
            "certificate and its private key, not encrypted"
        ) from error
    return context


class ConnectionConfig(uvicorn.Config):
    """uvicorn's configuration for connections with limits.

    Attributes:
        settings: the limits.
        max_connections: maximum number of open connections.
        waiting: the connections without a request in progress, longest waiting first.
    """

    def __init__(self, app: ASGIApp, settings: ConnectionSettings, shutdown_seconds: float) -> None:
        """A configuration whose server waits up to `shutdown_seconds` for requests in flight when it shuts down."""
        self.settings = settings
        self.max_connections = settings.max_connections
        self.waiting: dict[Connection, None] = {}
        super().__init__(
            app,
            http=Connection,
            ws="none",  # a connection that switches protocols would escape the limits
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=settings.idle_seconds,  # pyright: ignore[reportArgumentType] - passed on to call_later
            timeout_graceful_shutdown=int(shutdown_seconds) + 1,
        )

    def load(self) -> None:
        """Loads uvicorn's configuration, and sets up TLS here, since uvicorn might ask for a password."""
        super().load()
        self.ssl = tls_context(self.settings)


class Connection(H11Protocol):
    """A client's connection.

    It is closed if request headers take too long, if it is idle for too long, or if the client does not read its
    answer. A connection without a request in progress may be closed to make room for a new one.
    """

    def __init__(
        self,
        config: ConnectionConfig,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state | {_ABORT: self.abort}, _loop)
        self._limits = config
        self._headers_due: asyncio.TimerHandle | None = None
        self._progress_due: asyncio.TimerHandle | None = None
        self._unread = 0
        """Bytes in the write buffer at the last check."""

    def abort(self) -> None:
        """Closes the connection without sending the write buffer."""
        if self.transport is not None:
            self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections and not self._make_room():
            transport.write(_FULL)
            self._close()
            return
        self._note_state()

    def connection_lost(self, exc: Exception | None) -> None:
        self._limits.waiting.pop(self, None)
        for timer in (self._headers_due, self._progress_due):
            if timer is not None:
                timer.cancel()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._note_state()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note_state()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_progress()

    def resume_writing(self) -> None:
        if self._progress_due is not None:
            self._progress_due.cancel()
            self._progress_due = None
        super().resume_writing()

    # --- room for other connections -----------------------------------------------------------------------------------

    def _make_room(self) -> bool:
        """Closes the connection that has waited longest for a request, if any, and returns whether there was one."""
        longest = next(iter(self._limits.waiting), None)
        if longest is None:
            return False
        self._limits.waiting.pop(longest)
        longest.abort()
        return True

    # --- time limits --------------------------------------------------------------------------------------------------

    def _note_state(self) -> None:
        """Tracks whether the connection waits for a request, and starts or cancels the timeout for its headers.

        Between two requests uvicorn's keep-alive timeout applies until the first byte arrives.
        """
        if self.cycle is not None and not self.cycle.response_complete:
            self._limits.waiting.pop(self, None)
            if self._headers_due is not None:
                self._headers_due.cancel()
                self._headers_due = None
            return
        if self.transport.is_closing():
            self._close()
            return
        self._limits.waiting.setdefault(self)
        if self._headers_due is None and self.timeout_keep_alive_task is None:
            self._headers_due = self.loop.call_later(self._limits.settings.header_seconds, self._close)

    def _expect_progress(self) -> None:
        if self._progress_due is None:
            self._unread = self.transport.get_write_buffer_size()
            self._progress_due = self.loop.call_later(self._limits.settings.write_seconds, self._check_progress)

    def _check_progress(self) -> None:
        self._progress_due = None
        if self.transport.get_write_buffer_size() > self._unread - _MIN_PROGRESS:
            self.abort()
        else:
            self._expect_progress()

    def _close(self) -> None:
        """Closes the connection, and leaves the client time to read the write buffer."""
        self.transport.close()
        if self._headers_due is not None:
            self._headers_due.cancel()
        self._headers_due = self.loop.call_later(self._limits.settings.write_seconds, self.abort)
