"""The choice of experts, and for few tokens also the places of their rows, in one kernel on Hopper GPUs (Mosaic GPU).

Decode steps have so few tokens that each of the many operations of `ops.softmax`, `ops.choose_experts` and
`ops.expert_rows` takes longer to start than to run. Here one CTA does it all in two phases:

1. Choice. Warpgroups take rows of logits. 2 to 32 threads hold a row, by the layouts of `rows`, whose sums have the
   contract's order. Softmax uses the formulas of `softmax.py`. The highest probability is taken as often as a token
   chooses, and the choices are sorted by id.
2. Places. One warpgroup places the rows, as in `expert_places`.

For more tokens, many CTAs run the first phase, and the kernels of `expert_places` place the rows. On an H200 the three
kernels take 20 us for 8192 tokens, and the 18 of XLA 76 without the gaps between them.
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
from detjax.pallas.hopper import expert_places
from detjax.pallas.hopper.device import WARPGROUP
from detjax.pallas.hopper.expert_places import MAX_EXPERTS, Places, Results
from detjax.pallas.hopper.mosaic.barriers import sync
from detjax.pallas.hopper.mosaic.threads import load, store, store_vector, thread
from detjax.pallas.hopper.rows import NO_AUTO_BARRIERS, broadcast, layout, row_sums
from detjax.pallas.softmax_formulas import exp_difference, row_constant

_MAX_WARPGROUPS: Final = 4
_MAX_HELD: Final = 32
"""Elements of a row that a thread holds at most, so that nothing spills."""
_NAN: Final = 0x7FFFFFFF
"""The bits of a NaN, the largest int32."""
_ALL_WARPGROUPS: Final = 15
"""The hardware's barrier at which all warpgroups meet; single warpgroups meet at the first ones."""


@dataclasses.dataclass(frozen=True)
class Problem(expert_places.Problem):
    """The shapes and options of a choice."""

    experts: int
    """Experts that tokens choose from."""
    normalized: bool

    @property
    def width(self) -> int:
        """Columns of the padded logits: whole pieces of rows of some layout."""
        return round_up(self.experts, WARPGROUP) if self.experts > WARPGROUP // 2 else _power_of_two(self.experts)

    @property
    def threads(self) -> list[int]:
        """Numbers of threads that can hold a row, the largest first."""
        return [threads for threads in (32, 16, 8, 4, 2) if self.width % (LANE_GROUP * threads) == 0]

    @property
    def chooses(self) -> bool:
        """True if a kernel chooses experts."""
        return self.served and self.experts <= MAX_EXPERTS

    @property
    def places(self) -> bool:
        """True if the same kernel also places rows."""
        return self.chooses and self.blocks == 1


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
        fitting = problem.threads[::-1]
        if self.threads not in fitting:
            raise ValueError(
                f"Schedule: {self.threads} threads for rows of {problem.width} columns; accepted: "
                f"{', '.join(map(str, fitting))}"
            )
        if not 1 <= self.warpgroups <= _MAX_WARPGROUPS:
            raise ValueError(f"Schedule: warpgroups is {self.warpgroups}; accepted: 1 to {_MAX_WARPGROUPS}")


def default_schedule(problem: Problem) -> Schedule:
    """Returns the schedule for a problem: as many threads for a row as leave no row for a second turn.

    Many tokens have enough rows for all threads, so a row has as many as it can.
    """
    if not problem.places:
        return Schedule(problem.threads[0], _MAX_WARPGROUPS)
    for threads in problem.threads:
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
    """Returns ids and weights `[N, count]`, and the results of `expert_places.place` if `problem.places`.

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
    if not problem.places:
        return _choose_in_blocks(logits, problem, schedule)
    optional = [None if x is None else x.astype(jnp.int32).reshape(-1) for x in (present, first)]
    given = [x for x in optional if x is not None]

    def body(logits: Any, *refs: Any) -> None:
        operands, results = iter(refs[: len(given)]), refs[len(given) : -4]
        ids, weights, bits, firsts = refs[-4:]
        present, first = (None if x is None else next(operands) for x in optional)
        places = Places(problem, bits, firsts, Results(*results[2:]))
        warpgroup, count = lax.axis_index("warpgroup"), schedule.warpgroups
        pl.when(warpgroup == 0)(places.clear)
        rows = schedule.rows_at_once(problem)
        choice = _Choice(problem, schedule, rows)
        for turn in range(ceil_div(problem.tokens, rows * count)):
            # The last rows may be taken twice, with the same result.
            row = jnp.minimum((turn * count + warpgroup) * rows, problem.tokens - rows)
            choice.stage(logits, row, ids, weights, at=row)
        sync(_ALL_WARPGROUPS, count * WARPGROUP)

        @pl.when(warpgroup == 0)
        def _() -> None:
            choices = places.choices(lambda token, j: load(ids, j, token), present, first)
            places.store(choices)
            for one in choices:
                store(results[0], one.is_valid, one.id, one.token, one.j)
                store(results[1], one.is_valid, load(weights, one.j, one.token), one.token, one.j)

    n, count = problem.tokens, problem.count
    return tuple(
        plgpu.kernel(
            body,
            out_type=[
                jax.ShapeDtypeStruct((n, count), jnp.int32),
                jax.ShapeDtypeStruct((n, count), ACCUMULATOR),
                *expert_places.result_types(problem),
            ],
            scratch_types=[
                plgpu.SMEM((count, n), jnp.int32),
                plgpu.SMEM((count, n), ACCUMULATOR),
                *expert_places.scratch_types(problem),
            ],
            grid=(1,),
            grid_names=("cta",),
            num_threads=schedule.warpgroups,
            thread_name="warpgroup",
            kernel_name="expert_choice",
            compiler_params=NO_AUTO_BARRIERS,
        )(logits, *given)
    )


def _choose_in_blocks(logits: Array, problem: Problem, schedule: Schedule) -> tuple[Array, ...]:
    """Returns ids and weights `[N, count]` of many tokens; a CTA chooses for as many as its warpgroups hold."""
    rows, warpgroups = schedule.rows_at_once(problem), schedule.warpgroups
    n, count = problem.tokens, problem.count
    block = min(warpgroups * rows, n)

    def body(logits: Any, all_ids: Any, all_weights: Any, ids: Any, weights: Any) -> None:
        warpgroup = lax.axis_index("warpgroup")
        # Rows may be taken twice, with the same result.
        first = jnp.minimum(lax.axis_index("cta") * block, n - block)
        at = jnp.minimum(warpgroup * rows, block - rows)
        _Choice(problem, schedule, rows).stage(logits, first + at, ids, weights, at=at)
        sync(_ALL_WARPGROUPS, warpgroups * WARPGROUP)

        @pl.when(warpgroup == 0)
        def _() -> None:
            for start in range(0, block * count, WARPGROUP):
                index = thread() + start
                is_valid = index < block * count
                index = jnp.where(is_valid, index, 0)
                token, j = lax.div(index, count), lax.rem(index, count)
                store(all_ids, is_valid, load(ids, j, token), first + token, j)
                store(all_weights, is_valid, load(weights, j, token), first + token, j)

    staged = count, block
    return tuple(
        plgpu.kernel(
            body,
            out_type=[jax.ShapeDtypeStruct((n, count), dtype) for dtype in (jnp.int32, ACCUMULATOR)],
            scratch_types=[plgpu.SMEM(staged, jnp.int32), plgpu.SMEM(staged, ACCUMULATOR)],
            grid=(ceil_div(n, block),),
            grid_names=("cta",),
            num_threads=warpgroups,
            thread_name="warpgroup",
            kernel_name="expert_choice",
            compiler_params=NO_AUTO_BARRIERS,
        )(logits)
    )


class _Choice:
    """The choice of the tokens that a warpgroup holds."""

    def __init__(self, problem: Problem, schedule: Schedule, rows: int) -> None:
        self.problem = problem
        self.shape = rows, LANE_GROUP * schedule.threads
        self.layout = layout(rows, schedule.threads)

    def stage(self, logits: Any, row: Array, ids: Any, weights: Any, *, at: Array) -> None:
        """Writes ids and weights of the tokens from a row on to shared memory, `[count, tokens]`, from a token on."""
        for ref, vectors in zip((ids, weights), self.chosen(logits, row), strict=True):
            for j, vector in enumerate(vectors):
                store_vector(ref.at[j, pl.ds(at, self.shape[0])], vector, layout=self.layout.reduce(1))

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
            # With the number as its first case, Mosaic GPU's `select` would give integers without a sign: the taken key
            # would be the highest.
            keys = [jnp.where(i != taken, key, -1) for i, key in zip(ids, keys, strict=True)]
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
