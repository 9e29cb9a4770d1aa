"""Rotary position embedding on Hopper GPUs (Mosaic GPU), with the RMS norm of queries and keys before it.

A CTA turns some heads of some tokens: cosines and sines are loaded once for all of its heads, both halves of a head are
in one thread, and queries and keys are read where the fused projection left them.

`append_kv` writes keys and values where attention reads them, in pages. There tokens have addresses that nothing
relates to one another, but the heads of one token lie at one stride: a CTA of keys or values holds heads where a CTA of
queries holds tokens.
"""

import dataclasses
import functools
import math
from itertools import accumulate
from typing import Any, Final, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from detjax.contract import ACCUMULATOR, KV_BLOCK, LANE_GROUP
from detjax.pallas.hopper import device, norm
from detjax.pallas.hopper.device import WARP, WARPGROUP
from detjax.pallas.hopper.rows import broadcast, layout, rounded_squares, row_sums
from detjax.portable import pages as portable_pages

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
        return count * loaded <= LOADED_BYTES and ctas >= 4 * device.multiprocessors()

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


def append_kv(
    x: Array,
    cos: Array,
    sin: Array,
    *weights: Array,
    k_pages: Array,
    v_pages: Array,
    page_table: Array,
    q_start: Array,
    q_length: Array,
    eps: float | None,
    schedule: Schedule | None = None,
) -> tuple[Array, Array, Array]:
    """`forward` of the queries in `x [B, T, H + 2 h, K]`, and pools `[P, h, S, K]` with its keys, turned, and values.

    Token `t < q_length[b]` of request `b` goes to position `q_start[b] + t`, the others nowhere: see `portable.pages`.
    A schedule's heads are those of queries, its tokens those of all CTAs; see `_kernel` for keys and values.
    """
    batch, tokens, all_heads, width = x.shape
    kv_heads = k_pages.shape[1]
    heads = all_heads - 2 * kv_heads, kv_heads
    if width // 2 % EVEN_HALF:
        q, k = forward(x, cos, sin, *weights, heads=heads, eps=eps)
        new = k, x[:, :, sum(heads) :]
        k_pages, v_pages = portable_pages.append((k_pages, v_pages), new, page_table, q_start, q_length)
        return q, k_pages, v_pages
    if schedule is None:
        schedule = _schedule(batch * tokens, heads[:1], width, x.dtype)
    schedule.check(batch * tokens, heads[:1], width)
    # A kernel that is given references writes into what it is given: a pool is not copied, nor read.
    cache = _Cache(jax.new_ref(k_pages), jax.new_ref(v_pages), page_table, q_start, q_length)
    x, cos, sin = (y.reshape(batch * tokens, *y.shape[2:]) for y in (x, cos, sin))
    (q,) = _kernel(x, cos, sin, weights, heads, eps, schedule, cache)
    return q.reshape(batch, tokens, *q.shape[1:]), jax.freeze(cache.k_pages), jax.freeze(cache.v_pages)


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
        normalize = functools.partial(norm.forward, eps=eps, weight_offset=0.0)
        groups = [normalize(group, weight, None)[0] for group, weight in zip(groups, weights, strict=True)]
    x = jnp.concatenate(groups, axis=-2)
    half = x.shape[-1] // 2

    def padded(x: Array) -> Array:
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padding)])

    halves = padded(x.reshape(*x.shape[:-1], 2, half)).reshape(*x.shape[:-1], -1)
    out = forward(halves, padded(cos), padded(sin), heads=heads, eps=None)
    return tuple(y.reshape(*y.shape[:-1], 2, -1)[..., :half].reshape(*y.shape[:-1], -1) for y in out)


class _Cache(NamedTuple):
    """Where keys and values go: `append_kv`'s arguments, or references to them."""

    k_pages: Any
    v_pages: Any
    page_table: Any
    q_start: Any
    q_length: Any

    def place(self, token: Array, tokens: int) -> tuple[Array, Array, Array]:
        """Whether a token is written, its page and its slot there; tokens are counted from the first request's on."""
        request, index = lax.div(token, jnp.int32(tokens)), lax.rem(token, jnp.int32(tokens))
        position = self.q_start[request] + index
        last_block = self.page_table.shape[1] - 1
        block = lax.max(lax.min(lax.div(position, jnp.int32(KV_BLOCK)), jnp.int32(last_block)), jnp.int32(0))
        page = self.page_table[request, block]
        written = (index < self.q_length[request]) & (position >= 0) & (position < (last_block + 1) * KV_BLOCK)
        written = written & (page >= 0) & (page < self.k_pages.shape[0])
        return written, page, lax.rem(position, jnp.int32(KV_BLOCK))


class _Rows:
    """Rows of heads in the registers of a warpgroup, each row in pieces that its threads hold side by side."""

    def __init__(self, count: int, threads: int) -> None:
        self.columns = LANE_GROUP * threads
        self.shape = (count, self.columns)
        self.layout = layout(count, threads)

    def at(self, ref: Any, *where: Any) -> list[Any]:
        """The pieces of what lies at an index of all axes but the last."""
        return [ref.at[(*where, pl.ds(i, self.columns))] for i in range(0, ref.shape[-1], self.columns)]

    def load(self, ref: Any, *where: Any) -> list[Array]:
        return [plgpu.load(piece, layout=self.layout, optimized=False) for piece in self.at(ref, *where)]

    def load_vector(self, ref: Any, *where: Any) -> list[Array]:
        """What is the same in every row."""
        return [plgpu.load(part, layout=self.layout.reduce(0), optimized=False) for part in self.at(ref, *where)]

    def spread(self, vector: Array, axis: int = 1) -> Array:
        return broadcast(vector, self.shape, axis, self.layout)

    def normalized(self, held: list[Array], weight: list[Array], eps: float) -> list[Array]:
        # As in the norm alone, which adds its offset here.
        w = [self.spread(part.astype(ACCUMULATOR) + 0.0) for part in weight]
        wide = [h.astype(ACCUMULATOR) for h in held]
        total = row_sums([rounded_squares(h) for h in wide])
        scale = self.spread(lax.rsqrt(total / (len(held) * self.columns) + eps), axis=0)
        return [(h * scale * w).astype(held[0].dtype) for h, w in zip(wide, w, strict=True)]

    def turned(self, held: list[Array], cos: list[Array], sin: list[Array]) -> list[Array]:
        firsts, seconds = [], []
        halves = held[: len(cos)], held[len(cos) :]
        for *pair, c, s in zip(*halves, cos, sin, strict=True):
            a, b = (h.astype(ACCUMULATOR) for h in pair)
            # Of two products one is rounded behind a barrier, so only the other can be fused with the sum.
            bs, as_ = lax.optimization_barrier((b * s, a * s))
            firsts.append((a * c - bs).astype(held[0].dtype))
            seconds.append((b * c + as_).astype(held[0].dtype))
        return firsts + seconds

    def store(self, pieces: list[Array], ref: Any, *where: Any) -> None:
        for piece, to in zip(pieces, self.at(ref, *where), strict=True):
            to[...] = piece


def _kernel(
    x: Array,
    cos: Array,
    sin: Array,
    weights: tuple[Array, ...],
    heads: tuple[int, ...],
    eps: float | None,
    schedule: Schedule,
    cache: _Cache | None = None,
) -> tuple[Array, ...]:
    """The groups of heads, turned; of queries, keys and values with a cache, the queries alone."""
    tokens, _, width = x.shape
    ends = tuple(accumulate(heads))
    returned = heads if cache is None else heads[:1]
    ctas = sum(returned) // schedule.heads

    # A CTA of keys, or of values, has one unit, `kv_rows` heads of a token, or two: it loads all before it computes,
    # and more would take more registers than queries do.
    kv_heads = heads[-1]
    kv_rows = min(WARPGROUP // schedule.threads, kv_heads & -kv_heads)
    of_token = kv_heads // kv_rows
    units = math.gcd(schedule.heads, schedule.tokens * of_token, 2)
    kv_ctas = 0 if cache is None else schedule.tokens * of_token // units

    def body(x_ref: Any, cos_ref: Any, sin_ref: Any, *refs: Any) -> None:
        weight_refs, out_refs = refs[: len(weights)], refs[len(refs) - len(returned) :]
        # The last CTA moves up to whole tokens: two CTAs then write the same bits to some.
        first = jnp.minimum(lax.axis_index("token") * schedule.tokens, tokens - schedule.tokens)
        cta = lax.axis_index("head")

        def normalized(rows: _Rows, held: list[list[Array]], weight: list[Array]) -> list[list[Array]]:
            if not weight:
                return held
            assert eps is not None
            return [rows.normalized(h, weight, eps) for h in held]

        def turn(group: int) -> None:
            rows, of_tokens = _Rows(schedule.tokens, schedule.threads), pl.ds(first, schedule.tokens)
            first_head = cta * schedule.heads
            held = [rows.load(x_ref, of_tokens, first_head + head) for head in range(schedule.heads)]
            turns = [rows.load(ref, of_tokens) for ref in (cos_ref, sin_ref)]
            weight = rows.load_vector(weight_refs[group]) if weights else []
            for head, h in enumerate(normalized(rows, held, weight)):
                to_head = first_head + head - (ends[group] - heads[group])
                rows.store(rows.turned(h, *turns), out_refs[group], of_tokens, to_head)

        def append(first_unit: Array, first_head: int, is_key: bool) -> None:
            """Heads of x to the pages of their tokens."""
            assert cache is not None
            to = _Cache(*refs[len(weights) : len(refs) - len(returned)])
            rows = _Rows(kv_rows, schedule.threads)
            at_units = [first_unit + unit for unit in range(units)]
            at_tokens = [first + lax.div(unit, jnp.int32(of_token)) for unit in at_units]
            at_heads = [lax.rem(unit, jnp.int32(of_token)) * kv_rows for unit in at_units]
            places = [to.place(token, tokens // cache.page_table.shape[0]) for token in at_tokens]
            held = [
                rows.load(x_ref, token, pl.ds(first_head + head, kv_rows))
                for token, head in zip(at_tokens, at_heads, strict=True)
            ]
            turns, weight = [], []
            if is_key:
                turns = [[rows.load_vector(ref, token) for ref in (cos_ref, sin_ref)] for token in at_tokens]
                weight = rows.load_vector(weight_refs[1]) if weights else []
            # A barrier, which no load is moved across: else the compiler would begin them when the page is known.
            plgpu.commit_smem()
            if is_key:
                held = [
                    rows.turned(h, *([rows.spread(part) for part in parts] for parts in turn))
                    for h, turn in zip(normalized(rows, held, weight), turns, strict=True)
                ]
            for h, head, (written, page, slot) in zip(held, at_heads, places, strict=True):

                @pl.when(written)
                def _(h: list[Array] = h, head: Array = head, page: Array = page, slot: Array = slot) -> None:
                    rows.store(h, to.k_pages if is_key else to.v_pages, page, pl.ds(head, kv_rows), slot)

        for group, count in enumerate(returned):
            own = (cta * schedule.heads >= ends[group] - count) & (cta * schedule.heads < ends[group])
            pl.when(own)(functools.partial(turn, group))
        if cache is not None:
            for index, is_key in enumerate((True, False)):
                of_kind = cta - (ctas + index * kv_ctas)
                own = (of_kind >= 0) & (of_kind < kv_ctas)
                pl.when(own)(functools.partial(append, of_kind * units, ends[index], is_key))

    return plgpu.kernel(
        body,
        out_type=tuple(jax.ShapeDtypeStruct((tokens, count, width), x.dtype) for count in returned),
        grid=(-(-tokens // schedule.tokens), ctas + 2 * kv_ctas),
        grid_names=("token", "head"),
        kernel_name=("norm_" if weights else "") + "rope" + ("" if cache is None else "_append_kv"),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            # No memory is both read and written, but for the last CTAs' common tokens.
            unsafe_no_auto_barriers=True,
        ),
    )(x, cos, sin, *weights, *(cache or ()))
