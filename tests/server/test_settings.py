"""Settings of a server: what each accepts, up to its limit; addresses, hosts, sockets and the end of the process."""

import asyncio
import dataclasses
import resource
import signal
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

import pytest

from detjax.server import ConnectionSettings, LogSettings, Server, Settings, bound_socket
from detjax.server.http import run
from detjax.server.http.guard import Guard
from detjax.server.http.hosts import default_hosts, is_loopback
from detjax.server.http.run import protected, url

LONGEST: Final = 10**7
TIME: Final = (
    [1e-9, LONGEST],
    [0, -1, LONGEST + 1, float("inf"), float("nan")],
    f"more than 0, up to {LONGEST} seconds",
)
COUNT: Final = ([1], [0, -1], "at least 1")
ACCEPTED: Final[list[tuple[type, dict[str, tuple[list[Any], list[Any], str]]]]] = [
    (
        Settings,
        {
            "name": (["a"], [""], "a name"),
            "more_names": ([(), ("a",)], [("a", "")], "names that are not empty"),
            "max_in_flight": COUNT,
            "max_body": COUNT,
            "max_pending_bytes": COUNT,
            "body_seconds": TIME,
            "request_seconds": TIME,
            "text_seconds": TIME,
            "image_directory": (
                [None, Path(__file__).parent],
                [Path(__file__), Path("/missing")],
                "a directory that exists",
            ),
            "unseeded": (["random", "fixed"], ["none"], "random, fixed"),
            "logprobs_mode": (
                ["raw_logprobs", "processed_logprobs"],
                ["raw_logits"],
                "raw_logprobs, processed_logprobs",
            ),
            "allowed_hosts": (
                [None, (), ("*",), ("a.b-c_d",), ("*.a.b",), ("[::1]",), ("127.0.0.1",)],
                [("a:80",), ("",), ("*a",), ("a.*",), ("::1",), ("a b",), ("http://a",)],
                "host names and addresses without a port",
            ),
            "allowed_origins": (
                [(), ("*",), ("null",), ("https://a.b",), ("http://a:80",), ("app+x://a",)],
                [("a.b",), ("https://a/",), ("https://",), ("HTTPS://a",), ("https://a b",)],
                "origins such as 'https://example.com', without a path",
            ),
        },
    ),
    (
        ConnectionSettings,
        {
            "grace": ([0, LONGEST], [-1e-9, LONGEST + 1, float("inf"), float("nan")], f"0 to {LONGEST} seconds"),
            "max_connections": COUNT,
            "header_seconds": TIME,
            "idle_seconds": TIME,
            "write_seconds": TIME,
            "key": ([None], [Path("key.pem")], "a key with a certificate"),
        },
    ),
    (
        LogSettings,
        {
            "level": (["debug", "info", "warning", "error"], ["DEBUG", "loud"], "debug, info, warning, error"),
            "format": (["text", "json"], ["xml"], "text, json"),
        },
    ),
]


@pytest.mark.parametrize(("kind", "fields"), ACCEPTED, ids=[kind.__name__ for kind, _ in ACCEPTED])
def test_settings_are_accepted_up_to_their_limits(
    kind: Any, fields: dict[str, tuple[list[Any], list[Any], str]]
) -> None:
    least = {"name": "m"} if kind is Settings else {}
    for name, (accepted, refused, says) in fields.items():
        for value in accepted:
            assert getattr(kind(**least | {name: value}), name) == value
        for value in refused:
            with pytest.raises(ValueError) as raised:
                kind(**least | {name: value})
            assert str(raised.value) == f"{kind.__name__}: {name} is {value!r}; accepted: {says}"


def test_defaults_are_those_of_the_documentation() -> None:
    assert dataclasses.asdict(Settings("m")) == {
        "name": "m",
        "more_names": (),
        "api_keys": (),
        "separate_prefixes": False,
        "max_in_flight": 1024,
        "max_body": 8 << 20,
        "body_seconds": 30,
        "request_seconds": 600,
        "text_seconds": 30,
        "max_pending_bytes": 64 << 20,
        "allowed_hosts": None,
        "allowed_origins": (),
        "image_directory": None,
        "unseeded": "random",
        "logprobs_mode": "raw_logprobs",
        "tool_format": None,
        "control_key": None,
        "weights_directory": None,
    }
    assert dataclasses.astuple(ConnectionSettings()) == (30, 4096, 10, 30, 30, None, None)
    assert dataclasses.astuple(LogSettings()) == ("info", "text", True)
    assert Settings("a", more_names=("b", "a", "b")).names == ("a", "b")


@pytest.mark.parametrize("key", ["", "a b", "a\t", "\n", "é", "a\x7f", " a"])
def test_keys_are_printable_ascii_without_space_and_are_not_shown(key: str) -> None:
    with pytest.raises(ValueError, match=r"one of api_keys .* is empty or has white space") as raised:
        Settings("m", api_keys=("good", key))
    assert not key.strip() or repr(key) not in str(raised.value)
    assert Settings("m", api_keys=("!~", "a")).api_keys == ("!~", "a")


# --- addresses --------------------------------------------------------------------------------------------------------

LOOPBACK: Final = ("localhost", "127.0.0.1", "[::1]")


@pytest.mark.parametrize(
    ("address", "hosts"),
    [
        ("127.0.0.1", LOOPBACK),
        ("::1", LOOPBACK),
        ("127.1.2.3", (*LOOPBACK, "127.1.2.3")),
        ("0.0.0.0", None),
        ("::", None),
        ("192.168.0.1", None),
        ("fe80::1%eth0", None),
    ],
)
def test_a_server_accepts_the_hosts_that_its_address_implies(
    address: str, hosts: tuple[str, ...] | None, caplog: pytest.LogCaptureFixture
) -> None:
    bound: Any = SimpleNamespace(getsockname=lambda: (address, 80, 0, 0))
    assert is_loopback(address) is (hosts is not None)
    assert default_hosts(address, needs_key=False) == hosts
    assert default_hosts(address, needs_key=True) is None
    settings = Settings("m", max_body=7)
    assert protected(settings, bound) == dataclasses.replace(settings, allowed_hosts=hosts)
    warning = f"anyone on the network can use the server without a key: it listens on {address}."
    assert (warning in caplog.text) is (hosts is None)
    caplog.clear()
    asked = dataclasses.replace(settings, allowed_hosts=("a",))
    assert protected(asked, bound).allowed_hosts == ("a", *(hosts or ()))
    caplog.clear()
    keyed = dataclasses.replace(settings, api_keys=("k",))
    assert protected(keyed, bound).allowed_hosts is None
    assert protected(dataclasses.replace(keyed, allowed_hosts=("a",)), bound).allowed_hosts == ("a",)
    assert caplog.text == ""


def test_an_address_of_version_six_stands_in_brackets() -> None:
    four: Any = SimpleNamespace(getsockname=lambda: ("127.0.0.1", 80))
    six: Any = SimpleNamespace(getsockname=lambda: ("::1", 443, 0, 0))
    assert url(four, ConnectionSettings()) == "http://127.0.0.1:80"
    assert url(six, ConnectionSettings()) == "http://[::1]:443"
    assert url(four, ConnectionSettings(certificate=Path("c.pem"))) == "https://127.0.0.1:80"


def test_a_socket_is_bound_to_a_free_port_or_says_why_not() -> None:
    with bound_socket("127.0.0.1", 0) as one:
        host, port = one.getsockname()
        assert (host, one.family, one.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)) == (
            "127.0.0.1",
            socket.AF_INET,
            1,
        )
        one.listen()
        expected = rf"^127.0.0.1 port {port}: Address already in use; accepted: a free port of this machine$"
        with pytest.raises(OSError, match=expected):
            bound_socket("127.0.0.1", port)
    with pytest.raises(OSError, match=r"192.0.2.1 port 0: Cannot assign requested address"):
        bound_socket("192.0.2.1", 0)
    with pytest.raises(OSError, match=r"127.0.0.1 port 65536: .*; accepted: a free port of this machine"):
        bound_socket("127.0.0.1", 65536)


@pytest.mark.parametrize(
    ("limits", "wanted", "affordable"),
    [
        ((1024, 4096), 5000, 3996),
        ((4096, 4096), 3997, 3996),
        ((4096, 4096), 3996, 3996),
        ((4096, 4096), 3995, 3995),
        ((100, 100), 5, 1),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 10**6, 10**6),
    ],
)
def test_connections_fit_under_the_limit_on_files(limits: tuple[int, int], wanted: int, affordable: int) -> None:
    raised = list[tuple[int, int]]()
    with (
        mock.patch.object(resource, "getrlimit", lambda _: limits),
        mock.patch.object(resource, "setrlimit", lambda _, pair: raised.append(pair)),
    ):
        assert run._affordable_connections(wanted) == affordable
    assert raised == ([(limits[1], limits[1])] if limits[0] < limits[1] else [])
    with (
        mock.patch.object(resource, "getrlimit", lambda _: (1024, 4096)),
        mock.patch.object(resource, "setrlimit", side_effect=ValueError),
    ):
        assert run._affordable_connections(5000) == 924


# --- the end ----------------------------------------------------------------------------------------------------------


class Ending:
    """A server whose shutdown is looked at, not done: the timers that it sets, and what they do."""

    def __init__(self, **settings: Any) -> None:
        self.guard = Guard(capacity=9, seconds=9)
        self.engine = SimpleNamespace(failure=None)
        app: Any = SimpleNamespace(state=SimpleNamespace(engine=self.engine, guard=self.guard))
        self.server = Server(app, ConnectionSettings(**settings))
        self.timers: list[tuple[float, Any]] = []
        self.cancelled = 0
        self.server._event_loop = mock.Mock(call_later=self._later, call_soon_threadsafe=lambda act: act())

    def _later(self, seconds: float, act: Any) -> Any:
        self.timers.append((seconds, act))

        def cancel() -> None:
            self.cancelled += 1

        return SimpleNamespace(cancel=cancel)

    def shut_down(self) -> None:
        with mock.patch("uvicorn.Server.shutdown", mock.AsyncMock()):
            asyncio.run(self.server.shutdown())


def test_a_shutdown_gives_its_grace_and_then_cancels(caplog: pytest.LogCaptureFixture) -> None:
    ending = Ending(grace=7.5)
    ending.guard.in_flight = 3
    caplog.set_level("INFO", "detjax.server")
    ending.shut_down()
    assert ending.guard.is_draining
    assert "shutting down; 3 samples in flight have 7.5 s to finish" in caplog.text
    (grace, stop), (end, abort) = ending.timers
    assert (grace, end, ending.cancelled) == (7.5, 12.5, 2)
    assert (stop, abort) == (ending.guard.stop, ending.server._abort_connections)
    assert ending.server.config.timeout_graceful_shutdown == 13
    idle = Ending(grace=0)
    caplog.clear()
    idle.shut_down()
    assert caplog.text == ""
    assert ([seconds for seconds, _ in idle.timers], idle.server.exit_code) == ([0, 5], 0)


def test_a_failed_engine_ends_the_server_without_grace(caplog: pytest.LogCaptureFixture) -> None:
    ending = Ending(grace=7.5)
    ending.guard.in_flight = 3
    with mock.patch("uvicorn.Server.on_tick", mock.AsyncMock(return_value=False)):
        assert asyncio.run(ending.server.on_tick(0)) is False
        ending.engine.failure = RuntimeError("lost")
        assert asyncio.run(ending.server.on_tick(1)) is True
    ending.shut_down()
    assert [seconds for seconds, _ in ending.timers] == [0, 5]
    assert ending.server.exit_code == 70
    assert caplog.text.count("exiting with code 70 because the engine failed") == 1
    assert "shutting down" not in caplog.text


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_ends_the_grace_and_the_third_changes_nothing(second: signal.Signals) -> None:
    ending = Ending(grace=7.5)
    stopped = list[str]()
    with (
        mock.patch.object(ending.guard, "stop", lambda: stopped.append("stop")),
        mock.patch("threading.Timer") as timer,
    ):
        ending.server.handle_exit(signal.SIGTERM, None)
        assert (ending.server.should_exit, ending.server.exit_code, stopped) == (True, 0, [])
        ending.server.handle_exit(second, None)
        assert (ending.server.exit_code, stopped) == (128 + second, ["stop"])
        ending.server.handle_exit(signal.SIGTERM if second == signal.SIGINT else signal.SIGINT, None)
        assert (ending.server.exit_code, stopped) == (128 + second, ["stop"])
    assert timer.call_args.args == (5, run.os._exit, [128 + second])
    assert [seconds for seconds, _ in ending.timers] == [0.5]


def test_a_connection_is_configured_as_the_settings_say() -> None:
    app: Any = SimpleNamespace(state=SimpleNamespace(engine=None, guard=None))
    config = Server(app, ConnectionSettings(idle_seconds=2.5, max_connections=7, grace=1)).config
    assert (config.timeout_keep_alive, config.timeout_graceful_shutdown) == (2.5, 7)
    assert (config.ws, config.lifespan, config.access_log, config.server_header) == ("none", "off", False, False)
