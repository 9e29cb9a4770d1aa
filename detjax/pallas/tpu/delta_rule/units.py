"""Units of a chunk's places: the 8 tokens that are the rows of a register of 32-bit numbers."""

from collections.abc import Callable
from typing import Any, Final

import jax.experimental.pallas as pl
from jax import Array, lax

from detjax.contract import DELTA_CHUNK
from detjax.pallas.tpu.device import SUBLANES

UNITS: Final = DELTA_CHUNK // SUBLANES
"""Units of a chunk."""


def for_each(count: int, step: Callable[[Array], Any]) -> None:
    """Runs a step for every index, in a loop, so that it is compiled once."""
    lax.fori_loop(0, count, lambda index, _: step(index), None)


def in_unit(unit: Array, low: Array, high: Array) -> Array:
    """Returns True if a unit overlaps with the places from `low` to `high`."""
    return (unit * SUBLANES < high) & ((unit + 1) * SUBLANES > low)


def tokens_of(unit: Array) -> Any:
    """Returns a unit's places in arrays whose first axis is tokens."""
    return pl.ds(unit * SUBLANES, SUBLANES)


def rows_of(unit: Array) -> Any:
    """Returns a unit's places in arrays whose first axis is heads, as rows of registers."""
    return pl.ds(pl.multiple_of(unit * SUBLANES, SUBLANES), SUBLANES)
