"""A server on Ray Serve: one endpoint of OpenAI's API for replicas of an engine on any number of machines.

The application has two deployments. Replicas of `EngineReplica` have the model. The front is the server of
`detjax serve` without a model: it reads requests, sends each to a replica, and makes the responses. If a replica dies,
its requests continue on another one; see `replicated_engine`.

Requires the extra `ray`. From a shell:

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
        engine: fields of `EngineConfig`.
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
    engine: dict[str, Any] = Field(default_factory=dict)
    settings: dict[str, Any] = Field(default_factory=dict)
    cache: Path | None = None
    actor: dict[str, Any] = Field(default_factory=dict)

    def options(self) -> ReplicaOptions:
        """Returns the options of each replica."""
        config = EngineConfig(**self.engine)
        return ReplicaOptions(
            self.model, dtype=self.dtype, tensor_parallel=self.tensor_parallel, config=config, cache=self.cache
        )

    def server_settings(self) -> Settings:
        """Returns the front's settings."""
        return Settings(self.name or self.model.resolve().name, **self.settings)


class EngineReplica:
    """An engine in its own process."""

    def __init__(self, arguments: Arguments) -> None:
        """Loads the model and warms up the engine; see `started_engine`."""
        self._engine, self._facts = started_engine(arguments.options())

    def facts(self) -> ReplicaFacts:
        """Returns facts for the front."""
        return self._facts

    async def answer(
        self, fingerprint: str, requests: Sequence[Request], is_whole: bool
    ) -> AsyncGenerator[Batch | None]:
        """Yields the batches of an answer, or only None if the front expects another fingerprint."""
        if fingerprint != self._facts.fingerprint:
            yield None
            return
        async with contextlib.aclosing(batches(self._engine, requests, is_whole=is_whole)) as answered:
            async for batch in answered:
                yield batch

    def check_health(self) -> None:
        """Raises a RuntimeError if the engine has failed, so that Ray replaces the replica."""
        if not self._engine.is_open:
            raise RuntimeError("the engine has failed; the replica's log has the reason")


class _RayReplicas:
    """The replicas of a Ray Serve handle, which sends each call to a live replica with little load."""

    def __init__(self, handle: Any, fingerprint: str) -> None:
        self._handle, self._fingerprint = handle.options(method_name="answer", stream=True), fingerprint

    @property
    def failure(self) -> None:
        """Always None: Ray restarts replicas as long as the application exists."""

    async def stream(self, requests: Sequence[Request], *, is_whole: bool) -> AsyncGenerator[Batch]:
        response = self._handle.remote(self._fingerprint, requests, is_whole)
        try:
            async for batch in response:
                if batch is None:
                    raise ReplicaLost(f"its fingerprint is not {self._fingerprint}")
                yield batch
        except _LOST as error:
            raise ReplicaLost("its process has ended or is unreachable") from error
        finally:
            response.cancel()


class Front:
    """The server without a model, which gets the clients' requests from Ray Serve's proxies."""

    async def __init__(self, engine: Any, arguments: Arguments) -> None:
        """Waits for a replica, and creates the server; `engine` is the handle of the replicas."""
        facts: ReplicaFacts = await engine.facts.remote()
        tokenizer = facts.tokenizer()
        replicas = _RayReplicas(engine, facts.fingerprint)
        replicated = ReplicatedEngine(replicas, facts.metadata, tokenizer, facts.config)
        self._served = app_of(replicated, facts.metadata, tokenizer, arguments.server_settings(), facts.origin)
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
