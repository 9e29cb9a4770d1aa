"""The text of tokens that come one after the other."""

import codecs
import itertools
from collections.abc import Sequence
from typing import Final, Protocol, runtime_checkable

_UNFINISHED: Final = "\ufffd"
_MANY: Final = 16
"""Tokens after which a text that still ends with U+FFFD is settled as far as no later token changes it."""
_CHARACTER: Final = 4
"""The most bytes of a character in UTF-8."""


@runtime_checkable
class TokenDecoder(Protocol):
    """A tokenizer, as far as it makes texts of tokens."""

    @property
    def is_byte_level(self) -> bool:
        """True if a text has the bytes of its tokens."""
        ...

    def byte_of(self, token: int) -> int | None:
        """Returns the byte that a token stands for."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of tokens."""
        ...

    def is_left_out(self, token: int) -> bool:
        """Returns whether a token adds nothing to a text."""
        ...


class IncrementalDecoder:
    """The text of tokens that come one after the other. Only the last few of them are decoded again.

    Attributes:
        text: the text of all tokens so far, as `Tokenizer.decode` returns it; it ends with U+FFFD if its last character
            is not complete.
        finished: length of the text without the U+FFFD at its end, of which the last may be an incomplete character.
    """

    def __init__(self, tokenizer: TokenDecoder) -> None:
        self.text = ""
        self.finished = 0
        self._tokenizer = tokenizer
        self._settled = ""
        """The text that no later token changes, as far as it is known."""
        self._tokens: list[int] = []
        """The tokens since the settled text last grew, and before them those that settled then."""
        self._num_known = 0
        """How many of these tokens belong to the settled text."""
        self._known = 0
        """Length of the settled text's part in the text of these tokens."""

    def add(self, token: int) -> str:
        """Returns the text with one more token."""
        if self._tokenizer.is_left_out(token):  # a run of them would be decoded again with every token
            return self.text
        self._tokens.append(token)
        # A token's text may differ at the beginning of a text. The known tokens begin both, so the difference cancels.
        last = self._tokenizer.decode(self._tokens)
        new = last[self._known :]
        self.text = self._settled + new
        if rest := new.rstrip(_UNFINISHED):
            self.finished = len(self._settled) + len(rest)
        if new and not new.endswith(_UNFINISHED):
            self._settle(self._tokens[self._num_known :])
        elif len(self._tokens) - self._num_known >= _MANY:
            if self._tokenizer.is_byte_level:
                # Bytes that are no UTF-8 are read right again after one character's bytes at most, so the last tokens
                # alone end like all of them; and only the last U+FFFD can become another character.
                self._settle(self._tokens[-_CHARACTER:], len(self.text) - 1)
            else:
                self._settle_byte_tokens()
        return self.text

    def _settle(self, tokens: list[int], length: int | None = None) -> None:
        """Settles the text, or a beginning of it of a given length. The tokens are those with which it ends."""
        length = len(self.text) if length is None else length
        self._tokens, self._num_known = tokens, len(tokens)
        self._known = len(self._tokenizer.decode(tokens)) - (len(self.text) - length)
        self._settled = self.text[:length]

    def _settle_byte_tokens(self) -> None:
        """Settles a text that ends with U+FFFD where some tokens stand for a byte each.

        A run of such tokens is read as UTF-8 as a whole. If it is none, each of its bytes becomes a U+FFFD, and so does
        each that is added.
        """
        values = (self._tokenizer.byte_of(token) for token in reversed(self._tokens))
        run = bytes(itertools.takewhile(lambda value: value is not None, values))[::-1]  # pyright: ignore
        first = len(self._tokens) - len(run)
        reader = codecs.getincrementaldecoder("utf-8")()
        for end, byte in enumerate(run, 1):
            try:
                reader.decode(bytes([byte]))
            except UnicodeDecodeError:  # whatever follows, these bytes are no UTF-8
                self._settle(self._tokens[first : first + end])
                return
        if not reader.getstate()[0]:  # whole characters: U+FFFD was written on purpose
            self._settle(self._tokens[self._num_known :])
