"""Incremental parsers that split the text of an answer into content and tool calls.

Models write tool calls as text, each family in the format of its chat template. A parser gets the text in pieces, and
its result does not depend on how the text is split, so streamed and whole answers have the same calls. Each format's
module has its own parser.
"""

import abc
from collections.abc import Callable, Iterator
from typing import Final

from detjax.server.tools.parts import Content, Part

HIDDEN: Final = "\ufdd0"
"""The character before a mark that was a special token of the answer, which its text omits. Unicode assigns it no
character, so a model that spells out a mark in ordinary tokens does not write one."""

type Written = Callable[[str], str]
"""Returns a mark as it is in the text that parsers get: after `HIDDEN`, if it is a special token."""


def as_text(mark: str) -> str:
    """Returns a mark of a tokenizer in which marks are plain text."""
    return mark


class AnswerParser(abc.ABC):
    """Splits an answer into parts."""

    @abc.abstractmethod
    def add(self, text: str) -> Iterator[Part]:
        """Yields the parts that `text` completes. The caller must exhaust the iterator."""

    @abc.abstractmethod
    def finish(self) -> Iterator[Part]:
        """Yields the remaining parts at the end of the answer."""


class ContentParser(AnswerParser):
    """The parser of answers that are all content."""

    def add(self, text: str) -> Iterator[Part]:
        if text:
            yield Content(text)

    def finish(self) -> Iterator[Part]:
        yield from ()


class MarkedParser(AnswerParser):
    """A parser of formats whose calls begin with a mark. White space around calls is dropped.

    If the text after a mark is not a call, such as a broken object, it is content, including the mark.

    Attributes:
        begins: the marks that begin calls.
    """

    def __init__(self, *begins: str) -> None:
        """A parser at the beginning of an answer."""
        self.begins = begins
        self._text = ""
        """Pending text, at most as long as a mark or the name of a tool."""
        self._space: list[str] = []
        """White space that is content only if more content follows."""
        self._follows_call = False
        """True if only white space was read since the last call."""
        self._in_call = False
        self._calls = 0

    def add(self, text: str) -> Iterator[Part]:
        self._text += text
        before = None
        while before != (len(self._text), self._position()):
            before = len(self._text), self._position()
            yield from self._read_call() if self._in_call else self._read_content()

    def _position(self) -> object:
        """Returns the state of the parser, except for its text: reading continues while the state changes."""
        return self._in_call

    @abc.abstractmethod
    def _begin_call(self, mark: str) -> None:
        """Prepares for the text after a mark."""

    @abc.abstractmethod
    def _read_call(self) -> Iterator[Part]:
        """Yields parts of the text after a mark."""

    def _read_content(self) -> Iterator[Part]:
        begin, mark = first_mark(self._text, self.begins)
        if mark is None:
            known = len(self._text) - length_of_begun(self._text, *self.begins)
            text, self._text = self._text[:known], self._text[known:]
            yield from self._content(text)
            return
        text, self._text = self._text[:begin], self._text[begin + len(mark) :]
        yield from self._content(text)
        self._in_call = True
        self._begin_call(mark)

    def _content(self, text: str) -> Iterator[Part]:
        """Yields content without trailing white space, which may precede a call."""
        if self._follows_call:
            text = text.lstrip()
        stripped = text.rstrip()
        if stripped:
            self._follows_call = False
            yield Content("".join([*self._space, stripped]))
            self._space.clear()
        self._space.append(text[len(stripped) :])

    def _end_calls(self) -> None:
        """Continues with content."""
        self._in_call, self._follows_call = False, True
        self._space.clear()


def first_mark(text: str, marks: tuple[str, ...], start: int = 0) -> tuple[int, str | None]:
    """Returns the position of the first of several marks in a text, and the mark; the text's length and None without
    one.

    If marks begin at the same position, the longest one counts.
    """
    positions = ((position, -len(mark), mark) for mark in marks if (position := text.find(mark, start)) >= 0)
    position, _, mark = min(positions, default=(len(text), 0, None))
    return position, mark


def length_of_begun(text: str, *marks: str) -> int:
    """Returns the length of the longest end of a text that begins a mark."""
    most = min(len(text), max(map(len, marks), default=1) - 1)
    lengths = range(most, 0, -1)
    return next((length for length in lengths if any(mark.startswith(text[-length:]) for mark in marks)), 0)


def may_become(text: str, *marks: str) -> bool:
    """Returns whether a text is the beginning of one of several marks, and not all of it."""
    return any(len(text) < len(mark) and mark.startswith(text) for mark in marks)
