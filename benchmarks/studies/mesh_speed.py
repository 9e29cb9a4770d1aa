"""Steps of a dense model on 1, 2, 4 and more devices: seconds and bits, the usual cut, and what a cost model predicted.

    python -m benchmarks mesh_speed --devices 4 --preset Qwen3-32B --layers 16 --out benchmarks/results/mesh-speed.json

An engine answers 1, 8, 64 and 256 requests with prompts of 1024 tokens. A step's time is measured while all of them
decode. A prompt of 8192 tokens takes the time until its token arrives, which the host's work is part of. Next to it
stand the usual sharding with all-reduces as a plain JAX program (`python -m benchmarks usual_cut`), and the predictions
of `cost-h200.json` for both on an H200, scaled by the number of layers; the head counts as its weights do.

All programs of a step are compiled before it is measured, in parallel for the engine. Few layers keep that short, but a
step of too few would wait for the host. Without `--layers`, a model has as many as fit on one device with their cache.
The exit code is 1 if the answers' bits differ between numbers of devices.

`--small` runs on a CPU with devices simulated by `XLA_FLAGS=--xla_force_host_platform_device_count=4`.
"""

import os

# The engine and the usual cut have the memory in turns.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import dataclasses
import gc
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Annotated, Any, Final

from benchmarks import study as options
from benchmarks.expressions import RESULTS
from benchmarks.studies import usual_cut
from benchmarks.study import Result, Run
from detjax.bench import command_line, presets
from detjax.bench.serve import Workload, digest
from detjax.cli.options import Option, usage_errors
from detjax.contract import KV_BLOCK
from detjax.engine import Engine, EngineConfig, Generation, Request
from detjax.models import mesh_of
from detjax.models.configuration.config import DecoderConfig
from detjax.operands.numerics import ceil_div
from detjax.runtime import backends

SHARE_OF_MEMORY: Final = 0.7
"""The share of a device's memory for weights and cache, where they decide the number of layers."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a run.

    Attributes:
        requests: numbers of requests that decode together.
        prompt: tokens of their prompts.
        tokens: tokens that all of them decode together, at least.
        prefill: tokens of the prompt whose prefill is measured.
        rounds: timed rounds of each measurement.
    """

    requests: tuple[int, ...] = (1, 8, 64, 256)
    prompt: int = 1024
    tokens: int = 64
    prefill: int = 8192
    rounds: int = 3

    @property
    def pages(self) -> int:
        """Pages of the cache, for the largest batch or the long prompt."""
        longest = self.prompt + self.output(max(self.requests))
        return max(max(self.requests) * ceil_div(longest, KV_BLOCK), ceil_div(self.prefill + 1, KV_BLOCK))

    def output(self, requests: int) -> int:
        """Returns the tokens of an answer: the first request decodes while the others' prompts are computed."""
        return self.tokens + ceil_div(requests * self.prompt, self.prefill)

    @property
    def engine(self) -> EngineConfig:
        """The engine's settings."""
        length = max(self.prefill + 1, self.prompt + self.output(max(self.requests)))
        return EngineConfig(
            max_samples=max(self.requests),
            token_budget=self.prefill,
            max_length=KV_BLOCK * ceil_div(length, KV_BLOCK),
            num_pages=self.pages,
            prefix_cache=False,
            top_logprobs=0,
        )


SMALL: Final = Sizes((1, 2), 6, 4, 16, 1)


def study(
    run: Run,
    *,
    preset: options.Preset = "Qwen3-8B",
    layers: options.Layers = None,
    devices: Annotated[int, Option("Devices that share the model, at most.", minimum=2)] = 2,
    usual: Annotated[bool, Option("Measure the usual cut too.", name="--usual/--skip-usual")] = True,
) -> Result:
    sizes = Sizes()
    if run.small:
        sizes, preset, layers = SMALL, "tiny", 1
    elif layers is None:
        layers = options.layers_that_fit(preset, SHARE_OF_MEMORY, _cache_of_a_layer(presets.config(preset), sizes))
    given = usual_cut.Sizes(preset, layers, sizes.prompt, sizes.tokens, sizes.requests, sizes.prefill)
    with usage_errors():
        rival = usual_cut.shape_of(given, devices) if usual else None
    content: dict[str, Any] = {
        "preset": preset,
        "layers": layers,
        "sizes": dataclasses.asdict(sizes),
        "ready_after_seconds": {},
        "digests": {},
        "steps": [],
    }
    # The most devices follow one, so that a run that is cut short has both.
    for count in dict.fromkeys((1, devices, *options.counts(devices))):
        times = {name: {"detjax": seconds} for name, seconds in _measured(preset, layers, sizes, count, content)}
        run.save(content | {"steps": [*content["steps"], *_rows(preset, layers, count, times)]})
        gc.collect()  # the engine's memory is the usual cut's
        for name, rounds in usual_cut.timings(rival, given, count, sizes.rounds) if rival else ():
            times.setdefault(name, {})["usual"] = statistics.median(rounds)
        content["steps"] += _rows(preset, layers, count, times)
        run.save(content)
        for row in content["steps"][-len(times) :]:
            command_line.print_line(str(row))
    return Result(content, problem(content["digests"]))


def problem(digests: Mapping[str, Mapping[str, str]]) -> str:
    """Returns how digests by step and number of devices contradict one another; empty: they do not."""
    for step, by_count in digests.items():
        if len(set(by_count.values())) > 1:
            return f"{step}: bits differ between numbers of devices: {by_count}"
    return ""


def _measured(
    preset: str, layers: int | None, sizes: Sizes, devices: int, content: dict[str, Any]
) -> Iterator[tuple[str, float]]:
    """Yields each step's name and its seconds with detjax's engine; adds digests of answers to the content."""
    decoder = presets.decoder(preset, layers, mesh_of(devices))
    begin = time.perf_counter()
    with Engine(decoder, config=sizes.engine) as engine:
        del decoder  # the engine alone has the weights
        if backends.backend() != "portable":
            engine.warm_up()
        content["ready_after_seconds"][str(devices)] = time.perf_counter() - begin
        vocabulary = presets.config(preset, layers).vocab_size

        def measured(name: str, workload: Workload, timed: Any) -> tuple[str, float]:
            requests = workload.draw(vocabulary)
            rounds = [timed(engine, requests) for _ in range(sizes.rounds + 1)]
            content["digests"].setdefault(name, {})[str(devices)] = digest(rounds[0][1])
            return name, statistics.median(seconds for seconds, _ in rounds[1:])

        for count in sizes.requests:
            prompt, output = (sizes.prompt, sizes.prompt), (sizes.output(count), sizes.output(count))
            yield measured(f"decode of {count}", Workload(count, prompt, output, temperature=0.8), decode_seconds)
        long = Workload(1, (sizes.prefill, sizes.prefill), (1, 1), temperature=0.8)
        yield measured(f"prefill of {sizes.prefill}", long, _prefill_seconds)


def decode_seconds(engine: Engine, requests: Sequence[Request]) -> tuple[float, list[Generation]]:
    """Returns the seconds of a step in which all requests decode, and their answers."""
    times: list[list[float]] = [[] for _ in requests]

    def noted(index: int) -> Any:
        return lambda _: times[index].append(time.perf_counter())

    futures: list[Future[Generation]] = [engine.submit(request, noted(index)) for index, request in enumerate(requests)]
    answers = [future.result() for future in futures]
    return step_seconds(times), answers


def step_seconds(times: Sequence[Sequence[float]]) -> float:
    """Returns the seconds of a step from the times of each request's tokens.

    Measured from the last request's first token to the first request's last one. Tokens may arrive several at a time.
    """
    begin, end = max(one[0] for one in times), min(one[-1] for one in times)
    steps = statistics.median(sum(begin < at <= end for at in one) for one in times)
    if steps < 1:
        raise RuntimeError("mesh_speed: no step in which all requests decode was seen")
    return (end - begin) / steps


def _prefill_seconds(engine: Engine, requests: Sequence[Request]) -> tuple[float, list[Generation]]:
    begin = time.perf_counter()
    answers = engine.generate(requests)
    return time.perf_counter() - begin, answers


def _cache_of_a_layer(config: DecoderConfig, sizes: Sizes) -> int:
    """Bytes of a layer's keys and values in bfloat16, of the engine or of the usual cut, whichever has more."""
    tokens = max(sizes.pages * KV_BLOCK, max(sizes.requests) * (sizes.prompt + sizes.tokens))
    return 2 * 2 * config.kv_heads * config.head_dim * tokens


def _rows(
    preset: str, layers: int | None, devices: int, times: Mapping[str, Mapping[str, float]]
) -> list[dict[str, Any]]:
    """A row for each step: its seconds by who computes it, their ratio, and the predictions."""
    rows = []
    for step, seconds in times.items():
        row: dict[str, Any] = {"step": step, "devices": devices, "seconds": dict(seconds)}
        if len(seconds) == 2:
            row["time_over_usual"] = seconds["detjax"] / seconds["usual"]
        if expected := predicted(preset, layers, step, devices):
            row["predicted"] = expected
        rows.append(row)
    return rows


def predicted(preset: str, layers: int | None, step: str, devices: int) -> dict[str, float]:
    """Returns the cost model's seconds on H200s of detjax's and the usual cut, scaled to `layers`; empty: it has none.

    Latency and products grow with the number of layers, and the head, which every step computes once, counts as many
    layers as its weights make.
    """
    for one in json.loads((RESULTS / "cost-h200.json").read_text())["predictions"]:
        if (one["model"], one["step"], one["devices"]) == (preset, step, devices):
            config = presets.config(preset)
            head = config.vocab_size * config.hidden_size * 2
            layer = (one["weight_bytes"] * devices - 2 * head) / config.layers
            share = ((layers or config.layers) * layer + head) / (config.layers * layer + head)
            return {
                "detjax": share * one["outputs"]["seconds"]["logarithm"],
                "usual": share * one["usual"]["seconds"]["logarithm"],
            }
    return {}
