"""Observations of a server under attack: response times of /health, and the memory of its processes."""

import contextlib
import dataclasses
import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tools.soak.server_process import ServerProcess

_PROBER: Final = Path(__file__).with_name("health_prober.py")
_HEALTH_EVERY: Final = 0.2
_MEMORY_EVERY: Final = 0.25
_MIB: Final = 1 << 20
_MAX_POINTS: Final = 300
"""Maximum number of points of a curve in a report."""


@dataclasses.dataclass(frozen=True)
class Seen:
    """The observations of a time span.

    Attributes:
        health_questions: the number of requests to /health.
        health_seconds: the longest time until an answer.
        health_failures: answers with a status other than 200, and requests without an answer.
        lateness: the prober's own maximum delay in seconds: the machine's share of the longest time.
        server_mib: peak memory of the server's process.
        workers_mib: peak memory of all its text workers.
    """

    health_questions: int
    health_seconds: float
    health_failures: int
    lateness: float
    server_mib: float
    workers_mib: float


class Watch:
    """Watches a server from a separate process and thread."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._start = time.monotonic()
        self._phases: list[tuple[float, str]] = [(self._start, "idle")]
        self._health: list[tuple[float, float, int, float]] = []
        self._memory: list[tuple[float, int, int]] = []
        self._is_over = threading.Event()
        command = [sys.executable, "-P", str(_PROBER), str(server.port), str(_HEALTH_EVERY)]
        self._prober = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._threads = [threading.Thread(target=target) for target in (self._read_health, self._read_memory)]
        for thread in self._threads:
            thread.start()

    def phase(self, name: str) -> float:
        """Names the phase that begins now, for the report, and returns the time."""
        self._phases.append((time.monotonic(), name))
        return self._phases[-1][0]

    def memory_now(self) -> tuple[float, float]:
        """Returns the MiB of the server's process and of its text workers."""
        server, workers = self._server.memory()
        return server / _MIB, workers / _MIB

    def seen(self, start: float | None = None) -> Seen:
        """Returns the observations since a time, by default since the start."""
        start = self._start if start is None else start
        health = [one for one in self._health if one[0] + one[1] >= start]
        memory = [one for one in self._memory if one[0] >= start] or [(start, *self._server.memory())]
        return Seen(
            len(health),
            round(max((one[1] for one in health), default=0.0), 3),
            sum(one[2] != 200 for one in health),
            round(max((one[3] for one in health), default=0.0), 3),
            round(max(one[1] for one in memory) / _MIB, 1),
            round(max(one[2] for one in memory) / _MIB, 1),
        )

    def settle(self) -> None:
        """Waits for the answer to a request to /health sent after this call."""
        now = time.monotonic()
        while self._prober.poll() is None and not any(one[0] >= now for one in self._health[-3:]):
            time.sleep(0.02)

    def report(self) -> dict[str, Any]:
        """Returns the slowest answers of /health with their phases, and memory over time."""
        worst = sorted(self._health, key=lambda one: -one[1])[:5]
        points = self._memory[:: max(1, len(self._memory) // _MAX_POINTS)]
        return {
            "all": dataclasses.asdict(self.seen()),
            "slowest_health": [
                {"at": round(at - self._start, 2), "seconds": round(taken, 3), "status": status, "during": self._at(at)}
                for at, taken, status, _ in worst
            ],
            "memory_mib": [
                [round(at - self._start, 1), round(server / _MIB, 1), round(workers / _MIB, 1)]
                for at, server, workers in points
            ],
        }

    def close(self) -> None:
        """Stops watching."""
        self._is_over.set()
        self._prober.kill()
        for thread in self._threads:
            thread.join()
        self._prober.wait()

    def _at(self, time_: float) -> str:
        """The phase at a time."""
        return list(itertools.takewhile(lambda phase: phase[0] <= time_, self._phases))[-1][1]

    def _read_health(self) -> None:
        assert self._prober.stdout is not None
        with self._prober.stdout as lines:
            for line in lines:
                self._health.append(tuple(json.loads(line)))

    def _read_memory(self) -> None:
        while not self._is_over.wait(_MEMORY_EVERY):
            self._memory.append((time.monotonic(), *self._server.memory()))


@contextlib.contextmanager
def watching(server: ServerProcess) -> Iterator[Watch]:
    """A watch that ends with the context."""
    with contextlib.closing(Watch(server)) as watch:
        watch.settle()
        yield watch
