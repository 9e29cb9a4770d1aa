"""Softmax, log-softmax and logsumexp on TPUs (Mosaic TPU): blocks of a tile of rows stream through VMEM in order.

The grid goes over a tile's blocks once for their maxima and sums, which stay in VMEM, and once more to write; rows that
are not written are read once. In gradients the sums of rows are computed here; the arithmetic on single elements
around them is XLA's, which has nothing to choose there.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import tpu as pltpu

from detjax.contract import ACCUMULATOR, LOG2_E, SOFTMAX_BLOCK
from detjax.pallas.tpu.device import check_dtypes
from detjax.pallas.tpu.rows import LOWEST, PIECE, filled, pieces_of, row_sum, row_tile, wide
from detjax.portable.tiles import flat_rows

STATISTICS_BYTES: Final = 4 * 1024 * 1024
"""Of the statistics of a tile's blocks. Vocabularies of language models take less, at `MOST_ROWS` rows."""
MOST_ROWS: Final = 32
"""Of a tile: with them a step of the grid takes longer to copy its block than to begin."""

Operation = Literal["softmax", "log_softmax", "logsumexp"]


def softmax(x: Array, rows: int | None = None) -> Array:
    """`[*B, V]` float32; `rows` of a tile are a schedule, here and below: no bit depends on them."""
    return _normalized("softmax", flat_rows(x), rows).reshape(x.shape)


def log_softmax(x: Array, rows: int | None = None) -> Array:
    """`[*B, V]` float32."""
    return _normalized("log_softmax", flat_rows(x), rows).reshape(x.shape)


def logsumexp(x: Array, rows: int | None = None) -> Array:
    """`[*B]` float32."""
    return _normalized("logsumexp", flat_rows(x), rows).reshape(x.shape[:-1])


def softmax_backward(y: Array, dy: Array) -> Array:
    """Gradient of softmax's input, float32, from its output."""
    # Behind the barrier the products are rounded before they are added.
    return y * (dy - row_sums(lax.optimization_barrier(y * dy)))


def log_softmax_backward(y: Array, dy: Array) -> Array:
    """Gradient of log-softmax's input, float32, from its output."""
    # A maximum with the lowest number keeps the product from being contracted with the subtraction.
    return dy - jnp.maximum(jnp.exp(y) * row_sums(dy), LOWEST)


def logsumexp_backward(x: Array, y: Array, dy: Array) -> Array:
    """Gradient of logsumexp's input, float32, from its input and output."""
    return jnp.exp(x.astype(ACCUMULATOR) - y[..., None]) * dy[..., None]


# --- what the bits are ------------------------------------------------------------------------------------------------


def exp_difference(x: Array, m: Array) -> Array:
    """`exp(x - m)` as the contract has it."""
    return jnp.exp2((x - m) * LOG2_E)


def block_statistics(pieces: Callable[[], Sequence[Array]]) -> tuple[Array, Array]:
    """Maximum and sum, `[rows, 1]` float32, of a block, whose pieces are read twice."""
    m = jnp.max(functools.reduce(jnp.maximum, pieces()), axis=1, keepdims=True)
    m = jnp.maximum(m, LOWEST)
    return m, row_sum([exp_difference(piece, m) for piece in pieces()])


def merged_statistics(m_ref: Any, l_ref: Any) -> tuple[Array, Array]:
    """Maximum and sum of rows from those of their blocks `[blocks, rows, 128]`, the same in every lane."""
    blocks, *tile = m_ref.shape

    def add(block: Array, total: Array) -> Array:
        # The product is not negative, and its maximum with 0 stands between it and the addition.
        return total + jnp.maximum(l_ref[block] * exp_difference(m_ref[block], m), 0.0)

    m = jnp.full(tile, LOWEST, ACCUMULATOR)
    m = lax.fori_loop(0, blocks, lambda block, m: jnp.maximum(m, m_ref[block]), m)
    return m, lax.fori_loop(0, blocks, add, jnp.zeros(tile, ACCUMULATOR))


def row_constant(operation: Operation, total: Array) -> Array:
    """What every element of a row is multiplied by, or has subtracted, in the end."""
    return 1 / total if operation == "softmax" else jnp.log(total)


def finished(operation: Operation, x: Array, m: Array, constant: Array) -> Array:
    """Elements of the result."""
    return exp_difference(x, m) * constant if operation == "softmax" else (x - m) - constant


# --- blocks in VMEM ---------------------------------------------------------------------------------------------------


def blocks_of_row(width: int) -> int:
    """Blocks of a row of `width` elements."""
    return pl.cdiv(width, SOFTMAX_BLOCK)


def pieces_of_block(width: int) -> int:
    """Pieces of each block of such a row: the last block may have fewer elements than they have room for."""
    return pieces_of(min(width, SOFTMAX_BLOCK))


def columns(piece: int) -> slice:
    """The place of a piece in its block."""
    return slice(piece * PIECE, (piece + 1) * PIECE)


def pieces_at(x_ref: Any, block: Array, width: int, fill: float) -> list[Array]:
    """The pieces of a block that is in VMEM, float32, with `fill` beyond the end of the row."""
    left = end_of_row(block, width)
    pieces = range(pieces_of_block(width))
    return [filled(x_ref[:, columns(piece)].astype(ACCUMULATOR), left - piece * PIECE, fill) for piece in pieces]


def end_of_row(block: Array, width: int) -> int | Array:
    """Where in a block the row ends; for some blocks, beyond them."""
    if blocks_of_row(width) == 1:
        return width
    return SOFTMAX_BLOCK if width % SOFTMAX_BLOCK == 0 else width - block * SOFTMAX_BLOCK


def rows_of_tile(x: Array, statistics: int = 2) -> int:
    """Rows of a tile of `[M, V]`, with so many numbers for each block."""
    row_bytes = statistics * blocks_of_row(x.shape[1]) * PIECE * jnp.dtype(ACCUMULATOR).itemsize
    return row_tile(x.dtype, row_bytes, STATISTICS_BYTES, MOST_ROWS)


def _normalized(operation: Operation, x: Array, rows: int | None) -> Array:
    """`[M, V]` float32 of rows, or `[M, 1]` for logsumexp.

    Raises:
        NotImplementedError: x's dtype is none of `tpu.DTYPES`.
    """
    check_dtypes(operation, x)
    M, V = x.shape
    R, blocks = rows or rows_of_tile(x), blocks_of_row(V)
    writes = operation != "logsumexp"

    def body(x_ref: Any, y_ref: Any, m_ref: Any, l_ref: Any, row_m_ref: Any, constant_ref: Any) -> None:
        passed, block = pl.program_id(1), pl.program_id(2)

        @pl.when(passed == 0)
        def _() -> None:
            m, total = block_statistics(lambda: pieces_at(x_ref, block, V, -jnp.inf))
            m_ref[block] = wide(m)
            l_ref[block] = wide(total)

        @pl.when((passed == 0) & (block == blocks - 1))
        def _() -> None:
            m, total = merged_statistics(m_ref, l_ref)
            constant = row_constant(operation, total)
            if writes:
                row_m_ref[...] = m
                constant_ref[...] = constant
            else:
                y_ref[...] = (m + constant)[:, :1]

        if writes:

            @pl.when(passed == 1)
            def _() -> None:
                m, constant = row_m_ref[...], constant_ref[...]
                for piece in map(columns, range(pieces_of_block(V))):
                    y_ref[:, piece] = finished(operation, x_ref[:, piece].astype(ACCUMULATOR), m, constant)

    tile = R, pieces_of_block(V) * PIECE
    # On the first pass the block to be written stays at the tile's first: it is written on the second, and stored then.
    out = pl.BlockSpec(tile, lambda i, p, b: (i, p * b)) if writes else pl.BlockSpec((R, 1), lambda i, p, b: (i, 0))
    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((M, V if writes else 1), ACCUMULATOR),
        grid=(pl.cdiv(M, R), 2 if writes else 1, blocks),
        in_specs=[pl.BlockSpec(tile, lambda i, p, b: (i, b))],
        out_specs=out,
        scratch_shapes=[
            *[pltpu.VMEM((blocks, R, PIECE), ACCUMULATOR)] * 2,
            *[pltpu.VMEM((R, PIECE), ACCUMULATOR)] * 2,
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        name=operation,
    )(x)


def row_sums(x: Array, rows: int | None = None) -> Array:
    """Sums `[*B, 1]` of rows `[*B, V]`, both float32, as gradients need them."""
    flat = flat_rows(x)
    M, V = flat.shape
    R = rows or MOST_ROWS

    def body(x_ref: Any, y_ref: Any, total_ref: Any) -> None:
        block = pl.program_id(1)

        @pl.when(block == 0)
        def _() -> None:
            total_ref[...] = jnp.zeros((R, PIECE), ACCUMULATOR)

        total = total_ref[...] + wide(row_sum(pieces_at(x_ref, block, V, 0.0)))
        total_ref[...] = total

        @pl.when(block == blocks_of_row(V) - 1)
        def _() -> None:
            y_ref[...] = total[:, :1]

    sums = pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((M, 1), ACCUMULATOR),
        grid=(pl.cdiv(M, R), blocks_of_row(V)),
        in_specs=[pl.BlockSpec((R, pieces_of_block(V) * PIECE), lambda i, b: (i, b))],
        out_specs=pl.BlockSpec((R, 1), lambda i, b: (i, 0)),
        scratch_shapes=[pltpu.VMEM((R, PIECE), ACCUMULATOR)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        name="row_sums",
    )(flat)
    return sums.reshape(*x.shape[:-1], 1)
