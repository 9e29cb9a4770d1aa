"""Drafting: decides which sequences of a step get guesses and how many, and keeps the guesses that can be right."""

import itertools
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Seq
from weakref import WeakKeyDictionary

from detjax.engine.drafts.draft_lengths import MOST_SEQUENCES, Acceptance, DraftLengths, TunedLengths
from detjax.engine.drafts.drafter import Drafter
from detjax.engine.drafts.look_ahead import LookAhead
from detjax.engine.scheduler import ScheduledChunk, ScheduledStep
from detjax.engine.sequence import Sequence


class Drafting:
    """Guesses tokens for a step loop.

    Attributes:
        drafter: makes the guesses, except for tokens that a constraint forces.
        most: maximum number of guesses of a sequence in a step.
        proposed: number of guesses that steps verified.
        accepted_at: number of guesses at each position of a draft that were right, as all before them.
    """

    def __init__(self, drafter: Drafter, most: int, vocabulary: int, lengths: DraftLengths | None = None) -> None:
        """Drafting for a model with `vocabulary` logits. Default lengths: `TunedLengths`."""
        self.drafter, self.most = drafter, most
        self.proposed = 0
        self.accepted_at = [0] * most
        self._vocabulary = vocabulary
        self._lengths = lengths
        self._tuned = TunedLengths(most, drafter.guess_cost)
        self._acceptance_of_all = Acceptance.shared()
        self._acceptance: WeakKeyDictionary[Sequence, Acceptance] = WeakKeyDictionary()
        self._ahead: WeakKeyDictionary[Sequence, LookAhead] = WeakKeyDictionary()
        self._forced: dict[Sequence, Seq[int]] = {}

    def wants(self, running: Seq[Sequence], waiting: int = 0) -> bool:
        """Returns True if guesses are wanted for some sequence once all its tokens have been read.

        Args:
            running: the running sequences.
            waiting: the number of sequences that wait for a slot.
        """
        if self._lengths is None and self._chosen(running, waiting):
            return True
        return any(
            sequence.is_held and (_is_forcible(sequence) or self._fixed_length(sequence, len(running)) > 0)
            for sequence in running
            if sequence.context.drafts
        )

    def skip(self, running: Seq[Sequence]) -> None:
        """Takes note of a step without guesses."""
        self._note_skipped(running, {})

    def wanted(self, running: Seq[Sequence], waiting: int = 0) -> dict[Sequence, int]:
        """Returns the number of guesses that the next step should verify for some sequences; see `wants`.

        All tokens must have been read.
        """
        self._forced, wanted = {}, self._chosen(running, waiting)
        self._note_skipped(running, wanted)
        for sequence in running:
            if not sequence.context.drafts or not sequence.is_held or not _is_forcible(sequence):
                continue
            room = self._room(sequence)
            forced = self._ahead_of(sequence).forced()[:room] if room > 0 else []
            if forced:
                self._forced[sequence] = forced
                wanted[sequence] = len(forced)
        assert not any(sequence.unread for sequence in wanted)
        return wanted

    def fill(self, plan: ScheduledStep) -> ScheduledStep:
        """Puts guesses into the chunks of a plan that have room for them. Chunks without a guess become decodes."""
        chunks = [chunk for chunk in plan.chunks if chunk.drafted]
        if not chunks:
            return plan
        asked = {chunk.sequence: chunk.drafted for chunk in chunks if chunk.sequence not in self._forced}
        guesses = {**(self.drafter.propose(asked) if asked else {}), **self._forced}
        for chunk in chunks:
            self._put(chunk, guesses.get(chunk.sequence, ()))
            if chunk.sequence in asked and not chunk.drafts:
                self._acceptance_of(chunk.sequence).miss()
        decodes = *plan.decodes, *(chunk for chunk in plan.prefills if chunk.is_decode)
        return ScheduledStep(decodes, tuple(chunk for chunk in plan.prefills if not chunk.is_decode))

    def note(self, sequence: Sequence, proposed: int, accepted: int) -> None:
        """Takes note of how many guesses of a verified draft were right."""
        self.proposed += proposed
        for position in range(accepted):
            self.accepted_at[position] += 1
        if sequence not in self._forced:
            self._acceptance_of(sequence).note(proposed, accepted)
            self._acceptance_of_all.note(proposed, accepted)

    def _is_off(self, sequences: int) -> bool:
        """Returns True if nothing but forced tokens is guessed for this many running sequences."""
        return self._lengths is None and sequences > MOST_SEQUENCES

    def _has_prompts(self, running: Seq[Sequence]) -> bool:
        """Returns True if nothing but forced tokens is guessed because the next step computes prompts.

        It takes long anyway, and its program for guesses has the most rows.
        """
        return self._lengths is None and not all(sequence.is_held for sequence in running)

    def _note_skipped(self, running: Seq[Sequence], wanted: Collection[Sequence]) -> None:
        """Takes note of the sequences that get no guesses in a step."""
        self._tuned.note(has_guesses=bool(wanted))
        if self._is_off(len(running)):  # a busy device should not wait for the host's work for each sequence
            return
        for sequence in running:
            if sequence.context.drafts and sequence.is_held and sequence not in wanted:
                self._acceptance_of(sequence).skip()

    def _chosen(self, running: Seq[Sequence], waiting: int) -> dict[Sequence, int]:
        """Returns the numbers of guesses for sequences that should have any."""
        if self._is_off(len(running) + waiting) or self._has_prompts(running):
            return {}
        candidates = {
            sequence: (room, self._acceptance_of(sequence))
            for sequence in running
            if sequence.context.drafts and sequence.is_held and (room := self._room(sequence)) > 0
        }
        if self._lengths is None:
            return self._tuned.choose(len(running), candidates)
        lengths = {sequence: self._fixed_length(sequence, len(running)) for sequence in candidates}
        return {sequence: length for sequence, length in lengths.items() if length > 0}

    def _fixed_length(self, sequence: Sequence, sequences: int) -> int:
        """Returns the number of guesses by a fixed rule; 0 without one."""
        if self._lengths is None:
            return 0
        room = self._room(sequence)
        return min(room, self._lengths(sequences, self._acceptance_of(sequence))) if room > 0 else 0

    def _room(self, sequence: Sequence) -> int:
        """Returns the maximum number of guesses for a sequence."""
        # The step samples one more token than it has guesses.
        room = min(self.most, sequence.missing - 1)
        count, least = len(sequence.generated) + sequence.unread, sequence.params.min_tokens
        # The rows of a chunk share their biases, which forbid end tokens until the sequence has enough tokens.
        return min(room, least - count - 1) if count < least else room

    def _put(self, chunk: ScheduledChunk, guesses: Iterable[int]) -> None:
        """Puts the guesses that can be right into a chunk."""
        sequence = chunk.sequence
        ends = sequence.context.end_tokens
        # Nothing comes after an end token, so the row before it samples it.
        usable = itertools.takewhile(lambda token: 0 <= token < self._vocabulary and token not in ends, guesses)
        drafts = list(itertools.islice(usable, chunk.drafted))
        if drafts and sequence.matcher is not None:
            chunk.masks = self._ahead_of(sequence).masks(sequence.generated, drafts)
            drafts = drafts[: len(chunk.masks)]
        chunk.drafts = drafts
        chunk.shorten(len(drafts))

    def _ahead_of(self, sequence: Sequence) -> LookAhead:
        ahead = self._ahead.get(sequence)
        if ahead is None:
            context = sequence.context
            ahead = self._ahead[sequence] = LookAhead(context.constraint, context.rules, self._vocabulary)
        ahead.follow(sequence.generated)
        return ahead

    def _acceptance_of(self, sequence: Sequence) -> Acceptance:
        acceptance = self._acceptance.get(sequence)
        if acceptance is None:
            acceptance = self._acceptance[sequence] = Acceptance(self._acceptance_of_all.share)
        return acceptance


def _is_forcible(sequence: Sequence) -> bool:
    """Returns True if a constraint may force the next token of a sequence."""
    return sequence.context.constraint is not None and sequence.missing > 1
