"""Tool calls whose arguments are tagged text: the formats of Qwen 3 Coder and Qwen 3.5, GLM 4.5, and DeepSeek V3.2.

In all of them a call has a header with the tool's name, then for each argument a tag with its key, its value, and an
end tag. Values are not quoted, so they may contain end tags themselves: an end tag counts only if another argument or
the call's end follows it.
"""

import enum
import re
from collections.abc import Iterator, Sequence
from typing import Final

from detjax.server.tools.arguments import ArgumentWriter
from detjax.server.tools.definitions import FunctionFields
from detjax.server.tools.parsers import HIDDEN, MarkedParser, Written, as_text, first_mark, length_of_begun, may_become
from detjax.server.tools.parts import Arguments, CallBegins, Part

_LONGEST_HEADER: Final = 1024
"""Characters of the header of a call or an argument. Longer text is not a header."""


class _Place(enum.Enum):
    """The element that a parser reads."""

    HEADER = enum.auto()
    """The header of a call."""
    BETWEEN = enum.auto()
    """Text between the arguments of a call."""
    VALUE = enum.auto()
    """A value."""
    AFTER_VALUE = enum.auto()
    """White space after an end tag, which belongs to the value if neither an argument nor the call's end follows."""
    AFTER_CALL = enum.auto()
    """Text after a call."""


class TaggedParser(MarkedParser):
    """A parser of calls with tagged arguments.

    Subclasses name the tags. `HEADER` matches the header of a call, with the group "name", and `ARGUMENT` the header of
    an argument, with the groups "key" and, if the header says it, "string".
    """

    BEGIN: str
    """The tag before calls."""
    CALL: str
    """The beginning of a call's header."""
    HEADER: re.Pattern[str]
    ARGUMENT_BEGIN: str
    ARGUMENT: re.Pattern[str]
    VALUE_END: str
    CALL_END: str
    END: str
    """The tag after calls."""
    has_lines = False
    """True if values stand on lines of their own."""

    def __init__(self, tools: Sequence[FunctionFields], written: Written = as_text) -> None:
        """A parser of calls of these tools."""
        self._tag = {
            name: written(getattr(self, name)) for name in ("BEGIN", "CALL", "ARGUMENT_BEGIN", "VALUE_END", "CALL_END")
        }
        self._end = written(self.END)
        super().__init__(self._tag["BEGIN"], *([self._tag["CALL"]] if self.CALL else []))
        self._tools = tools
        self._ends_value = (self._tag["ARGUMENT_BEGIN"], self._tag["CALL_END"], self._end)
        self._place = _Place.HEADER
        self._kept = ""
        """Text that becomes content if it is not a call."""
        self._writer = ArgumentWriter((), "")
        self._held: list[str] = []
        """The end of a value that may not belong to the value."""
        self._begins_value = False

    def _position(self) -> object:
        return self._in_call, self._place

    def _begin_call(self, mark: str) -> None:
        self._place, self._kept = _Place.HEADER, ""
        if mark == self._tag["CALL"]:
            self._text = mark + self._text
        else:
            self._kept = mark

    def _read_call(self) -> Iterator[Part]:
        match self._place:
            case _Place.HEADER:
                yield from self._read_header()
            case _Place.BETWEEN:
                yield from self._read_between()
            case _Place.VALUE:
                yield from self._read_value()
            case _Place.AFTER_VALUE:
                yield from self._read_after_value()
            case _Place.AFTER_CALL:
                self._read_after_call()

    def _read_header(self) -> Iterator[Part]:
        text = self._text.lstrip()
        if match := self.HEADER.match(text):
            name = match["name"].strip()
            self._text, self._kept = text[match.end() :], ""
            self._writer = ArgumentWriter(self._tools, name)
            self._place = _Place.BETWEEN
            yield CallBegins(self._calls, name)
        elif not self._may_be_header(text):
            kept, self._kept = self._kept, ""
            if not kept:  # the mark of a header itself, which must not be read as one again
                kept, self._text = self._tag["CALL"], self._text[len(self._tag["CALL"]) :]
            self._in_call = False
            yield from self._content(kept)

    def _may_be_header(self, text: str) -> bool:
        """Returns whether a text may be the beginning of a header."""
        if len(self._text) > _LONGEST_HEADER:
            return False
        call = self._tag["CALL"]
        return may_become(text, call) or (text.startswith(call) and ">" not in text and "\n" not in text)

    def _read_between(self) -> Iterator[Part]:
        """Skips text up to an argument or the call's end."""
        position, mark = first_mark(self._text, self._ends_value)
        if mark is None:
            self._text = self._text[len(self._text) - length_of_begun(self._text, *self._ends_value) :]
        elif mark != self._tag["ARGUMENT_BEGIN"]:
            self._text = self._text[position:]
            yield from self._end_call()
        elif match := self.ARGUMENT.match(self._text, position):
            self._text = self._text[match.end() :]
            flag = match.groupdict().get("string")
            yield from self._arguments(self._writer.begin(match["key"], None if flag is None else flag == "true"))
            self._place, self._held, self._begins_value = _Place.VALUE, [], True
        elif len(self._text) - position > _LONGEST_HEADER:
            self._text = self._text[position + len(mark) :]
        else:
            self._text = self._text[position:]

    def _read_value(self) -> Iterator[Part]:
        if self._begins_value and self.has_lines:
            if not self._text:
                return
            self._text = self._text.removeprefix("\n")
        self._begins_value = False
        marks = (self._tag["VALUE_END"], *(self._ends_value[:2] if self._may_lack_ends else ()))
        position, mark = first_mark(self._text, marks)
        if mark is None:
            position = len(self._text) - length_of_begun(self._text, *marks)
        text, self._text = self._text[:position], self._text[position:]
        if text:
            yield from self._release()
            if self.has_lines and text.endswith("\n"):  # the line break before an end tag is not part of the value
                text, self._held = text[:-1], ["\n"]
            yield from self._arguments(self._writer.add(text))
        if mark is not None and mark == self._tag["VALUE_END"]:
            self._text = self._text[len(mark) :]
            self._held.append(mark)
            self._place = _Place.AFTER_VALUE
        elif mark is not None:
            yield from self._end_value()

    @property
    def _may_lack_ends(self) -> bool:
        """True if models leave out the end tags of values."""
        return self.has_lines

    def _read_after_value(self) -> Iterator[Part]:
        text = self._text.lstrip()
        self._held.append(self._text[: len(self._text) - len(text)])
        self._text = text
        if text.startswith(self._ends_value):
            yield from self._end_value()
        elif text and not may_become(text, *self._ends_value):
            self._place = _Place.VALUE
            held = "".join(self._held)
            self._held = ["\n"] if self.has_lines and held.endswith("\n") else []
            yield from self._arguments(self._writer.add(held.removesuffix("".join(self._held))))

    def _release(self) -> Iterator[Part]:
        """Yields held text that turned out to belong to the value."""
        held, self._held = "".join(self._held), []
        yield from self._arguments(self._writer.add(held))

    def _end_value(self) -> Iterator[Part]:
        self._held, self._place = [], _Place.BETWEEN
        yield from self._arguments(self._writer.end_value())

    def _end_call(self) -> Iterator[Part]:
        if self._text.startswith(self._tag["CALL_END"]):
            self._text = self._text[len(self._tag["CALL_END"]) :]
        yield from self._arguments(self._writer.end())
        self._calls += 1
        self._place = _Place.AFTER_CALL
        if self._tag["CALL_END"] == self._end:
            self._end_calls()

    def _read_after_call(self) -> None:
        """Reads another call, or the tag after calls, which may be missing."""
        text = self._text = self._text.lstrip()
        if text.startswith(self._end):
            self._text = text[len(self._end) :]
            self._end_calls()
        elif text.startswith(self._tag["CALL"]):
            self._place = _Place.HEADER
        elif text and not may_become(text, self._end, self._tag["CALL"]):
            self._end_calls()

    def _arguments(self, pieces: Iterator[str]) -> Iterator[Part]:
        if text := "".join(pieces):
            yield Arguments(self._calls, text)

    def finish(self) -> Iterator[Part]:
        if not self._in_call:
            yield from self._content(self._text)
        elif self._place is _Place.HEADER:
            yield from self._content(self._kept + self._text)
        elif self._place in (_Place.VALUE, _Place.AFTER_VALUE):
            yield from self._break_off()

    def _break_off(self) -> Iterator[Part]:
        """Yields what is known of a value that ends with the answer."""
        if self._place is _Place.AFTER_VALUE:
            yield from self._end_value()
        else:
            yield from self._arguments(self._writer.break_off())


class QwenParser(TaggedParser):
    """The format of Qwen 3 Coder and Qwen 3.5: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function>`.

    Models leave out the outer tags and the ends of values.
    """

    BEGIN = "<tool_call>"
    CALL = "<function="
    HEADER = re.compile(r"<function=(?P<name>[^>\n]{1,256})>")
    ARGUMENT_BEGIN = "<parameter="
    ARGUMENT = re.compile(r"<parameter=(?P<key>[^>\n]{1,256})>")
    VALUE_END = "</parameter>"
    CALL_END = "</function>"
    END = "</tool_call>"
    has_lines = True


class GlmParser(TaggedParser):
    """The format of GLM 4.5 to 4.7: `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`."""

    BEGIN = "<tool_call>"
    CALL = ""
    HEADER = re.compile(r"(?P<name>[^<>\n]{1,256}?)(?=\n|<arg_key>|</tool_call>)")
    ARGUMENT_BEGIN = "<arg_key>"
    ARGUMENT = re.compile(r"<arg_key>(?P<key>[^<>]{1,256})</arg_key>\s*<arg_value>")
    VALUE_END = "</arg_value>"
    CALL_END = "</tool_call>"
    END = "</tool_call>"

    def _may_be_header(self, text: str) -> bool:
        name, tag, rest = text.partition("<")
        if len(self._text) > _LONGEST_HEADER or "\n" in text or ">" in name:
            return False
        return not tag or (bool(name) and may_become(tag + rest, "<arg_key>", "</tool_call>"))


class DsmlParser(TaggedParser):
    """The format of DeepSeek V3.2, whose tags say whether a value is a string."""

    BEGIN = "<｜DSML｜function_calls>"
    CALL = "<｜DSML｜invoke"
    HEADER = re.compile(rf'<{HIDDEN}?｜DSML｜invoke\s+name="(?P<name>[^"\n]{{1,256}})"\s*>')
    ARGUMENT_BEGIN = "<｜DSML｜parameter"
    ARGUMENT = re.compile(
        rf'<{HIDDEN}?｜DSML｜parameter\s+name="(?P<key>[^"\n]{{1,256}})"\s+string="(?P<string>true|false)"\s*>'
    )
    VALUE_END = "</｜DSML｜parameter>"
    CALL_END = "</｜DSML｜invoke>"
    END = "</｜DSML｜function_calls>"
