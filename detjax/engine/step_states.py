"""The states of a step: planned, launched, and in flight."""

import dataclasses
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from typing import NamedTuple

from detjax.engine.packed_batch import PackedBatch
from detjax.engine.pooling import PooledBatch
from detjax.engine.prompt_results import PromptScore, TokenResults
from detjax.engine.sampled_tokens import PackedTokens, SampledTokens
from detjax.engine.sampling_variant import SamplingVariant
from detjax.engine.scheduler import ScheduledChunk, ScheduledStep
from detjax.engine.sequence import Sequence
from detjax.engine.snapshots import SlotCopies
from detjax.models import Adapter
from detjax.operands.sampling_arrays import Arrays


class SampleRows(NamedTuple):
    """A sequence that samples tokens in a step.

    Attributes:
        row: the row of its first sampled token.
        chunk: its chunk. Its guesses have the next rows.
    """

    row: int
    chunk: ScheduledChunk

    @property
    def sequence(self) -> Sequence:
        """The sequence."""
        return self.chunk.sequence

    def rows(self, tokens: Seq[int]) -> range:
        """Returns the rows that count, given the sampled tokens: those before which all guesses were right."""
        drafts, count = self.chunk.drafts, 0
        for guess, token in zip(drafts, tokens[self.row : self.row + len(drafts)], strict=True):
            if guess != token:
                break
            count += 1
        return range(self.row, self.row + count + 1)


@dataclasses.dataclass(frozen=True)
class PlannedStep:
    """A step that is ready to launch.

    Attributes:
        plan: its chunks.
        batch: its arrays, on the device.
        first_rows: the first row of each prefill chunk.
        samples: the sequences that sample tokens.
        needed: the capabilities that the sampling program needs; None if no token is sampled.
        unseen: arguments of `ModelRunner.note_seen` for the samples whose tokens the device does not know yet.
        copies: copies between slots and snapshots before and after the step.
        adapters: adapters to write before the step, with their slots.
    """

    plan: ScheduledStep
    batch: PackedBatch
    first_rows: Arrays
    samples: list[SampleRows]
    needed: SamplingVariant | None
    unseen: list[tuple[int, Seq[int], Seq[int]]]
    copies: SlotCopies
    adapters: Seq[tuple[int, Adapter]] = ()

    @property
    def is_constrained(self) -> bool:
        """True if sampling has to wait for masks."""
        return self.needed is not None and self.needed.constrained


class LaunchedStep(NamedTuple):
    """The pending results of a step that the device computes.

    Attributes:
        scores: logprobs of prompts, or results of their tokens.
        sampled: the tokens; None if no token is sampled.
        pooled: results of a model that pools, in place of tokens.
        failures: error messages of the rows whose constraints failed.
        is_late: whether the previous step's tokens were ready when the layers of this step had been launched, so that
            the devices may have waited for the host. It is only determined for steps of many samples.
    """

    scores: Seq[PromptScore | TokenResults]
    sampled: PackedTokens | None
    failures: Mapping[int, str]
    pooled: PooledBatch | None = None
    is_late: bool = False


class InFlightStep(NamedTuple):
    """A step that the launcher has and whose results were not read yet."""

    planned: PlannedStep
    launched: Future[LaunchedStep]


class AcceptedTokens(NamedTuple):
    """Tokens that a step has sampled for a sequence, which has them, but nobody else.

    Attributes:
        sequence: the sequence.
        tokens: the results of the step.
        rows: the rows of the sequence's tokens.
        batch: the number of sequences in the step.
        is_ended: whether the last one ended the sequence.
    """

    sequence: Sequence
    tokens: SampledTokens
    rows: Seq[int]
    batch: int
    is_ended: bool
