"""The reasoning of an answer: its marks, and its separation from the rest.

Some chat templates open the reasoning in the prompt, so that an answer has only its end; some close it there, so that
the answer has none; and some leave it to the model. The end of the rendered prompt decides, not the model's name.
"""

import enum
from collections.abc import Iterator, Sequence
from typing import Final

from detjax.models import Tokenizer
from detjax.server.tools.marks import Marks, pattern
from detjax.server.tools.parsers import Written, as_text, first_mark, length_of_begun, may_become
from detjax.server.tools.parts import Part, Reasoning

PAIRS: Final = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
"""The marks around reasoning that chat templates have, the first pair for most families, the second for Mistral's."""
_SPACES: Final = ("\n", "\n\n", " ")
"""Texts before reasoning that models write, if they are tokens."""


class Start(enum.Enum):
    """The beginning of an answer."""

    OPEN = enum.auto()
    """The prompt ends with the mark that begins reasoning."""
    OPEN_LINE = enum.auto()
    """The prompt ends with this mark and a line break."""
    CLOSED = enum.auto()
    """The prompt ends the reasoning."""
    FREE = enum.auto()
    """The model may begin reasoning."""


class ThoughtReader:
    """Separates the reasoning at the beginning of an answer from the rest, while the answer grows.

    One line break after each mark and before the end mark is dropped, and so are the others after the end mark. Line
    breaks within reasoning are held back until the next character.

    Attributes:
        is_over: True if no reasoning follows.
    """

    def __init__(
        self, begin: str, end: str, start: Start, also_ends: Sequence[str] = (), written: Written = as_text
    ) -> None:
        """A reader at the beginning of an answer. The marks `also_ends` end reasoning too, and belong to the rest."""
        self._begin, self._end = written(begin), written(end)
        self._ends = self._end, *map(written, also_ends)
        self.is_over = start is Start.CLOSED
        self._is_inside = start in (Start.OPEN, Start.OPEN_LINE)
        self._drops_line = start is Start.OPEN
        self._drops_lines = False
        self._text = ""
        self._has_line = False
        """True if the last character was a line break, which is held back."""

    def add(self, text: str) -> Iterator[Part]:
        """Yields the reasoning that `text` completes; `rest` returns the text after it."""
        self._text += text
        if not self.is_over and not self._is_inside:
            self._look_for_begin()
        if self._is_inside:
            yield from self._read()

    def rest(self) -> str:
        """Returns the text after the reasoning that was not returned yet."""
        if not self.is_over:
            return ""
        text, self._text = self._text, ""
        if self._drops_lines:
            text = text.lstrip("\n")
            self._drops_lines = not text
        return text

    def finish(self) -> Iterator[Part]:
        """Yields the remaining reasoning at the end of an answer; `rest` returns text that is not reasoning."""
        if self._is_inside:
            text = ("\n" if self._has_line else "") + self._text
            self._text = ""
            if text:
                yield Reasoning(text)
        self.is_over, self._is_inside = True, False

    def _look_for_begin(self) -> None:
        text = self._text.lstrip()
        if text.startswith(self._begin):
            self._is_inside = self._drops_line = True
            self._text = text[len(self._begin) :]
        elif text and not may_become(text, self._begin):
            self.is_over = True

    def _read(self) -> Iterator[Part]:
        if self._drops_line:
            if not self._text:
                return
            self._text, self._drops_line = self._text.removeprefix("\n"), False
        position, mark = first_mark(self._text, self._ends)
        if mark is None:
            position = len(self._text) - length_of_begun(self._text, *self._ends)
        text, self._text = self._text[:position], self._text[position:]
        if text:
            text = ("\n" if self._has_line else "") + text
            self._has_line = text.endswith("\n")
            text = text.removesuffix("\n")
            if text:
                yield Reasoning(text)
        if mark is not None:
            self._text = self._text.removeprefix(self._end)
            self._is_inside, self.is_over, self._drops_lines = False, True, True


class ReasoningFormat:
    """The marks of a model's reasoning with its tokenizer.

    Attributes:
        marks: the marks.
        begin_tokens: the tokens of the mark that begins reasoning; empty if it is plain text.
        end_tokens: the tokens of the mark that ends it; empty if it is plain text.
        spaces: tokens of white space before the reasoning.
        repeats: True if an answer may have several pieces of reasoning.
    """

    repeats = False

    def __init__(self, tokenizer: Tokenizer, begin: str, end: str) -> None:
        """The format with a tokenizer's tokens for the marks."""
        self.begin, self.end = begin, end
        self.marks = Marks(tokenizer, (begin, end))
        has_tokens = len(self.marks.tokens) == 2
        self.begin_tokens = (self.marks.tokens[begin],) if has_tokens else ()
        self.end_tokens = (self.marks.tokens[end],) if has_tokens else ()
        encoded = [tokenizer.encode(text, add_special_tokens=False) for text in _SPACES]
        self.spaces = tuple(tokens[0] for tokens in encoded if len(tokens) == 1)

    def start(self, ending: str) -> Start:
        """Returns the beginning of an answer to a prompt that ends with the text `ending`."""
        bare = ending.rstrip()
        if bare.endswith(self.begin):
            return Start.OPEN if bare == ending.rstrip(" ") else Start.OPEN_LINE
        return Start.CLOSED if bare.endswith(self.end) else Start.FREE

    def continued(self, text: str) -> str:
        """Returns the end of a prompt for an answer that continues a message, given the prompt's text."""
        is_open = text.rfind(self.begin) > text.rfind(self.end)
        return f"{self.begin}\n" if is_open else self.end

    def is_open(self, ending: str) -> bool:
        """Returns whether the prompt ends within reasoning."""
        return self.start(ending) in (Start.OPEN, Start.OPEN_LINE)

    def may_reason(self, ending: str) -> bool:
        """Returns whether an answer to the prompt may have reasoning."""
        return self.start(ending) is not Start.CLOSED

    def reader(self, ending: str, also_ends: Sequence[str], written: Written) -> ThoughtReader:
        """Returns a reader of an answer to a prompt that ends with the text `ending`."""
        return ThoughtReader(self.begin, self.end, self.start(ending), also_ends, written)

    def rules(self, ending: str) -> str:
        """Returns the rule `reasoning` for the reasoning of an answer, with the rules that it uses; empty for none."""
        start = self.start(ending)
        if start is Start.CLOSED:
            return ""
        text = ["reasoning_end: thoughts LINES?", rf"thoughts[lazy]: /(.|\n)*{pattern(self.end)}/"]
        if self.end_tokens:
            thoughts = self.marks.text_rules("thoughts", self.end)
            text = [f"reasoning_end: thoughts {self.marks.literal(self.end)} LINES?", thoughts]
        begin = "" if start is not Start.FREE else f"LINES? {self.marks.literal(self.begin)} "
        optional = "?" if start is Start.FREE else ""
        return "\n".join([f"reasoning: ({begin}reasoning_end){optional}", *text, r"LINES: /\n{1,2}/"])


def reasoning_marks(template: str) -> tuple[str, str] | None:
    """Returns the marks of reasoning in a chat template, or None if it has none."""
    return next((pair for pair in PAIRS if pair[0] in template or pair[1] in template), None)
