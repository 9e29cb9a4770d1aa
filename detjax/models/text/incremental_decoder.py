"""Incremental decoding: the text of a growing sequence of tokens."""

import codecs
import itertools
from collections.abc import Sequence
from typing import Final, Protocol, runtime_checkable

_UNFINISHED: Final = "\ufffd"
_MANY: Final = 16
"""The number of tokens after which text that still ends with U+FFFD is settled as much as possible."""
_CHARACTER: Final = 4
"""The maximum number of bytes of a character in UTF-8."""


@runtime_checkable
class TokenDecoder(Protocol):
    """The part of a tokenizer that decodes tokens."""

    @property
    def is_byte_level(self) -> bool:
        """True if text consists of the bytes of its tokens."""
        ...

    def byte_of(self, token: int) -> int | None:
        """Returns the byte that a token stands for."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of tokens."""
        ...

    def is_left_out(self, token: int) -> bool:
        """Returns whether a token never adds to a text."""
        ...


class IncrementalDecoder:
    """The text of a growing sequence of tokens. Each new token decodes only the last few of them again.

    Attributes:
        text: the text of all tokens so far, as `Tokenizer.decode` returns it; it ends with U+FFFD if its last character
            is incomplete.
        finished: length of the text without trailing U+FFFD, which may stand for an incomplete character.
    """

    def __init__(self, tokenizer: TokenDecoder) -> None:
        self.text = ""
        self.finished = 0
        self._tokenizer = tokenizer
        self._settled = ""
        """The part of the text that is known not to change."""
        self._tokens: list[int] = []
        """The tokens since the settled text last grew, and before them the tokens that were settled then."""
        self._num_known = 0
        """The number of these tokens that belong to the settled text."""
        self._known = 0
        """The length of the settled part in the text of these tokens."""

    def add(self, token: int) -> str:
        """Adds a token and returns the text."""
        if self._tokenizer.is_left_out(token):  # otherwise each token would decode a run of them again
            return self.text
        self._tokens.append(token)
        # A token's text may differ at the beginning of a text. Both texts begin with the known tokens, so it cancels.
        last = self._tokenizer.decode(self._tokens)
        new = last[self._known :]
        self.text = self._settled + new
        if rest := new.rstrip(_UNFINISHED):
            self.finished = len(self._settled) + len(rest)
        if new and not new.endswith(_UNFINISHED):
            self._settle(self._tokens[self._num_known :])
        elif len(self._tokens) - self._num_known >= _MANY:
            if self._tokenizer.is_byte_level:
                # After invalid bytes, UTF-8 decoding resynchronizes within one character's bytes, so the last tokens
                # end like all of them; and only the last U+FFFD can become another character.
                self._settle(self._tokens[-_CHARACTER:], len(self.text) - 1)
            else:
                self._settle_byte_tokens()
        return self.text

    def _settle(self, tokens: list[int], length: int | None = None) -> None:
        """Settles the text, or its first `length` characters; `tokens` are the tokens at its end."""
        length = len(self.text) if length is None else length
        self._tokens, self._num_known = tokens, len(tokens)
        self._known = len(self._tokenizer.decode(tokens)) - (len(self.text) - length)
        self._settled = self.text[:length]

    def _settle_byte_tokens(self) -> None:
        """Settles a text that ends with U+FFFD if some tokens stand for single bytes.

        A run of such tokens is decoded as UTF-8 as a whole. If it is invalid, each of its bytes becomes a U+FFFD, and
        so does each further byte.
        """
        values = (self._tokenizer.byte_of(token) for token in reversed(self._tokens))
        run = bytes(itertools.takewhile(lambda value: value is not None, values))[::-1]  # pyright: ignore
        first = len(self._tokens) - len(run)
        reader = codecs.getincrementaldecoder("utf-8")()
        for end, byte in enumerate(run, 1):
            try:
                reader.decode(bytes([byte]))
            except UnicodeDecodeError:  # these bytes stay invalid, whatever follows
                self._settle(self._tokens[first : first + end])
                return
        if not reader.getstate()[0]:  # complete characters: this U+FFFD is intended
            self._settle(self._tokens[self._num_known :])
