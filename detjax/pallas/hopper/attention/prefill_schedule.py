"""The problem of a prefill on Hopper, and its schedules."""

import dataclasses
import math
from typing import Any, Final, NamedTuple

from jax import Array

from detjax.contract import KV_BLOCK
from detjax.pallas.hopper import device
from detjax.pallas.hopper.attention.warpgroups import (
    FIRST_BARRIER,
    NAMED_BARRIERS,
    TILE,
    WARPGROUPS,
)
from detjax.pallas.hopper.device import SHARED_MEMORY, SHARED_MEMORY_RESERVED

CLEARED: Final = FIRST_BARRIER
"""The named barrier at which both warpgroups meet when they have cleared the tail of a page."""
FIRST_FREE: Final = FIRST_BARRIER + 1
"""Named barriers from here on: one for each slot of keys and of values, then one for each warpgroup's queries."""
MAX_SLOTS: Final = NAMED_BARRIERS - FIRST_FREE - WARPGROUPS
"""Slots for which there are named barriers."""
SHORT_REQUEST: Final = 2048
"""Query rows. The tiles of longer requests even out by themselves; short ones gain from the next one's queries being
loaded already."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """Sizes of a call.

    Attributes:
        batch: requests.
        rows: packed query rows of all requests.
        tiles: tiles of 128 rows of one request each.
        heads: query heads.
        kv_heads: heads of keys and values.
        width: columns of queries and keys.
        value_width: columns of values.
        dtype: the operands' dtype, of 2 bytes.
    """

    batch: int
    rows: int
    tiles: int
    heads: int
    kv_heads: int
    width: int
    value_width: int
    dtype: Any

    @property
    def is_wide(self) -> bool:
        """Whether pages come in parts and values are multiplied in pieces. Both widths are then multiples of 64."""
        return max(self.width, self.value_width) > 128

    @property
    def part_width(self) -> int:
        """Columns of a wide page that are loaded, and freed, at once."""
        common = math.gcd(self.width, self.value_width)
        return 128 if common == 256 else common

    @property
    def results_in_queries(self) -> bool:
        """Whether results wait to be copied where their queries were, because there is no other room."""
        return self.is_wide and self.width == self.value_width

    @property
    def most_stages(self) -> int:
        """The most stages that fit into shared memory and for which there are named barriers."""
        free = (SHARED_MEMORY - SHARED_MEMORY_RESERVED) // self.dtype.itemsize
        free -= TILE * (self.width + (0 if self.results_in_queries else self.value_width))
        if self.is_wide:
            return min(MAX_SLOTS, free // (KV_BLOCK * self.part_width))
        return min(MAX_SLOTS // 2, free // (KV_BLOCK * (self.width + self.value_width)))


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How tiles are spread over the chip; no bit depends on it.

    Attributes:
        stages: pages of keys, and of values, in flight; of wide rows, parts of either.
        persistent: whether a CTA per multiprocessor takes tile after tile, the longest first; else a CTA has one tile.
        product_turns: whether a turn at the matrix unit is one product: a warpgroup merges while the other multiplies,
            but has less time to exponentiate. Else a turn is a block's values and the next block's scores.
    """

    stages: int = 2
    persistent: bool = True
    product_turns: bool = False

    def __post_init__(self) -> None:
        if self.stages < 1:
            raise ValueError(f"Schedule: stages is {self.stages}; accepted: at least 1")

    def check(self, problem: Problem) -> None:
        """Raises a ValueError if the problem's pages do not fit into so many stages."""
        if self.stages > problem.most_stages:
            raise ValueError(
                f"Schedule: stages is {self.stages} for rows of {problem.width} and {problem.value_width} columns; "
                f"accepted: at most {problem.most_stages}"
            )

    def ctas(self, problem: Problem) -> int:
        """How many CTAs a call has."""
        items = problem.tiles * problem.heads
        return min(items, device.multiprocessors()) if self.persistent else items


def default_schedule(problem: Problem) -> Schedule:
    """The schedule that serves a problem where none is given."""
    persistent = problem.rows // problem.batch < SHORT_REQUEST
    if not problem.is_wide:
        return Schedule(2, persistent)
    # A turn for each product is 1% faster on an H200 at 256 columns; a persistent CTA has no registers for it.
    return Schedule(problem.most_stages, persistent, product_turns=problem.value_width == 256 and not persistent)


class Tiles(NamedTuple):
    """Where each tile of 128 rows stands, int32 `[tiles]`.

    Attributes:
        request: the tile's request.
        row: its first row in the packed queries.
        offset: its first row in the request.
        rows: how many of its rows are the request's.
    """

    request: Array
    row: Array
    offset: Array
    rows: Array
