"""The attacks on a server: their instruments see what they are made to see, and small runs meet every bar."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.waits import HANGS_AFTER
from tools.soak import __main__ as soak
from tools.soak import kills, load
from tools.soak.probes import COMPLETIONS, Probe, all_probes, alone, differences, first_difference, merged
from tools.soak.report import Report
from tools.soak.watch import Seen

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def answering(answers: Iterator[dict[str, Any]]) -> Iterator[int]:
    """The port of a server that gives answers of its own."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

        def do_GET(self) -> None:
            body = json.dumps(next(answers)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def completion(logprob: float, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": "x", "logprobs": {"token_logprobs": [logprob]}}]} | more


def test_an_answer_that_differs_in_one_bit_is_found() -> None:
    probe = Probe("one", COMPLETIONS, {})
    answers = iter([completion(-0.1, id="a"), completion(-0.1, id="b"), completion(-0.10000000000000002)])

    async def run(port: int) -> list[list[str]]:
        expected = await alone(port, [probe])
        return [await differences(port, [probe], expected) for _ in range(2)]

    with answering(answers) as port:
        same, other = asyncio.run(run(port))
    assert same == []
    assert other == ["one: answer.choices[0].logprobs.token_logprobs[0] is -0.10000000000000002, expected -0.1"]


@pytest.mark.parametrize(
    ("seen", "says"),
    [
        ({"a": [1.0, -0.0]}, "answer.a[1] is -0.0, expected 0.0"),
        ({"a": [1, 0.0]}, "answer.a[0] is 1, expected 1.0"),
        ({"a": [1.0]}, "answer.a has 1 items, expected 2"),
        ({"b": [1.0, 0.0]}, "answer has ['b'], expected ['a']"),
        ({"a": None}, "answer.a is None, expected [1.0, 0.0]"),
        ({"a": [1.0, 0.0]}, None),
    ],
)
def test_the_first_difference_is_named(seen: Any, says: str | None) -> None:
    assert first_difference({"a": [1.0, 0.0]}, seen) == says


def stream(*chunks: dict[str, Any], end: str = "data: [DONE]\n\n") -> bytes:
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks).encode() + end.encode()


def chunk(index: int, text: str, *logprobs: float) -> dict[str, Any]:
    return {"choices": [{"index": index, "text": text, "logprobs": {"token_logprobs": [*logprobs]}}]}


def test_streams_are_equal_however_their_events_are_cut_and_ordered() -> None:
    one = merged(stream(chunk(0, "a", -1.0), chunk(1, "x", -3.0), chunk(0, "b", -2.0)))
    other = merged(stream(chunk(1, "x", -3.0), chunk(0, "ab", -1.0, -2.0)))
    assert one == other
    assert one != merged(stream(chunk(0, "x", -3.0), chunk(1, "ab", -1.0, -2.0)))
    with pytest.raises(ValueError, match="no end"):
        merged(stream(chunk(0, "a"), end=""))
    with pytest.raises(ValueError, match="has an error"):
        merged(stream({"error": {"message": "x"}}))


def test_probes_have_names_of_their_own_and_are_about_sixty() -> None:
    probes = all_probes()
    assert len({probe.name for probe in probes}) == len(probes)
    assert 55 <= len(probes) <= 70


def test_an_answer_of_health_that_is_late_is_measured() -> None:
    def slow() -> Iterator[dict[str, Any]]:
        # The wait begins when the request is there, however long the prober takes to start.
        while True:
            time.sleep(0.5)
            yield {}

    with answering(slow()) as port:
        command = [sys.executable, "-P", str(ROOT / "tools" / "soak" / "health_prober.py"), str(port), "0.01"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as prober:
            assert prober.stdout is not None
            _, seconds, status, _ = json.loads(prober.stdout.readline())
            prober.kill()
    assert seconds >= 0.5
    assert status == 200


def test_a_report_says_which_bars_are_missed(tmp_path: Path) -> None:
    report = Report({"command": "x"})
    report.at_most("a number", 2, 2)
    report.nothing("a list", [])
    assert report.write(tmp_path / "folder" / "report.json") == 0
    report.at_most("another number", 2.1, 2)
    report.nothing("another list", ["x"])
    assert report.write(tmp_path / "report.json") == 1
    assert json.loads((tmp_path / "report.json").read_text())["missed"] == ["another number", "another list"]


# --- small runs ---


class Standing:
    """A server in this process that answers requests by their bytes, and has a clock of its own: one tick a request.

    Attributes:
        fault: what is wrong with it.
        served: the number of its requests.
        port: its port.
    """

    def __init__(self, fault: str | None = None) -> None:
        self.fault, self.served, self.metrics = fault, 0, 0
        standing = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                standing.metrics += 1
                pages = 3 if standing.fault == "pages" else 0
                running = "detjax_samples_running 0\ndetjax_samples_waiting 0\n"
                self._answer(f"{running}detjax_pages_in_use {pages}\n".encode())

            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers["Content-Length"]))
                with contextlib.suppress(ValueError, OSError):  # clients that leave, or cut their request off
                    self._answer(standing.answer(self.path, json.loads(content)))

            def _answer(self, body: bytes) -> None:
                self.send_response(500 if standing.fault == "status" and standing.is_late else 200)
                if not (cut := standing.fault == "cut" and standing.is_late):
                    self.send_header("Content-Length", str(len(body)))
                else:
                    self.send_header("Content-Length", str(len(body) + 1))
                self.end_headers()
                self.wfile.write(body)
                self.close_connection = cut or self.close_connection

            def log_message(self, *_: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass

        self._server = Server(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def is_late(self) -> bool:
        """True after the answers alone and most of the warm-up."""
        return self.served > 60

    def answer(self, path: str, body: dict[str, Any]) -> bytes:
        """The body of an answer."""
        self.served += 1
        text = json.dumps([path, body], sort_keys=True)
        logprob = -(hash(text) % 999) / 7 - (2**-40 if self.fault == "bits" and self.is_late else 0)
        content = completion(logprob, id=str(self.served))
        if not body.get("stream"):
            return json.dumps(content).encode()
        return stream(content, end="" if self.fault == "stream" and self.is_late else "data: [DONE]\n\n")

    def monotonic(self) -> float:
        """The time."""
        return self.served / 100 + 50 * self.metrics

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class StandingProcess:
    """The process of a server that stands in for `detjax serve`."""

    def __init__(self, standing: Standing, cache: Path) -> None:
        self.port, self.seconds, self.process = standing.port, 1.25, self
        self._standing, self._cache = standing, cache

    def __enter__(self) -> "StandingProcess":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def ready(self) -> "StandingProcess":
        (self._cache / "programs").mkdir(parents=True, exist_ok=True)
        (self._cache / "programs" / f"{self._standing.served}-cache").touch()
        if self._standing.fault == "file":
            (self._cache / "programs" / ".unpublished-1").touch()
        if self._standing.fault == "hidden":
            (self._cache / ".part").touch()
        return self

    def poll(self) -> None:
        return None

    def kill(self) -> None:
        if self._standing.fault == "kill" and self._standing.served:  # the expected answers are there
            self._standing.fault, self._standing.served = "bits", 1000

    def workers(self) -> list[int]:
        return [11, 12]

    def stop(self) -> int:
        return 3 if self._standing.fault == "exit" else 0

    def log(self) -> str:
        return "chatty on "


class StandingWatch:
    """The observations of a server that stands in."""

    def __init__(self, fault: str | None) -> None:
        self._fault, self._asked = fault, 0

    def phase(self, name: str) -> float:
        return 0.0

    def settle(self) -> None:
        pass

    def memory_now(self) -> tuple[float, float]:
        self._asked += 1
        return (100.0 + (9.5 if self._fault == "memory" else 8.0) * (self._asked - 1), 5.0)

    def seen(self) -> Seen:
        return Seen(9, 0.75 if self._fault == "slow" else 0.5, int(self._fault == "health"), 0.0, 1.0, 1.0)

    def report(self) -> dict[str, Any]:
        return {}


def attacked(command: str, fault: str | None, tmp_path: Path, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The report of an attack on a server that stands in."""
    with contextlib.closing(Standing(fault)) as standing:
        clock = SimpleNamespace(monotonic=standing.monotonic, sleep=lambda seconds: None)
        for module in (load, kills):
            patch.setattr(module, "time", clock)
            patch.setattr(module, "ServerProcess", lambda *_, cache, **__: StandingProcess(standing, cache))
        patch.setattr(load, "watching", lambda server: contextlib.nullcontext(StandingWatch(fault)))
        patch.setattr(kills, "is_running", lambda pid: fault == "worker" and pid == 12)
        patch.setattr(kills, "_kill_under_load", _killed)
        patch.setattr(kills, "_ENDS_WITHIN", 0)
        report = Report({"command": command})
        if command == "load":
            sizes = load.Sizes(3, 1.5, 0.5, slow_clients=1, max_tokens=10, is_small=True)
            limits: dict[str, float] = {"health": 0.5, "margin": 8.0}
            load.run(report, tmp_path, tmp_path / "cache", sizes, backend="portable", seed=0, **limits)
        else:
            kills.run(report, tmp_path, tmp_path / "cache", 3, 0, is_small=True)
        report.write(tmp_path / "report.json")
    return json.loads((tmp_path / "report.json").read_text())


async def _killed(server: StandingProcess, seconds: float) -> None:
    server.process.kill()


@pytest.mark.parametrize(
    ("fault", "missed"),
    [
        (None, []),
        ("bits", ["answers that differ from those alone"]),
        ("stream", ["answers that differ from those alone", "answers that are neither whole nor 429"]),
        ("status", ["answers compared", "answers that are neither whole nor 429"]),
        ("cut", ["answers compared", "answers that are neither whole nor 429"]),
        ("pages", ["samples and pages in use at the end"]),
        ("memory", ["MiB that the server has more than after the warm-up"]),
        ("slow", ["seconds until /health answers, at worst"]),
        ("health", ["/health fails"]),
        ("exit", ["exit code"]),
    ],
)
def test_a_load_misses_the_bar_of_what_is_wrong(
    fault: str | None, missed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = attacked("load", fault, tmp_path, monkeypatch)
    assert report["missed"] == missed and len(report["bars"]) == 8
    assert report["figures"]["answers compared"] >= (5 if "answers compared" not in missed else 0)


@pytest.mark.parametrize(
    ("fault", "missed"),
    [
        (None, []),
        ("kill", ["answers that differ after a kill"]),
        ("worker", ["what killed servers leave over"]),
        ("file", ["what killed servers leave over"]),
        ("hidden", ["what killed servers leave over"]),
        ("exit", ["exit code of the last server"]),
    ],
)
def test_kills_miss_the_bar_of_what_is_wrong(
    fault: str | None, missed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = attacked("kills", fault, tmp_path, monkeypatch)
    assert report["missed"] == missed
    assert [kill["kill"] for kill in report["figures"]["kills"]] == ["while warming up", "idle", "under load"]
    assert report["figures"]["answers compared"] == 3 * report["figures"]["probes"] > 20


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Programs that the first run compiles serve the others."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize(
    "command",
    ["--help", pytest.param("load", marks=pytest.mark.nightly), pytest.param("kills", marks=pytest.mark.nightly)],
)
def test_a_small_run_meets_every_bar(
    command: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if command == "--help":
        monkeypatch.setattr(sys, "argv", ["soak", command])
        with pytest.raises(SystemExit, match=r"^0$"):
            soak.main()
        assert "{load,kills,replicas}" in capsys.readouterr().out
        return
    out = tmp_path / "report.json"
    arguments = [command, "--small", "--out", str(out), "--health-seconds", str(HANGS_AFTER), "--cache", str(cache)]
    done = subprocess.run(
        [sys.executable, "-m", "tools.soak", *arguments],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    report = json.loads(out.read_text())
    assert not report["missed"]
    assert report["bars"] or "skipped" in report["figures"]
