"""SIGKILL at any time: the next start with the same cache gives the same answers, and no process is left over."""

import asyncio
import contextlib
import random
import time
from pathlib import Path
from typing import Any, Final

from tools.soak.http_client import ask, written
from tools.soak.probes import COMPLETIONS, all_probes, alone, differences, few_probes
from tools.soak.report import Report
from tools.soak.server_process import MODEL, SMALL, ServerProcess, is_running

_KINDS: Final = ("while warming up", "idle", "under load")
_CLIENTS: Final = 40
_ENDS_WITHIN: Final = 60
"""Time limit for a killed server's text workers to exit, in seconds."""


def run(report: Report, folder: Path, cache: Path, times: int, seed: int, is_small: bool) -> None:
    """Kills servers. Each one uses its predecessor's cache."""
    draw = random.Random(seed)
    probes = few_probes() if is_small else all_probes()
    options = SMALL if is_small else ()
    log: list[dict[str, Any]] = []
    differing, left = list[str](), list[str]()
    expected = dict[str, Any]()
    with contextlib.ExitStack() as stack:

        def started() -> ServerProcess:
            return stack.enter_context(ServerProcess(folder, options, cache=cache))

        server: ServerProcess | None = None
        for number in range(times):
            kind = _KINDS[number % len(_KINDS)]
            if server is None or kind == _KINDS[0]:
                if server is not None:
                    server.kill()
                server = started()
            workers = _kill(server, kind, cache, draw, is_first=number == 0)
            left += [f"kill {number}: text worker {pid}" for pid in _staying(workers)]
            server = started().ready()
            left += [f"kill {number}: {path.name}" for path in cache.glob("*/.unpublished-*")]
            if not expected:
                expected = asyncio.run(alone(server.port, probes))
            different = asyncio.run(differences(server.port, probes, expected))
            differing += [f"kill {number} ({kind}): {one}" for one in different]
            log.append({"kill": kind, "seconds of the next start": round(server.seconds, 1), "differ": len(different)})
            print(f"kill {number + 1} of {times}, {kind}: {len(different)} of {len(probes)} differ", flush=True)
        assert server is not None
        code = server.stop()
        left += [str(path.relative_to(cache)) for path in cache.rglob(".*") if path.name != ".lock"]
    report.figures |= {"kills": log, "probes": len(probes), "answers compared": times * len(probes)}
    report.nothing("answers that differ after a kill", differing)
    report.nothing("what killed servers leave over", left)
    report.bar("exit code of the last server", code == 0, accepted=0, seen=code)


def _kill(server: ServerProcess, kind: str, cache: Path, draw: random.Random, is_first: bool) -> list[int]:
    """Kills a server in a state, and returns the ids of its text workers."""
    if kind == _KINDS[0]:
        if not is_first:  # recompiling programs makes warm-up take a while
            for path in sorted(cache.glob("*/*-cache"))[::2]:
                path.unlink()
        _wait_for_programs(server, cache, draw.randrange(1, 6))
        time.sleep(draw.random())
    workers = server.workers()
    if kind == _KINDS[2]:
        asyncio.run(_kill_under_load(server, 0.5 + 2 * draw.random()))
    server.kill()
    return workers


def _wait_for_programs(server: ServerProcess, cache: Path, count: int) -> None:
    """Waits until a server has written some programs, or serves."""
    before = len(list(cache.glob("*/*-cache")))
    beginning = f"{MODEL} on "
    while server.process.poll() is None and beginning not in server.log():
        private = max((len(list(path.glob("*-cache"))) for path in cache.glob("*/.unpublished-*")), default=0)
        if private >= before + count:
            return
        time.sleep(0.02)


async def _kill_under_load(server: ServerProcess, seconds: float) -> None:
    body = {"model": MODEL, "prompt": "x", "max_tokens": 150, "n": 2, "stream": True, "ignore_eos": True}

    async def client() -> None:
        with contextlib.suppress(OSError):
            await ask(server.port, written(COMPLETIONS, body))

    clients = [asyncio.create_task(client()) for _ in range(_CLIENTS)]
    await asyncio.sleep(seconds)
    server.process.kill()
    await asyncio.gather(*clients)


def _staying(pids: list[int]) -> list[int]:
    """Returns the processes that still run after a while."""
    end = time.monotonic() + _ENDS_WITHIN
    while any(map(is_running, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return [pid for pid in pids if is_running(pid)]
