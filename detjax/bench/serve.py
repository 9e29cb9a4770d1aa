"""Throughput and latency of the engine under a load of requests, and a digest of all their answers."""

import dataclasses
import hashlib
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

import numpy as np

from detjax.engine import Engine, Generation, Request, SamplingParams, Token

PERCENTILES: Final = (50, 95, 99)


@dataclasses.dataclass(frozen=True)
class Workload:
    """Requests with random tokens, and when they come.

    Attributes:
        requests: how many.
        prompt: tokens of the shortest and of the longest prompt.
        output: likewise of what is generated; end tokens do not end it.
        rate: requests a second, at random times; None: all at once.
        temperature: of all of them.
        seed: of lengths, tokens and times.
    """

    requests: int = 1000
    prompt: tuple[int, int] = (16, 256)
    output: tuple[int, int] = (90, 110)
    rate: float | None = None
    temperature: float = 0.0
    seed: int = 0

    @classmethod
    def beside(cls, requests: int, other: "Workload") -> "Workload":
        """Requests of all kinds that are other than another workload's, to come among them."""
        return cls(requests, (1, other.prompt[1]), (1, other.output[1]), temperature=0.9, seed=other.seed + 1)

    def __post_init__(self) -> None:
        """Checks every field.

        Raises:
            ValueError: names the field, what was given and what is accepted.
        """
        accepted = {
            "requests": (self.requests >= 1, "at least 1"),
            "prompt": (1 <= self.prompt[0] <= self.prompt[1], "two numbers from 1 on, the lower one first"),
            "output": (1 <= self.output[0] <= self.output[1], "two numbers from 1 on, the lower one first"),
            "rate": (self.rate is None or self.rate > 0, "above 0, or none"),
        }
        for name, (holds, what) in accepted.items():
            if not holds:
                raise ValueError(f"Workload: {name} is {getattr(self, name)}; accepted: {what}")

    def draw(self, vocabulary: int) -> list[Request]:
        """The requests."""
        draw = random.Random(self.seed)
        found = []
        for index in range(self.requests):
            prompt = [draw.randrange(vocabulary) for _ in range(draw.randint(*self.prompt))]
            count = draw.randint(*self.output)
            params = SamplingParams(count, self.temperature, seed=self.seed << 32 | index, ignore_eos=True)
            found.append(Request(prompt, params))
        return found

    def arrivals(self) -> list[float]:
        """Seconds from the beginning at which each request comes, ascending."""
        draw, now, times = random.Random(self.seed + 1), 0.0, []
        for _ in range(self.requests):
            now += 0.0 if self.rate is None else draw.expovariate(self.rate)
            times.append(now)
        return times


@dataclasses.dataclass
class _Watch:
    """When the tokens of a request came."""

    begun: float
    times: list[float] = dataclasses.field(default_factory=list)

    def note(self, _: Token) -> None:
        self.times.append(time.perf_counter())


class _HeardEnough(Exception):
    """Ends a request."""


class _Others:
    """Requests that come among the `among` ones that are watched."""

    def __init__(self, engine: Engine, requests: list[Request], among: int) -> None:
        self._engine, self._left = engine, list(enumerate(requests))
        self._futures: list[Future[Generation]] = []
        self._draw, self._share = random.Random(len(requests)), len(requests) / among

    def come(self) -> None:
        """As many as there are for each of those."""
        for _ in range(int(self._share + self._draw.random())):
            if self._left:
                self._submit(*self._left.pop())

    def _submit(self, index: int, request: Request) -> None:
        until = request.sampling.max_tokens // 2 if index % 3 == 0 else None
        told: list[Token] = []

        def listen(token: Token) -> None:
            told.append(token)
            if len(told) == until:
                raise _HeardEnough

        self._futures.append(self._engine.submit(request, listen))

    def leave(self) -> None:
        """Cancels those that have not ended, and returns when they are gone."""
        for future in self._futures:
            future.cancel()
        self._engine.forget_prefixes()  # behind what is cancelled


def measure(
    engine: Engine,
    workload: Workload,
    vocabulary: int,
    order: Sequence[int] | None = None,
    beside: Workload | None = None,
) -> dict[str, Any]:
    """What the workload took, in seconds: all of it, and percentiles over requests and tokens.

    Args:
        engine: warmed up, or the time to compile counts.
        workload: what is asked.
        vocabulary: of the model.
        order: in which the requests come; default: their own.
        beside: further requests that come among them, a third of which are cancelled midway. Nothing is told of them.
    """
    requests, arrivals = workload.draw(vocabulary), workload.arrivals()
    engine.forget_prefixes()  # else a workload that is asked again would find its prompts in the cache
    futures: dict[int, Future[Generation]] = {}
    watches: dict[int, _Watch] = {}
    others = _Others(engine, beside.draw(vocabulary) if beside is not None else [], workload.requests)
    start = time.perf_counter()
    for index, arrival in zip(range(workload.requests) if order is None else order, arrivals, strict=True):
        if (early := start + arrival - time.perf_counter()) > 0:
            time.sleep(early)
        others.come()
        watches[index] = _Watch(time.perf_counter())
        futures[index] = engine.submit(requests[index], watches[index].note)
    answers = [futures[index].result() for index in range(workload.requests)]
    seconds = max(watch.times[-1] for watch in watches.values()) - start
    others.leave()
    prompts, tokens = (sum(len(of) for of in lists) for lists in zip(*map(_tokens, answers), strict=True))
    watched = [watches[index] for index in range(workload.requests)]
    gaps = [np.diff(watch.times) for watch in watched]
    of_requests = {
        "time_to_first_token": [watch.times[0] - watch.begun for watch in watched],
        "time_per_token": [float(of.mean()) for of in gaps if of.size],
        "latency": [watch.times[-1] - watch.begun for watch in watched],
    }
    between = np.concatenate(gaps).tolist()
    return {
        "seconds": seconds,
        "prompt_tokens": prompts,
        "generated_tokens": tokens,
        "generated_tokens_per_second": tokens / seconds,
        "tokens_per_second": (prompts + tokens) / seconds,
        "percentiles": {name: percentiles(of) for name, of in (of_requests | {"time_between_tokens": between}).items()},
        "preemptions": engine.preemptions,
        "digest": digest(answers),
        "requests": {name: [round(value, 6) for value in of] for name, of in of_requests.items()},
    }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """By name; none of no values."""
    found = np.percentile(values, PERCENTILES) if values else ()
    return {f"p{name}": float(value) for name, value in zip(PERCENTILES, found, strict=False)}


def plot(runs: Mapping[str, Mapping[str, Any]], file: Path) -> None:
    """Draws what share of the requests had its first token, each of its tokens and its last one within which time.

    Args:
        runs: what `measure` gave, by label.
        file: PNG.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # takes a second that measuring need not wait
    from matplotlib.figure import Figure

    panels = {"time_to_first_token": "to the first token", "time_per_token": "a token", "latency": "to the last token"}
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True)
    for axis, (name, label) in zip(axes, panels.items(), strict=True):
        for run, found in runs.items():
            values = np.sort(found["requests"][name])
            axis.step(values * 1e3, np.arange(1, len(values) + 1) / max(len(values), 1), where="post", label=run)
        axis.set_xlabel(f"milliseconds {label}")
        axis.set_xlim(left=0)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("share of requests")
    axes[0].legend(loc="lower right")
    FigureCanvasAgg(figure).print_png(str(file))


def digest(answers: Iterable[Generation]) -> str:
    """Names all tokens and all bits of logprobs, in order."""
    hashed = hashlib.sha256()
    for answer in answers:
        for completion in answer.completions:
            hashed.update(np.asarray(completion.tokens, np.int64).tobytes())
            hashed.update(np.asarray(completion.logprobs, np.float32).tobytes())
    return hashed.hexdigest()


def _tokens(answer: Generation) -> tuple[Sequence[int], Sequence[int]]:
    return answer.prompt_tokens, answer.completions[0].tokens
