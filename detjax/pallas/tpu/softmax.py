"""Softmax, log-softmax and logsumexp on TPUs (Mosaic TPU): the blocks of a tile of rows stream through VMEM in order.

The grid visits the blocks of a tile once for their maxima and sums, which stay in VMEM, and a second time to write the
result. Logsumexp writes no rows, so it visits them once. For gradients, a kernel computes only the row sums.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import tpu as pltpu

from detjax.contract import ACCUMULATOR, SOFTMAX_BLOCK
from detjax.operands.numerics import LOWEST, flat_rows
from detjax.pallas import softmax_formulas as formulas
from detjax.pallas.softmax_formulas import Operation
from detjax.pallas.tpu.device import check_dtypes
from detjax.pallas.tpu.rows import (
    PIECE,
    Problem,
    Schedule,
    filled_from,
    in_every_lane,
    piece_columns,
    piece_count,
    row_sum,
    rows_within,
)

STATISTICS_BYTES: Final = 4 * 1024 * 1024
"""Bytes of VMEM for the maxima and sums of a tile's blocks: at `MAX_ROWS`, 128 blocks, or 524288 elements of a row."""
MAX_ROWS: Final = 32
"""Most rows of a tile. With this many, the copy of a block takes longer than the overhead of a grid step."""


def default_schedule(problem: Problem) -> Schedule:
    """Returns the schedule of one of the three operations, or of "row_sums", which keeps no statistics of blocks."""
    if problem.operation == "row_sums":
        return Schedule(MAX_ROWS)
    statistics_bytes = 2 * RowBlocks(problem.width).count * PIECE * jnp.dtype(ACCUMULATOR).itemsize
    return Schedule(rows_within(problem.dtype, statistics_bytes, STATISTICS_BYTES, MAX_ROWS))


def softmax(x: Array, schedule: Schedule | None = None) -> Array:
    """Returns the softmax of rows `[*B, V]`: float32 `[*B, V]`."""
    return _normalized("softmax", flat_rows(x), schedule).reshape(x.shape)


def log_softmax(x: Array, schedule: Schedule | None = None) -> Array:
    """Returns the log-softmax of rows `[*B, V]`: float32 `[*B, V]`."""
    return _normalized("log_softmax", flat_rows(x), schedule).reshape(x.shape)


def logsumexp(x: Array, schedule: Schedule | None = None) -> Array:
    """Returns the logsumexp of rows `[*B, V]`: float32 `[*B]`."""
    return _normalized("logsumexp", flat_rows(x), schedule).reshape(x.shape[:-1])


def softmax_backward(y: Array, dy: Array) -> Array:
    """Returns the gradient of softmax's input, float32, from its result."""
    return formulas.softmax_gradient(y, dy, row_sums)


def log_softmax_backward(y: Array, dy: Array) -> Array:
    """Returns the gradient of log-softmax's input, float32, from its result."""
    return formulas.log_softmax_gradient(y, dy, row_sums)


logsumexp_backward: Final = formulas.logsumexp_gradient


def row_sums(x: Array, schedule: Schedule | None = None) -> Array:
    """Returns the sums `[*B, 1]` of rows `[*B, V]`, both float32, for gradients: blocks are added left to right."""
    flat = flat_rows(x)
    schedule = _checked_schedule("row_sums", flat, schedule)
    blocks, rows = RowBlocks(flat.shape[1]), schedule.rows

    def kernel(x: Any, y: Any, total_ref: Any) -> None:
        block = pl.program_id(1)

        @pl.when(block == 0)
        def clear() -> None:
            total_ref[...] = jnp.zeros((rows, PIECE), ACCUMULATOR)

        total = total_ref[...] + in_every_lane(row_sum(blocks.load(x, block, 0.0)))
        total_ref[...] = total

        @pl.when(block == blocks.count - 1)
        def store() -> None:
            y[...] = total[:, :1]

    sums = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((flat.shape[0], 1), ACCUMULATOR),
        grid=(pl.cdiv(flat.shape[0], rows), blocks.count),
        in_specs=[pl.BlockSpec((rows, blocks.columns), lambda i, b: (i, b))],
        out_specs=pl.BlockSpec((rows, 1), lambda i, b: (i, 0)),
        scratch_shapes=[pltpu.VMEM((rows, PIECE), ACCUMULATOR)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        name="row_sums",
    )(flat)
    return sums.reshape(*x.shape[:-1], 1)


def block_statistics(load: Callable[[], Sequence[Array]]) -> tuple[Array, Array]:
    """Returns maximum and sum of a block, `[rows, 1]` float32 each.

    Args:
        load: returns the block's pieces; called twice, so that they need not stay in registers.
    """
    m = jnp.max(functools.reduce(jnp.maximum, load()), axis=1, keepdims=True)
    m = jnp.maximum(m, LOWEST)
    return m, row_sum([formulas.exp_difference(piece, m) for piece in load()])


# --- blocks in VMEM ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class RowBlocks:
    """The division of a row of `width` elements into the contract's blocks, and of a block into pieces."""

    width: int

    @property
    def count(self) -> int:
        """The number of blocks."""
        return pl.cdiv(self.width, SOFTMAX_BLOCK)

    @property
    def pieces(self) -> int:
        """The number of pieces of a block. The last block may have fewer elements than its pieces have columns."""
        return piece_count(min(self.width, SOFTMAX_BLOCK))

    @property
    def columns(self) -> int:
        """Columns of a block in VMEM, which has whole pieces."""
        return self.pieces * PIECE

    def end_of_row(self, block: Array) -> int | Array:
        """Returns the column of the block in which the row ends; for earlier blocks, a column beyond the block."""
        if self.count == 1:
            return self.width
        return SOFTMAX_BLOCK if self.width % SOFTMAX_BLOCK == 0 else self.width - block * SOFTMAX_BLOCK

    def first_column(self, block: Array) -> Array:
        """Returns the block's first column in the row."""
        return block * SOFTMAX_BLOCK

    def load(self, x: Any, block: Array, fill: float) -> list[Array]:
        """Returns the float32 pieces of a block in VMEM, with `fill` beyond the end of the row."""
        end = self.end_of_row(block)
        return [
            filled_from(x[:, piece_columns(piece)].astype(ACCUMULATOR), end - piece * PIECE, fill)
            for piece in range(self.pieces)
        ]


class BlockStatistics(NamedTuple):
    """Maxima and sums of the blocks of a tile of rows, `[blocks, rows, 128]` float32, the same in every lane."""

    m: Any
    total: Any

    @classmethod
    def scratch(cls, blocks: RowBlocks, rows: int) -> "BlockStatistics":
        """Returns the types of the statistics' scratch memory."""
        return cls(*[pltpu.VMEM((blocks.count, rows, PIECE), ACCUMULATOR)] * 2)

    def store(self, block: Array, load: Callable[[], Sequence[Array]]) -> None:
        """Computes and stores the statistics of a block; see `block_statistics`."""
        m, total = block_statistics(load)
        self.m[block] = in_every_lane(m)
        self.total[block] = in_every_lane(total)

    def merged(self) -> tuple[Array, Array]:
        """Returns maximum and sum of whole rows, `[rows, 128]`; sums of blocks are added left to right."""
        blocks, *tile = self.m.shape

        def add(block: Array, total: Array) -> Array:
            # The product is not negative, so the maximum keeps its value; it keeps the compiler from fusing the
            # addition.
            return total + jnp.maximum(self.total[block] * formulas.exp_difference(self.m[block], m), 0.0)

        m = jnp.full(tile, LOWEST, ACCUMULATOR)
        m = lax.fori_loop(0, blocks, lambda block, m: jnp.maximum(m, self.m[block]), m)
        return m, lax.fori_loop(0, blocks, add, jnp.zeros(tile, ACCUMULATOR))


class _RowStatistics(NamedTuple):
    """Maxima and constants of a tile of rows, `[rows, 128]` float32, between the two visits of its blocks."""

    m: Any
    constant: Any


def _checked_schedule(operation: str, x: Array, schedule: Schedule | None) -> Schedule:
    """Returns the given or the default schedule, after checking that it fits rows `[M, V]`."""
    problem = Problem(operation, x.shape[1], x.dtype)
    schedule = schedule or default_schedule(problem)
    schedule.check(problem)
    return schedule


def _normalized(operation: Operation, x: Array, schedule: Schedule | None) -> Array:
    """Returns float32 `[M, V]` for rows `[M, V]`, or `[M, 1]` for logsumexp.

    Raises:
        NotImplementedError: x's dtype is not one of `device.DTYPES`.
        ValueError: the schedule does not fit the problem.
    """
    check_dtypes(operation, x)
    (count, width), blocks = x.shape, RowBlocks(x.shape[1])
    rows = _checked_schedule(operation, x, schedule).rows
    writes_rows = operation != "logsumexp"

    def kernel(x: Any, y: Any, block_statistics: BlockStatistics, row_statistics: _RowStatistics) -> None:
        _Kernel(operation, blocks, x, y, block_statistics, row_statistics).run()

    # During the first visit the output's block index stays at 0. Pallas stores a block when its index changes, so block
    # 0 is stored only after the second visit has written it, and nothing is stored in between.
    out_spec = pl.BlockSpec((rows, blocks.columns), lambda i, p, b: (i, p * b))
    if not writes_rows:
        out_spec = pl.BlockSpec((rows, 1), lambda i, p, b: (i, 0))
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((count, width if writes_rows else 1), ACCUMULATOR),
        grid=(pl.cdiv(count, rows), 2 if writes_rows else 1, blocks.count),
        in_specs=[pl.BlockSpec((rows, blocks.columns), lambda i, p, b: (i, b))],
        out_specs=out_spec,
        scratch_shapes=[
            BlockStatistics.scratch(blocks, rows),
            _RowStatistics(*[pltpu.VMEM((rows, PIECE), ACCUMULATOR)] * 2),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        name=operation,
    )(x)


@dataclasses.dataclass(frozen=True, eq=False)
class _Kernel:
    """One visit of one block of a tile of rows, with references to the arrays in VMEM."""

    operation: Operation
    blocks: RowBlocks
    x: Any
    y: Any
    block_statistics: BlockStatistics
    row_statistics: _RowStatistics

    def run(self) -> None:
        visit, block = pl.program_id(1), pl.program_id(2)
        writes_rows = self.operation != "logsumexp"

        @pl.when(visit == 0)
        def reduce() -> None:
            self.block_statistics.store(block, lambda: self.blocks.load(self.x, block, -jnp.inf))

        pl.when((visit == 0) & (block == self.blocks.count - 1))(self.keep if writes_rows else self.store_logsumexp)
        if writes_rows:
            pl.when(visit == 1)(self.store_block)

    def merge(self) -> tuple[Array, Array]:
        """Returns maxima and constants of the rows, once all their blocks have statistics."""
        m, total = self.block_statistics.merged()
        return m, formulas.row_constant(self.operation, total)

    def keep(self) -> None:
        m, constant = self.merge()
        self.row_statistics.m[...] = m
        self.row_statistics.constant[...] = constant

    def store_logsumexp(self) -> None:
        m, constant = self.merge()
        self.y[...] = (m + constant)[:, :1]

    def store_block(self) -> None:
        m, constant = (ref[...] for ref in self.row_statistics)
        for piece in range(self.blocks.pieces):
            place = slice(None), piece_columns(piece)
            self.y[place] = formulas.finished(self.operation, self.x[place].astype(ACCUMULATOR), m, constant)
