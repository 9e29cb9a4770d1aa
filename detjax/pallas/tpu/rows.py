"""Rows in the vector registers of TPUs: tiles of rows, and row sums in the order of `contract.LANES`.

A register holds 8 rows of 128 columns of 32-bit numbers. A tile of rows is therefore handled as a sequence of *pieces*
`[rows, 128]`, and lane `j` of the contract is lane `j % 128` of every fourth piece. To add lanes, a piece is rotated.
Where the rotation brings a neighbour from beyond the end of its group, the sum in that lane is never used.
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
    """What a kernel of rows is asked for, except the number of rows: one kernel serves every number of them.

    Attributes:
        operation: the operation's name.
        width: elements of a row.
        dtype: the dtype of the rows that the kernel reads.
    """

    operation: str
    width: int
    dtype: jnp.dtype


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How a kernel of rows divides its work. No bit depends on it.

    Attributes:
        rows: rows of a tile, which one step of the grid handles together.
    """

    rows: int

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError(f"a schedule has tiles of {self.rows} rows; accepted: 1 or more. Choose a larger tile.")

    def check(self, problem: Problem) -> None:
        """Returns if the schedule serves the problem.

        Raises:
            ValueError: the tile's rows don't fill whole registers.
        """
        unit = register_rows(problem.dtype)
        if self.rows % unit:
            raise ValueError(
                f"{problem.operation}: the schedule has tiles of {self.rows} rows in {problem.dtype}; accepted: "
                f"multiples of {unit}, the rows of a register. Round it up."
            )


def register_rows(dtype: jax.typing.DTypeLike) -> int:
    """Rows of a register of this dtype."""
    return device.SUBLANES * jnp.dtype(ACCUMULATOR).itemsize // jnp.dtype(dtype).itemsize


def rows_within(dtype: jax.typing.DTypeLike, row_bytes: int, budget: int, most: int) -> int:
    """Rows of a tile: as many whole registers as fit into `budget` bytes, at least one and at most `most` rows.

    The result does not depend on the number of rows, so a kernel has one text for all of them.
    """
    unit = register_rows(dtype)
    return unit * max(1, min(budget // row_bytes, most) // unit)


def piece_count(width: int) -> int:
    """The number of pieces of a row of `width` columns. The last one may be partly beyond the row's end."""
    return -(-width // PIECE)


def piece_columns(piece: int) -> slice:
    """The columns of a piece within its tile."""
    return slice(piece * PIECE, (piece + 1) * PIECE)


def lane_ids(rows: int) -> jax.Array:
    """The column of each element within its piece, int32 `[rows, 128]`."""
    return lax.broadcasted_iota(jnp.int32, (rows, PIECE), 1)


def filled_from(piece: jax.Array, columns: int | jax.Array, fill: float) -> jax.Array:
    """A piece with `fill` in column `columns` and after it: memory beyond the end of an array may hold anything."""
    if isinstance(columns, int) and columns >= PIECE:
        return piece
    return jnp.where(lane_ids(piece.shape[0]) < columns, piece, jnp.asarray(fill, piece.dtype))


def in_every_lane(column: jax.Array) -> jax.Array:
    """A piece that has the number of its row, from `[rows, 1]`, in every lane."""
    return jnp.broadcast_to(column, (column.shape[0], PIECE))


def lanes_ahead(x: jax.Array, distance: int) -> jax.Array:
    """The piece whose lane `j` has lane `j + distance` of `x`, modulo 128."""
    return pltpu.roll(x, PIECE - distance, 1) if distance else x


def squares(x: jax.Array) -> jax.Array:
    """`x * x`, rounded before anything is added to it.

    The maximum with zero keeps the product's value. It stands between the product and the addition, which the compiler
    could otherwise fuse.
    """
    return jnp.maximum(x * x, 0.0)


def row_sum(pieces: Sequence[jax.Array]) -> jax.Array:
    """Sums `[rows, 1]` float32 of rows, given as pieces in ascending order.

    Products among the elements must be rounded already, see `squares`.
    """
    registers = min(LANES // PIECE, 1 << (len(pieces) - 1).bit_length())
    zeros = jnp.zeros_like(pieces[0])
    # Lanes without elements are zeros.
    whole = [*pieces, *[zeros] * (-len(pieces) % registers)]
    sums = [_sum_in_first_lane(functools.reduce(jnp.add, whole[first::registers])) for first in range(registers)]
    while len(sums) > 1:
        sums = [low + high for low, high in zip(sums[0::2], sums[1::2], strict=True)]
    return sums[0][:, :1]


def _sum_in_first_lane(x: jax.Array) -> jax.Array:
    """A piece whose lane 0 has the sum of all lanes of `x`. Its other lanes have no meaning."""
    x = functools.reduce(jnp.add, [lanes_ahead(x, lane) for lane in range(LANE_GROUP)])
    distance = LANE_GROUP
    while distance < PIECE:
        x = x + lanes_ahead(x, distance)
        distance *= 2
    return x
