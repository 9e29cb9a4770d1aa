"""Log-softmax and sampling on an H200: equality of bits over schedules, and their times.

    python -m benchmarks softmax_schedules [--bits] [--rows 64 --rows 1024] [--dtype float32]

First the bits: log_softmax and softmax under all schedules, and the sampler's logprobs and tokens against log_softmax
and the portable backend. Then, unless `--bits` is given, the device time of each schedule and of a copy of as many
bytes; the default schedule is marked.

`--small` compares the bits of tiny sizes in Pallas' interpreter in seconds on a CPU, and measures no time.
"""

import os

# The interpreter's threads wait for each other in XLA's pool, which needs a worker per thread.
os.environ.setdefault("PJRT_NPROC", "16")

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

import detjax
from benchmarks import study as options
from benchmarks.study import Result, Run
from benchmarks.timing import copy_time
from detjax.bench import command_line
from detjax.bench.timing import device_time, rotations
from detjax.cli.options import Option, UsageError
from detjax.operands.sampling_arrays import SamplingArrays
from detjax.pallas.hopper import device, sampling, softmax
from detjax.pallas.hopper.row_stream import padded, slots_that_fit
from detjax.pallas.hopper.softmax import Problem, Schedule, default_schedule
from detjax.portable import sampling as portable_sampling
from detjax.portable import softmax as portable_softmax
from detjax.runtime import backends

VOCABULARY = 151936


class DifferentBits(Exception):
    """Raised if two results that must have the same bits differ."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of all measurements.

    Attributes:
        logits: (rows, width, dtype) of softmax.
        sampled: (width, dtype) of sampling.
        sampled_rows: rows of sampling, at least 10.
        runs: runs of each softmax schedule.
        schedules: the schedules to compare; None: all reasonable ones for the device.
    """

    logits: Sequence[tuple[int, int, str]] = (
        (37, 151936, "float32"),
        (70, 151936, "bfloat16"),
        *((5, width, "float32") for width in (5, 4097, 32000, 50257)),
    )
    sampled: Sequence[tuple[int, str]] = (
        (151936, "float32"),
        (151936, "bfloat16"),
        (50257, "float32"),
        (5, "float32"),
    )
    sampled_rows: int = 64
    runs: int = 3
    schedules: Sequence[Schedule] | None = None


SMALL = Sizes(
    logits=((4, 4225, "float32"),),
    sampled=((200, "float32"),),
    sampled_rows=10,
    runs=1,
    schedules=(Schedule(1, 9, 2), Schedule(0, 2, 1)),
)
"""Sizes that run in Pallas' interpreter in seconds."""


def logits(rows: int, width: int, dtype: str, seed: int) -> jax.Array:
    """Returns random logits."""
    return (jax.random.normal(jax.random.key(seed), (rows, width), jnp.float32) * 4).astype(dtype)


def schedules(problem: Problem, around: Sequence[int] = (0,)) -> Iterator[Schedule]:
    """Yields schedules with 1 to 6 CTAs per multiprocessor: first with resident rows, then with rows read twice.

    Args:
        problem: the rows.
        around: numbers of clusters, relative to the number that runs at once.
    """
    itemsize = problem.dtype.itemsize
    for ctas in (1, 2, 3, 4, 6):
        slots = slots_that_fit(ctas, itemsize)
        for cluster in range(1, min(problem.blocks, device.MAX_CLUSTER) + 1):
            if problem.slots_held_by(cluster) <= slots:
                resident = device.resident_clusters(cluster, ctas)
                for grid in sorted({min(problem.rows, max(1, resident + more)) for more in around}):
                    yield Schedule(cluster, slots, grid)
    for slots, ctas in ((4, 6), (8, 3), (8, 6)):
        yield streaming_schedule(problem, slots, ctas)


def streaming_schedule(problem: Problem, slots: int, ctas: int) -> Schedule:
    """Returns a schedule that reads rows twice, with `ctas` CTAs per multiprocessor."""
    return Schedule(0, slots, min(problem.rows * problem.blocks, device.multiprocessors() * ctas))


def compare_softmax(sizes: Sizes) -> Iterator[str]:
    """Compares softmax and log_softmax under all schedules, and yields a line about each.

    Raises:
        DifferentBits: the bits of a schedule, or of a row alone, differ.
    """
    for rows, width, dtype in sizes.logits:
        x = logits(rows, width, dtype, 0)
        problem = Problem.for_rows(padded(x), rewritten=True)
        for fn in (softmax.log_softmax, softmax.softmax):
            title = f"{fn.__name__} {x.shape} {dtype}"
            tried = list(dict.fromkeys(schedules(problem) if sizes.schedules is None else sizes.schedules))
            first = _compare_schedules(title, fn, x, tried * sizes.runs)
            alone = _words(detjax.jit(functools.partial(fn, schedule=tried[0]))(x[3:4]))
            if not np.array_equal(alone[0], first[3]):
                raise DifferentBits(f"{title}: row 3 alone")
            error = np.abs(first.view(np.float32) - _exact(fn.__name__, x)).max()
            with detjax.use_backend("portable"):
                portable = _words(detjax.jit(getattr(portable_softmax, fn.__name__))(x))
            same = "the portable backend's" if np.array_equal(portable, first) else "not the portable backend's"
            yield f"{title}: {len(tried)} schedules, one set of bits, {same}; error {error:.1e}"


def _compare_schedules(title: str, fn: Callable[..., jax.Array], x: jax.Array, tried: Sequence[Schedule]) -> np.ndarray:
    """The bits of all schedules."""
    first = None
    for schedule in tried:
        result = _words(detjax.jit(functools.partial(fn, schedule=schedule))(x))
        first = result if first is None else first
        if not np.array_equal(result, first):
            rows = np.argwhere((result != first).any(axis=1))[:, 0].tolist()
            raise DifferentBits(f"{title}, {schedule}: rows {rows}")
    assert first is not None
    return first


def _words(x: jax.Array) -> np.ndarray:
    return np.asarray(x).view(np.uint32)


def _exact(name: str, x: jax.Array) -> np.ndarray:
    """Computes softmax or log_softmax in float64."""
    exact = np.asarray(x, np.float64)
    exact -= exact.max(axis=1, keepdims=True)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    return exact if name == "log_softmax" else np.exp(exact)


def compare_sampling(sizes: Sizes) -> Iterator[str]:
    """Compares the sampler's logprobs with log_softmax, and a row alone with the same row among others.

    Raises:
        DifferentBits: the bits of logprobs and log_softmax, or of a row alone, differ.
    """
    rows = sizes.sampled_rows
    sample = {filtered: detjax.jit(functools.partial(sampling.sample, filtered=filtered)) for filtered in (False, True)}
    log_softmax = functools.partial(softmax.log_softmax, schedule=sizes.schedules[0] if sizes.schedules else None)
    for width, dtype in sizes.sampled:
        title = f"sample {width} {dtype}"
        arguments = sampler_arguments(logits(rows, width, dtype, 1), np.resize([0.0, 1.0, 0.7, 2.0], rows))
        tokens, logprobs = sample[False](*arguments)
        expected = detjax.jit(log_softmax)(arguments[0])[np.arange(rows), tokens]
        if np.asarray(logprobs).tobytes() != np.asarray(expected).tobytes():
            raise DifferentBits(f"{title}: logprobs and log_softmax")
        compared = {
            "alone": (sample[False](*jax.tree.map(lambda x: x[9:10], arguments)), (tokens[9:10], logprobs[9:10])),
            "among filters": (sample[True](*arguments), (tokens, logprobs)),
        }
        for name, (given, wanted) in compared.items():
            if any(np.asarray(a).tobytes() != np.asarray(b).tobytes() for a, b in zip(given, wanted, strict=True)):
                raise DifferentBits(f"{title}: a row {name}")
        with detjax.use_backend("portable"):
            portable, _ = detjax.jit(functools.partial(portable_sampling.sample, filtered=False))(*arguments)
        equal = int((portable == tokens).sum())
        yield f"{title}: bits kept; {equal} of {rows} tokens are the portable backend's"


def sampler_arguments(x: jax.Array, temperature: Any) -> tuple[jax.Array, SamplingArrays]:
    """Returns the arguments of `ops.sample` for logits, without filters."""
    rows = len(x)
    keys = (jnp.arange(rows)[:, None] + jnp.arange(4)[None]).astype(jnp.uint32)
    ids, ones = jnp.arange(rows, dtype=jnp.int32), jnp.ones(rows, jnp.float32)
    return x, SamplingArrays(keys, ids, jnp.asarray(temperature, jnp.float32), 0 * ids, ones, 0 * ones)


def measure(rows: int, vocabulary: int, dtype: str, calls: int) -> Iterator[dict[str, Any]]:
    """Yields times of log_softmax under every schedule, of logsumexp, of the sampler and of a copy."""
    shape = jax.ShapeDtypeStruct((rows, vocabulary), jnp.dtype(dtype))
    problem = Problem.for_rows(shape, rewritten=True)
    read, written = shape.size * shape.dtype.itemsize, 4 * shape.size
    sets = [(logits(rows, vocabulary, dtype, seed),) for seed in range(rotations(read))]
    head = {"rows": rows, "dtype": dtype}
    copy, chosen = copy_time(read + written, calls=calls), default_schedule(problem)
    for schedule in dict.fromkeys([chosen, *schedules(problem, around=(-2, 0, 2, rows))]):
        seconds = device_time(detjax.jit(functools.partial(softmax.log_softmax, schedule=schedule)), sets, calls=calls)
        fields = {"schedule": dataclasses.asdict(schedule), "chosen": schedule == chosen}
        yield head | {"case": "log_softmax", "seconds": seconds, "copy": copy} | fields
    copy = copy_time(2 * read, calls=calls) / 2
    for slots, ctas in ((4, 6), (8, 3), (4, 4), (8, 6)):
        schedule = streaming_schedule(problem, slots, ctas)
        fields = {"copy": copy, "schedule": dataclasses.asdict(schedule), "chosen": False}
        program = detjax.jit(functools.partial(softmax.logsumexp, schedule=schedule))
        yield head | {"case": "logsumexp", "seconds": device_time(program, sets, calls=calls)} | fields
        for name, temperature in (("sample, greedy", 0.0), ("sample, temperature 1", 1.0)):
            sampler = detjax.jit(functools.partial(sampling.sample, filtered=False, schedule=schedule))
            arguments = [sampler_arguments(x, np.full(rows, temperature)) for (x,) in sets]
            yield head | {"case": name, "seconds": device_time(sampler, arguments, calls=calls)} | fields


def study(
    run: Run,
    *,
    bits: Annotated[bool, Option("Only compare bits.")] = False,
    rows: Annotated[list[int] | None, Option("Rows per call.", minimum=1, default="64, 1024")] = None,
    dtype: Annotated[list[str] | None, Option("Dtypes of the logits.", default="float32, bfloat16")] = None,
    calls: options.Calls = 20,
) -> Result:
    if not run.small and backends.backend() != "hopper":
        raise UsageError(f"without --small on {backends.device_name()}; accepted: an H100 or H200")
    sizes = SMALL if run.small else Sizes()
    lines, results = [], []
    content = {"note": options.INTERPRETED if run.small else None, "bits": lines, "results": results}
    try:
        with plgpu.force_gpu_interpret_mode() if run.small else contextlib.nullcontext():
            for text in itertools.chain(compare_softmax(sizes), compare_sampling(sizes)):
                command_line.print_line(text)
                lines.append(text)
    except DifferentBits as error:
        return Result(content, f"different bits: {error}")
    if not bits and not run.small:
        for name, count in itertools.product(dtype or ["float32", "bfloat16"], rows or [64, 1024]):
            results += measure(count, VOCABULARY, name, calls)
    return Result(content)
