"""The problem of a decode on Hopper, and its schedules."""

import dataclasses
from typing import Any, Final

from jax import Array

from detjax.contract import KV_BLOCK
from detjax.operands.kv_pages import KVPages
from detjax.operands.numerics import ceil_div, round_up
from detjax.operands.options import KVQuantization
from detjax.pallas.hopper import device
from detjax.pallas.hopper.attention.decode_merge import Splits
from detjax.pallas.hopper.attention.dequantize import page_bytes
from detjax.pallas.hopper.device import SHARED_MEMORY, SHARED_MEMORY_RESERVED
from detjax.pallas.hopper.mosaic.layouts import ROWS, UNIT

_BYTES_IN_FLIGHT: Final = 128 * 1024
"""Bytes of pages in flight: enough to keep memory busy. What arrives last is all there at about the same time, and the
more that is, the longer it takes until it is multiplied."""
_MAX_PARTIALS: Final = 1 << 28
"""Bytes of partial results above which sequences are not split."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """Sizes of a call.

    Attributes:
        batch: requests.
        tokens: query tokens of each request.
        heads: query heads.
        kv_heads: heads of keys and values.
        width: columns of queries and keys.
        value_width: columns of values.
        most_blocks: the most blocks of keys that a request may have.
        dtype: dtype of the queries and of the output, of 2 bytes.
        quantization: kind of quantized pages, or None.
    """

    batch: int
    tokens: int
    heads: int
    kv_heads: int
    width: int
    value_width: int
    most_blocks: int
    dtype: Any
    quantization: KVQuantization | None = None

    @classmethod
    def from_operands(cls, q: Array, kv: KVPages, most_blocks: int) -> "Problem":
        """The problem of queries `[B, T, H, K]`."""
        batch, tokens, heads, width = q.shape
        kind = None if kv.quantized is None else kv.quantized[0].kind
        return cls(batch, tokens, heads, kv.kv_heads, width, kv.value_width, most_blocks, q.dtype, kind)

    @property
    def group(self) -> int:
        """Query heads that share a head of keys."""
        return self.heads // self.kv_heads

    @property
    def most_columns(self) -> int:
        """The most columns of a tile whose sums fit into registers."""
        return 64 if self.value_width <= 128 else 32

    @property
    def tile_tokens(self) -> int:
        """Tokens of a tile."""
        return min(self.tokens, self.most_columns // self.group)

    @property
    def tiles(self) -> int:
        """Tiles of a request."""
        return ceil_div(self.tokens, self.tile_tokens)

    @property
    def rows(self) -> int:
        """Queries of a tile; query `t * group + g` is head `g` of the tile's token `t`."""
        return self.tile_tokens * self.group

    @property
    def columns(self) -> int:
        """Columns of a tile: its queries, and zeros up to what the matrix unit multiplies."""
        return round_up(self.rows, UNIT)

    @property
    def sequences(self) -> int:
        """Sequences of a request."""
        return self.kv_heads * self.tiles

    @property
    def cut_unit(self) -> int:
        """Blocks of a sequence that must not be cut apart: one, as blocks are merged one by one."""
        return 1

    @property
    def value_chunks(self) -> list[int]:
        """First columns of the chunks of 64 in which values are multiplied. The last chunk may overlap the one before:
        both then have the same bits."""
        return [*range(0, self.value_width - ROWS, ROWS), self.value_width - ROWS]

    @property
    def chunks_at_once(self) -> list[list[int]]:
        """The chunks of values in groups whose products are in registers at the same time, beside all sums."""
        size = max(1, 64 // self.columns)
        chunks = list(range(len(self.value_chunks)))
        return [chunks[first : first + size] for first in range(0, len(chunks), size)]

    @property
    def ring_widths(self) -> list[int]:
        """Columns of the rings of keys and values: one ring for both if they are equally wide, or one for each."""
        return list(dict.fromkeys((self.width, self.value_width)))

    @property
    def slots(self) -> int:
        """Pages of keys or values that the matrix unit can read, at once or while more are in flight."""
        return self._slots_and_code_slots[0]

    @property
    def code_slots(self) -> int:
        """Pages of codes in flight."""
        return self._slots_and_code_slots[1]

    @property
    def _slots_and_code_slots(self) -> tuple[int, int]:
        columns = self.columns
        exchanged = columns * (self.width + KV_BLOCK) * self.dtype.itemsize + columns * (4 + 32) * 4
        free = SHARED_MEMORY - SHARED_MEMORY_RESERVED - exchanged
        page = KV_BLOCK * sum(self.ring_widths) * self.dtype.itemsize
        if self.quantization is None:
            return min(6, free // page, max(3, _BYTES_IN_FLIGHT // page)), 0
        page_of_codes = sum(page_bytes(self.quantization, width) for width in self.ring_widths)
        # Numbers that wait hide nothing of the memory's latency: more room is for codes.
        slots = min(3, free // (page + page_of_codes))
        return slots, min(8, (free - slots * page) // page_of_codes)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How blocks are dealt out; no bit depends on it.

    Attributes:
        ctas: into how many shares the line of blocks is cut.
        cut: whether a share may begin within a sequence.
        slack: a cut that lies within this part of a share from a sequence's beginning moves there: what is not split
            needs no merging.
    """

    ctas: int
    cut: bool = True
    slack: float = 0.15

    def __post_init__(self) -> None:
        if self.ctas < 1:
            raise ValueError(f"Schedule: ctas is {self.ctas}; accepted: at least 1")
        if not 0 <= self.slack < 0.5:
            raise ValueError(f"Schedule: slack is {self.slack}; accepted: from 0 to less than 0.5")

    def check(self, problem: Problem) -> None:
        """Accepts every problem: any number of CTAs can share any line of blocks."""

    def splits(self, problem: Problem) -> Splits:
        """Sizes of the partial results of CTAs that share sequences."""
        blocks = ceil_div(problem.batch * problem.sequences * problem.most_blocks, self.ctas)
        return Splits(
            ctas=self.ctas,
            blocks=min(problem.most_blocks, blocks),
            batch=problem.batch,
            sequences=problem.sequences,
            tokens=problem.tokens,
            tiles=problem.tiles,
            tile_tokens=problem.tile_tokens,
            group=problem.group,
            value_width=problem.value_width,
            dtype=problem.dtype,
        )


def default_schedule(problem: Problem) -> Schedule:
    """The schedule that serves a problem where none is given: sequences are split if the memory for it is small, or if
    there are too few sequences for all multiprocessors."""
    ctas = device.multiprocessors()
    is_small = Schedule(ctas).splits(problem).bytes <= _MAX_PARTIALS
    return Schedule(ctas, cut=is_small or problem.batch * problem.sequences < 2 * ctas)
