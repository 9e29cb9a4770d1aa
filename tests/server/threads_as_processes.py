"""Threads in place of the processes of replicas, for tests of what becomes of processes."""

import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any, Final

import pytest

from detjax.audit import Origin
from detjax.engine import EngineConfig
from detjax.models import DecoderConfig, ModelMetadata
from detjax.server.replicas import processes as module
from detjax.server.replicas.engine import ReplicaFacts
from detjax.server.replicas.messages import Alive, End, Ready
from detjax.server.replicas.process import Replica
from tests.server.running_server import FIXTURE

_CONFIG: Final = DecoderConfig.from_hugging_face(json.loads((FIXTURE / "config.json").read_text()), "config.json")
FACTS: Final = ReplicaFacts(
    ModelMetadata(_CONFIG), {}, EngineConfig(max_length=400), Origin("0123456789abcdef", "5" * 64)
)
"""Facts of a replica without an engine."""


class Answering(Replica):
    """A replica in this process, which does not end it."""

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        # Its process may end, and close the loop and the connection, while it reads.
        with contextlib.suppress(EOFError, OSError, RuntimeError, TypeError):
            while End() not in (messages := self._connection.recv()):
                loop.call_soon_threadsafe(self._take, messages)


class Process:
    """Stands in for a replica's process: a thread of this process.

    Attributes:
        options: what it was started with.
        connection: its end of the connection.
        killed: set when it has to end.
    """

    pids = itertools.count(900_001)

    def __init__(self, program: Callable[["Process"], int], command: list[str], **options: Any) -> None:
        self.pid, self.command, self.options = next(self.pids), command, options
        (descriptor,) = options["pass_fds"]
        self.connection = Connection(os.dup(descriptor))
        self._socket = socket.socket(fileno=os.dup(descriptor))
        self.killed = threading.Event()
        self._code: int | None = None
        self._thread = threading.Thread(target=self._run, args=(program,), daemon=True)
        self._thread.start()

    def _run(self, program: Callable[["Process"], int]) -> None:
        code = -signal.SIGKILL
        with contextlib.suppress(EOFError, OSError):
            code = program(self)
        self.end(code)
        self.connection.close()
        self._socket.close()

    def end(self, code: int = -signal.SIGKILL) -> None:
        """Ends the process, as it was killed unless it says otherwise."""
        if self._code is None:
            self._code = code
            self.killed.set()
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def wait(self, timeout: float | None = None) -> int:
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise subprocess.TimeoutExpired("replica", timeout or 0)
        assert self._code is not None
        return self._code


@dataclasses.dataclass
class Machine:
    """A machine whose processes are threads.

    Attributes:
        programs: the program of each process; later processes have the last one, too.
        started: the processes so far.
    """

    programs: list[Callable[[Process], int]]
    started: list[Process] = dataclasses.field(default_factory=list)
    _starting: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def start(self, command: list[str], **options: Any) -> Process:
        with self._starting:
            program = self.programs.pop(0) if len(self.programs) > 1 else self.programs[0]
            self.started.append(process := Process(program, command, **options))
        return process

    def process(self, pid: int | None) -> Process:
        """The process with an id."""
        return next(process for process in self.started if process.pid == pid)


def installed(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine whose processes wait for calls, and answer none. Failed ones are started again at once."""
    made = Machine([idle])
    replaced = {"Popen": made.start, "DEVNULL": subprocess.DEVNULL, "TimeoutExpired": subprocess.TimeoutExpired}
    monkeypatch.setattr(module, "subprocess", SimpleNamespace(**replaced))
    monkeypatch.setattr(module, "_kill", lambda process: process.end())
    monkeypatch.setattr(module, "_LONGEST_PAUSE", 0)
    return made


def idle(process: Process, facts: ReplicaFacts = FACTS) -> int:
    """A replica that is ready, and reads until its end."""
    process.connection.recv()
    process.connection.send([Alive(), Ready(facts)])
    while End() not in process.connection.recv():
        pass
    return 0


def beating(process: Process) -> int:
    """A replica that is ready, and sends signs of life until its end."""
    process.connection.recv()
    process.connection.send([Ready(FACTS)])
    while not (process.connection.poll(0.005) and End() in process.connection.recv()):
        process.connection.send([Alive()])
    return 0
