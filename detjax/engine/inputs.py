"""A step as the device takes it: arrays whose shapes come from a few that programs were compiled for."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float32, Int32, UInt32

from detjax import ops
from detjax.contract import QUERY_UNIT
from detjax.engine.sample import Sample
from detjax.engine.sampling import SamplingParams
from detjax.engine.scheduler import Limits, Step, rows_taken

_GROWTH = 4
"""From one size to the next."""
_LEAST_ROWS = 64
"""Of the smallest step that prefills."""

Arrays = np.ndarray | jax.Array


@dataclasses.dataclass(frozen=True, order=True)
class Shape:
    """What a compiled step has room for.

    Attributes:
        decodes: samples of which the last token is computed.
        rows: of samples that prefill; each begins at a multiple of `QUERY_UNIT`.
        prefills: these samples.
    """

    decodes: int
    rows: int
    prefills: int

    @property
    def sampled(self) -> int:
        """Rows that tokens are sampled from: one of each sample."""
        return self.decodes + self.prefills


class Shapes:
    """The shapes that an engine's steps come in, few enough to compile them all before the first request."""

    def __init__(self, samples: int, tokens: int) -> None:
        """Shapes for so many samples that have a slot, and so many tokens of a step."""
        self._decodes = _sizes(1, samples)
        self._rows = _sizes(min(_LEAST_ROWS, rows_taken(tokens)), rows_taken(tokens))
        self._prefills = {rows: min(samples, rows // QUERY_UNIT) for rows in self._rows}
        # Beside prefills, a few decodes too many cost little.
        self._beside_prefills = [0, *self._decodes[::-2][::-1]]
        self.limits = Limits(samples, tokens, self._prefills[self._rows[-1]], self._rows[-1])

    def __iter__(self) -> Iterator[Shape]:
        yield from (Shape(decodes, 0, 0) for decodes in self._decodes)
        yield from (
            Shape(decodes, rows, self._prefills[rows]) for rows in self._rows for decodes in self._beside_prefills
        )

    def of(self, step: Step) -> Shape:
        """The smallest shape that has room for the step."""
        if not step.prefills:
            return Shape(_least(self._decodes, len(step.decodes)), 0, 0)
        needed = sum(rows_taken(piece.count) for piece in step.prefills)
        rows = next(n for n in self._rows if n >= needed and self._prefills[n] >= len(step.prefills))
        return Shape(_least(self._beside_prefills, len(step.decodes)), rows, self._prefills[rows])


def _sizes(first: int, last: int) -> list[int]:
    sizes = [first]
    while sizes[-1] < last:
        sizes.append(min(_GROWTH * sizes[-1], last))
    return sizes


def _least(sizes: list[int], needed: int) -> int:
    return next(size for size in sizes if size >= needed)


class Choice(NamedTuple):
    """What a row's next token is chosen by, of `ops.sample`'s arguments all but the logits."""

    seed: UInt32[Arrays, "R 2"]
    position: Int32[Arrays, "R"]
    sample_index: Int32[Arrays, "R"]
    temperature: Float32[Arrays, "R"]
    top_k: Int32[Arrays, "R"]
    top_p: Float32[Arrays, "R"]
    min_p: Float32[Arrays, "R"]

    @classmethod
    def of(cls, params: Sequence[SamplingParams], sample_index: Sequence[int]) -> "Choice":
        """A row for each of the samples given, on the host; positions, which change from step to step, are zeros."""
        return cls(
            seed=np.array([ops.seed_words(row.seed) for row in params], np.uint32),
            position=np.zeros(len(params), np.int32),
            sample_index=np.array(sample_index, np.int32),
            temperature=np.array([row.temperature for row in params], np.float32),
            top_k=np.array([row.top_k for row in params], np.int32),
            top_p=np.array([row.top_p for row in params], np.float32),
            min_p=np.array([row.min_p for row in params], np.float32),
        )


class Inputs(NamedTuple):
    """Of a step of `Shape`: N is its decodes and its rows, R its decodes and its prefills.

    The fields that `models.cache.Packed` has too are explained there.
    """

    token: Int32[Arrays, "N"]
    """Of those that decode the device has it."""
    held: Int32[Arrays, "decodes"]
    """The slots that it has them in."""
    page_table: Int32[Arrays, "R p"]
    request: Int32[Arrays, "N"]
    position: Int32[Arrays, "N"]
    present: Int32[Arrays, "N"]
    q_row: Int32[Arrays, "prefills"]
    q_length: Int32[Arrays, "prefills"]
    q_start: Int32[Arrays, "prefills"]
    last_row: Int32[Arrays, "R"]
    """Of each sample the last token that is computed, of the N."""
    slot: Int32[Arrays, "R"]
    """Where the next token is kept; behind all slots for a sample that goes on with its prompt."""
    choice: Choice

    @property
    def shape(self) -> Shape:
        return Shape(len(self.held), len(self.token) - len(self.held), len(self.q_row))


class Slots:
    """What steps need of the samples that have a slot, by slot."""

    def __init__(self, count: int, pages: int) -> None:
        """Tables for so many slots, whose samples have so many pages at most."""
        self.count = count
        self._page_table = np.zeros((count, pages), np.int32)
        self._pages: list[list[int] | None] = [None] * count
        self._known = [0] * count
        self._choice = Choice.of([SamplingParams()] * count, [0] * count)

    def inputs(self, step: Step, shape: Shape) -> Inputs:
        """The step's arrays; what the shape has too many of belongs nowhere."""
        for piece in step.pieces:
            self._refresh(piece.sample)
        decodes, prefills, total = len(step.decodes), len(step.prefills), shape.decodes + shape.rows
        own = rows_of(step, shape)
        slots = np.array([piece.sample.slot for piece in step.pieces], np.int32)
        starts = np.array([piece.start for piece in step.pieces], np.int32)
        counts = np.array([piece.count for piece in step.pieces], np.int32)
        completes = np.array([piece.completes for piece in step.pieces], bool)

        def table(rows: int, values: np.ndarray, fill: int | float = 0) -> np.ndarray:
            out = np.full((rows, *values.shape[1:]), fill, values.dtype)
            out[own] = values
            return out

        token, request, position, present = (np.zeros(total, np.int32) for _ in range(4))
        q_row, q_length, q_start = (np.zeros(shape.prefills, np.int32) for _ in range(3))
        request[:decodes], position[:decodes], present[:decodes] = np.arange(decodes), starts[:decodes], 1
        last_row = np.arange(decodes + prefills, dtype=np.int32)
        row = 0
        for number, piece in enumerate(step.prefills):
            rows = slice(shape.decodes + row, shape.decodes + row + piece.count)
            token[rows] = piece.sample.tokens[piece.start : piece.start + piece.count]
            request[rows], present[rows] = shape.decodes + number, 1
            position[rows] = np.arange(piece.start, piece.start + piece.count)
            q_row[number], q_length[number], q_start[number] = row, piece.count, piece.start
            last_row[decodes + number] = rows.stop - 1
            row += rows_taken(piece.count)
        q_row[prefills:] = row
        held = np.zeros(shape.decodes, np.int32)
        held[:decodes] = slots[:decodes]
        choice = {name: table(shape.sampled, values[slots]) for name, values in self._choice._asdict().items()}
        return Inputs(
            token=token,
            held=held,
            page_table=table(shape.sampled, self._page_table[slots]),
            request=request,
            position=position,
            present=present,
            q_row=q_row,
            q_length=q_length,
            q_start=q_start,
            last_row=table(shape.sampled, last_row),
            slot=table(shape.sampled, np.where(completes, slots, self.count).astype(np.int32), fill=self.count),
            choice=Choice(**choice | {"position": table(shape.sampled, starts + counts)}),
        )

    def _refresh(self, sample: Sample) -> None:
        slot = sample.slot
        assert slot is not None
        if self._pages[slot] is not sample.pages:  # another sample, or the same with other pages
            self._pages[slot], self._known[slot] = sample.pages, 0
            for name, values in Choice.of([sample.params], [sample.index])._asdict().items():
                getattr(self._choice, name)[slot] = values[0]
        known, count = self._known[slot], len(sample.pages)
        if known < count:
            self._page_table[slot, known:] = 0
            self._page_table[slot, known:count] = sample.pages[known:]
            self._known[slot] = count


def rows_of(step: Step, shape: Shape) -> list[int]:
    """Of each of the step's pieces: the row of what is sampled that is its own."""
    return [*range(len(step.decodes)), *(shape.decodes + index for index in range(len(step.prefills)))]
