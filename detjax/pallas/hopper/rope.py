"""Rotary position embedding on Hopper GPUs (Mosaic GPU), after the RMS norm of queries and keys.

A CTA rotates some heads of some tokens. It loads cosines and sines once for all its heads, a thread has the same
columns of both halves of a head, so the rotation needs no exchange, and queries and keys are read from the output of
the fused projection.

`append_kv` also writes keys and values to the pages from which attention reads them. The slots of different tokens have
unrelated addresses, but the heads of one token have a constant stride. So a CTA of keys or values holds several heads
of a token where a CTA of queries holds several tokens of a head.
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

from detjax.contract import KV_BLOCK, LANE_GROUP
from detjax.operands.kv_pages import KVPages, Queries
from detjax.operands.kv_pages import append as append_in_plain_jax
from detjax.operands.numerics import ceil_div
from detjax.pallas.hopper import device, norm, rope_gradient
from detjax.pallas.hopper.device import WARP, WARPGROUP
from detjax.pallas.hopper.head_rows import HeadRows
from detjax.pallas.hopper.mosaic.barriers import commit_smem
from detjax.pallas.hopper.rows import NO_AUTO_BARRIERS

LOADED_BYTES: Final = 64
"""Most bytes of x that a thread loads before it computes."""
EVEN_HALF: Final = 8
"""Half a head is a multiple of this many columns, the fewest that two threads load."""

_THREADS: Final = (2, 4, 8, 16, 32)


@dataclasses.dataclass(frozen=True)
class Problem:
    """Heads to be rotated."""

    tokens: int
    heads: tuple[int, ...]
    """Heads of each returned group: queries, or queries and keys."""
    width: int
    """Elements of a head, a multiple of `2 * EVEN_HALF`."""
    dtype: jnp.dtype


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The distribution of heads and tokens over CTAs; no bit depends on it."""

    threads: int
    """Threads that share a head."""
    tokens: int
    """Tokens of a CTA."""
    heads: int
    """Heads of each token in a CTA."""

    def __post_init__(self) -> None:
        """Raises ValueError if the schedule fits no problem."""
        if self.threads not in _THREADS:
            raise ValueError(f"Schedule: threads is {self.threads}; accepted: {', '.join(map(str, _THREADS))}")
        limit = WARPGROUP // self.threads
        if not 1 <= self.tokens <= limit or self.tokens & (self.tokens - 1):
            raise ValueError(f"Schedule: tokens is {self.tokens}; accepted: powers of two up to {limit}")

    def check(self, problem: Problem) -> None:
        """Raises ValueError if a kernel of this schedule cannot compute the problem."""
        columns = 2 * LANE_GROUP * self.threads
        if problem.width % columns:
            raise ValueError(
                f"Schedule: {self.threads} threads for a head of {problem.width}; accepted: multiples of {columns}"
            )
        if problem.tokens < self.tokens:
            raise ValueError(
                f"Schedule: {self.tokens} tokens of a CTA; accepted: at most the {problem.tokens} tokens of the problem"
            )
        if self.heads < 1 or any(count % self.heads for count in problem.heads):
            raise ValueError(f"Schedule: {self.heads} heads of a CTA; accepted: common divisors of {problem.heads}")


gradients = rope_gradient.gradients
serves_gradients = rope_gradient.serves


def default_schedule(problem: Problem) -> Schedule:
    """Returns the schedule for a problem."""
    half = problem.width // 2
    threads = min(WARP, (half & -half) // LANE_GROUP)
    at_once = min(WARPGROUP // threads, 1 << (problem.tokens.bit_length() - 1))
    loaded = problem.width // threads * problem.dtype.itemsize

    def fits(count: int) -> bool:
        ctas = ceil_div(problem.tokens, at_once) * sum(problem.heads) // count
        return count * loaded <= LOADED_BYTES and ctas >= 4 * device.multiprocessors()

    counts = [count for count in (2, 4, 8) if math.gcd(*problem.heads) % count == 0 and fits(count)]
    return Schedule(threads, at_once, max(counts, default=1))


def forward(
    x: Array,
    angles: tuple[Array, Array],
    *weights: Array,
    heads: tuple[int, ...],
    eps: float | None,
    norm_offset: float = 0.0,
    schedule: Schedule | None = None,
) -> tuple[Array, ...]:
    """Rotates groups of heads, and returns `[*B, T, heads[i], K]` for each group.

    Args:
        x: `[*B, T, N, K]`; the groups are its first heads. Other heads are not read.
        angles: cosines and sines of the tokens' angles, float32 `[*B, T, K / 2]`.
        weights: `[K]` for each group; if given, heads are RMS normalized and rounded before they are rotated.
        heads: the number of heads of each group.
        eps: the norm's epsilon; None without weights.
        norm_offset: added to the weight by the norm.
        schedule: default: `default_schedule`'s.
    """
    tokens, half = math.prod(x.shape[:-2]), x.shape[-1] // 2
    if padding := -half % EVEN_HALF:
        return _forward_with_padded_halves(x, angles, weights, heads, _Norm(eps, norm_offset), padding)
    problem = Problem(tokens, heads, 2 * half, x.dtype)
    schedule = schedule or default_schedule(problem)
    schedule.check(problem)
    cos, sin = (y.reshape(tokens, half) for y in angles)
    operands = _Operands(x.reshape(tokens, *x.shape[-2:]), cos, sin, weights)
    out = _kernel(_Division(problem, schedule), operands, _Norm(eps, norm_offset))
    return tuple(y.reshape(*x.shape[:-2], *y.shape[-2:]) for y in out)


def append_kv(
    x: Array,
    angles: tuple[Array, Array],
    *weights: Array,
    kv: KVPages,
    queries: Queries,
    eps: float | None,
    norm_offset: float = 0.0,
    schedule: Schedule | None = None,
) -> tuple[Array, KVPages]:
    """Returns rotated queries, and the pages with the rotated keys and the values of `x [B, T, H + 2 h, K]`.

    `kv_pages.places` defines which tokens are written, and where. The schedule's heads apply to queries, its tokens to
    all CTAs.
    """
    batch, tokens, all_heads, width = x.shape
    kv_heads = kv.kv_heads
    heads = all_heads - 2 * kv_heads, kv_heads
    if width // 2 % EVEN_HALF:
        q, k = forward(x, angles, *weights, heads=heads, eps=eps, norm_offset=norm_offset)
        return q, append_in_plain_jax(kv, k, x[:, :, sum(heads) :], queries)
    problem = Problem(batch * tokens, heads[:1], width, x.dtype)
    schedule = schedule or default_schedule(problem)
    schedule.check(problem)
    # References let the kernel write to the arrays themselves: the pages are neither copied nor read.
    k_pages, v_pages = (jax.new_ref(pages) for pages in kv.numbers)
    cache = _Cache(k_pages, v_pages, queries.page_table, queries.start, queries.count)
    x, cos, sin = (y.reshape(batch * tokens, *y.shape[2:]) for y in (x, *angles))
    operands, formula = _Operands(x, cos, sin, weights), _Norm(eps, norm_offset)
    (q,) = _kernel(_Division(problem, schedule, kv_heads), operands, formula, cache)
    kv = KVPages(jax.freeze(cache.k_pages), jax.freeze(cache.v_pages))
    return q.reshape(batch, tokens, *q.shape[1:]), kv


def _forward_with_padded_halves(
    x: Array,
    angles: tuple[Array, Array],
    weights: tuple[Array, ...],
    heads: tuple[int, ...],
    formula: "_Norm",
    padding: int,
) -> tuple[Array, ...]:
    """Runs `forward` in separate steps: padding a half moves the columns after it, which would reorder the row sums."""
    ends = tuple(accumulate(heads))
    groups = jnp.split(x[..., : ends[-1], :], ends[:-1], axis=-2)
    if weights:
        assert formula.eps is not None
        normalize = functools.partial(norm.forward, eps=formula.eps, weight_offset=formula.offset)
        groups = [normalize(group, weight, None)[0] for group, weight in zip(groups, weights, strict=True)]
    x = jnp.concatenate(groups, axis=-2)
    half = x.shape[-1] // 2

    def padded(x: Array) -> Array:
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padding)])

    halves = padded(x.reshape(*x.shape[:-1], 2, half)).reshape(*x.shape[:-1], -1)
    cos, sin = angles
    out = forward(halves, (padded(cos), padded(sin)), heads=heads, eps=None)
    return tuple(y.reshape(*y.shape[:-1], 2, -1)[..., :half].reshape(*y.shape[:-1], -1) for y in out)


class _Norm(NamedTuple):
    """The constants of the norms."""

    eps: float | None
    """Added to the mean square; None: no norms."""
    offset: float
    """Added to the weight."""


class _Operands(NamedTuple):
    """The input arrays, or references to them in the kernel."""

    x: Any
    """Heads `[tokens, heads, K]`."""
    cos: Any
    """`[tokens, K / 2]`."""
    sin: Any
    """`[tokens, K / 2]`."""
    weights: tuple[Any, ...]
    """`[K]` for each group, or none."""


class _Cache(NamedTuple):
    """The pages for keys and values, and where tokens are: `append_kv`'s arguments, or references in the kernel."""

    k_pages: Any
    v_pages: Any
    page_table: Any
    q_start: Any
    q_length: Any

    def place(self, token: Array, tokens: int) -> tuple[Array, Array, Array]:
        """Returns True if a token is written, its page and its slot in the page.

        Tokens are numbered over all requests; each has `tokens` tokens.
        """
        request, index = lax.div(token, jnp.int32(tokens)), lax.rem(token, jnp.int32(tokens))
        position = self.q_start[request] + index
        last_block = self.page_table.shape[1] - 1
        block = lax.max(lax.min(lax.div(position, jnp.int32(KV_BLOCK)), jnp.int32(last_block)), jnp.int32(0))
        page = self.page_table[request, block]
        written = (index < self.q_length[request]) & (position >= 0) & (position < (last_block + 1) * KV_BLOCK)
        written = written & (page >= 0) & (page < self.k_pages.shape[0])
        return written, page, lax.rem(position, jnp.int32(KV_BLOCK))


@dataclasses.dataclass(frozen=True)
class _Division:
    """The division of heads among the CTAs that share `schedule.tokens` tokens.

    The first CTAs rotate the returned groups of heads. If there are key heads to append, `kv_ctas` CTAs of keys follow,
    then as many CTAs of values. These work on *units*: `unit_heads` heads of one token.
    """

    problem: Problem
    schedule: Schedule
    kv_heads: int = 0
    """Key heads that are appended to a cache, and as many value heads; 0: none."""

    @property
    def ends(self) -> tuple[int, ...]:
        """The end of each group of heads; keys to append are the last group."""
        return tuple(accumulate(self.problem.heads + ((self.kv_heads,) if self.kv_heads else ())))

    @property
    def rotating_ctas(self) -> int:
        return sum(self.problem.heads) // self.schedule.heads

    @property
    def unit_heads(self) -> int:
        """Heads of a unit, the most that a warpgroup holds at once."""
        return min(WARPGROUP // self.schedule.threads, self.kv_heads & -self.kv_heads)

    @property
    def units_per_token(self) -> int:
        return self.kv_heads // self.unit_heads

    @property
    def units(self) -> int:
        """Units of a CTA, 1 or 2: it loads all of them before it computes, and more would exceed queries' registers."""
        return math.gcd(self.schedule.heads, self.schedule.tokens * self.units_per_token, 2)

    @property
    def kv_ctas(self) -> int:
        """CTAs of keys, and of values."""
        return self.schedule.tokens * self.units_per_token // self.units if self.kv_heads else 0


def _kernel(division: _Division, operands: _Operands, formula: _Norm, cache: _Cache | None = None) -> tuple[Array, ...]:
    """Returns the rotated groups of heads. With a cache, keys and values are written to it."""
    problem, schedule = division.problem, division.schedule
    x, cos, sin, weights = operands

    def body(x_ref: Any, cos_ref: Any, sin_ref: Any, *refs: Any) -> None:
        weight_refs, cache_refs = refs[: len(weights)], refs[len(weights) : len(refs) - len(problem.heads)]
        out_refs = refs[len(refs) - len(problem.heads) :]
        cache = _Cache(*cache_refs) if cache_refs else None
        _Cta(division, _Operands(x_ref, cos_ref, sin_ref, weight_refs), formula, out_refs, cache).run()

    return plgpu.kernel(
        body,
        out_type=tuple(
            jax.ShapeDtypeStruct((problem.tokens, count, problem.width), problem.dtype) for count in problem.heads
        ),
        grid=(ceil_div(problem.tokens, schedule.tokens), division.rotating_ctas + 2 * division.kv_ctas),
        grid_names=("token", "head"),
        kernel_name=("norm_" if weights else "") + "rope" + ("" if cache is None else "_append_kv"),
        compiler_params=NO_AUTO_BARRIERS,
    )(x, cos, sin, *weights, *(cache or ()))


class _Cta:
    """One CTA, which rotates heads of one group, or appends keys, or appends values."""

    def __init__(
        self,
        division: _Division,
        operands: _Operands,
        formula: _Norm,
        out: tuple[Any, ...],
        cache: _Cache | None,
    ) -> None:
        self.division, self.problem, self.schedule = division, division.problem, division.schedule
        self.operands, self.out, self.cache = operands, out, cache
        self.formula = formula
        # The last CTA shifts back so that all its tokens exist: two CTAs then write the same bits to some.
        last_first = self.problem.tokens - self.schedule.tokens
        self.first = jnp.minimum(lax.axis_index("token") * self.schedule.tokens, last_first)
        self.cta = lax.axis_index("head")

    def run(self) -> None:
        """Runs the CTA's role, which follows from its index."""
        division, cta, heads = self.division, self.cta, self.schedule.heads
        for group, count in enumerate(self.problem.heads):
            end = division.ends[group]
            has_group = (cta * heads >= end - count) & (cta * heads < end)
            pl.when(has_group)(functools.partial(self.rotate_group, group))
        if self.cache is not None:
            for index, append in enumerate((self.append_keys, self.append_values)):
                kv_cta = cta - (division.rotating_ctas + index * division.kv_ctas)
                has_role = (kv_cta >= 0) & (kv_cta < division.kv_ctas)
                pl.when(has_role)(functools.partial(append, self.cache, kv_cta * division.units))

    def rotate_group(self, group: int) -> None:
        """Normalizes and rotates `schedule.heads` heads of the tokens, and stores them."""
        # All loads are issued before the first head is computed. Angles and weight are loaded once for all heads.
        rows = HeadRows(self.schedule.tokens, self.schedule.threads)
        tokens, first_head = pl.ds(self.first, self.schedule.tokens), self.cta * self.schedule.heads
        heads = [rows.load(self.operands.x, tokens, first_head + head) for head in range(self.schedule.heads)]
        cos, sin = (rows.load(ref, tokens) for ref in (self.operands.cos, self.operands.sin))
        weight = self.load_weight(rows, group)
        for index, head in enumerate(self.normalize(rows, heads, weight)):
            out_head = first_head + index - (self.division.ends[group] - self.problem.heads[group])
            rows.store(rows.rotate(head, cos, sin), self.out[group], tokens, out_head)

    def append_keys(self, cache: _Cache, first_unit: Array) -> None:
        """Normalizes and rotates units of keys, and writes them to the pages of their tokens."""
        units = _Units(self, cache, first_unit)
        keys = units.load(self.operands.x, self.division.ends[-2])
        rows = units.rows
        angles = [[rows.load_vector(ref, token) for ref in self.operands[1:3]] for token in units.tokens]
        weight = self.load_weight(rows, len(self.problem.heads))
        units.fence()
        keys = [
            rows.rotate(key, *([rows.spread(part) for part in parts] for parts in pair))
            for key, pair in zip(self.normalize(rows, keys, weight), angles, strict=True)
        ]
        units.store(keys, cache.k_pages)

    def append_values(self, cache: _Cache, first_unit: Array) -> None:
        """Writes units of values to the pages of their tokens."""
        units = _Units(self, cache, first_unit)
        values = units.load(self.operands.x, self.division.ends[-1])
        units.fence()
        units.store(values, cache.v_pages)

    def load_weight(self, rows: "HeadRows", group: int) -> list[Array]:
        """Returns the pieces of a group's norm weight; an empty list without norms."""
        return rows.load_vector(self.operands.weights[group]) if self.operands.weights else []

    def normalize(self, rows: "HeadRows", heads: list[list[Array]], weight: list[Array]) -> list[list[Array]]:
        """Returns the RMS normalized and rounded heads; the heads themselves without norms."""
        if not weight:
            return heads
        assert self.formula.eps is not None
        return [rows.normalize(head, weight, self.formula.eps, self.formula.offset) for head in heads]


class _Units:
    """The units of keys or values that a CTA appends: their tokens, heads and places in the cache."""

    def __init__(self, cta: _Cta, cache: _Cache, first_unit: Array) -> None:
        division = cta.division
        self.heads_at_once, units_per_token = division.unit_heads, jnp.int32(division.units_per_token)
        self.rows = HeadRows(division.unit_heads, division.schedule.threads)
        units = [first_unit + unit for unit in range(division.units)]
        self.tokens = [cta.first + lax.div(unit, units_per_token) for unit in units]
        self.heads = [lax.rem(unit, units_per_token) * division.unit_heads for unit in units]
        tokens_per_request = division.problem.tokens // cache.page_table.shape[0]
        self.places = [cache.place(token, tokens_per_request) for token in self.tokens]

    def load(self, x: Any, first_head: int) -> list[list[Array]]:
        """Returns the units' heads, counted from a head of x."""
        return [
            self.rows.load(x, token, pl.ds(first_head + head, self.heads_at_once))
            for token, head in zip(self.tokens, self.heads, strict=True)
        ]

    def fence(self) -> None:
        """Keeps the compiler from moving the loads into the branch that writes the token.

        ptxas would do so, and the loads would start only when the page is known. It moves no load across a barrier.
        """
        commit_smem()

    def store(self, units: list[list[Array]], pages: Any) -> None:
        """Writes units to the pages of their tokens."""
        for unit, first, (written, page, slot) in zip(units, self.heads, self.places, strict=True):
            heads = pl.ds(first, self.heads_at_once)
            pl.when(written)(functools.partial(self.rows.store, unit, pages, page, heads, slot))
