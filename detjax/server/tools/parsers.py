"""Incremental parsers that split the text of an answer into content and tool calls.

Models write tool calls as text, each family in the format of its chat template. A parser gets the text in pieces, and
its result does not depend on how the text is split, so streamed and whole answers have the same calls.
"""

import abc
import re
from collections.abc import Iterator
from typing import Final

from detjax.server.tools.call_readers import Arguments, CallBegins, CallReader, Content, Part, ValueReader


class ToolCallParser(abc.ABC):
    """Splits an answer into content and tool calls."""

    @abc.abstractmethod
    def add(self, text: str) -> Iterator[Part]:
        """Yields the parts that `text` completes. The caller must exhaust the iterator."""

    @abc.abstractmethod
    def finish(self) -> Iterator[Part]:
        """Yields the remaining parts at the end of the answer."""


class _MarkedParser(ToolCallParser):
    """A parser of formats whose calls begin with a mark. White space around calls is dropped.

    If the text after a mark is not a call, such as a broken object, it is content, including the mark.
    """

    BEGIN: str

    def __init__(self) -> None:
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
        while before != (len(self._text), self._in_call):
            before = len(self._text), self._in_call
            yield from self._read_call() if self._in_call else self._read_content()

    @abc.abstractmethod
    def _begin_call(self) -> None:
        """Prepares for the text after a mark."""

    @abc.abstractmethod
    def _read_call(self) -> Iterator[Part]:
        """Yields parts of the text after a mark."""

    def _read_content(self) -> Iterator[Part]:
        begin = self._text.find(self.BEGIN)
        if begin < 0:
            known = len(self._text) - _length_of_begun(self.BEGIN, self._text)
            text, self._text = self._text[:known], self._text[known:]
            yield from self._content(text)
            return
        text, self._text = self._text[:begin], self._text[begin + len(self.BEGIN) :]
        yield from self._content(text)
        self._in_call = True
        self._begin_call()

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


class HermesParser(_MarkedParser):
    """The format of Hermes and of Qwen 2.5 and 3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

    BEGIN = "<tool_call>"
    END: Final = "</tool_call>"

    def _begin_call(self) -> None:
        self._call = CallReader(self._calls, "arguments")

    def _read_call(self) -> Iterator[Part]:
        call = self._call
        if not call.is_over:
            yield from call.add(self._text)
            self._text = call.rest
        if call.is_broken and not call.is_announced:
            self._in_call = False
            yield from self._content(self.BEGIN + call.text)
        elif call.is_over:
            end = self._text.find(self.END)
            if end < 0:  # only the end tag may follow, so anything else is dropped
                self._text = self._text[len(self._text) - _length_of_begun(self.END, self._text) :]
                return
            self._text = self._text[end + len(self.END) :]
            self._calls += 1
            self._end_calls()

    def finish(self) -> Iterator[Part]:
        if not self._in_call:
            yield from self._content(self._text)
        elif not self._call.is_announced:
            yield from self._content(self.BEGIN + self._call.text)


class MistralParser(_MarkedParser):
    """The formats of Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]` and, since version 11 of its
    tokenizers, `[TOOL_CALLS]name[ARGS]{...}` per call, optionally with `[CALL_ID]` and an id after the name.
    """

    BEGIN = "[TOOL_CALLS]"
    _HEADER: Final = re.compile(r"\s{0,16}([\w.-]{1,64})(?:\[CALL_ID\]\w{1,64})?(?:\[ARGS\])?\s{0,16}(?=\{)")
    """The name and the marks before the arguments of a call."""
    _LIST: Final = re.compile(r"\s{0,16}\[")
    _LONGEST_HEADER: Final = 256

    def _begin_call(self) -> None:
        self._kept: list[str] = [self.BEGIN]
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
            yield CallBegins(self._calls, match[1])
        elif self.BEGIN.startswith(self._text.lstrip()) and len(self._text) <= self._LONGEST_HEADER:
            pass  # another mark may follow
        elif (match := self._LIST.match(self._text)) and not self._text.lstrip().startswith(self.BEGIN):
            self._kept.append(match[0])
            self._text, self._in_list = self._text[match.end() :], True
            self._call = CallReader(self._calls, "arguments")
        elif any(mark in self._text for mark in ("{", self.BEGIN)) or len(self._text) > self._LONGEST_HEADER:
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


class LlamaParser(ToolCallParser):
    """The format of Llama 3: the answer is `{"name": ..., "parameters": {...}}` and nothing else.

    Several calls are separated by semicolons. An answer that does not begin with such an object is content.
    """

    _SEPARATORS: Final = "; \n\t\r"

    def __init__(self) -> None:
        self._call: CallReader | None = CallReader(0, "parameters")
        self._calls = 0
        self._is_between = False

    def add(self, text: str) -> Iterator[Part]:
        while text:
            call = self._call
            if self._is_between:
                text = text.lstrip(self._SEPARATORS)
                self._is_between = not text
                continue
            if call is None:
                yield Content(text)
                return
            if call.is_over:  # broken, and text after calls is dropped
                return
            yield from call.add(text)
            text = call.rest
            if call.is_broken and not call.is_announced and not self._calls:
                self._call = None
                yield Content(call.text + text)
                return
            if call.is_over and not call.is_broken:
                self._calls += 1
                self._call, self._is_between = CallReader(self._calls, "parameters"), True

    def finish(self) -> Iterator[Part]:
        call = self._call
        if call is not None and not call.is_announced and not self._calls and call.text:
            yield Content(call.text)


def parser_of(template: str) -> type[ToolCallParser] | None:
    """Returns the parser for the format in a chat template, or None if the format is unknown."""
    if MistralParser.BEGIN in template:
        return MistralParser
    if HermesParser.BEGIN in template and "<function=" not in template:  # Qwen 3 Coder writes XML between the tags
        return HermesParser
    if '"parameters"' in template and "tools" in template:
        return LlamaParser
    return None


def _length_of_begun(tag: str, text: str) -> int:
    """Returns the length of the longest end of a text that begins a tag."""
    return next((length for length in range(len(tag) - 1, 0, -1) if text.endswith(tag[:length])), 0)
