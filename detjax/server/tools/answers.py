"""Answers to requests with tools, split into content and calls."""

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Final

from detjax.models import Tokenizer
from detjax.server.text.token_texts import TextOffsets
from detjax.server.tools.call_readers import Arguments, CallBegins, Content, Part
from detjax.server.tools.formats import ToolFormat

_PIECE: Final = 1 << 12
"""Characters to parse at a time."""


@dataclasses.dataclass(frozen=True)
class Call:
    """A tool call: the tool's name, and the arguments as the model wrote them."""

    name: str
    arguments: str


@dataclasses.dataclass(frozen=True)
class Answer:
    """An answer's content and tool calls."""

    content: str
    calls: Sequence[Call]


class AnswerReader:
    """Splits an answer into content and calls while it grows.

    Attributes:
        calls: number of calls that have begun.
    """

    def __init__(self, tokenizer: Tokenizer, form: ToolFormat, *, at_most_one: bool) -> None:
        """A reader at the beginning of an answer; with `at_most_one`, it drops calls after the first one."""
        self.calls = 0
        self._parser = form.parser()
        self._marks = _Marks(tokenizer, form) if form.hidden else None
        self._most = 1 if at_most_one else None

    def add(self, token: int, text: str) -> Iterator[Part]:
        """Yields the parts that a token and its text complete."""
        yield from self._parts(self._parser.add(self._marks.inserted([token], text) if self._marks else text))

    def finish(self) -> Iterator[Part]:
        """Yields the remaining parts at the end of the answer."""
        yield from self._parts(self._parser.finish())

    def parts(self, tokens: Sequence[int], text: str) -> Iterator[Part]:
        """Yields all parts of a complete answer."""
        if self._marks is not None:
            text = self._marks.inserted(tokens, text)
        pieces = (text[start : start + _PIECE] for start in range(0, len(text), _PIECE))
        yield from self._parts(itertools.chain.from_iterable(map(self._parser.add, pieces)))
        yield from self._parts(self._parser.finish())

    def read(self, tokens: Sequence[int], text: str) -> Answer:
        """Splits a complete answer into content and calls."""
        content, calls = list[str](), list[tuple[str, list[str]]]()
        for part in self.parts(tokens, text):
            match part:
                case Content(text):
                    content.append(text)
                case CallBegins(_, name):
                    calls.append((name, []))
                case Arguments(index, text):
                    calls[index][1].append(text)
        return Answer("".join(content), [Call(name, "".join(arguments)) for name, arguments in calls])

    def _parts(self, parts: Iterator[Part]) -> Iterator[Part]:
        for part in parts:
            if isinstance(part, Content) or self._most is None or part.index < self._most:
                self.calls += isinstance(part, CallBegins)
                yield part


class _Marks:
    """Reinserts the marks of calls into an answer's text, which omits special tokens."""

    def __init__(self, tokenizer: Tokenizer, form: ToolFormat) -> None:
        self._hidden = form.hidden
        self._offsets = TextOffsets(tokenizer)
        self._waiting = collections.deque[tuple[int, str]]()
        """Marks beyond the text so far, with their offsets."""
        self._length = 0

    def inserted(self, tokens: Sequence[int], text: str) -> str:
        """Returns the text of the next tokens with its marks."""
        for token in tokens:
            offset = self._offsets.add(token)
            if token in self._hidden:
                self._waiting.append((offset, self._hidden[token]))
        pieces, begin = list[str](), 0
        while self._waiting and self._waiting[0][0] <= self._length + len(text):
            offset, mark = self._waiting.popleft()
            end = max(offset - self._length, begin)
            pieces += (text[begin:end], mark)
            begin = end
        self._length += len(text)
        return "".join([*pieces, text[begin:]])
