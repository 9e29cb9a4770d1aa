"""Embedding lookup on Hopper GPUs. Its gradient is a kernel (Mosaic GPU) that adds each table row's tokens in order.

The tokens are sorted by their ids. A CTA takes the tokens of one id and adds their gradients in order to the id's row
of the sum. Rows of other ids are not touched.
"""

from typing import Any, Final

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from detjax.contract import ACCUMULATOR, LANE_GROUP
from detjax.operands.numerics import ceil_div
from detjax.operands.rounding import rounded
from detjax.pallas.hopper.device import WARP, WARPGROUP
from detjax.pallas.hopper.rows import NO_AUTO_BARRIERS, layout
from detjax.portable import embedding as portable

TOGETHER: Final = 8
"""Tokens whose gradients are loaded at the same time."""

MAX_PIECES: Final = 4
"""Most pieces of a row that a CTA holds."""

# A gather adds nothing, so it needs no kernel.
forward = portable.forward


def backward(tokens: Array, table: Array, dy: Array, table_sum: Array | None = None) -> Array:
    """Returns the gradient of the table, or its next sum; see `detjax.portable.embedding.backward`.

    A donated sum is updated in place.
    """
    width = table.shape[1]
    if width % WARPGROUP:
        return portable.backward(tokens, table, dy, table_sum)
    ids, position = lax.sort_key_val(tokens.reshape(-1).astype(jnp.int32), jnp.arange(tokens.size, dtype=jnp.int32))
    is_first = jnp.concatenate([jnp.ones(1, bool), ids[1:] != ids[:-1]])
    # For the first token of each id the end of the id's tokens; 0 elsewhere.
    index = jnp.arange(1, tokens.size + 1, dtype=jnp.int32)
    is_last = jnp.concatenate([is_first[1:], jnp.ones(1, bool)])
    end = lax.cummin(jnp.where(is_last, index, tokens.size), reverse=True)
    sums = jax.new_ref(jnp.zeros(table.shape, ACCUMULATOR) if table_sum is None else table_sum)
    _add_tokens(ids, position, jnp.where(is_first, end, 0), dy.reshape(-1, width), sums)
    total = jax.freeze(sums)
    return rounded(total, table.dtype) if table_sum is None else total


def _add_tokens(ids: Array, position: Array, end: Array, dy: Array, sums: Any) -> None:
    """Adds the gradients dy `[N, D]` of each id's tokens to the id's row of the sums `[V, D]`.

    The ids `[N]` are sorted, and `position` has the row of dy of each, ascending within an id. `end` has for the first
    token of each id the index after its last one, and 0 for other tokens.
    """
    count, width = dy.shape
    threads = next(n for n in (WARPGROUP, WARPGROUP // 2, WARP) if width % (LANE_GROUP * n) == 0)
    columns = LANE_GROUP * threads
    pieces = next(n for n in range(MAX_PIECES, 0, -1) if width % (n * columns) == 0)
    piece_layout = layout(1, threads)

    def body(ids_ref: Any, position_ref: Any, end_ref: Any, dy_ref: Any, sums_ref: Any) -> None:
        first = lax.axis_index("token")
        last = end_ref[first]
        start = lax.axis_index("column") * (pieces * columns)
        parts = [pl.ds(start + piece * columns, columns) for piece in range(pieces)]

        def load(ref: Any, row: Array) -> list[Array]:
            here = pl.ds(row, 1)
            return [plgpu.load(ref.at[here, part], layout=piece_layout, optimized=False) for part in parts]

        def add(step: Array, total: list[Array]) -> list[Array]:
            places = [first + step * TOGETHER + index for index in range(TOGETHER)]
            rows = [load(dy_ref, position_ref[jnp.minimum(place, count - 1)]) for place in places]
            for place, row in zip(places, rows, strict=True):
                # Rows after the last token add nothing.
                total = [jnp.where(place < last, t + x.astype(ACCUMULATOR), t) for t, x in zip(total, row, strict=True)]
            return total

        @pl.when(last > first)
        def _() -> None:
            token = ids_ref[first]
            steps = lax.div(last - first + (TOGETHER - 1), jnp.int32(TOGETHER))
            total = lax.fori_loop(0, steps, add, load(sums_ref, token))
            for part, value in zip(parts, total, strict=True):
                sums_ref[pl.ds(token, 1), part] = value

    plgpu.kernel(
        body,
        out_type=(),
        grid=(count, ceil_div(width, pieces * columns)),
        grid_names=("token", "column"),
        kernel_name="embedding_gradient",
        compiler_params=NO_AUTO_BARRIERS,  # a thread reads and writes only its own elements of the sums
    )(ids, position, end, dy, sums)
