"""Problems and schedules of attention gradients on Hopper."""

import dataclasses
from typing import Any, Final

import numpy as np

from detjax.contract import ACCUMULATOR
from detjax.pallas.hopper.attention.prefill_schedule import check_stages
from detjax.pallas.hopper.attention.warpgroups import TILE
from detjax.pallas.hopper.device import SHARED_MEMORY, SHARED_MEMORY_RESERVED
from detjax.pallas.hopper.mosaic.layouts import ROWS

_MAX_STAGES: Final = 4
_MAX_COLUMNS_TOGETHER: Final = 256
"""Maximum columns of keys and values together whose sums fit into one kernel's registers: 64 x 256 take 128 of a
thread's 240."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """Sizes of a call.

    Attributes:
        tiles: tiles of 128 query rows of one request each, including padding.
        pages: pages of keys that get gradients, including padding.
        rows: query rows per request including padding, if all requests have the same number; else None.
        heads: query heads.
        kv_heads: heads of keys and values.
        blocks: pages per request in the page table.
        width: columns of queries and keys.
        value_width: columns of values.
        dtype: the operands' dtype, of 2 bytes.
    """

    tiles: int
    pages: int
    rows: int | None
    heads: int
    kv_heads: int
    blocks: int
    width: int
    value_width: int
    dtype: Any

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    @property
    def widths(self) -> dict[str, int]:
        """Columns of keys ("k") and of values ("v")."""
        return {"k": self.width, "v": self.value_width}

    @property
    def most_stages(self) -> int:
        """Maximum number of stages that fit into shared memory next to 128 rows of two operands."""
        row = (self.width + self.value_width) * self.dtype.itemsize
        free = SHARED_MEMORY - SHARED_MEMORY_RESERVED - TILE * row
        return max(1, min(_MAX_STAGES, free // (ROWS * (row + 2 * np.dtype(ACCUMULATOR).itemsize))))


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Order of work in time; no bit depends on it.

    Attributes:
        stages: slots for streamed rows, 64 rows of two operands each.
        together: whether one kernel adds `dk` and `dv`; else each has a kernel, for lack of registers.
    """

    stages: int = _MAX_STAGES
    together: bool = True

    def __post_init__(self) -> None:
        if self.stages < 1:
            raise ValueError(f"Schedule: stages is {self.stages}; accepted: at least 1")

    def check(self, problem: Problem) -> None:
        """Raises ValueError if the stages do not fit into shared memory."""
        check_stages(self.stages, problem.most_stages, problem.width, problem.value_width)


def default_schedule(problem: Problem) -> Schedule:
    """Returns the default schedule."""
    return Schedule(problem.most_stages, together=problem.width + problem.value_width <= _MAX_COLUMNS_TOGETHER)
