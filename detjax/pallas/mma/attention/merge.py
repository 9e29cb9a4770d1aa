"""Merges the blocks of split sequences, in the contract's order (Pallas Mosaic GPU).

The first CTA of a sequence has stored its running sums, and the other CTAs the products of their blocks. Here a CTA
merges 128 columns of one row, one column per thread.
"""

import functools
from typing import Any, Final

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from detjax.contract import ACCUMULATOR
from detjax.operands.numerics import ceil_div, round_up
from detjax.pallas.hopper.attention.online_softmax import merged, normalized, rescaling
from detjax.pallas.hopper.attention.warpgroups import COMPILER_PARAMS
from detjax.pallas.hopper.device import WARPGROUP
from detjax.pallas.hopper.mosaic.layouts import PER_THREAD
from detjax.pallas.mma.attention.kernel import Partials
from detjax.pallas.mma.attention.schedule import Problem, Tiles

_AT_ONCE: Final = 32
"""Blocks whose results are loaded before any of them is merged: a load takes as long as many merges."""


def partial_types(problem: Problem) -> Partials:
    """Returns the shapes and dtypes of the partial results of a problem."""
    width = round_up(problem.value_width, WARPGROUP)
    items, blocks, rows = problem.items, problem.blocks, problem.tile_rows
    return Partials(
        jax.ShapeDtypeStruct((items, rows, width), ACCUMULATOR),
        jax.ShapeDtypeStruct((items, 2, rows), ACCUMULATOR),
        jax.ShapeDtypeStruct((items, blocks, rows, width), ACCUMULATOR),
        jax.ShapeDtypeStruct((items, blocks, 2, rows), ACCUMULATOR),
        jax.ShapeDtypeStruct((items, 2), jnp.int32),
    )


def merge(problem: Problem, tiles: Tiles, partials: Partials) -> Array:
    """Returns the output `[N, heads, V]` of split sequences; rows that do not exist are undefined."""
    width = round_up(problem.value_width, WARPGROUP)

    def body(rows: Any, *refs: Any) -> None:
        *partials, o = refs
        item, row, part = (lax.axis_index(name) for name in ("item", "row", "part"))
        is_given = row < rows[lax.div(item, jnp.int32(problem.heads))]
        columns = pl.ds(part * WARPGROUP, WARPGROUP)
        pl.when(is_given)(lambda: _merge_row(Partials(*partials), o, (item, row, columns), problem.dtype))

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((problem.items, problem.tile_rows, width), problem.dtype),
        grid=(problem.items, problem.tile_rows, ceil_div(problem.value_width, WARPGROUP)),
        grid_names=("item", "row", "part"),
        compiler_params=COMPILER_PARAMS,
        kernel_name="attention_merge_blocks",
    )
    o = kernel(tiles.rows, *partials)[..., : problem.value_width]
    o = o.reshape(problem.tiles, problem.heads, problem.tile_rows, problem.value_width)
    return o.swapaxes(1, 2).reshape(-1, problem.heads, problem.value_width)


def _merge_row(partials: Partials, o: Any, place: tuple[Array, Array, Any], dtype: Any) -> None:
    """Merges some columns of a row."""
    item, row, columns = place

    def line(ref: Any) -> Array:
        return plgpu.load(ref.at[row, columns], layout=PER_THREAD, optimized=False)

    def load(block: Array) -> tuple[Array, Array, Array]:
        statistics = partials.statistics.at[item, block]
        return line(partials.blocks.at[item, block]), statistics[0, row], statistics[1, row]

    def merge_block(sums: tuple[Array, ...], block: tuple[Array, Array, Array]) -> tuple[Array, ...]:
        (x, m, total), (x_b, m_b, total_b) = sums, tuple(map(_spread, block))
        m, a, b = rescaling(m, m_b)
        return merged(x, a, x_b, b, PER_THREAD), m, merged(total, a, total_b, b, PER_THREAD)

    def load_group(start: Array) -> list[tuple[Array, Array, Array]]:
        return [load(lax.min(start + i, end - 1)) for i in range(_AT_ONCE)]

    def merge_group(group: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        for block in load_group(first + group * _AT_ONCE):
            sums = merge_block(sums, block)
        return sums

    def merge_last(sums: tuple[Array, ...]) -> tuple[Array, ...]:
        start = first + groups * _AT_ONCE
        for i, block in enumerate(load_group(start)):
            merge = functools.partial(merge_block, block=block)
            sums = lax.cond(start + i < end, merge, lambda sums: sums, sums)
        return sums

    statistics = partials.prefix_statistics.at[item]
    sums = tuple(map(_spread, (line(partials.prefixes.at[item]), statistics[0, row], statistics[1, row])))
    first, end = partials.ranges[item, 0], partials.ranges[item, 1]
    groups = lax.div(end - first, jnp.int32(_AT_ONCE))
    sums = lax.fori_loop(0, groups, merge_group, sums)
    # The last blocks are loaded together, too: one after the other they would take longer than all the others.
    x, _, total = lax.cond(groups * _AT_ONCE < end - first, merge_last, lambda sums: sums, sums)
    o[item, row, columns] = normalized(x, total, dtype, spread=lambda x, _: x)


def _spread(x: Array) -> Array:
    """Returns a number in every thread; an array of one per thread as it is."""
    x = lax.broadcast_in_dim(x, (WARPGROUP,), ()) if x.ndim == 0 else x
    return plgpu.layout_cast(x, PER_THREAD)
