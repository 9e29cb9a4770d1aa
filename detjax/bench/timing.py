"""Device time of JAX and PyTorch functions, with inputs in memory rather than in a cache."""

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import jax

from detjax.bench.failures import reason

CACHE_BYTES: Final = 60 << 20
"""The L2 cache of an H200; other supported devices have smaller ones."""
MAX_ROTATIONS: Final = 64
IN_FLIGHT: Final = 4
"""Number of results held during calls, so that memory is neither reused at once nor piles up."""


def rotations(bytes_per_call: int) -> int:
    """Returns the number of argument sets to rotate so that no call finds its arguments in the cache.

    At most 64: inputs below 2 MB stay in the cache, like the few rows of a decode step.
    """
    return min(MAX_ROTATIONS, 2 + 2 * CACHE_BYTES // max(bytes_per_call, 1))


def turns[Name](names: Iterable[Name], rounds: int) -> Iterator[Name]:
    """Yields the names in order, round after round, so that a drifting clock affects all of them equally.

    Every other round runs backwards, so that no name always follows the one that heats the chip most.
    """
    names = list(names)
    for index in range(rounds):
        yield from names[:: -1 if index % 2 else 1]


@dataclasses.dataclass(frozen=True)
class Rounds[Name]:
    """The results of alternating measurements.

    Attributes:
        seconds: the result of each round, by name, without failed names.
        missing: the reason of each failure, by name.
    """

    seconds: dict[Name, list[float]]
    missing: dict[Name, str]

    @property
    def medians(self) -> dict[Name, float]:
        """The median over rounds, by name."""
        return {name: statistics.median(rounds) for name, rounds in self.seconds.items()}


def in_turns[Name](
    runs: Mapping[Name, Callable[[], float]], rounds: int, required: Collection[Name] = ()
) -> Rounds[Name]:
    """Runs all measurements alternately, round after round. A failed one is not repeated.

    Args:
        runs: measurements by name. Each returns seconds.
        rounds: the number of runs of each.
        required: names whose failures are raised.
    """
    seconds: dict[Name, list[float]] = {name: [] for name in runs}
    missing: dict[Name, str] = {}
    for name in turns(runs, rounds):
        if name in missing:
            continue
        try:
            seconds[name].append(runs[name]())
        except Exception as failure:
            if name in required:
                raise
            missing[name] = reason(failure)
    return Rounds({name: values for name, values in seconds.items() if name not in missing}, missing)


def device_time(fn: Callable[..., Any], argument_sets: Sequence[tuple[Any, ...]], *, calls: int = 30) -> float:
    """Returns seconds per call of a jitted function: the median over calls of the summed time of its kernels.

    The time between kernels does not count. On devices other than GPUs it is the time until the result is ready.

    Args:
        fn: a function of one argument set; the first call, which compiles it, does not count.
        argument_sets: argument sets to rotate, see `rotations`.
        calls: the number of measured calls.

    Raises:
        RuntimeError: calls launched different numbers of kernels, or none.
    """
    for arguments in argument_sets[:2]:
        jax.block_until_ready(fn(*arguments))
    measured = list(itertools.islice(itertools.cycle(argument_sets), calls))
    if jax.default_backend() != "gpu":
        return statistics.median(_wall_time(fn, arguments) for arguments in measured)
    kernels = kernel_times(fn, measured)
    if not kernels or len(kernels) % calls:
        names = ", ".join(sorted({name for name, _ in kernels})) or "none"
        raise RuntimeError(
            f"device_time: {calls} calls launched {len(kernels)} kernels; accepted: the same number, at least one, per "
            f"call. Kernels seen: {names}"
        )
    per_call = len(kernels) // calls
    milliseconds = [sum(ms for _, ms in kernels[i : i + per_call]) for i in range(0, len(kernels), per_call)]
    return statistics.median(milliseconds) / 1e3


def _wall_time(fn: Callable[..., Any], arguments: tuple[Any, ...]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(fn(*arguments))
    return time.perf_counter() - start


def kernel_times(fn: Callable[..., Any], argument_sets: Iterable[tuple[Any, ...]]) -> list[tuple[str, float]]:
    """Returns the name and milliseconds of each kernel that calls launch on a GPU, in order, by CUPTI.

    Args:
        fn: a function that is compiled already. It is called as it is, so it may move on a state of its own.
        argument_sets: the arguments of each call.
    """
    from jax.experimental.mosaic.gpu import profiler

    cupti: Any = profiler.mosaic_gpu_lib._mosaic_gpu_ext  # pyright: ignore
    cupti._cupti_init()
    try:
        alive = []
        for arguments in argument_sets:
            alive = [*alive[-IN_FLIGHT:], fn(*arguments)]
        jax.block_until_ready(alive)
    finally:
        kernels = cupti._cupti_get_timings(True)
    return kernels


def step_time(
    program: Callable[..., Any], argument_sets: Sequence[tuple[Any, ...]], *, steps: int = 50, repetitions: int = 5
) -> float:
    """Returns seconds per call of a jitted program in a sequence of calls, as in a loop of decode steps.

    This is wall-clock time, including the time between kernels; the host waits only for the last calls of a repetition.
    If a call takes the device less time than Python, this measures Python: put many dependent calls of a short
    operation into one program, and divide.

    Args:
        program: a function of one argument set; the first call, which compiles it, does not count.
        argument_sets: argument sets to rotate, see `rotations`.
        steps: calls per repetition.
        repetitions: the number of repetitions; the result is their median.
    """
    for arguments in argument_sets[:2]:
        jax.block_until_ready(program(*arguments))
    seconds = []
    for _ in range(repetitions):
        alive = []
        start = time.perf_counter()
        for arguments in itertools.islice(itertools.cycle(argument_sets), steps):
            alive = [*alive[-IN_FLIGHT:], program(*arguments)]
        jax.block_until_ready(alive)
        seconds.append((time.perf_counter() - start) / steps)
    return statistics.median(seconds)
