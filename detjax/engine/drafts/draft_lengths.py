"""The number of tokens to guess, by the load of the device and by how often a sequence's guesses were right."""

from collections.abc import Callable
from typing import Final

_FIRST_ACCEPTANCE: Final = 0.7
"""The share of right guesses that is assumed at first."""
_WEIGHT: Final = 0.1
"""The weight of the newest guess in the running share."""
_LEAST: Final = 0.12
"""The least probability with which a guess must count to be worth its row of logits."""
_FREE: Final = 16
"""Sequences whose guesses cost next to nothing. The rows of each are padded to `QUERY_UNIT`, however many it guesses,
and a step of 128 rows takes as long as one of a row for each sequence: it waits for the weights."""
_SHARE: Final = 0.024
"""The time that each further sequence adds to a step with guesses, as a share of the time of a step without, from the
peak and the bandwidth of an H200. Both grow with the model, so the share is about the same for all."""
_MOST: Final = 150
"""With more sequences the device is busy, and nothing is guessed."""
_PAUSE: Final = 32
"""Tokens after which a sequence without guesses gets one again."""
_LONGEST_WAIT: Final = 8
"""Maximum number of tokens to wait after the drafter had no guess. Asking it costs time: all tokens must be read."""


class Acceptance:
    """The share of guesses for one sequence that were right.

    Attributes:
        share: a running average.
        silent: steps since the last guess.
        waits: steps until the drafter is asked again, after it had no guess.
    """

    def __init__(self) -> None:
        self.share = _FIRST_ACCEPTANCE
        self.silent = self.waits = self._misses = 0

    def note(self, proposed: int, accepted: int) -> None:
        """Takes note of a verified draft. Guesses after the first wrong one say nothing."""
        self.silent = self._misses = 0
        for index in range(min(accepted + 1, proposed)):
            self.share += _WEIGHT * ((index < accepted) - self.share)

    def miss(self) -> None:
        """Takes note of a step for which the drafter had no guess."""
        self.skip()
        self._misses = min(self._misses + 1, _LONGEST_WAIT)
        self.waits = self._misses

    def skip(self) -> None:
        """Takes note of a step without guesses."""
        self.silent += 1
        self.waits = max(self.waits - 1, 0)


type DraftLengths = Callable[[int, Acceptance], int]
"""A rule for the number of tokens to guess for one sequence, given the number of sequences. No bit depends on it."""


def tuned_length(sequences: int, acceptance: Acceptance, most: int = 16) -> int:
    """Returns the number of guesses, up to `most`, that are each likely enough to count.

    It is 0 if the tokens expected of a step are fewer than steps without guesses have in the same time.
    """
    if sequences > _MOST or acceptance.waits:
        return 0
    count, probability, tokens = 0, acceptance.share, 1.0
    while probability >= _LEAST and count < most:
        count, tokens, probability = count + 1, tokens + probability, probability * acceptance.share
    if tokens < 1 + _SHARE * max(0, sequences - _FREE):
        count = 0
    return max(count, 1) if acceptance.silent >= _PAUSE else count
