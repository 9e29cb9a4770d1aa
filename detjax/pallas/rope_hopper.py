"""Rotary position embedding on Hopper GPUs (Mosaic GPU), with the RMS norm of queries and keys before it.

A CTA turns some heads of some tokens: cosines and sines are loaded once for all of its heads, both halves of a head are
in one thread, and queries and keys are read where the fused projection left them.
"""

import dataclasses
import functools
import math
from itertools import accumulate
from typing import Final

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from detjax.contract import ACCUMULATOR, LANE_GROUP
from detjax.pallas import norm_hopper
from detjax.pallas.hopper import multiprocessors
from detjax.pallas.rows_hopper import WARP, WARPGROUP, layout, row_sums, squares, widened

LOADED_BYTES: Final = 64
"""Of x, at most, that a thread loads before it computes."""
EVEN_HALF: Final = 8
"""Columns of which a half head must be a multiple: the least that two threads load."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How heads and tokens are spread over CTAs; no bit depends on it."""

    threads: int
    """Threads that share a head."""
    tokens: int
    """Tokens of a CTA."""
    heads: int
    """Heads of each token in a CTA."""

    def __post_init__(self) -> None:
        if self.threads not in (2, 4, 8, 16, 32):
            raise ValueError(f"Schedule: threads is {self.threads}; accepted: 2, 4, 8, 16, 32")
        most = WARPGROUP // self.threads
        if not 1 <= self.tokens <= most or self.tokens & (self.tokens - 1):
            raise ValueError(f"Schedule: tokens is {self.tokens}; accepted: powers of two up to {most}")

    def check(self, tokens: int, heads: tuple[int, ...], width: int) -> None:
        """Returns if heads of this width, of so many tokens, can be worked on so."""
        columns = LANE_GROUP * self.threads
        if width % (2 * columns):
            raise ValueError(
                f"Schedule: {self.threads} threads a head of {width}; accepted: multiples of {2 * columns}"
            )
        if tokens < self.tokens:
            raise ValueError(f"Schedule: {self.tokens} tokens of a CTA; accepted: at most the {tokens} there are")
        if self.heads < 1 or any(count % self.heads for count in heads):
            raise ValueError(f"Schedule: {self.heads} heads of a CTA; accepted: divisors of {heads}")


def schedule(tokens: int, heads: tuple[int, ...], width: int, dtype: jax.typing.DTypeLike) -> Schedule:
    """The schedule for groups of heads, the width being a multiple of `2 * EVEN_HALF`."""
    half = width // 2
    threads = min(WARP, (half & -half) // LANE_GROUP)
    at_once = min(WARPGROUP // threads, 1 << (tokens.bit_length() - 1))
    loaded = width // threads * jnp.dtype(dtype).itemsize

    def fits(count: int) -> bool:
        ctas = -(-tokens // at_once) * sum(heads) // count
        return count * loaded <= LOADED_BYTES and ctas >= 4 * multiprocessors()

    counts = [count for count in (2, 4, 8) if math.gcd(*heads) % count == 0 and fits(count)]
    return Schedule(threads, at_once, max(counts, default=1))


_schedule = schedule


def forward(
    x: Array,
    cos: Array,
    sin: Array,
    *weights: Array,
    heads: tuple[int, ...],
    eps: float | None,
    schedule: Schedule | None = None,
) -> tuple[Array, ...]:
    """Groups of `heads` heads of `x [*B, T, N, K]`, first to last, rotated by their tokens' `cos, sin [*B, T, K / 2]`.

    With weights `[K]`, one for each group, the heads are RMS normalized and rounded before. Further heads are not read.
    """
    tokens, half = math.prod(x.shape[:-2]), x.shape[-1] // 2
    if padding := -half % EVEN_HALF:
        return _of_padded_halves(x, cos, sin, weights, heads, eps, padding)
    if schedule is None:
        schedule = _schedule(tokens, heads, 2 * half, x.dtype)
    schedule.check(tokens, heads, 2 * half)
    rows = x.reshape(tokens, *x.shape[-2:]), cos.reshape(tokens, half), sin.reshape(tokens, half)
    out = _kernel(*rows, weights, heads, eps, schedule)
    return tuple(y.reshape(*x.shape[:-2], *y.shape[-2:]) for y in out)


def _of_padded_halves(
    x: Array,
    cos: Array,
    sin: Array,
    weights: tuple[Array, ...],
    heads: tuple[int, ...],
    eps: float | None,
    padding: int,
) -> tuple[Array, ...]:
    """`forward` in separate steps: a padded half moves the columns behind it, so sums would be in another order."""
    ends = tuple(accumulate(heads))
    groups = jnp.split(x[..., : ends[-1], :], ends[:-1], axis=-2)
    if weights:
        assert eps is not None
        normalize = functools.partial(norm_hopper.forward, eps=eps, weight_offset=0.0)
        groups = [normalize(group, weight, None)[0] for group, weight in zip(groups, weights, strict=True)]
    x = jnp.concatenate(groups, axis=-2)
    half = x.shape[-1] // 2

    def padded(x: Array) -> Array:
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padding)])

    halves = padded(x.reshape(*x.shape[:-1], 2, half)).reshape(*x.shape[:-1], -1)
    out = forward(halves, padded(cos), padded(sin), heads=heads, eps=None)
    return tuple(y.reshape(*y.shape[:-1], 2, -1)[..., :half].reshape(*y.shape[:-1], -1) for y in out)


def _kernel(
    x: Array,
    cos: Array,
    sin: Array,
    weights: tuple[Array, ...],
    heads: tuple[int, ...],
    eps: float | None,
    schedule: Schedule,
) -> tuple[Array, ...]:
    tokens, _, width = x.shape
    columns = LANE_GROUP * schedule.threads
    shape = (schedule.tokens, columns)
    in_rows = layout(*shape[:1], schedule.threads)
    pieces = width // columns
    ends = tuple(accumulate(heads))

    def body(x_ref, cos_ref, sin_ref, *refs):
        weight_refs, out_refs = refs[: len(weights)], refs[len(weights) :]
        # The last CTA moves up to whole tokens: two CTAs then write the same bits to some.
        first = jnp.minimum(lax.axis_index("token") * schedule.tokens, tokens - schedule.tokens)
        first_head = lax.axis_index("head") * schedule.heads
        of_tokens = pl.ds(first, schedule.tokens)

        def in_piece(piece: int):
            return pl.ds(piece * columns, columns)

        def load(ref) -> Array:
            return plgpu.load(ref, layout=in_rows, optimized=False)

        def normalized(held: list[Array], w: list[Array]) -> list[Array]:
            wide = [h.astype(ACCUMULATOR) for h in held]
            assert eps is not None
            total = row_sums([squares(h) for h in wide])
            scale = widened(lax.rsqrt(total / width + eps), shape, 0, in_rows)
            return [(h * scale * w).astype(x.dtype) for h, w in zip(wide, w, strict=True)]

        def turn(group: int) -> None:
            start = ends[group] - heads[group]
            held = [
                [load(x_ref.at[of_tokens, first_head + head, in_piece(piece)]) for piece in range(pieces)]
                for head in range(schedule.heads)
            ]
            turns = [
                [load(ref.at[of_tokens, in_piece(piece)]) for piece in range(pieces // 2)] for ref in (cos_ref, sin_ref)
            ]
            if weights:
                parts = [weight_refs[group].at[in_piece(piece)] for piece in range(pieces)]
                loaded = [plgpu.load(part, layout=in_rows.reduce(0), optimized=False) for part in parts]
                # As in the norm alone, which adds its offset here.
                w = [widened(part.astype(ACCUMULATOR) + 0.0, shape, 1, in_rows) for part in loaded]
                held = [normalized(h, w) for h in held]
            for head, h in enumerate(held):
                y_ref, to_head = out_refs[group], first_head + head - start
                for piece, (c, s) in enumerate(zip(*turns, strict=True)):
                    a, b = (h[i].astype(ACCUMULATOR) for i in (piece, piece + pieces // 2))
                    # Of two products one is rounded behind a barrier, so only the other can be fused with the sum.
                    bs, as_ = lax.optimization_barrier((b * s, a * s))
                    y_ref[of_tokens, to_head, in_piece(piece)] = (a * c - bs).astype(x.dtype)
                    y_ref[of_tokens, to_head, in_piece(piece + pieces // 2)] = (b * c + as_).astype(x.dtype)

        for group, count in enumerate(heads):
            own = (first_head >= ends[group] - count) & (first_head < ends[group])
            pl.when(own)(functools.partial(turn, group))

    return plgpu.kernel(
        body,
        out_type=tuple(jax.ShapeDtypeStruct((tokens, count, width), x.dtype) for count in heads),
        grid=(-(-tokens // schedule.tokens), ends[-1] // schedule.heads),
        grid_names=("token", "head"),
        kernel_name="norm_rope" if weights else "rope",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            # No memory is both read and written, but for the last CTAs' common tokens.
            unsafe_no_auto_barriers=True,
        ),
    )(x, cos, sin, *weights)
