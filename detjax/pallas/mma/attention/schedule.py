"""Sizes and schedules of attention on `mma.sync`, and the tiles of 64 rows that calls are divided into."""

import dataclasses
from typing import Any, Final, NamedTuple

import jax.numpy as jnp
from jax import Array

from detjax.contract import KV_BLOCK, QUERY_UNIT
from detjax.operands.numerics import ceil_div, round_up
from detjax.operands.options import KVQuantization
from detjax.pallas import nvidia
from detjax.pallas.hopper.attention.pieces import most_pieces, pieces
from detjax.pallas.hopper.device import multiprocessors
from detjax.pallas.hopper.mosaic.layouts import ROWS
from detjax.pallas.mma.attention.rows import ROW_BYTES, SLOT_WIDTH

MAX_PARTIAL_BYTES: Final = 256 * 1024 * 1024
"""Bytes that the partial results of split sequences may take."""
_CTAS_PER_MULTIPROCESSOR: Final = 2
"""CTAs of a multiprocessor for which sequences are split, so that one loads while another multiplies."""
_MAX_STAGES: Final = 4
_MAX_ROUNDS: Final = 4
"""Most CTAs that follow one another where sequences are split."""
_COST_OF_PARTIALS: Final = 0.1
"""The time to write and merge a block's partial results, in times to load the block."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """Sizes of a call.

    A *row* is a query of one head. The rows of a tile are either tokens of one query head, or tokens by the query heads
    that share a key head: row `t * group + g` is head `g` of token `t`.

    Attributes:
        tiles: tiles of at most 64 rows of one request each.
        tile_rows: rows of a tile in the arrays of partial results, a multiple of 8.
        heads: heads of the rows' array: query heads, or key heads if rows hold the heads of a group.
        heads_per_key_head: heads of the rows' array that share a key head.
        group: query heads in the rows of one token.
        blocks: columns of the page table.
        width: columns of queries and keys.
        value_width: columns of values.
        dtype: dtype of queries and of numbers in pages, of 2 bytes.
        quantization: kind of the pages, or None if they hold numbers.
    """

    tiles: int
    tile_rows: int
    heads: int
    heads_per_key_head: int
    group: int
    blocks: int
    width: int
    value_width: int
    dtype: Any
    quantization: KVQuantization | None = None

    @property
    def items(self) -> int:
        """Tiles of all heads."""
        return self.tiles * self.heads

    @property
    def key_parts(self) -> list[tuple[int, int]]:
        """The parts of keys, which are loaded at once: first column and number of columns."""
        return _parts(self.width)

    @property
    def value_parts(self) -> list[tuple[int, int]]:
        """The parts of values: first column and number of columns."""
        return _parts(self.value_width)

    @property
    def value_pieces(self) -> list[tuple[int, int, int]]:
        """The columns of values that are multiplied at once: number of the part, first column of it, and number."""
        # Next to 256 running sums per row, registers hold the products of 32 columns.
        size = SLOT_WIDTH // 2 if self.is_wide else SLOT_WIDTH
        return [
            (part, first, min(size, columns - first))
            for part, (_, columns) in enumerate(self.value_parts)
            for first in range(0, columns, size)
        ]

    def first_column(self, piece: int) -> int:
        """Returns the first column of a piece of values."""
        part, first, _ = self.value_pieces[piece]
        return self.value_parts[part][0] + first

    @property
    def is_wide(self) -> bool:
        """True if running sums take most of the registers."""
        return self.value_width > 2 * SLOT_WIDTH

    @property
    def parts(self) -> int:
        """Parts of a page of keys and a page of values."""
        return len(self.key_parts) + len(self.value_parts)

    @property
    def partial_bytes(self) -> int:
        """Bytes of the partial results of all blocks."""
        return self.items * self.blocks * self.tile_rows * self.value_width * 4


def _parts(width: int) -> list[tuple[int, int]]:
    return [(first, min(SLOT_WIDTH, width - first)) for first in range(0, width, SLOT_WIDTH)]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Distribution of the work; no bit depends on it.

    Attributes:
        stages: slots for parts of pages: all but one are loaded ahead.
        splits: CTAs that share the blocks of one tile and head. Blocks that a CTA cannot merge in order, because an
            earlier CTA has the blocks before them, are stored one by one and merged afterwards.
    """

    stages: int = _MAX_STAGES
    splits: int = 1

    def __post_init__(self) -> None:
        if self.stages < 2 or self.splits < 1:
            raise ValueError(
                f"Schedule: stages is {self.stages} and splits {self.splits}; accepted: at least 2 and at least 1"
            )


def default_schedule(problem: Problem, *, may_split: bool) -> Schedule:
    """Returns the default schedule; `may_split` says whether sequences may be split."""
    free = nvidia.shared_memory() - len(problem.key_parts) * ROWS * ROW_BYTES
    stages = max(2, min(_MAX_STAGES, free // (KV_BLOCK * ROW_BYTES)))
    resident = _CTAS_PER_MULTIPROCESSOR * multiprocessors()
    if not may_split or problem.items >= resident or problem.partial_bytes > MAX_PARTIAL_BYTES:
        return Schedule(stages)

    def cost(splits: int) -> float:
        """Blocks that pass one after the other: a CTA takes whole blocks, and waits until there is room for it."""
        rounds, share = ceil_div(problem.items * splits, resident), ceil_div(problem.blocks, splits)
        return rounds * share * (1 + _COST_OF_PARTIALS * (splits - 1) / splits)

    most = min(problem.blocks, _MAX_ROUNDS * ceil_div(resident, problem.items))
    return Schedule(stages, min(range(1, most + 1), key=cost))


class Tiles(NamedTuple):
    """Positions of the tiles, int32 `[tiles]`.

    Attributes:
        request: the tile's request.
        row: its first row in the rows' array, a multiple of 8.
        token: its first token in the request's queries.
        rows: number of its rows that exist; 0 in padding tiles.
    """

    request: Array
    row: Array
    token: Array
    rows: Array


def rectangular_tiles(batch: int, tokens: int, padded: int) -> Tiles:
    """Returns the tiles of requests with `tokens` rows each, which begin at multiples of `padded` rows."""
    count = ceil_div(tokens, ROWS)
    # Longest first: the last tiles of requests see the most keys.
    first = jnp.repeat(jnp.arange(count - 1, -1, -1, dtype=jnp.int32) * ROWS, batch)
    request = jnp.tile(jnp.arange(batch, dtype=jnp.int32), count)
    return Tiles(request, request * padded + first, first, jnp.minimum(ROWS, tokens - first))


def ragged_tiles(rows: int, first_row: Array, count: Array) -> Tiles:
    """Returns the tiles of requests that have `count` rows each from `first_row` on.

    There are as many as `rows` packed rows can need; padding tiles have no rows.
    """
    needed = -(-count // ROWS)
    request, number, is_needed = pieces(needed, most_pieces(rows, count.shape[0], ROWS))
    first = jnp.where(is_needed, (needed[request] - 1 - number) * ROWS, 0)
    rows_of_tile = jnp.where(is_needed, jnp.minimum(ROWS, count[request] - first), 0)
    return Tiles(*(x.astype(jnp.int32) for x in (request, first_row[request] + first, first, rows_of_tile)))


@dataclasses.dataclass(frozen=True)
class GroupedRows:
    """The rows of a call with few tokens: the heads of a group share their keys, so they are rows of one tile.

    Attributes:
        batch: requests.
        tokens: tokens of a request.
        group: query heads per key head.
    """

    batch: int
    tokens: int
    group: int

    @property
    def tile_tokens(self) -> int:
        """Tokens of a tile."""
        return min(self.tokens, ROWS // self.group)

    @property
    def tiles(self) -> int:
        """Tiles of a request."""
        return ceil_div(self.tokens, self.tile_tokens)

    @property
    def tile_rows(self) -> int:
        """Rows of a tile in the rows' array."""
        return round_up(self.tile_tokens * self.group, QUERY_UNIT)

    def positions(self) -> Tiles:
        """Returns the tiles of all requests."""
        tile = jnp.arange(self.batch * self.tiles, dtype=jnp.int32)
        token = tile % self.tiles * self.tile_tokens
        rows = jnp.minimum(self.tile_tokens, self.tokens - token) * self.group
        return Tiles(tile // self.tiles, tile * self.tile_rows, token, rows)

    def packed(self, q: Array) -> Array:
        """Packs queries `[B, T, H, K]` into rows `[N, h, K]`, tile by tile."""
        padded = self.tiles * self.tile_tokens - self.tokens
        heads, width = q.shape[2] // self.group, q.shape[3]
        q = jnp.pad(q, ((0, 0), (0, padded), (0, 0), (0, 0)))
        q = q.reshape(self.batch * self.tiles, self.tile_tokens, heads, self.group, width).swapaxes(2, 3)
        q = q.reshape(self.batch * self.tiles, -1, heads, width)
        q = jnp.pad(q, ((0, 0), (0, self.tile_rows - q.shape[1]), (0, 0), (0, 0)))
        return q.reshape(-1, heads, width)

    def unpacked(self, o: Array) -> Array:
        """Inverts `packed` for results `[N, h, V]`."""
        heads, width = o.shape[1:]
        o = o.reshape(self.batch * self.tiles, self.tile_rows, heads, width)[:, : self.tile_tokens * self.group]
        o = o.reshape(self.batch, self.tiles * self.tile_tokens, self.group, heads, width).swapaxes(2, 3)
        return o.reshape(self.batch, -1, heads * self.group, width)[:, : self.tokens]
