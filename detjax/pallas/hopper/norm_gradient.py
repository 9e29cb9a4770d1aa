"""Gradients of RMS norm on Hopper GPUs (Mosaic GPU).

A first kernel gives the rows' gradients. A row stays in the registers of its threads, as in the forward pass, and its
two sums have the forward pass's order. The weight's gradient is a sum over rows; see `token_sums`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from detjax.contract import ACCUMULATOR, LANE_GROUP, LANES
from detjax.numerics import ceil_div, flat_rows, round_up
from detjax.pallas.hopper import device
from detjax.pallas.hopper.device import WARP, WARPGROUP
from detjax.pallas.hopper.rows import broadcast, layout, rounded_squares, row_sums
from detjax.pallas.hopper.token_sums import token_sums
from detjax.portable import norm as portable
from detjax.rounding import rounded

WARP_COLUMNS: Final = 1024
"""The widest row that a warp holds; wider ones have a warpgroup."""

RESIDENT_BYTES: Final = 96
"""Bytes of a row that fit into a thread's registers, beside its gradient and the temporaries."""


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
        # XLA has nothing to choose in the portable gradients: their row sums are the contract's, all other arithmetic
        # is on single elements, and the tiles have one shape.
        return portable.backward(h, weight, dy, dh, weight_sum, eps=eps, weight_offset=weight_offset)
    rows = [flat_rows(x) for x in (h, dy, dh) if x is not None]
    padded = [jnp.pad(x, ((0, 0), (0, padding))) for x in rows]
    total, scale = _row_gradients(padded, jnp.pad(weight, (0, padding)), width, eps, weight_offset)
    start = jnp.zeros(width, ACCUMULATOR) if weight_sum is None else weight_sum
    dweight = token_sums(start, rows[1], rows[0], factors=[scale], term=lambda dy, h, scale: dy * (h * scale))
    return total[:, :width].reshape(h.shape), rounded(dweight, weight.dtype) if weight_sum is None else dweight


def _padded_width(width: int) -> int:
    """The least width from `width` on that the threads of a row divide evenly."""
    if width <= WARPGROUP:
        return max(16, 1 << (width - 1).bit_length())
    return round_up(width, WARPGROUP if width <= WARP_COLUMNS else LANES)


def _row_gradients(
    rows: Sequence[Array], weight: Array, width: int, eps: float, weight_offset: float
) -> tuple[Array, Array]:
    """The gradients `[M, D]` of rows, and the factors `[M]` float32 that normalize the rows.

    Args:
        rows: h, dy and perhaps dh, as `backward` has them, `[M, D]`.
        weight: `[D]`.
        width: elements of a row without its padding, over which means are taken.
        eps: what is added to the mean square.
        weight_offset: what is added to the weight.
    """
    count, columns = rows[0].shape
    threads = columns // LANE_GROUP if columns <= WARPGROUP else WARP if columns <= WARP_COLUMNS else WARPGROUP
    together = min(WARPGROUP // threads, 1 << (count.bit_length() - 1))
    # The weight is loaded once for two rows of a thread if there are enough rows for all multiprocessors.
    groups = 2 if count >= 16 * together * device.multiprocessors() else 1
    pieces, shape = layout(together, threads), (together, LANE_GROUP * threads)
    repeated = functools.partial(broadcast, shape=shape, axis=0, layout=pieces)

    def body(*refs: Any) -> None:
        *inputs, weight_ref, out_ref, scale_ref = refs
        # The last CTA moves up to whole rows: two CTAs then write the same bits to some.
        first = jnp.minimum(lax.axis_index("tile") * (together * groups), count - together * groups)
        parts = [pl.ds(start, shape[1]) for start in range(0, columns, shape[1])]
        weights = [_factor(weight_ref, part, weight_offset, shape, pieces) for part in parts]
        for group in range(groups):
            here = pl.ds(first + group * together, together)
            held = [[ref.at[here, part] for part in parts] for ref in inputs]
            held = [[plgpu.load(piece, layout=pieces, optimized=False) for piece in row] for row in held]
            h, dy, *rest = [[piece.astype(ACCUMULATOR) for piece in row] for row in held]
            total, factor = through_norm(h, dy, weights, width, eps, repeated)
            for index, part in enumerate(parts):
                past = [row[index] for row in rest]
                out_ref[here, part] = functools.reduce(jnp.add, past, total[index]).astype(out_ref.dtype)
            if together > 1:
                scale_ref[here] = factor
            else:
                # Mosaic GPU stores no vector of one element.
                scale_ref[first + group] = jnp.max(factor)

    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((count, columns), rows[0].dtype),
            jax.ShapeDtypeStruct((count,), ACCUMULATOR),
        ),
        grid=(ceil_div(count, together * groups),),
        grid_names=("tile",),
        kernel_name="rms_norm_gradient",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )(*rows, weight)


def through_norm(
    h: Sequence[Array],
    dy: Sequence[Array],
    weight: Sequence[Array],
    width: int,
    eps: float,
    repeated: Callable[[Array], Array],
) -> tuple[list[Array], Array]:
    """The gradients of rows, float32 and rounded before anything is added to them, and the rows' factors `[rows]`.

    Args:
        h: the pieces of the rows that were normalized, float32, in ascending order.
        dy: the gradients of the result, likewise.
        weight: the weight plus its offset, repeated in every row.
        width: elements of a row, over which means are taken.
        eps: what is added to the mean square.
        repeated: makes a piece of a vector `[rows]`, which it repeats in every column.
    """
    factor = lax.rsqrt(row_sums([rounded_squares(piece) for piece in h]) / width + eps)
    scale = repeated(factor)
    normalized = [piece * scale for piece in h]
    weighted = [piece * w for piece, w in zip(dy, weight, strict=True)]
    products = [a * b for a, b in zip(weighted, normalized, strict=True)]
    # The barriers have products rounded before anything is added to them.
    mean = repeated(row_sums(lax.optimization_barrier(products)) / width)
    along = lax.optimization_barrier([piece * mean for piece in normalized])
    return lax.optimization_barrier([scale * (w - a) for w, a in zip(weighted, along, strict=True)]), factor


def _factor(weight: Any, part: Any, offset: float, shape: tuple[int, int], pieces: Any) -> Array:
    """A piece of the weight plus its offset, repeated in every row."""
    vector = plgpu.load(weight.at[part], layout=pieces.reduce(0), optimized=False).astype(ACCUMULATOR)
    return broadcast(vector + offset, shape, 1, pieces)
