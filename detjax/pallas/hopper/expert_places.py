"""The places of tokens' rows sorted by expert, for few tokens, in one small kernel on Hopper GPUs (Mosaic GPU).

Each thread of a warpgroup takes some choices of tokens. An expert has a bit for each token, so a token's row follows as
many rows as lower bits are set. The lanes of a warp add the sizes of groups. The kernel that chooses experts does the
same, see `expert_choice`; this one is for choices of other routers.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from detjax.operands.numerics import ceil_div
from detjax.pallas.hopper.device import WARP, WARPGROUP
from detjax.pallas.hopper.mosaic.threads import count_bits, load, meet, or_into, store, sum_up_to, thread
from detjax.pallas.hopper.rows import NO_AUTO_BARRIERS

MAX_TOKENS: Final = 64
"""Tokens of a call: an expert has up to two words of `_BITS` bits for them."""
MAX_EXPERTS: Final = 512
MAX_CHOSEN: Final = 16
"""Experts that a token chooses at most; the kernels' text has all steps of the choice."""
_BITS: Final = 32


@dataclasses.dataclass(frozen=True)
class Problem:
    """The shapes of tokens' choices."""

    tokens: int
    count: int
    """Experts that a token chooses."""
    local: int
    """Experts of this device."""
    unit: int
    """Groups of rows are padded to a multiple of this number."""
    rows: int
    """Rows of all groups with their padding, at most."""

    @property
    def served(self) -> bool:
        """True if the kernel serves the problem."""
        return 0 < self.tokens <= MAX_TOKENS and self.local <= MAX_EXPERTS and 0 < self.count <= MAX_CHOSEN

    @property
    def words(self) -> int:
        """Words of an expert's bits."""
        return ceil_div(self.tokens, _BITS)


def place(ids: Array, present: Array | None, *, problem: Problem) -> tuple[Array, ...]:
    """Returns group sizes `[local]`, tokens `[rows]`, places `[N, count]` and tiles `[rows / unit + 1]`, all int32.

    See `detjax.ops.ExpertRows`.

    Args:
        ids: the distinct experts of each token, int32 `[N, count]`; ids from `problem.local` on have no rows.
        present: False for padding tokens, `[N]`.
        problem: the shapes.
    """
    operands = [ids] if present is None else [ids, present.astype(jnp.int32)]

    def body(*refs: Any) -> None:
        given, results, (bits, firsts) = refs[: len(operands)], refs[len(operands) : -2], refs[-2:]
        places = Places(problem, bits, firsts, Results(*results))
        places.clear()
        meet()
        places.store(places.choices(lambda token, j: load(given[0], token, j), (*given[1:], None)[0], first=None))

    return tuple(
        plgpu.kernel(
            body,
            out_type=result_types(problem),
            scratch_types=scratch_types(problem),
            grid=(1,),
            grid_names=("cta",),
            kernel_name="expert_places",
            compiler_params=NO_AUTO_BARRIERS,
        )(*operands)
    )


@dataclasses.dataclass(frozen=True)
class Results:
    """The results in device memory."""

    group_sizes: Any
    token: Any
    place: Any
    tiles: Any


def result_types(problem: Problem) -> list[jax.ShapeDtypeStruct]:
    """Returns the types of the results."""
    shapes = (problem.local,), (problem.rows,), (problem.tokens, problem.count), (problem.rows // problem.unit + 1,)
    return [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]


def scratch_types(problem: Problem) -> list[Any]:
    """Returns the types of the two arrays in shared memory that `Places` needs."""
    return [plgpu.SMEM((problem.words * problem.local,), jnp.int32), plgpu.SMEM((problem.local,), jnp.int32)]


@dataclasses.dataclass(frozen=True)
class Choice:
    """A thread's choice: an expert that a token chose."""

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


@dataclasses.dataclass(frozen=True)
class Places:
    """The work of the warpgroup that places rows."""

    problem: Problem
    bits: Any
    """For each word of tokens and each expert of this device, the tokens that chose it; in shared memory."""
    firsts: Any
    """The first row of each expert of this device; in shared memory."""
    results: Results

    def clear(self) -> None:
        """Clears the bits, and makes all rows padding, which has the last expert. All threads must meet after it."""
        problem, results = self.problem, self.results
        for ref, value in ((self.bits, 0), (results.token, problem.tokens), (results.tiles, problem.local - 1)):
            for start in range(0, ref.shape[0], WARPGROUP):
                index = thread() + start
                store(ref, index < ref.shape[0], jnp.int32(value), index)

    def choices(self, id_of: Callable[[Array, Array], Array], present: Any, first: Any) -> list[Choice]:
        """Returns the thread's choices, given the expert `id_of(token, j)` of each choice.

        Args:
            id_of: returns an expert.
            present: 0 for absent tokens, or None.
            first: the first expert of this device, or None.
        """
        problem, choices = self.problem, []
        for start in range(0, problem.tokens * problem.count, WARPGROUP):
            index = thread() + start
            is_valid = index < problem.tokens * problem.count
            index = jnp.where(is_valid, index, 0)
            token, j = lax.div(index, problem.count), lax.rem(index, problem.count)
            chosen = id_of(token, j)
            local = chosen if first is None else chosen - first[0]
            has_row = is_valid & (local >= 0) & (local < problem.local)
            if present is not None:
                has_row = has_row & (load(present, token) != 0)
            local = jnp.where(has_row, local, 0)
            word = lax.div(token, _BITS) * problem.local + local
            choices.append(Choice(token, j, chosen, is_valid, has_row, local, word))
        return choices

    def store(self, choices: Sequence[Choice]) -> None:
        """Stores the results of all tokens."""
        problem, results = self.problem, self.results
        for choice in choices:
            or_into(self.bits, choice.has_row, lax.shift_left(jnp.int32(1), choice.bit), choice.word)
        meet()
        self._store_groups()
        meet()
        for choice in choices:
            place = jnp.where(choice.has_row, self._place_of(choice), problem.rows)
            store(results.place, choice.is_valid, place, choice.token, choice.j)
            store(results.token, choice.has_row, choice.token, place)
            # All rows of a tile store the same expert.
            store(results.tiles, choice.has_row, choice.local, lax.div(place, problem.unit))

    def _store_groups(self) -> None:
        """Stores the sizes of groups and their first rows. Each lane of the first warp has consecutive experts."""
        problem, results = self.problem, self.results
        held = ceil_div(problem.local, WARP)
        lane, is_first_warp = lax.rem(thread(), WARP), thread() < WARP
        experts, sizes = [lane * held + i for i in range(held)], []
        for expert in experts:
            known = jnp.minimum(expert, problem.local - 1)
            words = [load(self.bits, known + word * problem.local) for word in range(problem.words)]
            rows = functools.reduce(jnp.add, map(count_bits, words))
            sizes.append(jnp.where(expert < problem.local, lax.div(rows + (problem.unit - 1), problem.unit), 0))
        total = functools.reduce(jnp.add, sizes)
        place = sum_up_to(total) - total
        for expert, size in zip(experts, sizes, strict=True):
            is_stored = is_first_warp & (expert < problem.local)
            store(self.firsts, is_stored, place * problem.unit, expert)
            store(results.group_sizes, is_stored, size * problem.unit, expert)
            place = place + size
        # The last lane of a warp has passed all groups.
        store(results.tiles, thread() == WARP - 1, place, jnp.full_like(place, problem.rows // problem.unit))

    def _place_of(self, choice: Choice) -> Array:
        """Returns the row of a choice: the first row of its expert, and after it the rows of earlier tokens."""
        earlier = load(self.bits, choice.word) & (lax.shift_left(jnp.int32(1), choice.bit) - 1)
        place = load(self.firsts, choice.local) + count_bits(earlier)
        for word in range(self.problem.words - 1):
            # All tokens of an earlier word are earlier.
            tokens = count_bits(load(self.bits, choice.local + word * self.problem.local))
            place = place + jnp.where(choice.token >= (word + 1) * _BITS, tokens, 0)
        return place
