"""The step loop: from sequences to tokens, step by step."""

import collections
import dataclasses
import functools
import itertools
import time
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from typing import Any, Final

import jax
import numpy as np
from jaxtyping import Array, PyTree

from detjax.contract import KV_BLOCK
from detjax.engine.adapter_slots import AdapterSlots
from detjax.engine.batch import BatchShapes, StepBatch
from detjax.engine.drafts.draft_head import HeadDrafter
from detjax.engine.drafts.draft_model import DraftModel
from detjax.engine.drafts.drafter import Drafter, SampledStep
from detjax.engine.drafts.drafting import Drafting
from detjax.engine.drafts.loading import Guesser
from detjax.engine.drafts.prompt_lookup import PromptLookup
from detjax.engine.drafts.speculative_config import SpeculativeConfig
from detjax.engine.field_error import FieldError
from detjax.engine.launcher import Launcher
from detjax.engine.model_runner import ModelRunner, StateSizes, bytes_of_snapshot
from detjax.engine.page_pool import PagePool
from detjax.engine.pooling import PooledBatch, pooled_rows
from detjax.engine.program_compiler import ProgramCompiler
from detjax.engine.prompt_results import chunk_rows, prompt_scores, token_results
from detjax.engine.request import Token
from detjax.engine.sampled_tokens import SampledTokens
from detjax.engine.sampling_variant import SamplingVariant
from detjax.engine.scheduler import ScheduledStep, Scheduler
from detjax.engine.sequence import Sequence
from detjax.engine.slot_table import SlotTable
from detjax.engine.snapshots import SnapshotCache
from detjax.engine.step_programs import USE_OF_BLOCKS, StepPrograms, UseOfBlocks
from detjax.engine.step_states import AcceptedTokens, InFlightStep, LaunchedStep, PlannedStep, SampleRows
from detjax.engine.token_masks import Masks, Matcher, computer_for
from detjax.models import Adapter, Decoder, Draft
from detjax.models.adapters.pool import AdapterPool
from detjax.models.vision.clips import image_options_class
from detjax.models.vision.prompt_images import PromptImages
from detjax.operands.options import KVQuantization

_SAMPLES_FOR_A_THREAD: Final = 128
"""Fewest samples of a step that the launcher's thread launches although it need not wait.

The host works for each sample: with 1000 on two GPUs, it takes 13 ms to read a step's tokens and to plan the next one,
and XLA takes as long to launch one, without the GIL. So the two together would take longer than the devices.
"""
_LATE_STEPS: Final = 4
"""Large steps in a row that were launched late, after which steps are planned one step earlier.

A step is large from `_SAMPLES_FOR_A_THREAD` samples on. After a pause, a single late launch is normal. A step that is
planned earlier has a price: a new request waits one step more, and one more token is computed in vain for a sample that
ends.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepLoopConfig:
    """The sizes of a step loop; the other fields are as in `EngineConfig`.

    Attributes:
        shapes: the shapes of its batches.
        pages_per_sequence: maximum pages of a sequence.
        variants: sampling programs that steps may use, the fastest first.
        speculative: settings of speculative decoding. Shapes must have room for its guesses.
        max_loras: slots for adapters; 0: no row has an adapter.
        max_lora_rank: the largest rank of an adapter.
        adapters: adapters for whose modules there must be room, in addition to all linear layers without experts.
        layers_at_once: maximum number of layers that a program computes if it computes a block of them; see
            `step_programs.UseOfBlocks`. None: there are no blocks.
        rows_in_blocks: the fewest rows of prefills that are always computed in blocks.
    """

    shapes: BatchShapes
    num_pages: int
    pages_per_sequence: int
    variants: tuple[SamplingVariant, ...]
    prefix_cache: bool = False
    snapshot_bytes: int = 0
    snapshot_tokens: int = 1
    kv_cache_dtype: KVQuantization | None = None
    runs_of: int = 0
    speculative: SpeculativeConfig | None = None
    max_loras: int = 0
    max_lora_rank: int = 16
    adapters: tuple[Adapter, ...] = ()
    layers_at_once: int | None = None
    rows_in_blocks: int = USE_OF_BLOCKS.rows

    @property
    def most_drafted(self) -> int:
        """Maximum number of guessed tokens of a sequence in a step."""
        return 0 if self.speculative is None else self.speculative.num_speculative_tokens


class StepLoop:
    """Turns sequences into tokens, step after step. One or two steps are in flight while the next is planned.

    `Engine` runs one in a thread, and `generate` runs one until all sequences have ended. Experiments can drive one
    directly to choose the size of prefill chunks and the arrival of sequences. No bit depends on either.

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

    def __init__(
        self,
        scheduler: Scheduler,
        shapes: BatchShapes,
        slots: SlotTable,
        runner: ModelRunner,
        launcher: Launcher | None = None,
        drafting: Drafting | None = None,
    ) -> None:
        """A loop made of these parts; see `for_model`."""
        assert drafting is None or shapes.limits.mixes, "steps with guesses have both prefills and decodes"
        self.drafting = drafting
        self.scheduler = scheduler
        self._shapes = shapes
        self._slots = slots
        self._runner = runner
        self._launcher = launcher or Launcher()
        self._in_flight: collections.deque[InFlightStep] = collections.deque()
        self._left_unread = 0
        """The number of steps that may be unread when the next one is planned."""
        self._newest: InFlightStep | None = None
        """The last step that was started, kept while constraints may need its tokens."""
        self.samples_for_a_thread = _SAMPLES_FOR_A_THREAD
        """See `_SAMPLES_FOR_A_THREAD`; tests choose another number."""
        self.late_steps = _LATE_STEPS
        """See `_LATE_STEPS`; tests choose another number."""
        self._late_in_a_row = 0
        """See `_count_late`."""
        self.reading_since: float | None = None
        """The monotonic time since when the loop waits for the device to finish a step; None while it does not wait."""

    @classmethod
    def for_model(
        cls, model: Decoder, config: StepLoopConfig, launcher: Launcher | None = None, guesser: Guesser = None
    ) -> "StepLoop":
        """Returns a loop with an empty cache on the model's devices.

        Args:
            model: the decoder.
            config: the loop's sizes.
            launcher: launches steps that wait for masks, and large ones; the loop closes it. Default: the thread that
                calls `step` launches them, like all other steps.
            guesser: the model or head of `config.speculative`, if it names one.
        """
        slots = config.shapes.limits.slots
        sections = model.config.rope.sections
        table = SlotTable(
            slots,
            config.pages_per_sequence,
            named_in_queries=model.has_slots,
            coordinates=None if sections is None else len(sections),
            drafts=config.most_drafted,
        )
        adapters = None
        if config.max_loras:
            adapters = AdapterPool(model, config.max_loras, config.max_lora_rank, config.adapters)
        runner = ModelRunner(
            model,
            StateSizes(config.num_pages, slots, config.kv_cache_dtype),
            variants=config.variants,
            empty_batch=functools.partial(table.batch, ScheduledStep()),
            image_tokens=_image_tokens(model, config.pages_per_sequence * KV_BLOCK),
            runs_of=config.runs_of,
            adapters=adapters,
            depths=guesser.head.depths or () if isinstance(guesser, Draft) else None,
            layers_at_once=config.layers_at_once,
            use_of_blocks=UseOfBlocks(config.speculative is not None, config.rows_in_blocks),
        )
        # Pages do not hold the state that layers keep in slots, but snapshots may.
        snapshots = None
        if config.prefix_cache and model.has_slots:
            size = bytes_of_snapshot(model)
            if (count := config.snapshot_bytes // size) > 0:
                snapshots = SnapshotCache(count, size, config.snapshot_tokens)
        keeps_prefixes = config.prefix_cache and (snapshots is not None or not model.has_slots)
        pool = PagePool(config.num_pages, keeps_prefixes=keeps_prefixes, snapshots=snapshots)
        scheduler = Scheduler(pool, config.shapes.limits, AdapterSlots(config.max_loras))
        drafting = None
        if config.speculative is not None:
            drafter = new_drafter(config.speculative, guesser, table, config, runner)
            drafting = Drafting(drafter, config.most_drafted, model.config.vocab_size)
        return cls(scheduler, config.shapes, table, runner, launcher, drafting)

    @property
    def is_idle(self) -> bool:
        """True if nothing is left to compute or read."""
        return self.scheduler.is_idle and not self._in_flight

    def submit(self, sequence: Sequence) -> None:
        """Appends a sequence to the waiting ones."""
        self.scheduler.submit(sequence)

    def compute_images(self, sequences: Iterable[Sequence]) -> None:
        """Computes the rows of prompts' images in large batches, except for images whose pages are in the cache.

        Steps compute rows that are still missing when they need them.
        """
        self._compute_rows(
            images
            for sequence in sequences
            if (images := sequence.context.images) is not None
            and images.spans[-1][1] > self.scheduler.most_cached_tokens(sequence)
        )

    def _compute_rows(self, prompts: Iterable[PromptImages]) -> None:
        missing = [images for images in {id(images): images for images in prompts}.values() if not images.rows]
        if not missing:
            return
        if self._newest is not None:
            # Programs of one thread follow one another on all devices in the same order.
            self._newest.launched.result()
        rows = iter(self._runner.image_rows([patches for images in missing for patches in images.patches]))
        for images in missing:
            images.rows = [next(rows) for _ in images.patches]

    def programs(self) -> StepPrograms:
        """Returns all programs that steps may need."""
        return self._runner.programs(self._empty_batches())

    def warm_up(self, compiler: ProgramCompiler) -> None:
        """Compiles the programs that steps may need; see `ModelRunner.warm_up`. The loop must be idle."""
        if self.drafting is not None:
            # Their processes end before the model's begin, which may remain in the background.
            self.drafting.drafter.compile(compiler)
        self._runner.warm_up(self._empty_batches(), compiler)
        if self.drafting is not None:
            self.drafting.drafter.warm_up([shape for shape in self._shapes if self._runner.has_layers(shape)])

    def wait_for_programs(self) -> None:
        """Waits until all programs are compiled."""
        self._runner.wait_for_programs()

    def close(self) -> None:
        """Waits for the steps in the launcher, and cancels compilations."""
        self._launcher.close()
        self._runner.close()

    def _empty_batches(self) -> list[StepBatch]:
        return [self._slots.batch(ScheduledStep(), shape) for shape in self._shapes]

    @property
    def has_unread(self) -> bool:
        """True if steps are in flight."""
        return bool(self._in_flight)

    @property
    def has_weights(self) -> bool:
        """True if all weights are on the devices."""
        return self._runner.weights.are_complete

    def drain(self) -> list[tuple[Sequence, Token]]:
        """Returns the tokens of all steps in flight, and launches no further step."""
        return [token for _ in range(len(self._in_flight)) for token in self._read(self._in_flight.popleft())]

    def sleep(self, *, keeps_weights: bool) -> None:
        """Releases the devices' memory. Steps in flight must have been read; running sequences wait again.

        Args:
            keeps_weights: copy the weights to the host. Otherwise they are lost.
        """
        self.scheduler.preempt_all()
        self.scheduler.adapters.forget()
        self.scheduler.pool.forget_prefixes()
        self._runner.drop_state()
        if self.drafting is not None:
            self.drafting.drafter.drop_state()
        self._runner.weights.rest(copies=keeps_weights)

    def wake_weights(self) -> None:
        """Puts the weights from the host back on the devices."""
        self._runner.weights.put_back()

    def wake_state(self) -> None:
        """Allocates the cache again."""
        self._runner.make_state()
        if self.drafting is not None:
            self.drafting.drafter.make_state()

    def check_adapter(self, adapter: Adapter) -> None:
        """Raises unless a sequence may have an adapter.

        Raises:
            CheckpointError: the adapter does not fit the model or the slots.
            ValueError: there are no slots.
        """
        self._runner.check_adapter(adapter)

    def weight(self, number: int) -> np.ndarray | None:
        """Returns a weight on the host; see `DeviceWeights.whole`."""
        return self._runner.weights.whole(number)

    def replace_weights(self, new: Mapping[int, np.ndarray]) -> None:
        """Replaces some weights, by their numbers, and clears the prefix cache. The loop must be idle."""
        self._runner.weights.replace(new)
        self.scheduler.pool.forget_prefixes()

    def update_weights(self, params: PyTree[Array]) -> None:
        """Replaces the weights and clears the prefix cache. The loop must be idle.

        Raises:
            ValueError: the weights do not fit the model.
        """
        self._runner.update_weights(params)
        self.scheduler.pool.forget_prefixes()

    def step(self) -> list[tuple[Sequence, Token]]:
        """Launches the next step, if there is one, and returns the tokens of earlier steps."""
        accepted = self._accept_large()
        more, plan = self._plan()
        assert plan.chunks or self._in_flight or self.scheduler.is_idle, "no step is in flight, and none can be started"
        if plan.chunks:
            self._start(self._planned(plan))
        # The device need not wait for texts.
        tokens = list(self._report([*accepted, *more]))
        self._left_unread = self._steps_to_leave_unread(plan)
        while len(self._in_flight) > self._left_unread and not self._is_large(self._in_flight[0].planned):
            tokens += self._read(self._in_flight.popleft())
        if self.is_idle:
            self._newest = None
        return tokens

    def wait(self) -> None:
        """Waits for the devices to finish the step that the next call of `step` reads before it plans, if any.

        Requests that arrive in the meantime can then be part of the plan.
        """
        if len(self._in_flight) > self._left_unread:
            launched = self._in_flight[0].launched.result()
            self.reading_since = time.monotonic()
            jax.block_until_ready(launched.sampled)
            self.reading_since = None

    def _plan(self) -> tuple[list[AcceptedTokens], ScheduledStep]:
        """Returns the next step, and the tokens that had to be accepted to guess the ones after them."""
        drafting, running = self.drafting, self.scheduler.running
        if drafting is None:
            return [], self.scheduler.plan()
        waiting = len(self.scheduler.waiting)
        is_verifying = any(step.planned.plan.verifies for step in self._in_flight)
        accepted: list[AcceptedTokens] = []
        if is_verifying or drafting.wants(running, waiting):
            while self._in_flight:
                step = self._in_flight.popleft()
                accepted += self._accept(step, self._results(step)[0])
        if self._in_flight:
            drafting.skip(running)
            return accepted, self.scheduler.plan()
        return accepted, drafting.fill(self.scheduler.plan(drafting.wanted(running, waiting)))

    def _steps_to_leave_unread(self, plan: ScheduledStep) -> int:
        """Returns how many steps stay in flight after a step has been started."""
        if not plan.chunks:
            return 0
        # The masks of a step need the tokens of the previous step. While the device computes the layers, there is time
        # to compute the masks and to launch the sampling and the next layers, but not to plan these layers as well. So
        # they are planned one step earlier, and their samples may turn out to have ended two steps ago.
        newest = self._in_flight[-1].planned
        # A large step can be launched while the next one is planned. If the host takes longer for the two in turn than
        # the devices for a step, large steps are planned earlier, too. A run keeps the devices busy for several steps.
        is_late = self._is_large(newest) and not plan.is_run and self._late_in_a_row >= self.late_steps
        return 2 if (newest.is_constrained or is_late) and self.scheduler.can_plan_ahead else 1

    def _planned(self, plan: ScheduledStep) -> PlannedStep:
        """Copies a step to the device and marks it as submitted."""
        rows = itertools.accumulate((chunk.sampled for chunk in plan.chunks), initial=0)
        samples = [SampleRows(row, chunk) for row, chunk in zip(rows, plan.chunks, strict=False) if chunk.completes]
        needed = SamplingVariant.needed_by([sample.sequence.params for sample in samples]) if samples else None
        has_adapters = plan.has_adapters
        is_ready = self._runner.has_layers
        if has_adapters:
            is_ready = functools.partial(is_ready, has_adapters=True)
        shape = self._shapes.smallest(plan, is_ready)
        if needed is not None and self._may_run(plan):
            steps = self._runner.steps_of_run(shape, needed, has_adapters=has_adapters)
            if steps > 1:
                self.scheduler.extend_to_run(plan, steps)
        self._compute_rows(
            images
            for chunk in plan.prefills
            if (images := chunk.sequence.context.images) is not None and images.are_among(chunk.start, chunk.count)
        )
        batch = self._slots.batch(plan, shape, adjusted=needed is not None and needed.adjusted)
        first_rows = batch.queries.first_row
        assert first_rows is not None
        unseen = [tokens for sample in samples if (tokens := _unseen(sample.sequence)) is not None]
        copies = self.scheduler.mark_submitted(plan)
        adapters = self.scheduler.adapters.take_pending()
        return PlannedStep(plan, self._runner.copy(batch), first_rows, samples, needed, unseen, copies, adapters)

    def _may_run(self, plan: ScheduledStep) -> bool:
        """Returns whether a step may become a run: it verifies no guess, and nobody needs the steps one by one."""
        drafting = self.drafting
        if drafting is None:
            return True
        return not (
            plan.verifies
            or drafting.drafter.follows
            or drafting.wants(self.scheduler.running, len(self.scheduler.waiting))
        )

    def _start(self, planned: PlannedStep) -> None:
        """Launches a step, in the launcher's thread if it has to wait for masks or has many samples."""
        previous = self._newest
        masks = _start_masks(previous, planned)
        launcher, is_large = self._launcher, self._is_large(planned)
        if masks is None and not is_large and (previous is None or previous.launched.done()):
            # There is nothing to wait for, and little to do meanwhile, so another thread would only add latency.
            launcher = Launcher()
            if previous is not None:
                previous.launched.result()  # raises what the launcher raised
        # A step whose predecessor was read before has not kept the devices waiting by its launch alone.
        before = self._in_flight[-1].launched if is_large and self._in_flight else None
        launched = launcher.submit(functools.partial(self._launch, planned, masks, before))
        self._newest = InFlightStep(planned, launched)
        self._in_flight.append(self._newest)

    def _is_large(self, planned: PlannedStep) -> bool:
        """Returns whether the host may take longer for the samples of a step than the devices."""
        # Drafters work on the device between two launches, in the caller's thread.
        if self.drafting is not None or planned.plan.chunks[0].sequence.context.pooling is not None:
            return False
        return len(planned.samples) >= self.samples_for_a_thread

    def _launch(
        self, planned: PlannedStep, pending: Future[Masks] | None, before: Future[LaunchedStep] | None
    ) -> LaunchedStep:
        """Launches the layers of a step at once, and the sampling when the masks are there.

        If given the step before, finds out whether this step is late.
        """
        for adapter in planned.adapters:
            self._runner.load_adapter(*adapter)
        for tokens in planned.unseen:
            self._runner.note_seen(*tokens)
        for slot, snapshot in planned.copies.restored:
            self._runner.put_slot(slot, snapshot.rows)
        if planned.plan.is_run:
            # A sequence takes its last snapshot before it decodes.
            assert planned.needed is not None and not planned.copies.taken
            sampled = self._runner.decode_run(planned.batch, planned.needed).start_copy()
            if pending is not None:  # a run has no masks, but matchers of the previous step still consume tokens
                pending.result()
            return LaunchedStep([], sampled, {})
        hidden, rows = self._runner.forward(planned.batch)
        # Launches are in order, so the step before has been launched.
        sampled_before = None if before is None else before.result().sampled
        is_late = sampled_before is not None and sampled_before.is_ready
        if self.drafting is not None and self.drafting.drafter.follows:
            self.drafting.drafter.follow(planned.batch, self._runner.last_tokens)
        for slot, snapshot in planned.copies.taken:
            snapshot.rows = self._runner.take_slot(slot)
        if planned.plan.chunks[0].sequence.context.pooling is not None:  # as in all sequences of a model that pools
            return self._pooled(planned, hidden, rows)
        scores = [
            score
            for chunk, first_row in zip(planned.plan.prefills, planned.first_rows, strict=False)
            for score in prompt_scores(self._runner, chunk, int(first_row), rows)
        ]
        masks, sampled = None if pending is None else pending.result(), None
        if planned.needed is not None:
            allowed = masks.allowed if masks is not None and planned.is_constrained else None
            sampled = self._runner.sample(planned.batch, hidden, planned.needed, allowed).start_copy()
        if self._runner.computed is not None and self.drafting is not None:
            self.drafting.drafter.note_sampled(SampledStep(planned.batch, self._runner.computed, sampled))
        return LaunchedStep(scores, sampled, {} if masks is None else masks.failures, is_late=is_late)

    def _pooled(self, planned: PlannedStep, hidden: Any, rows: Any) -> LaunchedStep:
        """Computes the results of prompts and of tokens in a model that pools."""
        prefills = list(zip(planned.plan.prefills, planned.first_rows.tolist(), strict=False))
        tokens = [part for chunk, first_row in prefills for part in token_results(self._runner, chunk, first_row, rows)]
        if self._runner.carries and prefills:
            self._runner.carry(rows, chunk_rows(prefills, planned.batch, self._slots.slots))
        if planned.needed is None:
            return LaunchedStep(tokens, None, {})
        count = planned.batch.shape.sampled
        wanted = pooled_rows([chunk.sequence.context.pooling for chunk in planned.plan.chunks], count)
        if not self._runner.carries:
            return LaunchedStep(tokens, None, {}, self._runner.pool(hidden, wanted).start_copy())
        slots, factors = np.full(count, self._slots.slots, np.int32), np.zeros(count, np.float32)
        for row, chunk in planned.samples:
            assert chunk.sequence.slot is not None
            slots[row] = chunk.sequence.slot
            factors[row] = 1 / len(chunk.sequence.prompt) if self._runner.averages else 1
        return LaunchedStep(tokens, None, {}, self._runner.pool_carried(slots, factors, wanted).start_copy())

    def _read(self, step: InFlightStep) -> Iterable[tuple[Sequence, Token]]:
        """Reads a step's results after later steps have been started."""
        sampled, pooled = self._results(step)
        if pooled is not None:
            return self._read_pooled(step.planned.samples, pooled, len(step.planned.plan.chunks))
        return self._report(self._accept(step, sampled))

    def _accept_large(self) -> list[AcceptedTokens]:
        """Waits for large steps that must be read before the next one is planned, and accepts their tokens.

        They are reported after the next step has been started, since the devices wait for that one.
        """
        accepted: list[AcceptedTokens] = []
        while len(self._in_flight) > self._left_unread:
            step = self._in_flight.popleft()
            accepted += self._accept(step, self._results(step)[0])
        return accepted

    def _results(self, step: InFlightStep) -> tuple[SampledTokens | None, PooledBatch | None]:
        """Waits for a step's results."""
        if len(self._in_flight) > 1:
            # Other threads compute the next step's masks from the same tokens while the device waits.
            self._in_flight[0].launched.result()
        launched = step.launched.result()
        self._count_late(step)
        self.reading_since = time.monotonic()
        for _, snapshot in step.planned.copies.taken:
            snapshot.rows = jax.device_get(snapshot.rows)
        for score in launched.scores:
            score.read()
        sampled = None if launched.sampled is None else launched.sampled.read()
        pooled = None if launched.pooled is None else launched.pooled.read()
        self.reading_since = None
        return sampled, pooled

    def _count_late(self, step: InFlightStep) -> None:
        """Counts large steps in a row that were launched late.

        Once there are `late_steps` of them, launches in time do not end the row: they are in time because steps are
        planned earlier. Only a step that is not large does.
        """
        if not self._is_large(step.planned):
            self._late_in_a_row = 0
        elif step.launched.result().is_late:
            self._late_in_a_row += 1
        elif self._late_in_a_row < self.late_steps:
            self._late_in_a_row = 0

    def _accept(self, step: InFlightStep, sampled: SampledTokens | None) -> Iterator[AcceptedTokens]:
        """Appends the tokens of a step to their sequences. The next step depends on no more."""
        if sampled is None:
            return
        plan, failures = step.planned.plan, step.launched.result().failures
        size, note_accepted = len(plan.chunks), self.scheduler.accept_tokens
        for tokens in sampled.by_step() if plan.is_run else [sampled]:
            token, logprob = tokens.token, tokens.logprob
            for sample in step.planned.samples:
                row, chunk = sample
                sequence = chunk.sequence
                rows = self._rows_that_count(sample, tokens) if chunk.drafted else (row,)
                # The sequence ended after the step was started, or other sequences have more tokens left in the run.
                if sequence.finish_reason is not None:
                    continue
                pairs = [(token[row], logprob[row]) for row in rows]
                if failures:
                    pairs = _with_failures(sequence, pairs, rows, failures)
                count = sequence.accept(pairs)
                note_accepted(sequence, count)
                is_ended = sequence.finish_reason is not None
                if is_ended and sequence.matcher is not None:
                    sequence.matcher.end()
                yield AcceptedTokens(sequence, tokens, rows[:count], size, is_ended)

    def _report(self, accepted: Iterable[AcceptedTokens]) -> Iterator[tuple[Sequence, Token]]:
        """Yields accepted tokens with their logprobs and texts."""
        failed = set[Sequence]()
        for sequence, tokens, rows, size, is_ended in accepted:
            for row in rows if sequence not in failed else ():
                is_last = is_ended and row == rows[-1]
                token = sequence.report(*tokens.at(row, sequence.params), batch=size, is_last=is_last)
                yield sequence, token
                if token.finish_reason is not None and not is_last:  # the tokenizer failed
                    failed.add(sequence)
                    if not is_ended:
                        self.scheduler.release(sequence)
                        if sequence.matcher is not None:
                            sequence.matcher.end()
                    break

    def _rows_that_count(self, sample: SampleRows, tokens: SampledTokens) -> range:
        """Notes the guesses of a chunk that were right, and returns the rows whose tokens count."""
        rows = sample.rows(tokens.token)
        if sample.sequence.finish_reason is None:
            self.scheduler.accept_drafts(sample.chunk, len(rows) - 1)
            if self.drafting is not None:
                self.drafting.note(sample.sequence, sample.chunk.drafted, len(rows) - 1)
        return rows

    def _read_pooled(
        self, samples: Iterable[SampleRows], pooled: PooledBatch, size: int
    ) -> Iterator[tuple[Sequence, Token]]:
        """Ends the sequences whose results a step has computed."""
        for row, chunk in samples:
            sequence = chunk.sequence
            pooling = sequence.context.pooling
            assert pooling is not None
            if sequence.finish_reason is None:
                token = sequence.add_pooled(None if pooling.is_of_tokens else pooled.at(row, pooling), batch=size)
                self.scheduler.accept_tokens(sequence)
                yield sequence, token


def new_drafter(
    speculative: SpeculativeConfig, guesser: Guesser, table: SlotTable, config: StepLoopConfig, runner: ModelRunner
) -> Drafter:
    """Returns the drafter that the settings ask for."""
    if guesser is None:
        return PromptLookup(*speculative.lookup)
    if isinstance(guesser, Decoder):
        sizes = config.num_pages, config.most_drafted
        return DraftModel(guesser, table, config.shapes, *sizes, lambda: runner.last_tokens)
    return HeadDrafter(guesser, table, config.shapes, config.num_pages, runner)


def _image_tokens(model: Decoder, most: int) -> int:
    """Returns the tokens of the largest image, or of all frames of a clip, in sequences of up to `most` tokens."""
    vision = model.config.vision
    if vision is None:
        return 0
    images = model.image_options or image_options_class(vision)()
    sizes = [options.max_pixels for options in (images, model.video_options) if options]
    return max(min(most * vision.clip_frames, max(sizes) // (vision.patch_size * vision.merge_size) ** 2), 1)


def _unseen(sequence: Sequence) -> tuple[int, Seq[int], Seq[int]] | None:
    """Returns a slot and its tokens when a sequence with penalties samples for the first time in it; otherwise None."""
    # Later the device counts the tokens itself, before the host reads them.
    if sequence.is_held or not sequence.params.penalized:
        return None
    assert sequence.slot is not None
    assert not sequence.unread
    return sequence.slot, sequence.prompt, sequence.generated


def _with_failures(
    sequence: Sequence, sampled: Iterable[tuple[int, float]], rows: Iterable[int], failures: Mapping[int, str]
) -> Iterator[tuple[int, float]]:
    """Yields a sequence's tokens with their logprobs. At a row whose constraint has failed the sequence fails, too."""
    for row, token in zip(rows, sampled, strict=True):
        if row in failures:
            message = f"the sample's constraint failed: {failures[row]}"
            sequence.failure = FieldError(message, sequence.params.field_of_masks)
        yield token


def _start_masks(previous: InFlightStep | None, planned: PlannedStep) -> Future[Masks] | None:
    """Starts computing the masks of a planned step, which depend on the tokens of the previous step."""
    samples = [(sample, matcher) for sample in planned.samples if (matcher := sample.sequence.matcher) is not None]
    matchers = {sample.row: matcher for sample, matcher in samples}
    after_guesses = {sample.row: sample.chunk.masks for sample, _ in samples if sample.chunk.drafted}
    accepting = [
        (sample, matcher, sample.sequence.context.end_tokens)
        for sample in (() if previous is None else previous.planned.samples)
        if (matcher := sample.sequence.matcher) is not None and sample.sequence.finish_reason is None
    ]

    def accepted() -> Iterator[tuple[Matcher, int]]:
        if previous is None:
            return
        # The previous step may use the matchers until it is launched.
        launched = previous.launched.result()
        tokens = launched.sampled.read_tokens() if accepting and launched.sampled is not None else []
        for sample, matcher, end_tokens in accepting:
            for row in sample.rows(tokens):
                if tokens[row] not in end_tokens:
                    yield matcher, tokens[row]

    computer = computer_for([*matchers.values(), *(matcher for _, matcher, _ in accepting)])
    rows = planned.batch.shape.sampled
    # Without guesses, computers need not know of them.
    given = (after_guesses,) if after_guesses else ()
    return None if computer is None else computer.start_masks(rows, matchers, accepted, *given)
