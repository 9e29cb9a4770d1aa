"""A whole decoder with random weights: its kernels, and the invariance of a request's bits to its batch.

    python -m benchmarks decoder --out benchmarks/results/decoder-h200.json

Generates greedily for 64 requests of mixed lengths in one batch, which they enter in sequence, so that some are
prefilled in chunks while others decode; then for some of them alone. Compares tokens and logprobs bit by bit. Counts
the kernels of a decode step, and times it.

`--small` runs on a CPU in seconds: a tiny model and few requests. The exit code is 1 if bits differ.
"""

import os

# Two batches and the timed steps each hold a cache.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import collections
import dataclasses
import functools
import random
import time
from typing import Annotated, Any

import jax
import numpy as np

import detjax
from benchmarks import study as options
from benchmarks.study import Result, Run
from detjax.bench import presets
from detjax.bench.cases import step_case
from detjax.bench.timing import step_time
from detjax.cli.options import Option
from detjax.contract import KV_BLOCK
from detjax.engine import BatchShapes, SamplingParams, SamplingVariant, Sequence, StepLoop, StepLoopConfig
from detjax.models import Decoder
from detjax.operands.numerics import ceil_div
from detjax.runtime import backends

CONTEXT = 100
"""Cached tokens per request of a timed step."""


@dataclasses.dataclass(frozen=True)
class Load:
    """Requests that enter one batch.

    Attributes:
        tokens: generated tokens per request.
        requests: the number of requests, each with a slot of the batch.
        longest: tokens of the longest prompt; the shortest has 1.
        between: steps between the arrivals of two requests.
        prefill_chunk: maximum number of a prompt's tokens per step.
        alone: the number of requests that are also generated alone.
    """

    tokens: int = 512
    requests: int = 64
    longest: int = 1500
    between: int = 6
    prefill_chunk: int = 64
    alone: int = 8

    def prompts(self, vocabulary: int) -> list[list[int]]:
        """Returns random prompts."""
        draw = random.Random(0)
        lengths = [draw.randint(1, self.longest) for _ in range(self.requests)]
        return [[draw.randrange(vocabulary) for _ in range(length)] for length in lengths]


@dataclasses.dataclass(frozen=True)
class Batch:
    """Greedy generation by the engine's step loop for requests that arrive at chosen steps.

    Attributes:
        model: the decoder.
        load: sizes of prompts and steps, and arrivals.
        slots: number of concurrent requests.
    """

    model: Decoder
    load: Load
    slots: int

    @functools.cached_property
    def _loop(self) -> StepLoop:
        pages = ceil_div(self.load.longest + self.load.tokens, KV_BLOCK)
        config = StepLoopConfig(
            shapes=BatchShapes.for_chunks(self.slots, self.load.prefill_chunk, mixes=True),
            num_pages=self.slots * pages,
            pages_per_sequence=pages,
            variants=(SamplingVariant(filtered=False, top_logprobs=0),),
        )
        return StepLoop.for_model(self.model, config)

    def run(self, prompts: list[list[int]]) -> tuple[list[tuple[bytes, bytes]], int]:
        """Returns the bits of each request's tokens and logprobs, and the number of steps."""
        params = SamplingParams(max_tokens=self.load.tokens, temperature=0.0, ignore_eos=True)
        sequences = [Sequence(tuple(prompt), params) for prompt in prompts]
        steps = 0
        while steps < self.load.between * len(sequences) or not self._loop.is_idle:
            index, rest = divmod(steps, self.load.between)
            if rest == 0 and index < len(sequences):
                self._loop.submit(sequences[index])
            self._loop.step()
            steps += 1
        completions = [sequence.completion() for sequence in sequences]
        bits = [
            (np.asarray(c.tokens, np.int32).tobytes(), np.asarray(c.logprobs, np.float32).tobytes())
            for c in completions
        ]
        return bits, steps


def compare_batches(model: Decoder, load: Load) -> dict[str, Any]:
    """Compares tokens and logprobs of requests alone with the same requests in a batch."""
    prompts = load.prompts(model.config.vocab_size)
    start = time.perf_counter()
    together, steps = Batch(model, load, load.requests).run(prompts)
    seconds = time.perf_counter() - start
    one = Batch(model, load, 1)
    chosen = [round(i * (load.requests - 1) / max(load.alone - 1, 1)) for i in range(load.alone)]
    differing = [i for i in chosen if one.run([prompts[i]])[0][0] != together[i]]
    return {
        **dataclasses.asdict(load),
        "steps": steps,
        "distinct completions": len(set(together)),
        "requests compared": chosen,
        "requests alone that differ": differing,
        "seconds together, compilation included": seconds,
    }


def kernels_of_step(model: str, batch: int, layers: int | None = None) -> dict[str, int]:
    """Counts each kernel and each of XLA's dots in a decode step of a preset."""
    case = step_case("decode_step", model, batch, CONTEXT, layers)
    counts: collections.Counter[str] = collections.Counter()

    @detjax.jit
    def traced() -> int:
        # Within detjax.jit, which the backends under contract require on a GPU.
        _count_kernels(jax.make_jaxpr(case.run)(*case.shapes).jaxpr, counts)
        return 0

    traced()
    return dict(counts)


def _count_kernels(jaxpr: Any, counts: collections.Counter[str]) -> None:
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if "pallas" in name or "mpmd" in name:
            counts[_kernel_name(equation)] += 1
            continue
        if name == "dot_general":
            counts["XLA dot"] += 1
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    _count_kernels(inner, counts)


def _kernel_name(equation: Any) -> str:
    for mesh in equation.params.get("meshes", ()):
        if getattr(mesh, "kernel_name", None):
            return mesh.kernel_name
    return str(equation.params.get("name") or "kernel")


def step_seconds(model: str, batch: int, backend: str, layers: int | None = None, steps: int = 10) -> float:
    """Returns the seconds of a preset's decode step in a sequence of steps, under a backend."""
    case = step_case("decode_step", model, batch, CONTEXT, layers)
    with detjax.use_backend(backend):
        arguments = case.draw(0)
        program = detjax.jit(case.run, donate_argnums=tuple(range(case.carried)))
        return step_time(case.carrying(program, arguments), [arguments[case.carried :]], steps=steps)


def study(
    run: Run,
    *,
    preset: options.Preset = "Qwen3-0.6B",
    layers: options.Layers = None,
    tokens: Annotated[int, Option("Generated tokens per request.", minimum=1)] = Load.tokens,
    requests: Annotated[int, Option("The number of requests.", minimum=1)] = Load.requests,
    longest: Annotated[int, Option("Tokens of the longest prompt.", minimum=1)] = Load.longest,
) -> Result:
    load = Load(tokens, requests, longest, alone=min(Load.alone, requests))
    if run.small:
        preset, load = "tiny", Load(tokens=3, requests=3, longest=20, between=2, prefill_chunk=8, alone=2)
    model = presets.decoder(preset, layers)
    kernels = kernels_of_step(preset, load.requests, layers)
    batches = compare_batches(model, load)
    seconds: dict[str, float] = {}
    for batch in (1, load.requests):
        for name in dict.fromkeys((backends.backend(), backends.STOCK)):
            steps = 2 if run.small else 10
            seconds[f"{name}, batch {batch}"] = step_seconds(preset, batch, name, layers, steps)
    content = {"model": preset, "layers": model.config.layers, "kernels of a decode step": kernels}
    different = batches["requests alone that differ"]
    return Result(
        content | {"batches": batches, "step seconds": seconds},
        f"requests alone have different bits: {different}" if different else "",
    )
