"""Calls and rounds of a measurement, names of kernels, and the time of a copy; see `detjax.bench.timing`."""

from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp

from detjax.bench.failures import reason
from detjax.bench.timing import device_time, kernel_times, rotations

ROUNDS: Final = 2
"""Rounds of a measurement, in which all rivals alternate."""
LONG_ROUNDS: Final = 4
"""Rounds of calls longer than `LONG`. They reach the chip's power limit, where the clock varies by several percent with
the preceding load."""
LONG: Final = 500e-6
"""Seconds per call above which `LONG_ROUNDS` apply."""

KERNELS: Final = "sum of kernel times by CUPTI, without the time between kernels"
REPLAY: Final = "replay of a CUDA graph between two events, including the time between kernels"
UNTIL_READY: Final = "time until the result is ready"


def calls_for(expected_seconds: float) -> int:
    """Returns the calls of a round: about 60 ms, but at least 7 and at most 25 calls."""
    return min(25, max(7, int(0.06 / expected_seconds)))


def rounds_for(expected_seconds: float) -> int:
    """Returns the rounds for calls of a duration."""
    return LONG_ROUNDS if expected_seconds > LONG else ROUNDS


def kernel_names(program: Callable[..., Any], arguments: tuple[Any, ...]) -> str:
    """Returns the kernels that a call launches, or their number if more than 12; "" on devices other than GPUs.

    The program is called twice and never traced: a trace would capture the weights of a closure as constants.
    """
    if jax.default_backend() != "gpu":
        return ""
    try:
        jax.block_until_ready(program(*arguments))  # compiles
        kernels = kernel_times(program, [arguments])
    except Exception as failure:
        return reason(failure)
    names = [name.split("(")[0][:80] for name, _ in kernels]
    return " + ".join(names) if len(names) <= 12 else f"{len(names)} kernels"


def copy_time(size: int, *, calls: int) -> float:
    """Returns the seconds to read half of `size` bytes and write the other half."""
    count = max(1, size // 8)
    sets = [(jnp.full(count, i, jnp.int32),) for i in range(rotations(size // 2))]
    return device_time(jax.jit(lambda x: x + 1), sets, calls=calls)
