"""The text of a sample while it grows, and the stop strings that end it."""

from collections.abc import Sequence

from detjax.models import Tokenizer


class _StopString:
    """A stop string, and how far its beginnings overlap with their own ends (Knuth, Morris and Pratt 1977)."""

    def __init__(self, text: str) -> None:
        self.text = text
        # The length of the longest beginning that ends each beginning. The list grows with what samples generate, so
        # that a stop string costs nothing until its beginning is generated.
        self._overlaps = [0]

    def begun(self, before: int, piece: str) -> int:
        """Returns how many characters at the end of a text may begin the stop string, which is nowhere in the text.

        Args:
            before: that number for the text without its last piece.
            piece: the last piece.
        """
        if not before and self.text[0] not in piece:
            return 0
        for character in piece:
            while before and self.text[before] != character:
                before = self._overlap(before)
            before += self.text[before] == character
        return before

    def _overlap(self, length: int) -> int:
        """Returns the length of the longest shorter beginning that ends the beginning of a length."""
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
        """Returns how many there are."""
        return len(self._strings)

    def first(self, text: str, known: int) -> int | None:
        """Returns where the first stop string in a text starts, or None if there is none.

        Args:
            text: the text.
            known: length of the beginning of the text that holds no stop string.
        """
        # It ends in the new part. So there are few places where it may start, however long it is.
        new = text[known:]
        ending = (string.text for string in self._strings if string.text[-1] in new)
        starts = (text.find(string, max(0, known - len(string) + 1)) for string in ending)
        return min((start for start in starts if start >= 0), default=None)

    def begun(self, before: list[int], piece: str) -> list[int]:
        """Returns for each string what `_StopString.begun` returns."""
        return [string.begun(count, piece) for string, count in zip(self._strings, before, strict=True)]


class TextStream:
    """The text of a sample while it grows. It ends before the first stop string."""

    def __init__(self, tokenizer: Tokenizer, stop: StopStrings) -> None:
        self.text = ""
        self._decoder = tokenizer.stream()
        self._stop = stop
        self._begun = [0] * len(stop)
        """How many characters at the end of the searched text may begin each stop string."""
        self._searched = 0
        self._streamed = 0

    def add(self, token: int) -> bool:
        """Appends a token's text. Returns whether a stop string ended the text, which is then cut before it."""
        known = self._decoder.finished
        self.text = self._decoder.add(token)
        start = self._stop.first(self.text, known)
        self.text = self.text[:start]
        return start is not None

    def take_new(self, *, is_last: bool) -> str:
        """Returns the text that was not returned before.

        Before the last token, the text stops where a stop string or an unfinished character may begin.
        """
        end = len(self.text) if is_last else self._safe_length()
        new, self._streamed = self.text[self._streamed : end], max(self._streamed, end)
        return new

    def _safe_length(self) -> int:
        """Returns the length of the text that no later token takes back."""
        finished = self._decoder.finished
        self._begun = self._stop.begun(self._begun, self.text[self._searched : finished])
        self._searched = finished
        return finished - max(self._begun, default=0)
