"""The number of tokens to guess, by the load of the device and by how often a sequence's guesses were right."""

from collections.abc import Callable
from typing import Final

_FIRST_ACCEPTANCE: Final = 0.7
"""The share of right guesses that is assumed at first."""
_WEIGHT: Final = 0.1
"""The weight of the newest guess in the running share."""
_LEAST: Final = (16, 0.12), (64, 0.25), (150, 0.6)
"""For steps of up to a number of sequences, the least probability with which a guess must count to be worth its row.
Up to 16 rows a step takes as long as with one; with more than 150 the device is busy, and nothing is guessed."""
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


def tuned_length(sequences: int, acceptance: Acceptance) -> int:
    """Returns the number of guesses that are each likely enough to count."""
    least = next((least for most, least in _LEAST if sequences <= most), None)
    if least is None or acceptance.waits:
        return 0
    count, probability = 0, acceptance.share
    while probability >= least and count < 16:
        count, probability = count + 1, probability * acceptance.share
    return max(count, 1) if acceptance.silent >= _PAUSE else count
