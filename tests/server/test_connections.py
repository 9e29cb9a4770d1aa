"""Connections have limits: in number, and in the time that clients take to send, to read and to do nothing."""

import asyncio
import contextlib
import http.client
import signal
import socket
import ssl
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from detjax.server import ConnectionSettings, tls_context
from detjax.server.http.connections import Connection
from detjax.server.http.guard import Guard
from tests.server.stub_server import EVENT, stub_serving, wait_until
from tests.support.waits import HANGS_AFTER

SOON = 0.2
"""Seconds of a time limit that a test waits for."""


def connect(port: int, *, receive_buffer: int | None = None) -> socket.socket:
    client = socket.socket()
    client.settimeout(HANGS_AFTER)
    if receive_buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    try:
        client.connect(("127.0.0.1", port))
    except OSError:
        client.close()
        raise
    return client


def ask(port: int, path: str, **options: Any) -> socket.socket:
    """A connection on which a request was sent."""
    client = connect(port, **options)
    client.sendall(get(path))
    return client


def answered(port: int, request: bytes) -> socket.socket:
    """Opens a connection with an answer that has begun, and reads nothing of it.

    Where a time limit is short and the machine busy, the limit may end a connection before its request is sent. Then
    another one takes its place.
    """
    connected: list[socket.socket] = []

    def is_answered() -> bool:
        connected.append(connect(port))
        with contextlib.suppress(ConnectionError):
            connected[-1].sendall(request)
            if connected[-1].recv(1, socket.MSG_PEEK):
                return True
        connected[-1].close()
        return False

    wait_until(is_answered)
    return connected[-1]


def get(path: str) -> bytes:
    """A request of a connection that may have others."""
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


def read_to_end(client: socket.socket) -> bytes:
    """All bytes until the connection ends. A reset is an end too."""
    content = bytearray()
    with contextlib.suppress(ConnectionResetError):
        while part := client.recv(1 << 20):
            content += part
    return bytes(content)


def read_stream(client: socket.socket) -> bytes:
    """The bytes of a stream until its end, or until the connection's."""
    body = bytearray()
    with contextlib.suppress(ConnectionResetError):
        while not body.endswith(b"\r\n0\r\n\r\n") and (part := client.recv(1 << 20)):
            body += part
    return bytes(body)


def is_disconnected(client: socket.socket, sent: bytes) -> bool:
    """Returns whether a non-blocking client sees the end of its connection when it sends more."""
    try:
        client.send(sent)
        return not client.recv(1 << 20)
    except BlockingIOError:
        return False
    except OSError:
        return True


def answer(port: int, path: str = "/whole?bytes=3") -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HANGS_AFTER)
    with contextlib.closing(connection):
        connection.request("GET", path)
        return connection.getresponse().read()


def test_a_connection_without_a_request_makes_room_for_a_new_one() -> None:
    with stub_serving(max_connections=2, header_seconds=HANGS_AFTER) as (port, server, _), connect(port) as oldest:
        with connect(port) as newer:
            wait_until(lambda: len(server.server_state.connections) == 2)
            assert answer(port) == b"xxx"
            assert read_to_end(oldest) == b""
            newer.sendall(b"GET /whole?bytes=3 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert read_to_end(newer).endswith(b"xxx")


def test_a_connection_that_finds_no_room_is_told() -> None:
    with stub_serving(max_connections=2) as (port, _, guard), ask(port, "/held") as one, ask(port, "/held") as other:
        wait_until(lambda: guard.in_flight == 2)
        with connect(port) as refused:
            response = read_to_end(refused)
        assert response.startswith(b"HTTP/1.1 503 ")
        assert b"too_many_connections" in response
        for client in (one, other):
            assert client.recv(8) == b"HTTP/1.1"


@pytest.mark.parametrize("slow", ["silent", "half a header", "after a response"])
def test_a_client_that_does_not_complete_its_headers_is_disconnected(slow: str) -> None:
    with stub_serving(header_seconds=SOON, idle_seconds=SOON) as (port, _, _):
        is_second = slow == "after a response"
        with answered(port, get("/whole?bytes=3") + b"GET /") if is_second else connect(port) as client:
            if slow == "half a header":
                with contextlib.suppress(ConnectionError):  # the limit may be over before
                    client.sendall(b"GET / HTTP/1.1\r\nHos")
            read_to_end(client)


def test_headers_that_come_byte_by_byte_have_no_longer_time() -> None:
    with stub_serving(header_seconds=SOON, idle_seconds=HANGS_AFTER) as (port, server, _), connect(port) as client:
        client.setblocking(False)
        wait_until(lambda: is_disconnected(client, b"G") and not server.server_state.connections)


def test_a_body_that_nobody_waits_for_has_no_longer_time() -> None:
    request = b"POST /whole?bytes=3 HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n"
    with stub_serving(header_seconds=SOON, idle_seconds=HANGS_AFTER) as (port, server, _):
        with answered(port, request) as client:  # that POST is not allowed
            client.setblocking(False)
            wait_until(lambda: is_disconnected(client, b"x") and not server.server_state.connections)


def test_an_idle_connection_is_closed_and_a_busy_one_is_not() -> None:
    with (
        stub_serving(header_seconds=SOON, idle_seconds=SOON) as (port, server, guard),
        answered(port, get("/held")) as busy,
    ):
        with answered(port, get("/whole?bytes=3")) as idle:
            assert read_to_end(idle).endswith(b"xxx")
        assert guard.in_flight == 1
        assert len(server.server_state.connections) == 1
        assert busy.recv(8) == b"HTTP/1.1"


MANY = 200
"""Events of a stream that sockets' buffers cannot hold."""
BUFFER = 1 << 17
"""Bytes of the receive buffer of a client that does not read. Linux lets the sender's own grow to some megabytes."""


def test_samples_that_end_are_given_back_while_the_client_does_not_read() -> None:
    with stub_serving() as (port, server, guard), ask(port, f"/stream?events={MANY}", receive_buffer=BUFFER) as client:
        wait_until(lambda: guard.backlog.size > 0)
        wait_until(lambda: guard.in_flight == 0)
        assert len(server.server_state.connections) == 1
        body = read_stream(client)
        assert body.count(b"~") == MANY * len(EVENT)
        wait_until(lambda: guard.backlog.size == 0)


@pytest.mark.parametrize("path", [f"/stream?events={MANY}", f"/whole?bytes={MANY << 16}"])
def test_a_client_that_does_not_read_its_answer_is_disconnected(path: str) -> None:
    with stub_serving(write_seconds=SOON) as (port, server, guard), ask(port, path, receive_buffer=BUFFER) as client:
        with contextlib.suppress(ConnectionResetError):
            client.recv(1, socket.MSG_PEEK)  # until the answer begins
        wait_until(lambda: not server.server_state.connections)
        assert len(read_to_end(client)) < MANY << 16
        wait_until(lambda: not guard.in_flight and not guard.backlog.size)


def test_of_streams_that_exceed_the_backlog_the_largest_ends() -> None:
    guard = Guard(capacity=10, seconds=10_000, max_pending_bytes=64 << 20)
    with stub_serving(guard) as (port, _, _), ask(port, "/stream?events=200", receive_buffer=BUFFER) as smaller:
        wait_until(lambda: guard.backlog.size and not guard.in_flight)
        with ask(port, "/stream?events=2000", receive_buffer=BUFFER) as larger:
            wait_until(lambda: not guard.in_flight)
            assert len(read_to_end(larger)) < 2000 << 16
        body = read_stream(smaller)
        assert body.count(b"~") == 200 * len(EVENT)


def test_a_client_that_reads_slowly_stays_and_one_that_stops_does_not() -> None:
    async def watch(sizes: list[int]) -> tuple[bool, int]:
        """Returns whether the connection is closed after these buffer sizes, and how many were read."""
        looks, is_aborted = iter(sizes), asyncio.Event()
        config = SimpleNamespace(settings=ConnectionSettings(write_seconds=0.001))
        connection = cast(Any, Connection.__new__(Connection))
        connection._limits, connection._progress_due, connection._unread = config, None, 0
        connection.loop = asyncio.get_running_loop()
        seen = 0

        def size() -> int:
            nonlocal seen
            seen += 1
            if (given := next(looks, None)) is None:
                is_aborted.set()
                return 0
            return given

        connection.transport = SimpleNamespace(get_write_buffer_size=size, abort=is_aborted.set)
        connection._expect_progress()
        await is_aborted.wait()
        if connection._progress_due is not None:
            connection._progress_due.cancel()
        return seen <= len(sizes), seen

    falling = [1 << 20, 900_000, 900_000, 800_000, 800_000, 700_000]
    assert asyncio.run(watch(falling)) == (False, 7)
    assert asyncio.run(watch([1 << 20, 900_000, 900_000, 899_999])) == (True, 4)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for localhost and its key."""
    folder = tmp_path_factory.mktemp("tls")
    files = folder / "certificate.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost", "-out", str(files[0]), "-keyout", str(files[1])]
    subprocess.run(command, check=True, capture_output=True)
    return files


def test_answers_are_encrypted_where_there_is_a_certificate(certificate: tuple[Path, Path]) -> None:
    with stub_serving(certificate=certificate[0], key=certificate[1]) as (port, _, _):
        context = ssl.create_default_context(cafile=str(certificate[0]))
        connection = http.client.HTTPSConnection("localhost", port, timeout=HANGS_AFTER, context=context)
        with contextlib.closing(connection):
            connection.request("GET", "/whole?bytes=3")
            assert connection.getresponse().read() == b"xxx"
        with connect(port) as plain:
            plain.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"HTTP" not in read_to_end(plain)


def test_a_certificate_that_cannot_be_used_is_named(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "other.pem").write_text("nothing")
    for settings in (
        ConnectionSettings(certificate=tmp_path / "missing.pem"),
        ConnectionSettings(certificate=tmp_path / "other.pem"),
        ConnectionSettings(certificate=certificate[0]),
        ConnectionSettings(certificate=certificate[0], key=tmp_path / "other.pem"),
    ):
        with pytest.raises(
            ValueError, match=r"the TLS certificate '.*\.pem'.* cannot be used .*accepted: files in PEM"
        ):
            tls_context(settings)
    with pytest.raises(ValueError, match=r"key is .* accepted: a key with a certificate"):
        ConnectionSettings(key=certificate[1])


@pytest.mark.parametrize("second", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)])
def test_a_second_signal_ends_the_process_at_once_and_tells_clients(second: signal.Signals) -> None:
    command = [sys.executable, "-m", "tests.server.stub_server"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        with ask(port, "/held") as held, ask(port, "/waits") as waits:
            while b"first" not in (begin := held.recv(1 << 16)):
                pass
            with ask(port, "/waits"):  # whose client leaves
                pass
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: not accepts(port))
            assert process.poll() is None  # the grace period has hours
            process.send_signal(second)
            for client in (held, waits):
                assert b"the server is shutting down" in begin + read_to_end(client)
        assert process.wait(HANGS_AFTER) == 128 + second
        assert process.communicate()[1] == ""
    finally:
        process.kill()
        process.communicate()


def accepts(port: int) -> bool:
    with contextlib.suppress(ConnectionRefusedError, ConnectionResetError), connect(port):
        return True
    return False
