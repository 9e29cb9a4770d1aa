"""Device time of JAX and PyTorch functions, with inputs that come from memory rather than from a cache."""

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import jax

CACHE_BYTES: Final = 60 << 20
"""The L2 cache of an H200; those of the other devices that detjax serves are smaller."""
MOST_ROTATIONS: Final = 64
IN_FLIGHT: Final = 4
"""Results that are kept alive while calls are made, so that memory is not reused at once and does not pile up."""


def rotations(bytes_per_call: int) -> int:
    """How many argument sets, taken in turn, keep a call from finding in the cache what its set left there.

    At most 64: inputs below 2 MB stay in the cache, as the few rows of a decode step do.
    """
    return min(MOST_ROTATIONS, 2 + 2 * CACHE_BYTES // max(bytes_per_call, 1))


def turns[Name](names: Iterable[Name], rounds: int) -> Iterator[Name]:
    """The names in order, round after round, so that a drifting clock meets all alike.

    Every other round goes backwards: none always runs after the one that heats the chip most.
    """
    names = list(names)
    for index in range(rounds):
        yield from names[:: -1 if index % 2 else 1]


def device_time(fn: Callable[..., Any], argument_sets: Sequence[tuple[Any, ...]], *, calls: int = 30) -> float:
    """Seconds of one call of a jitted function: the median over calls of the summed time of its kernels.

    Time between kernels is not counted. On devices other than GPUs it is the time until the result is there.

    Args:
        fn: takes each of the argument sets; compiled by its first call, which is not counted.
        argument_sets: taken in turn, see `rotations`.
        calls: how many are measured.

    Raises:
        RuntimeError: calls launched different numbers of kernels, or none.
    """
    for arguments in argument_sets[:2]:
        jax.block_until_ready(fn(*arguments))
    turns = list(itertools.islice(itertools.cycle(argument_sets), calls))
    if jax.default_backend() != "gpu":
        return statistics.median(_wall_time(fn, arguments) for arguments in turns)

    from jax.experimental.mosaic.gpu import profiler

    cupti: Any = profiler.mosaic_gpu_lib._mosaic_gpu_ext  # pyright: ignore
    cupti._cupti_init()
    try:
        alive = []
        for arguments in turns:
            alive = [*alive[-IN_FLIGHT:], fn(*arguments)]
        jax.block_until_ready(alive)
    finally:
        kernels = cupti._cupti_get_timings(True)
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


def step_time(
    program: Callable[..., Any], argument_sets: Sequence[tuple[Any, ...]], *, steps: int = 50, repetitions: int = 5
) -> float:
    """Seconds of one call of a jitted program among many that follow each other: what a loop of decode steps pays.

    By the clock on the wall, so the time between kernels counts; the host waits for the last calls of a repetition
    alone. A program that takes the device less time than Python takes to call it measures Python: let one program hold
    many calls of a short operation, each made to depend on the one before, and divide.

    Args:
        program: takes each of the argument sets; compiled by its first call, which is not counted.
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


def torch_time(fn: Callable[..., Any], argument_sets: Sequence[tuple[Any, ...]], *, replays: int = 7) -> float:
    """Seconds of one call of a PyTorch function, in a CUDA graph that calls it once with each argument set.

    Raises:
        ModuleNotFoundError: PyTorch is not installed.
    """
    import torch  # pyright: ignore[reportMissingImports]

    argument_sets = [*argument_sets, *argument_sets[: max(0, 4 - len(argument_sets))]]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for arguments in argument_sets:
            fn(*arguments)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        alive = [fn(*arguments) for arguments in argument_sets]
    graph.replay()
    torch.cuda.synchronize()
    milliseconds = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        milliseconds.append(start.elapsed_time(end) / len(argument_sets))
    del graph, alive
    return statistics.median(milliseconds) / 1e3
