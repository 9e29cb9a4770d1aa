"""What is counted, for Prometheus."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from detjax.engine import Engine

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """Counters of a server."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_OfEngine(engine))
        self.requests = self._counter("requests", "Requests over HTTP.", "path", "status")
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.")
        self.generated_tokens = self._counter("generated_tokens", "Tokens generated.")
        self.seconds = self._histogram("request", "From a request to its answer's end.", "path")
        self.first_token = self._histogram("first_token", "From a request to its stream's first token.")
        self.next_token = self._histogram("next_token", "From a sample's token to its next, in streams.")

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"detjax_{name}", what, labels, registry=self.registry)

    def _histogram(self, name: str, what: str, *labels: str) -> Histogram:
        return Histogram(f"detjax_{name}_seconds", what, labels, registry=self.registry, buckets=_SECONDS)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self.registry)


class _OfEngine(Collector):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        engine = self._engine
        yield GaugeMetricFamily("detjax_samples_running", "Samples that are computed.", engine.running)
        yield GaugeMetricFamily("detjax_samples_waiting", "Samples that wait for a slot.", engine.waiting)
        yield GaugeMetricFamily("detjax_pages", "Pages of the KV cache.", engine.pages)
        yield GaugeMetricFamily(
            "detjax_pages_in_use", "Pages that requests on their way refer to.", engine.pages_in_use
        )
        yield CounterMetricFamily("detjax_preemptions", "Samples whose pages were taken away.", engine.preemptions)
