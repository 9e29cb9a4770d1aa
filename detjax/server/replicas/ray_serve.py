"""A server on Ray Serve: replicas of an engine, on any number of machines, behind one endpoint of OpenAI's API.

Two deployments make the application. Replicas of `EngineReplica` have the model. The front is the server of
`detjax serve` without a model: it reads requests, sends each to one of the replicas, and makes the responses. A request
whose replica dies goes on at another one; see `replicas`.

It needs the extra `ray`. From a shell:

    serve run detjax.server.replicas.ray_serve:application model=MODEL_DIR replicas=3
"""

import contextlib
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from ray import exceptions, serve  # pyright: ignore[reportMissingImports]
from starlette.applications import Starlette

from detjax.engine import EngineConfig, Request
from detjax.server.app import app_of
from detjax.server.http.settings import Settings
from detjax.server.replicas.engine import ReplicaFacts, ReplicaOptions, started_engine
from detjax.server.replicated_engine import Batch, ReplicaLost, ReplicatedEngine, batches

_HEALTH_SECONDS = 2.0
"""Seconds between two questions of Ray whether a replica lives. A dead one is replaced after as many at most."""
_LOST = (
    exceptions.RayActorError,
    exceptions.NodeDiedError,
    exceptions.ObjectLostError,
    exceptions.WorkerCrashedError,
)
"""What a call raises whose replica, or whose machine, is gone."""
_OTHER_REQUESTS = 64
"""Requests to the front at once that generate nothing, such as those for its health and its metrics."""


class Arguments(BaseModel):
    """What `application` is given.

    Attributes:
        model: the checkpoint's directory. Every machine that may have a replica has it under the same path.
        replicas: engines, each in a process of its own.
        name: what clients call the model. Default: the directory's name.
        dtype: the dtype of the weights; see `detjax.models.load`.
        tensor_parallel: devices that share the model in each replica; see `detjax.models.mesh_of`.
        engine: fields of `EngineConfig`.
        settings: further fields of `detjax.server.Settings`.
        cache: a directory of compiled programs, with which replicas start sooner; see `Engine.warm_up`.
        actor: what Ray gives each replica, such as `{"num_gpus": 1}`; `ray_actor_options` of its deployments.
    """

    model_config = ConfigDict(extra="forbid")

    model: Path
    replicas: int = Field(default=2, ge=1)
    name: str | None = None
    dtype: str | None = None
    tensor_parallel: int = Field(default=1, ge=1)
    engine: dict[str, Any] = Field(default_factory=dict)
    settings: dict[str, Any] = Field(default_factory=dict)
    cache: Path | None = None
    actor: dict[str, Any] = Field(default_factory=dict)

    def options(self) -> ReplicaOptions:
        """Returns what each replica computes with.

        Raises:
            ValueError: a field of the engine is out of range.
            TypeError: there is no such field.
        """
        config = EngineConfig(**self.engine)
        return ReplicaOptions(
            self.model, dtype=self.dtype, tensor_parallel=self.tensor_parallel, config=config, cache=self.cache
        )

    def server_settings(self) -> Settings:
        """Returns how the front treats its clients.

        Raises:
            ValueError: a field is out of range.
            TypeError: there is no such field.
        """
        return Settings(self.name or self.model.resolve().name, **self.settings)


class EngineReplica:
    """An engine in a process of its own."""

    def __init__(self, arguments: Arguments) -> None:
        """Loads the model and warms the engine up.

        Raises:
            ValueError: the checkpoint has no tokenizer, or the device cannot serve it.
        """
        self._engine, self._facts = started_engine(arguments.options())

    def facts(self) -> ReplicaFacts:
        """Returns what the front has to know."""
        return self._facts

    async def answer(
        self, fingerprint: str, requests: Sequence[Request], is_whole: bool
    ) -> AsyncGenerator[Batch | None]:
        """Yields what `batches` yields; None alone where the replica has another fingerprint than the front expects."""
        if fingerprint != self._facts.fingerprint:
            yield None
            return
        async with contextlib.aclosing(batches(self._engine, requests, is_whole=is_whole)) as answered:
            async for batch in answered:
                yield batch

    def check_health(self) -> None:
        """Ray asks this every two seconds, and replaces the replica where it raises.

        Raises:
            RuntimeError: the engine has ended.
        """
        if not self._engine.is_open:
            raise RuntimeError("the engine has failed; the replica's log says why")


class _RayReplicas:
    """The replicas behind a handle of Ray Serve, which sends each call to one that lives and has little to do."""

    def __init__(self, handle: Any, fingerprint: str) -> None:
        self._handle, self._fingerprint = handle.options(method_name="answer", stream=True), fingerprint

    @property
    def failure(self) -> None:
        """Nothing: Ray starts replicas again for as long as the application is there."""

    async def stream(self, requests: Sequence[Request], *, is_whole: bool) -> AsyncGenerator[Batch]:
        response = self._handle.remote(self._fingerprint, requests, is_whole)
        try:
            async for batch in response:
                if batch is None:
                    raise ReplicaLost(f"it has another fingerprint than {self._fingerprint}")
                yield batch
        except _LOST as error:
            raise ReplicaLost("its process has ended or cannot be reached") from error
        finally:
            response.cancel()


class Front:
    """The server without a model. Ray Serve's proxies send it the requests of clients."""

    async def __init__(self, engine: Any, arguments: Arguments) -> None:
        """Waits for a replica, and makes the server for what it says.

        Args:
            engine: the handle of the replicas.
            arguments: those of the application.
        """
        facts: ReplicaFacts = await engine.facts.remote()
        tokenizer = facts.tokenizer()
        replicas = _RayReplicas(engine, facts.fingerprint)
        replicated = ReplicatedEngine(replicas, facts.outline, tokenizer, facts.config)
        self._served = app_of(replicated, facts.outline, tokenizer, arguments.server_settings(), facts.origin)
        self._served.state.texts.start()

    def __serve_build_asgi_app__(self) -> Starlette:
        """Ray Serve calls this when the constructor has ended."""
        return self._served


def application(arguments: Arguments) -> Any:
    """Returns an application that `ray.serve.run` takes, or `serve run` on the command line.

    Example:
        >>> serve.run(application(Arguments(model="MODEL_DIR", replicas=3)))  # doctest: +SKIP

    Raises:
        ValueError: an argument is out of range.
        TypeError: an engine or a server has no such setting.
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
        # It computes nothing, so it must not take a GPU's memory.
        ray_actor_options={
            "num_cpus": arguments.actor.get("num_cpus", 1),
            "runtime_env": {"env_vars": {"JAX_PLATFORMS": "cpu"}},
        },
    )
    return front.bind(replica.bind(arguments), arguments)
