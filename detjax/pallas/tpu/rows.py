"""Rows in the vector registers of TPUs: tiles of rows, and row sums in the order of `contract.LANES`.

A register holds 8 rows of 128 columns, so a row is a sequence of pieces `[rows, 128]`, and lane `j` of the contract is
lane `j % 128` of every fourth piece. Lanes meet by rotation: where it brings a neighbour from beyond the end of its
group, the sum is left unused.
"""

import functools
from collections.abc import Sequence
from typing import Final

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from detjax.contract import ACCUMULATOR, LANE_GROUP, LANES
from detjax.pallas.tpu import device

PIECE: Final = device.LANES
"""Columns of a piece: those of a register."""

LOWEST: Final = float(jnp.finfo(ACCUMULATOR).min)


def row_unit(dtype: jax.typing.DTypeLike) -> int:
    """Rows of a register of this dtype."""
    return device.SUBLANES * jnp.dtype(ACCUMULATOR).itemsize // jnp.dtype(dtype).itemsize


def row_tile(dtype: jax.typing.DTypeLike, row_bytes: int, budget: int, most: int) -> int:
    """Rows of a tile: as many whole registers as `budget` has room for, at least one and at most `most` rows.

    It does not follow the number of rows, so a kernel has one text for all of them.
    """
    unit = row_unit(dtype)
    return unit * max(1, min(budget // row_bytes, most) // unit)


def pieces_of(width: int) -> int:
    """Pieces of a row of `width` columns, the last one perhaps in part."""
    return -(-width // PIECE)


def lane_ids(rows: int) -> jax.Array:
    """The column of each element of a piece, int32."""
    return lax.broadcasted_iota(jnp.int32, (rows, PIECE), 1)


def filled(piece: jax.Array, columns: int | jax.Array, fill: float) -> jax.Array:
    """A piece with `fill` from `columns` on: what lies beyond the end of an array may be anything."""
    if isinstance(columns, int) and columns >= PIECE:
        return piece
    return jnp.where(lane_ids(piece.shape[0]) < columns, piece, jnp.asarray(fill, piece.dtype))


def wide(column: jax.Array) -> jax.Array:
    """`[rows, 1]` in every lane of a piece."""
    return jnp.broadcast_to(column, (column.shape[0], PIECE))


def squares(x: jax.Array) -> jax.Array:
    """`x * x`, rounded before anything is added to it: the maximum keeps its value and stands between."""
    return jnp.maximum(x * x, 0.0)


def row_sum(pieces: Sequence[jax.Array]) -> jax.Array:
    """Sums `[rows, 1]` float32 of rows given as pieces in ascending order.

    Products among the elements must be rounded already, see `squares`.
    """
    registers = min(LANES // PIECE, 1 << (len(pieces) - 1).bit_length())
    zeros = jnp.zeros_like(pieces[0])
    # Where a register of the last lanes has no element of its own, there are zeros.
    whole = [*pieces, *[zeros] * (-len(pieces) % registers)]
    sums = [_first_lane(functools.reduce(jnp.add, whole[first::registers])) for first in range(registers)]
    while len(sums) > 1:
        sums = [left + right for left, right in zip(sums[0::2], sums[1::2], strict=True)]
    return sums[0][:, :1]


def _first_lane(x: jax.Array) -> jax.Array:
    """A piece whose lane 0 has the sum of all lanes of `x`; what its others have is of no use."""
    x = functools.reduce(jnp.add, [_ahead(x, lane) for lane in range(LANE_GROUP)])
    distance = LANE_GROUP
    while distance < PIECE:
        x = x + _ahead(x, distance)
        distance *= 2
    return x


def _ahead(x: jax.Array, distance: int) -> jax.Array:
    """The piece whose lane `j` has lane `j + distance` of `x`."""
    return pltpu.roll(x, PIECE - distance, 1) if distance else x
