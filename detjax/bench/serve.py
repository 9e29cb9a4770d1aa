"""Throughput and latency of the engine under load, and a digest of all answers.

An `Experiment` runs a `Workload` in several orders and among background requests. The answers must always be the same.
"""

import contextlib
import dataclasses
import hashlib
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from rich.table import Table

from detjax.bench import provenance
from detjax.engine import Compilers, Engine, EngineConfig, Generation, Request, SamplingParams, Token
from detjax.models import Decoder
from detjax.runtime import backends

PERCENTILES: Final = (50, 95, 99)

NAMED: Final = 20
"""Most answers with other bits that a result names."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """Requests with random tokens and arrival times.

    Attributes:
        requests: the number of requests.
        prompt: minimum and maximum number of tokens of a prompt.
        output: minimum and maximum number of generated tokens; end tokens are ignored.
        rate: requests per second, at random times. Default: all at once.
        temperature: the temperature of all requests; 0: greedy.
        seed: the seed of lengths, tokens and times.
    """

    requests: int = 1000
    prompt: tuple[int, int] = (16, 256)
    output: tuple[int, int] = (90, 110)
    rate: float | None = None
    temperature: float = 0.0
    seed: int = 0

    @classmethod
    def background(cls, requests: int, other: "Workload") -> "Workload":
        """Returns varied requests, all different from another workload's, to run among them."""
        return cls(requests, (1, other.prompt[1]), (1, other.output[1]), temperature=0.9, seed=other.seed + 1)

    def __post_init__(self) -> None:
        """Raises `ValueError` for a field out of range."""
        accepted = {
            "requests": (self.requests >= 1, "at least 1"),
            "prompt": (1 <= self.prompt[0] <= self.prompt[1], "two numbers of at least 1, in ascending order"),
            "output": (1 <= self.output[0] <= self.output[1], "two numbers of at least 1, in ascending order"),
            "rate": (self.rate is None or self.rate > 0, "above 0, or none"),
        }
        for name, (holds, what) in accepted.items():
            if not holds:
                raise ValueError(f"Workload: {name} is {getattr(self, name)}; accepted: {what}")

    def draw(self, vocabulary: int) -> list[Request]:
        """Returns the requests."""
        draw = random.Random(self.seed)
        requests = []
        for index in range(self.requests):
            prompt = [draw.randrange(vocabulary) for _ in range(draw.randint(*self.prompt))]
            count = draw.randint(*self.output)
            params = SamplingParams(count, self.temperature, seed=self.seed << 32 | index, ignore_eos=True)
            requests.append(Request(prompt, params))
        return requests

    def arrivals(self) -> list[float]:
        """Returns each request's arrival time in seconds from the start, ascending."""
        draw, now, times = random.Random(self.seed + 1), 0.0, []
        for _ in range(self.requests):
            now += 0.0 if self.rate is None else draw.expovariate(self.rate)
            times.append(now)
        return times


@dataclasses.dataclass
class _Watch:
    """The times of a request's submission and of its tokens, and the sizes of the steps that sampled them."""

    submitted: float
    times: list[float] = dataclasses.field(default_factory=list)
    batches: list[int] = dataclasses.field(default_factory=list)

    def note(self, token: Token) -> None:
        self.times.append(time.perf_counter())
        self.batches.append(token.batch)


class Answers(NamedTuple):
    """The answers of a run, in the order of the workload.

    Attributes:
        generations: the answers.
        batches: for each token of each answer, the number of sequences in the step that sampled it.
    """

    generations: list[Generation]
    batches: list[list[int]]


class _Cancel(Exception):
    """Cancels a request from within its listener."""


class _Background:
    """Requests that are submitted among the watched ones."""

    def __init__(self, engine: Engine, requests: list[Request], watched: int) -> None:
        self._engine, self._remaining = engine, list(enumerate(requests))
        self._futures: list[Future[Generation]] = []
        self._draw, self._share = random.Random(len(requests)), len(requests) / watched

    def submit_some(self) -> None:
        """Submits the background requests for one watched request."""
        for _ in range(int(self._share + self._draw.random())):
            if self._remaining:
                self._submit(*self._remaining.pop())

    def _submit(self, index: int, request: Request) -> None:
        until = request.sampling.max_tokens // 2 if index % 3 == 0 else None
        tokens: list[Token] = []

        def listen(token: Token) -> None:
            tokens.append(token)
            if len(tokens) == until:
                raise _Cancel

        self._futures.append(self._engine.submit(request, listen))

    def cancel(self) -> None:
        """Cancels unfinished requests, and waits until the engine has dropped them."""
        for future in self._futures:
            future.cancel()
        self._engine.forget_prefixes()  # returns after the engine has cancelled them


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Runs of one workload whose answers must all have the same bits.

    Attributes:
        workload: the requests.
        engine: the settings of the engine.
        orders: number of runs, each with the requests in another order.
        background: number of background requests in an additional run. Every third is cancelled midway.
        numerics: detjax's operations, or stock, the same engine with XLA's own operations under no contract.
    """

    workload: Workload
    engine: EngineConfig
    orders: int = 1
    background: int = 0
    numerics: Literal["detjax", "stock"] = "detjax"

    def run(self, load: Callable[[], Decoder], name: str) -> dict[str, Any]:
        """Returns the content of a result: settings, runs, and whether all have the same bits.

        Args:
            load: returns the model; called under the experiment's backend.

        Raises:
            ValueError: the engine's settings do not fit the model.
        """
        stock = self.numerics == backends.STOCK
        with backends.use_backend(backends.STOCK) if stock else contextlib.nullcontext(), Compilers() as compilers:
            decoder = load()
            start = time.perf_counter()
            with Engine(decoder, config=self.engine) as engine:
                engine.warm_up(progress=True, compilers=compilers)
                ready = time.perf_counter() - start
                runs = self._runs(engine, decoder.config.vocab_size)
            heading = provenance.heading("python -m detjax.bench serve")
        return heading | {
            "model": name,
            "layers": decoder.config.layers,
            "devices": 1 if decoder.mesh is None else decoder.mesh.size,
            "numerics": self.numerics,
            "engine": dataclasses.asdict(self.engine),
            "workload": dataclasses.asdict(self.workload),
            "ready_after_seconds": ready,
            "same_bits": len({run["digest"] for run in runs.values()}) == 1,
            "runs": runs,
        }

    def _runs(self, engine: Engine, vocabulary: int) -> dict[str, dict[str, Any]]:
        """The results of `measure`, by label, and how the answers of later runs differ from the first run's, if so."""
        requests, given = self.workload.requests, dict[str, dict[str, Any]]()
        for number in range(self.orders):
            order = random.Random(number).sample(range(requests), requests) if number else None
            given[f"order {number + 1}"] = {"order": order}
        if self.background:
            others = Workload.background(self.background, self.workload)
            given[f"among {self.background} others"] = {"background": others}
        runs, first = dict[str, dict[str, Any]](), None
        for label, options in given.items():
            runs[label], answers = measure(engine, self.workload, vocabulary, **options)
            first = first or answers
            if different := differences(first, answers):
                runs[label]["different"] = different
        return runs


def table(result: Mapping[str, Any]) -> Table:
    """Returns a table with a line for each run of an experiment."""
    columns = "", "seconds", "tokens per second", "first token, ms", "per token, ms"
    title = f"{result['workload']['requests']} requests, p50 / p95 / p99, {result['numerics']}"
    lines = Table(*columns, title=title)
    for label, run in result["runs"].items():
        times = [
            " / ".join(f"{value * 1e3:.1f}" for value in run["percentiles"][name].values())
            for name in ("time_to_first_token", "time_per_token")
        ]
        lines.add_row(label, f"{run['seconds']:.2f}", f"{run['generated_tokens_per_second']:.0f}", *times)
    return lines


def measure(
    engine: Engine,
    workload: Workload,
    vocabulary: int,
    order: Sequence[int] | None = None,
    background: Workload | None = None,
) -> tuple[dict[str, Any], Answers]:
    """Returns the time of a workload in seconds and percentiles over requests and tokens, and the answers.

    Args:
        engine: the engine, warmed up so that compile time does not count.
        order: the order in which requests arrive. Default: ascending.
        background: additional requests among them. Every third is cancelled midway; they do not count in the result.
    """
    requests, arrivals = workload.draw(vocabulary), workload.arrivals()
    engine.forget_prefixes()  # a repeated workload must not hit the prefix cache
    futures: dict[int, Future[Generation]] = {}
    watches: dict[int, _Watch] = {}
    others = _Background(engine, background.draw(vocabulary) if background is not None else [], workload.requests)
    start = time.perf_counter()
    for index, arrival in zip(range(workload.requests) if order is None else order, arrivals, strict=True):
        if (early := start + arrival - time.perf_counter()) > 0:
            time.sleep(early)
        others.submit_some()
        watches[index] = _Watch(time.perf_counter())
        futures[index] = engine.submit(requests[index], watches[index].note)
    answers = [futures[index].result() for index in range(workload.requests)]
    seconds = max(watch.times[-1] for watch in watches.values()) - start
    others.cancel()
    watched = [watches[index] for index in range(workload.requests)]
    result = _statistics(watched, answers, seconds)
    result |= {"preemptions": engine.stats().preemptions, "digest": digest(answers)}
    return result, Answers(answers, [watch.batches for watch in watched])


def _statistics(watched: Sequence[_Watch], answers: Sequence[Generation], seconds: float) -> dict[str, Any]:
    """Throughput, percentiles, and the times of each request."""
    prompts = sum(len(answer.prompt_tokens) for answer in answers)
    tokens = sum(len(answer.completions[0].tokens) for answer in answers)
    gaps = [np.diff(watch.times) for watch in watched]
    by_request = {
        "time_to_first_token": [watch.times[0] - watch.submitted for watch in watched],
        "time_per_token": [float(gap.mean()) for gap in gaps if gap.size],
        "latency": [watch.times[-1] - watch.submitted for watch in watched],
    }
    between = np.concatenate(gaps).tolist()
    return {
        "seconds": seconds,
        "prompt_tokens": prompts,
        "generated_tokens": tokens,
        "generated_tokens_per_second": tokens / seconds,
        "tokens_per_second": (prompts + tokens) / seconds,
        "percentiles": {
            name: percentiles(values) for name, values in (by_request | {"time_between_tokens": between}).items()
        },
        "requests": {name: [round(value, 6) for value in values] for name, values in by_request.items()},
    }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Returns the percentiles by name; empty without values."""
    computed = np.percentile(values, PERCENTILES) if values else ()
    return {f"p{name}": float(value) for name, value in zip(PERCENTILES, computed, strict=False)}


def plot(runs: Mapping[str, Mapping[str, Any]], file: Path) -> None:
    """Plots the distributions of request times of runs, results of `measure` by label, as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # the import takes a second
    from matplotlib.figure import Figure

    panels = {"time_to_first_token": "to first token", "time_per_token": "per token", "latency": "to last token"}
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True)
    for axis, (name, label) in zip(axes, panels.items(), strict=True):
        for run_label, run in runs.items():
            values = np.sort(run["requests"][name])
            axis.step(values * 1e3, np.arange(1, len(values) + 1) / max(len(values), 1), where="post", label=run_label)
        axis.set_xlabel(f"milliseconds {label}")
        axis.set_xlim(left=0)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("share of requests")
    axes[0].legend(loc="lower right")
    FigureCanvasAgg(figure).print_png(str(file))


def differences(first: Answers, other: Answers) -> dict[str, Any]:
    """Returns the number of answers whose bits differ between two runs, and for some of them where they begin to.

    It is empty if none differ. A place has the numbers of the request and of the token, and for both runs the token,
    its logprob and the number of sequences in the step that sampled it.
    """
    places = []
    for number, (one, another) in enumerate(zip(first.generations, other.generations, strict=True)):
        (a,), (b,) = one.completions, another.completions
        # Logprobs are compared by their bits: two NaNs are equal.
        pairs = [list(zip(x.tokens, np.asarray(x.logprobs, np.float32).view(np.int32), strict=True)) for x in (a, b)]
        if pairs[0] == pairs[1]:
            continue
        count = min(map(len, pairs))
        token = next((index for index in range(count) if pairs[0][index] != pairs[1][index]), count)
        place: dict[str, Any] = {"request": number, "prompt_tokens": len(one.prompt_tokens), "token": token}
        for name, values in (
            ("tokens", (a.tokens, b.tokens)),
            ("logprobs", (a.logprobs, b.logprobs)),
            ("batches", (first.batches[number], other.batches[number])),
        ):
            place[name] = [one_run[token] if token < len(one_run) else None for one_run in values]
        places.append(place)
    return {"answers": len(places), "places": places[:NAMED]} if places else {}


def digest(answers: Iterable[Generation]) -> str:
    """Returns the SHA-256 of all tokens and logprob bits, in order."""
    hashed = hashlib.sha256()
    for answer in answers:
        for completion in answer.completions:
            hashed.update(np.asarray(completion.tokens, np.int64).tobytes())
            hashed.update(np.asarray(completion.logprobs, np.float32).tobytes())
    return hashed.hexdigest()
