"""Matmul of rows sorted by expert on a TPU, each row in the bits that `matmul_tpu` gives it with its expert's weight.

A tile of rows meets the weight of every expert that has rows in it, one after the other, and each expert writes its own
rows. So rows stay where they are, and how many of them an expert got decides how often a tile is visited, nothing more.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, DTypeLike, Float, Int

from detjax.contract import ACCUMULATOR, TPU_K_STEP, TPU_ROW_TILE
from detjax.options import Epilogue, WeightLayout
from detjax.pallas.tpu.device import LANES, SUBLANES, check_dtypes
from detjax.pallas.tpu.matmul import ACTIVATIONS, EPILOGUE_ROWS, VMEM_LIMIT, add_step, choose, filled
from detjax.portable.matmul import activated


def forward(
    x: Float[Array, "M K"],
    w: Float[Array, "E ..."],
    group_sizes: Int[Array, "E"],
    *,
    layout: WeightLayout,
    epilogue: Epilogue,
    out_dtype: DTypeLike,
) -> Float[Array, "M N"]:
    """The epilogue of `x[m] @ w[e]`, e being the expert of row m; zeros in rows behind the last group.

    Args:
        x: rows, those of expert 0 first, then those of expert 1, and so on.
        w: weights of x's dtype, `[E, K, N]`, or `[E, N, K]` where `layout` is "nk"; `[E, 2, ...]` if gated.
        group_sizes: rows of each expert, int32; their sum is at most M.

    Raises:
        NotImplementedError: a dtype is none of `tpu.DTYPES`, or all of K does not fit into memory at once.
    """
    out_dtype = jnp.dtype(out_dtype)
    check_dtypes("grouped_matmul", x, w, jax.ShapeDtypeStruct((), out_dtype))
    m = x.shape[0]
    k_axis = 2 if layout == "kn" else 3
    w = filled(w.reshape(w.shape[0], -1, *w.shape[-2:]), k_axis, LANES)
    x = filled(filled(x, 1, LANES), 0, SUBLANES)
    parts, n, k = w.shape[1], w.shape[5 - k_axis], x.shape[1]
    schedule = choose(n, k, parts, x.dtype)
    if schedule.slab != k:
        raise NotImplementedError(
            f"grouped_matmul: K is {k} in {x.dtype}, whose tiles don't fit into a TPU's VMEM whole. Use one "
            f"matmul for each expert, or narrower dtypes."
        )
    outputs = schedule.outputs
    tiles = -(-x.shape[0] // TPU_ROW_TILE)
    visits = _visits(group_sizes, x.shape[0], tiles)

    def body(tile_of: Any, _: Any, first_of: Any, end_of: Any, x: Any, w: Any, out: Any, accumulators: Any) -> None:
        visit = pl.program_id(1)
        first, end = first_of[visit], end_of[visit]

        @pl.when((visit == 0) | (tile_of[visit] != tile_of[jnp.maximum(visit - 1, 0)]))
        def _() -> None:
            out[...] = jnp.zeros(out.shape, out.dtype)

        def write_rows(chunk: Array, _: None) -> None:
            start = pl.multiple_of(chunk * EPILOGUE_ROWS, EPILOGUE_ROWS)
            span = pl.ds(start, EPILOGUE_ROWS)
            made = activated([accumulators[part, span, :] for part in range(parts)], epilogue, ACTIVATIONS)
            row = tile_of[visit] * TPU_ROW_TILE + start + lax.broadcasted_iota(jnp.int32, made.shape, 0)
            # Kept by a choice, not by a product: neighbours may be NaN.
            others = out[span, :].astype(ACCUMULATOR)
            out[span, :] = jnp.where((row >= first) & (row < end), made, others).astype(out_dtype)

        @pl.when(first < end)
        def _() -> None:
            accumulators[...] = jnp.zeros(accumulators.shape, ACCUMULATOR)

            def step(index: Array, _: None) -> None:
                add_step(
                    accumulators,
                    x,
                    w,
                    "mk",
                    layout,
                    pl.multiple_of(index * TPU_K_STEP, TPU_K_STEP),
                    TPU_K_STEP,
                )

            lax.fori_loop(0, k // TPU_K_STEP, step, None)
            if k % TPU_K_STEP:
                add_step(accumulators, x, w, "mk", layout, k // TPU_K_STEP * TPU_K_STEP, k % TPU_K_STEP)
            lax.fori_loop(0, TPU_ROW_TILE // EPILOGUE_ROWS, write_rows, None)

    w_block = (k, outputs) if layout == "kn" else (outputs, k)
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(visits),
        grid=(-(-n // outputs), visits[0].shape[0]),
        in_specs=[
            pl.BlockSpec((TPU_ROW_TILE, k), lambda n, v, tile_of, *_: (tile_of[v], 0)),
            pl.BlockSpec(
                (None, parts, *w_block),
                lambda n, v, _, expert_of, *__: (expert_of[v], 0, *((0, n) if layout == "kn" else (n, 0))),
            ),
        ],
        out_specs=pl.BlockSpec((TPU_ROW_TILE, outputs), lambda n, v, tile_of, *_: (tile_of[v], n)),
        scratch_shapes=[pltpu.VMEM((parts, TPU_ROW_TILE, outputs), ACCUMULATOR)],
    )
    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((x.shape[0], n), out_dtype),
        grid_spec=grid_spec,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
        ),
        name="grouped_matmul",
    )(*visits, x, w)[:m]


def _visits(group_sizes: Array, rows: int, tiles: int) -> tuple[Array, ...]:
    """Of each visit, ascending: its tile, its expert, and the first row and the end of that expert's rows.

    Rows behind the last group are one more group, whose visits have no rows, as have those that fill up the array.
    """
    experts = group_sizes.shape[0]
    sizes = jnp.append(group_sizes.astype(jnp.int32), rows - jnp.sum(group_sizes, dtype=jnp.int32))
    ends = jnp.cumsum(sizes)
    firsts = ends - sizes
    first_tiles = firsts // TPU_ROW_TILE
    counts = jnp.where(sizes > 0, (ends - 1) // TPU_ROW_TILE - first_tiles + 1, 0)
    visited = jnp.cumsum(counts)
    # Each group beyond the first adds at most one visit to those of the tiles.
    index = jnp.arange(tiles + experts, dtype=jnp.int32)
    last = jnp.minimum(index, visited[-1] - 1)
    group = jnp.searchsorted(visited, last, side="right").astype(jnp.int32)
    tile = first_tiles[group] + last - (visited - counts)[group]
    empty = (group == experts) | (index >= visited[-1])
    first = jnp.where(empty, 0, firsts[group])
    return tile, jnp.minimum(group, experts - 1), first, jnp.where(empty, 0, ends[group])
