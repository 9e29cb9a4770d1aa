"""A head over the model's hidden states that guesses tokens: EAGLE-3, or a layer that predicts further tokens.

The head has a page of keys and values for each page of the model. Its row for position `p` needs the model's features
there and the token at `p + 1`, so a step that computes tokens of a sequence lets the head compute the rows just before
them. The row before a step's first token has its features from an earlier step: each page keeps the mapped features of
its last token that counts.

A guess takes the place of the next token, and the head's own hidden states the place of features. The keys and values
of such rows come after the ones of known tokens. The step that verifies the guesses computes the rows of the tokens
that it accepts again, from the model's features.
"""

from collections.abc import Callable, Hashable, Mapping
from collections.abc import Sequence as Seq
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from detjax.engine.batch import BatchShape, BatchShapes
from detjax.engine.drafts.drafter import Drafter, SampledStep
from detjax.engine.drafts.head_programs import (
    Before,
    HeadArrays,
    HeadPrograms,
    HeadState,
    Networks,
    chain,
    follow,
    guess,
    has_guesses,
)
from detjax.engine.model_runner import ModelRunner
from detjax.engine.program import StepProgram, shapes_of
from detjax.engine.program_compiler import ProgramCompiler
from detjax.engine.scheduler import ScheduledChunk, ScheduledStep
from detjax.engine.sequence import Sequence
from detjax.engine.slot_table import SlotTable
from detjax.models import Draft
from detjax.models.cache import declarations
from detjax.models.network import split
from detjax.models.parts.state import StateSize

_LAYERS: Final = "layers"
"""The part of a decoder with its layers."""


class HeadDrafter(Drafter):
    """Guesses what a head would sample with the noise of the request."""

    follows = True
    guess_cost = 0.11  # an EAGLE-3 head's, for 36 layers of Qwen3-8B's shape on an H200

    def __init__(
        self, draft: Draft, table: SlotTable, shapes: BatchShapes, num_pages: int, runner: ModelRunner
    ) -> None:
        """A drafter with an empty cache.

        Args:
            draft: the head. Its target is not read: the model's current weights are the runner's.
            table: the sequences in the slots.
            shapes: the shapes of the step loop's batches.
            num_pages: the number of pages of the model.
            runner: runs the model.
        """
        config, target = draft.head.config, draft.target
        self._network, weights = split(draft.head)
        self._weights: Any = weights
        self._size = StateSize(num_pages, draft.dtype)
        self._declared, self._width = declarations(config)[0], config.hidden_size
        self._hidden = jax.ShapeDtypeStruct((target.config.hidden_size,), target.dtype)
        streams = len(draft.head.depths or ())
        self._features = jax.ShapeDtypeStruct((streams * target.config.hidden_size,), target.dtype) if streams else None
        self._table, self._shapes, self._runner = table, shapes, runner
        numbers = None
        if draft.target_ids is not None:
            numbers = np.full(target.config.vocab_size, len(draft.target_ids), np.int32)
            numbers[draft.target_ids] = np.arange(len(draft.target_ids), dtype=np.int32)
        self._numbers: Int32[Array, "V"] | None = runner.replicate(numbers)
        paths = runner.model_arrays[0].paths
        self._outside_layers = [number for number, path in enumerate(paths) if path[0] != _LAYERS]
        self._compiled: dict[Hashable, Callable[..., Any]] = {}
        self.make_state()

    def make_state(self) -> None:
        """Allocates the cache, and puts the weights back on the devices."""
        mapped = jnp.zeros((self._size.num_pages, self._width), self._size.dtype)
        self._state = self._runner.replicate(HeadState(self._declared.empty(self._size), mapped))
        self._weights = self._runner.replicate(self._weights)

    def drop_state(self) -> None:
        """Releases the cache, and copies the weights to the host."""
        jax.block_until_ready(self._state)
        del self._state
        self._weights = jax.device_get(self._weights)

    def note_sampled(self, step: SampledStep) -> None:
        """Computes the head's rows before the tokens of a step."""
        # A step that samples nothing verifies nothing, so any tokens serve.
        token = self._no_tokens(step.batch.shape.sampled) if step.sampled is None else step.sampled.token
        self._state = self._run(follow(self._state, step.batch, step.computed, token))

    def _no_tokens(self, count: int) -> Int32[Array, "R"]:
        return self._runner.replicate(jnp.zeros(count, jnp.int32))

    def propose(self, wanted: Mapping[Sequence, int]) -> Mapping[Sequence, Seq[int]]:
        """Returns tokens that the head samples one after another."""
        step = ScheduledStep(tuple(ScheduledChunk(sequence, sequence.computed, 1, True, True) for sequence in wanted))
        steps = np.zeros(self._shapes.smallest(step).decodes, np.int32)
        steps[: len(wanted)] = list(wanted.values())
        is_filtered = any(sequence.params.filtered for sequence in wanted)
        guesses = np.asarray(self._guesses(step, steps, is_filtered=is_filtered)).tolist()
        return {sequence: guesses[row][:count] for row, (sequence, count) in enumerate(wanted.items())}

    def _guesses(
        self, step: ScheduledStep, steps: Int32[np.ndarray, "decodes"], *, is_filtered: bool
    ) -> Int32[Array, "decodes n"]:
        """Returns the guesses after each decode of a step, in as many columns as the highest number in `steps`."""
        shape = next(one for one in self._shapes if one.decodes == len(steps) and has_guesses(one, self._table.slots))
        sequences = self._runner.replicate(chain(self._table.batch(step, shape), steps))
        before = Before(self._runner.last_tokens)
        for _ in range(int(steps.max(initial=1))):
            program = guess(self._state, sequences, before, self._numbers, is_filtered=is_filtered)
            before, self._state = self._run(program)
        assert before.guesses is not None
        return before.guesses

    def _run(self, program: StepProgram) -> Any:
        compiled = self._compiled.get(program.key)
        if compiled is not None:
            return compiled(self._arrays, *program.args)
        return program.fn(self._networks, self._arrays, *program.args, **program.static)

    @property
    def _networks(self) -> Networks:
        return Networks(self._network, self._runner.model_arrays[0])

    @property
    def _arrays(self) -> HeadArrays:
        """The weights of the head, and of the model without its layers, which the head does not read.

        Passing hundreds of weights to a program takes as long as the device takes for a guess.
        """
        network, parameters = self._runner.model_arrays
        if self._runner.everywhere is not None:  # devices that share a model get all its weights
            return HeadArrays(self._weights, parameters)
        weights: list[Any] = [None] * len(network.paths)
        for number in self._outside_layers:
            weights[number] = parameters.weights[number]
        return HeadArrays(self._weights, parameters._replace(weights=tuple(weights)))

    def compile(self, compiler: ProgramCompiler) -> None:
        """Compiles the programs that batches of all shapes need."""
        compiler.start(self.programs(), self._compiled.__setitem__)

    def programs(self) -> HeadPrograms:
        """Returns all programs of the head."""
        everywhere = self._runner.everywhere
        return HeadPrograms(
            network=self._networks,
            parameters=shapes_of(self._arrays, everywhere),
            state=shapes_of(self._state, everywhere),
            batches=tuple(self._table.batch(ScheduledStep(), shape) for shape in self._shapes),
            last=shapes_of(self._runner.last_tokens, everywhere),
            hidden=self._hidden,
            features=self._features,
            chained=jax.ShapeDtypeStruct((self._width,), self._size.dtype),
            numbers=shapes_of(self._numbers, everywhere),
            everywhere=everywhere,
        )

    def warm_up(self, shapes: Seq[BatchShape]) -> None:
        """Runs the programs that batches of these shapes need."""
        nobody = ScheduledStep()
        for shape in shapes:
            batch = self._runner.copy(self._table.batch(nobody, shape))
            self._runner.forward(batch)
            assert self._runner.computed is not None
            self.note_sampled(SampledStep(batch, self._runner.computed, None))
            if has_guesses(shape, self._table.slots):
                for is_filtered in (False, True):
                    # The first guess and a later one are separate programs.
                    self._guesses(nobody, np.full(shape.decodes, 2, np.int32), is_filtered=is_filtered)
