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
from jax import Array, lax
from jax.experimental.pallas import tpu as pltpu

from detjax.contract import ACCUMULATOR, NOISE_LANES, NOISE_WORDS
from detjax.operands.noise import SPAN
from detjax.operands.numerics import LOWEST
from detjax.operands.sampling_arrays import SamplingArrays
from detjax.pallas.gumbel import NO_ID, beats, lane_noise
from detjax.pallas.softmax_formulas import finished, row_constant
from detjax.pallas.tpu.device import check_dtypes
from detjax.pallas.tpu.rows import PIECE, Problem, Schedule, in_every_lane, register_rows
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
        scratch_shapes=[BlockStatistics.scratch(blocks, rows), _Candidates.scratch(rows, blocks)],
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
    """The best candidate of each lane so far, `[rows, lanes]`: its value with noise, token id and logit."""

    value: Any
    token: Any
    logit: Any

    @classmethod
    def scratch(cls, rows: int, blocks: RowBlocks) -> "_Candidates":
        """Returns the types of the candidates' scratch memory."""
        dtypes = ACCUMULATOR, jnp.int32, ACCUMULATOR
        return cls(*(pltpu.VMEM((rows, min(SPAN, blocks.columns)), dtype) for dtype in dtypes))

    def load(self) -> "_Candidates":
        return _Candidates(*(ref[...] for ref in self))

    def store(self, candidates: "_Candidates") -> None:
        for ref, new in zip(self, candidates, strict=True):
            ref[...] = new

    def clear(self) -> None:
        for ref, nothing in zip(self, (-jnp.inf, NO_ID, -jnp.inf), strict=True):
            ref[...] = jnp.full(ref.shape, nothing, ref.dtype)


_CHUNKS_TOGETHER: Final = 4
"""Chunks whose noise is computed at the same time: for one, each instruction would wait for the one before it."""

_ValuesOf = Callable[[int | Array, list[tuple[Array, Array]]], list[Array]]
"""A function of the first token id, and of consecutive chunks of logits and kept logits, that returns the
values to maximize."""


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
            self.update_best(block, end, lambda _, chunks: [logits for logits, _ in chunks])

        @pl.when(needs_noise)
        def compare_with_noise() -> None:
            self.update_best(block, end, self.noisy_values(temperature))

        pl.when(block == self.blocks.count - 1)(self.store)

    @property
    def lanes(self) -> int:
        """The number of lanes that keep a candidate: a span of token ids, or the columns of a narrower row."""
        return min(SPAN, self.blocks.columns)

    def in_every_lane(self, column: Array) -> Array:
        """Returns the numbers `[rows, 1]` of rows, repeated in every lane."""
        return jnp.broadcast_to(column, (column.shape[0], self.lanes))

    def columns(self, count: int) -> Array:
        """Returns the columns `[rows, count]` from 0 on, int32."""
        return lax.broadcasted_iota(jnp.int32, (self.schedule.rows, count), 1)

    def noise(self) -> Callable[[int | Array, int], list[Array]]:
        """Returns the function that makes the noise of consecutive chunks of token ids, from the first id on.

        A chunk has a token id for each lane. The first id is a multiple of `SPAN`.
        """
        row = [self.inputs.keys[:, word : word + 1] for word in range(4)]
        position = lax.bitcast_convert_type(self.inputs.position[...], jnp.uint32)

        def noise(first: int | Array, chunks: int) -> list[Array]:
            # `operands.noise.group` of the ids in the first lanes of all chunks, which are consecutive numbers.
            groups = self.columns(chunks * NOISE_LANES) + lax.div(first, NOISE_WORDS)
            key = [jnp.broadcast_to(word, groups.shape) for word in row]
            place = jnp.broadcast_to(position, groups.shape)
            words = lane_noise(lax.bitcast_convert_type(groups, jnp.uint32), key, place)[: self.lanes // NOISE_LANES]
            spans = [slice(chunk * NOISE_LANES, (chunk + 1) * NOISE_LANES) for chunk in range(chunks)]
            return [jnp.concatenate([word[:, span] for word in words], axis=1) for span in spans]

        return noise

    def noisy_values(self, temperature: Array) -> _ValuesOf:
        """Returns the function of scaled logits plus noise, or of plain logits in greedy rows."""
        noise = self.noise()
        greedy = self.in_every_lane(temperature) == 0
        inverse = self.in_every_lane(1 / jnp.where(temperature == 0, 1.0, temperature))

        def values(first: int | Array, chunks: list[tuple[Array, Array]]) -> list[Array]:
            return [value(*chunk, drawn) for chunk, drawn in zip(chunks, noise(first, len(chunks)), strict=True)]

        def value(logits: Array, kept: Array, noise: Array) -> Array:
            lanes = logits.shape[1]
            scaled = kept * inverse[:, :lanes]
            # A NaN stays a NaN. The contract raises -inf to the lowest number, except for logits that a filter removed.
            scaled = jnp.where(scaled < LOWEST, LOWEST, scaled)
            if self.inputs.kept is not None:
                scaled = jnp.where((kept == -jnp.inf) & (logits != -jnp.inf), -jnp.inf, scaled)
            return jnp.where(greedy[:, :lanes], logits, scaled + noise[:, :lanes])

        return values

    def update_best(self, block: Array, end: int | Array, values_of: _ValuesOf) -> None:
        """Updates the lanes' best candidates with this block, whose part of the row ends at column `end`."""
        logits_ref = self.inputs.logits
        kept_ref = logits_ref if self.inputs.kept is None else self.inputs.kept
        first_token = self.blocks.first_column(block)

        def step(first: int | Array, count: int, best: _Candidates) -> _Candidates:
            """Returns the best candidates after `count` columns from column `first` on."""
            starts = range(0, count, self.lanes)
            widths = [min(self.lanes, count - start) for start in starts]
            places = [
                pl.ds(pl.multiple_of(jnp.int32(first + start), PIECE), width)
                for start, width in zip(starts, widths, strict=True)
            ]
            chunks = [(logits_ref[:, x].astype(ACCUMULATOR), kept_ref[:, x].astype(ACCUMULATOR)) for x in places]
            values = values_of(first_token + first, chunks)
            for start, width, (logits, _), value in zip(starts, widths, chunks, values, strict=True):
                column = self.columns(width) + (first + start)
                earlier = _Candidates(*(array[:, :width] for array in best))
                better = (beats(value, earlier.value) | (earlier.token == NO_ID)) & (column < end)
                new = value, column + first_token, logits
                kept = [jnp.where(better, now, before) for now, before in zip(new, earlier, strict=True)]
                if width < self.lanes:
                    kept = [jnp.concatenate([x, y[:, width:]], axis=1) for x, y in zip(kept, best, strict=True)]
                best = _Candidates(*kept)
            return best

        together = _CHUNKS_TOGETHER * self.lanes
        whole, rest = divmod(self.blocks.columns, together)
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
