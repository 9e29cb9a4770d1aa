"""Prometheus metrics, and the middleware that counts requests."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from detjax.engine import Engine
from detjax.server.http.requests import CLIENT_CLOSED_REQUEST
from detjax.server.replicated_engine import ReplicatedEngine

_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
"""Upper bounds of the histograms' buckets, in seconds."""


class Metrics:
    """The metrics of a server and its engine; with replicas, the number of lost replicas instead of the engine's."""

    def __init__(
        self, engine: Engine | ReplicatedEngine, control: Callable[[], Mapping[str, int]] = lambda: {}
    ) -> None:
        """Metrics of an engine's server; `control` returns the numbers of its control, if it has any."""
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(engine))
        self.registry.register(_ControlCollector(control))
        self.requests = self._counter("requests", "HTTP requests.", "path", "status")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of admitted requests.")
        self.generated_tokens = self._counter("generated_tokens", "Generated tokens.")
        self.seconds = self._histogram("request", "Seconds from a request to the end of its response.", "path")
        self.first_token = self._histogram("first_token", "Seconds from a streaming request to its first token.")
        self.next_token = self._histogram("next_token", "Seconds between two tokens of a streamed sample.")

    def _counter(self, name: str, documentation: str, *labels: str) -> Counter:
        return Counter(f"detjax_{name}", documentation, labels, registry=self.registry)

    def _histogram(self, name: str, documentation: str, *labels: str) -> Histogram:
        name = f"detjax_{name}_seconds"
        return Histogram(name, documentation, labels, registry=self.registry, buckets=_BUCKETS)

    def text(self) -> bytes:
        """Returns the metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    """Reads the statistics of an engine or of its replicas for each scrape."""

    def __init__(self, engine: Engine | ReplicatedEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        engine = self._engine
        if isinstance(engine, ReplicatedEngine):
            yield CounterMetricFamily("detjax_lost_replicas", "Calls that continued on another replica.", engine.losses)
            return
        stats = engine.stats()
        yield GaugeMetricFamily("detjax_samples_running", "Samples that hold a slot.", stats.running)
        yield GaugeMetricFamily("detjax_samples_waiting", "Samples that wait for a slot.", stats.waiting)
        yield GaugeMetricFamily("detjax_pages", "Pages of the KV cache.", stats.num_pages)
        yield GaugeMetricFamily("detjax_pages_in_use", "Pages that requests in flight refer to.", stats.pages_in_use)
        yield CounterMetricFamily("detjax_preemptions", "Samples that lost their pages to others.", stats.preemptions)
        yield GaugeMetricFamily("detjax_snapshot_bytes", "Bytes of snapshots of slots.", stats.snapshot_bytes)
        yield CounterMetricFamily(
            "detjax_snapshot_hits", "Samples that resumed from a snapshot of a slot.", stats.snapshot_hits
        )
        yield CounterMetricFamily(
            "detjax_drafts_proposed", "Guessed tokens that steps verified.", stats.drafts_proposed
        )
        yield CounterMetricFamily("detjax_drafts_accepted", "Guessed tokens that were right.", stats.drafts_accepted)
        by_position = CounterMetricFamily(
            "detjax_drafts_accepted_at", "Right guesses at each position of a draft.", labels=["position"]
        )
        for position, count in enumerate(stats.drafts_accepted_at):
            by_position.add_metric([str(position)], count)
        yield by_position


class _ControlCollector(Collector):
    """Reads the numbers of a server's control for each scrape."""

    def __init__(self, read: Callable[[], Mapping[str, int]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        numbers = self._read()
        if not numbers:
            return
        yield GaugeMetricFamily("detjax_paused", "1 while requests wait for /resume.", numbers["paused"])
        yield GaugeMetricFamily("detjax_sleeping", "1 while the devices' memory is released.", numbers["sleeping"])
        yield CounterMetricFamily("detjax_weight_updates", "Updates of the weights.", numbers["weight_updates"])


class RequestMetrics:
    """ASGI middleware that counts requests by path and status, and measures how long they take."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: Sequence[str]) -> None:
        """Wraps `app`; requests for paths that are not in `paths` count as "other"."""
        self._app, self._metrics, self._paths = app, metrics, frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        path = scope["path"] if scope["path"] in self._paths else "other"
        clock = asyncio.get_running_loop().time
        start, status = clock(), CLIENT_CLOSED_REQUEST

        async def send_and_note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_note_status)
        finally:
            self._metrics.requests.labels(path, str(status)).inc()
            self._metrics.seconds.labels(path).observe(clock() - start)
