"""The choice of experts for few tokens, and the places of their rows, in one kernel on Hopper GPUs (Mosaic GPU).

Decode steps have so few tokens that each of the many operations of `ops.softmax`, `ops.choose_experts` and
`ops.expert_rows` takes longer to start than to run. Here one CTA does it all in two phases:

1. Choice. Warpgroups take rows of logits. 2 to 32 threads hold a row, by the layouts of `rows`, whose sums have the
   contract's order. Softmax uses the formulas of `softmax.py`. The highest probability is taken as often as a token
   chooses, and the choices are sorted by id.
2. Places. Each thread of one warpgroup takes some choices. An expert has a bit for each token, so the rows before a
   token's are the lower bits that are set. The lanes of a warp add the sizes of groups.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from detjax.contract import ACCUMULATOR, LANE_GROUP
from detjax.operands.numerics import LOWEST, ceil_div, round_up
from detjax.pallas.hopper.device import WARP, WARPGROUP
from detjax.pallas.hopper.mosaic.barriers import sync
from detjax.pallas.hopper.mosaic.threads import (
    count_bits,
    load,
    meet,
    or_into,
    store,
    store_vector,
    sum_up_to,
    thread,
)
from detjax.pallas.hopper.rows import NO_AUTO_BARRIERS, broadcast, layout, row_sums
from detjax.pallas.softmax_formulas import exp_difference, row_constant

MAX_TOKENS: Final = 64
"""Tokens of a call: an expert has two words of `_BITS` bits for them."""
MAX_EXPERTS: Final = 512
MAX_CHOSEN: Final = 16
"""Experts that a token chooses at most; the kernel's text has all steps of the choice."""

_BITS: Final = 32
_MAX_WARPGROUPS: Final = 4
_MAX_HELD: Final = 32
"""Elements of a row that a thread holds at most, so that nothing spills."""
_NAN: Final = 0x7FFFFFFF
"""The bits of a NaN, the largest int32."""
_ALL_WARPGROUPS: Final = 15
"""The hardware's barrier at which all warpgroups meet; single warpgroups meet at the first ones."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """The shapes and options of a choice."""

    tokens: int
    experts: int
    """Experts that tokens choose from."""
    count: int
    """Experts that a token chooses."""
    normalized: bool
    local: int
    """Experts of this device."""
    unit: int
    """Groups of rows are padded to a multiple of this number."""
    rows: int
    """Rows of all groups with their padding, at most."""

    @property
    def width(self) -> int:
        """Columns of the padded logits: whole pieces of rows of some layout."""
        return round_up(self.experts, WARPGROUP) if self.experts > WARPGROUP // 2 else _power_of_two(self.experts)

    @property
    def served(self) -> bool:
        """True if the kernel serves the problem."""
        return self.tokens <= MAX_TOKENS and self.experts <= MAX_EXPERTS and self.count <= MAX_CHOSEN


def _power_of_two(size: int) -> int:
    return max(2 * LANE_GROUP, 1 << (size - 1).bit_length())


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The distribution of rows over threads; no bit depends on it."""

    threads: int
    """Threads that hold a row."""
    warpgroups: int
    """Warpgroups that take rows."""

    def rows_at_once(self, problem: Problem) -> int:
        """Returns the rows that a warpgroup holds."""
        return min(WARPGROUP // self.threads, 1 << (problem.tokens.bit_length() - 1))

    def check(self, problem: Problem) -> None:
        """Raises ValueError if the schedule does not fit the problem."""
        fitting = [threads for threads in (2, 4, 8, 16, 32) if problem.width % (LANE_GROUP * threads) == 0]
        if self.threads not in fitting:
            raise ValueError(
                f"Schedule: {self.threads} threads for rows of {problem.width} columns; accepted: "
                f"{', '.join(map(str, fitting))}"
            )
        if not 1 <= self.warpgroups <= _MAX_WARPGROUPS:
            raise ValueError(f"Schedule: warpgroups is {self.warpgroups}; accepted: 1 to {_MAX_WARPGROUPS}")


def default_schedule(problem: Problem) -> Schedule:
    """Returns the schedule for a problem: as many threads for a row as leave no row for a second turn."""
    for threads in (32, 16, 8, 4, 2):
        if problem.width % (LANE_GROUP * threads):
            continue
        tiles = ceil_div(problem.tokens, Schedule(threads, 1).rows_at_once(problem))
        chosen = Schedule(threads, min(tiles, _MAX_WARPGROUPS))
        if tiles <= _MAX_WARPGROUPS or problem.width > threads // 2 * _MAX_HELD:
            break
    return chosen  # pyright: ignore[reportPossiblyUnboundVariable]


def choose(
    logits: Array,
    present: Array | None,
    first: Array | None,
    *,
    problem: Problem,
    schedule: Schedule | None = None,
) -> tuple[Array, ...]:
    """Returns ids and weights `[N, count]`, and group sizes `[local]`, tokens `[rows]`, places
    `[N, count]` and tiles `[rows / unit + 1]`.

    See `detjax.ops.expert_choice`.

    Args:
        logits: float32 `[N, E]`.
        present: False for padding tokens, `[N]`.
        first: the first expert of this device, int32.
        problem: the shapes and options.
        schedule: default: `default_schedule`'s.
    """
    schedule = schedule or default_schedule(problem)
    schedule.check(problem)
    missing = problem.width - problem.experts
    logits = jnp.pad(logits, ((0, 0), (0, missing)), constant_values=-jnp.inf) if missing else logits
    optional = [None if x is None else x.astype(jnp.int32).reshape(-1) for x in (present, first)]
    given = [x for x in optional if x is not None]

    def body(logits: Any, *refs: Any) -> None:
        refs, scratch = refs[: -len(scratch_types)], refs[-len(scratch_types) :]
        operands, results = iter(refs[: len(given)]), refs[len(given) :]
        present, first = (None if x is None else next(operands) for x in optional)
        _Cta(problem, schedule, _Scratch(*scratch)).run(logits, present, first, _Results(*results))

    n, count, rows = problem.tokens, problem.count, problem.rows
    scratch_types = [
        plgpu.SMEM((count, n), jnp.int32),
        plgpu.SMEM((count, n), ACCUMULATOR),
        plgpu.SMEM((_words(problem) * problem.local,), jnp.int32),
        plgpu.SMEM((problem.local,), jnp.int32),
    ]
    return tuple(
        plgpu.kernel(
            body,
            out_type=[
                jax.ShapeDtypeStruct((n, count), jnp.int32),
                jax.ShapeDtypeStruct((n, count), ACCUMULATOR),
                jax.ShapeDtypeStruct((problem.local,), jnp.int32),
                jax.ShapeDtypeStruct((rows,), jnp.int32),
                jax.ShapeDtypeStruct((n, count), jnp.int32),
                jax.ShapeDtypeStruct((rows // problem.unit + 1,), jnp.int32),
            ],
            scratch_types=scratch_types,
            grid=(1,),
            grid_names=("cta",),
            num_threads=schedule.warpgroups,
            thread_name="warpgroup",
            kernel_name="expert_choice",
            compiler_params=NO_AUTO_BARRIERS,
        )(logits, *given)
    )


def _words(problem: Problem) -> int:
    return ceil_div(problem.tokens, _BITS)


@dataclasses.dataclass(frozen=True)
class _Scratch:
    """Arrays in shared memory."""

    ids: Any
    """The chosen experts, `[count, N]`."""
    weights: Any
    """Their weights."""
    bits: Any
    """For each word of tokens and each expert of this device, the tokens that chose it."""
    firsts: Any
    """The first row of each expert of this device."""


@dataclasses.dataclass(frozen=True)
class _Results:
    """The results in device memory."""

    ids: Any
    weights: Any
    group_sizes: Any
    token: Any
    place: Any
    tiles: Any


class _Cta:
    """The CTA that chooses and places."""

    def __init__(self, problem: Problem, schedule: Schedule, scratch: _Scratch) -> None:
        self.problem, self.schedule, self.scratch = problem, schedule, scratch

    def run(self, logits: Any, present: Any, first: Any, results: _Results) -> None:
        """Computes all results."""
        warpgroup, tokens = lax.axis_index("warpgroup"), self.problem.tokens
        is_placing = warpgroup == 0
        pl.when(is_placing)(lambda: self.clear(results))
        at_once = self.schedule.rows_at_once(self.problem)
        for turn in range(ceil_div(tokens, at_once * self.schedule.warpgroups)):
            # The last rows may be taken twice, with the same result.
            row = jnp.minimum((turn * self.schedule.warpgroups + warpgroup) * at_once, tokens - at_once)
            choice = _Choice(self.problem, self.schedule, at_once)
            for ref, vectors in zip((self.scratch.ids, self.scratch.weights), choice.chosen(logits, row), strict=True):
                for j, vector in enumerate(vectors):
                    store_vector(ref.at[j, pl.ds(row, at_once)], vector, layout=choice.layout.reduce(1))
        sync(_ALL_WARPGROUPS, self.schedule.warpgroups * WARPGROUP)
        pl.when(is_placing)(lambda: self.place(present, first, results))

    def clear(self, results: _Results) -> None:
        """Clears the bits, and makes all rows padding, which has the last expert."""
        problem = self.problem
        cleared = (self.scratch.bits, 0), (results.token, problem.tokens), (results.tiles, problem.local - 1)
        for ref, value in cleared:
            for start in range(0, ref.shape[0], WARPGROUP):
                index = thread() + start
                store(ref, index < ref.shape[0], jnp.int32(value), index)

    def place(self, present: Any, first: Any, results: _Results) -> None:
        """Stores the results of all tokens."""
        problem, scratch = self.problem, self.scratch
        choices = [self.choice(start, present, first) for start in range(0, problem.tokens * problem.count, WARPGROUP)]
        for choice in choices:
            or_into(scratch.bits, choice.has_row, lax.shift_left(jnp.int32(1), choice.bit), choice.word)
        meet()
        self.place_groups(results)
        meet()
        for choice in choices:
            index = choice.token, choice.j
            store(results.ids, choice.is_valid, choice.id, *index)
            store(results.weights, choice.is_valid, load(scratch.weights, choice.j, choice.token), *index)
            place = jnp.where(choice.has_row, self.place_of(choice), problem.rows)
            store(results.place, choice.is_valid, place, *index)
            store(results.token, choice.has_row, choice.token, place)
            # All rows of a tile store the same expert.
            store(results.tiles, choice.has_row, choice.local, lax.div(place, problem.unit))

    def choice(self, start: int, present: Any, first: Any) -> "_OneChoice":
        """Returns the thread's choice among those from `start` on."""
        problem = self.problem
        index = thread() + start
        is_valid = index < problem.tokens * problem.count
        index = jnp.where(is_valid, index, 0)
        token, j = lax.div(index, problem.count), lax.rem(index, problem.count)
        chosen = load(self.scratch.ids, j, token)
        local = chosen if first is None else chosen - first[0]
        has_row = is_valid if present is None else is_valid & (load(present, token) != 0)
        if first is not None:
            has_row = has_row & (local >= 0) & (local < problem.local)
        local = jnp.where(has_row, local, 0)
        return _OneChoice(token, j, chosen, is_valid, has_row, local, lax.div(token, _BITS) * problem.local + local)

    def place_groups(self, results: _Results) -> None:
        """Stores the sizes of groups and their first rows. Each lane of the first warp has consecutive experts."""
        problem = self.problem
        held = ceil_div(problem.local, WARP)
        lane, is_first_warp = lax.rem(thread(), WARP), thread() < WARP
        experts, sizes = [lane * held + i for i in range(held)], []
        for expert in experts:
            known = jnp.minimum(expert, problem.local - 1)
            words = [load(self.scratch.bits, known + word * problem.local) for word in range(_words(problem))]
            rows = functools.reduce(jnp.add, map(count_bits, words))
            sizes.append(jnp.where(expert < problem.local, lax.div(rows + (problem.unit - 1), problem.unit), 0))
        total = functools.reduce(jnp.add, sizes)
        place = sum_up_to(total) - total
        for expert, size in zip(experts, sizes, strict=True):
            is_stored = is_first_warp & (expert < problem.local)
            store(self.scratch.firsts, is_stored, place * problem.unit, expert)
            store(results.group_sizes, is_stored, size * problem.unit, expert)
            place = place + size
        # The last lane of a warp has passed all groups.
        store(results.tiles, thread() == WARP - 1, place, jnp.full_like(place, problem.rows // problem.unit))

    def place_of(self, choice: "_OneChoice") -> Array:
        """Returns the row of a choice: the first row of its expert, and after it the rows of earlier tokens."""
        earlier = load(self.scratch.bits, choice.word) & (lax.shift_left(jnp.int32(1), choice.bit) - 1)
        place = load(self.scratch.firsts, choice.local) + count_bits(earlier)
        for word in range(_words(self.problem) - 1):
            # All tokens of an earlier word are earlier.
            tokens = count_bits(load(self.scratch.bits, choice.local + word * self.problem.local))
            place = place + jnp.where(choice.token >= (word + 1) * _BITS, tokens, 0)
        return place


@dataclasses.dataclass(frozen=True)
class _OneChoice:
    """An expert that a token chose."""

    token: Array
    j: Array
    """Number among the token's choices."""
    id: Array
    is_valid: Array
    """True if there is such a choice."""
    has_row: Array
    """True if the token is present and the expert on this device."""
    local: Array
    """The expert among this device's; 0 without a row."""
    word: Array
    """The index of the expert's bits for the token."""

    @property
    def bit(self) -> Array:
        """The token's bit in the word."""
        return lax.rem(self.token, _BITS)


class _Choice:
    """The choice of the tokens that a warpgroup holds."""

    def __init__(self, problem: Problem, schedule: Schedule, rows: int) -> None:
        self.problem = problem
        self.shape = rows, LANE_GROUP * schedule.threads
        self.layout = layout(rows, schedule.threads)

    def chosen(self, logits: Any, row: Array) -> tuple[list[Array], list[Array]]:
        """Returns ids and weights of the tokens from a row on: vectors `[rows]`, in ascending order of ids."""
        rows, columns = self.shape
        starts = range(0, logits.shape[1], columns)
        column = plgpu.broadcasted_iota(jnp.int32, self.shape, 1, layout=self.layout)
        ids = [column + start for start in starts]
        refs = [logits.at[pl.ds(row, rows), pl.ds(start, columns)] for start in starts]
        scores = self.softmax([plgpu.load(ref, layout=self.layout, optimized=False) for ref in refs])
        # Numbers that are not negative have the order of their bits as integers, whose maximum over a warp Mosaic GPU
        # finds in one instruction. A NaN makes its whole row NaN, and then the lowest ids win.
        keys = [jnp.where(x == x, lax.bitcast_convert_type(x, jnp.int32), _NAN) for x in scores]
        picks = []
        for _ in range(self.problem.count):
            top = self.over_rows(jnp.maximum, jnp.max, keys)
            spread = self.spread(top)
            candidates = [jnp.where(key == spread, -i, -logits.shape[1]) for key, i in zip(keys, ids, strict=True)]
            best = -self.over_rows(jnp.maximum, jnp.max, candidates)
            taken = self.spread(best)
            keys = [jnp.where(i == taken, -1, key) for i, key in zip(ids, keys, strict=True)]
            picks.append((best, lax.bitcast_convert_type(top, ACCUMULATOR)))
        return self.weighted(_ascending(picks))

    def softmax(self, logits: list[Array]) -> list[Array]:
        """Returns the probabilities by the operations of `softmax.py` on a row of one block."""
        m = self.spread(jnp.maximum(self.over_rows(jnp.maximum, jnp.max, logits), LOWEST))
        exponentials = [exp_difference(piece, m) for piece in logits]
        constant = self.spread(row_constant("softmax", jnp.maximum(row_sums(exponentials), 0.0)))
        return [piece * constant for piece in exponentials]

    def weighted(self, chosen: list[tuple[Array, Array]]) -> tuple[list[Array], list[Array]]:
        """Returns ids and weights of sorted choices with their probabilities."""
        ids, scores = [i for i, _ in chosen], [score for _, score in chosen]
        if self.problem.normalized:
            factor = 1 / (functools.reduce(jnp.add, scores) + 0.0)
            scores = [score * factor for score in scores]
        return ids, scores

    def over_rows(self, op: Callable[..., Array], reduce: Callable[..., Array], pieces: list[Array]) -> Array:
        """Returns the reduction of rows given in pieces, `[rows]`."""
        return reduce(functools.reduce(op, pieces), axis=1)

    def spread(self, numbers: Array) -> Array:
        """Returns a piece that repeats each row's number in every column."""
        return broadcast(numbers, self.shape, 0, self.layout)


def _ascending(chosen: list[tuple[Array, Array]]) -> list[tuple[Array, Array]]:
    """Sorts choices by id, by exchanging neighbors."""
    chosen = list(chosen)
    for turn in range(len(chosen)):
        for j in range(turn % 2, len(chosen) - 1, 2):
            (a, x), (b, y) = chosen[j : j + 2]
            swap = a > b
            chosen[j] = jnp.minimum(a, b), jnp.where(swap, y, x)
            chosen[j + 1] = jnp.maximum(a, b), jnp.where(swap, x, y)
    return chosen
