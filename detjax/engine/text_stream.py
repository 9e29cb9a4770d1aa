"""Incremental text of a sample, and the stop strings that end it."""

from collections.abc import Sequence

from detjax.models import Tokenizer


class _StopString:
    """A stop string with its failure function (Knuth, Morris and Pratt 1977)."""

    def __init__(self, text: str) -> None:
        self.text = text
        # For each prefix, the length of its longest proper border. The list grows on demand, so a stop string costs
        # nothing until samples generate its beginning.
        self._overlaps = [0]

    def begun(self, before: int, piece: str) -> int:
        """Returns the number of characters at the end of a text that may begin the stop string.

        `before` is this number for the text without its last piece.
        """
        if not before and self.text[0] not in piece:
            return 0
        for character in piece:
            while before and self.text[before] != character:
                before = self._overlap(before)
            before += self.text[before] == character
            if before == len(self.text):  # it did not end the text, so the next one may begin within it
                before = self._overlap(before)
        return before

    def _overlap(self, length: int) -> int:
        """Returns the length of the longest proper border of the prefix of a length."""
        while len(self._overlaps) < length:
            character, overlap = self.text[len(self._overlaps)], self._overlaps[-1]
            while overlap and self.text[overlap] != character:
                overlap = self._overlaps[overlap - 1]
            self._overlaps.append(overlap + (self.text[overlap] == character))
        return self._overlaps[length - 1]


class StopStrings:
    """The stop strings of a request, which its samples share."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._strings = [_StopString(text) for text in texts]

    def __len__(self) -> int:
        return len(self._strings)

    def first(self, text: str, known: int) -> tuple[int, int] | None:
        """Returns the start and the end of the first stop string that ends after the first `known` characters, or None.

        Of two that start together, it is the shorter one.
        """
        # It ends in the new part, so it has few possible starts.
        new = text[known:]
        ending = (string.text for string in self._strings if string.text[-1] in new)
        places = ((text.find(string, max(0, known - len(string) + 1)), len(string)) for string in ending)
        return min(((start, start + length) for start, length in places if start >= 0), default=None)

    def begun(self, before: list[int], piece: str) -> list[int]:
        """Returns the result of `_StopString.begun` for each string."""
        return [string.begun(count, piece) for string, count in zip(self._strings, before, strict=True)]


class TextStream:
    """The incremental text of a sample. It ends before the first stop string, or after it if it is included."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: StopStrings,
        *,
        includes_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        """An empty text; the options are as in `SamplingParams`."""
        self.text = ""
        self._decoder = tokenizer.stream(skip_special_tokens)
        self._stop, self._includes_stop = stop, includes_stop
        self._begun = [0] * len(stop)
        """For each stop string, the number of characters at the end of the searched text that may begin it."""
        self._searched = 0
        self._streamed = 0

    def add(self, token: int, *, may_stop: bool = True) -> bool:
        """Appends a token's text. Returns whether a stop string ended the text, which is then truncated.

        If it may not stop, stop strings that the token completes are text like any other.
        """
        known = self._decoder.finished
        self.text = self._decoder.add(token)
        place = self._stop.first(self.text, known) if may_stop else None
        if place is not None:
            self.text = self.text[: place[self._includes_stop]]
        return place is not None

    def take_new(self, *, is_last: bool) -> str:
        """Returns the text since the last call.

        Before the last token, the text stops where a stop string or an incomplete character may begin.
        """
        end = len(self.text)
        if not is_last and self._includes_stop:  # then no stop string removes text
            end = self._decoder.finished
        elif not is_last:
            finished = self._decoder.finished
            self._begun = self._stop.begun(self._begun, self.text[self._searched : finished])
            self._searched = finished
            end = finished - max(self._begun, default=0)
        new, self._streamed = self.text[self._streamed : end], max(self._streamed, end)
        return new
