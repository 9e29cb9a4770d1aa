"""Gradients of q/k norm and rotary embedding on Hopper GPUs (Mosaic GPU), in one pass over the heads.

A CTA takes the rows of one step of a norm's weight, `WEIGHT_GRADIENT_TOKENS` heads of one or several tokens. It rotates
their gradients back, propagates them through the norm, and adds the step's contribution to the weight.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from detjax.contract import ACCUMULATOR, LANE_GROUP, WEIGHT_GRADIENT_TOKENS
from detjax.pallas.hopper.device import WARPGROUP
from detjax.pallas.hopper.head_rows import HeadRows
from detjax.pallas.hopper.norm_gradient import Piece, means, through_norm
from detjax.pallas.hopper.rows import layout
from detjax.pallas.hopper.token_sums import chains


def serves(x: Array, heads: tuple[int, ...]) -> bool:
    """Returns True if the kernel computes the gradients of these groups of heads of `x [*B, T, N, K]`."""
    tokens, width = x.size // (x.shape[-2] * x.shape[-1]), x.shape[-1]
    is_even = width & (width - 1) == 0 and 4 * LANE_GROUP <= width <= WARPGROUP * LANE_GROUP
    return is_even and all(tokens * count % WEIGHT_GRADIENT_TOKENS == 0 for count in heads)


def gradients(
    x: Array,
    angles: tuple[Array, Array],
    weights: tuple[Array, ...],
    rotated: tuple[Array, ...],
    sums: tuple[Array, ...],
    *,
    eps: float,
    norm_offset: float = 0.0,
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Returns the gradients of groups of heads before the norm, and the next sums of the norms' weights.

    Args:
        x: a projection `[*B, T, N, K]`, whose first heads are the groups.
        angles: cosines and sines of the inverse rotation, float32 `[*B, T, K / 2]`.
        weights: the norm's weight `[K]` for each group.
        rotated: the gradients of the rotated groups, `[*B, T, heads, K]` in x's dtype.
        sums: the weights' running sums, float32 `[K]`.
        eps: added to the mean square by the norms.
        norm_offset: added to the weights by the norms.
    """
    width = x.shape[-1]
    flat = [y.reshape(-1, *y.shape[-2:]) for y in (x, *rotated)]
    results = _kernel(flat[0], [y.reshape(-1, width // 2) for y in angles], weights, flat[1:], eps, norm_offset)
    count = len(weights)
    before = tuple(y.reshape(gradient.shape) for y, gradient in zip(results[:count], rotated, strict=True))
    return before, chains(sums, results[count:])


def _kernel(
    x: Array, angles: list[Array], weights: tuple[Array, ...], gradients: list[Array], eps: float, norm_offset: float
) -> Any:
    """Returns the gradients of the groups `[T, heads, K]`, and each step's contributions to the weights, `[steps,
    K]`."""
    tokens, _, width = x.shape
    heads = [gradient.shape[1] for gradient in gradients]
    steps = [tokens * count // WEIGHT_GRADIENT_TOKENS for count in heads]
    line = layout(1, width // LANE_GROUP)

    def body(x_ref: Any, cos_ref: Any, sin_ref: Any, *refs: Any) -> None:
        by_kind = [refs[i : i + len(heads)] for i in range(0, 4 * len(heads), len(heads))]
        weight_refs, gradient_refs, out_refs, sum_refs = by_kind
        terms = refs[-1]
        cta = lax.axis_index("step")

        def take(group: int) -> None:
            step = cta - sum(steps[:group])
            count, first_head = heads[group], sum(heads[:group])
            together = min(2 * WARPGROUP * LANE_GROUP // width, count & -count, WEIGHT_GRADIENT_TOKENS)
            rows = HeadRows(together, width // 2 // LANE_GROUP)
            stored = rows.load_vector(weight_refs[group])
            weight = [rows.spread(part.astype(ACCUMULATOR) + norm_offset) for part in stored]
            for first in range(0, WEIGHT_GRADIENT_TOKENS, together):
                row = step * WEIGHT_GRADIENT_TOKENS + first
                token, head = lax.div(row, jnp.int32(count)), lax.rem(row, jnp.int32(count))
                dy = rows.load(gradient_refs[group], token, pl.ds(head, together))
                h = rows.load(x_ref, token, pl.ds(first_head + head, together))
                cos, sin = ([rows.spread(part) for part in rows.load_vector(ref, token)] for ref in (cos_ref, sin_ref))
                dy = [piece.astype(ACCUMULATOR) for piece in rows.rotate(dy, cos, sin)]
                h = [piece.astype(ACCUMULATOR) for piece in h]
                pieces = [Piece(a, b, lambda w=w: w) for a, b, w in zip(h, dy, weight, strict=True)]
                scale, mean = (
                    rows.spread(y, axis=0) for y in means(pieces, width, eps, functools.partial(rows.spread, axis=0))
                )
                dx = [through_norm(piece, scale, mean).astype(x.dtype) for piece in pieces]
                rows.store(dx, out_refs[group], token, pl.ds(head, together))
                products = [piece * (along * scale) for piece, along in zip(dy, h, strict=True)]
                rows.store(products, terms, pl.ds(first, together))
            # The contract adds the step's rows left to right. They are in different threads, so they pass through
            # shared memory; the automatic barriers separate the stores from these loads.
            lines = [terms.at[pl.ds(row, 1)] for row in range(WEIGHT_GRADIENT_TOKENS)]
            rows_of_terms = [plgpu.load(row, layout=line, optimized=False) for row in lines]
            sum_refs[group][pl.ds(step, 1)] = functools.reduce(jnp.add, rows_of_terms)

        for group, count in enumerate(steps):
            first = sum(steps[:group])
            pl.when((cta >= first) & (cta < first + count))(functools.partial(take, group))

    return plgpu.kernel(
        body,
        out_type=[
            *(jax.ShapeDtypeStruct(gradient.shape, x.dtype) for gradient in gradients),
            *(jax.ShapeDtypeStruct((count, width), ACCUMULATOR) for count in steps),
        ],
        scratch_types=[plgpu.SMEM((WEIGHT_GRADIENT_TOKENS, width), ACCUMULATOR)],
        grid=(sum(steps),),
        grid_names=("step",),
        kernel_name="norm_rope_gradient",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(x, *angles, *weights, *gradients)
