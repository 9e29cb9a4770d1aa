"""The number of tokens to guess, by the load of the device and by how often guesses were right."""

import functools
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

MOST_SEQUENCES: Final = 64
"""With more sequences that run or wait, nothing is guessed: the device is busy without guesses."""
_PLAIN: Final = {1: 1.0, 8: 1.08, 16: 1.1, 32: 1.36, MOST_SEQUENCES: 1.44}
"""The time of a step without guesses for a number of sequences over one sequence's, with 36 layers of Qwen3-8B's shape
on an H200: the seconds of `python -m benchmarks draft_speed --part lengths`."""
_VERIFIED: Final = {8: 1.54, 64: 1.72, 128: 1.94, 256: 2.41, 512: 6.7}
"""The time of a step with guesses for a number of rows, over the same, without what more sequences add to a step that
has none, from the same part of that study. Each guess has a row, and each sequence one more. Much of the first one is
the host's work, which such a step waits for: it needs the tokens of the step before."""
_FEWEST_ROWS: Final = 8
"""Rows of the smallest program that such a step has. Each program has about twice the rows of the next smaller one."""
_FIRST_ACCEPTANCE: Final = 0.7
"""The share of right guesses that is assumed at first."""
_WEIGHT: Final = 0.04
"""The weight of the newest guess in a sequence's running share."""
_WEIGHT_OF_ALL: Final = 0.01
"""The weight of the newest guess in the running share of all sequences."""
_PAUSES: Final = 16, 256
"""Steps without guesses after which guesses are tried again: at first, and at most. Each trial in vain doubles them."""
_LONGEST_WAIT: Final = 16
"""Maximum number of tokens to wait after the drafter had no guess. Asking it costs time: all tokens must be read."""


class Acceptance:
    """The share of guesses that were right.

    Attributes:
        share: a running average.
        waits: steps until the drafter is asked again, after it had no guess.
    """

    def __init__(self, share: float = _FIRST_ACCEPTANCE, weight: float = _WEIGHT) -> None:
        """An average that begins with a share; each guess has a weight."""
        self.share, self._weight = share, weight
        self.waits = self._last_wait = 0

    @classmethod
    def shared(cls) -> "Acceptance":
        """Returns the average of all sequences, with which new ones begin."""
        return cls(weight=_WEIGHT_OF_ALL)

    def note(self, proposed: int, accepted: int) -> None:
        """Takes note of a verified draft. Guesses after the first wrong one say nothing."""
        self._last_wait = 0
        for index in range(min(accepted + 1, proposed)):
            self.share += self._weight * ((index < accepted) - self.share)

    def miss(self) -> None:
        """Takes note of a step for which the drafter had no guess."""
        self._last_wait = min(max(2 * self._last_wait, 1), _LONGEST_WAIT)
        self.waits = self._last_wait

    def skip(self) -> None:
        """Takes note of a step without guesses."""
        self.waits = max(self.waits - 1, 0)

    def tokens(self, guesses: int) -> float:
        """Returns the expected number of tokens of a step with a number of guesses."""
        return guesses + 1.0 if self.share == 1 else (1 - self.share ** (guesses + 1)) / (1 - self.share)


@functools.cache
def _cost(sequences: int, rows: int) -> float:
    """Returns the time of a step with guesses that has a number of rows, over the time of a step without any."""
    size = max(1 << (rows - 1).bit_length(), _FEWEST_ROWS)
    times = (np.interp(x, list(table), list(table.values())) for x, table in ((size, _VERIFIED), (sequences, _PLAIN)))
    verified, plain = map(float, times)
    return (verified + plain - 1) / plain


type DraftLengths = Callable[[int, Acceptance], int]
"""A fixed rule for the number of tokens to guess for one sequence, given the number of sequences. No bit depends on it.
It takes the place of `TunedLengths` in tests and measurements."""


class TunedLengths:
    """The number of tokens to guess for each sequence of a step: none where steps without guesses are faster.

    All sequences of a step decide together, because one with guesses makes the step slow for all of them. If guesses
    do not pay, they are tried again once in a while.
    """

    def __init__(self, most: int, guess_cost: float = 0.0) -> None:
        """A rule for up to `most` guesses.

        Args:
            most: maximum number of guesses for a sequence.
            guess_cost: see `Drafter`.
        """
        self._most, self._guess_cost = most, guess_cost
        self._silent, self._pause = 0, _PAUSES[0]

    def choose[K](self, sequences: int, candidates: Mapping[K, tuple[int, Acceptance]]) -> dict[K, int]:
        """Returns numbers of guesses, of at least 1, for the candidates that should have any.

        Args:
            sequences: the number of running sequences.
            candidates: sequences that may have guesses, with the maximum number for each.
        """
        ready = {key: one for key, one in candidates.items() if one[0] > 0 and not one[1].waits}
        if not ready or sequences > MOST_SEQUENCES:
            return {}
        if self._silent >= self._pause:
            return {key: min(room, self._most) for key, (room, _) in ready.items()}

        def speed(count: int) -> float:
            """Returns the tokens expected in the time of a step without guesses."""
            lengths = [min(room, count) for room, _ in ready.values()]
            tokens = sum(one.tokens(length) for length, (_, one) in zip(lengths, ready.values(), strict=True))
            cost = _cost(sequences, sequences + sum(lengths)) + self._guess_cost * count
            return (sequences - len(ready) + tokens) / cost

        # The device waits for this choice. Guesses that cost nothing only matter if they take a larger program.
        halves = {self._most >> power for power in range(3)} - {0}
        best, count = max((speed(count), count) for count in (range(1, self._most + 1) if self._guess_cost else halves))
        return {key: min(room, count) for key, (room, _) in ready.items()} if best > sequences else {}

    def note(self, *, has_guesses: bool) -> None:
        """Takes note of whether a step has guesses that `choose` asked for."""
        if not has_guesses:
            self._silent += 1
            return
        is_trial = self._silent >= self._pause
        self._pause = min(2 * self._pause, _PAUSES[1]) if is_trial else _PAUSES[0]
        self._silent = 0
