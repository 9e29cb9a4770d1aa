"""Processes of replicas: how they start, which calls they get, when they are lost, and how others take their place."""

import asyncio
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from detjax.audit import Origin
from detjax.engine import EngineClosed, Request, SamplingParams, Token
from detjax.server import LogSettings, ProcessReplicas
from detjax.server.replicas import processes as module
from detjax.server.replicas.engine import ReplicaOptions
from detjax.server.replicas.messages import Answer, Call, End, Failed, Ready, Start
from detjax.server.replicated_engine import ReplicaLost
from tests.server.running_server import wait_until
from tests.server.threads_as_processes import FACTS, Machine, Process, beating, idle
from tests.support.waits import HANGS_AFTER

ROOT = Path(__file__).parents[2]
QUIET = LogSettings(level="error")


def ready(replicas: ProcessReplicas) -> list[int]:
    return [replica.number for replica in replicas._replicas if replica.is_ready]


def started(count: int = 1, **options: Any) -> Any:
    """A context with replicas."""
    given = {"log": QUIET, "silence": HANGS_AFTER} | options
    return contextlib.closing(ProcessReplicas(ReplicaOptions(Path("a model")), count, **given))


def test_processes_get_their_options_and_their_devices(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "visible_gpus", lambda: ["4", "7", "9"])
    monkeypatch.setenv("PYTHONPATH", "before")
    got = list[object]()

    def program(process: Process) -> int:
        got.extend(process.connection.recv())
        process.connection.send([Ready(FACTS)])
        got.append(process.connection.recv())
        return 0

    machine.programs = [program]
    with started(3, silence=7) as replicas:
        assert replicas.facts == FACTS
        given = {process.pid: process.options["env"]["CUDA_VISIBLE_DEVICES"] for process in machine.started}
        assert [given[pid] for pid in replicas.processes if pid is not None] == ["4", "7", "9"]
        assert replicas.failure is None
        for process in machine.started:
            assert process.command[:3] == [sys.executable, "-m", "detjax.server.replicas.process"]
            assert process.command[3:] == [str(*process.options["pass_fds"])]
            assert process.options["env"]["PYTHONPATH"] == f"{ROOT}{os.pathsep}before"
            assert (process.options["process_group"], process.options["stdin"]) == (0, subprocess.DEVNULL)
    assert got[:3] == [Start(ReplicaOptions(Path("a model")), QUIET, 7)] * 3
    assert got[3:] == [[End()]] * 3


def test_an_answer_ends_an_abandoned_call_is_cancelled_and_none_is_mixed_up(machine: Machine) -> None:
    calls = list[Call]()

    def token(number: int) -> tuple[int, Token]:
        return 0, Token(0, number, -1.0, (), "x", None, 1)

    def program(process: Process) -> int:
        process.connection.recv()
        process.connection.send([Ready(FACTS)])
        while End() not in (messages := process.connection.recv()):
            calls.extend(messages)
            for call in messages:
                if call.requests:
                    batch = [token(call.number)]
                    process.connection.send([Answer(call.number + 100, batch), Answer(call.number, batch)])
                    if call.is_whole:
                        process.connection.send([Answer(call.number, batch), Answer(call.number, None)])
        return 0

    async def ask(replicas: ProcessReplicas) -> None:
        three = [Request("a", SamplingParams(n=2)), Request("b")]
        whole = replicas.stream(three, is_whole=True)
        assert await anext(whole) == [token(0)]
        assert replicas._choice.in_flight == [3]
        assert [batch async for batch in whole] == [[token(0)]]
        assert replicas._choice.in_flight == [0]
        part = replicas.stream(three, is_whole=False)
        assert await anext(part) == [token(1)]
        await part.aclose()
        assert replicas._choice.in_flight == [0]

    machine.programs = [program]
    with started() as replicas:
        asyncio.run(ask(replicas))
        wait_until(lambda: len(calls) == 3)
    assert [(call.number, call.requests is None, call.is_whole) for call in calls] == [
        (0, False, True),
        (1, False, False),
        (1, True, False),
    ]


@pytest.mark.parametrize(
    ("ending", "reason"),
    [
        (lambda process: 3, "its process has ended with code 3"),
        (lambda process: -signal.SIGSEGV, "its process has ended with signal SIGSEGV"),
        (lambda process: process.connection.send([Failed("why")]) or process.killed.wait() or 0, "why"),
        (lambda process: process.killed.wait() or 0, "it has sent nothing for 0.05 s"),
        (lambda process: process.connection.send(7) or process.killed.wait() or 0, "TypeError: "),
    ],
    ids=["code", "signal", "failed", "silent", "invalid"],
)
def test_a_process_that_is_lost_is_replaced_for_a_reason(
    machine: Machine, ending: Callable[[Process], int], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    asked = threading.Event()

    def first(process: Process) -> int:
        process.connection.recv()
        process.connection.send([Ready(FACTS)])
        process.connection.recv()
        asked.set()
        return ending(process)

    async def ask(replicas: ProcessReplicas) -> None:
        replicas._choice.choose([0], [b"a page"])
        with pytest.raises(ReplicaLost, match="the process of replica 0 is lost"):
            async for _ in replicas.stream([Request("x")], is_whole=False):
                pass
        assert replicas._choice._last == {}
        assert replicas._choice.in_flight == [0]

    machine.programs = [first, beating]
    with started(silence=0.05) as replicas:
        asyncio.run(ask(replicas))
        assert asked.is_set()
        wait_until(lambda: ready(replicas) == [0])
        assert len(machine.started) >= 2 and machine.started[0].killed.is_set()
        assert replicas.failure is None
    assert f"replica 0 is lost: {reason}" in caplog.text


def test_replicas_that_cannot_start_again_fail_the_engine_until_one_does(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    held = threading.Event()

    def failing(process: Process) -> int:
        return idle(process) if held.is_set() else 1

    async def ask(replicas: ProcessReplicas) -> None:
        with pytest.raises(EngineClosed, match="no replica of the engine can start; the server's log has the reason"):
            async for _ in replicas.stream([Request("x")], is_whole=False):
                pass

    machine.programs = [idle, idle, failing]
    with started(2) as replicas:
        machine.started[0].end()
        wait_until(lambda: any(replica.start_failure is not None for replica in replicas._replicas))
        assert replicas.failure is None, "the other one is there"
        machine.started[1].end()
        wait_until(lambda: replicas.failure is not None)
        assert str(replicas.failure) == "replica 0 cannot start: its process has ended with code 1"
        asyncio.run(ask(replicas))
        held.set()
        wait_until(lambda: ready(replicas) == [0, 1])
        assert replicas.failure is None
    assert "replica 0 cannot start again: its process has ended with code 1; the next attempt is in 0 s" in caplog.text


def test_attempts_to_start_come_later_and_later(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = list[float]()
    lives = iter([True, False, False, True, *[False] * 8])

    class Ending:
        """An event that is set after the last life, and notes how long somebody waits for it."""

        def is_set(self) -> bool:
            return len(pauses) == 12

        def wait(self, seconds: float) -> None:
            pauses.append(seconds)

        def set(self) -> None: ...

    def live(replica: Any) -> str:
        replica.is_ready = next(lives)
        return "why"

    names = ("Lock", "Thread", "Condition")
    monkeypatch.setattr(
        module, "threading", SimpleNamespace(Event=Ending, **{name: getattr(threading, name) for name in names})
    )
    monkeypatch.setattr(module._Replica, "_live", live)
    replica = module._Replica(0, Start(ReplicaOptions(Path()), QUIET, 1), {}, lambda _: None, threading.Condition())
    replica._thread.join(HANGS_AFTER)
    assert pauses == [0, 1, 3, 0, 1, 3, 7, 15, 31, 60, 60, 60]


def test_a_replica_with_another_fingerprint_is_not_used(machine: Machine) -> None:
    other = dataclasses.replace(FACTS, origin=Origin("another", "5" * 64))
    machine.programs = [idle, lambda process: idle(process, other)]
    reason = f"its fingerprint is {other.fingerprint}, but the other replicas have {FACTS.fingerprint}"
    assert other.fingerprint != FACTS.fingerprint
    with started() as replicas:
        assert (replicas._accept(FACTS), replicas._accept(other)) == ((), reason)
        machine.started[0].end()
        wait_until(lambda: replicas.failure is not None)
        assert str(replicas.failure) == f"replica 0 cannot start: {reason}"
        assert replicas.facts == FACTS


def test_processes_that_do_not_end_are_killed(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def deaf(process: Process) -> int:
        process.connection.recv()
        process.connection.send([Ready(FACTS)])
        process.killed.wait()
        return 0

    monkeypatch.setattr(module, "_SECONDS_TO_END", 0.05)
    machine.programs = [deaf]
    with started(2):
        pass
    assert all(process.killed.is_set() for process in machine.started)
    assert len(machine.started) == 2


@pytest.mark.parametrize("silence", [0, -1, float("inf"), float("nan")])
def test_a_time_of_silence_is_a_time(silence: float, machine: Machine) -> None:
    with pytest.raises(ValueError, match=rf"silence is {silence} \(--replica-seconds\); accepted: more than 0"):
        ProcessReplicas(ReplicaOptions(Path()), 1, silence=silence)
    assert machine.started == []
