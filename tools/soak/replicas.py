"""SIGKILL of one replica of Ray Serve after the other, while clients stream: no client notices.

It runs in an environment that has Ray, as `make soak SOAK=replicas` makes it.
"""

import asyncio
import dataclasses
import os
import random
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any, Final

from detjax.bench import provenance
from detjax.demo import CHECKPOINT
from tools.soak.http_client import ask, written
from tools.soak.probes import Probe, all_probes, alone, first_difference
from tools.soak.ray_process import RayCluster
from tools.soak.report import Report
from tools.soak.server_process import MODEL, TEMPLATE, ServerProcess

_ENGINE: Final = {"max_samples": 32, "token_budget": 64, "max_length": 384, "num_pages": 96}
_SMALL_ENGINE: Final = {"max_samples": 4, "token_budget": 64, "max_length": 384, "num_pages": 12}
_RESTARTS_WITHIN: Final = 300
"""Seconds after which Ray is taken not to restart a replica."""
_LOST: Final = re.compile(r"^detjax_lost_replicas_total (\S+)$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much of it there is.

    Attributes:
        clients: streams at a time.
        replicas: engines.
        seconds: how long new streams begin.
        every: seconds from one kill to the next.
        is_small: whether the engines are such that they start quickly.
    """

    clients: int = 200
    replicas: int = 3
    seconds: float = 120
    every: float = 10
    is_small: bool = False


def run(report: Report, folder: Path, cache: Path, sizes: Sizes, seed: int) -> None:
    """Compares what clients get of replicas that are killed with what one server answers to one request at a time."""
    report.figures["provenance"] = provenance.heading("make soak SOAK=replicas")
    checkpoint = folder / MODEL
    shutil.copytree(CHECKPOINT, checkpoint)
    (checkpoint / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    probes = _streams()[:: 6 if sizes.is_small else 1]
    engine = _SMALL_ENGINE if sizes.is_small else _ENGINE
    # Of the same size, so that the replicas find its programs in the cache.
    options = [part for name, value in engine.items() for part in (f"--{name.replace('_', '-')}", value)]
    with ServerProcess(folder, options, cache=cache, checkpoint=checkpoint) as server:
        expected = asyncio.run(alone(server.ready().port, probes))
    arguments = {
        "model": str(checkpoint),
        "replicas": sizes.replicas,
        "engine": engine,
        "cache": str(cache),
    }
    with RayCluster(folder, arguments) as cluster:
        cluster.ready()
        asyncio.run(_attack(report, cluster, probes, expected, sizes, random.Random(seed)))
    report.figures |= {"clients": sizes.clients, "replicas": sizes.replicas, "start_seconds": round(cluster.seconds, 1)}


def _streams() -> list[Probe]:
    """The probes whose answers can be streamed, as streams. They go on for longer, so that kills meet most of them."""
    streams = []
    for probe in all_probes():
        more: dict[str, Any] = {"stream": True}
        for name in ("max_tokens", "max_completion_tokens"):
            if probe.body.get(name):
                more[name] = 120
        # What the server does not stream: logprobs of a prompt.
        echoes_logprobs = probe.body.get("echo") and probe.body.get("logprobs") is not None
        if not echoes_logprobs and "prompt_logprobs" not in probe.body:
            streams.append(dataclasses.replace(probe, body={**probe.body, **more}))
    return streams


async def _attack(
    report: Report,
    cluster: RayCluster,
    probes: list[Probe],
    expected: dict[str, Any],
    sizes: Sizes,
    draw: random.Random,
) -> None:
    start = time.monotonic()
    differing, times = list[str](), list[float]()

    async def client(number: int) -> None:
        choices = random.Random(draw.random())
        while time.monotonic() < start + sizes.seconds:
            probe = choices.choice(probes)
            try:
                answer = await probe.ask(cluster.port)
                times.append(answer.seconds)
                different = first_difference(expected[probe.name], probe.content(answer))
            except (ValueError, OSError) as error:
                different = f"no answer: {error}"
            if different is not None:
                differing.append(f"client {number}, {probe.name}: {different}")

    killing = asyncio.create_task(_kill(cluster, start, sizes, draw))
    await asyncio.gather(*(client(number) for number in range(sizes.clients)))
    kills = await killing
    metrics = (await ask(cluster.port, written("/metrics"))).body.decode()
    moves = int(float(_LOST.findall(metrics)[0]))
    report.nothing("streams that differ from an answer alone, or break", differing)
    planned = int(sizes.seconds / sizes.every)
    report.bar("replicas killed", len(kills) == planned, accepted=planned, seen=len(kills))
    report.bar("moves of streams to another replica", moves > 0, accepted="more than 0", seen=moves)
    restarted = await _restarted(cluster, sizes.replicas)
    report.bar("replicas at the end", restarted == sizes.replicas, accepted=sizes.replicas, seen=restarted)
    report.figures |= {
        "streams": len(times),
        "moves": moves,
        "kills": kills,
        "seconds of a stream": {"median": round(sorted(times)[len(times) // 2], 2), "longest": round(max(times), 2)},
    }


async def _kill(cluster: RayCluster, start: float, sizes: Sizes, draw: random.Random) -> list[dict[str, Any]]:
    """Kills a replica at a time, and says which others there were."""
    kills = []
    for number in range(1, int(sizes.seconds / sizes.every) + 1):
        await asyncio.sleep(max(0, start + number * sizes.every - time.monotonic()))
        replicas = cluster.replicas()
        if not replicas:
            continue
        os.kill(draw.choice(replicas), signal.SIGKILL)
        kills.append({"second": round(time.monotonic() - start, 1), "replicas": len(replicas)})
        print(f"kill {number} of {len(replicas)} replicas", flush=True)
    return kills


async def _restarted(cluster: RayCluster, count: int) -> int:
    end = time.monotonic() + _RESTARTS_WITHIN
    while len(cluster.replicas()) != count and time.monotonic() < end:
        await asyncio.sleep(0.5)
    return len(cluster.replicas())
