"""HTTP over plain sockets: truncated requests, answers that are read slowly or never, and bodies of any bytes."""

import asyncio
import contextlib
import dataclasses
import json
import socket
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

_LONGEST_LINE: Final = 1 << 26
JSON: Final = {"Content-Type": "application/json"}


@dataclasses.dataclass(frozen=True)
class Answer:
    """A response.

    Attributes:
        status: its status; 0 if the server closed the connection without one.
        headers: its headers, with names in lower case.
        body: the received part of its body.
        is_whole: whether the body is complete.
        seconds: the time from the connection's start to the body's end.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes
    is_whole: bool
    seconds: float

    def json(self) -> Any:
        """The body's content."""
        return json.loads(self.body)


def written(path: str, body: Any = None, method: str | None = None, headers: Mapping[str, str] | None = None) -> bytes:
    """Returns a request's bytes. Bodies other than bytes are written as JSON; the default method is GET or POST."""
    content = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = {"Host": "localhost", "Connection": "close"}
    if body is not None:
        fields |= JSON | {"Content-Length": str(len(content))}
    fields |= headers or {}
    lines = [f"{method or ('GET' if body is None else 'POST')} {path} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in fields.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace") + content


async def ask(port: int, request: bytes, seconds: float = 600) -> Answer:
    """Sends a request and returns its answer.

    Raises:
        TimeoutError: no answer in time.
        OSError: the server could not be reached.
    """
    start = time.monotonic()
    async with asyncio.timeout(seconds), connected(port) as (reader, writer):
        writer.write(request)
        # A server that refuses a request need not read all of it.
        sending = asyncio.create_task(_drained(writer))
        try:
            status, headers = await read_head(reader)
            body, is_whole = await _read_body(reader, headers)
        finally:
            sending.cancel()
    return Answer(status, headers, body, is_whole and status > 0, time.monotonic() - start)


@contextlib.asynccontextmanager
async def connected(
    port: int, receive_buffer: int | None = None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection that is closed at the end even with data in flight. A small buffer makes the server wait."""
    connection = socket.socket()
    connection.setblocking(False)
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    try:
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
        limit = _LONGEST_LINE if receive_buffer is None else receive_buffer
        reader, writer = await asyncio.open_connection(sock=connection, limit=limit)
    except BaseException:
        connection.close()
        raise
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Returns a response's status and headers; 0 and an empty mapping if the connection ended before."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        fields = (line.partition(":") for line in lines if line)
        return int(first.split()[1]), {name.lower(): value.strip() for name, _, value in fields}
    except (asyncio.IncompleteReadError, ConnectionError):
        return 0, {}


async def _read_body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> tuple[bytes, bool]:
    """Returns the received part of a response's body, and whether it is complete."""
    parts: list[bytes] = []
    try:
        if headers.get("transfer-encoding") == "chunked":
            while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
                parts.append(await reader.readexactly(size))
                await reader.readexactly(2)
        elif "content-length" in headers:
            parts.append(await reader.readexactly(int(headers["content-length"])))
        else:
            parts.append(await reader.read())
    except (asyncio.IncompleteReadError, ConnectionError):
        return b"".join(parts), False
    return b"".join(parts), True


async def _drained(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        await writer.drain()
