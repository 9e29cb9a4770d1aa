"""Problems and schedules of decode on Hopper."""

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
"""Bytes of pages in flight: enough to saturate memory. More would lengthen a CTA's tail, because its last pages arrive
at about the same time and are then multiplied one by one."""
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
        most_blocks: maximum number of key blocks per request.
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
        """Returns the problem of queries `[B, T, H, K]`."""
        batch, tokens, heads, width = q.shape
        kind = None if kv.quantized is None else kv.quantized[0].kind
        return cls(batch, tokens, heads, kv.kv_heads, width, kv.value_width, most_blocks, q.dtype, kind)

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    @property
    def most_columns(self) -> int:
        """Maximum columns of a tile, so that its sums fit into registers."""
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
        """Columns of a tile: its queries, padded to a multiple of the matrix unit's columns."""
        return round_up(self.rows, UNIT)

    @property
    def sequences(self) -> int:
        """Sequences of a request."""
        return self.kv_heads * self.tiles

    @property
    def cut_unit(self) -> int:
        """Blocks between possible cuts of a sequence: one, since blocks are merged one by one."""
        return 1

    @property
    def value_chunks(self) -> list[int]:
        """First columns of the chunks of 64 in which values are multiplied. The last chunk may overlap the previous
        one: columns in both have the same bits."""
        return [*range(0, self.value_width - ROWS, ROWS), self.value_width - ROWS]

    @property
    def chunks_at_once(self) -> list[list[int]]:
        """Chunks of values, grouped by how many products fit into registers at a time, next to all sums."""
        # A product of 64 x n takes n / 2 registers of a thread: a group takes 32.
        size = max(1, 64 // self.columns)
        chunks = list(range(len(self.value_chunks)))
        return [chunks[first : first + size] for first in range(0, len(chunks), size)]

    @property
    def ring_widths(self) -> list[int]:
        """Columns of the rings of keys and values: one ring for both if they are equally wide, else one each."""
        return list(dict.fromkeys((self.width, self.value_width)))

    @property
    def slots(self) -> int:
        """Pages of keys or values in the matrix unit's format that shared memory holds, including those in flight."""
        return self._slots_and_code_slots[0]

    @property
    def code_slots(self) -> int:
        """Pages of codes in flight."""
        return self._slots_and_code_slots[1]

    @property
    def _slots_and_code_slots(self) -> tuple[int, int]:
        columns = self.columns
        # Queries and p, then the arrays of `mosaic.columns.exchanges`.
        exchanged = columns * (self.width + KV_BLOCK) * self.dtype.itemsize + columns * (4 + 32) * 4
        free = SHARED_MEMORY - SHARED_MEMORY_RESERVED - exchanged
        page = KV_BLOCK * sum(self.ring_widths) * self.dtype.itemsize
        if self.quantization is None:
            return min(6, free // page, max(3, _BYTES_IN_FLIGHT // page)), 0
        page_of_codes = sum(page_bytes(self.quantization, width) for width in self.ring_widths)
        # Only codes in flight hide memory latency, so dequantized pages get few slots and codes the rest.
        slots = min(3, free // (page + page_of_codes))
        return slots, min(8, (free - slots * page) // page_of_codes)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Distribution of blocks over CTAs; no bit depends on it.

    Attributes:
        ctas: number of shares that the line of blocks is cut into.
        cut: whether a share may begin within a sequence.
        slack: distance from the beginning of a sequence, as a fraction of a share, within which a cut moves there:
            a sequence that is not split needs no merging.
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
        """Accepts every problem: any number of CTAs can share a line of blocks."""

    def splits(self, problem: Problem) -> Splits:
        """Returns the sizes of the partial results of split sequences."""
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
    """Returns the default schedule: sequences are split if the partial results are small, or if sequences are too few
    for all multiprocessors."""
    ctas = device.multiprocessors()
    is_small = Schedule(ctas).splits(problem).bytes <= _MAX_PARTIALS
    return Schedule(ctas, cut=is_small or problem.batch * problem.sequences < 2 * ctas)
