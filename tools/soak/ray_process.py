"""A cluster of Ray Serve as a process, and the processes of its replicas."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

_READY: Final = "the cluster serves"
_STARTS_WITHIN: Final = 1800
"""Time limit for a start, in seconds."""
_ENDS_WITHIN: Final = 120
"""Time limit for an exit, in seconds."""
_REPLICA: Final = b"EngineReplica"
"""A part of the process name that Ray gives to a replica."""


class RayCluster:
    """A cluster's main process, whose descendants form the cluster. All of them stop at the end of its context.

    Attributes:
        port: its port.
        seconds: the duration of the start.
    """

    def __init__(self, folder: Path, arguments: Mapping[str, Any]) -> None:
        """Starts a cluster without waiting until it is ready.

        Args:
            folder: the folder of its log.
            arguments: the arguments of `detjax.server.replicas.ray_serve.application`.
        """
        self.seconds, self._start = 0.0, time.monotonic()
        with socket.socket() as free:  # Ray takes a port number, not a socket
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self._log = folder / "cluster.log"
        options = json.dumps({"port": self.port, "arguments": dict(arguments)})
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tools.soak.ray_cluster", options],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                # Ray's default priority is low enough to starve its processes on a busy machine.
                env=os.environ | {"JAX_PLATFORMS": "cpu", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"},
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        children = _descendants(self._process.pid)
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_ENDS_WITHIN)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._process.wait()
        for pid in children:  # most have already exited
            if _command(pid):
                os.kill(pid, signal.SIGKILL)

    def ready(self) -> Self:
        """Waits until the cluster is ready.

        Raises:
            RuntimeError: it exited, or takes too long; the message has the log's end.
        """
        while _READY not in self.log():
            if self._process.poll() is not None or time.monotonic() - self._start > _STARTS_WITHIN:
                raise RuntimeError(f"the cluster did not start: {self.log()[-3000:]}")
            time.sleep(0.1)
        self.seconds = time.monotonic() - self._start
        return self

    def log(self) -> str:
        """Returns the log so far."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def replicas(self) -> list[int]:
        """Returns the processes of current replicas, including starting ones."""
        return [pid for pid in _descendants(self._process.pid) if _REPLICA in _command(pid)]


def _command(pid: int) -> bytes:
    """The command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _descendants(pid: int) -> list[int]:
    """All descendants of a process."""
    children = defaultdict[int, list[int]](list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                # A process name may contain anything, so parse the numbers after it.
                children[int((entry / "stat").read_text().rpartition(")")[2].split()[1])].append(int(entry.name))
            except OSError:
                continue
    processes, waiting = [], [pid]
    while waiting:
        new = children[waiting.pop()]
        processes += new
        waiting += new
    return processes
