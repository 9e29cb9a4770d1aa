"""The places of tokens' rows sorted by expert, in small kernels on Hopper GPUs (Mosaic GPU).

Each thread of a warpgroup takes some choices of tokens. An expert has a bit for each token, so a token's row follows as
many rows as lower bits are set. The lanes of a warp add the sizes of groups. For few tokens one CTA does all of it. The
kernel that chooses experts does the same, see `expert_choice`; this one is for choices of other routers.

More tokens are divided into blocks, and there are two kernels. In the first one each CTA counts how many tokens of its
block chose each expert. In the second one each CTA adds the counts of the blocks before its own, and of all blocks, and
places the rows of its block.
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
"""Tokens of a CTA: an expert has up to two words of `_BITS` bits for them."""
MAX_BLOCKED_TOKENS: Final = 256 * MAX_TOKENS
"""Tokens of a call. Every CTA adds the counts of all blocks, so the work grows with the square of the blocks."""
MAX_EXPERTS: Final = 512
MAX_CHOSEN: Final = 16
"""Experts that a token chooses at most; the kernels' text has all steps of the choice."""
_BITS: Final = 32
_AT_ONCE: Final = 8
"""Counts whose loads are under way at the same time."""


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
        """True if kernels serve the problem."""
        return 0 < self.tokens <= MAX_BLOCKED_TOKENS and self.local <= MAX_EXPERTS and 0 < self.count <= MAX_CHOSEN

    @property
    def blocks(self) -> int:
        """Blocks of tokens."""
        return ceil_div(self.tokens, MAX_TOKENS)

    @property
    def block(self) -> int:
        """Tokens of a block; the last one may have fewer."""
        return min(self.tokens, MAX_TOKENS)

    @property
    def words(self) -> int:
        """Words of an expert's bits in a block."""
        return ceil_div(self.block, _BITS)


def place(ids: Array, present: Array | None, *, problem: Problem) -> tuple[Array, ...]:
    """Returns group sizes `[local]`, tokens `[rows]`, places `[N, count]` and tiles `[rows / unit + 1]`, all int32.

    See `detjax.ops.ExpertRows`.

    Args:
        ids: the distinct experts of each token, int32 `[N, count]`; ids from `problem.local` on have no rows.
        present: False for padding tokens, `[N]`.
        problem: the shapes.
    """
    operands = [ids] if present is None else [ids, present.astype(jnp.int32)]
    if problem.blocks > 1:
        return _place_in_blocks(operands, problem)

    def body(*refs: Any) -> None:
        given, results, (bits, firsts) = refs[: len(operands)], refs[len(operands) : -2], refs[-2:]
        places = Places(problem, bits, firsts, Results(*results))
        places.clear()
        meet()
        places.store(_given_choices(places, *given))

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


def _given_choices(places: "Places", ids: Any, present: Any = None) -> "list[Choice]":
    """Returns the thread's choices of experts that are given as ids of this device."""
    return places.choices(lambda token, j: load(ids, token, j), present, first=None)


def _place_in_blocks(operands: Sequence[Array], problem: Problem) -> tuple[Array, ...]:
    """Returns the results of `place` for more tokens than a CTA takes."""
    kernel = functools.partial(
        plgpu.kernel, grid=(problem.blocks,), grid_names=("block",), compiler_params=NO_AUTO_BARRIERS
    )
    count = len(operands)

    def count_choices(*refs: Any) -> None:
        given, (token, tiles, counts, bits) = refs[:count], refs[count:]
        places = Places(problem, bits, None, Results(None, token, None, tiles), lax.axis_index("block"))
        places.clear()
        meet()
        places.note(_given_choices(places, *given))
        meet()
        places.count(counts)

    def store_places(*refs: Any) -> None:
        given, (counts, token, tiles, sizes, place, bits, firsts, *sums) = refs[:count], refs[count:]
        places = Places(problem, bits, firsts, Results(sizes, token, place, tiles), lax.axis_index("block"))
        places.clear_bits()
        places.add(counts, *sums)
        meet()
        places.store(_given_choices(places, *given), *sums)

    sizes, tokens, places, tiles = result_types(problem)
    counts = jax.ShapeDtypeStruct((problem.blocks, problem.local), jnp.int32)
    bits, firsts = scratch_types(problem)
    counting = kernel(
        count_choices, out_type=[tokens, tiles, counts], scratch_types=[bits], kernel_name="expert_counts"
    )
    *rows, by_block = counting(*operands)
    token, tile = map(jax.new_ref, rows)
    storing = kernel(
        store_places, out_type=[sizes, places], scratch_types=[bits, *[firsts] * 3], kernel_name="expert_places"
    )
    group_sizes, place = storing(*operands, by_block, token, tile)
    return group_sizes, jax.freeze(token), place, jax.freeze(tile)


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
    within: Array
    """The token's number in its block."""
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
        return lax.rem(self.within, _BITS)


@dataclasses.dataclass(frozen=True)
class Places:
    """The work of the warpgroup that places the rows of a block of tokens."""

    problem: Problem
    bits: Any
    """For each word of tokens and each expert of this device, the tokens that chose it; in shared memory."""
    firsts: Any
    """The first row of each expert of this device; in shared memory."""
    results: Results
    block: Any = 0
    """The block's number."""

    def clear(self) -> None:
        """Clears the bits, and makes all rows padding, which has the last expert. All threads must meet after it.

        Each block takes a part of the rows, and no rows may be placed before all blocks are done.
        """
        problem, results = self.problem, self.results
        self.clear_bits()
        for ref, value in ((results.token, problem.tokens), (results.tiles, problem.local - 1)):
            part = ceil_div(ref.shape[0], problem.blocks)
            for start in range(0, part, WARPGROUP):
                within = thread() + start
                index = within + self.block * part
                store(ref, (within < part) & (index < ref.shape[0]), jnp.int32(value), index)

    def clear_bits(self) -> None:
        """Clears the bits. All threads must meet after it."""
        for start in range(0, self.bits.shape[0], WARPGROUP):
            index = thread() + start
            store(self.bits, index < self.bits.shape[0], jnp.int32(0), index)

    def choices(self, id_of: Callable[[Array, Array], Array], present: Any, first: Any) -> list[Choice]:
        """Returns the thread's choices, given the expert `id_of(token, j)` of each choice.

        Args:
            id_of: returns an expert.
            present: 0 for absent tokens, or None.
            first: the first expert of this device, or None.
        """
        problem, choices = self.problem, []
        for start in range(0, problem.block * problem.count, WARPGROUP):
            index = thread() + start
            within, j = lax.div(index, problem.count), lax.rem(index, problem.count)
            token = within + self.block * problem.block
            is_valid = (within < problem.block) & (token < problem.tokens)
            token, within, j = (jnp.where(is_valid, x, 0) for x in (token, within, j))
            chosen = id_of(token, j)
            local = chosen if first is None else chosen - first[0]
            has_row = is_valid & (local >= 0) & (local < problem.local)
            if present is not None:
                has_row = has_row & (load(present, token) != 0)
            local = jnp.where(has_row, local, 0)
            word = lax.div(within, _BITS) * problem.local + local
            choices.append(Choice(token, within, j, chosen, is_valid, has_row, local, word))
        return choices

    def note(self, choices: Sequence[Choice]) -> None:
        """Sets the bits of choices. All threads must meet after it."""
        for choice in choices:
            or_into(self.bits, choice.has_row, lax.shift_left(jnp.int32(1), choice.bit), choice.word)

    def store(self, choices: Sequence[Choice], before: Any = None, totals: Any = None) -> None:
        """Stores the results of the block's tokens.

        Args:
            choices: the thread's choices.
            before: the rows of each expert in earlier blocks, in shared memory; None: there is one block.
            totals: the rows of each expert in all blocks.
        """
        problem, results = self.problem, self.results
        self.note(choices)
        meet()
        self._store_groups(self._rows if totals is None else functools.partial(load, totals))
        meet()
        for choice in choices:
            place = self._place_of(choice)
            if before is not None:
                place = place + load(before, choice.local)
            place = jnp.where(choice.has_row, place, problem.rows)
            store(results.place, choice.is_valid, place, choice.token, choice.j)
            store(results.token, choice.has_row, choice.token, place)
            # All rows of a tile store the same expert.
            store(results.tiles, choice.has_row, choice.local, lax.div(place, problem.unit))

    def count(self, counts: Any) -> None:
        """Stores how many tokens of the block chose each expert, in `[blocks, experts]`."""
        for start in range(0, self.problem.local, WARPGROUP):
            expert = thread() + start
            is_known = expert < self.problem.local
            store(
                counts,
                is_known,
                self._rows(jnp.where(is_known, expert, 0)),
                jnp.zeros_like(expert) + self.block,
                expert,
            )

    def add(self, counts: Any, before: Any, totals: Any) -> None:
        """Adds the counts of the blocks before this one, and of all blocks. All threads must meet after it."""
        problem = self.problem
        for start in range(0, problem.local, WARPGROUP):
            expert = thread() + start
            is_known = expert < problem.local
            known = jnp.where(is_known, expert, 0)

            def add(step: Array, sums: tuple[Array, Array], known: Array = known) -> tuple[Array, Array]:
                blocks = [step * _AT_ONCE + i for i in range(_AT_ONCE)]
                rows = [load(counts, jnp.minimum(block, problem.blocks - 1) + 0 * known, known) for block in blocks]
                earlier, total = sums
                for block, count in zip(blocks, rows, strict=True):
                    earlier = earlier + jnp.where(block < self.block, count, 0)
                    total = total + jnp.where(block < problem.blocks, count, 0)
                return earlier, total

            sums = lax.fori_loop(0, ceil_div(problem.blocks, _AT_ONCE), add, (known * 0, known * 0))
            for ref, value in zip((before, totals), sums, strict=True):
                store(ref, is_known, value, expert)

    def _rows(self, expert: Array) -> Array:
        """Returns the number of the block's tokens that chose an expert."""
        words = [load(self.bits, expert + word * self.problem.local) for word in range(self.problem.words)]
        return functools.reduce(jnp.add, map(count_bits, words))

    def _store_groups(self, rows_of: Callable[[Array], Array]) -> None:
        """Stores the sizes of groups and their first rows. Each lane of the first warp has consecutive experts."""
        problem, results = self.problem, self.results
        held = ceil_div(problem.local, WARP)
        lane, is_first_warp = lax.rem(thread(), WARP), thread() < WARP
        experts, sizes = [lane * held + i for i in range(held)], []
        for expert in experts:
            rows = rows_of(jnp.minimum(expert, problem.local - 1))
            sizes.append(jnp.where(expert < problem.local, lax.div(rows + (problem.unit - 1), problem.unit), 0))
        total = functools.reduce(jnp.add, sizes)
        place = sum_up_to(total) - total
        # All blocks find the same groups, and one stores them.
        is_storing = is_first_warp if problem.blocks == 1 else is_first_warp & (self.block == 0)
        for expert, size in zip(experts, sizes, strict=True):
            is_group = expert < problem.local
            store(self.firsts, is_first_warp & is_group, place * problem.unit, expert)
            store(results.group_sizes, is_storing & is_group, size * problem.unit, expert)
            place = place + size
        # The last lane of a warp has passed all groups.
        is_last = is_storing & (lane == WARP - 1)
        store(results.tiles, is_last, place, jnp.full_like(place, problem.rows // problem.unit))

    def _place_of(self, choice: Choice) -> Array:
        """Returns the row of a choice: its expert's first row, and after it the rows of the block's earlier tokens."""
        earlier = load(self.bits, choice.word) & (lax.shift_left(jnp.int32(1), choice.bit) - 1)
        place = load(self.firsts, choice.local) + count_bits(earlier)
        for word in range(self.problem.words - 1):
            # All tokens of an earlier word are earlier.
            tokens = count_bits(load(self.bits, choice.local + word * self.problem.local))
            place = place + jnp.where(choice.within >= (word + 1) * _BITS, tokens, 0)
        return place
