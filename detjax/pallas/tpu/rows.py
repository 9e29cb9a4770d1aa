"""Rows in the vector registers of TPUs: tiles of rows, and row sums in the order of `contract.LANES`.

A register holds 8 rows of 128 columns of 32-bit numbers, so a tile of rows is processed as a sequence of *pieces*
`[rows, 128]`, and lane `j` of the contract is lane `j % 128` of every fourth piece. Lanes are added by rotating a
piece. Sums in lanes into which the rotation brings a number from another group are never used.
"""

import dataclasses
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
"""Columns of a piece."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """An operation on rows, without the number of rows: one kernel serves any number.

    Attributes:
        operation: the operation's name.
        width: elements of a row.
        dtype: the dtype of the input rows.
    """

    operation: str
    width: int
    dtype: jnp.dtype


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The number of rows of a tile, which one grid step processes. No bit depends on it."""

    rows: int

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError(f"Schedule: rows is {self.rows}; accepted: 1 or more. Choose a larger tile.")

    def check(self, problem: Problem) -> None:
        """Raises ValueError if the tile's rows don't fill whole registers."""
        unit = register_rows(problem.dtype)
        if self.rows % unit:
            raise ValueError(
                f"{problem.operation}: the schedule has tiles of {self.rows} rows in {problem.dtype}; accepted: "
                f"multiples of {unit}, the rows of a register. Round it up."
            )


def register_rows(dtype: jax.typing.DTypeLike) -> int:
    """Returns the rows of a register of this dtype."""
    return device.SUBLANES * jnp.dtype(ACCUMULATOR).itemsize // jnp.dtype(dtype).itemsize


def rows_within(dtype: jax.typing.DTypeLike, row_bytes: int, budget: int, most: int) -> int:
    """Returns the rows of a tile: as many registers as fit into `budget` bytes, at least one, and at most `most` rows.

    The result does not depend on the call's number of rows, so a kernel has one program text for any number.
    """
    unit = register_rows(dtype)
    return unit * max(1, min(budget // row_bytes, most) // unit)


def piece_count(width: int) -> int:
    """Returns the number of pieces of a row of `width` columns. The last piece may reach beyond the row's end."""
    return -(-width // PIECE)


def piece_columns(piece: int) -> slice:
    """Returns the columns of a piece within its tile."""
    return slice(piece * PIECE, (piece + 1) * PIECE)


def lane_ids(rows: int) -> jax.Array:
    """Returns the column of each element within its piece, int32 `[rows, 128]`."""
    return lax.broadcasted_iota(jnp.int32, (rows, PIECE), 1)


def filled_from(piece: jax.Array, columns: int | jax.Array, fill: float) -> jax.Array:
    """Returns a piece with `fill` from column `columns` on: VMEM beyond the end of an array is undefined."""
    if isinstance(columns, int) and columns >= PIECE:
        return piece
    return jnp.where(lane_ids(piece.shape[0]) < columns, piece, jnp.asarray(fill, piece.dtype))


def in_every_lane(column: jax.Array) -> jax.Array:
    """Returns a piece that repeats the numbers `[rows, 1]` of rows in every lane."""
    return jnp.broadcast_to(column, (column.shape[0], PIECE))


def lanes_ahead(x: jax.Array, distance: int) -> jax.Array:
    """Returns the piece whose lane `j` is lane `j + distance` of `x`, modulo 128."""
    return pltpu.roll(x, PIECE - distance, 1) if distance else x


def squares(x: jax.Array) -> jax.Array:
    """Returns `x * x`, rounded before anything is added to it.

    The maximum with zero keeps the product's value, and the compiler from fusing the product with an addition.
    """
    return jnp.maximum(x * x, 0.0)


def row_sum(pieces: Sequence[jax.Array]) -> jax.Array:
    """Returns the sums `[rows, 1]` float32 of rows, given as pieces in ascending order.

    Products among the elements must already be rounded; see `squares`.
    """
    registers = min(LANES // PIECE, 1 << (len(pieces) - 1).bit_length())
    zeros = jnp.zeros_like(pieces[0])
    # In the contract, lanes without elements are zeros.
    whole = [*pieces, *[zeros] * (-len(pieces) % registers)]
    sums = [_sum_in_first_lane(functools.reduce(jnp.add, whole[first::registers])) for first in range(registers)]
    while len(sums) > 1:
        sums = [low + high for low, high in zip(sums[0::2], sums[1::2], strict=True)]
    return sums[0][:, :1]


def _sum_in_first_lane(x: jax.Array) -> jax.Array:
    """Returns a piece with the sum of all lanes of `x` in lane 0. Other lanes are undefined."""
    x = functools.reduce(jnp.add, [lanes_ahead(x, lane) for lane in range(LANE_GROUP)])
    distance = LANE_GROUP
    while distance < PIECE:
        x = x + lanes_ahead(x, distance)
        distance *= 2
    return x
