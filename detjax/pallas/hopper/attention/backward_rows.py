"""Where the query rows of requests lie for attention's gradients on Hopper, and the work that follows from it.

Gradients of keys add blocks of `ROWS` query rows, counted from the request's first one. So each request's rows begin at
a multiple of `ROWS` here, and zeros fill them up to one: packed requests have the blocks, and so the bits, of
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
        page: its number in the pool.
        row: the first query row of the request.
        rows: how many query rows the request has, a multiple of `ROWS`; 0 where there is no page.
    """

    request: Array
    block: Array
    page: Array
    row: Array
    rows: Array


class RequestRows(abc.ABC):
    """The rows of all requests, one request after another.

    Attributes:
        most_rows: no request has more rows, those that fill up included.
        rows_of_each: how many rows each request has, if that is known to be the same number; else None.
        first_row: each request's first row, int32 `[B]`, a multiple of `ROWS`.
        rows: how many rows each request has, int32 `[B]`, those included that fill up to a multiple of `ROWS`.
    """

    most_rows: int
    rows_of_each: int | None
    first_row: Array
    rows: Array

    @abc.abstractmethod
    def filled_up(self, x: Array, axis: int = 0, value: float = 0.0) -> Array:
        """The rows given, along an axis, with a value in those that fill up."""

    @abc.abstractmethod
    def given(self, x: Array) -> Array:
        """The rows given, along the first axis, of what was computed for all rows."""

    @abc.abstractmethod
    def tiles(self) -> Tiles:
        """The tiles of query rows, of 64 or 128 each, 0 where a tile is not needed."""

    @abc.abstractmethod
    def key_pages(self, page_table: Array, length: Array, pages: int) -> KeyPages:
        """The pages of keys.

        Args:
            page_table: the page of each request's block of tokens.
            length: tokens of each request.
            pages: pages of the pool.
        """


class RectangularRows(RequestRows):
    """The rows of requests that have the same number each."""

    def __init__(self, batch: int, rows_of_each: int) -> None:
        self._batch, self._given = batch, rows_of_each
        self.most_rows = self.rows_of_each = round_up(rows_of_each, ROWS)
        self.first_row = jnp.arange(batch, dtype=jnp.int32) * self.most_rows
        self.rows = jnp.full((batch,), self.most_rows, jnp.int32)

    def filled_up(self, x: Array, axis: int = 0, value: float = 0.0) -> Array:
        """See `RequestRows`."""
        if self._given == self.most_rows:
            return x
        shape, added = x.shape, self.most_rows - self._given
        x = x.reshape(*shape[:axis], self._batch, self._given, *shape[axis + 1 :])
        x = jnp.pad(x, [(0, added if i == axis + 1 else 0) for i in range(x.ndim)], constant_values=value)
        return x.reshape(*shape[:axis], -1, *shape[axis + 1 :])

    def given(self, x: Array) -> Array:
        """See `RequestRows`."""
        rest = x.shape[1:]
        return x.reshape(self._batch, self.most_rows, *rest)[:, : self._given].reshape(-1, *rest)

    def tiles(self) -> Tiles:
        """See `RequestRows`. The last tiles of the requests see most keys, and come first."""
        tiles = ceil_div(self.most_rows, TILE)
        tile = jnp.arange(self._batch * tiles, dtype=jnp.int32)
        request, offset = tile % self._batch, (tiles - 1 - tile // self._batch) * TILE
        return Tiles(request, self.first_row[request] + offset, offset, jnp.minimum(TILE, self.most_rows - offset))

    def key_pages(self, page_table: Array, length: Array, pages: int) -> KeyPages:
        """See `RequestRows`. The first blocks are seen by most rows, and come first."""
        del pages
        index = jnp.arange(page_table.size, dtype=jnp.int32)
        request, block = index % self._batch, index // self._batch
        rows = jnp.where(block * KV_BLOCK < length[request], self.rows[request], 0)
        return KeyPages(request, block, page_table[request, block], self.first_row[request], rows)


class SpreadRows(RequestRows):
    """The rows of packed requests, moved apart: packed ones begin at multiples of `contract.QUERY_UNIT`."""

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

    def filled_up(self, x: Array, axis: int = 0, value: float = 0.0) -> Array:
        """See `RequestRows`."""
        is_given = self._is_given.reshape(*[1] * axis, -1, *[1] * (x.ndim - 1 - axis))
        return jnp.where(is_given, jnp.take(x, self._source, axis, mode="clip"), jnp.asarray(value, x.dtype))

    def given(self, x: Array) -> Array:
        """See `RequestRows`; zeros in packed rows that belong to no request."""
        request, offset = request_of_rows(self._packed, self._packed_first)
        is_given = (offset >= 0) & (offset < self._count[request])
        source = jnp.where(is_given, self.first_row[request] + offset, 0)
        is_given = is_given.reshape(-1, *[1] * (x.ndim - 1))
        return jnp.where(is_given, jnp.take(x, source, 0, mode="clip"), jnp.zeros((), x.dtype))

    def tiles(self) -> Tiles:
        """See `RequestRows`."""
        # Whole blocks of rows need no more tiles than the packed rows in them.
        return ragged_tiles(self._packed, self.first_row, self.rows)

    def key_pages(self, page_table: Array, length: Array, pages: int) -> KeyPages:
        """See `RequestRows`. There are no more than the pool has, as a page belongs to one request."""
        needed = jnp.where(self.rows > 0, jnp.minimum(-(-length // KV_BLOCK), page_table.shape[1]), 0)
        request, block, is_needed = pieces(needed, min(pages, page_table.size))
        block, rows = jnp.where(is_needed, block, 0), jnp.where(is_needed, self.rows[request], 0)
        return KeyPages(request, block, page_table[request, block], self.first_row[request], rows)


def rows_of_requests(queries: Queries, rows: int) -> RequestRows:
    """The layout of so many rows: those of packed queries, or of rectangular ones, one request after another."""
    if queries.first_row is None:
        batch = queries.page_table.shape[0]
        return RectangularRows(batch, rows // batch)
    assert queries.count is not None
    return SpreadRows(jnp.asarray(queries.first_row), jnp.asarray(queries.count), rows)
