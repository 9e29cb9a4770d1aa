"""Damaged requests by the thousand: none is an error of the server's own, and none harms it."""

import asyncio
import collections
import random
import time
from pathlib import Path
from typing import Final

from tools.soak.http_client import ask, connected, read_head, written
from tools.soak.mutated_requests import BODIES, Mutated, mutated
from tools.soak.probes import alone, differences, few_probes
from tools.soak.report import Report
from tools.soak.server_process import SMALL, ServerProcess
from tools.soak.watch import Watch, watching

_CLIENTS: Final = 8
_HELD: Final = 0.1
"""Seconds after which a client leaves a request that it never finishes."""
_LONGEST: Final = 120
"""Seconds after which a request is taken to hang."""
_SERVER_ERRORS: Final = range(500, 600)
_OPTIONS: Final = ("--max-samples", 16, "--token-budget", 128, "--max-length", 128, "--max-queue", 4096)


def run(
    report: Report, folder: Path, cache: Path, requests: int, seed: int, is_small: bool, *, health: float, margin: float
) -> None:
    """Sends damaged requests, each of which follows from the seed.

    Args:
        report: gets the bars and figures.
        folder: for logs.
        cache: the directory of compiled programs.
        requests: how many.
        seed: of all of them.
        is_small: whether the server is a small one.
        health: seconds that an answer of /health may take.
        margin: MiB that the server may have more than when it was idle.
    """
    with ServerProcess(folder, SMALL if is_small else _OPTIONS, cache=cache) as server:
        server.ready()
        with watching(server) as watch:
            asyncio.run(_run(report, server, watch, requests, seed, margin))
            seen = watch.seen()
            report.at_most("seconds until /health answers, at worst", seen.health_seconds, health)
            report.bar("/health fails", seen.health_failures == 0, accepted="never", seen=seen.health_failures)
            report.figures["watch"] = watch.report()
        report.bar("exit code", (code := server.stop()) == 0, accepted=0, seen=code)
        log = server.log()
        report.bar("tracebacks in the log", "Traceback" not in log, accepted="none", seen=log.count("Traceback"))
        report.figures["log"] = log[-5000:]


async def _run(report: Report, server: ServerProcess, watch: Watch, requests: int, seed: int, margin: float) -> None:
    port, probes = server.port, few_probes()
    expected = await alone(port, probes)
    idle = watch.memory_now()
    documented = (await ask(port, written("/openapi.json"))).json()["paths"]
    paths = [path for path in BODIES if path in documented]
    statuses: collections.Counter[str] = collections.Counter()
    errors, hanging = list[str](), list[str]()
    numbers = iter(range(requests))
    start = watch.phase("damaged requests")

    async def client() -> None:
        for number in numbers:
            request = mutated(random.Random(f"{seed} {number}"), paths)
            try:
                status = await _status(port, request)
            except TimeoutError:
                hanging.append(f"request {number}: {request.description}")
                continue
            except OSError as error:
                status = type(error).__name__
            statuses[str(status)] += 1
            if status in _SERVER_ERRORS:
                errors.append(f"request {number}: {status}: {request.description}")
            if number % 5000 == 4999:
                print(f"{number + 1} requests, {(number + 1) / (time.monotonic() - start):.0f} a second", flush=True)

    await asyncio.gather(*(client() for _ in range(_CLIENTS)))
    seconds = time.monotonic() - start
    watch.phase("afterwards")
    differing = await differences(port, probes, expected)
    await asyncio.to_thread(watch.settle)
    seen = watch.seen(start)
    report.figures |= {
        "paths": paths,
        "statuses": dict(statuses),
        "requests a second": round(requests / seconds, 1),
        "idle memory (MiB: server, workers)": idle,
        "most memory (MiB: server, workers)": [seen.server_mib, seen.workers_mib],
    }
    report.nothing("answers with a status of 500 or more", errors)
    report.nothing("requests without an answer", hanging)
    report.nothing("answers that differ afterwards", differing)
    report.at_most("MiB of the server more than when it was idle", round(seen.server_mib - idle[0], 1), margin)
    report.at_most("MiB of its text workers likewise", round(seen.workers_mib - idle[1], 1), margin)


async def _status(port: int, request: Mutated) -> int:
    """An answer's status; 0 if there was none."""
    if not request.is_held:
        return (await ask(port, request.content, _LONGEST)).status
    async with connected(port) as (reader, writer):
        writer.write(request.content)
        try:
            async with asyncio.timeout(_HELD):
                return (await read_head(reader))[0]
        except TimeoutError:
            return 0
