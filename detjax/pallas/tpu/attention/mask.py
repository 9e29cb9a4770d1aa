"""Which keys a row of queries sees by its position, and values beyond a request's length."""

import jax.numpy as jnp
from jax import Array, lax

from detjax.contract import KV_BLOCK
from detjax.operands.options import Masking


def query_positions(first_row: Array, rows: int, position: Array, group: int) -> Array:
    """Absolute positions `[rows, 1]` of the queries in rows of a tile.

    Args:
        first_row: the first of the rows.
        rows: the number of rows.
        position: the position of the tile's first token.
        group: query heads that share a head of keys. Row `r` of a tile belongs to its token `r // group`.
    """
    row = first_row + lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
    return position + _quotient(row, group)


def key_positions(block: Array, rows: int) -> Array:
    """Absolute positions `[rows, S]` of the keys of a block, the same in every row."""
    return block * KV_BLOCK + lax.broadcasted_iota(jnp.int32, (rows, KV_BLOCK), 1)


def visible_keys(keys: Array, positions: Array, kv_length: Array, masking: Masking) -> Array:
    """Whether the query in each row sees each key, `[rows, S]`, by their positions alone."""
    visible = keys < kv_length
    if masking.causal:
        visible = visible & (keys <= positions)
    if masking.window is not None:
        visible = visible & (keys > positions - masking.window)
    return visible


def present_values(v: Array, block: Array, kv_length: Array) -> Array:
    """Values `[S, V]` of a block, with zeros after the request's last token.

    What a page holds there may be NaN, and a probability of zero times NaN is NaN.
    """
    keys = block * KV_BLOCK + lax.broadcasted_iota(jnp.int32, v.shape, 0)
    return jnp.where(keys < kv_length, v, jnp.zeros_like(v))


def _quotient(x: Array, divisor: int) -> Array:
    """`x // divisor` for row numbers of a tile: vectors of integers have no division."""
    bits = 16
    return (x * ((1 << bits) // divisor + 1)) >> bits
