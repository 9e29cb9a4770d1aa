"""Layout of requests' query rows for attention gradients on Hopper, and the division of work that follows from it.

Gradients of keys add blocks of `ROWS` query rows, counted from the request's first row. So each request's rows begin at
a multiple of `ROWS` here and are padded with zeros to one, which gives packed requests the blocks, and so the bits, of
rectangular ones.
"""

import abc
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from detjax.contract import KV_BLOCK
from detjax.operands.kv_pages import Queries, request_of_rows
from detjax.operands.numerics import ceil_div, round_up
from detjax.pallas.hopper.attention.pieces import most_pieces, pieces, ragged_tiles
from detjax.pallas.hopper.attention.prefill_schedule import Tiles
from detjax.pallas.hopper.attention.warpgroups import TILE
from detjax.pallas.hopper.mosaic.layouts import ROWS


class KeyPages(NamedTuple):
    """The pages of keys whose gradients are computed, int32 `[pages]`.

    Attributes:
        request: the page's request.
        block: its block of the request's keys.
        page: its page id.
        row: the first query row of the request.
        rows: the number of the request's query rows, a multiple of `ROWS`; 0 in padding.
    """

    request: Array
    block: Array
    page: Array
    row: Array
    rows: Array


class RequestRows(abc.ABC):
    """The padded rows of all requests, request by request.

    Attributes:
        most_rows: maximum number of rows of a request.
        rows_of_each: number of rows of each request, if that is a constant; else None.
        first_row: each request's first row, int32 `[B]`, a multiple of `ROWS`.
        rows: each request's number of rows, int32 `[B]`, a multiple of `ROWS`.
    """

    most_rows: int
    rows_of_each: int | None
    first_row: Array
    rows: Array

    @abc.abstractmethod
    def padded(self, x: Array, axis: int = 0, value: float = 0.0) -> Array:
        """Pads the rows of the call along an axis with a value."""

    @abc.abstractmethod
    def unpadded(self, x: Array) -> Array:
        """Returns the rows of the call from padded ones, along the first axis."""

    @abc.abstractmethod
    def tiles(self) -> Tiles:
        """Returns the tiles of query rows, of 64 or 128 rows each; padding tiles have none."""

    @abc.abstractmethod
    def key_pages(self, page_table: Array, length: Array, pages: int) -> KeyPages:
        """Returns the pages of keys, given each request's length and the number of pages of the pool."""


class RectangularRows(RequestRows):
    """The rows of requests that have the same number each."""

    def __init__(self, batch: int, rows_of_each: int) -> None:
        self._batch, self._rows = batch, rows_of_each
        self.most_rows = self.rows_of_each = round_up(rows_of_each, ROWS)
        self.first_row = jnp.arange(batch, dtype=jnp.int32) * self.most_rows
        self.rows = jnp.full((batch,), self.most_rows, jnp.int32)

    def padded(self, x: Array, axis: int = 0, value: float = 0.0) -> Array:
        if self._rows == self.most_rows:
            return x
        shape, added = x.shape, self.most_rows - self._rows
        x = x.reshape(*shape[:axis], self._batch, self._rows, *shape[axis + 1 :])
        x = jnp.pad(x, [(0, added if i == axis + 1 else 0) for i in range(x.ndim)], constant_values=value)
        return x.reshape(*shape[:axis], -1, *shape[axis + 1 :])

    def unpadded(self, x: Array) -> Array:
        rest = x.shape[1:]
        return x.reshape(self._batch, self.most_rows, *rest)[:, : self._rows].reshape(-1, *rest)

    def tiles(self) -> Tiles:
        # Longest first: the last tiles of requests see the most keys.
        tiles = ceil_div(self.most_rows, TILE)
        tile = jnp.arange(self._batch * tiles, dtype=jnp.int32)
        request, offset = tile % self._batch, (tiles - 1 - tile // self._batch) * TILE
        return Tiles(request, self.first_row[request] + offset, offset, jnp.minimum(TILE, self.most_rows - offset))

    def key_pages(self, page_table: Array, length: Array, pages: int) -> KeyPages:
        # Longest first: the first blocks are seen by the most rows.
        del pages
        index = jnp.arange(page_table.size, dtype=jnp.int32)
        request, block = index % self._batch, index // self._batch
        rows = jnp.where(block * KV_BLOCK < length[request], self.rows[request], 0)
        return KeyPages(request, block, page_table[request, block], self.first_row[request], rows)


class SpreadRows(RequestRows):
    """The rows of packed requests, which begin at multiples of `contract.QUERY_UNIT`, moved to multiples of `ROWS`."""

    def __init__(self, first_row: Array, count: Array, rows: int) -> None:
        self._packed_first, self._count, self._packed = first_row, count, rows
        blocks = pieces(-(-count // ROWS), most_pieces(rows, count.shape[0], ROWS))
        self.most_rows, self.rows_of_each = round_up(rows, ROWS), None
        self.rows = (-(-count // ROWS) * ROWS).astype(jnp.int32)
        self.first_row = jnp.cumsum(self.rows) - self.rows
        offset = blocks.number[:, None] * ROWS + jnp.arange(ROWS, dtype=jnp.int32)[None]
        is_given = blocks.is_needed[:, None] & (offset < count[blocks.request][:, None])
        self._is_given = is_given.reshape(-1)
        self._source = jnp.where(is_given, first_row[blocks.request][:, None] + offset, 0).reshape(-1)

    def padded(self, x: Array, axis: int = 0, value: float = 0.0) -> Array:
        is_given = self._is_given.reshape(*[1] * axis, -1, *[1] * (x.ndim - 1 - axis))
        return jnp.where(is_given, jnp.take(x, self._source, axis, mode="clip"), jnp.asarray(value, x.dtype))

    def unpadded(self, x: Array) -> Array:
        # With zeros in the padding between packed requests.
        request, offset = request_of_rows(self._packed, self._packed_first)
        is_given = (offset >= 0) & (offset < self._count[request])
        source = jnp.where(is_given, self.first_row[request] + offset, 0)
        is_given = is_given.reshape(-1, *[1] * (x.ndim - 1))
        return jnp.where(is_given, jnp.take(x, source, 0, mode="clip"), jnp.zeros((), x.dtype))

    def tiles(self) -> Tiles:
        # Padding to whole blocks of rows adds no tiles.
        return ragged_tiles(self._packed, self.first_row, self.rows)

    def key_pages(self, page_table: Array, length: Array, pages: int) -> KeyPages:
        # At most as many as in the pool, since a page belongs to one request.
        needed = jnp.where(self.rows > 0, jnp.minimum(-(-length // KV_BLOCK), page_table.shape[1]), 0)
        request, block, is_needed = pieces(needed, min(pages, page_table.size))
        block, rows = jnp.where(is_needed, block, 0), jnp.where(is_needed, self.rows[request], 0)
        return KeyPages(request, block, page_table[request, block], self.first_row[request], rows)


def rows_of_requests(queries: Queries, rows: int) -> RequestRows:
    """Returns the layout of the `rows` rows of packed or rectangular queries."""
    if queries.first_row is None:
        batch = queries.page_table.shape[0]
        return RectangularRows(batch, rows // batch)
    assert queries.count is not None
    return SpreadRows(jnp.asarray(queries.first_row), jnp.asarray(queries.count), rows)
