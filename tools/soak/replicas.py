"""SIGKILL of Ray Serve's replicas, one at a time, while clients stream: no client notices.

It needs an environment with Ray, which `make soak SOAK=replicas` creates.
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
"""Time limit for Ray to restart a replica, in seconds."""
_LOST: Final = re.compile(r"^detjax_lost_replicas_total (\S+)$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of an attack.

    Attributes:
        clients: concurrent streams.
        replicas: number of engines.
        seconds: duration in which new streams start.
        every: seconds between kills.
        is_small: whether to use fast-starting engines.
    """

    clients: int = 200
    replicas: int = 3
    seconds: float = 120
    every: float = 10
    is_small: bool = False


def run(report: Report, folder: Path, cache: Path, sizes: Sizes, seed: int) -> None:
    """Compares the streams of killed replicas with the answers of a server that gets one request at a time."""
    report.figures["provenance"] = provenance.heading("make soak SOAK=replicas")
    checkpoint = folder / MODEL
    shutil.copytree(CHECKPOINT, checkpoint)
    (checkpoint / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    probes = _streams()[:: 6 if sizes.is_small else 1]
    engine = _SMALL_ENGINE if sizes.is_small else _ENGINE
    # It has the replicas' size, so that they find its programs in the cache.
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
    """The probes that can be streamed, as longer streams, so that kills hit most of them."""
    streams = []
    for probe in all_probes():
        more: dict[str, Any] = {"stream": True}
        for name in ("max_tokens", "max_completion_tokens"):
            if probe.body.get(name):
                more[name] = 120
        # The server does not stream logprobs of a prompt.
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
    """Kills one replica at a time, and returns the time and the number of replicas of each kill."""
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
