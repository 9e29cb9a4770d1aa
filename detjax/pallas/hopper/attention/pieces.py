"""Packed requests on Hopper, cut into pieces: tiles of 128 rows, blocks of 64, pages of keys."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from detjax.contract import QUERY_UNIT
from detjax.operands.numerics import ceil_div
from detjax.pallas.hopper.attention.prefill_schedule import Tiles
from detjax.pallas.hopper.attention.warpgroups import TILE


class Pieces(NamedTuple):
    """The pieces of all requests, request by request, `[pieces]`.

    Attributes:
        request: the piece's request; any for a piece that is not needed.
        number: its number in the request.
        is_needed: whether the request has the piece. Those that no request has come last.
    """

    request: Array
    number: Array
    is_needed: Array


def pieces(needed: Array, most: int) -> Pieces:
    """The pieces of requests that need so many each, int32 `[B]`; all together at most `most`."""
    needed = needed.astype(jnp.int32)
    ends = jnp.cumsum(needed)
    piece = jnp.arange(most, dtype=jnp.int32)
    request = jnp.sum(ends[None] <= piece[:, None], axis=1, dtype=jnp.int32)
    request = jnp.minimum(request, needed.shape[0] - 1)
    return Pieces(request, piece - (ends - needed)[request], piece < ends[-1])


def most_pieces(rows: int, requests: int, size: int) -> int:
    """The most pieces of `size` rows that packed requests can need: those of requests that are as short as can be, but
    for one."""
    units = ceil_div(rows, QUERY_UNIT)
    requests = min(requests, units)
    return requests + (units - requests) * QUERY_UNIT // size


def ragged_tiles(rows: int, first_row: Array, count: Array) -> Tiles:
    """The tiles of requests that have `count` rows each from `first_row` on.

    There are as many as `rows` packed rows can need; tiles that are not needed have no row.
    """
    needed = -(-count // TILE)
    request, number, is_needed = pieces(needed, most_pieces(rows, count.shape[0], TILE))
    # The last tile of a request sees most keys, and comes first.
    offset = jnp.where(is_needed, (needed[request] - 1 - number) * TILE, 0)
    rows_of_tile = jnp.where(is_needed, jnp.minimum(TILE, count[request] - offset), 0)
    return Tiles(*(x.astype(jnp.int32) for x in (request, first_row[request] + offset, offset, rows_of_tile)))
