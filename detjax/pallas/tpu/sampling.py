"""Sampling of the next token on TPUs (Mosaic TPU): logits are read once, and noise is never stored.

One kernel streams the blocks of a tile of rows through VMEM. It keeps the best candidate of every lane, and maximum and
sum of every block. After the last block it chooses among the lanes' candidates. If requests have filters, the portable
backend sorts the logits and decides which are kept.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.pallas import tpu as pltpu

from detjax.contract import ACCUMULATOR, LANES, NOISE_WORDS
from detjax.operands.numerics import LOWEST
from detjax.operands.sampling_arrays import SamplingArrays
from detjax.pallas.gumbel import NO_ID, beats, lane_noise
from detjax.pallas.softmax_formulas import finished, row_constant
from detjax.pallas.tpu.device import check_dtypes
from detjax.pallas.tpu.rows import PIECE, Problem, Schedule, in_every_lane, lane_ids, register_rows
from detjax.pallas.tpu.softmax import BlockStatistics, RowBlocks, log_softmax
from detjax.portable import sampling as portable


def default_schedule(problem: Problem) -> Schedule:
    """Returns the schedule for sampling from rows of this width and dtype.

    Noise takes more instructions than everything else, so a tile has few rows, to waste little on rows beyond the
    batch.
    """
    return Schedule(register_rows(problem.dtype))


def sample(
    logits: Array, arrays: SamplingArrays, *, filtered: bool, schedule: Schedule | None = None
) -> tuple[Array, Array]:
    """Returns tokens `[B]` int32 and their logprobs `[B]` float32; see `detjax.ops.sample`.

    Raises:
        NotImplementedError: the logits' dtype is not one of `device.DTYPES`.
        ValueError: the schedule does not fit the problem.
    """
    check_dtypes("sample", logits)
    kept = portable.masked(logits, arrays) if filtered else None
    return sample_kept(logits, kept, arrays.noise_key, arrays.position, arrays.temperature, schedule)


def sampling_logprobs(logits: Array, tokens: Array, temperature: Array) -> Array:
    """Returns the logprobs of tokens, `[B]` float32, under the softmax of logits and temperature; see `detjax.ops`.

    Raises:
        NotImplementedError: the logits' dtype is not one of `device.DTYPES`.
    """
    check_dtypes("sampling_logprobs", logits)
    reciprocal = portable.reciprocal(temperature)[:, None]
    logprobs = log_softmax(portable.sampling_exponents(logits.astype(ACCUMULATOR), reciprocal))
    return jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]


def sample_kept(
    logits: Array,
    kept: Array | None,
    keys: Array,
    positions: Array,
    temperature: Array,
    schedule: Schedule | None = None,
) -> tuple[Array, Array]:
    """Returns tokens `[B]` int32 and their logprobs `[B]` float32.

    Args:
        logits: `[B, V]`.
        kept: the logits, with -inf for those that a filter removed, `[B, V]`; None without filters.
        keys: the key of each row's noise, uint32 `[B, 4]`.
        positions: the position of each row's token, `[B]`.
        temperature: `[B]`; rows of temperature 0 are greedy.
        schedule: default: `default_schedule`'s.

    Raises:
        ValueError: the schedule does not fit the problem.
    """
    batch, width = logits.shape
    problem = Problem("sample", width, logits.dtype)
    schedule = schedule or default_schedule(problem)
    schedule.check(problem)
    rows, blocks = schedule.rows, RowBlocks(width)

    def kernel(inputs: _Inputs, outputs: _Outputs, statistics: BlockStatistics, best: _Candidates) -> None:
        _Kernel(schedule, blocks, inputs, outputs, statistics, best).run()

    tile = pl.BlockSpec((rows, blocks.columns), lambda i, b: (i, b))
    column = pl.BlockSpec((rows, 1), lambda i, b: (i, 0))
    key_columns = pl.BlockSpec((rows, 4), lambda i, b: (i, 0))
    # Padding rows are greedy, so that they never cause noise to be computed.
    padded_temperature = jnp.pad(temperature, (0, -batch % rows))[:, None]
    (outputs,) = pl.pallas_call(
        kernel,
        out_shape=[_Outputs(*(jax.ShapeDtypeStruct((batch, 1), dtype) for dtype in (jnp.int32, ACCUMULATOR)))],
        grid=(pl.cdiv(batch, rows), blocks.count),
        in_specs=[_Inputs(tile, None if kept is None else tile, key_columns, column, column)],
        out_specs=[_Outputs(column, column)],
        scratch_shapes=[BlockStatistics.scratch(blocks, rows), _Candidates.scratch(rows)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        name="sample",
    )(_Inputs(logits, kept, keys, positions[:, None], padded_temperature))
    return outputs.token[:, 0], outputs.logprob[:, 0]


class _Inputs(NamedTuple):
    """The kernel's inputs, or their blocks in VMEM; see `sample_kept`."""

    logits: Any
    kept: Any
    keys: Any
    position: Any
    temperature: Any


class _Outputs(NamedTuple):
    """Tokens int32 and logprobs float32, `[rows, 1]`."""

    token: Any
    logprob: Any


class _Candidates(NamedTuple):
    """The best candidate of each lane so far, `[rows, 128]`: its value with noise, token id and logit."""

    value: Any
    token: Any
    logit: Any

    @classmethod
    def scratch(cls, rows: int) -> "_Candidates":
        """Returns the types of the candidates' scratch memory."""
        dtypes = ACCUMULATOR, jnp.int32, ACCUMULATOR
        return cls(*(pltpu.VMEM((rows, PIECE), dtype) for dtype in dtypes))

    def load(self) -> "_Candidates":
        return _Candidates(*(ref[...] for ref in self))

    def store(self, candidates: "_Candidates") -> None:
        for ref, new in zip(self, candidates, strict=True):
            ref[...] = new

    def clear(self) -> None:
        for ref, nothing in zip(self, (-jnp.inf, NO_ID, -jnp.inf), strict=True):
            ref[...] = jnp.full(ref.shape, nothing, ref.dtype)


_PIECES: Final = LANES // PIECE
"""Pieces of consecutive token ids that have different counters of noise."""

_Noise = Callable[[int, int | Array], list[Array]]
"""A function of a piece's number among `_PIECES` and of the first token id of all, which returns the noise of the piece
and of every `_PIECES`-th one after it."""


_ValueOf = Callable[[Array, Array, Any], Array]
"""A function of logits, kept logits and noise that returns the values to maximize."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Kernel:
    """One block of a tile of rows, with references to the arrays in VMEM."""

    schedule: Schedule
    blocks: RowBlocks
    inputs: _Inputs
    outputs: _Outputs
    statistics: BlockStatistics
    best: _Candidates

    def run(self) -> None:
        block = pl.program_id(1)
        self.statistics.store(block, lambda: self.blocks.load(self.inputs.logits, block, -jnp.inf))
        pl.when(block == 0)(self.best.clear)

        temperature = self.inputs.temperature[...]
        needs_noise = jnp.max(jnp.where(temperature == 0, 0.0, 1.0)) > 0
        end = self.blocks.end_of_row(block)

        @pl.when(jnp.logical_not(needs_noise))
        def compare_logits() -> None:
            self.update_best(block, end, lambda logits, kept, _: logits)

        @pl.when(needs_noise)
        def compare_with_noise() -> None:
            self.update_best(block, end, self.noisy_values(temperature), self.noise())

        pl.when(block == self.blocks.count - 1)(self.store)

    def noise(self) -> _Noise:
        """Returns the function that makes noise for the tile's rows."""
        row = [in_every_lane(self.inputs.keys[:, word : word + 1]) for word in range(4)]
        position = lax.bitcast_convert_type(in_every_lane(self.inputs.position[...]), jnp.uint32)
        lanes = lane_ids(self.schedule.rows)

        def noise(piece: int, first: int | Array) -> list[Array]:
            # `operands.noise.group` of the tokens; the first one is a multiple of the tokens of all words.
            groups = lanes + (piece * PIECE + lax.div(first, NOISE_WORDS))
            return lane_noise(lax.bitcast_convert_type(groups, jnp.uint32), row, position, multiply_high)

        return noise

    def noisy_values(self, temperature: Array) -> _ValueOf:
        """Returns the function of scaled logits plus noise, or of plain logits in greedy rows."""
        greedy = in_every_lane(temperature) == 0
        inverse = in_every_lane(1 / jnp.where(temperature == 0, 1.0, temperature))

        def values(logits: Array, kept: Array, noise: Array) -> Array:
            scaled = kept * inverse
            # A NaN stays a NaN. The contract raises -inf to the lowest number, except for logits that a filter removed.
            scaled = jnp.where(scaled < LOWEST, LOWEST, scaled)
            if self.inputs.kept is not None:
                scaled = jnp.where((kept == -jnp.inf) & (logits != -jnp.inf), -jnp.inf, scaled)
            return jnp.where(greedy, logits, scaled + noise)

        return values

    def update_best(self, block: Array, end: int | Array, value_of: _ValueOf, noise: _Noise | None = None) -> None:
        """Updates the lanes' best candidates with this block, whose part of the row ends at column `end`."""
        logits_ref = self.inputs.logits
        kept_ref = logits_ref if self.inputs.kept is None else self.inputs.kept
        first, together = self.blocks.first_column(block), _PIECES * NOISE_WORDS

        def step(start: int | Array, count: int, best: _Candidates) -> _Candidates:
            """Returns the best candidates after `count` pieces from piece `start` on."""
            by_counter = (
                [] if noise is None else [noise(piece, first + start * PIECE) for piece in range(min(count, _PIECES))]
            )
            for number in range(count):
                piece = start + number
                place = pl.ds(pl.multiple_of(piece * PIECE, PIECE), PIECE)
                column = lane_ids(self.schedule.rows) + piece * PIECE
                logits, kept = logits_ref[:, place].astype(ACCUMULATOR), kept_ref[:, place].astype(ACCUMULATOR)
                drawn = None if noise is None else by_counter[number % _PIECES][number // _PIECES]
                value = value_of(logits, kept, drawn)
                better = (beats(value, best.value) | (best.token == NO_ID)) & (column < end)
                candidates = _Candidates(value, column + first, logits)
                best = _Candidates(*(jnp.where(better, new, old) for new, old in zip(candidates, best, strict=True)))
            return best

        whole, rest = divmod(self.blocks.pieces, together)
        best = self.best.load()
        if whole:
            best = lax.fori_loop(0, whole, lambda index, best: step(index * together, together, best), best)
        if rest:
            best = step(whole * together, rest, best)
        self.best.store(best)

    def store(self) -> None:
        """Writes the token and its logprob, after the last block."""
        m, total = self.statistics.merged()
        token, logit = _best_of_lanes(self.best.load())
        constant = row_constant("log_softmax", total)
        self.outputs.token[...] = token
        self.outputs.logprob[...] = finished("log_softmax", in_every_lane(logit), m, constant)[:, :1]


def multiply_high(word: Array, factor: np.uint32) -> Array:
    """Returns the upper 32 bits of a product, from products of halves: Mosaic TPU has no such operation."""
    half = np.uint32(0xFFFF)
    low, high = word & half, word >> np.uint32(16)
    factor_low, factor_high = factor & half, factor >> np.uint32(16)
    middle = high * factor_low + (low * factor_low >> np.uint32(16))
    other = low * factor_high + (middle & half)
    return high * factor_high + (middle >> np.uint32(16)) + (other >> np.uint32(16))


def _best_of_lanes(candidates: _Candidates) -> tuple[Array, Array]:
    """Returns the lowest id among the lanes with the largest value, `[rows, 1]`, and its logit."""
    value = candidates.value
    # No comparison here depends on how a maximum treats NaN.
    not_a_number = jnp.where(value != value, 1.0, 0.0)
    top = jnp.max(jnp.where(value != value, -jnp.inf, value), axis=1, keepdims=True)
    has_largest = not_a_number == jnp.max(not_a_number, axis=1, keepdims=True)
    is_best = has_largest & ((value != value) | (value == top))
    token = jnp.min(jnp.where(is_best, candidates.token, NO_ID), axis=1, keepdims=True)
    # A NaN makes the whole row's logprob NaN, whatever the logit.
    logit = jnp.where(candidates.token == token, candidates.logit, -jnp.inf)
    return token, jnp.max(logit, axis=1, keepdims=True)
