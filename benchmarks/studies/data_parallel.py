"""Throughput of `detjax serve --data-parallel N` over a server with one engine, over HTTP.

    python -m benchmarks data_parallel --out benchmarks/results/data-parallel-h100.json

Writes a checkpoint of random weights. A server with one engine and one with N answer the same requests, all sent at
once on separate connections. A server is measured when its processes have become idle, because after its start it still
compiles programs in the background. The exit code is 1 if an answer differs in a bit.

The requests do not fit into the slots of all engines at once. If they did, each of N engines would run steps of 1/N of
the requests, which take longer per request, so the ratio would depend on the size of steps.

`--small` takes a minute on a CPU, whose cores the engines share.
"""

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final

from benchmarks import study as options
from benchmarks.study import Result, Run
from detjax.bench import command_line, presets
from detjax.bench.serve import Workload
from detjax.cli.options import Option
from detjax.models import save

_HOST: Final = "127.0.0.1"
_READY_SECONDS: Final = 600
"""Time limit for a server's start, which reads the checkpoint and compiles, in seconds."""
_IDLE_SHARE: Final = 0.2
"""Processor time per second of all processes of a server that is idle. Heartbeats and polls take some."""
_IDLE_SECONDS: Final = 3


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The model, the requests and the server of a run.

    Attributes:
        preset: the model's shape.
        layers: its layers; None: the preset's own.
        workload: the requests.
        server: more options of `detjax serve`.
    """

    preset: str = "Qwen3-8B"
    layers: int | None = None
    workload: Workload = Workload(4000)  # noqa: RUF009 - it is frozen
    server: tuple[str, ...] = (
        "--max-samples",
        "1024",
        "--token-budget",
        "8192",
        "--max-length",
        "384",
        "--max-queue",
        "8192",
    )


SMALL: Final = Sizes(
    "tiny", 1, Workload(12, (4, 12), (5, 9)), ("--max-samples", "8", "--token-budget", "16", "--max-length", "64")
)


def study(
    run: Run,
    *,
    preset: options.Preset = Sizes.preset,
    layers: options.Layers = None,
    requests: Annotated[int, Option("The number of requests.", minimum=1)] = Sizes.workload.requests,
    engines: Annotated[int, Option("The engines of the other server.", minimum=2)] = 2,
    rounds: Annotated[int, Option("Timed runs with each server, after one whose bits are compared.", minimum=1)] = 2,
) -> Result:
    sizes = SMALL if run.small else Sizes(preset, layers, dataclasses.replace(Sizes.workload, requests=requests))
    content: dict[str, Any] = {"sizes": dataclasses.asdict(sizes), "servers": []}
    with tempfile.TemporaryDirectory() as directory:
        checkpoint, cache = Path(directory, "model"), Path(directory, "cache")
        # A separate process frees the device when it ends.
        _python("-c", _WRITE.format(preset=sizes.preset, layers=sizes.layers, path=str(checkpoint)))
        for count in (1, engines):
            content["servers"].append(_measured(sizes, checkpoint, cache, count, rounds))
            command_line.print_line(f"{content['servers'][-1]}")
            run.save(content)
    speeds = {server["engines"]: 1 / statistics.median(server["seconds"]) for server in content["servers"]}
    content["speed_over_one"] = {str(count): speed / speeds[1] for count, speed in speeds.items()}
    digests = {server["digest"] for server in content["servers"]}
    return Result(content, "" if len(digests) == 1 else f"{len(digests)} different sets of answers")


_WRITE: Final = "from benchmarks.studies import data_parallel; data_parallel.write({preset!r}, {layers!r}, {path!r})"


def write(preset: str, layers: int | None, path: str) -> None:
    """Writes a checkpoint of random weights, with a tokenizer with a word per id."""
    model = presets.decoder(preset, layers)
    save(model, path)
    vocabulary = {f"t{token}": token for token in range(model.config.vocab_size)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "t0"},
    }
    Path(path, "tokenizer.json").write_text(json.dumps(tokenizer))


def _python(*arguments: str) -> None:
    subprocess.run([sys.executable, *arguments], check=True, env=_environment())


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH"))))}


def _measured(sizes: Sizes, checkpoint: Path, cache: Path, engines: int, rounds: int) -> dict[str, Any]:
    """Seconds until a server is ready, and of each run of the workload."""
    vocabulary = presets.config(sizes.preset, sizes.layers).vocab_size
    start = time.perf_counter()
    with _server(sizes, checkpoint, cache, engines) as (port, process):
        ready = time.perf_counter() - start
        _wait_until_idle(process)
        idle = time.perf_counter() - start
        _, digest = asyncio.run(_answers(port, _bodies(sizes, vocabulary, with_receipts=True)))
        bodies = _bodies(sizes, vocabulary, with_receipts=False)
        seconds = [asyncio.run(_answers(port, bodies))[0] for _ in range(rounds)]
    return {
        "engines": engines,
        "ready_after_seconds": ready,
        "idle_after_seconds": idle,
        "seconds": seconds,
        "digest": digest,
    }


def _bodies(sizes: Sizes, vocabulary: int, *, with_receipts: bool) -> list[bytes]:
    """The bodies of the requests. Receipts have the bits of logprobs, and cost the server time."""
    return [
        json.dumps(
            {
                "model": "model",
                "prompt": list(request.prompt),
                "max_tokens": request.sampling.max_tokens,
                "temperature": request.sampling.temperature,
                "seed": request.sampling.seed,
                "ignore_eos": True,
                "receipt": with_receipts,
            }
        ).encode()
        for request in sizes.workload.draw(vocabulary)
    ]


@contextlib.contextmanager
def _server(sizes: Sizes, checkpoint: Path, cache: Path, engines: int) -> Iterator[tuple[int, int]]:
    """Runs a server of the checkpoint, and yields its port and its process, which leads the session of all others."""
    with socket.create_server((_HOST, 0)) as free:
        port = free.getsockname()[1]
    command = ["-m", "detjax", "serve", str(checkpoint), "--port", str(port), "--cache-dir", str(cache), *sizes.server]
    # A run must not hit the previous run's prefixes.
    command += ["--no-prefix-cache", "--no-access-log", "--log-level", "warning", "--data-parallel", str(engines)]
    process = subprocess.Popen([sys.executable, *command], env=_environment(), start_new_session=True)
    try:
        end = time.monotonic() + _READY_SECONDS
        while not _is_ready(port):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"data_parallel: the server of {engines} engines did not start")
            time.sleep(0.1)
        yield port, process.pid
    finally:
        process.terminate()
        process.wait(60)


def _is_ready(port: int) -> bool:
    try:
        with socket.create_connection((_HOST, port), timeout=5) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            return connection.recv(64).split()[1:2] == [b"200"]
    except OSError:
        return False


def _wait_until_idle(session: int) -> None:
    """Waits until the processes of a session hardly use the processor."""
    before = _processor_seconds(session)
    while True:
        time.sleep(_IDLE_SECONDS)
        now = _processor_seconds(session)
        if sum(seconds - before.get(process, 0) for process, seconds in now.items()) < _IDLE_SHARE * _IDLE_SECONDS:
            return
        before = now


def _processor_seconds(session: int) -> dict[str, float]:
    """Returns the processor time of each process of a session, from Linux's /proc."""
    seconds = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has ended
            fields = file.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                seconds[file.parent.name] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return seconds


async def _answers(port: int, bodies: list[bytes]) -> tuple[float, str]:
    """Seconds until all requests are answered, and a digest of all tokens and logprobs."""
    start = time.perf_counter()
    answers = await asyncio.gather(*(_answer(port, body) for body in bodies))
    seconds = time.perf_counter() - start
    digest = hashlib.sha256()
    for answer in answers:
        choice = json.loads(answer)["choices"][0]
        digest.update(json.dumps([choice["text"], choice.get("receipt", {}).get("logprobs")]).encode())
    return seconds, digest.hexdigest()


async def _answer(port: int, body: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(_HOST, port, limit=1 << 24)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
    await writer.drain()
    answer = await reader.read()
    writer.close()
    header, _, content = answer.partition(b"\r\n\r\n")
    if header.split()[1] != b"200":
        raise RuntimeError(f"data_parallel: {answer[:2000]!r}")
    return _dechunked(content) if b"transfer-encoding: chunked" in header.lower() else content


def _dechunked(content: bytes) -> bytes:
    """The body of a chunked response."""
    parts = []
    while True:
        size, _, content = content.partition(b"\r\n")
        if (length := int(size, 16)) == 0:
            return b"".join(parts)
        parts.append(content[:length])
        content = content[length + 2 :]
