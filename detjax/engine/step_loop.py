"""The step loop: from sequences to tokens, one step after the other, without a thread."""

import dataclasses
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Array, PyTree

from detjax.engine.batch import BatchShape, BatchShapes, SlotTable, StepBatch
from detjax.engine.constraints import Masks, Matcher
from detjax.engine.model_runner import ModelRunner
from detjax.engine.page_pool import PagePool
from detjax.engine.program_compiler import ProgramCompiler
from detjax.engine.request import Token
from detjax.engine.scheduler import ScheduledChunk, ScheduledStep, Scheduler
from detjax.engine.sequence import Sequence
from detjax.engine.step_programs import SCORED_ROWS, SampledTokens, SamplingVariant, StepPrograms
from detjax.models import Decoder
from detjax.options import KVQuantization
from detjax.sampling_arrays import Arrays


@runtime_checkable
class Runner(Protocol):
    """What computes steps: `ModelRunner`, or a test's model of it."""

    def copy(self, batch: StepBatch) -> StepBatch: ...

    def forward(self, batch: StepBatch) -> tuple[Any, Any]: ...

    def sample(
        self, batch: StepBatch, hidden: Any, needed: SamplingVariant, allowed: Array | None
    ) -> SampledTokens: ...

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
                _, logprob, top, _ = tokens.at(index, self.sequence.params)
                logprobs.append((logprob, top))


@dataclasses.dataclass(frozen=True)
class _PlannedStep:
    """A step that the device can be given.

    Attributes:
        plan: its chunks.
        batch: its arrays, on the device.
        first_rows: the first row of each chunk's prefill.
        samples: the chunks after which tokens are sampled, each with its row of the sampled tokens.
        needed: what the sampling program must be able to do; None if no token is sampled.
    """

    plan: ScheduledStep
    batch: StepBatch
    first_rows: Arrays
    samples: list[tuple[int, Sequence]]
    needed: SamplingVariant | None

    @property
    def is_constrained(self) -> bool:
        """Whether its tokens can be sampled only after their masks are known."""
        return self.needed is not None and self.needed.constrained


@dataclasses.dataclass
class _InFlightStep:
    """A step that the device has been given and whose results have not been read.

    Attributes:
        planned: the step.
        hidden: what its tokens are sampled from.
        scores: logprobs of prompts.
        masks: what the host computes for the constraints of samples, if any sample has one.
        sampled: the tokens; None if the device has not been told to sample, or if there are none.
    """

    planned: _PlannedStep
    hidden: Any
    scores: list[_PromptScore]
    masks: Future[Masks] | None
    sampled: SampledTokens | None


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
        self._in_flight: _InFlightStep | None = None

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
        return self.scheduler.is_idle and self._in_flight is None

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
        plan, previous = self.scheduler.plan(), self._in_flight
        assert plan.chunks or previous or self.scheduler.is_idle, "no step is in flight, and none can be started"
        # Other threads may still compute the masks of the step before. What does not depend on them comes first.
        planned = self._planned(plan) if plan.chunks else None
        if previous is not None:
            self._take_masks(previous)
        masks = _start_masks(previous, planned)
        self._in_flight = None if planned is None else self._start(planned, masks)
        if planned is None and masks is not None:
            masks.result()
        return [] if previous is None else list(self._read(previous))

    def _planned(self, plan: ScheduledStep) -> _PlannedStep:
        """Copies a step to the device."""
        samples = [(row, chunk.sequence) for row, chunk in enumerate(plan.chunks) if chunk.completes]
        needed = SamplingVariant.needed_by([sequence.params for _, sequence in samples]) if samples else None
        shape = self._shapes.smallest(plan, self._runner.has_layers)
        batch = self._slots.batch(plan, shape, adjusted=needed is not None and needed.adjusted)
        assert batch.queries.first_row is not None
        return _PlannedStep(plan, self._runner.copy(batch), batch.queries.first_row, samples, needed)

    def _start(self, planned: _PlannedStep, masks: Future[Masks] | None) -> _InFlightStep:
        """Has the device compute a step, except that samples with constraints wait for their masks."""
        for _, sequence in planned.samples:
            self._note_seen(sequence)
        self.scheduler.mark_submitted(planned.plan)
        hidden, rows = self._runner.forward(planned.batch)
        scores = [
            score
            for chunk, first_row in zip(planned.plan.prefills, planned.first_rows, strict=False)
            for score in self._scores(chunk, int(first_row), rows)
        ]
        samples_now = planned.needed is not None and not planned.is_constrained
        return _InFlightStep(
            planned, hidden, scores, masks, self._sample(planned, hidden, None) if samples_now else None
        )

    def _take_masks(self, step: _InFlightStep) -> None:
        """Waits for a step's masks, and has the device sample if it was waiting for them."""
        if step.masks is None:
            return
        masks, planned = step.masks.result(), step.planned
        for row, sequence in planned.samples if masks.failures else ():
            if row in masks.failures:
                sequence.failure = ValueError(f"the sample's constraint cannot go on: {masks.failures[row]}")
        if planned.is_constrained:
            step.sampled = self._sample(planned, step.hidden, masks.allowed)

    def _sample(self, planned: _PlannedStep, hidden: Any, allowed: Array | None) -> SampledTokens:
        assert planned.needed is not None
        return self._runner.sample(planned.batch, hidden, planned.needed, allowed).start_copy()

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
        """Reads a step's results after the next step has been started."""
        for score in step.scores:
            score.read()
        if step.sampled is None:
            return
        sampled, size = step.sampled.read(), len(step.planned.plan.chunks)
        for row, sequence in step.planned.samples:
            if sequence.finish_reason is None:  # otherwise the step was started before the sequence's end was known
                token = sequence.add(*sampled.at(row, sequence.params), batch=size)
                self.scheduler.accept_token(sequence)
                yield sequence, token


def _start_masks(previous: _InFlightStep | None, planned: _PlannedStep | None) -> Future[Masks] | None:
    """Begins to compute the masks of a planned step, which depend on the tokens that the step before samples.

    Other threads wait for these tokens and compute the masks, while this one gives the device the planned step: that
    takes a third of a step's time, and does not need the interpreter.
    """
    samples, rows = ([], 0) if planned is None else (planned.samples, planned.batch.shape.sampled)
    matchers = {row: sequence.matcher for row, sequence in samples if sequence.matcher is not None}
    before = previous.planned.samples if previous is not None and previous.sampled is not None else []
    accepting = [
        (row, sequence) for row, sequence in before if sequence.matcher is not None and sequence.finish_reason is None
    ]

    def accepted() -> Iterator[tuple[Matcher, int]]:
        tokens = previous.sampled.read().token.tolist() if previous is not None and previous.sampled is not None else []
        for row, sequence in accepting:
            if sequence.matcher is not None and tokens[row] not in sequence.context.end_tokens:
                yield sequence.matcher, tokens[row]

    some = next(iter([*matchers.values(), *(sequence.matcher for _, sequence in accepting)]), None)
    return None if some is None else some.constraint.compiler.start_masks(rows, matchers, accepted)
