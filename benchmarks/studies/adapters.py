"""Adapters: decode steps over many of them against the model alone, loading one, and training one.

    python -m benchmarks adapters --out benchmarks/results/adapters-h200.json

An engine with the shape of Qwen3-8B and 64 slots answers 1, 64 and 256 requests, without adapters and over 1, 8 and 64
adapters of rank 16 on all linear layers. The time of a step is measured while all requests decode, in turns with the
model alone. A request's tokens and logprobs have to be the same alone and in a batch over all adapters and none, and
requests without an adapter have to have the same in a batch without adapters.

Loading reads an adapter's folder, which the file cache holds, and answers a request of a token; a request with an
adapter that is in a slot takes the rest of the time, and is subtracted. Nothing may be compiled.

Training compares a step of `detjax.rl.functional` on the shape of Qwen3-0.6B with one whose adapter alone is trained:
seconds, and the peak of each process' memory, also with layers that the backward pass recomputes.

`--part widths` launches the kernels that add adapters again and again at the widths of Qwen3-8B, and counts the numbers
that differ from separate kernels' (see `benchmarks.repeated_products`), also for gradients of rows, kept sums, biases,
residuals, and many ranks. It has to be asked for, on Hopper.

All programs are compiled before they are measured, in parallel. The exit code is 1 if bits differ, if an adapter does
not change answers, or if loading compiles a program.

`--small` runs on a CPU in seconds.
"""

import os

# Processes have the memory in turns.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import contextlib
import dataclasses
import functools
import itertools
import multiprocessing
import operator
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Final

import jax
import numpy as np

from benchmarks import adapted_products, repeated_products
from benchmarks import study as options
from benchmarks.studies.mesh_speed import decode_seconds
from benchmarks.studies.training import measures
from benchmarks.study import Result, Run
from detjax.bench import command_line, presets, timing
from detjax.bench.failures import reason
from detjax.bench.serve import Workload, digest
from detjax.contract import KV_BLOCK
from detjax.engine import Engine, EngineConfig, Request, SamplingParams
from detjax.models import Adapter, AdapterConfig, Decoder, new_adapter, read_adapter, save_adapter, with_adapter
from detjax.models.network import split
from detjax.operands.numerics import ceil_div
from detjax.rl.functional import Training
from detjax.rl.trainer.losses import LogLikelihood
from detjax.rl.trainer.microbatches import Rows
from detjax.rl.trainer.optimizers import adamw
from detjax.runtime import backends

PARTS: Final = "widths", "training", "steps", "bits", "loading"
BASE: Final = "base"
CONFIG: Final = AdapterConfig(rank=16, alpha=32.0, targets="all-linear")
RECOMPUTED: Final = "adapter, layers recomputed"
ARMS: Final[Mapping[str, AdapterConfig | None]] = {"full": None, "adapter": CONFIG, RECOMPUTED: CONFIG}
"""The configuration of the adapter that a step trains; None: it trains all weights."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a run.

    Attributes:
        requests: numbers of requests that decode together.
        adapters: numbers of adapters that they have, up to the number of requests.
        prompt: tokens of prompts. All but the last one fill pages, which later rounds find in the cache.
        tokens: tokens of answers.
        token_budget: see `EngineConfig`.
        rounds: timed rounds of each measurement.
        loads: adapters that are loaded.
        alone: indices of requests that are also answered alone.
        training: the sizes of training.
    """

    requests: tuple[int, ...] = (1, 64, 256)
    adapters: tuple[int, ...] = (1, 8, 64)
    prompt: int = KV_BLOCK + 1
    tokens: int = 160
    token_budget: int = 1024
    rounds: int = 3
    loads: int = 5
    alone: tuple[int, ...] = (0, 1, 100, 255)
    training: measures.Sizes = dataclasses.field(default_factory=lambda: measures.Sizes(rounds=3))

    @property
    def engine(self) -> EngineConfig:
        """The engine's settings."""
        pages, most = ceil_div(self.prompt + self.tokens, KV_BLOCK), max(self.requests)
        return EngineConfig(
            max_samples=most,
            token_budget=self.token_budget,
            max_length=pages * KV_BLOCK,
            # The prompts of all arms stay in the cache.
            num_pages=most * (pages + (1 + len(self.adapters)) * (self.prompt // KV_BLOCK)),
            top_logprobs=0,
            max_loras=max(self.adapters),
            max_lora_rank=CONFIG.rank,
        )


SMALL: Final = Sizes((1, 3), (1, 2), 5, 6, 32, 1, 1, (0, 2), measures.SMALL)


def study(
    run: Run,
    *,
    preset: options.Preset = "Qwen3-8B",
    layers: options.Layers = None,
    part: Annotated[list[str], options.names(PARTS)],
) -> Result:
    sizes, parts = Sizes(), part or [name for name in PARTS if name != "widths"]
    if run.small:
        sizes, preset, layers = SMALL, "tiny", 1
    content: dict[str, Any] = {
        "preset": preset,
        "layers": presets.config(preset, layers).layers,
        "sizes": dataclasses.asdict(sizes),
        "rank": CONFIG.rank,
    }

    def add(name: str, value: Any) -> None:
        """Adds a part, or a row of steps, prints it and saves the result so far."""
        content[name] = [*content.get(name, []), value] if name == "steps" else value
        command_line.print_line(f"{name}: {value}")
        run.save(content)

    if "widths" in parts:
        content["widths"] = {}
        groups = itertools.chain(adapted_products.wide_groups(), adapted_products.groups_of_forms())
        repeated_products.compare(run, content, content["widths"], groups)
    if "training" in parts:
        # Processes of their own, which begin before this one takes memory.
        for result in training(sizes.training, in_processes=not run.small):
            add("training", result)
    if {*parts} - {"training", "widths"}:
        decoder = presets.decoder(preset, layers)
        # Those after the last slot are loaded.
        adapters = list(itertools.islice(drawn_adapters(decoder), max(sizes.adapters) + sizes.loads))
        begin = time.perf_counter()
        with Engine(decoder, config=sizes.engine) as engine:
            if backends.backend() != "portable":
                engine.warm_up()
            add("ready_after_seconds", time.perf_counter() - begin)
            _measure(engine, decoder.config.vocab_size, adapters, sizes, parts, add)
    return Result(content, problem(content))


def problem(content: Mapping[str, Any]) -> str:
    """Returns what contradicts the promises in a result; empty: nothing does."""
    if different := repeated_products.problems(content["widths"]) if "widths" in content else []:
        return f"kernels of adapters: {'; '.join(different)}"
    wrong = [name for name, holds in content.get("bits", {}).items() if not holds]
    if wrong:
        return f"bits: {', '.join(wrong)}: no"
    if compiled := content.get("loading", {}).get("compiled"):
        return f"loading an adapter compiled {', '.join(compiled)}"
    return ""


def _measure(
    engine: Engine, vocabulary: int, adapters: Sequence[Adapter], sizes: Sizes, parts: Sequence[str], add: Any
) -> None:
    """Adds the parts that an engine answers."""
    slots = max(sizes.adapters)
    for number, adapter in enumerate(adapters[:slots]):
        engine.load_adapter(str(number), adapter)
    workload = Workload(
        max(sizes.requests), (sizes.prompt, sizes.prompt), (sizes.tokens, sizes.tokens), temperature=0.8
    )
    requests = workload.draw(vocabulary)
    if "steps" in parts:
        for count in sizes.requests:
            add("steps", step_row(engine, requests[:count], sizes))
    if "bits" in parts:
        add("bits", bits(engine, requests, sizes))
    if "loading" in parts:
        add("loading", loading(engine, adapters[slots:]))


def drawn_adapters(model: Decoder) -> Iterator[Adapter]:
    """Yields any number of random adapters. They share memory: each begins elsewhere in the same random numbers."""
    shapes = new_adapter(model, CONFIG).factors
    size = sum(one.a.size + one.b.size for one in shapes.values())
    dtype = next(iter(shapes.values())).a.dtype
    numbers = np.random.default_rng(0).standard_normal(2 * size, np.float32)
    numbers = (numbers * model.config.hidden_size**-0.5).astype(dtype)
    for offset in range(0, size, 101):
        place, factors = offset, {}
        for name, one in shapes.items():
            ends = place + one.a.size, place + one.a.size + one.b.size
            a, b = numbers[place : ends[0]], numbers[ends[0] : ends[1]]
            factors[name] = one._replace(a=a.reshape(one.a.shape), b=b.reshape(one.b.shape))
            place = ends[1]
        yield Adapter(CONFIG, factors)


def over(requests: Iterable[Request], adapters: int) -> list[Request]:
    """Returns requests over a number of adapters, in turn; 0: without any."""
    return [
        dataclasses.replace(request, adapter=str(number % adapters) if adapters else None)
        for number, request in enumerate(requests)
    ]


def step_row(engine: Engine, requests: Sequence[Request], sizes: Sizes) -> dict[str, Any]:
    """Returns seconds of a step of all requests, by their number of adapters, and the speed over the model alone."""
    counts = [0, *(count for count in sizes.adapters if count <= len(requests))]
    arms = {str(count) if count else BASE: over(requests, count) for count in counts}
    for some in arms.values():  # fills the slots and the prefix cache
        engine.generate(some)
    runs = {name: functools.partial(_step_seconds, engine, some) for name, some in arms.items()}
    seconds = timing.in_turns(runs, sizes.rounds, required=list(arms)).medians
    speed = {name: seconds[BASE] / value for name, value in seconds.items() if name != BASE}
    return {"requests": len(requests), "seconds": seconds, "speed_over_base": speed}


def _step_seconds(engine: Engine, requests: Sequence[Request]) -> float:
    return decode_seconds(engine, requests)[0]


def bits(engine: Engine, requests: Sequence[Request], sizes: Sizes) -> dict[str, bool]:
    """Returns whether requests have the bits that they have alone, in a batch over all adapters and none."""
    names = max(sizes.adapters)
    adapted = over(requests, names)
    mixed = [dataclasses.replace(one, adapter=None) if n % 3 == 0 else one for n, one in enumerate(adapted)]
    plain, together = engine.generate(over(requests, 0)), engine.generate(mixed)
    alone = {number: engine.generate([mixed[number]]) for number in sizes.alone}
    pairs = [(digest([one]), digest([other])) for one, other in zip(plain, together, strict=True)]
    return {
        "alone as in the batch": all(digest(one) == digest([together[number]]) for number, one in alone.items()),
        "without an adapter as the model alone": all(one == other for one, other in pairs[::3]),
        "adapters change answers": all(one != other for n, (one, other) in enumerate(pairs) if n % 3),
    }


def loading(engine: Engine, adapters: Sequence[Adapter]) -> dict[str, Any]:
    """Returns the seconds until an adapter in a folder is in a slot, and the functions that were compiled for it."""

    def answer_seconds(name: str) -> float:
        begin = time.perf_counter()
        engine.generate([Request(range(7), SamplingParams(1), adapter=name)])
        return time.perf_counter() - begin

    seconds, reads, compiled = [], [], list[str]()
    with tempfile.TemporaryDirectory() as folder:
        for number, adapter in enumerate(adapters):
            path, name = Path(folder) / str(number), f"loaded {number}"
            save_adapter(adapter, path)
            answer_seconds("0")
            in_a_slot = statistics.median(answer_seconds("0") for _ in range(3))
            with _compiled_programs() as programs:
                begin = time.perf_counter()
                loaded = read_adapter(path)
                reads.append(time.perf_counter() - begin)
                engine.load_adapter(name, loaded)
                total = time.perf_counter() - begin + answer_seconds(name)
                engine.unload_adapter(name)
            seconds.append(total - in_a_slot)
            compiled += programs
    return {
        "seconds": seconds,
        "median_seconds": statistics.median(seconds),
        "read_seconds": reads,
        "compiled": compiled,
        "bytes": sum(x.nbytes for one in adapters[0].factors.values() for x in (one.a, one.b)),
    }


@contextlib.contextmanager
def _compiled_programs() -> Iterator[list[str]]:
    """A context with a list that gets the name of each function that is compiled in it."""
    names: list[str] = []

    def note(event: str, duration_secs: float, **details: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(str(details.get("fun_name", "")))

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


# --- training --------------------------------------------------------------------------------------------------------


def training(sizes: measures.Sizes, *, in_processes: bool) -> Iterator[dict[str, Any]]:
    """Yields the measurements of `training_step` of the arms so far, with `_ratios`."""
    arms: dict[str, dict[str, Any]] = {}
    for name in ARMS:
        if not in_processes:
            arms[name] = training_step(sizes, name)
        else:
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                try:
                    arms[name] = pool.submit(training_step, sizes, name).result()
                except jax.errors.JaxRuntimeError as error:
                    arms[name] = {"missing": reason(error)}
        yield {"arms": dict(arms), **_ratios(arms)}


def _ratios(arms: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Returns the ratios of the adapters' times and memory to the ones of full training, if both are there."""
    result, missing = dict[str, float](), {"missing": ""}
    full = arms["full"]
    for name, suffix in (("adapter", ""), (RECOMPUTED, "_recomputed")):
        adapter = arms.get(name, missing)
        if "missing" in full or "missing" in adapter:
            continue
        medians = (statistics.median(arm["seconds"]) for arm in (adapter, full))
        result[f"time_over_full{suffix}"] = operator.truediv(*medians)
        if full["bytes"]:
            result[f"memory_over_full{suffix}"] = adapter["bytes"] / full["bytes"]
    return result


def training_step(sizes: measures.Sizes, arm: str) -> dict[str, Any]:
    """Returns the seconds of steps, of the first one, which compiles, and the most bytes of memory."""
    model, config = presets.decoder(sizes.preset, sizes.layers), ARMS[arm]
    if config is not None:
        model = with_adapter(model, new_adapter(model, config))
    batch = measures.samples(sizes, model.config.vocab_size)
    steps = Training(model, adamw(1e-4), LogLikelihood(), shards=sizes.shards)
    state = steps.init(steps.network.state(split(model)[1]))
    del model
    microbatch, seconds = Rows(sizes.sequences, sizes.length), []
    for _ in range(sizes.rounds + 2):
        begin = time.perf_counter()
        result = steps.loss_and_gradients(state.params, batch, microbatch=microbatch, rematerialized=arm == RECOMPUTED)
        state, _ = steps.update(state, result.gradients, donated=True)
        del result
        jax.block_until_ready(state)
        seconds.append(time.perf_counter() - begin)
    memory = jax.local_devices()[0].memory_stats() or {}
    return {"first": seconds[0], "seconds": seconds[2:], "bytes": memory.get("peak_bytes_in_use")}
