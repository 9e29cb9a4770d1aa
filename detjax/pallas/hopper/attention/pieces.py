"""Division of packed requests into pieces on Hopper: tiles of 128 rows, blocks of 64, or pages of keys."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from detjax.contract import QUERY_UNIT
from detjax.operands.numerics import ceil_div
from detjax.pallas.hopper.attention.prefill_schedule import Tiles
from detjax.pallas.hopper.attention.warpgroups import TILE


class Pieces(NamedTuple):
    """The pieces of all requests, request by request, then padding, `[pieces]`.

    Attributes:
        request: the piece's request; undefined in padding.
        number: its number in the request.
        is_needed: whether it is a piece and not padding.
    """

    request: Array
    number: Array
    is_needed: Array


def pieces(needed: Array, most: int) -> Pieces:
    """Returns the pieces of requests, given the number that each needs, int32 `[B]`, padded to `most`."""
    needed = needed.astype(jnp.int32)
    ends = jnp.cumsum(needed)
    piece = jnp.arange(most, dtype=jnp.int32)
    request = jnp.sum(ends[None] <= piece[:, None], axis=1, dtype=jnp.int32)
    request = jnp.minimum(request, needed.shape[0] - 1)
    return Pieces(request, piece - (ends - needed)[request], piece < ends[-1])


def most_pieces(rows: int, requests: int, size: int) -> int:
    """Returns the maximum number of pieces of `size` rows that packed requests can need: when all but one of them are
    as short as possible."""
    units = ceil_div(rows, QUERY_UNIT)
    requests = min(requests, units)
    return requests + (units - requests) * QUERY_UNIT // size


def ragged_tiles(rows: int, first_row: Array, count: Array) -> Tiles:
    """Returns the tiles of requests that have `count` rows each from `first_row` on.

    There are as many as `rows` packed rows can need; padding tiles have no rows.
    """
    needed = -(-count // TILE)
    request, number, is_needed = pieces(needed, most_pieces(rows, count.shape[0], TILE))
    # Longest first: the last tile of a request sees the most keys.
    offset = jnp.where(is_needed, (needed[request] - 1 - number) * TILE, 0)
    rows_of_tile = jnp.where(is_needed, jnp.minimum(TILE, count[request] - offset), 0)
    return Tiles(*(x.astype(jnp.int32) for x in (request, first_row[request] + offset, offset, rows_of_tile)))
