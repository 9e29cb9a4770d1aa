"""Step batches: the arrays of a step, in one of the few shapes that programs are compiled for."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int32

from detjax.contract import QUERY_UNIT
from detjax.engine import sequence as sequences
from detjax.engine.sampling_params import SamplingParams
from detjax.engine.scheduler import ScheduledChunk, ScheduledStep, StepLimits, padded_rows
from detjax.models.adapters.pool import SlotArrays
from detjax.models.decoder import ImageRows
from detjax.operands.adapted_weight import NO_ADAPTER
from detjax.operands.kv_pages import Queries
from detjax.operands.noise import NO_NOISE
from detjax.operands.sampling_arrays import Arrays, LogitAdjustments, SamplingArrays

_GROWTH = 4
"""The ratio of consecutive batch sizes of a serving engine."""
_MIN_ROWS = 64
"""Rows of a serving engine's smallest step with prefills."""
_MIN_DRAFTED_ROWS = 16
"""Rows of a serving engine's smallest step with guessed tokens."""
_MAX_DRAFTED = 320
"""Maximum number of guessed tokens in a step of a serving engine: five for each of 64 sequences."""
_DRAFTED_ROWS = 128, 512
"""Rows of further steps of a serving engine with guesses: 16 and 64 sequences verify theirs in as many."""
_DRAFTED_SAMPLES = 128
"""Rows to sample from in further steps: 16 sequences with 7 guesses have as many. Each costs a row of logits."""
_MAX_ROWS = 8192
"""Maximum rows of a step with prefills if the caller fixes only the length of chunks."""
_BIASED: Final = 512
"""Capacity for tokens of a row with a bias or that may not be chosen: a request's maximum number of biases, its maximum
number of stop tokens with `min_tokens`, and a few end-of-sequence tokens."""


@dataclasses.dataclass(frozen=True, order=True)
class BatchShape:
    """The sizes that the programs of a step are compiled for.

    Attributes:
        decodes: capacity for chunks of a single token.
        rows: capacity for rows of prefill chunks.
        prefills: capacity for prefill chunks.
        sampled: capacity for all chunks together; each may sample a token, and one more after each guessed token.
    """

    decodes: int
    rows: int
    prefills: int
    sampled: int

    @classmethod
    def needed_by(cls, step: ScheduledStep) -> "BatchShape":
        """Returns the smallest capacities that a step needs."""
        rows = sum(padded_rows(chunk.count) for chunk in step.prefills)
        sampled = len(step.decodes) + sum(chunk.sampled for chunk in step.prefills)
        return cls(len(step.decodes), rows, len(step.prefills), sampled)

    def fits(self, needed: "BatchShape") -> bool:
        """Returns whether all capacities are at least as large as needed."""
        return (
            needed.sampled <= self.sampled
            and needed.decodes <= self.decodes
            and needed.rows <= self.rows
            and needed.prefills <= self.prefills
        )


class BatchShapes:
    """The shapes of a step loop's batches, and the limits of its steps."""

    def __init__(self, shapes: Iterable[BatchShape], limits: StepLimits) -> None:
        """A set of shapes in which every step within the limits fits."""
        self.limits = limits
        # Prefill rows cost more than decodes, so the shape with the fewest rows is the cheapest.
        self._shapes = sorted(shapes, key=lambda shape: (shape.rows, shape.decodes))

    @classmethod
    def for_serving(cls, slots: int, token_budget: int, drafts: int = 0) -> "BatchShapes":
        """Returns shapes for any mix of prefills and decodes, few enough to compile them all before the first
        request. A sequence may have up to `drafts` guessed tokens in a step."""
        decodes = _sizes(1, slots)
        smallest = _MIN_ROWS if not drafts else _MIN_DRAFTED_ROWS
        most = padded_rows(token_budget)
        sizes = _sizes(min(smallest, most), most)
        if drafts:
            needed = min(most, slots * padded_rows(1 + drafts))
            sizes = sorted({*sizes, *(rows for rows in _DRAFTED_ROWS if rows <= needed)})
        prefills = {rows: min(slots, rows // QUERY_UNIT) for rows in sizes}
        drafted = min(slots * drafts, _MAX_DRAFTED)
        sampled = decodes
        if drafted:
            sampled = sorted({*decodes, min(_DRAFTED_SAMPLES, slots + drafted), slots + drafted})
        # In steps with prefills, unused room for decodes costs little, so every other size is enough.
        decodes_with_prefills = [0, *decodes[::-2][::-1]]

        def shape(count: int, rows: int) -> BatchShape:
            # A step has at most one chunk per slot. The number of rows to sample from is one of the decode sizes, so
            # all shapes share the sampling programs of these sizes.
            chunks = min(slots, count + prefills.get(rows, 0))
            chunks += min(drafted, prefills.get(rows, 0) * drafts)
            return BatchShape(count, rows, prefills.get(rows, 0), next(size for size in sampled if size >= chunks))

        shapes = [shape(count, 0) for count in decodes]
        shapes += [shape(count, rows) for rows in prefills for count in decodes_with_prefills]
        rows = max(prefills)
        limits = StepLimits(
            slots=slots,
            tokens=token_budget,
            prefills=prefills[rows],
            rows=rows,
            prefill_chunk=token_budget,
            drafts=drafted,
        )
        return cls(shapes, limits)

    @classmethod
    def for_chunks(cls, slots: int, prefill_chunk: int, *, mixes: bool = False, drafts: int = 0) -> "BatchShapes":
        """Returns two shapes: one for decodes, and one for a prefill chunk of each sequence; see `StepLimits`.

        A chunk of one token is computed like a decode. A sequence may have up to `drafts` guessed tokens in a step.
        """
        chunk_rows = padded_rows(prefill_chunk)
        rows = max(min(slots * chunk_rows, _MAX_ROWS), chunk_rows)
        # Both shapes share the sampling program.
        sampled = slots * (1 + drafts)
        shapes = BatchShape(slots, 0, 0, slots), BatchShape(slots if mixes else 0, rows, slots, sampled)
        limits = StepLimits(
            slots=slots,
            tokens=slots + rows,
            prefills=slots,
            rows=rows,
            prefill_chunk=prefill_chunk,
            mixes=mixes,
            drafts=slots * drafts,
        )
        return cls(shapes, limits)

    def __iter__(self) -> Iterator[BatchShape]:
        return iter(self._shapes)

    def smallest(self, step: ScheduledStep, is_ready: Callable[[BatchShape], bool] = lambda _: True) -> BatchShape:
        """Returns the cheapest ready shape that a step fits into."""
        needed = BatchShape.needed_by(step)
        return next(shape for shape in self._shapes if shape.fits(needed) and is_ready(shape))


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

    def as_empty_run(self) -> "StepBatch":
        """Returns the batch of a run of the same shape in which no decode takes part."""
        return self.for_layers()._replace(steps=np.zeros(self.held.shape, np.int32))

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
        decodes, chunks = len(self.held), len(self.queries.start)
        return BatchShape(decodes, len(self.token) - decodes, chunks - decodes, len(self.slot))


class SlotTable:
    """Page tables and sampling parameters of the running sequences, by slot; makes step batches from them."""

    def __init__(
        self,
        slots: int,
        pages_per_sequence: int,
        *,
        named_in_queries: bool = False,
        coordinates: int | None = None,
        drafts: int = 0,
    ) -> None:
        """A table of empty slots.

        Args:
            slots: sequences that are computed at the same time.
            pages_per_sequence: maximum pages of a sequence.
            named_in_queries: include slots in queries, for models with state in slots.
            coordinates: coordinates per token, for models whose rotary embedding has sections; None: queries have none.
            drafts: maximum number of guessed tokens of a sequence in a step.
        """
        self.slots = slots
        self._coordinates = coordinates
        self._named_in_queries = named_in_queries
        self._drafts = drafts
        self._page_table = np.zeros((slots, pages_per_sequence), np.int32)
        self._page_ids: list[list[int] | None] = [None] * slots
        self._num_pages = [0] * slots
        self._sampling = sampling_arrays([SamplingParams()] * slots, [NO_NOISE] * slots)
        self._adjustments = no_adjustments(slots)
        self._unadjusted = no_adjustments(1)
        self._bars_ends = [False] * slots

    def batch(self, step: ScheduledStep, shape: BatchShape, *, adjusted: bool = False) -> StepBatch:
        """Updates the page tables and sampling parameters of a step's sequences, and returns the step's arrays."""
        for chunk in step.chunks:
            self._refresh(chunk.sequence)
        # The queries of prefills begin after the capacity for decodes.
        requests = [*range(len(step.decodes)), *(shape.decodes + index for index in range(len(step.prefills)))]
        slots = np.array([chunk.sequence.slot for chunk in step.chunks], np.int32)
        starts = np.array([chunk.start for chunk in step.chunks], np.int32)
        counts = np.array([chunk.count for chunk in step.chunks], np.int32)
        completes = np.array([chunk.completes for chunk in step.chunks], bool)
        rows = _SampledRows.for_chunks(step.chunks, slots, starts + counts, completes) if self._drafts else None

        def by_request(values: np.ndarray) -> np.ndarray:
            """Scatters values per chunk to the requests of the queries."""
            result = np.zeros((shape.decodes + shape.prefills, *values.shape[1:]), values.dtype)
            result[requests] = values
            return result

        def sampled(values: np.ndarray, fill: int = 0) -> np.ndarray:
            """Pads values of rows to the capacity for rows to sample from."""
            padding = np.full((shape.sampled - len(values), *values.shape[1:]), fill, values.dtype)
            return np.concatenate([values, padding])

        slot_of_row = slots if rows is None else rows.slot
        sampling = SamplingArrays(*(sampled(values[slot_of_row]) for values in self._sampling))
        adjustments = LogitAdjustments(*(sampled(x[slot_of_row]) for x in self._adjustments)) if adjusted else None
        queries = Queries.packed(
            *(by_request(values) for values in (self._page_table[slots], starts, counts)),
            decodes=shape.decodes,
            rows=shape.rows,
        )
        if self._named_in_queries:
            queries = dataclasses.replace(queries, slots=by_request(slots))
        if self._coordinates is not None:
            queries = dataclasses.replace(queries, coordinates=_coordinates(step, shape, self._coordinates))
        token, last_row = self._tokens(step, shape)
        samples, position = completes, starts + counts
        if rows is not None:
            last_row, samples, position = last_row[rows.chunk] - rows.after, rows.samples, rows.position
        return StepBatch(
            token=token,
            held=self._held(step, shape, slots),
            queries=queries,
            last_row=sampled(last_row),
            slot=sampled(np.where(samples, slot_of_row, np.int32(self.slots)), fill=self.slots),
            sampling=sampling._replace(position=sampled(position)),
            adjustments=adjustments,
            images=_image_rows(step, shape),
            adapters=_adapter_slots(step, requests, shape) if step.has_adapters else None,
            steps=_steps(step, shape) if step.is_run else None,
            drafted=None if rows is None else self._drafted(step, sampled(rows.offset)),
        )

    def _drafted(self, step: ScheduledStep, offset: np.ndarray) -> DraftedRows:
        """Returns the guesses before the rows to sample from."""
        guesses = np.full((len(offset), self._drafts), NO_GUESS, np.int32)
        row = len(step.decodes)
        for chunk in step.prefills:
            if count := chunk.drafted:
                number = np.arange(count)
                is_before = number < number[:, None] + 1
                guesses[row + 1 : row + 1 + count, :count] = np.where(is_before, np.array(chunk.drafts), NO_GUESS)
            row += chunk.sampled
        return DraftedRows(offset, guesses)

    def _tokens(self, step: ScheduledStep, shape: BatchShape) -> tuple[np.ndarray, np.ndarray]:
        """Returns the token ids that the host knows, and the row of each chunk's last token."""
        token = np.zeros(shape.decodes + shape.rows, np.int32)
        for row, chunk in enumerate(step.decodes):
            if not chunk.sequence.is_held:
                token[row] = chunk.sequence.tokens[chunk.start]
        last_row = [*range(len(step.decodes))]
        for row, chunk in _rows_of_prefills(step, shape):
            token[row : row + chunk.count] = chunk.tokens
            last_row.append(row + chunk.count - 1)
        return token, np.array(last_row, np.int32)

    def _held(self, step: ScheduledStep, shape: BatchShape, slots: np.ndarray) -> np.ndarray:
        """Returns the slots that hold the tokens of decodes."""
        held, decodes = np.zeros(shape.decodes, np.int32), len(step.decodes)
        is_held = np.array([chunk.sequence.is_held for chunk in step.decodes], bool)
        held[:decodes] = np.where(is_held, slots[:decodes], self.slots)
        return held

    def _refresh(self, sequence: sequences.Sequence) -> None:
        """Updates a slot's page table and sampling parameters."""
        slot = sequence.slot
        assert slot is not None
        params = sequence.params
        bars_ends = params.min_tokens > 0 and sequence.length - len(sequence.prompt) < params.min_tokens
        is_new = self._page_ids[slot] is not sequence.page_ids  # another sequence, or the same with new pages
        if is_new:
            self._page_ids[slot], self._num_pages[slot] = sequence.page_ids, 0
            _set_row(self._sampling, slot, sampling_arrays([params], [sequence.noise_key]))
        if is_new or bars_ends != self._bars_ends[slot]:
            barred = sequence.context.end_tokens if bars_ends else ()
            _set_row(
                self._adjustments, slot, logit_adjustments(params, barred) if params.adjusted else self._unadjusted
            )
            self._bars_ends[slot] = bars_ends
        known, count = self._num_pages[slot], len(sequence.page_ids)
        if known < count:
            self._page_table[slot, known:] = 0
            self._page_table[slot, known:count] = sequence.page_ids[known:]
            self._num_pages[slot] = count


class _SampledRows(NamedTuple):
    """The rows to sample from in a step with guesses.

    Attributes:
        chunk: the index of each row's chunk.
        offset: the number of its chunk's guesses that the row follows.
        after: the number of its chunk's guesses after the row.
        slot: the slot of the chunk's sequence.
        position: the position of the token to sample.
        samples: False if the chunk does not sample.
    """

    chunk: Int32[np.ndarray, "R"]
    offset: Int32[np.ndarray, "R"]
    after: Int32[np.ndarray, "R"]
    slot: Int32[np.ndarray, "R"]
    position: Int32[np.ndarray, "R"]
    samples: Bool[np.ndarray, "R"]

    @classmethod
    def for_chunks(
        cls, chunks: Sequence[ScheduledChunk], slots: np.ndarray, ends: np.ndarray, completes: np.ndarray
    ) -> "_SampledRows":
        """Returns the rows of chunks, given the slot, the end and the kind of each."""
        drafted = np.array([chunk.drafted for chunk in chunks], np.int32)
        chunk = np.repeat(np.arange(len(chunks), dtype=np.int32), 1 + drafted)
        first = np.cumsum(1 + drafted, dtype=np.int32) - (1 + drafted)
        offset = np.arange(len(chunk), dtype=np.int32) - first[chunk]
        after = drafted[chunk] - offset
        return cls(chunk, offset, after, slots[chunk], ends[chunk] - after, completes[chunk])


def _steps(step: ScheduledStep, shape: BatchShape) -> Int32[np.ndarray, "decodes"]:
    """Returns the number of steps of a run that each decode takes part in."""
    steps = np.zeros(shape.decodes, np.int32)
    steps[: len(step.decodes)] = [1 + chunk.later for chunk in step.decodes]
    return steps


def _coordinates(step: ScheduledStep, shape: BatchShape, count: int) -> Int32[np.ndarray, "N A"]:
    """Returns the coordinates of each token: its position or, in prompts with images, its place in their layout."""
    result = np.zeros((shape.decodes + shape.rows, count), np.int32)
    images = [chunk.sequence.context.images for chunk in step.decodes]
    position = [chunk.start for chunk in step.decodes]
    excess = [0 if image is None else image.excess for image in images]
    result[: len(position)] = (np.array(position, np.int32) + np.array(excess, np.int32))[:, None]
    for row, chunk in _rows_of_prefills(step, shape):
        images = chunk.sequence.context.images
        if images is None:
            result[row : row + chunk.count] = np.arange(chunk.start, chunk.start + chunk.count)[:, None]
        else:
            result[row : row + chunk.count] = images.coordinates(chunk.start, chunk.count)
    return result


def no_adapters(shape: BatchShape) -> Int32[np.ndarray, "requests"]:
    """Returns the slots of adapters of a batch whose requests have none."""
    return np.full(shape.decodes + shape.prefills, NO_ADAPTER, np.int32)


def _adapter_slots(step: ScheduledStep, requests: Sequence[int], shape: BatchShape) -> Int32[np.ndarray, "requests"]:
    """Returns the slot of each request's adapter, given the requests of the step's chunks."""
    slots = no_adapters(shape)
    for request, chunk in zip(requests, step.chunks, strict=True):
        if chunk.sequence.adapter_slot is not None:
            slots[request] = chunk.sequence.adapter_slot
    return slots


def _image_rows(step: ScheduledStep, shape: BatchShape) -> ImageRows | None:
    """Returns the rows of images among the prefill tokens; None without images."""
    shown = [
        (row - shape.decodes, chunk, images)
        for row, chunk in _rows_of_prefills(step, shape)
        if (images := chunk.sequence.context.images) is not None and images.are_among(chunk.start, chunk.count)
    ]
    if not shown:
        return None
    like = shown[0][2].rows[0]
    present, rows = np.zeros(shape.rows, bool), np.zeros((shape.rows, like.shape[1]), like.dtype)
    for row, chunk, images in shown:
        part = slice(row, row + chunk.count)
        images.put_rows(chunk.start, chunk.count, present[part], rows[part])
    return ImageRows(present, rows)


def _rows_of_prefills(step: ScheduledStep, shape: BatchShape) -> Iterator[tuple[int, ScheduledChunk]]:
    """Yields the first row of each prefill chunk, and the chunk."""
    row = shape.decodes
    for chunk in step.prefills:
        yield row, chunk
        row += padded_rows(chunk.count)


def _set_row(table: SamplingArrays | LogitAdjustments, slot: int, row: SamplingArrays | LogitAdjustments) -> None:
    for values, new in zip(table, row, strict=True):
        values[slot] = new[0]
