"""Problems and schedules of prefill on Hopper."""

import dataclasses
import math
from typing import Any, Final, NamedTuple

from jax import Array

from detjax.contract import KV_BLOCK
from detjax.pallas.hopper import device
from detjax.pallas.hopper.attention.warpgroups import FIRST_BARRIER, NAMED_BARRIERS, TILE, WARPGROUPS
from detjax.pallas.hopper.device import SHARED_MEMORY, SHARED_MEMORY_RESERVED

CLEARED: Final = FIRST_BARRIER
"""Named barrier at which both warpgroups meet after they have zeroed the tail of a page."""
FIRST_FREE: Final = FIRST_BARRIER + 1
"""First of the named barriers that release memory: one per slot of keys and values, then one per warpgroup."""
MAX_SLOTS: Final = NAMED_BARRIERS - FIRST_FREE - WARPGROUPS
"""Maximum number of slots: each has a named barrier."""
SHORT_REQUEST: Final = 2048
"""Query rows per request below which CTAs are persistent. Short tiles gain from having the next tile's queries loaded
already; the many tiles of longer requests balance without that."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """Sizes of a call.

    Attributes:
        batch: requests.
        rows: query rows of all requests.
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
        """True if pages are loaded in parts and values multiplied in pieces. Both widths are then multiples of 64."""
        return max(self.width, self.value_width) > 128

    @property
    def part_width(self) -> int:
        """Columns of a part of a wide page, which is loaded and released as a whole."""
        common = math.gcd(self.width, self.value_width)
        return 128 if common == 256 else common

    @property
    def results_in_queries(self) -> bool:
        """True if results are staged in the queries' shared memory, for lack of other room."""
        return self.is_wide and self.width == self.value_width

    @property
    def most_stages(self) -> int:
        """Maximum number of stages that fit into shared memory and have named barriers."""
        free = (SHARED_MEMORY - SHARED_MEMORY_RESERVED) // self.dtype.itemsize
        free -= TILE * (self.width + (0 if self.results_in_queries else self.value_width))
        if self.is_wide:
            return min(MAX_SLOTS, free // (KV_BLOCK * self.part_width))
        return min(MAX_SLOTS // 2, free // (KV_BLOCK * (self.width + self.value_width)))


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Distribution of tiles over the chip; no bit depends on it.

    Attributes:
        stages: slots for pages of keys, and for pages of values; for wide rows, slots for parts of either.
        persistent: whether each multiprocessor has one CTA that takes tile after tile, longest first; else a CTA has
            one tile.
        product_turns: whether a turn at the matrix unit is one product: a warpgroup merges while the other multiplies,
            but has less time to exponentiate. Otherwise a turn is a block's values and the next block's scores.
    """

    stages: int = 2
    persistent: bool = True
    product_turns: bool = False

    def __post_init__(self) -> None:
        if self.stages < 1:
            raise ValueError(f"Schedule: stages is {self.stages}; accepted: at least 1")

    def check(self, problem: Problem) -> None:
        """Raises ValueError if the stages do not fit into shared memory or lack named barriers."""
        check_stages(self.stages, problem.most_stages, problem.width, problem.value_width)

    def ctas(self, problem: Problem) -> int:
        """Returns the number of CTAs of a call."""
        items = problem.tiles * problem.heads
        return min(items, device.multiprocessors()) if self.persistent else items


def check_stages(stages: int, most: int, width: int, value_width: int) -> None:
    """Raises ValueError if a schedule has more stages than `most`, the maximum for rows of these widths."""
    if stages > most:
        raise ValueError(
            f"Schedule: stages is {stages} for rows of {width} and {value_width} columns; accepted: at most {most}"
        )


def default_schedule(problem: Problem) -> Schedule:
    """Returns the default schedule."""
    persistent = problem.rows // problem.batch < SHORT_REQUEST
    if not problem.is_wide:
        # With 128 columns, shared memory has no room for a third stage next to queries and results.
        return Schedule(2, persistent)
    # Turns of one product are 1% faster on an H200 at 256 columns; a persistent CTA has no registers for them.
    return Schedule(problem.most_stages, persistent, product_turns=problem.value_width == 256 and not persistent)


class Tiles(NamedTuple):
    """Positions of the tiles of 128 rows, int32 `[tiles]`.

    Attributes:
        request: the tile's request.
        row: its first row in the packed queries.
        offset: its first row in the request.
        rows: number of its rows that the request has.
    """

    request: Array
    row: Array
    offset: Array
    rows: Array
