"""Gradients of RMS norm on Hopper GPUs (Mosaic GPU).

A warpgroup takes the `WEIGHT_GRADIENT_TOKENS` rows of one step of the weight's sum. A row stays in the registers of its
threads, as in the forward pass, and its two sums have the forward pass's order. The step's contribution to the weight
is added in the same pass; see `token_sums` for the sum over steps.

Barriers keep LLVM from fusing products with subsequent additions, but not ptxas, which fuses products to which a
residual's gradient is added and the products of the first pair of a row sum. It does so in every schedule alike, so no
bit depends on the schedule.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from detjax.contract import ACCUMULATOR, LANE_GROUP, LANES, WEIGHT_GRADIENT_TOKENS
from detjax.operands.numerics import ceil_div, flat_rows, round_up
from detjax.operands.rounding import rounded
from detjax.pallas.hopper.device import WARP, WARPGROUP
from detjax.pallas.hopper.mosaic.barriers import commit_smem
from detjax.pallas.hopper.rows import NO_AUTO_BARRIERS, broadcast, layout, load_weight, rounded_squares, row_sums
from detjax.pallas.hopper.token_sums import chain
from detjax.portable import norm as portable

WARP_COLUMNS: Final = 1024
"""Widest row that a warp holds; a wider row takes a warpgroup."""

WARPGROUPS: Final = 4
"""Warpgroups of a CTA. CTAs of four limit a thread to 128 registers, which suffice; with the 152 that the compiler
would take otherwise, not all steps of 8192 rows run at the same time."""

RESIDENT_BYTES: Final = 96
"""Bytes of a row that fit into a thread's registers, in addition to its gradient and the temporaries."""


def backward(
    h: Array,
    weight: Array,
    dy: Array,
    dh: Array | None,
    weight_sum: Array | None = None,
    *,
    eps: float,
    weight_offset: float,
) -> tuple[Array, Array]:
    """Returns the gradients of the normalized rows and of the weight; see `detjax.portable.norm.backward`."""
    width = h.shape[-1]
    padding = _padded_width(width) - width
    if (width + padding) * h.dtype.itemsize > RESIDENT_BYTES * WARPGROUP:
        # The portable gradients leave XLA no choice: their row sums are the contract's, all other arithmetic is
        # elementwise, and their tiles have one shape.
        return portable.backward(h, weight, dy, dh, weight_sum, eps=eps, weight_offset=weight_offset)
    rows = [flat_rows(x) for x in (h, dy, dh) if x is not None]
    count = len(rows[0])
    # Padding rows add zeros to the weight's gradient.
    missing = -count % WEIGHT_GRADIENT_TOKENS
    padded = [jnp.pad(x, ((0, missing), (0, padding))) for x in rows]
    total, step_sums = _row_gradients(padded, jnp.pad(weight, (0, padding)), width, eps, weight_offset)
    start = jnp.zeros(width, ACCUMULATOR) if weight_sum is None else weight_sum
    dweight = chain(jnp.pad(start, (0, padding)), step_sums)[:width]
    dh = total[:count, :width].reshape(h.shape)
    return dh, rounded(dweight, weight.dtype) if weight_sum is None else dweight


def _padded_width(width: int) -> int:
    """Returns the least width from `width` on that the threads of a row divide evenly."""
    if width <= WARPGROUP:
        return max(16, 1 << (width - 1).bit_length())
    return round_up(width, WARPGROUP if width <= WARP_COLUMNS else LANES)


def _row_gradients(
    rows: Sequence[Array], weight: Array, width: int, eps: float, weight_offset: float
) -> tuple[Array, Array]:
    """Returns the gradients `[M, D]` of rows, and each step's contribution to the weight's, `[steps, D]` float32.

    `rows` are h, dy and optionally dh of `backward`. Means are taken over the `width` elements of a row without
    padding.
    """
    count, columns = rows[0].shape
    threads = columns // LANE_GROUP if columns <= WARPGROUP else WARP if columns <= WARP_COLUMNS else WARPGROUP
    together = min(WARPGROUP // threads, WEIGHT_GRADIENT_TOKENS)
    # A row of a whole warpgroup adds its warps' sums through the CTA's reduction scratch, which only one warpgroup may
    # use.
    steps, warpgroups = count // WEIGHT_GRADIENT_TOKENS, WARPGROUPS if threads <= WARP else 1
    pieces, shape = layout(together, threads), (together, LANE_GROUP * threads)
    repeated = functools.partial(broadcast, shape=shape, axis=0, layout=pieces)
    # The weight's terms are added across rows, left to right. With one row at a time they stay in the registers of the
    # threads that have the columns; several rows at a time are in different threads, so their terms pass through shared
    # memory, from which each thread reads `LANE_GROUP` neighbouring words of a line: consecutive banks.
    line = shape[1] if together == 1 else math.gcd(columns, LANE_GROUP * WARPGROUP)
    lines, parts = ([pl.ds(start, size) for start in range(0, columns, size)] for size in (line, shape[1]))
    line_layout = layout(1, line // LANE_GROUP)

    def body(*refs: Any) -> None:
        *inputs, weight_ref, out_ref, sums_ref = refs[: len(rows) + 3]
        warpgroup = lax.axis_index("warpgroup")
        # Warpgroups beyond the last step compute it once more, and write the same bits.
        step = lax.min(lax.axis_index("cta") * warpgroups + warpgroup, steps - 1)

        def take(group: Array, added: list[Array]) -> list[Array]:
            here = pl.ds(step * WEIGHT_GRADIENT_TOKENS + group * together, together)
            refs_of_pieces = [[ref.at[here, part] for part in parts] for ref in inputs]
            h, dy, *rest = [
                [plgpu.load(piece, layout=pieces, optimized=False) for piece in row] for row in refs_of_pieces
            ]
            # The weight is loaded where it is used, from cache: 128 registers have no room for it.
            weights = [functools.partial(load_weight, weight_ref.at[p], weight_offset, shape, pieces) for p in parts]
            row = [*map(Piece, h, dy, weights)]
            factor, mean = means(row, width, eps, repeated)
            scale, mean = repeated(factor), repeated(mean)
            if together > 1:  # all threads have read the terms of the previous rows
                commit_smem()
            for index, part in enumerate(parts):
                past = [wide(other[index]) for other in rest]
                total = functools.reduce(jnp.add, past, through_norm(row[index], scale, mean))
                out_ref[here, part] = total.astype(out_ref.dtype)
                # The barrier keeps LLVM from fusing the product with the sum.
                term = lax.optimization_barrier(wide(dy[index]) * (wide(h[index]) * scale))
                if together == 1:
                    added[index] = added[index] + term
                else:
                    refs[-1].at[warpgroup][:, part] = term
            if together > 1:  # all terms are written
                commit_smem()
                for index in range(together):
                    terms = [refs[-1].at[warpgroup, pl.ds(index, 1), part] for part in lines]
                    terms = [plgpu.load(term, layout=line_layout, optimized=False) for term in terms]
                    added = [a + b for a, b in zip(added, terms, strict=True)]
            return added

        # Unlike +0.0, -0.0 keeps the sign of a zero that is added to it.
        nothing = plgpu.layout_cast(jnp.full((1, line), -0.0, ACCUMULATOR), line_layout)
        added = lax.fori_loop(0, WEIGHT_GRADIENT_TOKENS // together, take, [nothing] * len(lines))
        for part, total in zip(lines, added, strict=True):
            sums_ref[pl.ds(step, 1), part] = total

    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((count, columns), rows[0].dtype),
            jax.ShapeDtypeStruct((count // WEIGHT_GRADIENT_TOKENS, columns), ACCUMULATOR),
        ),
        scratch_types=[] if together == 1 else [plgpu.SMEM((warpgroups, together, columns), ACCUMULATOR)],
        grid=(ceil_div(steps, warpgroups),),
        grid_names=("cta",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        kernel_name="rms_norm_gradient",
        compiler_params=NO_AUTO_BARRIERS,
    )(*rows, weight)


class Piece(NamedTuple):
    """Some columns of rows.

    Attributes:
        h: the normalized rows in their stored dtype. They are widened where they are used, since registers hold twice
            as many 2-byte numbers.
        dy: the gradients of the result, in their stored dtype for the same reason.
        weight: returns the weight plus its offset, float32, repeated in every row.
    """

    h: Array
    dy: Array
    weight: Callable[[], Array]


def wide(x: Array) -> Array:
    """Returns a piece in float32. The barrier keeps the compiler from holding on to the result of one conversion."""
    return lax.optimization_barrier(x).astype(ACCUMULATOR)


def means(pieces: Sequence[Piece], width: int, eps: float, repeated: Callable[[Array], Array]) -> tuple[Array, Array]:
    """Returns the factors `[rows]` of the norm, and the means `[rows]` of gradients times normalized rows.

    Means are taken over `width` elements. `repeated(vector)` is a piece that repeats a vector `[rows]` in every column.
    """
    factor = lax.rsqrt(row_sums([rounded_squares(wide(piece.h)) for piece in pieces]) / width + eps)
    scale = repeated(factor)
    # The barrier keeps LLVM from fusing products with their sums; ptxas still fuses the first pair.
    products = [lax.optimization_barrier(wide(piece.dy) * piece.weight() * (wide(piece.h) * scale)) for piece in pieces]
    return factor, row_sums(products) / width


def through_norm(piece: Piece, scale: Array, mean: Array) -> Array:
    """Returns the gradients of some columns of rows, float32, given the results of `means` repeated in every column.

    ptxas may fuse their last product with an addition.
    """
    along = lax.optimization_barrier(wide(piece.h) * scale * mean)
    return lax.optimization_barrier(scale * (wide(piece.dy) * piece.weight() - along))
