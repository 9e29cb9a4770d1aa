"""Tool calls of Mistral's models, in a list of objects or each with its name before its arguments."""

import re
from collections.abc import Iterator, Sequence
from typing import Final

from detjax.models import Tokenizer
from detjax.server.tools.call_readers import CallReader, ValueReader
from detjax.server.tools.definitions import FunctionFields
from detjax.server.tools.json_objects import object_rules
from detjax.server.tools.marks import literal
from detjax.server.tools.parsers import HIDDEN, AnswerParser, MarkedParser, Written, as_text
from detjax.server.tools.parts import Arguments, CallBegins, Part
from detjax.server.tools.tool_format import ToolFormat, short_id


class MistralParser(MarkedParser):
    """The formats of Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]` and, since version 11 of its
    tokenizers, `[TOOL_CALLS]name[ARGS]{...}` per call, optionally with `[CALL_ID]` and an id after the name.
    """

    BEGIN: Final = "[TOOL_CALLS]"
    _HEADER: Final = re.compile(
        rf"\s{{0,16}}([\w.-]{{1,64}})(?:{HIDDEN}?\[CALL_ID\](\w{{1,64}}))?(?:{HIDDEN}?\[ARGS\])?\s{{0,16}}(?=\{{)"
    )
    """The name and the marks before the arguments of a call."""
    _LIST: Final = re.compile(r"\s{0,16}\[")
    _LONGEST_HEADER: Final = 256

    def __init__(self, written: Written = as_text) -> None:
        """A parser at the beginning of an answer."""
        super().__init__(written(self.BEGIN))
        (self._begin,) = self.begins

    def _begin_call(self, mark: str) -> None:
        self._kept: list[str] = [mark]
        """Text since the mark, which becomes content if it is not a call."""
        self._call: CallReader | None = None
        """Reads an object of a list of calls."""
        self._arguments: ValueReader | None = None
        """Reads the arguments that follow a name."""
        self._in_list = False

    def _read_call(self) -> Iterator[Part]:
        if self._arguments is not None:
            yield from self._read_arguments(self._arguments)
        elif self._call is not None:
            yield from self._read_object(self._call)
        elif self._in_list:
            yield from self._between_objects()
        else:
            yield from self._read_header()

    def _read_header(self) -> Iterator[Part]:
        if match := self._HEADER.match(self._text):
            self._text = self._text[match.end() :]
            self._arguments = ValueReader()
            yield CallBegins(self._calls, match[1], match[2])
        elif self._begin.startswith(self._text.lstrip()) and len(self._text) <= self._LONGEST_HEADER:
            pass  # another mark may follow
        elif (match := self._LIST.match(self._text)) and not self._text.lstrip().startswith(self._begin):
            self._kept.append(match[0])
            self._text, self._in_list = self._text[match.end() :], True
            self._call = CallReader(self._calls, "arguments")
        elif any(mark in self._text for mark in ("{", self._begin)) or len(self._text) > self._LONGEST_HEADER:
            yield from self._give_up()

    def _read_arguments(self, reader: ValueReader) -> Iterator[Part]:
        end = reader.read(self._text, 0)
        if end:
            yield Arguments(self._calls, self._text[:end])
        self._text = self._text[end:]
        if reader.is_over:
            self._calls += 1
            self._end_calls()

    def _read_object(self, call: CallReader) -> Iterator[Part]:
        yield from call.add(self._text)
        self._text = call.rest
        if call.is_broken and not call.is_announced:
            self._kept.append(call.text)
            yield from self._give_up()
        elif call.is_over:
            self._calls += 1
            self._kept, self._call = [], None

    def _between_objects(self) -> Iterator[Part]:
        text = self._text.lstrip()
        if text.startswith(","):
            self._text, self._call = text[1:], CallReader(self._calls, "arguments")
        elif text:
            self._text = text[text.startswith("]") :]
            self._end_calls()
        yield from ()

    def _give_up(self) -> Iterator[Part]:
        """Yields the text since the mark as content."""
        self._in_call = False
        yield from self._content("".join(self._kept))

    def finish(self) -> Iterator[Part]:
        if self._in_call and self._arguments is None and (self._call is None or not self._call.is_announced):
            yield from self._content("".join(self._kept) + (self._call.text if self._call is not None else ""))
        if not self._in_call or (self._arguments is None and self._call is None and not self._in_list):
            yield from self._content(self._text)


class MistralListFormat(ToolFormat):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`."""

    NAME = "mistral"
    BEGIN = MistralParser.BEGIN
    MARKS = (MistralParser.BEGIN,)

    def parser(self, tools: Sequence[FunctionFields], begun: str = "") -> AnswerParser:
        return MistralParser(self.marks.written)

    def call_id(self, answer: str, choice: int, index: int) -> str:
        return short_id(answer, choice, index)

    def _rules(self, tools: Sequence[FunctionFields], *, at_most_one: bool) -> list[str]:
        more = "" if at_most_one else ' (", " call)*'
        return [f'calls: " "? "[" call{more} "]"', f"call: {object_rules(tools, 'arguments')}"]


class MistralNamedFormat(ToolFormat):
    """`[TOOL_CALLS]name[ARGS]{...}`, with an id between name and arguments if the chat template writes one."""

    NAME = "mistral"
    ARGUMENTS: Final = "[ARGS]"
    ID: Final = "[CALL_ID]"
    BEGIN = MistralParser.BEGIN
    MARKS = (MistralParser.BEGIN, ID, ARGUMENTS)

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self._has_ids = self.ID in (tokenizer.tool_template or "")

    def parser(self, tools: Sequence[FunctionFields], begun: str = "") -> AnswerParser:
        return MistralParser(self.marks.written)

    def call_id(self, answer: str, choice: int, index: int) -> str:
        return short_id(answer, choice, index)

    def _rules(self, tools: Sequence[FunctionFields], *, at_most_one: bool) -> list[str]:
        id_ = f"{self.marks.literal(self.ID)} /[a-zA-Z0-9]{{9}}/ " if self._has_ids else ""
        more = "" if at_most_one else f" ({self.marks.literal(self.BEGIN)} call)*"
        named = (
            f"{literal(tool.name)} {id_}{self.marks.literal(self.ARGUMENTS)} arguments_{number}"
            for number, tool in enumerate(tools)
        )
        return [f"calls: call{more}", f"call: {' | '.join(named)}"]
