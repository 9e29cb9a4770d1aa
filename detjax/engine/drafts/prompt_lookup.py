"""Prompt lookup (Saxena 2023): guesses that the text continues as it did at an earlier place with the same tokens."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from weakref import WeakKeyDictionary

from detjax.engine.drafts.drafter import Drafter
from detjax.engine.sequence import Sequence


class EarlierPlaces:
    """An index of the places in a growing text where groups of consecutive tokens end.

    Example:
        >>> from detjax.engine.drafts.prompt_lookup import EarlierPlaces
        >>> EarlierPlaces(2, 3).continuation([1, 2, 3, 4, 1, 2], 3)
        [3, 4, 1]
    """

    def __init__(self, shortest: int, longest: int) -> None:
        """The index of an empty text, for groups of `shortest` to `longest` tokens."""
        self._sizes = range(longest, shortest - 1, -1)
        self._ends: dict[int, dict[int, int]] = {size: {} for size in self._sizes}
        """For each size, the last end of a group by its hash."""
        self._indexed = 0

    def continuation(self, tokens: Seq[int], most: int) -> list[int]:
        """Returns up to `most` tokens that follow the last earlier place of the longest ending of the text.

        `tokens` must begin with the tokens of the previous call. Where the continuation reaches the end of the text,
        the text is assumed to repeat.
        """
        length = len(tokens)
        # Groups that end at the end of the text have no continuation yet.
        first = max(0, self._indexed - self._sizes.start)
        recent = list(tokens[first:length])
        for end in range(self._indexed + 1, length):
            for size in self._sizes:
                if size <= end:
                    self._ends[size][hash(tuple(recent[end - size - first : end - first]))] = end
        self._indexed = max(self._indexed, length - 1)
        for size in self._sizes:
            if size >= length:
                continue
            ending = tuple(tokens[length - size : length])
            end = self._ends[size].get(hash(ending))
            if end is not None and tuple(tokens[end - size : end]) == ending:
                period = length - end
                known = tokens[end : end + min(period, most)]
                return [known[index % period] for index in range(most)]
        return []


class PromptLookup(Drafter):
    """Guesses from the text of a sequence itself. It costs the device nothing."""

    def __init__(self, shortest: int, longest: int) -> None:
        """A drafter that looks for the last `shortest` to `longest` tokens."""
        self._sizes = shortest, longest
        self._places: WeakKeyDictionary[Sequence, EarlierPlaces] = WeakKeyDictionary()

    def propose(self, wanted: Mapping[Sequence, int]) -> Mapping[Sequence, Seq[int]]:
        """Returns the tokens that followed an earlier place; see `EarlierPlaces.continuation`."""
        guesses = {}
        for sequence, most in wanted.items():
            places = self._places.get(sequence)
            if places is None:
                places = self._places[sequence] = EarlierPlaces(*self._sizes)
            guesses[sequence] = places.continuation(sequence.tokens, most)
        return guesses
