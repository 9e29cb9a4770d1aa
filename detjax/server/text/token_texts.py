"""Texts, logprobs and text offsets of single tokens, in the formats of responses."""

import codecs
import math
from collections.abc import Sequence
from typing import Any, Final

from detjax.models import Tokenizer

_MINUS_INFINITY: Final = -9999.0
"""The logprob that stands for minus infinity, which JSON cannot represent."""
_UNFINISHED: Final = "\ufffd"
_MAX_UNSETTLED: Final = 8
"""Tokens without a complete character after which none is expected any more. A character has up to four bytes."""

type Json = dict[str, Any]
type TopLogprobs = Sequence[tuple[int, float]]


def json_number(logprob: float) -> float:
    """Returns a logprob as a finite double, which represents the float32 number exactly."""
    return logprob if math.isfinite(logprob) else _MINUS_INFINITY


class TokenTexts:
    """The texts of a tokenizer's tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def text(self, token: int) -> str:
        """Returns the text of a token, with U+FFFD for bytes of incomplete characters."""
        if token not in self._texts:
            self._texts[token] = self._tokenizer.token_bytes(token).decode(errors="replace")
        return self._texts[token]

    def name(self, token: int, *, as_id: bool) -> str:
        """Returns the text of a token, or its id in vLLM's form."""
        return f"token_id:{token}" if as_id else self.text(token)

    def chat_json(
        self, token: int, logprob: float, top: TopLogprobs, sampling: float | None = None, *, as_ids: bool = False
    ) -> Json:
        """Returns a token with its logprob and the most likely tokens at its position, in the format of chats.

        `sampling` is its logprob under the sampling distribution, if the request asks for it.
        """

        def entry(token: int, logprob: float, sampling: float | None = None) -> Json:
            token_bytes = list(self._tokenizer.token_bytes(token))
            drawn = {} if sampling is None else {"sampling_logprob": json_number(sampling)}
            name = self.name(token, as_id=as_ids)
            return {"token": name, "logprob": json_number(logprob)} | drawn | {"bytes": token_bytes}

        return entry(token, logprob, sampling) | {"top_logprobs": [entry(*pair) for pair in top]}

    def by_text(self, top: TopLogprobs, token: int, logprob: float, *, as_ids: bool = False) -> dict[str, float]:
        """Returns the most likely tokens at a position and the actual token, by text, in the format of completions.

        If several tokens have the same text, such as half characters, the most likely one counts. `top` is sorted by
        descending logprob.
        """
        logprobs: dict[str, float] = {}
        for other, value in (*top, (token, logprob)):
            logprobs.setdefault(self.name(other, as_id=as_ids), json_number(value))
        return logprobs

    def by_token(self, top: TopLogprobs, token: int, logprob: float, sampling: float | None = None) -> dict[str, Json]:
        """Returns a prompt token and the most likely ones at its position, by id, in vLLM's format.

        A token outside `top` has no known rank, so the field is omitted. `sampling` is the token's logprob under the
        sampling distribution, if the request asks for it.
        """
        ranks = {other: rank for rank, (other, _) in enumerate(top, start=1)}
        entries: dict[str, Json] = {}
        for other, value in ((token, logprob), *top):
            rank = {"rank": ranks[other]} if other in ranks else {}
            entries[str(other)] = {"logprob": json_number(value)} | rank | {"decoded_token": self.text(other)}
        if sampling is not None:
            entries[str(token)]["sampling_logprob"] = json_number(sampling)
        return entries


class TextOffsets:
    """Text offsets of tokens, in characters. A token inside a character has the character's offset.

    Each token decodes only the last few tokens again.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, start: int = 0, prompt: str | None = None, skip_special_tokens: bool = True
    ) -> None:
        """Offsets of successive tokens from `start` on.

        For the tokens of a prompt, `prompt` is its text: special tokens count if this text contains them. In an
        answer they count unless `skip_special_tokens`.
        """
        self._tokenizer, self._prompt = tokenizer, prompt
        self._skips = skip_special_tokens and prompt is None
        self._added = frozenset(tokenizer.added_tokens)
        self._settled = start
        """Characters before the tokens that are decoded again."""
        self._whole, self._length = start, start
        """The text's length so far, without and with an incomplete character at its end."""
        self._tokens: list[int] = []
        self._known = 0
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
        """Knows whether the bytes so far end inside a character."""

    def add(self, token: int) -> int:
        """Returns the offset of the next token."""
        written = self._tokenizer.token_bytes(token)
        continues = [0x80 <= byte < 0xC0 for byte in written] or [False]
        is_inside = bool(self._bytes.getstate()[0])
        offset = self._whole if continues[0] and is_inside else self._length
        if self._prompt is not None:
            offset = min(offset, len(self._prompt))
        if token in self._added and self._is_hidden(token, offset):
            return min(offset, self._whole)
        self._tokens.append(token)
        self._bytes.decode(written)
        added = self._text(self._tokens)[len(self._text(self._tokens[: self._known])) :]
        self._length = self._settled + len(added)
        if not added.endswith(_UNFINISHED):
            self._whole = self._length
        elif not all(continues):
            self._whole = self._length - 1
        is_settled = bool(added) and not added.endswith(_UNFINISHED)
        if is_settled or len(self._tokens) - self._known >= _MAX_UNSETTLED:
            self._settled = self._whole = self._length
            self._tokens = self._tokens[self._known :]
            self._known = len(self._tokens)
        return offset

    def _is_hidden(self, token: int, offset: int) -> bool:
        """Returns whether the text omits an added token, such as an answer's special tokens."""
        if self._prompt is None:
            return not self._text([token])
        return not self._prompt.startswith(self._text([token]), offset)

    def _text(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=self._skips)
