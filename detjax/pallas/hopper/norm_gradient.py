"""Gradients of RMS norm on Hopper GPUs (Mosaic GPU).

A CTA takes the rows of one step of the weight, `WEIGHT_GRADIENT_TOKENS` of them. A row stays in the registers of its
threads, as in the forward pass, and its two sums have the forward pass's order. What the step adds to the weight is
added in the same pass; see `token_sums` for the sum over steps.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from detjax.contract import ACCUMULATOR, LANE_GROUP, LANES, WEIGHT_GRADIENT_TOKENS
from detjax.numerics import flat_rows, round_up
from detjax.pallas.hopper.device import WARP, WARPGROUP
from detjax.pallas.hopper.rows import broadcast, layout, load_weight, rounded_squares, row_sums
from detjax.pallas.hopper.token_sums import chain
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
    count = len(rows[0])
    # Rows of zeros add zeros to the weight's gradient.
    missing = -count % WEIGHT_GRADIENT_TOKENS
    padded = [jnp.pad(x, ((0, missing), (0, padding))) for x in rows]
    total, step_sums = _row_gradients(padded, jnp.pad(weight, (0, padding)), width, eps, weight_offset)
    start = jnp.zeros(width, ACCUMULATOR) if weight_sum is None else weight_sum
    dweight = chain(jnp.pad(start, (0, padding)), step_sums)[:width]
    dh = total[:count, :width].reshape(h.shape)
    return dh, rounded(dweight, weight.dtype) if weight_sum is None else dweight


def _padded_width(width: int) -> int:
    """The least width from `width` on that the threads of a row divide evenly."""
    if width <= WARPGROUP:
        return max(16, 1 << (width - 1).bit_length())
    return round_up(width, WARPGROUP if width <= WARP_COLUMNS else LANES)


def _row_gradients(
    rows: Sequence[Array], weight: Array, width: int, eps: float, weight_offset: float
) -> tuple[Array, Array]:
    """The gradients `[M, D]` of rows, and what each step of rows adds to the weight's, `[steps, D]` float32.

    Args:
        rows: h, dy and perhaps dh, as `backward` has them, `[M, D]`.
        weight: `[D]`.
        width: elements of a row without its padding, over which means are taken.
        eps: what is added to the mean square.
        weight_offset: what is added to the weight.
    """
    count, columns = rows[0].shape
    threads = columns // LANE_GROUP if columns <= WARPGROUP else WARP if columns <= WARP_COLUMNS else WARPGROUP
    together = min(WARPGROUP // threads, WEIGHT_GRADIENT_TOKENS)
    pieces, shape = layout(together, threads), (together, LANE_GROUP * threads)
    repeated = functools.partial(broadcast, shape=shape, axis=0, layout=pieces)
    # What rows add lies in the registers of the threads that have these columns. Where several rows are worked on at
    # the same time, it passes through shared memory.
    line = shape[1] if together == 1 else math.gcd(columns, LANE_GROUP * WARPGROUP)
    lines, parts = ([pl.ds(start, size) for start in range(0, columns, size)] for size in (line, shape[1]))
    line_layout = layout(1, line // LANE_GROUP)

    def body(*refs: Any) -> None:
        *inputs, weight_ref, out_ref, sums_ref = refs[: len(rows) + 3]
        step = lax.axis_index("step")
        weights = [load_weight(weight_ref.at[part], weight_offset, shape, pieces) for part in parts]

        def take(group: Array, added: list[Array]) -> list[Array]:
            here = pl.ds(step * WEIGHT_GRADIENT_TOKENS + group * together, together)
            held = [[ref.at[here, part] for part in parts] for ref in inputs]
            held = [[plgpu.load(piece, layout=pieces, optimized=False) for piece in row] for row in held]
            h, dy, *rest = [[piece.astype(ACCUMULATOR) for piece in row] for row in held]
            total, factor = through_norm(h, dy, weights, width, eps, repeated)
            for index, part in enumerate(parts):
                past = [row[index] for row in rest]
                out_ref[here, part] = functools.reduce(jnp.add, past, total[index]).astype(out_ref.dtype)
            scale = repeated(factor)
            # The barrier has products rounded before they are added.
            terms = lax.optimization_barrier([a * (b * scale) for a, b in zip(dy, h, strict=True)])
            for row in [terms] if together == 1 else _rows_of_terms(terms, refs[-1], parts, lines, line_layout):
                added = [a + b for a, b in zip(added, row, strict=True)]
            return added

        # -0.0 plus a number is this number, whatever its sign.
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
        scratch_types=[] if together == 1 else [plgpu.SMEM((together, columns), ACCUMULATOR)],
        grid=(count // WEIGHT_GRADIENT_TOKENS,),
        grid_names=("step",),
        kernel_name="rms_norm_gradient",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )(*rows, weight)


def _rows_of_terms(
    terms: Sequence[Array], shared: Any, parts: Sequence[Any], lines: Sequence[Any], line_layout: Any
) -> list[list[Array]]:
    """Rows that lie in pieces over the threads of a row each, as rows that all threads of the warpgroup share.

    Args:
        terms: the pieces `[rows, columns]`.
        shared: room for the rows in shared memory.
        parts: the columns of each piece.
        lines: the columns of the pieces of the result.
        line_layout: their layout.
    """
    # All threads have read the rows before.
    plgpu.commit_smem()
    for part, piece in zip(parts, terms, strict=True):
        shared[:, part] = piece
    plgpu.commit_smem()
    places = [[shared.at[pl.ds(row, 1), part] for part in lines] for row in range(shared.shape[0])]
    return [[plgpu.load(place, layout=line_layout, optimized=False) for place in row] for row in places]


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
