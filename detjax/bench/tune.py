"""Searches for schedules on the current device. An accepted schedule has the bits of the reference schedule."""

import dataclasses
import functools
import multiprocessing
import os
import queue
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp

from detjax.bench import timing
from detjax.bench.bits import same_bits
from detjax.operands.options import Epilogue
from detjax.pallas.hopper.matmul.kernel import Operands, product
from detjax.pallas.hopper.matmul.plan import Plan, Problem, Schedule
from detjax.pallas.hopper.matmul.tuning import BUCKETS, bucket, candidates, key, table
from detjax.runtime import backends, compilation

REFERENCES: Final = Schedule(tile_m=8, tile_n=64), Schedule(tile_m=64, tile_n=64, rows="tokens")
"""Reference schedules, in order of preference: the first that fits a problem sets its bits."""

_FINALISTS = 4


@dataclasses.dataclass(frozen=True)
class Trial:
    """The trial of one schedule for one problem.

    Attributes:
        problem: the product.
        schedule: the schedule.
        seconds: the median time of a call; None if the schedule was refused.
        refused: the reason of a refusal.
    """

    problem: Problem
    schedule: Schedule
    seconds: float | None
    refused: str | None = None


@dataclasses.dataclass(frozen=True)
class Search:
    """The limits of a search.

    Attributes:
        tries: schedules to build and time per product, by least estimated time.
        processes: processes that build schedules in parallel; timing is exclusive.
        seconds: time limit of the search, in seconds.
        shared: try only schedules whose results several devices can write.
    """

    tries: int = 12
    processes: int = 8
    seconds: float = 3600
    shared: bool = False


def tune(
    problems: Sequence[Problem], search: Search, report: Callable[[Trial], None] = lambda _: None
) -> dict[str, Schedule]:
    """Returns the fastest schedule of each problem, by its key in a table, and calls `report` with each trial."""
    deadline = time.monotonic() + search.seconds
    # Workers free memory at once, since memory pools of all workers would leave no room for two large products.
    os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    context = multiprocessing.get_context("spawn")
    work, trials, device = context.Queue(), context.Queue(), context.Lock()
    for problem in problems:
        work.put(problem)
    workers = [context.Process(target=_search, args=(work, trials, device, search)) for _ in range(search.processes)]
    for worker in workers:
        worker.start()
    best: dict[str, tuple[float, Schedule]] = {}
    try:
        for trial in _until_done(trials, workers):
            report(trial)
            name = key(trial.problem)
            if trial.seconds is not None and (name not in best or trial.seconds < best[name][0]):
                best[name] = trial.seconds, trial.schedule
            if time.monotonic() > deadline:
                break
    finally:
        for worker in workers:
            worker.terminate()
    return {name: schedule for name, (_, schedule) in best.items()}


def _until_done(trials: Any, workers: Sequence[Any]) -> Iterator[Trial]:
    running = len(workers)
    while running:
        try:
            item = trials.get(timeout=10)
        except queue.Empty:
            failed = [worker.exitcode for worker in workers if worker.exitcode]
            if failed:
                raise RuntimeError(f"tune: a worker ended with exit code {failed[0]}; its output says why") from None
            continue
        if item is None:
            running -= 1
        else:
            yield from item


def _search(work: Any, trials: Any, device: Any, limits: Search) -> None:
    while True:
        try:
            problem = work.get(timeout=1)
        except queue.Empty:
            break
        # Report all trials together, so that an aborted search of a problem yields no schedule.
        trials.put(list(search(problem, limits, device)))
    trials.put(None)


def search(problem: Problem, limits: Search, device: Any) -> Iterator[Trial]:
    """Builds and times schedules of one problem. Holds the lock `device` while it uses the device."""
    with device:
        argument_sets = _operands(problem)
    reference = next(schedule for schedule in REFERENCES if schedule.fits(problem))
    program = _program(problem, reference).lower(*argument_sets[0]).compile()
    with device:
        want = jax.block_until_ready(program(*argument_sets[0]))
    built: list[tuple[float, Schedule, Any]] = []
    for schedule in _pool(problem, limits):
        try:
            program = _program(problem, schedule).lower(*argument_sets[0]).compile()
        except ValueError as error:
            yield Trial(problem, schedule, None, str(error))
            continue
        with device:
            if not bool(same_bits(want, program(*argument_sets[0]))):
                yield Trial(problem, schedule, None, "its bits differ from the reference schedule's")
                continue
            seconds = timing.device_time(program, argument_sets, calls=8)
        built.append((seconds, schedule, program))
    built.sort(key=lambda item: item[0])
    for seconds, schedule, _ in built[_FINALISTS:]:
        yield Trial(problem, schedule, seconds)
    # Finalists alternate, so that a drifting clock affects all of them equally.
    rounds: list[list[float]] = [[] for _ in built[:_FINALISTS]]
    for _ in range(3):
        for times, (_, _, program) in zip(rounds, built, strict=False):
            with device:
                times.append(timing.device_time(program, argument_sets, calls=12))
    for times, (_, schedule, _) in zip(rounds, built, strict=False):
        yield Trial(problem, schedule, statistics.median(times))


def _pool(problem: Problem, limits: Search) -> list[Schedule]:
    """The table's schedules for similar numbers of tokens, and the best candidates."""

    def is_allowed(schedule: Schedule) -> bool:
        return schedule.fits(problem) and (Plan(problem, schedule).can_be_shared or not limits.shared)

    named = table(backends.device_kind())
    index = BUCKETS.index(bucket(problem.tokens))
    near = [problem.with_tokens(size) for size in BUCKETS[max(0, index - 2) : index + 3]]
    known = [named[key(p)] for p in near if key(p) in named]
    variants = [dataclasses.replace(s, lines=lines) for s in known for lines in (1, 2)]
    pool = dict.fromkeys([*variants, *_varied(filter(is_allowed, candidates(problem)), limits.tries)])
    return [*filter(is_allowed, pool)]


def _varied(schedules: Iterable[Schedule], count: int) -> list[Schedule]:
    """The first `count` schedules, at most two per tile, since the estimate ranks tiles better than clusters."""
    alike: dict[tuple[Any, ...], int] = {}
    chosen = []
    for s in schedules:
        tile = s.rows, s.tile_m, s.tile_n, s.warpgroups, s.lines
        alike[tile] = alike.get(tile, 0) + 1
        if alike[tile] <= 2:
            chosen.append(s)
        if len(chosen) == count:
            break
    return chosen


def _program(problem: Problem, schedule: Schedule) -> Any:
    epilogue = Epilogue("silu", gated=True) if problem.parts == 2 else Epilogue()
    multiply = functools.partial(
        product,
        token_layout=problem.token_layout,
        layout=problem.layout,
        epilogue=epilogue,
        out_dtype=problem.out_dtype,
        schedule=schedule,
    )

    def program(x: jax.Array, w: jax.Array, residual: jax.Array | None = None) -> jax.Array:
        # Continuing a sum of zeros costs the same as any other, and needs no donation.
        start = jnp.zeros((problem.m, problem.n), problem.out_dtype) if problem.continues else None
        return multiply(Operands(x, w, residual=residual, start=start))

    return jax.jit(program, compiler_options=compilation.compiler_options("gpu"))


def _operands(problem: Problem) -> list[tuple[jax.Array, ...]]:
    """Enough tokens and weights, with a residual if it is added, that none is in L2 when it is used again."""
    weights = problem.parts * problem.n * problem.k * problem.dtype.itemsize
    sets = []
    for index in range(timing.rotations(weights)):
        keys = jax.random.split(jax.random.key(index), 3)
        tokens = (problem.m, problem.k) if problem.token_layout == "mk" else (problem.k, problem.m)
        outputs = (problem.n, problem.k) if problem.layout == "nk" else (problem.k, problem.n)
        shape = (2, *outputs) if problem.parts == 2 else outputs
        x = jax.random.normal(keys[0], tokens, problem.dtype)
        w = jax.random.normal(keys[1], shape, problem.dtype) * jnp.asarray(problem.k**-0.5, problem.dtype)
        added = [] if problem.residual_dtype is None else [(problem.m, problem.n)]
        sets.append((x, w, *(jax.random.normal(keys[2], size, problem.residual_dtype) for size in added)))
    return jax.block_until_ready(sets)
