"""A server on Ray Serve: one endpoint of OpenAI's API for replicas of an engine on any number of machines.

The application has two deployments. Replicas of `EngineReplica` have the model. The front is the server of
`detjax serve` without a model: it reads requests, sends each to a replica, and makes the responses. If a replica dies,
its requests continue on another one; see `replicated_engine`.

Ray sends a call to one replica of its choice, so commands do not reach all of them. Instead each call has the state
that its replica must be in, and a replica that is not takes the missing updates before it answers, or does not answer.

Requires the extra `ray`. From a shell:

    serve run detjax.server.replicas.ray_serve:application model=MODEL_DIR replicas=3
"""

import asyncio
import contextlib
import dataclasses
import json
import logging
from collections.abc import AsyncGenerator, Collection, Sequence
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field
from ray import exceptions, serve  # pyright: ignore[reportMissingImports]
from starlette.applications import Starlette

from detjax.engine import EngineConfig, Request, SpeculativeConfig
from detjax.engine.commands import Command, Commit, Discard, ForgetPrefixes, History, Prepare, Prepared
from detjax.models.checkpoint.quantization_schemes import Quantized
from detjax.server.app import app_of
from detjax.server.http.settings import Settings
from detjax.server.replicas.engine import ReplicaFacts, ReplicaOptions, started_engine
from detjax.server.replicated_engine import Batch, ReplicaLost, ReplicatedEngine, batches

_log: Final = logging.getLogger(__name__)
_HEALTH_SECONDS = 2.0
"""Seconds between two health checks, hence the longest time until a dead replica is replaced."""
_LOST = (
    exceptions.RayActorError,
    exceptions.NodeDiedError,
    exceptions.ObjectLostError,
    exceptions.WorkerCrashedError,
)
"""Errors of calls whose replica or machine is lost."""
_OTHER_REQUESTS = 64
"""Concurrent requests to the front that generate nothing, such as health checks and metrics."""


class Arguments(BaseModel):
    """The arguments of `application`.

    Attributes:
        model: the checkpoint's directory, under the same path on every machine that may run a replica.
        replicas: number of replicas, each an engine in its own process.
        name: the model's name for clients. Default: the directory's name.
        dtype: the dtype of the weights; see `detjax.models.load`.
        tensor_parallel: devices of each replica that the model is sharded over; see `detjax.models.mesh_of`.
        overrides: keys of `config.json` with the values to read instead; see `detjax.models.load`.
        quantized: the reading of quantized weights; see `detjax.models.load`.
        engine: fields of `EngineConfig`; `speculative` is an object as for `--speculative-config`.
        settings: additional fields of `detjax.server.Settings`.
        cache: directory of compiled programs, which makes replicas start faster; see `Engine.warm_up`.
        actor: `ray_actor_options` of the replicas, such as `{"num_gpus": 1}`.
    """

    model_config = ConfigDict(extra="forbid")

    model: Path
    replicas: int = Field(default=2, ge=1)
    name: str | None = None
    dtype: str | None = None
    tensor_parallel: int = Field(default=1, ge=1)
    overrides: dict[str, Any] = Field(default_factory=dict)
    quantized: Quantized = "computed"
    engine: dict[str, Any] = Field(default_factory=dict)
    settings: dict[str, Any] = Field(default_factory=dict)
    cache: Path | None = None
    actor: dict[str, Any] = Field(default_factory=dict)

    def options(self) -> ReplicaOptions:
        """Returns the options of each replica."""
        given = dict(self.engine)
        if isinstance(speculative := given.get("speculative"), dict):
            given["speculative"] = SpeculativeConfig.from_json(json.dumps(speculative), self.model)
        config = EngineConfig(**given)
        return ReplicaOptions(
            self.model,
            dtype=self.dtype,
            tensor_parallel=self.tensor_parallel,
            overrides=self.overrides,
            quantized=self.quantized,
            config=config,
            cache=self.cache,
        )

    def server_settings(self) -> Settings:
        """Returns the front's settings.

        Raises:
            ValueError: a setting is out of range, or weights could not be uploaded to all machines.
        """
        settings = Settings(self.name or self.model.resolve().name, **self.settings)
        if settings.control_key is not None and settings.weights_directory is None:
            raise ValueError(
                "Settings: control_key is given without weights_directory; accepted on Ray Serve: both, with a "
                "directory that has the same files on every machine"
            )
        return settings


@dataclasses.dataclass(frozen=True)
class ReplicaState:
    """The state that a replica must be in to answer a call.

    Attributes:
        fingerprint: its fingerprint.
        updates: the updates of the weights that lead to it, in order; see `History.updates`.
        resets: number of times that the prefix cache was cleared.
    """

    fingerprint: str
    updates: tuple[Path, ...] = ()
    resets: int = 0


class EngineReplica:
    """An engine in its own process."""

    def __init__(self, arguments: Arguments) -> None:
        """Loads the model and warms up the engine; see `started_engine`."""
        self._engine, self._facts, self._commands = started_engine(arguments.options())
        self._resets = 0
        self._answering = 0
        self._changing = asyncio.Lock()

    def facts(self) -> ReplicaFacts:
        """Returns facts for the front."""
        return self._facts

    async def prepare(self, state: ReplicaState, path: Path) -> Prepared | ValueError | None:
        """Returns the facts about new weights, or the reason why they do not fit. Changes nothing but the state.

        None: the replica cannot take the given state.
        """
        if not await self._takes(state):
            return None
        async with self._changing:
            try:
                return await self._commands.command(Prepare(path))
            except ValueError as error:
                return ValueError(str(error))  # an exception of this process would have its traceback in its text
            finally:
                await self._commands.command(Discard())

    async def answer(
        self, state: ReplicaState, requests: Sequence[Request], is_whole: bool
    ) -> AsyncGenerator[Batch | None]:
        """Yields the batches of an answer, or only None if the replica cannot take the state that the front expects."""
        if not await self._takes(state):
            yield None
            return
        self._answering += 1
        try:
            async for batch in self._batches(requests, is_whole):
                yield batch
        finally:
            self._answering -= 1

    async def _takes(self, state: ReplicaState) -> bool:
        """Takes the updates of a state that are missing. Returns False if the replica has other weights then."""
        async with self._changing:
            if state.fingerprint != self._facts.fingerprint:
                if not state.updates or self._answering:  # a front updates when no call is running
                    return False
                try:
                    for path in state.updates:
                        await self._commands.command(Prepare(path))
                        await self._commands.command(Commit())
                except (ValueError, RuntimeError) as error:
                    _log.error("a replica cannot take an update: %s", error)
                self._facts = self._facts.with_digest(self._commands.digest)
            if state.resets != self._resets:
                await self._commands.command(ForgetPrefixes())
                self._resets = state.resets
            return state.fingerprint == self._facts.fingerprint

    async def _batches(self, requests: Sequence[Request], is_whole: bool) -> AsyncGenerator[Batch]:
        async with contextlib.aclosing(batches(self._engine, requests, is_whole=is_whole)) as answered:
            async for batch in answered:
                yield batch

    def check_health(self) -> None:
        """Raises a RuntimeError if the engine has failed, so that Ray replaces the replica."""
        if not self._engine.is_open:
            raise RuntimeError("the engine has failed; the replica's log has the reason")


class _RayReplicas:
    """The replicas of a Ray Serve handle, which sends each call to a live replica with little load."""

    def __init__(self, handle: Any, facts: ReplicaFacts) -> None:
        self._handle, self._facts = handle, facts
        self._answers = handle.options(method_name="answer", stream=True)
        self._history, self._digest, self._resets = History(), "", 0

    @property
    def failure(self) -> None:
        """Always None: Ray restarts replicas as long as the application exists."""

    @property
    def kept_files(self) -> Collection[Path]:
        """Files of updates that replicas need when they start again."""
        return self._history.updates

    @property
    def _state(self) -> ReplicaState:
        return ReplicaState(self._facts.fingerprint, self._history.updates, self._resets)

    async def stream(self, requests: Sequence[Request], *, is_whole: bool) -> AsyncGenerator[Batch]:
        response = self._answers.remote(self._state, requests, is_whole)
        try:
            async for batch in response:
                if batch is None:
                    raise ReplicaLost(f"its fingerprint is not {self._facts.fingerprint}")
                yield batch
        except _LOST as error:
            raise ReplicaLost("its process has ended or is unreachable") from error
        finally:
            response.cancel()

    async def command(self, command: Command) -> Any:
        """Runs a command that replicas can take with their next call; see `Replicas.command`.

        Raises:
            ValueError: the command would have to reach all replicas now, or prepared weights do not fit the model.
        """
        match command:
            case Prepare(path):
                prepare = self._handle.options(method_name="prepare")
                try:
                    prepared = await prepare.remote(self._state, path)
                except _LOST as error:
                    raise ReplicaLost("its process has ended or is unreachable") from error
                if prepared is None:
                    raise ReplicaLost(f"its fingerprint is not {self._facts.fingerprint}")
                if isinstance(prepared, ValueError):
                    raise prepared
                self._history.note_prepared(path, prepared)
                self._digest = prepared.digest
                return prepared
            case Commit():
                self._history.note(command)
                self._facts = self._facts.with_digest(self._digest)
            case Discard():
                self._history.note(command)
            case ForgetPrefixes():
                self._resets += 1
            case _:
                raise ValueError(
                    f"{type(command).__name__} is not possible on Ray Serve, which sends a call to one replica of its "
                    "choice; accepted: mode wait, and updates with mode wait or keep. For all of them, give each "
                    "machine a server with --data-parallel"
                )
        return None


class Front:
    """The server without a model, which gets the clients' requests from Ray Serve's proxies."""

    async def __init__(self, engine: Any, arguments: Arguments) -> None:
        """Waits for a replica, and creates the server; `engine` is the handle of the replicas."""
        facts: ReplicaFacts = await engine.facts.remote()
        tokenizer = facts.tokenizer()
        replicas = _RayReplicas(engine, facts)
        replicated = ReplicatedEngine(replicas, facts.metadata, tokenizer, facts.config)
        settings = arguments.server_settings()
        self._served = app_of(replicated, facts.metadata, tokenizer, settings, facts.origin, replicated)
        self._served.state.texts.start()

    def __serve_build_asgi_app__(self) -> Starlette:
        """Called by Ray Serve after the constructor."""
        return self._served


def application(arguments: Arguments) -> Any:
    """Returns an application for `ray.serve.run`, or for `serve run` on the command line.

    Example:
        >>> serve.run(application(Arguments(model="MODEL_DIR", replicas=3)))  # doctest: +SKIP

    Raises:
        ValueError: an argument is out of range.
        TypeError: a setting of the engine or the server does not exist.
    """
    arguments.options()
    in_flight = arguments.server_settings().max_in_flight
    replica = serve.deployment(
        EngineReplica,
        num_replicas=arguments.replicas,
        max_ongoing_requests=in_flight,
        health_check_period_s=_HEALTH_SECONDS,
        ray_actor_options=arguments.actor,
    )
    front = serve.deployment(
        serve.ingress()(Front),
        name="Front",
        max_ongoing_requests=in_flight + _OTHER_REQUESTS,
        health_check_period_s=_HEALTH_SECONDS,
        # The front computes nothing and must not take a GPU's memory.
        ray_actor_options={
            "num_cpus": arguments.actor.get("num_cpus", 1),
            "runtime_env": {"env_vars": {"JAX_PLATFORMS": "cpu"}},
        },
    )
    return front.bind(replica.bind(arguments), arguments)
