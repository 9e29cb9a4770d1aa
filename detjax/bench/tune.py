"""Searches schedules on the device at hand. A schedule is accepted only if it gives the reference schedule's bits."""

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
from detjax.pallas.hopper.matmul.plan import Problem, Schedule
from detjax.pallas.hopper.matmul.tuning import BUCKETS, bucket, candidates, key, table
from detjax.runtime import backends, compilation

REFERENCES: Final = Schedule(tile_m=8, tile_n=64), Schedule(tile_m=64, tile_n=64, rows="tokens")
"""Schedules whose bits every accepted schedule has: the first one that fits the problem."""

_FINALISTS = 4


@dataclasses.dataclass(frozen=True)
class Trial:
    """One schedule of one problem.

    Attributes:
        problem: the product.
        schedule: the schedule that was tried.
        seconds: the median time of a call; None if the schedule was refused.
        refused: why it was refused.
    """

    problem: Problem
    schedule: Schedule
    seconds: float | None
    refused: str | None = None


@dataclasses.dataclass(frozen=True)
class Search:
    """The limits of a search: how many schedules are tried, and for how long.

    Attributes:
        tries: schedules of least estimated time to build and to time for each product.
        processes: processes that build schedules side by side; they time them one at a time.
        seconds: seconds after which the search ends with what it has.
    """

    tries: int = 12
    processes: int = 8
    seconds: float = 3600


def tune(
    problems: Sequence[Problem], search: Search, report: Callable[[Trial], None] = lambda _: None
) -> dict[str, Schedule]:
    """The fastest schedule of each problem, by its key in a table.

    Args:
        problems: the products to find schedules for.
        search: the limits of the search.
        report: is called with every trial.
    """
    deadline = time.monotonic() + search.seconds
    # Workers give memory back at once: the largest products of two of them would not fit beside the pools of all.
    os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    context = multiprocessing.get_context("spawn")
    work, trials, device = context.Queue(), context.Queue(), context.Lock()
    for problem in problems:
        work.put(problem)
    workers = [
        context.Process(target=_search, args=(work, trials, device, search.tries)) for _ in range(search.processes)
    ]
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


def _search(work: Any, trials: Any, device: Any, tries: int) -> None:
    while True:
        try:
            problem = work.get(timeout=1)
        except queue.Empty:
            break
        # All trials at once: a search that was cut short names no schedule.
        trials.put(list(search(problem, tries, device)))
    trials.put(None)


def search(problem: Problem, tries: int, device: Any) -> Iterator[Trial]:
    """Builds and times schedules of one problem. It holds the lock `device` while it uses the device."""
    with device:
        argument_sets = _operands(problem)
        reference = next(schedule for schedule in REFERENCES if schedule.fits(problem))
        want = jax.block_until_ready(_program(problem, reference)(*argument_sets[0]))
    built: list[tuple[float, Schedule, Any]] = []
    for schedule in _pool(problem, tries):
        try:
            program = _program(problem, schedule).lower(*argument_sets[0]).compile()
        except ValueError as error:
            yield Trial(problem, schedule, None, str(error))
            continue
        with device:
            if not bool(same_bits(want, program(*argument_sets[0]))):
                yield Trial(problem, schedule, None, "its bits are not the reference schedule's")
                continue
            seconds = timing.device_time(program, argument_sets, calls=8)
        built.append((seconds, schedule, program))
    built.sort(key=lambda item: item[0])
    for seconds, schedule, _ in built[_FINALISTS:]:
        yield Trial(problem, schedule, seconds)
    # The finalists take turns, so that a drifting clock affects all of them equally.
    rounds: list[list[float]] = [[] for _ in built[:_FINALISTS]]
    for _ in range(3):
        for times, (_, _, program) in zip(rounds, built, strict=False):
            with device:
                times.append(timing.device_time(program, argument_sets, calls=12))
    for times, (_, schedule, _) in zip(rounds, built, strict=False):
        yield Trial(problem, schedule, statistics.median(times))


def _pool(problem: Problem, tries: int) -> list[Schedule]:
    """The table's schedules for this number of tokens and for somewhat more or fewer, and the best candidates."""
    named = table(backends.device_kind())
    index = BUCKETS.index(bucket(problem.tokens))
    near = [problem.with_tokens(size) for size in BUCKETS[max(0, index - 2) : index + 3]]
    known = [named[key(p)] for p in near if key(p) in named]
    variants = [dataclasses.replace(s, lines=lines) for s in known for lines in (1, 2)]
    pool = dict.fromkeys([*variants, *_varied(candidates(problem), tries)])
    return [schedule for schedule in pool if schedule.fits(problem)]


def _varied(schedules: Iterable[Schedule], count: int) -> list[Schedule]:
    """The first `count` schedules, at most two for each tile: the estimate knows tiles better than clusters."""
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

    def program(x: jax.Array, w: jax.Array) -> jax.Array:
        # Sums that begin with zeros cost the same to continue as others, and none has to be donated.
        start = jnp.zeros((problem.m, problem.n), problem.out_dtype) if problem.continues else None
        return multiply(Operands(x, w, start=start))

    return jax.jit(program, compiler_options=compilation.compiler_options("gpu"))


def _operands(problem: Problem) -> list[tuple[jax.Array, jax.Array]]:
    """So many pairs of tokens and weights that none is still in the L2 cache when its turn comes."""
    weights = problem.parts * problem.n * problem.k * problem.dtype.itemsize
    sets = []
    for index in range(timing.rotations(weights)):
        keys = jax.random.split(jax.random.key(index), 2)
        tokens = (problem.m, problem.k) if problem.token_layout == "mk" else (problem.k, problem.m)
        outputs = (problem.n, problem.k) if problem.layout == "nk" else (problem.k, problem.n)
        shape = (2, *outputs) if problem.parts == 2 else outputs
        x = jax.random.normal(keys[0], tokens, problem.dtype)
        w = jax.random.normal(keys[1], shape, problem.dtype) * jnp.asarray(problem.k**-0.5, problem.dtype)
        sets.append((x, w))
    return jax.block_until_ready(sets)
