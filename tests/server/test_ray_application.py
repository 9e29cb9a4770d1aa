"""The application for Ray Serve, with modules in place of Ray's: what it deploys, and how its parts talk."""

import asyncio
import contextlib
import importlib
import itertools
import sys
from collections.abc import AsyncGenerator, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Final
from unittest import mock

import pytest
from pydantic import ValidationError

from detjax.audit import Origin
from detjax.engine import EngineConfig, Request, Token
from detjax.engine.commands import Abort, Commit, Discard, ForgetPrefixes, Pause, Prepare, Prepared, Sleep
from detjax.models import ModelMetadata, Tokenizer
from detjax.server import ReplicaOptions, Settings
from detjax.server.replicas.engine import ReplicaFacts
from detjax.server.replicated_engine import ReplicaLost

ERRORS: Final = ("RayActorError", "NodeDiedError", "ObjectLostError", "WorkerCrashedError")


class Deployed:
    """A deployment: a class, its options, and the arguments that are bound to it."""

    def __init__(self, kind: type, **options: Any) -> None:
        self.kind, self.options, self.bound = kind, options, ()

    def bind(self, *arguments: Any) -> "Deployed":
        self.bound = arguments
        return self


@pytest.fixture
def ray() -> Iterator[Any]:
    """The module of the application, which has imported these modules as Ray's."""
    package, serve, exceptions = (ModuleType(name) for name in ("ray", "ray.serve", "ray.exceptions"))
    serve.deployment, serve.ingress = Deployed, lambda: lambda kind: kind  # pyright: ignore[reportAttributeAccessIssue]
    for name in ERRORS:
        setattr(exceptions, name, type(name, (Exception,), {}))
    package.serve, package.exceptions = serve, exceptions  # pyright: ignore[reportAttributeAccessIssue]
    name = "detjax.server.replicas.ray_serve"
    replaced = {"ray": package, "ray.serve": serve, "ray.exceptions": exceptions}
    with mock.patch.dict(sys.modules, replaced):
        sys.modules.pop(name, None)
        try:
            yield importlib.import_module(name)
        finally:
            sys.modules.pop(name, None)


def test_arguments_become_options_of_the_engine_and_of_the_server(ray: Any, tmp_path: Path) -> None:
    least = ray.Arguments(model=tmp_path)
    assert (least.replicas, least.actor) == (2, {})
    assert least.options() == ReplicaOptions(tmp_path)
    assert least.server_settings() == Settings(tmp_path.name)
    given = {"dtype": "float32", "tensor_parallel": 2, "cache": tmp_path}
    full = ray.Arguments(model=tmp_path, name="n", engine={"max_samples": 3}, settings={"max_body": 7}, **given)
    assert full.options() == ReplicaOptions(tmp_path, config=EngineConfig(max_samples=3), **given)
    assert full.server_settings() == Settings("n", max_body=7)
    for wrong in ({"replicas": 0}, {"tensor_parallel": 0}, {"other": 1}):
        with pytest.raises(ValidationError, match=next(iter(wrong))):
            ray.Arguments(model=tmp_path, **wrong)


def test_an_application_has_a_front_and_replicas(ray: Any, tmp_path: Path) -> None:
    arguments = ray.Arguments(model=tmp_path, replicas=3, settings={"max_in_flight": 7}, actor={"num_gpus": 1})
    front = ray.application(arguments)
    replica, given = front.bound
    assert given is arguments and replica.bound == (arguments,)
    assert (front.kind, replica.kind) == (ray.Front, ray.EngineReplica)
    assert replica.options == {
        "num_replicas": 3,
        "max_ongoing_requests": 7,
        "health_check_period_s": 2.0,
        "ray_actor_options": {"num_gpus": 1},
    }
    assert front.options == {
        "name": "Front",
        "max_ongoing_requests": 7 + 64,
        "health_check_period_s": 2.0,
        "ray_actor_options": {"num_cpus": 1, "runtime_env": {"env_vars": {"JAX_PLATFORMS": "cpu"}}},
    }
    slower = ray.application(ray.Arguments(model=tmp_path, actor={"num_cpus": 0.5}))
    assert slower.options["ray_actor_options"]["num_cpus"] == 0.5
    for wrong, error in (({"engine": {"slots": 3}}, TypeError), ({"settings": {"max_body": 0}}, ValueError)):
        with pytest.raises(error):
            ray.application(ray.Arguments(model=tmp_path, **wrong))


@pytest.fixture
def facts(metadata: ModelMetadata, words: Tokenizer) -> ReplicaFacts:
    return ReplicaFacts(metadata, words.files, EngineConfig(max_length=400), Origin("0123456789abcdef", "5" * 64))


TOKENS: Final = [(0, Token(0, 5, -1.0, (), "x", None, 1))]


def test_a_replica_answers_fronts_of_its_own_fingerprint(ray: Any, tmp_path: Path, facts: ReplicaFacts) -> None:
    asked: list[Any] = []
    engine = SimpleNamespace(is_open=True)

    async def batches(*given: Any, is_whole: bool) -> AsyncGenerator[Any]:
        asked.append((*given, is_whole))
        yield TOKENS

    async def answers(fingerprint: str) -> list[Any]:
        state = ray.ReplicaState(fingerprint)
        return [batch async for batch in replica.answer(state, [Request("x")], True)]

    started = mock.Mock(return_value=(engine, facts, None))
    with mock.patch.object(ray, "started_engine", started), mock.patch.object(ray, "batches", batches):
        replica = ray.EngineReplica(ray.Arguments(model=tmp_path, dtype="float32"))
        started.assert_called_once_with(ReplicaOptions(tmp_path, dtype="float32"))
        assert replica.facts() is facts
        assert asyncio.run(answers("detjax-other")) == [None]
        assert asked == []
        assert asyncio.run(answers(facts.fingerprint)) == [TOKENS]
        assert asked == [(engine, [Request("x")], True)]
    replica.check_health()
    engine.is_open = False
    with pytest.raises(RuntimeError, match="the engine has failed"):
        replica.check_health()


class Handle:
    """A handle of replicas, whose calls yield batches, or raise an error after them."""

    def __init__(self, batches: Sequence[Any], error: Exception | None = None) -> None:
        self.batches, self.error = batches, error
        self.given: list[Any] = []
        self.cancelled = 0

    def options(self, **options: Any) -> "Handle":
        self.given.append(options)
        return self

    def remote(self, *arguments: Any) -> Any:
        self.given.append(arguments)

        async def answer() -> AsyncGenerator[Any]:
            for batch in self.batches:
                yield batch
            if self.error is not None:
                raise self.error

        def cancel() -> None:
            self.cancelled += 1

        return Response(answer(), cancel)


class Response:
    """The response to a call."""

    def __init__(self, batches: AsyncGenerator[Any], cancel: Any) -> None:
        self._batches, self.cancel = batches, cancel

    def __aiter__(self) -> AsyncGenerator[Any]:
        return self._batches


@pytest.mark.parametrize("name", [None, "fingerprint", "other", *ERRORS])
def test_a_lost_replica_is_distinct_from_other_errors(ray: Any, facts: ReplicaFacts, name: str | None) -> None:
    error = KeyError() if name == "other" else None
    if name in ERRORS:
        error = getattr(sys.modules["ray.exceptions"], name)()
    handle = Handle([TOKENS, None] if name == "fingerprint" else [TOKENS], error)
    replicas = ray._RayReplicas(handle, facts)
    assert replicas.failure is None
    got: list[Any] = []

    async def ask() -> None:
        async for batch in replicas.stream([Request("x")], is_whole=True):
            got.append(batch)

    says = {None: None, "other": KeyError, "fingerprint": ReplicaLost}.get(name, ReplicaLost)
    with contextlib.nullcontext() if says is None else pytest.raises(says) as raised:
        asyncio.run(ask())
    if name == "fingerprint":
        assert raised is not None
        assert str(raised.value) == f"its fingerprint is not {facts.fingerprint}"
    assert (got, handle.cancelled) == ([TOKENS], 1)
    state = ray.ReplicaState(facts.fingerprint)
    assert handle.given == [{"method_name": "answer", "stream": True}, (state, [Request("x")], True)]


class Commands:
    """Commands of a replica whose updates change its digest to their path, and are refused if that is "bad"."""

    def __init__(self) -> None:
        self.digest, self.log = "5" * 64, list[Any]()
        self._prepared: Path | None = None

    async def command(self, command: Any) -> Any:
        self.log.append(command)
        match command:
            case Prepare(path):
                if path.name == "bad":
                    raise ValueError("it does not fit")
                self._prepared = path
                return Prepared(str(path), is_whole=True)
            case Commit():
                self.digest = str(self._prepared)
            case _:
                pass


def test_replicas_take_updates_with_the_next_call_or_do_not_answer(
    ray: Any, tmp_path: Path, facts: ReplicaFacts
) -> None:
    one, other = Commands(), Commands()

    async def batches(*_: Any, is_whole: bool) -> AsyncGenerator[Any]:
        yield TOKENS

    made = []
    with mock.patch.object(ray, "batches", batches):
        for commands in (one, other):
            started = mock.Mock(return_value=(SimpleNamespace(is_open=True), facts, commands))
            with mock.patch.object(ray, "started_engine", started):
                made.append(ray.EngineReplica(ray.Arguments(model=tmp_path)))
        turns = itertools.cycle(made)

        class Replicas(Handle):
            def options(self, **options: Any) -> "Handle":
                name = options["method_name"]
                call = SimpleNamespace(remote=lambda *given: getattr(next(turns), name)(*given))
                if name == "answer":
                    plain, call = call.remote, SimpleNamespace()
                    call.remote = lambda *given: Response(plain(*given), lambda: None)
                return call

        replicas = ray._RayReplicas(Replicas([]), facts)

        async def ask() -> list[Any]:
            return [batch async for batch in replicas.stream([Request("x")], is_whole=True)]

        async def updates() -> None:
            assert await ask() == await ask() == [TOKENS]
            with pytest.raises(ValueError, match="it does not fit"):
                await replicas.command(Prepare(Path("bad")))
            await replicas.command(Discard())
            assert await ask() == await ask() == [TOKENS]
            assert await replicas.command(Prepare(Path("new"))) == Prepared("new", is_whole=True)
            assert (one.digest, other.digest) == ("5" * 64, "5" * 64)
            await replicas.command(Commit())
            assert replicas.kept_files == (Path("new"),)
            assert await ask() == await ask() == [TOKENS]
            assert (one.digest, other.digest) == ("new", "new")
            assert not any(isinstance(command, ForgetPrefixes) for command in one.log + other.log)
            await replicas.command(ForgetPrefixes())
            assert await ask() == await ask() == [TOKENS]
            assert [*map(type, (one.log[-1], other.log[-1]))] == [ForgetPrefixes] * 2
            await replicas.command(Prepare(Path("newer")))
            await replicas.command(Commit())
            made[0]._answering = 1  # a call that was cancelled, but has not ended
            with pytest.raises(ReplicaLost):
                for _ in range(2):
                    await ask()
            for command in (Pause(), Sleep(True), Abort(("a",))):
                with pytest.raises(ValueError, match="is not possible on Ray Serve"):
                    await replicas.command(command)

        asyncio.run(updates())


def test_a_control_key_needs_a_directory_that_all_machines_have(ray: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="control_key is given without weights_directory; accepted on Ray Serve: both"):
        ray.application(ray.Arguments(model=tmp_path, settings={"control_key": "a"}))
    ray.application(ray.Arguments(model=tmp_path, settings={"control_key": "a", "weights_directory": tmp_path}))


def test_a_front_serves_with_the_facts_of_a_replica(ray: Any, tmp_path: Path, facts: ReplicaFacts) -> None:
    class Engine(Handle):
        @property
        def facts(self) -> Any:
            async def known() -> ReplicaFacts:
                return facts

            return SimpleNamespace(remote=known)

    async def front() -> Any:
        made = object.__new__(ray.Front)
        await made.__init__(Engine([]), ray.Arguments(model=tmp_path, name="n", settings={"max_in_flight": 7}))
        return made

    app = asyncio.run(front()).__serve_build_asgi_app__()
    with contextlib.closing(app.state.texts):
        assert app.state.fingerprint == facts.fingerprint
        assert app.state.guard.capacity == 7
        assert app.state.engine.config == facts.config
