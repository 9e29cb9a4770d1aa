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
from typing import Any

import pytest

from tests.support.waits import HANGS_AFTER
from tools.soak.probes import COMPLETIONS, Probe, all_probes, alone, differences, first_difference, merged
from tools.soak.report import Report

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


# --- small runs -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Programs that the first run compiles serve the others."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.sampled(0)
@pytest.mark.parametrize("command", ["load", "kills"])
def test_a_small_run_meets_every_bar(command: str, cache: Path, tmp_path: Path) -> None:
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
