"""Replicas in processes of this machine: the answers of one engine, whatever happens to the processes."""

import asyncio
import contextlib
import dataclasses
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import openai
import pytest
from starlette.testclient import TestClient

from detjax.audit import Origin
from detjax.cli import main
from detjax.engine import Engine, Request, SamplingParams, Token
from detjax.engine.commands import EngineCommands
from detjax.models import Decoder, ModelMetadata, Tokenizer
from detjax.models.checkpoint.weight_updates import UpdatableWeights
from detjax.server import LogSettings, ProcessReplicas, Settings, app_of_replicas, create_app, no_accelerator
from detjax.server.replicas import processes as module
from detjax.server.replicas.engine import ReplicaFacts, ReplicaOptions
from detjax.server.replicas.messages import Alive, Answer, Call, End, Failed, Ready, Start
from detjax.server.replicas.process import Replica
from detjax.server.replicas.processes import device_shares, visible_gpus
from detjax.server.replicated_engine import ReplicatedEngine
from tests.server.running_server import MODEL, wait_until
from tests.server.test_replicas import PENALIZED, REQUESTS, by_sample, responses, streamed
from tests.server.threads_as_processes import Answering, Machine, Process
from tests.support import commands, kept_programs
from tests.support.bits import assert_same_bits
from tests.support.waits import HANGS_AFTER

LONG = Request([5, 6, 7], dataclasses.replace(PENALIZED, max_tokens=60, n=4))
QUIET = LogSettings(level="error")


def ready(replicas: ProcessReplicas) -> list[int]:
    return [replica.number for replica in replicas._replicas if replica.is_ready]


def lives(process: int) -> bool:
    """Returns whether a process runs. One whose parent has not asked how it ended does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def assert_same_tokens(got: list[tuple[int, Token]], expected: list[tuple[int, Token]]) -> None:
    assert by_sample(got) == by_sample(expected)
    for place, tokens in by_sample(expected).items():
        both = by_sample(got)[place], tokens
        assert_same_bits(*(np.array([token.logprob for token in one], np.float32) for one in both))


# --- replicas with the tests' engine ----------------------------------------------------------------------------------


@pytest.fixture
def facts(engine: Engine, loaded: tuple[Decoder, Tokenizer]) -> ReplicaFacts:
    return ReplicaFacts(ModelMetadata.from_model(loaded[0]), loaded[1].files, engine.config, Origin("an origin"))


@pytest.fixture
def replicas(
    machine: Machine, engine: Engine, facts: ReplicaFacts, loaded: tuple[Decoder, Tokenizer]
) -> Iterator[ProcessReplicas]:
    """Two replicas that answer with the tests' engine."""
    commands = EngineCommands(engine, UpdatableWeights(*loaded))

    def program(process: Process) -> int:
        replica = Answering(process.connection, process.connection.recv()[0])
        process.options["replica"] = replica

        async def serve() -> None:
            serving = asyncio.create_task(replica.serve(lambda _: (engine, facts, commands)))
            await asyncio.to_thread(process.killed.wait)
            serving.cancel()
            await asyncio.gather(serving, *replica._answering.values(), return_exceptions=True)

        asyncio.run(serve())
        return 0

    machine.programs = [program]
    with contextlib.closing(ProcessReplicas(ReplicaOptions(Path()), 2, log=QUIET, silence=HANGS_AFTER)) as started:
        yield started
        for process in machine.started:
            process.end()


@pytest.fixture
def replicated(replicas: ProcessReplicas) -> ReplicatedEngine:
    return ReplicatedEngine(replicas, replicas.facts.metadata, replicas.facts.tokenizer(), replicas.facts.config)


def test_concurrent_requests_have_the_answers_of_one_engine_from_both_replicas(
    replicated: ReplicatedEngine, replicas: ProcessReplicas, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = list[int]()
    choose = replicas._choice.choose

    def noted(ready: Any, pages: Any) -> int:
        chosen.append(choose(ready, pages))
        return chosen[-1]

    monkeypatch.setattr(replicas._choice, "choose", noted)
    seeded = SamplingParams(max_tokens=7, temperature=1.0, seed=11, n=3, top_logprobs=1)
    calls = [REQUESTS, [Request([8, 8], seeded)], [Request([9], seeded), Request([1, 2], seeded)], REQUESTS[:1]]

    async def all_at_once() -> tuple[list[Any], list[Any]]:
        streams = asyncio.gather(*(streamed(replicated, call) for call in calls))
        whole = asyncio.gather(*(replicated.generate_async(call) for call in calls))
        return await streams, await whole

    streams, whole = asyncio.run(all_at_once())
    for call, stream, generations in zip(calls, streams, whole, strict=True):
        assert_same_tokens(stream, asyncio.run(streamed(engine, call)))
        assert generations == engine.generate(call)
    # The samples of the calls are 3, 3, 6 and 2.
    assert chosen[:4] == [0, 1, 0, 1]
    assert {*chosen[4:]} == {0, 1}
    assert replicas._choice.in_flight == [0, 0]
    assert asyncio.run(replicated.generate_async([])) == []


def test_clients_get_the_responses_of_one_engine(
    replicas: ProcessReplicas, engine: Engine, loaded: tuple[Decoder, Tokenizer]
) -> None:
    settings = Settings(MODEL, unseeded="fixed")
    one, several = create_app(engine, *loaded, settings), app_of_replicas(replicas, settings)
    with contextlib.closing(one.state.texts), contextlib.closing(several.state.texts):
        got, expected = responses(several), responses(one)
        for part in itertools.chain(*got, *expected):
            part.pop("system_fingerprint", None)
        assert got == expected
        with TestClient(several) as client:
            asked = {"model": MODEL, "prompt": [1], "max_tokens": 400}
            error = client.post("/v1/completions", json=asked).json()["error"]
            assert "accepted: 400 in all, the engine's max_length" in error["message"]
            assert error["param"] == "max_tokens"


@pytest.mark.parametrize("is_stuck", [False, True], ids=["killed", "stuck"])
def test_a_stream_goes_on_when_its_process_is_killed_or_stuck(
    is_stuck: bool,
    replicated: ReplicatedEngine,
    replicas: ProcessReplicas,
    engine: Engine,
    machine: Machine,
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = asyncio.run(streamed(engine, [LONG]))
    first, other = map(machine.process, replicas.processes)
    sent = first.options["replica"]._outbox.put
    parts = 0

    def put(message: object) -> None:
        nonlocal parts
        if isinstance(message, Answer):
            parts += 1
        if parts < 3:
            return sent(message)
        if parts == 3:
            parts = 4
            if is_stuck:  # and says so
                sent(Failed("one step of its engine has taken 31 s so far"))
            else:
                first.end()

    first.options["replica"]._outbox.put = put
    assert_same_tokens(asyncio.run(streamed(replicated, [LONG])), expected)
    assert replicated.losses == 1
    wait_until(lambda: len(ready(replicas)) == 2)
    assert replicas.processes == [machine.started[2].pid, other.pid]
    reason = "one step of its engine has taken 31 s so far" if is_stuck else "its process has ended with signal SIGKILL"
    assert f"replica 0 is lost: {reason}; restarting it" in caplog.text
    assert first.killed.is_set()
    assert replicas._choice.in_flight == [0, 0]
    assert_same_tokens(asyncio.run(streamed(replicated, REQUESTS)), asyncio.run(streamed(engine, REQUESTS)))


# --- processes --------------------------------------------------------------------------------------------------------


def test_a_replica_that_cannot_start_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["serve", str(tmp_path / "missing"), "--port", "0", "--no-compilation-cache", "--data-parallel", "2"]
    result = commands.run(main, *arguments)
    assert result.exit_code == 2
    assert re.search(r"^error: replica [01] cannot start: .*missing.* is not a directory", result.stderr, re.MULTILINE)

    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ChildProcessError, match=r"replica 0 cannot start: its process has ended with code 1"):
        ProcessReplicas(ReplicaOptions(tmp_path), 1)


def test_options_that_cannot_be_served_are_said_at_once(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "visible_gpus", lambda: ["0", "1", "2"])
    for options, says in (
        (["--data-parallel", "0"], "--data-parallel is 0; accepted: at least 1"),
        (["--data-parallel", "2", "--certify"], "--certify is given and --data-parallel is 2; accepted: one of"),
        (["--data-parallel", "4"], "--data-parallel is 4, and each replica takes 1 GPUs"),
        (["--data-parallel", "2", "--tensor-parallel", "2"], "accepted: up to 3 GPUs in total"),
        (["--data-parallel", "2", "--tensor-parallel", "0"], "with 0 devices per replica; accepted: positive"),
        (["--data-parallel", "2", "--replica-seconds", "0"], "--replica-seconds); accepted: more than 0"),
    ):
        result = commands.run(main, "serve", checkpoint, "--port", "0", *options)
        assert result.exit_code == 2, options
        assert says in result.stderr, options


def test_each_replica_gets_gpus_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_has_cuda_plugin", lambda: True)
    monkeypatch.setattr(module, "_count_gpus", lambda: 4)
    platforms = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    with contextlib.ExitStack() as restored:
        restored.callback(jax.config.update, "jax_platforms", platforms)
        jax.config.update("jax_platforms", None)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        shares = device_shares(2, 2)
        assert shares == [{"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "2,3"}]
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6, GPU-4a,2,0,9")  # CUDA knows four of them
        assert [share["CUDA_VISIBLE_DEVICES"] for share in device_shares(4, 1)] == ["6", "GPU-4a", "2", "0"]
        with pytest.raises(ValueError, match=r"accepted: up to 4 GPUs in total"):
            device_shares(5, 1)
        with no_accelerator():
            assert jax.config.jax_platforms == "cpu"  # pyright: ignore[reportAttributeAccessIssue]
            assert visible_gpus() is None
            assert device_shares(3, 1) == [{}, {}, {}]
        assert jax.config.jax_platforms is None  # pyright: ignore[reportAttributeAccessIssue]
        monkeypatch.setattr(module, "_count_gpus", lambda: None)
        assert visible_gpus() is None


@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)],
    ids=lambda number: number.name,
)
def test_a_server_survives_its_replicas_and_none_of_them_survives_it(number: signal.Signals, checkpoint: Path) -> None:
    command = [sys.executable, "-m", "detjax", "serve", checkpoint, "--port", "0", "--no-compilation-cache"]
    command += ["--data-parallel", "2", "--max-samples", "1", "--token-budget", "8", "--max-length", "64"]
    environment = os.environ | kept_programs.VARIABLES
    server = subprocess.Popen([str(part) for part in command], env=environment, stderr=subprocess.PIPE, text=True)
    asked: Any = {"model": MODEL, "prompt": "x", "max_tokens": 3, "logprobs": 0, "seed": 3}
    try:
        assert server.stderr is not None
        processes, lines = dict[str, int](), list[str]()
        while not lines or " on http://" not in lines[-1]:
            lines.append(server.stderr.readline())
            assert lines[-1], lines
            processes |= {
                name: int(pid) for name, pid in re.findall(r"replica (\d) is ready, process (\d+)", lines[-1])
            }
        assert len(processes) == 2 and all(map(lives, processes.values()))
        # A supervisor's signal reaches all processes.
        for process in processes.values():
            os.kill(process, signal.SIGTERM)
        url = lines[-1].split()[2].rstrip(",")
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            first = client.completions.create(**asked).choices
            assert all(map(lives, processes.values()))
            os.kill(processes["0"], signal.SIGSTOP)  # so that it gets a call, and does not answer
            with ThreadPoolExecutor(1) as threads:
                second = threads.submit(lambda: client.completions.create(**asked).choices)
                for _ in range(2):  # the second time the call is on its way
                    wait_until(lambda: "detjax_prompt_tokens_total 2.0" in metrics(url))
                os.kill(processes["0"], signal.SIGKILL)
                assert second.result(HANGS_AFTER) == first
            assert "detjax_lost_replicas_total 1.0" in metrics(url)
        server.send_signal(number)
        assert server.wait(HANGS_AFTER) == (0 if number == signal.SIGTERM else -number)
        wait_until(lambda: not any(map(lives, processes.values())))
    finally:
        server.kill()
        server.communicate()


def metrics(url: str) -> str:
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        return answer.read().decode()


class FrontEnd:
    """The front's end of a connection to a replica."""

    def __init__(self, connection: Connection, replica: Replica) -> None:
        self.replica = replica
        self._connection, self._waiting = connection, list[object]()

    def send(self, *messages: object) -> None:
        self._connection.send([*messages])

    def received(self, kind: type | tuple[type, ...]) -> Any:
        """The next message of a kind. Others are left out."""
        while True:
            while self._waiting:
                if isinstance(message := self._waiting.pop(0), kind):
                    return message
            assert self._connection.poll(HANGS_AFTER)
            self._waiting = self._connection.recv()


@contextlib.contextmanager
def replica(silence: float, start: Any) -> Iterator[FrontEnd]:
    """The front's end of the connection to a replica that runs in a thread of this process."""
    front, other = Pipe()
    loop = asyncio.new_event_loop()
    watched = Answering(other, Start(ReplicaOptions(Path()), QUIET, silence))
    serving = loop.create_task(watched.serve(start))
    thread = threading.Thread(target=lambda: loop.run_until_complete(asyncio.wait([serving])))
    thread.start()
    try:
        yield FrontEnd(front, watched)
    finally:
        front.send([End()])
        loop.call_soon_threadsafe(serving.cancel)
        thread.join()
        loop.close()
        front.close()
        other.close()


def test_a_call_that_nobody_waits_for_ends_in_the_replica(engine: Engine, loaded: tuple[Decoder, Tokenizer]) -> None:
    facts = ReplicaFacts(ModelMetadata.from_model(loaded[0]), loaded[1].files, engine.config, Origin())
    held, reached = threading.Event(), threading.Event()

    def hold(_: Token) -> None:
        reached.set()
        held.wait(HANGS_AFTER)

    commands = EngineCommands(engine, UpdatableWeights(*loaded))
    with replica(HANGS_AFTER, lambda _: (engine, facts, commands)) as front:
        assert front.received(Ready) == Ready(facts)
        # The engine's thread waits in the listener of another request until the replica gets the message.
        listened = engine.submit(Request([1], SamplingParams(max_tokens=2, ignore_eos=True)), hold)
        assert reached.wait(HANGS_AFTER)
        assert engine.busy_seconds > 0
        front.send(Call(1, [LONG]))
        wait_until(lambda: 1 in front.replica._answering)
        front.send(Call(1, None), Call(2, REQUESTS[:1]))
        wait_until(lambda: 2 in front.replica._answering)
        held.set()
        assert listened.result(HANGS_AFTER).completions
        parts = list[Answer]()
        while Answer(2, None) not in parts:
            parts.append(front.received(Answer))
        wait_until(lambda: not engine.stats().running and not engine.stats().waiting)
        front.send(Call(3, REQUESTS[:1]))
        while Answer(3, None) not in parts:
            parts.append(front.received(Answer))
        assert Answer(1, None) not in parts, "the call went on to its end"
    wait_until(lambda: engine.busy_seconds == 0)


def test_an_engine_at_one_step_for_too_long_is_said() -> None:
    stuck = SimpleNamespace(busy_seconds=0.0, closed=Future[None]())
    with replica(50, lambda _: (stuck, None, None)) as front:
        assert front.received(Ready) == Ready(None)  # pyright: ignore[reportArgumentType]
        assert front.received(Alive) == Alive()
        stuck.busy_seconds = 51.0
        # A sign of life may have been on its way.
        messages = [front.received((Alive, Failed))]
        while messages[-1] == Alive() and len(messages) < 5:
            messages.append(front.received((Alive, Failed)))
        assert messages[-1] == Failed("one step of its engine has taken 51 s so far")


def test_a_replica_without_signs_of_life_at_its_start_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sleeper = tmp_path / "sleeper"
    sleeper.write_text("#!/bin/sh\nexec sleep 1000\n")
    sleeper.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(sleeper))
    monkeypatch.setattr(module, "_SILENCE_AT_START", 0.2)
    with pytest.raises(ChildProcessError, match=r"replica 0 cannot start: it has sent nothing for 0\.2 s"):
        ProcessReplicas(ReplicaOptions(tmp_path), 1, silence=0.1)
