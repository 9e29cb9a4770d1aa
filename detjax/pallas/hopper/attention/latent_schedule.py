"""The problem of attention over latents on Hopper, and its schedule."""

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
"""Columns of a page that are loaded, and freed, at once."""
_BUSY: Final = 0.9
"""The share of the chip's CTAs that whole sequences keep busy, from which on splitting them is slower."""
_MAX_PARTIALS: Final = 1 << 30
"""Bytes of partial results above which sequences are not split, unless they are very few."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """Sizes of a call, in tiles of queries.

    A tile is some consecutive tokens of a request. A *sequence* is a tile with as many heads as fit into 64 rows; it is
    what a CTA computes at a time.

    Attributes:
        batch: tiles, of all requests.
        tokens: query tokens of a tile.
        heads: query heads, as many as `filled_heads` returns.
        width: columns of queries and keys.
        value_width: columns of values, the first ones of the keys.
        most_blocks: the most blocks of keys that a request may have.
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
        if self.heads != filled_heads(self.heads):
            raise ValueError(f"heads is {self.heads}; accepted: {filled_heads(self.heads)}, see filled_heads")

    @property
    def group(self) -> int:
        """Query heads of a sequence."""
        return heads_of_a_sequence(self.heads)

    @property
    def sequences(self) -> int:
        """Sequences of a tile."""
        return self.heads // self.group

    @property
    def rows(self) -> int:
        """Rows of a sequence; row `t * group + g` is head `g` of the tile's token `t`. Rows after them are padding."""
        return self.tokens * self.group

    @property
    def parts(self) -> int:
        """Parts of a page: those of the values, then one for what is in keys alone."""
        return self.width // PART

    @property
    def value_parts(self) -> int:
        """Parts of a page that are values as well."""
        return self.value_width // PART

    @property
    def cut_unit(self) -> int:
        """Blocks of a sequence that must not be cut apart: those of a span, or all where there are no spans."""
        return SPAN_BLOCKS if self.value_width > SPAN_WIDTH else self.most_blocks

    @property
    def most_spans(self) -> int:
        """The most spans of a sequence."""
        return ceil_div(self.most_blocks, self.cut_unit)


def filled_heads(heads: int) -> int:
    """The heads of queries in memory: those that there are, and others that fill sequences up to whole swizzled groups.

    The copy engine finds rows in such groups: a sequence that began within one would be read wrongly, on the device
    alone.
    """
    sequences = ceil_div(heads, ROWS)
    return sequences * round_up(ceil_div(heads, sequences), SWIZZLED_ROWS)


def heads_of_a_sequence(heads: int) -> int:
    """The query heads, of `filled_heads`, that are rows of the same sequence: each sequence has the same number."""
    return heads // ceil_div(heads, ROWS)


def tokens_of_a_tile(tokens: int, heads: int) -> int:
    """The tokens that are rows of the same sequences: a power of two that divides `QUERY_UNIT`.

    Args:
        tokens: consecutive query tokens of a request.
        heads: query heads, as many as `filled_heads` returns.
    """
    most = min(QUERY_UNIT, max(1, ROWS // heads))
    return next(size for size in (1, 2, 4, QUERY_UNIT) if 2 * size > most or size >= tokens)


def partial_results(problem: Problem, schedule: Schedule) -> int:
    """How many results of spans, or of several merged ones, have a place in memory.

    Where sequences are split, each of their spans has one, of which the first is that of all spans that were merged in
    the CTA in which the sequence begins. Else each CTA has one, for what it has merged of its sequence.
    """
    return problem.batch * problem.sequences * problem.most_spans if schedule.cut else schedule.ctas


def default_schedule(problem: Problem) -> Schedule:
    """The schedule that serves a problem where none is given: sequences are split if they are too few for the chip.

    They are not where whole ones keep nearly all of the chip busy, because what is split has to be merged.
    """
    ctas = device.multiprocessors()
    split, sequences = Schedule(ctas), problem.batch * problem.sequences
    is_small = partial_results(problem, split) * ROWS * problem.value_width * 4 <= _MAX_PARTIALS
    is_busy = sequences >= _BUSY * ctas * ceil_div(sequences, ctas)
    cut = problem.most_spans > 1 and not is_busy and (2 * sequences < ctas or (sequences < 2 * ctas and is_small))
    return Schedule(ctas, cut=cut)
