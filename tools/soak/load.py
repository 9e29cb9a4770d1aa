"""A crowd of clients for minutes. A fixed set of requests among them must get the same answers as alone."""

import asyncio
import collections
import contextlib
import dataclasses
import random
import statistics
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

from tools.soak.http_client import Answer, ask, connected, read_head, written
from tools.soak.probes import CHAT, COMPLETIONS, JSON_FORMAT, Probe, all_probes, alone, few_probes, first_difference
from tools.soak.report import Report
from tools.soak.server_process import MODEL, SMALL, ServerProcess
from tools.soak.watch import Watch, watching

_CUT: Final = 0.3
"""The share of requests whose client leaves midway."""
_PROBES: Final = 0.25
"""The share of probes among the other requests."""
_WORDS: Final = "now is the winter of our discontent made glorious summer by this sun of York".split()
_QUEUE_FULL: Final = 429


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The size of the load.

    Attributes:
        clients: concurrent clients.
        seconds: duration, not counting the requests alone and the warm-up.
        warm_up: seconds of load before memory counts.
        slow_clients: number of additional clients that read slowly, and of clients that never read.
        max_tokens: maximum number of tokens of an answer.
        is_small: whether to ask only a few of the probes.
    """

    clients: int
    seconds: float
    warm_up: float
    slow_clients: int = 5
    max_tokens: int = 60
    is_small: bool = False


@dataclasses.dataclass
class _Counts:
    """The observations of the clients."""

    statuses: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    compared: int = 0
    differences: list[str] = dataclasses.field(default_factory=list)
    failures: list[str] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)


def run(
    report: Report,
    folder: Path,
    cache: Path,
    sizes: Sizes,
    *,
    backend: str,
    seed: int,
    health: float,
    margin: float,
) -> None:
    """Runs the load.

    Args:
        report: the report of bars and figures.
        folder: the folder of logs.
        cache: the directory of compiled programs.
        sizes: the size of the load.
        backend: the server's backend.
        seed: the seed of the clients' choices.
        health: time limit for an answer of /health, in seconds.
        margin: maximum growth of the server's memory after the warm-up, in MiB.
    """
    options = ("--backend", backend, *(SMALL if sizes.is_small else ()))
    with ServerProcess(folder, options, cache=cache) as server:
        server.ready()
        with watching(server) as watch:
            asyncio.run(_run(report, server, watch, sizes, seed, margin))
            seen = watch.seen()
            report.at_most("seconds until /health answers, at worst", seen.health_seconds, health)
            report.bar("/health fails", seen.health_failures == 0, accepted="never", seen=seen.health_failures)
            report.figures["watch"] = watch.report()
        report.bar("exit code", (code := server.stop()) == 0, accepted=0, seen=code)
        report.figures["log"] = server.log()[-3000:]


async def _run(report: Report, server: ServerProcess, watch: Watch, sizes: Sizes, seed: int, margin: float) -> None:
    watch.phase("probes alone")
    probes = few_probes() if sizes.is_small else all_probes()
    expected = await alone(server.port, probes)
    watch.phase("warm-up")
    crowd = _Crowd(server.port, probes, expected, sizes, random.Random(seed))
    await crowd.run(sizes.warm_up)
    await asyncio.to_thread(time.sleep, 1)
    warm = watch.memory_now()
    watch.phase("load")
    counts = crowd.counts = _Counts()
    await crowd.run(sizes.seconds)
    watch.phase("afterwards")
    left = await _left_over(server.port)
    after = watch.memory_now()
    await asyncio.to_thread(watch.settle)
    took = sorted(counts.seconds) or [0.0]
    report.figures |= {
        "probes": len(probes),
        "statuses": dict(counts.statuses),
        "answers compared": counts.compared,
        "seconds of whole answers": {
            "median": round(statistics.median(took), 3),
            "99 %": round(took[int(0.99 * (len(took) - 1))], 3),
            "longest": round(took[-1], 3),
        },
        "memory after the warm-up and at the end (MiB: server, workers)": [warm, after],
    }
    report.nothing("answers that differ from those alone", counts.differences)
    report.bar("answers compared", counts.compared >= len(probes) // 2, accepted="some", seen=counts.compared)
    report.nothing("answers that are neither whole nor 429", counts.failures)
    report.bar("samples and pages in use at the end", not any(left.values()), accepted="none", seen=left)
    report.at_most("MiB that the server has more than after the warm-up", round(after[0] - warm[0], 1), margin)


async def _left_over(port: int, seconds: float = 120) -> dict[str, float]:
    """The resources in use after the load, once the server has noticed all disconnects."""
    names = ("detjax_samples_running", "detjax_samples_waiting", "detjax_pages_in_use")
    end, values = time.monotonic() + seconds, dict[str, float]()
    while time.monotonic() < end:
        text = (await ask(port, written("/metrics"))).body.decode()
        values = {
            name: float(line.split()[1]) for line in text.splitlines() for name in names if line.startswith(f"{name} ")
        }
        if len(values) == len(names) and not any(values.values()):
            break
        await asyncio.sleep(0.2)
    return values


class _Crowd:
    """Clients that send requests repeatedly."""

    def __init__(
        self, port: int, probes: list[Probe], expected: dict[str, Any], sizes: Sizes, draw: random.Random
    ) -> None:
        self.counts = _Counts()
        self._port, self._probes, self._expected, self._sizes, self._draw = port, probes, expected, sizes, draw
        self._end = 0.0
        self._next_probe = 0

    async def run(self, seconds: float) -> None:
        """Runs all clients for a time, and waits for their last answers."""
        self._end = time.monotonic() + seconds
        kinds = [self._client] * self._sizes.clients
        kinds += [self._slow_reader, self._client_that_never_reads] * self._sizes.slow_clients
        async with asyncio.TaskGroup() as group:
            for kind in kinds:
                group.create_task(self._repeat(kind))

    async def _repeat(self, kind: Any) -> None:
        while time.monotonic() < self._end:
            try:
                await kind()
            except OSError as error:  # includes TimeoutError
                self.counts.failures.append(f"{type(error).__name__}: {error}")

    async def _client(self) -> None:
        if self._draw.random() < _CUT:
            return await self._leave_midway()
        if self._draw.random() < _PROBES:
            return await self._check_probe()
        path, body = self._request()
        answer = await ask(self._port, written(path, body))
        if not await self._is_served(answer):
            return
        if body.get("stream") and b"[DONE]" not in answer.body[-32:]:
            self.counts.failures.append(f"a stream without an end: {answer.body[-200:]!r}")
        self.counts.seconds.append(answer.seconds)

    async def _check_probe(self) -> None:
        probe = self._probes[self._next_probe % len(self._probes)]
        self._next_probe += 1
        answer = await probe.ask(self._port)
        if not await self._is_served(answer):
            return
        self.counts.compared += 1
        try:
            different = first_difference(self._expected[probe.name], probe.content(answer))
        except ValueError as error:
            different = str(error)
        if different is not None:
            self.counts.differences.append(f"{probe.name}: {different}")

    async def _leave_midway(self) -> None:
        path, body = self._request()
        request = written(path, body)
        async with connected(self._port) as (reader, writer):
            if self._draw.random() < 0.1:  # truncates the request itself
                writer.write(request[: self._draw.randrange(len(request))])
                await asyncio.sleep(self._draw.random() * 0.2)
                self.counts.statuses["left while asking"] += 1
                return
            writer.write(request)
            with contextlib.suppress(TimeoutError, ConnectionError):
                async with asyncio.timeout(self._draw.random() * 2):
                    status, _ = await read_head(reader)
                    if status not in (0, 200, _QUEUE_FULL):
                        self.counts.failures.append(f"status {status} of a request that was to be cut off")
                    await reader.read(self._draw.randrange(1, 4000))
            self.counts.statuses["left midway"] += 1

    async def _slow_reader(self) -> None:
        """Reads a stream slowly, and leaves it when the load is over."""
        async with self._long_stream() as reader:
            while time.monotonic() < self._end and await reader.read(1500):
                await asyncio.sleep(0.5)
        self.counts.statuses["read slowly"] += 1

    async def _client_that_never_reads(self) -> None:
        until = min(self._end, time.monotonic() + 60)
        async with self._long_stream():
            while time.monotonic() < until:
                await asyncio.sleep(0.2)
        self.counts.statuses["never read"] += 1

    @contextlib.asynccontextmanager
    async def _long_stream(self) -> AsyncIterator[asyncio.StreamReader]:
        body = {"model": MODEL, "prompt": "x", "n": 4, "max_tokens": 200, "logprobs": 20, "stream": True}
        async with connected(self._port, receive_buffer=4096) as (reader, writer):
            writer.write(written(COMPLETIONS, body | {"ignore_eos": True}))
            yield reader

    async def _is_served(self, answer: Answer) -> bool:
        """Counts an answer; clients that find the queue full wait a moment."""
        self.counts.statuses[str(answer.status)] += 1
        if answer.status == _QUEUE_FULL:
            await asyncio.sleep(0.5 + self._draw.random())
            return False
        if answer.status != 200 or not answer.is_whole:
            self.counts.failures.append(f"status {answer.status}, whole: {answer.is_whole}: {answer.body[:200]!r}")
            return False
        return True

    def _request(self) -> tuple[str, dict[str, Any]]:
        draw, length = self._draw, self._draw.randrange(1, self._sizes.max_tokens)
        text = " ".join(draw.choices(_WORDS, k=draw.choice((1, 5, 30, 90))))
        body: dict[str, Any] = {"model": MODEL, "n": draw.choice((1, 1, 2, 4)), "stream": draw.random() < 0.5}
        body |= draw.choice(({"temperature": 0}, {"seed": draw.randrange(2**64)}, {"top_p": 0.9, "min_p": 0.05}, {}))
        body |= draw.choice(({}, {"presence_penalty": 0.5, "repetition_penalty": 1.1}, {"stop": ["York", "\n\n"]}))
        body |= draw.choice(({}, {}, {"response_format": JSON_FORMAT}))
        if draw.random() < 0.5:
            return COMPLETIONS, body | {"prompt": text, "max_tokens": length, "logprobs": draw.choice((None, 0, 5))}
        messages = [{"role": "user", "content": text}]
        chat = {"messages": messages, "max_completion_tokens": length}
        return CHAT, body | chat | draw.choice(({}, {"logprobs": True, "top_logprobs": 5}))
