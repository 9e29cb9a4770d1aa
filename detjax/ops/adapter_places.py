"""The places of rows with adapters, and the products of the adapters in these places."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Int32

from detjax.contract import ACCUMULATOR
from detjax.operands.numerics import ceil_div
from detjax.operands.options import Epilogue
from detjax.operands.products import GroupedOperands, MatmulOperands
from detjax.operands.pytrees import array_dataclass
from detjax.ops.dispatch import one_by_one
from detjax.ops.experts import ExpertRows, expert_rows
from detjax.ops.grouped_kernels import GROUPED_MATMUL
from detjax.runtime import fusions


@array_dataclass
@dataclasses.dataclass(frozen=True)
class SortedRows:
    """The rows of tokens sorted by adapter, for many rows.

    Attributes:
        rows: the rows, gathered for each product.
        place: the row among them of each row of x; -1: it has no adapter.
    """

    rows: ExpertRows
    place: Int32[Array, "M"]

    @classmethod
    def for_rows(cls, slot: Int32[Array, "M"], slots: int) -> "SortedRows":
        """Returns the places of rows with these slots."""
        rows = expert_rows(slot[:, None], slots, slot >= 0)
        return cls(rows, jnp.where(slot >= 0, rows.place[:, 0], -1))

    def products(self, x: Array, a: Array, b: Array) -> Float32[Array, "P N"]:
        """Returns `rnd(x A^T) B^T` for the sorted rows."""
        rows = self.rows
        return low_rank_products(rows.gather(x), a, b, rows.group_sizes, rows.unit, rows.tiles)


@array_dataclass
@dataclasses.dataclass(frozen=True)
class BlocksOfRows:
    """Blocks of neighbouring rows, each with one adapter that some of its rows have, for few rows.

    Nothing is sorted: all rows of a block get the product of its adapter, and each row reads the one of its own. The
    fewest blocks are needed if rows with the same adapter are neighbours.

    Attributes:
        adapters: the slot of each block's adapter, and at the end the number of blocks.
        blocks: the number of each block among the rows of x.
        firsts: the first of these blocks for each block of x, and at the end the number of blocks.
        place: for each row of x, its row in the block with its adapter; -1: it has no adapter.
    """

    adapters: Int32[Array, "_"]
    blocks: Int32[Array, "_"]
    firsts: Int32[Array, "_"]
    place: Int32[Array, "M"]

    @classmethod
    def for_rows(cls, slot: Int32[Array, "M"], size: int) -> "BlocksOfRows":
        """Returns the blocks of `size` rows for rows with these slots."""
        row = jnp.arange(len(slot), dtype=jnp.int32)
        block = row // size
        is_same = (slot[:, None] == slot[None]) & (block[:, None] == block[None]) & (slot >= 0)[None]
        first = jnp.where(is_same, row[None], len(slot)).min(axis=1)
        is_first = first == row
        # Blocks are numbered in the order of their first rows with the adapter.
        number = jnp.sum(is_first[None] & (row[None] < first[:, None]), axis=1, dtype=jnp.int32)
        has_block = is_first[None] & (number[None] == row[:, None])

        def by_block(values: Array) -> Array:
            return jnp.sum(jnp.where(has_block, values[None], 0), axis=1, dtype=jnp.int32)

        starts = jnp.arange(ceil_div(len(slot), size) + 1, dtype=jnp.int32) * size
        firsts = jnp.sum(is_first[None] & (row[None] < starts[:, None]), axis=1, dtype=jnp.int32)
        place = jnp.where(slot >= 0, number * size + row % size, -1)
        return cls(jnp.append(by_block(slot), firsts[-1]), by_block(block), firsts, place)

    def first_products(self, x: Array, a: Array) -> Float[Array, "P R"]:
        """Returns `rnd(x A^T)` for the rows of the blocks."""
        return GROUPED_MATMUL.kernels().product_of_blocks(x, a, self.adapters, self.blocks)

    def sums_and_first_products(
        self, x: Array, w: Any, bias: Array | None, a: Array
    ) -> tuple[list[Array], Array] | None:
        """Returns the biased sums `[M, N]` of each part of a weight, float32, and `first_products`.

        They come from one kernel; None if no kernel computes both.
        """
        kernels = GROUPED_MATMUL.kernels()
        is_fused = not fusions.is_unfused("matmul_epilogue")
        if not (is_fused and kernels.multiplies_first_factors(MatmulOperands(x, w, bias), a)):
            return None

        def multiply(x: Array, w: Array, bias: Array | None, factors: tuple[Array, ...]) -> tuple[list[Array], Array]:
            return kernels.sums_and_first_products(x, w, bias, kernels.FirstFactors(*factors))

        return one_by_one(multiply, (x, w, bias, (a, self.adapters, self.blocks)))

    def joined(
        self, sums: list[Array], u: Array, b: Array, scales: Array, residual: Array | None, **options: Any
    ) -> Array:
        """Returns the epilogue of the sums `[M, N]` of each part, each row with the product of its own adapter.

        Args:
            sums: the sums of each part.
            u: `first_products`.
            b: the second factors.
            scales: the factors of the products.
            residual: an array to add to the result.
            options: see `add_adapters_of_blocks` of the backends.
        """
        kernels = GROUPED_MATMUL.kernels()

        def join(sums: list[Array], rows: tuple[Array, ...], residual: Array | None) -> Array:
            return kernels.add_adapters_of_blocks(sums, kernels.RowsWithAdapters(*rows), residual, **options)

        return one_by_one(join, (sums, (u, b, scales, self.adapters, self.firsts, self.place), residual))


def places_of_rows(rows: Int[Array, "..."], slots: int) -> SortedRows | BlocksOfRows:
    """Returns the places of rows with adapters, which all products of a program may share; see `AdaptedWeight`."""
    slot, kernels = rows.reshape(-1).astype(jnp.int32), GROUPED_MATMUL.kernels()
    if hasattr(kernels, "serves_blocks") and kernels.serves_blocks(len(slot)):
        return BlocksOfRows.for_rows(slot, kernels.BLOCK)
    return SortedRows.for_rows(slot, slots)


def low_rank_products(x: Array, a: Array, b: Array, sizes: Array, unit: int, tiles: Array | None = None) -> Array:
    """Returns `rnd(x A^T) B^T` in float32 for rows sorted by adapter, in groups of the given sizes."""
    kernels = GROUPED_MATMUL.kernels()
    if hasattr(kernels, "adapter_sums"):
        return kernels.adapter_sums(x, a, b, sizes)
    known = {} if tiles is None or not hasattr(kernels, "TAKES_TILES") else {"tiles": tiles}
    forward = functools.partial(kernels.forward, layout="nk", epilogue=Epilogue(), unit=unit, **known)
    u = forward(GroupedOperands(x, a, None, sizes), out_dtype=x.dtype)
    return forward(GroupedOperands(u, b, None, sizes), out_dtype=ACCUMULATOR)
