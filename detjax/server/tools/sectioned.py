"""Tool calls in a section of the answer, between marks, with JSON arguments: the formats of DeepSeek V3 and V3.1 and of
Kimi K2.
"""

import abc
import enum
import re
from collections.abc import Iterator, Sequence
from typing import ClassVar, Final

from detjax.server.tools.call_readers import ValueReader
from detjax.server.tools.definitions import FunctionFields
from detjax.server.tools.marks import literal
from detjax.server.tools.parsers import (
    AnswerParser,
    MarkedParser,
    Written,
    as_text,
    first_mark,
    length_of_begun,
    may_become,
)
from detjax.server.tools.parts import Arguments, CallBegins, Part
from detjax.server.tools.tool_format import ToolFormat

_LONGEST_HEADER: Final = 1024
"""Characters between the mark of a call and its arguments. Longer text is not a call."""


class _Place(enum.Enum):
    """The element that a parser reads."""

    SECTION = enum.auto()
    """Text between calls."""
    HEADER = enum.auto()
    """The header of a call."""
    ARGUMENTS = enum.auto()
    """White space before arguments."""
    OBJECT = enum.auto()
    """Arguments that are a JSON object or list."""
    OTHER = enum.auto()
    """Other arguments, which end at the next mark."""
    AFTER = enum.auto()
    """Text between arguments and the next mark."""


class SectionParser(MarkedParser, abc.ABC):
    """A parser of sections of calls. Text between calls is dropped, and text after the section is content."""

    BEGIN: str
    END: str
    CALL_BEGIN: str
    SEPARATOR: str
    """The mark between the header of a call and its arguments."""
    CALL_END: str

    def __init__(self, written: Written = as_text) -> None:
        """A parser at the beginning of an answer."""
        self._begin, self._call_begin = written(self.BEGIN), written(self.CALL_BEGIN)
        super().__init__(self._begin, self._call_begin)
        self._separator = written(self.SEPARATOR)
        self._ends = written(self.CALL_END), self._call_begin, written(self.END)
        """The marks that end a call."""
        self._place = _Place.SECTION
        self._kept = ""
        """Text that becomes content if it is not a call."""
        self._value = ValueReader()
        self._pieces: list[str] = []
        """Arguments that are not yielded before their end."""

    def _position(self) -> object:
        return self._in_call, self._place

    def _begin_call(self, mark: str) -> None:
        self._kept = mark
        self._place = _Place.HEADER if mark == self._call_begin else _Place.SECTION

    def _read_call(self) -> Iterator[Part]:
        match self._place:
            case _Place.SECTION:
                yield from self._read_section()
            case _Place.HEADER:
                yield from self._read_header()
            case _Place.ARGUMENTS:
                yield from self._begin_arguments()
            case _Place.OBJECT:
                yield from self._read_object()
            case _Place.OTHER:
                yield from self._read_other()
            case _Place.AFTER:
                self._read_after()

    def _read_section(self) -> Iterator[Part]:
        marks = self._ends
        if self._kept:
            text = self._text.lstrip()
            self._kept += self._text[: len(self._text) - len(text)]
            self._text = text
            if text and not text.startswith(marks) and not may_become(text, *marks):
                yield from self._give_up()  # the mark of the section is followed by other text
                return
        position, mark = first_mark(self._text, marks)
        if mark is None:
            self._text = self._text[len(self._text) - length_of_begun(self._text, *marks) :]
            return
        self._text = self._text[position + len(mark) :]
        if mark == self._call_begin:
            self._kept += mark if self._kept else ""
            self._place = _Place.HEADER
        elif mark == self._ends[2]:
            self._kept = ""
            self._end_calls()

    def _read_header(self) -> Iterator[Part]:
        position, mark = first_mark(self._text, self._ends)
        header = self._header(self._text[:position])
        if header is not None:
            name, id_, end = header
            self._text, self._kept, self._pieces = self._text[end:], "", []
            self._place = _Place.ARGUMENTS
            yield CallBegins(self._calls, name, id_)
        elif len(self._text) > _LONGEST_HEADER or mark is not None:
            yield from self._give_up()

    @abc.abstractmethod
    def _header(self, text: str) -> tuple[str, str | None, int] | None:
        """Returns the name and the id in the header of a call, and the header's length; None if it is incomplete."""

    def _begin_arguments(self) -> Iterator[Part]:
        self._text = self._text.lstrip()
        if self._text:
            self._place = _Place.OBJECT if self._text[0] in "{[" else _Place.OTHER
            self._value = ValueReader()
        yield from ()

    def _read_object(self) -> Iterator[Part]:
        end = self._value.read(self._text, 0)
        text, self._text = self._text[:end], self._text[end:]
        if text:
            yield Arguments(self._calls, text)
        if self._value.is_over:
            self._place = _Place.AFTER

    def _read_other(self) -> Iterator[Part]:
        position, mark = first_mark(self._text, self._ends)
        if mark is None:
            position = len(self._text) - length_of_begun(self._text, *self._ends)
        self._pieces.append(self._text[:position])
        self._text = self._text[position:]
        if mark is not None:
            yield Arguments(self._calls, self._other_arguments() or "{}")
            self._place = _Place.AFTER

    def _other_arguments(self) -> str:
        return self._arguments_in("".join(self._pieces))

    def _arguments_in(self, text: str) -> str:
        """Returns the arguments in the text before the end of a call."""
        return text.strip()

    def _read_after(self) -> None:
        """Skips text up to the next mark."""
        position, mark = first_mark(self._text, self._ends)
        if mark is None:
            self._text = self._text[len(self._text) - length_of_begun(self._text, *self._ends) :]
            return
        self._calls += 1
        self._place = _Place.SECTION
        # Without the end of the call, the next mark is read in the section.
        self._text = self._text[position + len(mark) if mark == self._ends[0] else position :]

    def _give_up(self) -> Iterator[Part]:
        """Continues with content, which begins with the text that is not a call."""
        kept, self._kept = self._kept, ""
        self._in_call, self._place = False, _Place.SECTION
        yield from self._content(kept)

    def finish(self) -> Iterator[Part]:
        if not self._in_call:
            yield from self._content(self._text)
        elif self._kept:
            yield from self._content(self._kept + self._text)
        elif self._place is _Place.OTHER and (text := self._other_arguments()):
            yield Arguments(self._calls, text)


class DeepSeekParser(SectionParser):
    """The formats of DeepSeek V3, whose calls have a type and a fence around their arguments, and of V3.1."""

    BEGIN = "<｜tool▁calls▁begin｜>"
    END = "<｜tool▁calls▁end｜>"
    CALL_BEGIN = "<｜tool▁call▁begin｜>"
    SEPARATOR = "<｜tool▁sep｜>"
    CALL_END = "<｜tool▁call▁end｜>"
    FENCE: Final = "```"
    _NAMED: Final = re.compile(r"\s*([^\n{]*?)[ \t\r]*\n\s*(?:```[a-z]*[ \t\r]*\n|(?=\{))")
    """The name after the type of a call, and the beginning of the fence, which models leave out."""

    def _header(self, text: str) -> tuple[str, str | None, int] | None:
        name, separator, rest = text.partition(self._separator)
        if not separator:
            return None
        end = len(name) + len(separator)
        if name.strip() != "function":
            return name.strip(), None, end
        begun = rest.lstrip()
        if begun.startswith("{"):  # a tool of this name, in the format of V3.1
            return "function", None, end
        match = self._NAMED.match(rest)
        return None if match is None else (match[1].strip(), None, end + match.end())

    def _arguments_in(self, text: str) -> str:
        return text.strip().removesuffix(self.FENCE).strip()


class KimiParser(SectionParser):
    """The format of Kimi K2, which writes the id of a call, with the tool's name and a number, before its arguments."""

    BEGIN = "<|tool_calls_section_begin|>"
    END = "<|tool_calls_section_end|>"
    CALL_BEGIN = "<|tool_call_begin|>"
    SEPARATOR = "<|tool_call_argument_begin|>"
    CALL_END = "<|tool_call_end|>"

    def _header(self, text: str) -> tuple[str, str | None, int] | None:
        header, separator, _ = text.partition(self._separator)
        if not separator:
            return None
        id_ = header.strip()
        name, colon, _ = id_.removeprefix("functions.").rpartition(":")
        return name if colon else id_.removeprefix("functions."), id_, len(header) + len(separator)


class _SectionFormat(ToolFormat):
    """A format with a section of calls."""

    PARSER: ClassVar[type[SectionParser]]
    BETWEEN: ClassVar[str] = ""
    """The text between two calls."""

    def parser(self, tools: Sequence[FunctionFields], begun: str = "") -> AnswerParser:
        return self.PARSER(self.marks.written)

    def _rules(self, tools: Sequence[FunctionFields], *, at_most_one: bool) -> list[str]:
        parser, mark = self.PARSER, self.marks.literal
        between = f"{literal(self.BETWEEN)} " if self.BETWEEN else ""
        more = "" if at_most_one else f" ({between}call)*"
        named = (self._call(tool.name, f"arguments_{number}") for number, tool in enumerate(tools))
        return [
            f"calls: call{more} {mark(parser.END)}",
            f"call: {mark(parser.CALL_BEGIN)} ({' | '.join(named)}) {mark(parser.CALL_END)}",
        ]

    @abc.abstractmethod
    def _call(self, name: str, arguments: str) -> str:
        """Returns an expression for the call of a tool, given the rule of its arguments."""


def _marks_of(parser: type[SectionParser]) -> tuple[str, ...]:
    return parser.BEGIN, parser.END, parser.CALL_BEGIN, parser.SEPARATOR, parser.CALL_END


class DeepSeekV3Format(_SectionFormat):
    """Calls with a type and a fence, as DeepSeek V3 and the first versions of R1 write them."""

    NAME = "deepseek_v3"
    PARSER = DeepSeekParser
    BEGIN = DeepSeekParser.BEGIN
    MARKS = _marks_of(DeepSeekParser)
    BETWEEN = "\n"

    def _call(self, name: str, arguments: str) -> str:
        fence = DeepSeekParser.FENCE
        head = self.marks.literal(f"function{DeepSeekParser.SEPARATOR}{name}\n{fence}json\n")
        return f"{head} {arguments} {literal(f'\n{fence}')}"


class DeepSeekV31Format(_SectionFormat):
    """Calls with a name and JSON, as DeepSeek V3.1 writes them."""

    NAME = "deepseek_v31"
    PARSER = DeepSeekParser
    BEGIN = DeepSeekParser.BEGIN
    MARKS = _marks_of(DeepSeekParser)

    def _call(self, name: str, arguments: str) -> str:
        return f"{self.marks.literal(name + DeepSeekParser.SEPARATOR)} {arguments}"


class KimiFormat(_SectionFormat):
    """Calls with ids, as Kimi K2 writes them. The number in an id counts the calls of the conversation."""

    NAME = "kimi_k2"
    PARSER = KimiParser
    BEGIN = KimiParser.BEGIN
    MARKS = _marks_of(KimiParser)
    ENDS_REASONING = True

    def _call(self, name: str, arguments: str) -> str:
        separator = self.marks.literal(KimiParser.SEPARATOR)
        return f"{literal(f'functions.{name}:')} /[0-9]{{1,4}}/ {separator} {arguments}"
