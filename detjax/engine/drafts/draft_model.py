"""A smaller model that guesses tokens, with keys and values of its own."""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

import numpy as np
from jaxtyping import Array, Int32

from detjax.contract import KV_BLOCK
from detjax.engine.batch import BatchShape, BatchShapes, StepBatch
from detjax.engine.drafts.drafter import Drafter
from detjax.engine.model_runner import ModelRunner, StateSizes
from detjax.engine.packed_batch import PackedBatch
from detjax.engine.program_compiler import ProgramCompiler
from detjax.engine.sampling_variant import SamplingVariant
from detjax.engine.scheduler import ScheduledChunk, ScheduledStep
from detjax.engine.sequence import Sequence
from detjax.engine.slot_table import SlotTable
from detjax.engine.step_programs import has_runs
from detjax.models import Decoder

_VARIANTS = SamplingVariant(False, 0), SamplingVariant(True, 0)


class DraftModel(Drafter):
    """Guesses what a smaller model would sample with the noise of the request.

    The model computes every step that the larger one computes, in pages with the same ids. So its cache always has what
    the larger model's has: shared prefixes, and nothing of wrong guesses or preempted sequences.
    """

    follows = True
    guess_cost = 0.11  # as of a head: a small model's layers are few

    def __init__(
        self,
        model: Decoder,
        table: SlotTable,
        shapes: BatchShapes,
        num_pages: int,
        most: int,
        last: Callable[[], Int32[Array, "slots"]],
    ) -> None:
        """A drafter with an empty cache.

        Args:
            model: the smaller model; see `loading.load_guesser`.
            table: the sequences in the slots.
            shapes: the shapes of the step loop's batches.
            num_pages: the number of pages of the larger model.
            most: maximum number of guesses of a sequence in a step.
            last: returns the last token of each slot, on the device.
        """
        self._table, self._shapes, self._last = table, shapes, last
        self._runner = ModelRunner(
            model,
            StateSizes(num_pages, table.slots, None),
            variants=_VARIANTS,
            empty_batch=self._empty,
            runs_of=table.slots,
            run_steps=most,
            samples=False,
        )

    def propose(self, wanted: Mapping[Sequence, int]) -> Mapping[Sequence, Seq[int]]:
        """Returns tokens that the smaller model samples one after another."""
        step = ScheduledStep(tuple(ScheduledChunk(sequence, sequence.computed, 1, True, True) for sequence in wanted))
        shape = self._shapes.smallest(step)
        steps = np.zeros(shape.decodes, np.int32)
        steps[: len(wanted)] = list(wanted.values())
        batch = _without_extras(self._table.batch(step, shape))._replace(steps=steps)
        needed = SamplingVariant(any(sequence.params.filtered for sequence in wanted), 0)
        self._runner.adopt_last_tokens(self._last())
        tokens = self._runner.decode_run(self._runner.copy(batch), needed).read().token
        return {
            sequence: [tokens[number][row] for number in range(count)]
            for row, (sequence, count) in enumerate(wanted.items())
        }

    def follow(self, batch: PackedBatch, last: Int32[Array, "slots"]) -> None:
        """Computes the same tokens with the smaller model."""
        self._runner.adopt_last_tokens(last)
        self._runner.forward(batch)

    def make_state(self) -> None:
        """Allocates the cache, and puts the weights back on the devices."""
        self._runner.weights.put_back()
        self._runner.make_state()

    def drop_state(self) -> None:
        """Releases the cache, and copies the weights to the host."""
        self._runner.drop_state()
        self._runner.weights.rest(copies=True)

    def compile(self, compiler: ProgramCompiler) -> None:
        """Compiles the programs that batches of all shapes need."""
        self._runner.compile([self._empty(shape) for shape in self._shapes], compiler)

    def warm_up(self, shapes: Seq[BatchShape]) -> None:
        """Runs the programs that batches of these shapes need."""
        for shape in shapes:
            batch = self._empty(shape)
            self._runner.forward(self._runner.copy(batch))
            if has_runs(shape, self._table.slots):
                for variant in _VARIANTS:
                    self._runner.decode_run(self._runner.copy(batch.as_empty_run()), variant)

    def _empty(self, shape: BatchShape) -> StepBatch:
        return _without_extras(self._table.batch(ScheduledStep(), shape))


def _without_extras(batch: StepBatch) -> StepBatch:
    """Returns a batch without what is copied to the device only for larger models."""
    return batch._replace(adjustments=None, images=None, adapters=None)


def check_draft_model(model: Decoder, draft: Decoder, name: str) -> None:
    """Checks that a model can guess for another one.

    Raises:
        ValueError: the smaller model keeps more than pages of keys and values, sees images, pools, or has fewer
            positions.
    """
    config, positions = draft.config, model.config.max_positions
    problems = {
        "has layers with a state per request": draft.has_slots,
        "takes images": config.vision is not None,
        "has coordinates of several axes": config.rope.sections is not None,
        "pools": config.pooling is not None,
        f"has {config.max_positions} positions, and the model has {positions}": config.max_positions < positions,
    }
    for problem, is_there in problems.items():
        if is_there:
            raise ValueError(
                f"speculative: the draft model {name!r} {problem}; accepted: a model of text whose layers keep "
                f"pages of {KV_BLOCK} tokens only, with at least as many positions as the model"
            )
