"""Sums of products over the tokens of groups, on `mma.sync`: the gradients of experts' weights.

Every group has float32 sums, to which its tokens are added stage by stage. A CTA has one tile of one group's sums;
only the device knows how many stages its group has. Groups without stages are not visited.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from detjax.operands.numerics import round_up
from detjax.pallas.hopper.group_stages import STAGE_TOKENS, Stages
from detjax.pallas.hopper.matmul.kernel import padded
from detjax.pallas.hopper.mosaic.layouts import swizzled_lines
from detjax.pallas.hopper.rows import NO_AUTO_BARRIERS
from detjax.pallas.mma import copies, fragments

_LINE = 64
"""Elements of a swizzled line; widths are padded to whole lines."""
_STEP_TOKENS = 32
"""Tokens of a filling of the ring."""
_RING = 3
"""Stages of the ring: 48 KiB for tiles of 128 x 128."""
_ROW_WARPS = 2


def product_sums(sums: Array, x: Array, w: Array, stages: Stages) -> Array:
    """Returns `sums[g] + x[t].T @ w[t]` for the tokens t of group g's stages in ascending order.

    Donated sums are updated in place.

    Args:
        sums: `[G, M, N]` float32.
        x: tokens `[T, M]`, bfloat16 or float16.
        w: tokens `[T, N]` of the same dtype.
        stages: the tokens of each group.
    """
    groups, m, n = sums.shape
    shape = round_up(m, _LINE), round_up(n, _LINE)
    ref = jax.new_ref(padded(sums, (groups, *shape)))
    kernel = _kernel(groups, shape, x.dtype)
    kernel(stages.table, padded(x, (len(x), shape[0])), padded(w, (len(w), shape[1])), ref)
    return jax.freeze(ref)[:, :m, :n]


def _kernel(groups: int, shape: tuple[int, int], dtype: Any) -> Any:
    """Returns the kernel of `table, x, w, sums`, which updates the sums in place."""
    tile_m, tile_n = (math.gcd(size, 2 * _LINE) for size in shape)
    across = shape[1] // tile_n
    tiles = shape[0] // tile_m * across

    def body(table: Any, x: Any, w: Any, sums: Any, *, rows: Any, columns: Any, **barriers: Any) -> None:
        index = lax.axis_index("tile")
        order, tile = lax.div(index, jnp.int32(tiles)), lax.rem(index, jnp.int32(tiles))

        @pl.when(order < table[0])
        def _() -> None:
            group, first, number = Stages.at(table, groups, order)
            along = pl.ds(lax.div(tile, jnp.int32(across)) * tile_m, tile_m)
            over = pl.ds(lax.rem(tile, jnp.int32(across)) * tile_n, tile_n)

            def fill(step: Array | int, slot: Array | int) -> copies.Copies:
                tokens = pl.ds(first * STAGE_TOKENS + step * _STEP_TOKENS, _STEP_TOKENS)
                return [(x.at[tokens, along], rows.at[slot]), (w.at[tokens, over], columns.at[slot])]

            steps = number * (STAGE_TOKENS // _STEP_TOKENS)
            ring = copies.Ring(steps, _RING, fill, barriers.get("loaded"))
            ring.start()

            def add(step: Array, total: Array) -> Array:
                slot = ring.next(step)
                for token in range(0, _STEP_TOKENS, fragments.STEP):
                    tokens = pl.ds(token, fragments.STEP)
                    left = fragments.load_left(rows.at[slot, tokens].T, _ROW_WARPS)
                    total = fragments.multiply(total, left, fragments.load_right(columns.at[slot, tokens], _ROW_WARPS))
                return total

            # No other CTA has this tile, so its sums are read and written in place without synchronization.
            place = sums.at[group, along, over]
            layout = fragments.accumulator_layout(dtype, _ROW_WARPS)
            place[...] = lax.fori_loop(0, steps, add, plgpu.load(place, layout=layout, optimized=False))

    def staged(size: int) -> Any:
        return plgpu.SMEM((_RING, _STEP_TOKENS, size), dtype, transforms=swizzled_lines(_LINE, dtype.itemsize))

    return plgpu.kernel(
        body,
        out_type=[],
        grid=(groups * tiles,),
        grid_names=("tile",),
        scratch_types={"rows": staged(tile_m), "columns": staged(tile_n), **copies.barriers(_RING, 2)},
        kernel_name="mma_group_sums",
        compiler_params=NO_AUTO_BARRIERS,
    )
