"""Device time of JAX and PyTorch functions, with inputs that come from memory rather than from a cache."""

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp

from detjax.bench.failures import reason

CACHE_BYTES: Final = 60 << 20
"""The L2 cache of an H200; those of the other devices that detjax serves are smaller."""
MAX_ROTATIONS: Final = 64
IN_FLIGHT: Final = 4
"""Results that are kept alive while calls are made, so that memory is not reused at once and does not pile up."""

ROUNDS: Final = 2
"""Rounds of a measurement in which all rivals take turns."""
LONG_ROUNDS: Final = 4
"""Rounds of calls that take longer than `LONG`. They reach the power limit of the chip, and the clock that it leaves
them changes by several percent with what ran before."""
LONG: Final = 500e-6
"""Seconds of a call from which on `LONG_ROUNDS` are measured."""

KERNELS: Final = "sum of the kernels' times by CUPTI, without the time between kernels"
REPLAY: Final = "replay of a CUDA graph between two events, the time between kernels included"
UNTIL_READY: Final = "time until the result is there"


def rotations(bytes_per_call: int) -> int:
    """How many argument sets, taken in turn, keep a call from finding its arguments in the cache.

    At most 64: inputs below 2 MB stay in the cache, as the few rows of a decode step do.
    """
    return min(MAX_ROTATIONS, 2 + 2 * CACHE_BYTES // max(bytes_per_call, 1))


def calls_for(expected_seconds: float) -> int:
    """Calls in a round: about 60 ms of calls that take so long, but at least 7 and at most 25."""
    return min(25, max(7, int(0.06 / expected_seconds)))


def rounds_for(expected_seconds: float) -> int:
    """Rounds of a call that takes so long."""
    return LONG_ROUNDS if expected_seconds > LONG else ROUNDS


def turns[Name](names: Iterable[Name], rounds: int) -> Iterator[Name]:
    """The names in order, round after round, so that a drifting clock affects all of them equally.

    Every other round goes backwards, so that no name always runs after the one that heats the chip most.
    """
    names = list(names)
    for index in range(rounds):
        yield from names[:: -1 if index % 2 else 1]


@dataclasses.dataclass(frozen=True)
class Rounds[Name]:
    """What was measured in turns.

    Attributes:
        seconds: the result of every round, by name, without the names that failed.
        missing: why a name has no result.
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
    """Runs all measurements in turns, round after round. One that fails is not run again.

    Args:
        runs: measurements, by name, each of which returns seconds.
        rounds: how often each is run.
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
    """Seconds of one call of a jitted function: the median over calls of the summed time of its kernels.

    Time between kernels is not counted. On devices other than GPUs it is the time until the result is there.

    Args:
        fn: a function of one argument set; compiled by its first call, which is not counted.
        argument_sets: taken in turn, see `rotations`.
        calls: how many are measured.

    Raises:
        RuntimeError: calls launched different numbers of kernels, or none.
    """
    for arguments in argument_sets[:2]:
        jax.block_until_ready(fn(*arguments))
    measured = list(itertools.islice(itertools.cycle(argument_sets), calls))
    if jax.default_backend() != "gpu":
        return statistics.median(_wall_time(fn, arguments) for arguments in measured)
    kernels = _kernel_times(fn, measured)
    if not kernels or len(kernels) % calls:
        names = ", ".join(sorted({name for name, _ in kernels})) or "none"
        raise RuntimeError(
            f"device_time: {calls} calls launched {len(kernels)} kernels; accepted: the same number, at least one, by "
            f"every call. Kernels seen: {names}"
        )
    per_call = len(kernels) // calls
    milliseconds = [sum(ms for _, ms in kernels[i : i + per_call]) for i in range(0, len(kernels), per_call)]
    return statistics.median(milliseconds) / 1e3


def _wall_time(fn: Callable[..., Any], arguments: tuple[Any, ...]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(fn(*arguments))
    return time.perf_counter() - start


def _kernel_times(fn: Callable[..., Any], argument_sets: Iterable[tuple[Any, ...]]) -> list[tuple[str, float]]:
    """Name and milliseconds of every kernel that calls with the argument sets launch, in order, by CUPTI."""
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


def kernel_names(program: Callable[..., Any], arguments: tuple[Any, ...]) -> str:
    """The kernels that a call launches, or their number if there are more than 12; "" on devices other than GPUs."""
    if jax.default_backend() != "gpu":
        return ""
    from jax.experimental.mosaic.gpu import profiler

    try:
        _, timings = profiler.measure(program, aggregate=False)(*arguments)
    except Exception as failure:
        return reason(failure)
    names = [name.split("(")[0][:80] for name, _ in timings or ()]
    return " + ".join(names) if len(names) <= 12 else f"{len(names)} kernels"


def copy_time(size: int, *, calls: int) -> float:
    """Seconds that it takes to read half of `size` bytes and to write the other half."""
    count = max(1, size // 8)
    sets = [(jnp.full(count, i, jnp.int32),) for i in range(rotations(size // 2))]
    return device_time(jax.jit(lambda x: x + 1), sets, calls=calls)


def step_time(
    program: Callable[..., Any], argument_sets: Sequence[tuple[Any, ...]], *, steps: int = 50, repetitions: int = 5
) -> float:
    """Seconds of one call of a jitted program among many that follow each other: what a loop of decode steps pays.

    The clock on the wall measures it, so the time between kernels counts; the host waits only for the last calls of a
    repetition. A program that takes the device less time than Python takes to call it measures Python: let one program
    hold many calls of a short operation, each made to depend on the one before, and divide.

    Args:
        program: a function of one argument set; compiled by its first call, which is not counted.
        argument_sets: taken in turn, see `rotations`.
        steps: calls in a repetition.
        repetitions: the result is their median.
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
