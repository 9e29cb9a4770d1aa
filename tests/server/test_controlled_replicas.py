"""Control of several replicas: new weights in all or in none, whatever happens to their processes."""

import asyncio
import contextlib
import dataclasses
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy

from detjax import models
from detjax.audit import Origin
from detjax.engine import Engine, Request, SamplingParams
from detjax.engine.commands import (
    Abort,
    Commit,
    Discard,
    EngineCommands,
    Pause,
    Prepare,
    Prepared,
    Resume,
    Sleep,
    WakeUp,
)
from detjax.models import ModelMetadata
from detjax.models.checkpoint.weight_updates import UpdatableWeights
from detjax.server import LogSettings, ProcessReplicas
from detjax.server.replicas.engine import ReplicaFacts, ReplicaOptions
from detjax.server.replicated_engine import ReplicatedEngine
from tests.server.controlled import SIZES, saved
from tests.server.running_server import wait_until
from tests.server.threads_as_processes import Answering, Machine, Process
from tests.support.waits import HANGS_AFTER

PARAMS = SamplingParams(max_tokens=6, temperature=0.8, seed=5, ignore_eos=True)
REQUEST = Request([5, 6, 7], PARAMS, id="a")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights")
    saved(path, ["one", "two", "three"])
    return path


class Replicated:
    """Two replicas in threads, each with an engine of its own.

    Attributes:
        replicas: the replicas.
        front: the engine that forwards requests to them.
        commands: the commands of each replica's process, in the order of their starts.
    """

    def __init__(self, machine: Machine, directory: Path) -> None:
        self.machine, self.directory = machine, directory
        self.commands: list[Noted] = []
        self._starting = threading.Lock()
        self.before: Callable[[int, Any], None] = lambda number, command: None
        machine.programs = [self._program]
        self.replicas = ProcessReplicas(ReplicaOptions(Path()), 2, log=LogSettings(level="error"), silence=HANGS_AFTER)
        facts = self.replicas.facts
        self.front = ReplicatedEngine(self.replicas, facts.metadata, facts.tokenizer(), facts.config)

    def _program(self, process: Process) -> int:
        replica = Reading(process.connection, process.connection.recv()[0])
        engines = contextlib.ExitStack()

        def started(_: ReplicaOptions) -> Any:
            model, tokenizer = models.load(self.directory / "one", progress=False)
            assert tokenizer is not None
            engine = engines.enter_context(Engine(model, tokenizer, **SIZES))
            weights = UpdatableWeights(model, tokenizer)
            with self._starting:
                commands = Noted(self, len(self.commands), engine, weights)
                self.commands.append(commands)
            origin = Origin("an environment", weights.digest.value)
            return (
                engine,
                ReplicaFacts(ModelMetadata.from_model(model), tokenizer.files, engine.config, origin),
                commands,
            )

        async def serve() -> None:
            serving = asyncio.create_task(replica.serve(started))
            await asyncio.to_thread(process.killed.wait)
            serving.cancel()
            await asyncio.gather(serving, *replica._answering.values(), return_exceptions=True)

        with engines:
            asyncio.run(serve())
        # Otherwise it might read from the next process's connection, which may get the same descriptor.
        assert replica.has_read.wait(HANGS_AFTER)
        return 0

    def run(self, command: Any) -> Any:
        return asyncio.run(self.front.command(command))

    def update(self, name: str) -> Prepared:
        prepared = self.run(Prepare(self.directory / name))
        self.run(Commit())
        return prepared

    def answer(self) -> Any:
        (generation,) = asyncio.run(self.front.generate_async([REQUEST]))
        return generation.completions[0]

    def from_each(self) -> list[Any]:
        """The answer of each replica."""
        answers = []
        for number in range(2):
            wait_until(lambda: all(one.is_ready for one in self.replicas._replicas))
            self.replicas._choice.in_flight = [0 if one == number else 99 for one in range(2)]
            self.replicas._choice.forget(0)
            self.replicas._choice.forget(1)
            answers.append(self.answer())
        self.replicas._choice.in_flight = [0, 0]
        return answers

    def kill(self, number: int) -> None:
        """Kills a replica's process, and waits until another one is ready."""
        before = self.replicas.processes[number]
        self.machine.process(before).end()
        wait_until(lambda: self.replicas.processes[number] not in (None, before))
        wait_until(lambda: self.replicas._replicas[number].is_ready)


class Reading(Answering):
    """A replica that says when it reads no more messages."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.has_read = threading.Event()

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        super()._read(loop)
        self.has_read.set()


class Noted(EngineCommands):
    """Commands of a replica that a test may interfere with."""

    def __init__(self, replicated: Replicated, number: int, engine: Engine, weights: UpdatableWeights) -> None:
        super().__init__(engine, weights)
        self.engine, self.log = engine, list[Any]()
        self._replicated, self._number = replicated, number

    def run(self, command: Any) -> Any:
        self.log.append(command)
        self._replicated.before(self._number, command)
        return super().run(command)


@pytest.fixture
def two(machine: Machine, directory: Path) -> Iterator[Replicated]:
    replicated = Replicated(machine, directory)
    with contextlib.closing(replicated.replicas):
        yield replicated
        for process in machine.started:
            process.end()


@pytest.fixture(scope="module")
def answers(directory: Path) -> dict[str, Any]:
    """The answer of each version."""
    result = {}
    for name in ("one", "two", "three"):
        with Engine(*models.load(directory / name, progress=False), **SIZES) as engine:
            result[name] = engine.generate([REQUEST])[0].completions[0]
    return result


def test_all_replicas_get_new_weights_and_so_do_later_ones(
    two: Replicated, answers: dict[str, Any], directory: Path
) -> None:
    assert two.from_each() == [answers["one"]] * 2
    prepared = two.update("two")
    assert prepared.digest == models.digest(*models.load(directory / "two", progress=False))
    assert two.replicas.facts.origin.model == prepared.digest
    assert two.from_each() == [answers["two"]] * 2
    two.kill(0)
    assert two.from_each() == [answers["two"]] * 2
    two.update("three")
    two.kill(1)
    assert two.from_each() == [answers["three"]] * 2
    assert two.front.kept_files == (directory / "three",)


def test_updates_of_some_tensors_are_repeated_in_order(
    two: Replicated, directory: Path, tmp_path: Path, answers: dict[str, Any]
) -> None:
    names = ["model.embed_tokens.weight", "model.norm.weight"]
    tensors = safetensors.numpy.load_file(directory / "two" / "model.safetensors")
    files = [tmp_path / f"{name}.safetensors" for name in names]
    for name, file in zip(names, files, strict=True):
        safetensors.numpy.save_file({name: tensors[name]}, file)
        two.run(Prepare(file))
        two.run(Commit())
    assert two.front.kept_files == tuple(files)
    (answer, other) = two.from_each()
    two.kill(0)
    assert answer == other != answers["one"]
    assert two.from_each() == [answer] * 2
    two.update("one")
    assert two.from_each() == [answers["one"]] * 2


def test_weights_that_one_replica_refuses_are_taken_by_none(two: Replicated, answers: dict[str, Any]) -> None:
    def refuse(number: int, command: Any) -> None:
        if number == 1 and isinstance(command, Prepare):
            raise ValueError("they do not fit here")

    two.before = refuse
    with pytest.raises(ValueError, match="they do not fit here"):
        two.run(Prepare(two.directory / "two"))
    assert [type(commands.log[-1]) for commands in two.commands] == [Discard, Discard]
    two.before = lambda number, command: None
    with pytest.raises(ValueError, match="is missing"):
        two.run(Prepare(two.directory / "missing.safetensors"))
    assert two.from_each() == [answers["one"]] * 2
    assert len(two.commands) == 2


def test_replicas_that_read_different_weights_take_none(
    two: Replicated, tmp_path: Path, answers: dict[str, Any]
) -> None:
    shutil.copytree(two.directory / "two", tmp_path / "changing")

    def change(number: int, command: Any) -> None:
        if isinstance(command, Prepare):
            object.__setattr__(command, "path", two.directory / ("two", "three")[number])

    two.before = change
    with pytest.raises(ValueError, match="was changed while it was read"):
        two.run(Prepare(tmp_path / "changing"))
    assert two.from_each() == [answers["one"]] * 2


def test_a_replica_that_dies_while_it_prepares_starts_again_with_the_committed_weights(
    two: Replicated, answers: dict[str, Any]
) -> None:
    def die(number: int, command: Any) -> None:
        if number == 1 and isinstance(command, Prepare):
            two.machine.process(two.replicas.processes[1]).end()

    two.before = die
    two.update("two")
    assert two.from_each() == [answers["two"]] * 2
    assert len(two.commands) >= 3


def test_a_replica_that_comes_back_before_the_commit_does_not_serve_old_weights(
    two: Replicated, answers: dict[str, Any]
) -> None:
    two.run(Prepare(two.directory / "two"))
    two.kill(0)
    two.run(Commit())
    assert two.from_each() == [answers["two"]] * 2


@pytest.mark.parametrize("numbers", [{0}, {0, 1}])
def test_a_replica_that_cannot_commit_starts_again_with_the_new_weights(
    two: Replicated, answers: dict[str, Any], numbers: set[int]
) -> None:
    def fail(number: int, command: Any) -> None:
        if number in numbers and isinstance(command, Commit):
            raise MemoryError("the device is full")

    two.before = fail
    two.update("two")
    assert two.from_each() == [answers["two"]] * 2
    assert two.front.failure is None


def test_a_replica_that_starts_again_sleeps_and_pauses_like_the_others(
    two: Replicated, answers: dict[str, Any]
) -> None:
    two.update("two")
    two.run(Pause())
    two.run(Sleep(keeps_weights=True))
    two.run(WakeUp(("weights",)))
    two.kill(1)
    late = two.commands[-1]
    wait_until(lambda: [*map(type, late.log)] == [Prepare, Commit, Sleep, WakeUp, Pause])
    wait_until(lambda: late.engine._is_paused)
    assert late.engine._asleep == {"kv_cache"}
    two.run(WakeUp())
    two.run(Resume())
    assert two.from_each() == [answers["two"]] * 2
    two.run(Sleep(keeps_weights=False))
    two.run(WakeUp())
    two.kill(0)
    wait_until(lambda: not two.commands[-1].engine._loop.has_weights)
    two.update("one")
    assert two.from_each() == [answers["one"]] * 2


def test_an_abort_reaches_the_replica_of_its_request_also_before_the_request(two: Replicated) -> None:
    long = dataclasses.replace(REQUEST, sampling=dataclasses.replace(PARAMS, max_tokens=300), id="long")

    async def aborted() -> Any:
        asking = asyncio.create_task(two.front.generate_async([long]))
        while not any(commands.engine.stats().running for commands in two.commands):
            await asyncio.sleep(0.01)
        assert await two.front.command(Abort(("long",))) == 1
        (first,) = await asking
        (second,) = await two.front.generate_async([long])
        events = [event async for event in two.front.stream_all([long])]
        return first, second, events

    first, second, events = asyncio.run(aborted())
    assert first.completions[0].finish_reason == second.completions[0].finish_reason == "abort"
    assert len(first.completions[0].tokens) < 300
    assert second.completions[0].tokens == ()
    assert [event.sample for _, event in events] == [0]
