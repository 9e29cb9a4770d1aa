"""The engine without its thread: step after step, one of which is always on its way while the next is planned."""

import dataclasses
from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import numpy as np

from detjax.engine.device import SCORED_ROWS, Found
from detjax.engine.inputs import Inputs, Shapes, Slots, rows_of
from detjax.engine.request import Token
from detjax.engine.sample import Sample
from detjax.engine.scheduler import Piece, Scheduler, Step


@runtime_checkable
class Computes(Protocol):
    """What computes steps: `device.Device`."""

    def compute(self, inputs: Inputs, *, filtered: bool, with_top: bool) -> tuple[Found, Any]: ...

    def scores(self, rows: Any, first: int, tokens: np.ndarray) -> Found: ...


@dataclasses.dataclass(frozen=True)
class _OnItsWay:
    """A step that the device has been given."""

    pieces: list[tuple[int, Piece]]
    """With the row of what is found that is each piece's own."""
    batch: int
    """Samples of the step, those included of which nothing is sampled."""
    found: Found
    scores: list[tuple[Sample, int, int, Found]]
    """Of a prompt's tokens: whose, from which position on, how many, and what is found."""


class Core:
    """Takes samples, and turns them into tokens."""

    def __init__(self, scheduler: Scheduler, shapes: Shapes, slots: Slots, device: Computes) -> None:
        self.scheduler = scheduler
        self._shapes = shapes
        self._slots = slots
        self._device = device
        self._on_their_way: deque[_OnItsWay] = deque()

    @property
    def is_idle(self) -> bool:
        return self.scheduler.is_idle and not self._on_their_way

    def step(self) -> list[tuple[Sample, Token]]:
        """Gives the device its next step, if there is one, and returns the tokens of the one before."""
        step = self.scheduler.plan()
        started = bool(step.pieces)
        if started:
            self._start(step)
        if len(self._on_their_way) > started:
            return list(self._read(self._on_their_way.popleft()))
        assert started or self.scheduler.is_idle, "nothing is on its way, and nothing can be started"
        return []

    def _start(self, step: Step) -> None:
        shape = self._shapes.of(step)
        params = [piece.sample.params for piece in step.pieces if piece.completes]
        inputs = self._slots.inputs(step, shape)
        found, rows = self._device.compute(
            inputs,
            filtered=any(of.filtered for of in params),
            with_top=any(of.top_logprobs for of in params),
        )
        scores = [
            score
            for piece, row in zip(step.prefills, inputs.q_row, strict=False)
            for score in self._scores(piece, int(row), rows)
        ]
        pieces = [(row, piece) for row, piece in zip(rows_of(step, shape), step.pieces, strict=True) if piece.completes]
        self._on_their_way.append(_OnItsWay(pieces, len(step.pieces), found.on_its_way(), scores))
        self.scheduler.given(step)

    def _scores(self, piece: Piece, row: int, rows: Any) -> Iterator[tuple[Sample, int, int, Found]]:
        prompt = piece.sample.prompt
        if not piece.sample.params.prompt_logprobs:
            return
        # The hidden state at a position tells of the token behind it.
        end = min(piece.start + piece.count + 1, len(prompt))
        for first in range(piece.start + 1, end, SCORED_ROWS):
            tokens = np.asarray(prompt[first : min(first + SCORED_ROWS, end)], np.int32)
            found = self._device.scores(rows, row + first - 1 - piece.start, tokens)
            yield piece.sample, first, len(tokens), found.on_its_way()

    def _read(self, step: _OnItsWay) -> Iterator[tuple[Sample, Token]]:
        for sample, first, count, found in step.scores:
            found = found.read()
            for index in range(count):
                position = first + index
                # What was computed anew, its pages having been taken away, is known.
                if position == len(sample.prompt_logprobs) + 1:
                    _, logprob, top = found.at(index, sample.params.top_logprobs)
                    sample.prompt_logprobs.append((logprob, top))
        found = step.found.read()
        for row, piece in step.pieces:
            sample = piece.sample
            if sample.finish_reason is None:  # else it was given a step too many before that was known
                token = sample.add(*found.at(row, sample.params.top_logprobs), batch=step.batch)
                self.scheduler.read(sample)
                yield sample, token
