"""The interface of everything that guesses tokens.

A new drafter is a subclass of `Drafter`. `new_drafter` in `drafting` makes the one that the settings ask for.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple

from jaxtyping import Array, Int32

from detjax.engine.batch import BatchShape
from detjax.engine.packed_batch import PackedBatch
from detjax.engine.program_compiler import ProgramCompiler
from detjax.engine.sampled_tokens import PackedTokens
from detjax.engine.sequence import Sequence
from detjax.engine.step_programs import ComputedRows


class SampledStep(NamedTuple):
    """A step of the model whose tokens are sampled; its arrays are on the device, and may still be computed.

    Attributes:
        batch: the step's arrays.
        computed: the token of each of its rows, the model's hidden states, and a head's features.
        sampled: the tokens sampled from its rows; None if the step samples none. Where a row's draft turns out wrong,
            the rows after it are void; `sampling_programs.counted_rows` says which rows count.
    """

    batch: PackedBatch
    computed: ComputedRows
    sampled: PackedTokens | None


class Drafter:
    """Guesses the next tokens of sequences. Guesses may be wrong, and need no determinism on one device.

    Where devices of several processes share the model, all processes must guess the same tokens.

    All methods are called in the order of steps. `follow` and `note_sampled` are called in the thread that launches
    steps, and must not wait for the device; none of them runs while `propose` runs.

    A drafter with a cache of keys and values may use the page tables and page ids of the model for pages of its own.
    The pages of a sequence, of a shared prefix, and of a preempted sequence then always correspond.
    """

    follows: bool = False
    """True if the drafter needs every step. Then no step is computed in a run of several."""
    guess_cost: float = 0.0
    """The time of a guess for each sequence, as a share of the time of a step of the model without guesses."""

    def propose(self, wanted: Mapping[Sequence, int]) -> Mapping[Sequence, Seq[int]]:
        """Returns guesses of the tokens after the last token of some sequences, each at most as many as wanted.

        All tokens of these sequences were read. Their pages have room for the guesses, and the last token of each is in
        its slot. Sequences without a guess may be missing.
        """
        raise NotImplementedError

    def follow(self, batch: PackedBatch, last: Int32[Array, "slots"]) -> None:
        """Takes note of a step that computes the tokens of a batch, before tokens are sampled.

        Args:
            batch: the step's arrays, on the device.
            last: the last token of each slot.
        """

    def note_sampled(self, step: SampledStep) -> None:
        """Takes note of a step's hidden states and of the tokens sampled from them.

        It is called if the guesser is a head: its `depths` decide which features the step computes.
        """

    def make_state(self) -> None:
        """Allocates the cache again after `drop_state`."""

    def drop_state(self) -> None:
        """Releases the cache, and the weights if the drafter has its own."""

    def compile(self, compiler: ProgramCompiler) -> None:
        """Compiles all programs that guesses may need."""

    def warm_up(self, shapes: Seq[BatchShape]) -> None:
        """Runs the programs that batches of these shapes need, because the first run does one-time work."""
