"""`detjax serve` as a process: it starts however the one before it ended, and shuts down when told to."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from detjax.cli import main
from tests.server.running_server import MODEL, wait_until
from tests.support import commands, kept_programs
from tests.support.waits import HANGS_AFTER

SMALL = ("--max-samples", "1", "--token-budget", "8", "--max-length", "64", "--top-logprobs", "0")
ASKED = {"model": MODEL, "prompt": "x", "max_tokens": 5, "logprobs": 0, "seed": 0}


@contextlib.contextmanager
def started(checkpoint: Path, cache: Path | None) -> Iterator[subprocess.Popen[str]]:
    """A server with this folder for its programs; without one, with the programs that tests keep."""
    main = "from detjax.cli import main; main()"
    caching = ["--no-compilation-cache"] if cache is None else ["--cache-dir", cache]
    command = [sys.executable, "-c", main, "serve", checkpoint, "--port", "0", *caching, *SMALL]
    command += ["--log-level", "warning"]
    environment = os.environ | (kept_programs.VARIABLES if cache is None else {})
    process = subprocess.Popen([str(part) for part in command], env=environment, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def up(process: subprocess.Popen[str]) -> Iterator[openai.OpenAI]:
    """A client, once the server has printed its address, which has to be its first line."""
    assert process.stderr is not None
    line = process.stderr.readline()
    assert line.startswith(f"{MODEL} on http://127.0.0.1:"), line + process.stderr.read()
    with openai.OpenAI(base_url=line.split()[2].rstrip(",") + "/v1", api_key="none", max_retries=0) as client:
        yield client


def answer(client: openai.OpenAI) -> list[float]:
    return client.completions.create(**ASKED).choices[0].logprobs.token_logprobs


@pytest.mark.parametrize("kills", [0, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_process_that_is_killed_leaves_nothing_that_stops_the_next(
    checkpoint: Path, tmp_path: Path, kills: int
) -> None:
    """Without kills, the process ends as it should at its first start, and has programs that tests keep."""

    def published() -> list[Path]:
        return [path for path in tmp_path.glob("*/*.program")]

    expected = None
    if kills:
        with started(checkpoint, tmp_path) as process:  # killed while it compiles
            wait_until(lambda: published() or process.poll() is not None)
            assert process.poll() is None, process.communicate()
        for path in published()[:1]:  # as if somebody had cut it
            os.truncate(path, path.stat().st_size // 2)
        # as if it had been killed in the middle of a file
        (published()[0].parent / ".unpublished-half").write_bytes(b"half")

        with started(checkpoint, tmp_path) as process, up(process) as client:  # killed while it answers
            expected = answer(client)
            stream = client.completions.create(
                **ASKED | {"max_tokens": 60}, stream=True, extra_body={"ignore_eos": True}
            )  # pyright: ignore[reportCallIssue]
            next(iter(stream))
        assert published()

    cache = tmp_path if kills else None
    with started(checkpoint, cache) as process, up(process) as client:  # ended as it should be
        assert expected in (None, given := answer(client))
        assert answer(client) == given
        before = {path: path.stat().st_mtime_ns for path in published()}
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANGS_AFTER) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""
    assert {path: path.stat().st_mtime_ns for path in published()} == before
    assert not [path.name for path in tmp_path.rglob(".*")]


def test_what_it_cannot_serve_is_said_at_once(checkpoint: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for arguments, says in (
            ([checkpoint, "--port", port], f"127.0.0.1 port {port}: Address already in use"),
            ([checkpoint, "--port", "70000"], "port 70000"),
            ([tmp_path / "missing", "--port", "0"], "is not a directory"),
            ([checkpoint, "--port", "0", "--max-samples", "0"], "max_samples is 0; accepted: at least 1"),
            ([checkpoint, "--port", "0", "--max-queue", "-1"], "--max-queue is -1"),
            ([checkpoint, "--port", "0", "--kv-cache-dtype", "int4"], "--kv-cache-dtype is 'int4'"),
            ([checkpoint, "--port", "0", "--api-key", ""], "api_keys"),
        ):
            result = commands.run(main, "serve", *arguments)
            assert result.exit_code == 2, arguments
            assert says in result.stderr, arguments


@pytest.mark.parametrize("place", ["file", "unwritable"])
def test_a_cache_that_cannot_be_written_is_said(checkpoint: Path, tmp_path: Path, place: str) -> None:
    path = tmp_path / "file"
    path.touch()
    cache = path if place == "file" else Path("/proc/detjax")
    result = commands.run(main, "serve", checkpoint, "--port", "0", "--cache-dir", cache, *SMALL)
    assert result.exit_code == 2
    assert str(cache) in result.stderr
