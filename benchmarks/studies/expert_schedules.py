"""Schedules of the Hopper kernel for experts: equality of their bits, and their times.

    python -m benchmarks expert_schedules --out benchmarks/results/expert-schedules-h200.json

Random tokens choose random experts. Groups of rows begin at multiples of a tile's rows, so the result has the fastest
schedule per number of rows in a tile, by tokens per call, for both projections of an expert.

`--small` compares the bits of a tiny size in Pallas' interpreter in seconds on a CPU, and measures no time.
"""

import os

from detjax.operands.products import GroupedOperands

# The interpreter's threads wait for each other in XLA's pool, which needs a worker per thread.
os.environ.setdefault("PJRT_NPROC", "16")

import contextlib
import dataclasses
import functools
import itertools
import multiprocessing
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple, get_args

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from benchmarks import study as options
from benchmarks.studies.experts.projections import MODELS, Widths, chosen_experts
from benchmarks.study import Result, Run
from detjax.bench import timing
from detjax.bench.bits import same_bits
from detjax.cli.options import Option, UsageError
from detjax.operands.options import Epilogue
from detjax.pallas.hopper import grouped_matmul
from detjax.pallas.hopper.matmul.plan import Schedule
from detjax.runtime import backends, compilation

type Projection = Literal["gate and up", "down"]
PROJECTIONS: Final[tuple[Projection, ...]] = get_args(Projection.__value__)

TOKENS: Final = (4, 16, 64, 256, 1024, 2048, 4096, 8192)
UNITS: Final = (8, 16, 32, 64, 128)

_MAX_COMPARED: Final = 16384
"""Maximum number of rows whose results are compared, limited by memory."""
_CALLS: Final = 8


class Job(NamedTuple):
    """A product of rows by expert, without a schedule."""

    widths: Widths
    tokens: int
    projection: Projection

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of an expert's weight."""
        inner, width = self.widths.inner, self.widths.width
        return (2, inner, width) if self.projection == "gate and up" else (width, inner)

    def units(self) -> list[int]:
        """The candidates for a tile's rows: about as many as an expert has."""
        mean = self.tokens * self.widths.chosen / self.widths.experts
        return [unit for unit in UNITS if unit == UNITS[0] or (unit <= 8 * mean and (4 * unit >= mean or unit == 128))]


@dataclasses.dataclass(frozen=True)
class Trial:
    """A schedule of a product.

    Attributes:
        job: the product.
        schedule: the schedule; its tiles of tokens are the unit of groups.
        seconds: the device time of a call; None if not measured.
        has_first_bits: whether the rows of tokens have the first schedule's bits; None if not compared.
    """

    job: Job
    schedule: Schedule
    seconds: float | None
    has_first_bits: bool | None


def schedules(unit: int) -> Iterator[Schedule]:
    """Yields schedules of tiles of `unit` tokens, including invalid ones."""
    for outputs, warpgroups, lines in itertools.product((64, 128, 192, 256), (1, 2), (1, 2, 4)):
        yield Schedule(unit, outputs, "weights", warpgroups=warpgroups, lines=lines)
    if unit >= 64:
        for outputs, warpgroups, lines in itertools.product((64, 128, 256), (1, 2), (1, 2)):
            yield Schedule(unit, outputs, "tokens", warpgroups=warpgroups, lines=lines)


def trials(job: Job, given: Callable[[int], Iterator[Schedule]], device: Any, *, timed: bool = True) -> Iterator[Trial]:
    """Yields a trial of each valid schedule. Holds the lock `device` while it uses the device."""
    with device:
        w, x, experts = _operands(job)
    first = None
    for unit in job.units():
        with device:
            rows, sizes, place = _grouped(x, experts, job.widths.experts, unit)
        for schedule in given(unit):
            try:
                program = _program(job, unit, schedule).lower(rows, w, sizes).compile()
            except ValueError:
                continue
            with device:
                same = None
                if len(x) <= _MAX_COMPARED:
                    y = program(rows, w, sizes)[place]
                    first = y if first is None else first
                    same = bool(same_bits(y, first))
                seconds = timing.device_time(program, [(rows, w, sizes)], calls=_CALLS) if timed else None
            yield Trial(job, schedule, seconds, same)


def small() -> Iterator[Trial]:
    """Yields untimed trials of a tiny product, for the interpreter."""

    def few(unit: int) -> Iterator[Schedule]:
        return (Schedule(unit, 64, lines=lines) for lines in (1, 2) if unit <= 16)

    return trials(Job(Widths(4, 2, 128, 64), 12, "gate and up"), few, contextlib.nullcontext(), timed=False)


def _program(job: Job, unit: int, schedule: Schedule) -> Any:
    epilogue = Epilogue("silu", gated=True) if job.projection == "gate and up" else Epilogue()
    options: dict[str, Any] = {"layout": "nk", "epilogue": epilogue, "out_dtype": jnp.bfloat16, "unit": unit}
    forward = functools.partial(grouped_matmul.forward, schedule=schedule, **options)
    compiler_options = compilation.compiler_options()
    return jax.jit(lambda x, w, sizes: forward(GroupedOperands(x, w, None, sizes)), compiler_options=compiler_options)


def _operands(job: Job) -> tuple[Array, Array, np.ndarray]:
    """Weights, rows, and each row's expert, ascending. Tokens choose random experts."""
    widths = job.widths
    ids = np.asarray(chosen_experts(widths, job.tokens))
    draw = compilation.jit(lambda key, shape: jax.random.normal(key, shape, jnp.bfloat16), static_argnums=1)
    keys = jax.random.split(jax.random.key(0), widths.experts + 1)
    # One expert at a time, since float32 draws of all would take twice the memory of the weights.
    w = jnp.stack([draw(key, job.shape) * jnp.bfloat16(job.shape[-1] ** -0.5) for key in keys[1:]])
    return jax.block_until_ready(w), draw(keys[0], (ids.size, job.shape[-1])), np.sort(ids.reshape(-1))


def _grouped(x: Array, experts: np.ndarray, count: int, unit: int) -> tuple[Array, Array, np.ndarray]:
    """The rows in groups of multiples of `unit`, the groups' sizes, and each row's index."""
    counts = np.bincount(experts, minlength=count)
    sizes = -(-counts // unit) * unit
    place = (np.cumsum(sizes) - sizes - np.cumsum(counts) + counts)[experts] + np.arange(len(experts))
    rows = -(-(len(experts) + count * (unit - 1)) // unit) * unit
    return jnp.zeros((rows, x.shape[1]), x.dtype).at[place].set(x), jnp.asarray(sizes, jnp.int32), place


def measure(jobs: Sequence[Job], *, processes: int, seconds: float) -> Iterator[Trial]:
    """Yields trials of all jobs. Processes build kernels in parallel and time them exclusively.

    Args:
        jobs: the products.
        processes: the number of processes.
        seconds: time limit of the search.
    """
    deadline = time.monotonic() + seconds
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
    context = multiprocessing.get_context("spawn")
    work, results, device = context.Queue(), context.Queue(), context.Lock()
    for job in [*jobs, *[None] * processes]:
        work.put(job)
    workers = [context.Process(target=_work, args=(work, results, device), daemon=True) for _ in range(processes)]
    for worker in workers:
        worker.start()
    running = processes
    try:
        while running and time.monotonic() < deadline:
            try:
                trial = results.get(timeout=1)
            except queue.Empty:
                if failed := [worker.exitcode for worker in workers if worker.exitcode]:
                    message = f"a worker ended with exit code {failed[0]}; its output says why"
                    raise RuntimeError(f"expert_schedules: {message}") from None
                continue
            if trial is None:
                running -= 1
            else:
                yield trial
    finally:
        for worker in workers:
            worker.terminate()


def _work(work: Any, results: Any, device: Any) -> None:
    while (job := work.get()) is not None:
        for trial in trials(job, schedules, device):
            results.put(trial)
    results.put(None)


def fastest(given: Sequence[Trial]) -> list[dict[str, Any]]:
    """Returns the fastest schedule of each product and unit, and the fastest unit of each model and number of tokens.

    Both projections have the same groups, so a unit's time is the sum over its fastest schedules of both.
    """
    best: dict[tuple[Widths, int], dict[int, dict[Projection, Trial]]] = {}
    for trial in given:
        units = best.setdefault((trial.job.widths, trial.job.tokens), {})
        projections = units.setdefault(trial.schedule.tile_m, {})
        known = projections.get(trial.job.projection)
        if trial.seconds is not None and (known is None or known.seconds is None or trial.seconds < known.seconds):
            projections[trial.job.projection] = trial
    names = {widths: name for name, widths in MODELS.items()}
    rows = []
    for (widths, tokens), units in best.items():
        times = {
            unit: sum(trial.seconds or 0 for trial in projections.values())
            for unit, projections in units.items()
            if len(projections) == len(PROJECTIONS)
        }
        if times:
            unit = min(times, key=times.__getitem__)
            chosen = {name: dataclasses.asdict(trial.schedule) for name, trial in units[unit].items()}
            rows.append({"model": names[widths], "tokens": tokens, "unit": unit, "seconds": times, "schedules": chosen})
    return rows


def study(
    run: Run,
    *,
    model: Annotated[list[str], options.names(MODELS)],
    tokens: options.Tokens = None,
    processes: Annotated[int, Option("Processes that build kernels in parallel.", minimum=1)] = 8,
    seconds: Annotated[float, Option("Time limit of the search, in seconds.")] = 600.0,
) -> Result:
    if not run.small and backends.backend() != "hopper":
        raise UsageError(f"without --small on {backends.device_name()}; accepted: an H100 or H200")
    if run.small:
        with plgpu.force_gpu_interpret_mode():
            tried = list(small())
    else:
        sizes = itertools.product(tokens or TOKENS, model, PROJECTIONS)
        jobs = [Job(MODELS[name], count, projection) for count, name, projection in sizes]
        tried = list(measure(jobs, processes=processes, seconds=seconds))
    different = [trial for trial in tried if trial.has_first_bits is False]
    summary = fastest(tried)
    note = options.INTERPRETED if run.small else None
    return Result(
        {"note": note, "fastest": summary, "trials": [dataclasses.asdict(trial) for trial in tried]},
        f"schedules have different bits: {different}" if different else "",
    )
