"""The slots' page tables and sampling parameters, from which the batches of steps are made."""

import dataclasses
import itertools
from collections.abc import Hashable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np
from jaxtyping import Bool, Int32

from detjax.engine import sequence as sequences
from detjax.engine.batch import (
    NO_GUESS,
    BatchShape,
    DraftedRows,
    StepBatch,
    logit_adjustments,
    no_adjustments,
    sampling_arrays,
)
from detjax.engine.sampling_params import SamplingParams
from detjax.engine.scheduler import ScheduledChunk, ScheduledStep, padded_rows
from detjax.models.decoder import ImageRows
from detjax.operands.adapted_weight import NO_ADAPTER
from detjax.operands.kv_pages import Queries, members
from detjax.operands.noise import NO_NOISE
from detjax.operands.sampling_arrays import LogitAdjustments, SamplingArrays

_ARRANGEMENTS: Final = 4
"""Arrangements of steps that are kept. A drafter's steps and the model's take turns."""


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
        self._version = 0
        """The number of changes of sampling parameters and adjustments."""
        self._arrangements: dict[Hashable, _Arrangement] = {}

    def batch(self, step: ScheduledStep, shape: BatchShape, *, adjusted: bool = False) -> StepBatch:
        """Updates the page tables and sampling parameters of a step's sequences, and returns the step's arrays."""
        for chunk in step.chunks:
            self._refresh(chunk.sequence)
        slots = np.array([chunk.sequence.slot for chunk in step.chunks], np.int32)
        starts = np.array([chunk.start for chunk in step.chunks], np.int32)
        counts = np.array([chunk.count for chunk in step.chunks], np.int32)
        completes = np.array([chunk.completes for chunk in step.chunks], bool)
        drafted = np.array([chunk.drafted for chunk in step.chunks] if self._drafts else (), np.int32)
        held = self._held(step, shape, slots)
        # Consecutive steps of the same sequences differ in little more than positions.
        arrays = slots, counts, completes, held, drafted
        key = shape, adjusted, len(step.decodes), self._version, *(x.tobytes() for x in arrays)
        arrangement = self._arrangements.get(key)
        if arrangement is None:
            if len(self._arrangements) == _ARRANGEMENTS:
                self._arrangements.pop(next(iter(self._arrangements)))
            arrangement = self._arranged(step, shape, starts, arrays, adjusted=adjusted)
            self._arrangements[key] = arrangement
        return self._at(starts, slots, arrangement, step, shape)

    def _arranged(
        self,
        step: ScheduledStep,
        shape: BatchShape,
        starts: np.ndarray,
        arrays: tuple[np.ndarray, ...],
        *,
        adjusted: bool,
    ) -> "_Arrangement":
        """Returns the arrays of a step that the next one may share."""
        slots, counts, completes, held, drafted = arrays
        rows = _SampledRows.for_chunks(drafted, slots, starts + counts, completes) if self._drafts else None
        queried = _Requests.for_chunks(step, shape)
        requests, chunk, offset = queried

        def by_request(values: np.ndarray) -> np.ndarray:
            """Scatters values per request of a chunk to the requests of the queries."""
            result = np.zeros((shape.requests, *values.shape[1:]), values.dtype)
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
            by_request(self._page_table[slots[chunk]]),
            by_request(starts[chunk] + offset),
            by_request(np.where(requests < shape.decoding, np.minimum(counts[chunk], shape.queries), counts[chunk])),
            decodes=shape.decoding,
            rows=shape.rows,
            decode_queries=shape.queries,
        )
        if self._named_in_queries:
            queries = dataclasses.replace(queries, slots=by_request(slots[chunk]))
        last_row = _last_rows(step, shape)
        samples, position = completes, starts + counts
        if rows is not None:
            last_row, samples, position = last_row[rows.chunk] - rows.after, rows.samples, rows.position
        nothing: Any = None
        batch = StepBatch(
            token=nothing,
            held=held,
            queries=queries,
            last_row=sampled(last_row),
            slot=sampled(np.where(samples, slot_of_row, np.int32(self.slots)), fill=self.slots),
            sampling=sampling._replace(position=sampled(position)),
            adjustments=adjustments,
        )
        chunk_of_row = np.arange(len(slots), dtype=np.int32) if rows is None else rows.chunk
        return _Arrangement(batch, starts, queried, chunk_of_row, None if rows is None else sampled(rows.offset))

    def _at(
        self, starts: np.ndarray, slots: np.ndarray, arrangement: "_Arrangement", step: ScheduledStep, shape: BatchShape
    ) -> StepBatch:
        """Returns the batch of an arrangement whose chunks start at other positions."""
        batch, (requests, chunk, _) = arrangement.batch, arrangement.requests
        queries, sampling = batch.queries, batch.sampling
        assert queries.rows is not None
        by_chunk = starts - arrangement.starts
        moved = np.zeros(shape.requests, np.int32)
        moved[requests] = by_chunk[chunk]
        page_table = np.zeros_like(queries.page_table)
        page_table[requests] = self._page_table[slots[chunk]]
        rows = queries.rows
        position: Any = rows.position + moved[rows.request] * rows.present
        changed: Any = {"page_table": page_table, "start": queries.start + moved, "length": queries.length + moved}
        if self._coordinates is not None:
            changed["coordinates"] = _coordinates(step, shape, self._coordinates)
        moved_rows = np.zeros_like(sampling.position)
        moved_rows[: len(arrangement.chunk_of_row)] = by_chunk[arrangement.chunk_of_row]
        return batch._replace(
            token=self._tokens(step, shape),
            queries=dataclasses.replace(queries, rows=dataclasses.replace(rows, position=position), **changed),
            sampling=sampling._replace(position=sampling.position + moved_rows),
            images=_image_rows(step, shape),
            adapters=_adapter_slots(step, arrangement.requests, shape) if step.has_adapters else None,
            steps=_steps(step, shape) if step.is_run else None,
            drafted=None if arrangement.offset is None else self._drafted_rows(step, arrangement),
        )

    def _drafted_rows(self, step: ScheduledStep, arrangement: "_Arrangement") -> DraftedRows:
        """Returns the guesses before the rows to sample from."""
        drafts = np.full((len(step.chunks), self._drafts), NO_GUESS, np.int32)
        for number, chunk in enumerate(step.chunks):
            if chunk.drafted:
                drafts[number, : chunk.drafted] = chunk.drafts
        offset, chunk = arrangement.offset, arrangement.chunk_of_row
        assert offset is not None
        guesses = np.full((len(offset), self._drafts), NO_GUESS, np.int32)
        is_before = np.arange(self._drafts, dtype=np.int32) < offset[: len(chunk), None]
        np.copyto(guesses[: len(chunk)], drafts[chunk], where=is_before)
        return DraftedRows(offset, guesses)

    def _tokens(self, step: ScheduledStep, shape: BatchShape) -> np.ndarray:
        """Returns the token ids that the host knows."""
        token = np.zeros(shape.decodes + shape.rows, np.int32)
        for row, chunk in _rows_of_decodes(step, shape):
            if not chunk.sequence.is_held:
                token[row] = chunk.sequence.tokens[chunk.start]
            if chunk.drafted:
                token[row + 1 : row + 1 + chunk.drafted] = chunk.drafts
        for row, chunk in _rows_of_prefills(step, shape):
            token[row : row + chunk.count] = chunk.tokens
        return token

    def _held(self, step: ScheduledStep, shape: BatchShape, slots: np.ndarray) -> np.ndarray:
        """Returns the slots that hold the tokens of decodes."""
        held = np.zeros(shape.decodes, np.int32)
        is_held = np.array([chunk.sequence.is_held for chunk in step.decodes], bool)
        chunk, offset = members(_rows_by_decode(step, shape))
        # The host knows guesses.
        held[: len(chunk)] = np.where(is_held[chunk] & (offset == 0), slots[chunk], self.slots)
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
            self._version += 1
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
        cls, drafted: np.ndarray, slots: np.ndarray, ends: np.ndarray, completes: np.ndarray
    ) -> "_SampledRows":
        """Returns the rows of chunks, given the number of guesses, the slot, the end and the kind of each."""
        chunk, offset = members(1 + drafted)
        after = drafted[chunk] - offset
        return cls(chunk, offset, after, slots[chunk], ends[chunk] - after, completes[chunk])


class _Requests(NamedTuple):
    """The requests of the queries of a step's chunks.

    A decode with guesses is as many requests of one query, unless the shape's requests have several decodes.

    Attributes:
        number: the number of each request. The requests of prefills begin after the capacity for decodes.
        chunk: the index of its chunk.
        offset: the number of guesses that its query follows.
    """

    number: Int32[np.ndarray, "_"]
    chunk: Int32[np.ndarray, "_"]
    offset: Int32[np.ndarray, "_"]

    @classmethod
    def for_chunks(cls, step: ScheduledStep, shape: BatchShape) -> "_Requests":
        """Returns the requests of a step's chunks, in their order."""
        decodes = _rows_by_decode(step, shape) // shape.queries
        chunk, offset = members(np.concatenate([decodes, np.ones(len(step.prefills), np.int32)]))
        number = np.arange(len(chunk), dtype=np.int32)
        number[len(chunk) - len(step.prefills) :] = shape.decoding + np.arange(len(step.prefills))
        return cls(number, chunk, offset)


class _Arrangement(NamedTuple):
    """The arrays that consecutive steps share if they have the same sequences, with as many tokens of each.

    Attributes:
        batch: arrays of the first of these steps; the others have other tokens, pages and positions.
        starts: the position of the first token of each chunk in it.
        requests: the requests of the queries.
        chunk_of_row: the chunk of each row to sample from, without padding.
        offset: see `DraftedRows`; None if no step of the loop has guesses.
    """

    batch: StepBatch
    starts: Int32[np.ndarray, "chunks"]
    requests: _Requests
    chunk_of_row: Int32[np.ndarray, "_"]
    offset: Int32[np.ndarray, "R"] | None


def _last_rows(step: ScheduledStep, shape: BatchShape) -> Int32[np.ndarray, "chunks"]:
    """Returns the row of each chunk's last token."""
    rows = itertools.chain(_rows_of_decodes(step, shape), _rows_of_prefills(step, shape))
    return np.array([row + chunk.count - 1 for row, chunk in rows], np.int32)


def _steps(step: ScheduledStep, shape: BatchShape) -> Int32[np.ndarray, "decodes"]:
    """Returns the number of steps of a run that each decode takes part in."""
    steps = np.zeros(shape.decodes, np.int32)
    steps[: len(step.decodes)] = [1 + chunk.later for chunk in step.decodes]
    return steps


def _coordinates(step: ScheduledStep, shape: BatchShape, count: int) -> Int32[np.ndarray, "N A"]:
    """Returns the coordinates of each token: its position or, in prompts with images, its place in their layout."""
    result = np.zeros((shape.decodes + shape.rows, count), np.int32)
    for row, chunk in _rows_of_decodes(step, shape):
        images = chunk.sequence.context.images
        first = chunk.start + (0 if images is None else images.excess)
        result[row : row + chunk.count] = np.arange(first, first + chunk.count)[:, None]
    for row, chunk in _rows_of_prefills(step, shape):
        images = chunk.sequence.context.images
        if images is None:
            result[row : row + chunk.count] = np.arange(chunk.start, chunk.start + chunk.count)[:, None]
        else:
            result[row : row + chunk.count] = images.coordinates(chunk.start, chunk.count)
    return result


def no_adapters(shape: BatchShape) -> Int32[np.ndarray, "requests"]:
    """Returns the slots of adapters of a batch whose requests have none."""
    return np.full(shape.requests, NO_ADAPTER, np.int32)


def _adapter_slots(step: ScheduledStep, requests: _Requests, shape: BatchShape) -> Int32[np.ndarray, "requests"]:
    """Returns the slot of each request's adapter."""
    slots = no_adapters(shape)
    by_chunk = np.array([chunk.adapter_slot for chunk in step.chunks], np.int32)
    slots[requests.number] = by_chunk[requests.chunk]
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


def _rows_of_decodes(step: ScheduledStep, shape: BatchShape) -> Iterator[tuple[int, ScheduledChunk]]:
    """Yields the first row of each decode chunk, and the chunk. Its guesses have the next rows."""
    row = 0
    for chunk, rows in zip(step.decodes, _rows_by_decode(step, shape).tolist(), strict=True):
        yield row, chunk
        row += rows


def _rows_by_decode(step: ScheduledStep, shape: BatchShape) -> Int32[np.ndarray, "_"]:
    """Returns the rows of each decode chunk: as many as it has tokens, or all of its request's."""
    return np.array([max(chunk.count, shape.queries) for chunk in step.decodes], np.int32)


def _rows_of_prefills(step: ScheduledStep, shape: BatchShape) -> Iterator[tuple[int, ScheduledChunk]]:
    """Yields the first row of each prefill chunk, and the chunk."""
    row = shape.decodes
    for chunk in step.prefills:
        yield row, chunk
        row += padded_rows(chunk.count)


def _set_row(table: SamplingArrays | LogitAdjustments, slot: int, row: SamplingArrays | LogitAdjustments) -> None:
    for values, new in zip(table, row, strict=True):
        values[slot] = new[0]
