"""Tool calls in the text of an answer: which part is content, and which calls a tool, while the text still grows.

Models write their tool calls as text, each family in a format of its own that its chat template teaches. A parser is
given the text in pieces. What it makes of a text does not depend on the pieces, so a streamed answer and a whole one
have the same calls.
"""

import abc
import dataclasses
import enum
import json
from collections.abc import Iterator
from typing import Final


@dataclasses.dataclass(frozen=True)
class Content:
    """Text that belongs to no tool call."""

    text: str


@dataclasses.dataclass(frozen=True)
class CallBegins:
    """A call of the tool with a name. Its arguments follow."""

    index: int
    name: str


@dataclasses.dataclass(frozen=True)
class Arguments:
    """A piece of the arguments of a call. All pieces of a call make a JSON object, unless the model wrote none."""

    index: int
    text: str


type Part = Content | CallBegins | Arguments


class ToolCallParser(abc.ABC):
    """Splits an answer into content and tool calls."""

    @abc.abstractmethod
    def add(self, text: str) -> Iterator[Part]:
        """Yields what is known after further text. The caller must take all of it."""

    @abc.abstractmethod
    def finish(self) -> Iterator[Part]:
        """Yields the rest at the end of the answer."""


class HermesParser(ToolCallParser):
    """The format of Hermes and of Qwen 2.5 and 3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

    What stands between the tags and is no call, such as a broken object, is content, tags included. White space around
    a call belongs to nothing.
    """

    BEGIN: Final = "<tool_call>"
    END: Final = "</tool_call>"

    def __init__(self) -> None:
        self._text = ""
        """What has not been made a part yet."""
        self._space = ""
        """White space that is content only if further content follows it."""
        self._follows_call = False
        """Whether nothing but white space was read since the last call."""
        self._call: _Call | None = None
        self._calls = 0

    def add(self, text: str) -> Iterator[Part]:
        self._text += text
        while True:
            before = self._text, self._call
            yield from self._in_content() if self._call is None else self._in_call(self._call)
            if before == (self._text, self._call):
                return

    def finish(self) -> Iterator[Part]:
        call, self._call = self._call, None
        if call is not None and not call.is_announced:
            self._text = self.BEGIN + call.text + self._text
        if call is None or not call.is_announced:
            text, self._text = self._text, ""
            yield from self._content(text)

    def _in_content(self) -> Iterator[Part]:
        begin = self._text.find(self.BEGIN)
        if begin < 0:
            known = len(self._text) - _length_of_begun(self.BEGIN, self._text)
            text, self._text = self._text[:known], self._text[known:]
            yield from self._content(text)
            return
        text, self._text = self._text[:begin], self._text[begin + len(self.BEGIN) :]
        yield from self._content(text)
        self._call = _Call(self._calls, "arguments")

    def _in_call(self, call: "_Call") -> Iterator[Part]:
        if not call.is_over:
            text, self._text = self._text, ""
            yield from call.add(text)
            self._text = call.take_rest()
        if call.is_broken and not call.is_announced:
            # Another call may begin within what was no call.
            self._text, self._call = call.text + self._text, None
            yield from self._content(self.BEGIN)
            return
        if call.is_over:
            end = self._text.find(self.END)
            if end < 0:  # nothing but the end tag can follow, so what is not part of it is dropped
                self._text = self._text[len(self._text) - _length_of_begun(self.END, self._text) :]
                return
            self._text, self._call = self._text[end + len(self.END) :], None
            self._calls += call.is_announced
            self._space, self._follows_call = "", True

    def _content(self, text: str) -> Iterator[Part]:
        """Yields content without the white space at its end, which may stand before a call."""
        text = text.lstrip() if self._follows_call else self._space + text
        stripped = text.rstrip()
        self._space = text[len(stripped) :]
        if stripped:
            self._follows_call = False
            yield Content(stripped)


class LlamaParser(ToolCallParser):
    """The format of Llama 3: the answer is `{"name": ..., "parameters": {...}}` and nothing else.

    Several calls are separated by semicolons. An answer that does not begin with such an object is content.
    """

    def __init__(self) -> None:
        self._call: _Call | None = _Call(0, "parameters")
        self._calls = 0

    def add(self, text: str) -> Iterator[Part]:
        while text:
            call = self._call
            if call is None:
                yield Content(text)
                return
            if call.is_over:  # it is broken, and what follows calls is nothing that can be yielded
                return
            yield from call.add(text)
            text = call.take_rest()
            if call.is_broken and not call.is_announced and not self._calls:
                self._call = None
                yield Content(call.text)
            elif call.is_over and not call.is_broken:
                self._calls += 1
                text = text.lstrip("; \n\t")
                self._call = _Call(self._calls, "parameters", separators="; \n\t")

    def finish(self) -> Iterator[Part]:
        call = self._call
        if call is not None and not call.is_announced and not self._calls and call.text:
            yield Content(call.text)


class _Place(enum.Enum):
    """What a JSON object needs next."""

    BEGIN = enum.auto()
    KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    COMMA = enum.auto()


class _Call:
    """A JSON object with a name and with arguments, while its text grows.

    Arguments are yielded as they come if the name stands before them, and at the end of the object otherwise.

    Attributes:
        index: the number of the call in its answer.
        text: what was read of the object.
        is_over: whether the object has ended, or has turned out to be none.
        is_broken: whether it is not an object with a name and with an object of arguments.
        is_announced: whether `CallBegins` was yielded.
    """

    def __init__(self, index: int, arguments: str, separators: str = "") -> None:
        """A call that has not begun.

        Args:
            index: the number of the call in its answer.
            arguments: the key of the arguments.
            separators: what may stand before the object beside white space.
        """
        self.index = index
        self.text = ""
        self.is_over = self.is_broken = self.is_announced = False
        self._arguments_key = arguments
        self._skipped = " \n\r\t" + separators
        self._rest = ""
        self._place = _Place.BEGIN
        self._start = 0  # where in the text the key or the value began
        self._key = ""
        self._depth = 0  # of brackets within a value
        self._in_string = self._is_escaped = False
        self._name: str | None = None
        self._arguments: str | None = None
        self._yielded = 0  # characters of the arguments that were yielded

    def take_rest(self) -> str:
        """Returns the text after the object, which is not read."""
        rest, self._rest = self._rest, ""
        return rest

    def add(self, text: str) -> Iterator[Part]:
        """Yields what is known of the call after further text."""
        for number, character in enumerate(text):
            if self.is_over:
                self._rest += text[number:]
                break
            self.text += character
            self._read(character)
        yield from self._known()

    def _known(self) -> Iterator[Part]:
        if self._name is None or (self.is_broken and not self.is_announced):
            return
        arguments = self._arguments
        if arguments is None and self._place is _Place.VALUE and self._key == self._arguments_key and self._begun:
            arguments = self.text[self._start :]
        if arguments is None or not arguments.startswith("{"):
            return
        if not self.is_announced:
            self.is_announced = True
            yield CallBegins(self.index, self._name)
        if len(arguments) > self._yielded:
            yield Arguments(self.index, arguments[self._yielded :])
            self._yielded = len(arguments)

    @property
    def _begun(self) -> bool:
        """Whether the key or the value that is read has begun."""
        return self._in_string or self._depth > 0 or len(self.text) > self._start

    def _read(self, character: str) -> None:
        if self._in_string:
            self._read_in_string(character)
        elif self._depth or self._place is _Place.VALUE:
            self._read_in_value(character)
        elif character in (self._skipped if self._place is _Place.BEGIN else " \n\r\t"):
            pass
        elif self._place is _Place.BEGIN and character == "{":
            self._place = _Place.KEY
        elif self._place is _Place.KEY and character == '"':
            self._in_string, self._start = True, len(self.text) - 1
        elif self._place is _Place.COLON and character == ":":
            self._place, self._start = _Place.VALUE, len(self.text)
        elif self._place is _Place.COMMA and character == ",":
            self._place = _Place.KEY
        elif self._place is _Place.COMMA and character == "}":
            self._end()
        else:
            self._break()

    def _read_in_string(self, character: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        elif character == '"':
            self._in_string = False
            if self._place is _Place.KEY:
                self._key, self._place = str(self._json(self.text[self._start :])), _Place.COLON
            elif not self._depth:
                self._take_value(len(self.text))

    def _read_in_value(self, character: str) -> None:
        is_first = not self._depth and not self.text[self._start : -1].strip()
        if is_first and character in " \n\r\t":
            self._start = len(self.text)
        elif character == '"':
            self._in_string = True
            if not is_first and not self._depth:
                self._break()
        elif character in "{[":
            self._depth += 1
            if not is_first and self._depth == 1:
                self._break()
        elif character in "}]" and self._depth:
            self._depth -= 1
            if not self._depth:
                self._take_value(len(self.text))
        elif character in ",}" and not self._depth:  # the end of a number, of true, false or null
            self._take_value(len(self.text) - 1)
            if not self.is_over:
                self._read(character)

    def _take_value(self, end: int) -> None:
        text = self.text[self._start : end]
        value = self._json(text)
        self._place = _Place.COMMA
        if self._key == "name":
            self._name = value if isinstance(value, str) else None
            if self._name is None:
                self._break()
        elif self._key == self._arguments_key:
            self._arguments = text
            if not isinstance(value, dict):
                self._break()

    def _json(self, text: str) -> object:
        try:
            return json.loads(text, strict=False)
        except ValueError:
            self._break()
            return None

    def _end(self) -> None:
        self.is_over = True
        if self._name is None:
            self.is_broken = True
        elif self._arguments is None:
            self._arguments = "{}"

    def _break(self) -> None:
        self.is_over = self.is_broken = True


def parser_of(template: str) -> type[ToolCallParser] | None:
    """Returns the parser of the format that a chat template teaches, or None if it is none of those known here."""
    if HermesParser.BEGIN in template:
        return HermesParser
    if '"parameters"' in template and "tools" in template:
        return LlamaParser
    return None


def _length_of_begun(tag: str, text: str) -> int:
    """Returns how many characters at the end of a text may be the beginning of a tag."""
    return next((length for length in range(len(tag) - 1, 0, -1) if text.endswith(tag[:length])), 0)
