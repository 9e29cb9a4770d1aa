"""Visibility of keys by position, and the zeroing of values beyond a request's length."""

import jax.numpy as jnp
from jax import Array, lax

from detjax.contract import KV_BLOCK
from detjax.operands.options import Masking


def query_positions(first_row: Array, rows: int, position: Array, group: int) -> Array:
    """Returns absolute positions `[rows, 1]` of the queries in rows of a tile whose first token is at `position`.

    Row `r` of a tile belongs to its token `r // group`.
    """
    row = first_row + lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
    return position + _quotient(row, group)


def key_positions(block: Array, rows: int) -> Array:
    """Returns absolute positions `[rows, S]` of the keys of a block, the same in every row."""
    return block * KV_BLOCK + lax.broadcasted_iota(jnp.int32, (rows, KV_BLOCK), 1)


def visible_keys(keys: Array, positions: Array, kv_length: Array, masking: Masking) -> Array:
    """Returns True where the query of a row sees a key, `[rows, S]`, judging by positions only."""
    visible = keys < kv_length
    if masking.causal:
        visible = visible & (keys <= positions)
    if masking.window is not None:
        visible = visible & (keys > positions - masking.window)
    return visible


def present_values(v: Array, block: Array, kv_length: Array) -> Array:
    """Returns the values `[S, V]` of a block, with zeros after the request's last token.

    The page's memory there may hold NaN, and a probability of zero times NaN is NaN.
    """
    keys = block * KV_BLOCK + lax.broadcasted_iota(jnp.int32, v.shape, 0)
    return jnp.where(keys < kv_length, v, jnp.zeros_like(v))


def _quotient(x: Array, divisor: int) -> Array:
    """Returns `x // divisor` for row numbers of a tile, since integer vectors have no division.

    It is exact while both numbers are at most `MAX_ROWS`, since `MAX_ROWS**2 <= 2**bits`.
    """
    bits = 20
    return (x * ((1 << bits) // divisor + 1)) >> bits
