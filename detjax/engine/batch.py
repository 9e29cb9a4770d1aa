"""Step batches: the arrays of a step, in one of the few shapes that programs are compiled for."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int32

from detjax.contract import QUERY_UNIT
from detjax.engine.sampling_params import SamplingParams
from detjax.engine.scheduler import ScheduledStep, StepLimits, padded_rows
from detjax.models.adapters.pool import SlotArrays
from detjax.models.decoder import ImageRows
from detjax.operands.kv_pages import Queries
from detjax.operands.sampling_arrays import Arrays, LogitAdjustments, SamplingArrays

_GROWTH = 4
"""The ratio of consecutive batch sizes of a serving engine."""
_MIN_ROWS = 64
"""Rows of a serving engine's smallest step with prefills."""
_MIN_DRAFTED_ROWS = 16
"""Rows of a serving engine's smallest step with guessed tokens, if sequences with guesses are prefills."""
_MAX_DRAFTED = 320
"""Maximum number of guessed tokens in a step of a serving engine: five for each of 64 sequences."""
_DRAFTED_ROWS = 128, 512
"""Rows of further steps of such an engine: 16 and 64 sequences verify theirs in as many."""
_DRAFTED_SAMPLES = 128
"""Rows to sample from in further steps of such an engine: 16 sequences with 7 guesses have as many. Each costs a row of
logits."""
_DRAFTED_DECODES = (128,)
"""Decodes of further steps of a serving engine whose guesses are decodes, for sequences with different numbers of
guesses."""
_DRAFTED_SEQUENCES = (1, 4, 8, 16, 32), (32, 64)
"""Sequences of further steps of such an engine, whose requests are sequences with their guesses: with as many as a
sequence may have, and with half as many."""
_MAX_ROWS = 8192
"""Maximum rows of a step with prefills if the caller fixes only the length of chunks."""
_BIASED: Final = 512
"""Capacity for tokens of a row with a bias or that may not be chosen: a request's maximum number of biases, its maximum
number of stop tokens with `min_tokens`, and a few end-of-sequence tokens."""


@dataclasses.dataclass(frozen=True, order=True)
class BatchShape:
    """The sizes that the programs of a step are compiled for.

    Attributes:
        decodes: capacity for decodes: tokens whose rows are requests of their own.
        rows: capacity for rows of prefill chunks.
        prefills: capacity for prefill chunks.
        sampled: capacity for all chunks together; each may sample a token, and one more after each guessed token.
        queries: decodes of each request. With more than one, a request is a sequence with its guesses: attention reads
            the sequence's keys once for all of them.
    """

    decodes: int
    rows: int
    prefills: int
    sampled: int
    queries: int = 1

    @classmethod
    def from_arrays(cls, arrays: Any) -> "BatchShape":
        """Returns the shape of a `StepBatch`, or of anything with its fields for the layers."""
        decodes, queries = len(arrays.held), arrays.queries
        sizes = decodes, len(arrays.token) - decodes, len(queries.first_row), len(arrays.last_row)
        return cls(*sizes, queries.decode_queries)

    @property
    def decoding(self) -> int:
        """Capacity for requests that decode."""
        return self.decodes // self.queries

    @property
    def requests(self) -> int:
        """Capacity for all requests of the queries."""
        return self.decoding + self.prefills

    @classmethod
    def needed_by(cls, step: ScheduledStep, queries: int = 1) -> "BatchShape | None":
        """Returns the smallest capacities that a step needs; None if it has no guesses for requests of several decodes.

        Args:
            step: the step.
            queries: decodes of each request.
        """
        rows = sum(padded_rows(chunk.count) for chunk in step.prefills)
        decodes = sum(chunk.count for chunk in step.decodes)
        sampled = decodes + sum(chunk.sampled for chunk in step.prefills)
        if queries > 1:
            if not 1 < max((chunk.count for chunk in step.decodes), default=0) <= queries:
                return None
            decodes = len(step.decodes) * queries
        return cls(decodes, rows, len(step.prefills), sampled, queries)

    def fits(self, needed: "BatchShape") -> bool:
        """Returns whether all capacities are at least as large as needed."""
        return (
            needed.sampled <= self.sampled
            and needed.decodes <= self.decodes
            and needed.rows <= self.rows
            and needed.prefills <= self.prefills
        )


def essential_shapes(shapes: Iterable[BatchShape]) -> frozenset[BatchShape]:
    """Returns the shapes whose programs a server needs to begin: each step that fits into some shape fits into one.

    Until the programs of the others are compiled, their steps take larger shapes. In steps that prefill, unused room
    for decodes costs little, so these shapes have room for the most decodes. They are every second size, from the
    largest one on, and the smallest: no step takes more than one size too many.
    """
    by_kind: dict[int, dict[int, BatchShape]] = {}
    for shape in shapes:
        # Requests of several decodes have shapes of their own, which prefill nothing.
        kind, size = (0, shape.rows) if shape.rows else (shape.queries, shape.decodes)
        sizes = by_kind.setdefault(kind, {})
        sizes[size] = max(shape, sizes.get(size, shape))
    chosen = set[BatchShape]()
    for sizes in by_kind.values():
        descending = [sizes[size] for size in sorted(sizes, reverse=True)]
        chosen |= {*descending[::2], descending[-1]}
    return frozenset(chosen)


class BatchShapes:
    """The shapes of a step loop's batches, and the limits of its steps."""

    def __init__(self, shapes: Iterable[BatchShape], limits: StepLimits) -> None:
        """A set of shapes in which every step within the limits fits."""
        self.limits = limits
        # Prefill rows cost more than decodes, so the shape with the fewest rows is the cheapest.
        self._shapes = sorted(shapes, key=lambda shape: (shape.rows, shape.decodes, -shape.queries))

    @classmethod
    def for_serving(
        cls, slots: int, token_budget: int, drafts: int = 0, *, decodes_guesses: bool = False
    ) -> "BatchShapes":
        """Returns shapes for any mix of prefills and decodes, few enough to compile them all before the first request.

        Args:
            slots: see `StepLimits`.
            token_budget: tokens of a step.
            drafts: maximum number of guessed tokens of a sequence in a step.
            decodes_guesses: see `StepLimits`.
        """
        drafted, most = min(slots * drafts, _MAX_DRAFTED), padded_rows(token_budget)
        decodes = _sizes(1, slots)
        # In steps with prefills, unused room for decodes costs little, so every other size is enough.
        decodes_with_prefills = [0, *decodes[::-2][::-1]]
        if decodes_guesses and drafted:
            most_decodes = slots + drafted
            decodes = sorted({*decodes, most_decodes, *(count for count in _DRAFTED_DECODES if count < most_decodes)})
            decodes_with_prefills.append(most_decodes)
        are_prefills = drafted > 0 and not decodes_guesses
        sizes = _sizes(min(_MIN_DRAFTED_ROWS if are_prefills else _MIN_ROWS, most), most)
        if are_prefills:
            needed = min(most, slots * padded_rows(1 + drafts))
            sizes = sorted({*sizes, *(rows for rows in _DRAFTED_ROWS if rows <= needed)})
        prefills = {rows: min(slots, rows // QUERY_UNIT) for rows in sizes}
        sampled = decodes
        if are_prefills:
            sampled = sorted({*decodes, min(_DRAFTED_SAMPLES, slots + drafted), slots + drafted})

        def shape(count: int, rows: int) -> BatchShape:
            # A step has at most one chunk per slot. The number of rows to sample from is one of the decode sizes, so
            # all shapes share the sampling programs of these sizes. If guesses are decodes, steps with both guesses and
            # more chunks than slots have the largest shape: few steps verify guesses while they compute prompts.
            chunks = max(count, min(slots, count + prefills.get(rows, 0)))
            if not decodes_guesses:
                chunks += min(drafted, prefills.get(rows, 0) * drafts)
            return BatchShape(count, rows, prefills.get(rows, 0), next(size for size in sampled if size >= chunks))

        shapes = [shape(count, 0) for count in decodes]
        if decodes_guesses and drafted:
            shapes += [
                BatchShape(queries * count, 0, 0, next(size for size in sampled if size >= queries * count), queries)
                for queries, sequences in zip((1 + drafts, 1 + drafts // 2), _DRAFTED_SEQUENCES, strict=True)
                for count in sorted({min(count, slots) for count in sequences})
                if queries > 1 and (queries - 1) * count <= drafted
            ]
        shapes += [shape(count, rows) for rows in prefills for count in decodes_with_prefills]
        rows = max(prefills)
        limits = StepLimits(
            slots=slots,
            tokens=token_budget,
            prefills=prefills[rows],
            rows=rows,
            prefill_chunk=token_budget,
            drafts=drafted,
            decodes_guesses=decodes_guesses,
        )
        return cls(shapes, limits)

    @classmethod
    def for_chunks(
        cls, slots: int, prefill_chunk: int, *, mixes: bool = False, drafts: int = 0, decodes_guesses: bool = False
    ) -> "BatchShapes":
        """Returns few shapes: for decodes, for guesses, and for a prefill chunk of each sequence; see `StepLimits`.

        A chunk of one token is computed like a decode. A sequence may have up to `drafts` guessed tokens in a step.
        """
        chunk_rows = padded_rows(prefill_chunk)
        rows = max(min(slots * chunk_rows, _MAX_ROWS), chunk_rows)
        # Both shapes share the sampling program.
        sampled = slots * (1 + drafts)
        decodes = sampled if decodes_guesses else slots
        shapes = {BatchShape(count, 0, 0, count) for count in (slots, decodes)}
        shapes.add(BatchShape(decodes if mixes else 0, rows, slots, sampled))
        limits = StepLimits(
            slots=slots,
            tokens=slots + rows,
            prefills=slots,
            rows=rows,
            prefill_chunk=prefill_chunk,
            mixes=mixes,
            drafts=slots * drafts,
            decodes_guesses=decodes_guesses,
        )
        return cls(shapes, limits)

    def __iter__(self) -> Iterator[BatchShape]:
        return iter(self._shapes)

    def smallest(self, step: ScheduledStep, is_ready: Callable[[BatchShape], bool] = lambda _: True) -> BatchShape:
        """Returns the cheapest ready shape that a step fits into."""
        needed = functools.cache(functools.partial(BatchShape.needed_by, step))
        return next(
            shape
            for shape in self._shapes
            if (least := needed(shape.queries)) is not None and shape.fits(least) and is_ready(shape)
        )


def _sizes(first: int, last: int) -> list[int]:
    sizes = [first]
    while sizes[-1] < last:
        sizes.append(min(_GROWTH * sizes[-1], last))
    return sizes


def sampling_arrays(params: Sequence[SamplingParams], noise_keys: Sequence[Sequence[int]]) -> SamplingArrays:
    """Returns a row for each sample, on the host. Positions change with every step and are zeros here."""
    return SamplingArrays(
        noise_key=np.array(noise_keys, np.uint32).reshape(len(params), 4),
        position=np.zeros(len(params), np.int32),
        temperature=np.array([row.temperature for row in params], np.float32),
        top_k=np.array([row.top_k for row in params], np.int32),
        top_p=np.array([row.top_p for row in params], np.float32),
        min_p=np.array([row.min_p for row in params], np.float32),
    )


def logit_adjustments(params: SamplingParams, barred: Iterable[int] = ()) -> LogitAdjustments:
    """Returns a row on the host with penalties, biases, and `barred` tokens, which must not be chosen."""
    bias = dict(params.logit_bias) | dict.fromkeys(barred, -np.inf)
    padding = _BIASED - len(bias)
    repetition = np.array([params.repetition_penalty], np.float32)
    return LogitAdjustments(
        repetition=repetition,
        reciprocal=1 / repetition,
        frequency=np.array([params.frequency_penalty], np.float32),
        presence=np.array([params.presence_penalty], np.float32),
        biased=np.array([[*bias] + [-1] * padding], np.int32),
        bias=np.array([[*bias.values()] + [0] * padding], np.float32),
    )


def no_adjustments(rows: int) -> LogitAdjustments:
    """Returns rows on the host that leave all logits as they are."""
    return LogitAdjustments(*(np.repeat(row, rows, axis=0) for row in logit_adjustments(SamplingParams())))


class DraftedRows(NamedTuple):
    """The guessed tokens among the tokens that rows to sample from follow.

    The rows of a chunk with guesses are side by side: first the row of its known token, then a row for each guess.

    Attributes:
        offset: the number of guesses that the row follows.
        guesses: these guesses in order, padded with `NO_GUESS`.
    """

    offset: Int32[Arrays, "R"]
    guesses: Int32[Arrays, "R n"]


NO_GUESS: Final = 2**31 - 1
"""Stands for no token."""


class StepBatch(NamedTuple):
    """The arrays of one step: N tokens, first the decodes, then the prefill rows; and R rows to sample from.

    The rows to sample from are in the order of the step's chunks: one of each, and one more for each of its guesses.
    Unused capacity is padding.

    Attributes:
        token: token ids. The device replaces the tokens of decodes that it holds.
        held: for each decode, the slot that holds its token; the number of slots if `token` has it.
        queries: the tokens' positions in their sequences, and the sequences' pages in the cache.
        last_row: the index in N of the token that each row to sample from follows: the last one of its chunk, or of
            those before a guess.
        slot: for each row, the slot that will hold the sampled token; the number of slots if its chunk samples none.
        sampling: sampling parameters of each row.
        adjustments: logit adjustments of each row; None if no chunk has any.
        images: the rows of images among the prefill tokens; None without images.
        adapters: the slot of the adapter of each request of the queries, or `NO_ADAPTER`; None if no request has one.
        pool: the arrays of all slots for adapters, which the runner adds if `adapters` is given.
        steps: in a run, the number of steps that each decode takes part in; None for a single step.
        drafted: guessed tokens before the rows to sample from; None if no step of the loop has any.
    """

    token: Int32[Arrays, "N"]
    held: Int32[Arrays, "decodes"]
    queries: Queries
    last_row: Int32[Arrays, "R"]
    slot: Int32[Arrays, "R"]
    sampling: SamplingArrays
    adjustments: LogitAdjustments | None = None
    images: ImageRows | None = None
    adapters: Int32[Arrays, "requests"] | None = None
    pool: SlotArrays | None = None
    steps: Int32[Arrays, "decodes"] | None = None
    drafted: DraftedRows | None = None

    def for_layers(self) -> "StepBatch":
        """Returns the batch without what only sampling needs: one program of the layers serves all kinds of it."""
        return self._replace(adjustments=None, drafted=None)

    def unpacked(self) -> "StepBatch":
        """Returns the batch, as for one whose arrays are packed."""
        return self

    def as_empty_run(self) -> "StepBatch":
        """Returns the batch of a run of the same shape in which no decode takes part."""
        return self._replace(adjustments=None, steps=np.zeros(self.held.shape, np.int32))

    def at_step_of_run(self, number: Any, no_slot: int) -> "StepBatch":
        """Returns the batch of a step of a run, without the decodes that have ended, for tracing in the run's program.

        `no_slot` is the number of slots, which stands for no slot.
        """
        assert self.steps is not None
        is_active = number < self.steps
        queries = self.queries.later(number, is_active)
        sampling = self.sampling._replace(position=self.sampling.position + number)
        slot = jnp.where(is_active, self.slot, no_slot)
        return self._replace(queries=queries, sampling=sampling, slot=slot, steps=None)

    @property
    def shape(self) -> BatchShape:
        """The shape that the step's programs are compiled for."""
        return BatchShape.from_arrays(self)
