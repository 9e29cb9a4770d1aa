"""The step loop: from sequences to tokens, one step after the other, without a thread."""

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Array, PyTree

from detjax.engine.batch import BatchShape, BatchShapes, SlotTable, StepBatch
from detjax.engine.model_runner import ModelRunner
from detjax.engine.page_pool import PagePool
from detjax.engine.program_compiler import ProgramCompiler
from detjax.engine.request import Token
from detjax.engine.scheduler import ScheduledChunk, ScheduledStep, Scheduler
from detjax.engine.sequence import Sequence
from detjax.engine.step_programs import SCORED_ROWS, SampledTokens, SamplingVariant, StepPrograms
from detjax.models import Decoder
from detjax.options import KVQuantization


@runtime_checkable
class Runner(Protocol):
    """What computes steps: `ModelRunner`, or a test's model of it."""

    def compute(
        self, batch: StepBatch, needed: SamplingVariant | None, allowed: Callable[[], np.ndarray] | None = None
    ) -> tuple[SampledTokens | None, Any]: ...

    def note_seen(self, slot: int, prompt: Seq[int], generated: Seq[int]) -> None: ...

    def score(self, rows: Any, first: int, tokens: np.ndarray) -> SampledTokens: ...

    def programs(self, batches: Iterable[StepBatch]) -> StepPrograms: ...

    def warm_up(self, batches: Seq[StepBatch], compiler: ProgramCompiler) -> None: ...

    def has_layers(self, shape: BatchShape) -> bool: ...

    def wait_for_programs(self) -> None: ...

    def close(self) -> None: ...

    def update_weights(self, params: PyTree[Array]) -> None: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepLoopConfig:
    """The sizes of a step loop.

    Attributes:
        shapes: the shapes of its batches.
        num_pages: pages of the cache.
        pages_per_sequence: pages of a sequence at most.
        variants: sampling programs that steps may use, the fastest first.
        prefix_cache: keep pages for sequences that begin with the same tokens.
        kv_cache_dtype: how keys and values are quantized in the cache. Among these fields it alone changes bits.
    """

    shapes: BatchShapes
    num_pages: int
    pages_per_sequence: int
    variants: tuple[SamplingVariant, ...]
    prefix_cache: bool = False
    kv_cache_dtype: KVQuantization | None = None


@dataclasses.dataclass(frozen=True)
class _PromptScore:
    """Logprobs of some of a prompt's tokens, which a step in flight computes."""

    sequence: Sequence
    position: int
    """Position of the first of the tokens."""
    count: int
    tokens: SampledTokens

    def read(self) -> None:
        """Waits for the logprobs, and gives them to the sequence."""
        tokens, logprobs = self.tokens.read(), self.sequence.output.prompt_logprobs
        for index in range(self.count):
            # A preempted sequence computes some of its logprobs twice.
            if self.position + index == len(logprobs) + 1:
                _, logprob, top = tokens.at(index, self.sequence.params.top_logprobs)
                logprobs.append((logprob, top))


@dataclasses.dataclass(frozen=True)
class _InFlightStep:
    """A step that the device has been given and whose results have not been read."""

    chunks: list[tuple[int, ScheduledChunk]]
    """The chunks after which tokens are sampled, each with its row of `sampled`."""
    batch: int
    """Sequences of the step."""
    sampled: SampledTokens | None
    scores: list[_PromptScore]


class StepLoop:
    """Turns sequences into tokens, step after step. One step is in flight while the next is planned.

    `Engine` runs one in a thread, `generate` runs one until all its sequences have ended, and experiments drive one
    themselves: they choose the size of prefill chunks, and when sequences arrive. No bit depends on either.

    Example:
        >>> from pathlib import Path
        >>> import detjax.demo
        >>> from detjax.engine import BatchShapes, SamplingParams, SamplingVariant, Sequence, StepLoop, StepLoopConfig
        >>> from detjax.models import load
        >>> model, _ = load(detjax.demo.CHECKPOINT, progress=False)
        >>> shapes = BatchShapes.for_chunks(slots=2, prefill_chunk=4, mixes=True)
        >>> greedy = SamplingVariant(filtered=False, top_logprobs=0)
        >>> config = StepLoopConfig(shapes=shapes, num_pages=2, pages_per_sequence=1, variants=(greedy,))
        >>> loop = StepLoop.for_model(model, config)
        >>> first, second = (Sequence((1, 2, 3, 4, 5, 6), SamplingParams(max_tokens=3)) for _ in range(2))
        >>> loop.submit(first)
        >>> for _ in range(2):
        ...     _ = loop.step()
        >>> loop.submit(second)
        >>> while not loop.is_idle:
        ...     _ = loop.step()
        >>> first.completion() == second.completion()
        True
    """

    def __init__(self, scheduler: Scheduler, shapes: BatchShapes, slots: SlotTable, runner: Runner) -> None:
        """A loop of these parts; see `for_model`."""
        self.scheduler = scheduler
        self._shapes = shapes
        self._slots = slots
        self._runner = runner
        self._in_flight: deque[_InFlightStep] = deque()

    @classmethod
    def for_model(cls, model: Decoder, config: StepLoopConfig) -> "StepLoop":
        """Returns a loop with an empty cache, which computes with the model on the default device."""
        slots = config.shapes.limits.slots
        runner = ModelRunner(
            model,
            num_pages=config.num_pages,
            slots=slots,
            variants=config.variants,
            kv_cache_dtype=config.kv_cache_dtype,
        )
        scheduler = Scheduler(PagePool(config.num_pages, keeps_prefixes=config.prefix_cache), config.shapes.limits)
        return cls(scheduler, config.shapes, SlotTable(slots, config.pages_per_sequence), runner)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to compute or to read."""
        return self.scheduler.is_idle and not self._in_flight

    def submit(self, sequence: Sequence) -> None:
        """Appends a sequence to the waiting ones."""
        self.scheduler.submit(sequence)

    def programs(self) -> StepPrograms:
        """Returns every program that steps may need."""
        return self._runner.programs(self._empty_batches())

    def warm_up(self, compiler: ProgramCompiler) -> None:
        """Compiles the programs that steps may need; see `ModelRunner.warm_up`. The loop must be idle."""
        self._runner.warm_up(self._empty_batches(), compiler)

    def wait_for_programs(self) -> None:
        """Waits until nothing is compiled any more."""
        self._runner.wait_for_programs()

    def close(self) -> None:
        """Ends what is still being compiled."""
        self._runner.close()

    def _empty_batches(self) -> list[StepBatch]:
        return [self._slots.batch(ScheduledStep(), shape) for shape in self._shapes]

    def update_weights(self, params: PyTree[Array]) -> None:
        """Replaces the weights, and forgets all prefixes in the cache. The loop must be idle.

        Raises:
            ValueError: the weights do not fit the model.
        """
        self._runner.update_weights(params)
        self.scheduler.pool.forget_prefixes()

    def step(self) -> list[tuple[Sequence, Token]]:
        """Gives the device its next step, if there is one, and returns the tokens of the step before."""
        step = self.scheduler.plan()
        is_started = bool(step.chunks)
        assert is_started or self._in_flight or self.scheduler.is_idle, "no step is in flight, and none can be started"
        tokens = self._start(step) if is_started else []
        while len(self._in_flight) > is_started:
            tokens += self._read(self._in_flight.popleft())
        return tokens

    def _start(self, step: ScheduledStep) -> list[tuple[Sequence, Token]]:
        """Gives the device a step. Returns the tokens of the step before, if the step's constraints depend on them."""
        shape = self._shapes.smallest(step, self._runner.has_layers)
        chunks = [(row, chunk) for row, chunk in enumerate(step.chunks) if chunk.completes]
        needed = SamplingVariant.needed_by([chunk.sequence.params for _, chunk in chunks]) if chunks else None
        batch = self._slots.batch(step, shape, adjusted=needed is not None and needed.adjusted)
        for _, chunk in chunks:
            self._note_seen(chunk.sequence)
        tokens: list[tuple[Sequence, Token]] = []

        def allowed() -> np.ndarray:
            # Which tokens may come next depends on the last ones. The device sampled them before it began this step.
            while self._in_flight:
                tokens.extend(self._read(self._in_flight.popleft()))
            return _masks(shape, chunks)

        self.scheduler.mark_submitted(step)
        is_constrained = needed is not None and needed.constrained
        sampled, hidden = self._runner.compute(batch, needed, allowed if is_constrained else None)
        first_rows = batch.queries.first_row
        assert first_rows is not None
        scores = [
            score
            for chunk, first_row in zip(step.prefills, first_rows, strict=False)
            for score in self._scores(chunk, int(first_row), hidden)
        ]
        sampled = None if sampled is None else sampled.start_copy()
        self._in_flight.append(_InFlightStep(chunks, len(step.chunks), sampled, scores))
        return tokens

    def _note_seen(self, sequence: Sequence) -> None:
        """Tells the device the tokens of a sequence with penalties when it samples for the first time in its slot."""
        # The device counts what it samples later, and it knows those tokens before the host does.
        if sequence.params.penalized and not sequence.is_held:
            assert sequence.slot is not None
            assert not sequence.unread
            self._runner.note_seen(sequence.slot, sequence.prompt, sequence.generated)

    def _scores(self, chunk: ScheduledChunk, first_row: int, hidden: Any) -> Iterator[_PromptScore]:
        """Computes the prompt logprobs that a chunk's hidden states give, if the request asks for them."""
        prompt = chunk.sequence.prompt
        if not chunk.sequence.params.prompt_logprobs:
            return
        # The hidden state at a position gives the logprob of the token after it.
        end = min(chunk.start + chunk.count + 1, len(prompt))
        for position in range(chunk.start + 1, end, SCORED_ROWS):
            tokens = np.asarray(prompt[position : min(position + SCORED_ROWS, end)], np.int32)
            scored = self._runner.score(hidden, first_row + position - 1 - chunk.start, tokens)
            yield _PromptScore(chunk.sequence, position, len(tokens), scored.start_copy())

    def _read(self, step: _InFlightStep) -> Iterator[tuple[Sequence, Token]]:
        for score in step.scores:
            score.read()
        if step.sampled is None:
            return
        sampled = step.sampled.read()
        for row, chunk in step.chunks:
            sequence = chunk.sequence
            if sequence.finish_reason is None:  # otherwise the step was started before the sequence's end was known
                token = sequence.add(*sampled.at(row, sequence.params.top_logprobs), batch=step.batch)
                self.scheduler.accept_token(sequence)
                yield sequence, token


def _masks(shape: BatchShape, chunks: list[tuple[int, ScheduledChunk]]) -> np.ndarray:
    """Returns the tokens that each row of a step may choose; see `ops.adjust_logits`."""
    matchers = {row: chunk.sequence.matcher for row, chunk in chunks if chunk.sequence.matcher is not None}
    compiler = next(iter(matchers.values())).constraint.compiler
    going_on = {row for row, chunk in chunks if chunk.sequence.finish_reason is None}
    return compiler.masks(shape.sampled, {row: matcher for row, matcher in matchers.items() if row in going_on})
