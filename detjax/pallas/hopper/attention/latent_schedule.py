"""Problems and schedules of latent attention on Hopper."""

import dataclasses
from typing import Any, Final

from detjax.contract import QUERY_UNIT, SPAN_BLOCKS, SPAN_WIDTH
from detjax.operands.numerics import ceil_div, round_up
from detjax.pallas.hopper import device
from detjax.pallas.hopper.attention.decode_schedule import Schedule
from detjax.pallas.hopper.mosaic.layouts import ROWS

SWIZZLED_ROWS: Final = 8
"""Rows of a swizzled group, which a copy into shared memory takes as a whole."""
PART: Final = 64
"""Columns of a part of a page, which is loaded and released as a whole."""
_BUSY: Final = 0.9
"""Fraction of the chip's CTAs that whole sequences keep busy from which on splitting them is slower."""
_MAX_PARTIALS: Final = 1 << 30
"""Bytes of partial results above which sequences are not split, unless they are very few."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """Sizes of a call, in tiles of queries.

    A tile is some consecutive tokens of a request. A *sequence* is a tile with as many heads as fit into 64 rows, which
    a CTA computes at a time.

    Attributes:
        batch: tiles of all requests.
        tokens: query tokens of a tile.
        heads: query heads including padding, see `padded_heads`.
        width: columns of queries and keys.
        value_width: columns of values, the first ones of the keys.
        most_blocks: maximum number of key blocks per request.
        dtype: dtype of queries, keys and output, of 2 bytes.
    """

    batch: int
    tokens: int
    heads: int
    width: int
    value_width: int
    most_blocks: int
    dtype: Any

    def __post_init__(self) -> None:
        if self.heads != padded_heads(self.heads):
            raise ValueError(f"heads is {self.heads}; accepted: {padded_heads(self.heads)}, see padded_heads")

    @property
    def group(self) -> int:
        """Query heads of a sequence."""
        return self.heads // ceil_div(self.heads, ROWS)

    @property
    def sequences(self) -> int:
        """Sequences of a tile."""
        return self.heads // self.group

    @property
    def rows(self) -> int:
        """Rows of a sequence before its padding; row `t * group + g` is head `g` of the tile's token `t`."""
        return self.tokens * self.group

    @property
    def parts(self) -> int:
        """Parts of a page: first those that are values as well, then one of keys only."""
        return self.width // PART

    @property
    def value_parts(self) -> int:
        """Parts of a page that are values as well."""
        return self.value_width // PART

    @property
    def cut_unit(self) -> int:
        """Blocks between possible cuts of a sequence: a span, or all blocks without spans."""
        return SPAN_BLOCKS if self.value_width > SPAN_WIDTH else self.most_blocks

    @property
    def most_spans(self) -> int:
        """Maximum number of spans per sequence."""
        return ceil_div(self.most_blocks, self.cut_unit)


def padded_heads(heads: int) -> int:
    """Returns the number of query heads in memory, padded so that every sequence is whole swizzled groups of rows.

    A copy into shared memory that begins within such a group reads wrong rows, on the device but not in the
    interpreter.
    """
    sequences = ceil_div(heads, ROWS)
    return sequences * round_up(ceil_div(heads, sequences), SWIZZLED_ROWS)


def tokens_of_a_tile(tokens: int, heads: int) -> int:
    """Returns the number of tokens per tile: a power of two that divides `QUERY_UNIT`.

    Args:
        tokens: consecutive query tokens of a request.
        heads: query heads including padding, see `padded_heads`.
    """
    most = min(QUERY_UNIT, max(1, ROWS // heads))
    return next(size for size in (1, 2, 4, QUERY_UNIT) if 2 * size > most or size >= tokens)


def partial_results(problem: Problem, schedule: Schedule) -> int:
    """Returns the number of places in memory for results of spans or of several merged spans.

    If sequences are split, each span has a place, and the first one of a sequence holds all spans that were merged in
    the CTA where the sequence begins. Otherwise each CTA has one, for the running sums of its current sequence.
    """
    return problem.batch * problem.sequences * problem.most_spans if schedule.cut else schedule.ctas


def default_schedule(problem: Problem) -> Schedule:
    """Returns the default schedule: sequences are split if they are too few to keep nearly all of the chip busy.

    Otherwise merging split sequences would cost more than it gains.
    """
    ctas = device.multiprocessors()
    split, sequences = Schedule(ctas), problem.batch * problem.sequences
    is_small = partial_results(problem, split) * ROWS * problem.value_width * 4 <= _MAX_PARTIALS
    is_busy = sequences >= _BUSY * ctas * ceil_div(sequences, ctas)
    cut = problem.most_spans > 1 and not is_busy and (2 * sequences < ctas or (sequences < 2 * ctas and is_small))
    return Schedule(ctas, cut=cut)
