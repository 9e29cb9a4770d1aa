"""The causal convolution on Hopper GPUs (Mosaic GPU).

A CTA has some columns of some tokens and reads each input once. A token's earlier inputs are the rows before it, in
registers, or, for a request's first tokens in the call, the inputs stored in its slot. In calls so short that no token
overwrites an input that another one reads, the same CTA also writes the token's input to the slot, so a decode step is
a single kernel.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from detjax.contract import ACCUMULATOR, LANE_GROUP
from detjax.operands.linear_attention_state import RequestRows, with_last_inputs
from detjax.operands.numerics import ceil_div
from detjax.pallas.hopper import device
from detjax.pallas.hopper.device import WARPGROUP
from detjax.pallas.hopper.mosaic.tiles import fma
from detjax.pallas.hopper.mosaic.vectors import split_vectors
from detjax.pallas.hopper.rows import NO_AUTO_BARRIERS, layout, logistic
from detjax.portable import convolution as portable
from detjax.runtime import compilation

TAPS: Final = 4
"""Inputs of a token, including its own; every published model has this many."""

WIDTH_UNIT: Final = 64
"""Channels are a multiple of this number: a line of 128 bytes of bfloat16."""

COLUMNS: Final = LANE_GROUP * WARPGROUP
"""Most columns of a token that a warpgroup processes at once."""

_TOKENS: Final = (8, 4, 2, 1)


@dataclasses.dataclass(frozen=True)
class Problem:
    """The shape of a convolution, and the dtype of inputs, weights and results."""

    tokens: int
    channels: int
    dtype: jnp.dtype

    @property
    def columns(self) -> int:
        """Columns of a CTA."""
        return math.gcd(self.channels, COLUMNS)

    @property
    def blocks(self) -> int:
        """CTAs that share a token."""
        return self.channels // self.columns


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The distribution of tokens over CTAs; no bit depends on it."""

    tokens: int
    """Tokens of a CTA."""

    def __post_init__(self) -> None:
        """Raises ValueError if the schedule fits no problem."""
        if self.tokens not in _TOKENS:
            raise ValueError(f"Schedule: tokens is {self.tokens}; accepted: {', '.join(map(str, reversed(_TOKENS)))}")

    def check(self, problem: Problem) -> None:
        """Raises ValueError if a kernel of this schedule cannot compute the problem."""
        if problem.tokens < self.tokens:
            raise ValueError(
                f"Schedule: {self.tokens} tokens of a CTA; accepted: at most the {problem.tokens} tokens of the problem"
            )


def default_schedule(problem: Problem) -> Schedule:
    """Returns the schedule for a problem: the most tokens per CTA that keep all multiprocessors busy."""
    busy = 8 * device.multiprocessors()
    fitting = (n for n in _TOKENS if n == 1 or ceil_div(problem.tokens, n) * problem.blocks >= busy)
    return Schedule(next(n for n in fitting if n <= problem.tokens))


def serves(channels: int, taps: int) -> bool:
    """Returns True if the kernel serves such a convolution. The portable program serves all others in every phase."""
    return taps == TAPS and channels % WIDTH_UNIT == 0


def forward(
    x: Array, weight: Array, inputs: Array, rows: RequestRows, *, schedule: Schedule | None = None
) -> tuple[Array, Array]:
    """Returns the activated convolution `[N, C]` and the next inputs; see `detjax.portable.convolution.forward`.

    Donated inputs are updated in place. Padding rows have undefined results.
    """
    if not serves(weight.shape[0], weight.shape[2]):
        compilation.require_pinned_program("causal_convolution")
        return portable.forward(x, weight, inputs, rows)
    problem = Problem(x.shape[0], x.shape[1], x.dtype)
    schedule = schedule or default_schedule(problem)
    schedule.check(problem)
    slots, room = inputs.shape[:2]
    tokens = _Token.all_of(rows, x.shape[0], slots, room)
    by_block = (-1, problem.blocks, problem.columns)
    vectors = weight.reshape(problem.blocks, problem.columns * TAPS)
    operands = _Operands(x.reshape(by_block), vectors, inputs.reshape(slots, room, *by_block[1:]), tokens)
    # The slot is a ring of `room` inputs: a token overwrites the input of the token `room` positions earlier.
    if max(rows.most.others, 1) > room - (TAPS - 1):
        y = _kernel(problem, schedule, operands, writes=False)
        return y.reshape(x.shape), with_last_inputs(inputs, x, rows)
    operands = operands._replace(inputs=jax.new_ref(operands.inputs))
    y = _kernel(problem, schedule, operands, writes=True)
    return y.reshape(x.shape), jax.freeze(operands.inputs).reshape(inputs.shape)


def backward(
    x: Array, weight: Array, inputs: Array, rows: RequestRows, weight_sum: Array | None, dy: Array
) -> tuple[Array, Array]:
    """Returns the gradients; see `detjax.portable.convolution.backward`, which computes them."""
    compilation.require_pinned_program("causal_convolution")
    return portable.backward(x, weight, inputs, rows, weight_sum, dy)


class _Operands(NamedTuple):
    """The arrays of a call, or references to them in the kernel."""

    x: Any
    """Inputs `[N, blocks, columns]`."""
    weight: Any
    """`[blocks, columns * TAPS]`."""
    inputs: Any
    """The last inputs of each slot `[R, rows, blocks, columns]`; the kernel may write them."""
    tokens: Any
    """`[len(_Token._fields), N]`."""


class _Token(NamedTuple):
    """A row's place in its request. Padding rows are at position 0 of a request that keeps no inputs."""

    slot: Array
    """Slot of its request, clipped to existing slots."""
    position: Array
    """Absolute position."""
    offset: Array
    """Index among the request's tokens in the call."""
    kept: Array
    """1 if the slot exists and keeps the row's input; 0 otherwise."""

    @classmethod
    def all_of(cls, rows: RequestRows, count: int, slots: int, room: int) -> Array:
        """Returns the array that `at` reads, for all rows. It depends only on the queries, so layers share it."""
        request, offset, present = rows.by_row(count)
        slot, offset = rows.slot[request], offset * present
        kept = (present > 0) & (offset >= rows.tokens[request] - room) & (slot >= 0) & (slot < slots)
        position = (rows.start[request] + offset) * present
        return jnp.stack(cls(jnp.clip(slot, 0, slots - 1), position, offset, kept.astype(jnp.int32)))

    @classmethod
    def at(cls, tokens: Any, row: Array) -> "_Token":
        """Reads the token of a row, in a kernel."""
        return cls(*(tokens[field, row] for field in range(len(cls._fields))))


def _kernel(problem: Problem, schedule: Schedule, operands: _Operands, *, writes: bool) -> Array:
    """Returns the activated convolution; with `writes`, stores tokens in their slots."""

    def body(*refs: Any) -> None:
        *references, result = refs
        _Cta(problem, schedule, _Operands(*references), result, writes=writes).run()

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((problem.tokens, problem.blocks, problem.columns), problem.dtype),
        grid=(ceil_div(problem.tokens, schedule.tokens), problem.blocks),
        grid_names=("token", "block"),
        kernel_name="causal_convolution",
        compiler_params=NO_AUTO_BARRIERS,  # slots are written at places that no token of the call reads
    )(*operands)


class _Cta:
    """One CTA: a block of columns of `schedule.tokens` tokens."""

    def __init__(self, problem: Problem, schedule: Schedule, operands: _Operands, result: Any, *, writes: bool) -> None:
        self.schedule, self.operands, self.result, self.writes = schedule, operands, result, writes
        self.threads, self.dtype = problem.columns // LANE_GROUP, problem.dtype
        self.layout = layout(1, self.threads)
        self.block = pl.ds(lax.axis_index("block"), 1)
        # The last CTA shifts back so that all its tokens exist: two CTAs then write the same bits to some.
        self.first = jnp.minimum(lax.axis_index("token") * schedule.tokens, problem.tokens - schedule.tokens)

    def run(self) -> None:
        """Loads all inputs, then computes the tokens in order."""
        rows = [jnp.maximum(self.first + index, 0) for index in range(1 - TAPS, 0)]
        rows += [self.first + index for index in range(self.schedule.tokens)]
        inputs = [self.load(self.operands.x.at[row, self.block]) for row in rows]
        in_vectors = layout(1, self.threads, TAPS)
        vectors = plgpu.load(self.operands.weight.at[self.block], layout=in_vectors, optimized=False)
        taps = split_vectors(vectors, layout=in_vectors, rows_layout=self.layout, parts=TAPS)
        weights = [tap.astype(ACCUMULATOR) for tap in taps]
        for index, row in enumerate(rows[TAPS - 1 :]):
            token = _Token.at(self.operands.tokens, row)
            *earlier, present = inputs[index : index + TAPS]
            from_slot = functools.partial(self.from_slot, token, earlier)
            earlier = lax.cond(token.offset >= TAPS - 1, functools.partial(tuple, earlier), from_slot)
            self.result[row, self.block] = self.activated([*earlier, present], weights)
            if self.writes:
                pl.when(token.kept > 0)(functools.partial(self.keep, token, present))

    def from_slot(self, token: _Token, earlier: list[Array]) -> tuple[Array, ...]:
        """Returns the earlier inputs of one of a request's first tokens: from previous rows, the slot, or zeros."""
        room = self.operands.inputs.shape[1]
        inputs = []
        for back, row_before in zip(range(TAPS - 1, 0, -1), earlier, strict=True):
            place = lax.rem(token.position + (room - back), jnp.int32(room))
            stored = self.load(self.operands.inputs.at[token.slot, place, self.block])
            stored = jnp.where(token.position >= back, stored, jnp.zeros_like(stored))
            inputs.append(jnp.where(token.offset >= back, row_before, stored))
        return tuple(inputs)

    def keep(self, token: _Token, present: Array) -> None:
        place = lax.rem(token.position, jnp.int32(self.operands.inputs.shape[1]))
        self.operands.inputs[token.slot, place, self.block] = present

    def load(self, ref: Any) -> Array:
        return plgpu.load(ref, layout=self.layout, optimized=False)

    def activated(self, inputs: Sequence[Array], weights: Sequence[Array]) -> Array:
        """Returns the activated sum of products, rounded.

        The first product is fused into the second: LLVM compiles the portable program so, and this writes it out.
        """
        wide = [x.astype(ACCUMULATOR) for x in inputs]
        total = fma(wide[0], weights[0], wide[1] * weights[1], layout=self.layout)
        for x, weight in zip(wide[2:], weights[2:], strict=True):
            total = fma(x, weight, total, layout=self.layout)
        return (total * logistic(total)).astype(self.dtype)
