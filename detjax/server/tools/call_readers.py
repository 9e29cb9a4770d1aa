"""Incremental readers of the JSON in tool calls, which find its end while the text still grows.

Each character is read once, so the time is proportional to the text, whatever it contains. A parser of partial JSON
would read the text again for each piece, and would return values, while clients get the model's text.
"""

import enum
import json
import re
from collections.abc import Iterator
from typing import Final

from detjax.server.tools.parts import Arguments, CallBegins, Part

_IN_STRING: Final = re.compile(r'[^"\\]+')
_IN_BRACKETS: Final = re.compile(r'[^"\[\]{}]+')
_SCALAR: Final = re.compile(r"[-+.\w]+")
_SPACE: Final = " \n\r\t"


class ValueReader:
    """Finds the end of a JSON value, without validating it.

    Attributes:
        is_over: True if the value has ended.
    """

    def __init__(self) -> None:
        self.is_over = False
        self._has_begun = self._in_string = self._is_escaped = False
        self._depth = 0

    def read(self, text: str, start: int) -> int:
        """Reads text from `start` on, and returns the position after the value, or the text's length."""
        position = start
        while position < len(text) and not self.is_over:
            position = self._in_string_at(text, position) if self._in_string else self._at(text, position)
        return position

    def _in_string_at(self, text: str, position: int) -> int:
        if self._is_escaped or text[position] == "\\":
            self._is_escaped = not self._is_escaped
            return position + 1
        if match := _IN_STRING.match(text, position):
            return match.end()
        self._in_string, self.is_over = False, not self._depth
        return position + 1

    def _at(self, text: str, position: int) -> int:
        character = text[position]
        if self._depth or not self._has_begun:
            if character in '"[{':
                self._has_begun = True
                self._in_string = character == '"'
                self._depth += character != '"'
                return position + 1
            if self._depth and character in "]}":
                self._depth -= 1
                self.is_over = not self._depth
                return position + 1
        if match := (_IN_BRACKETS if self._depth else _SCALAR).match(text, position):
            self._has_begun = True
            return match.end()
        self.is_over = True  # a number, true, false or null ends before this character
        return position


class _Place(enum.Enum):
    """The next expected element of a JSON object."""

    BEGIN = enum.auto()
    KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    COMMA = enum.auto()


class CallReader:
    """Reads a JSON object with a name and arguments.

    Arguments that follow the name are yielded immediately, others once the name is known.

    Attributes:
        is_over: True if the object has ended or is broken.
        is_broken: True if the text is not an object with a name and an arguments object.
        is_announced: True if `CallBegins` was yielded.
        rest: the unread text after the object.
    """

    def __init__(self, index: int, arguments: str) -> None:
        """A reader of the answer's call number `index`, whose arguments have the key `arguments`."""
        self.is_over = self.is_broken = self.is_announced = False
        self.rest = ""
        self._index, self._arguments_key = index, arguments
        self._place = _Place.BEGIN
        self._value: ValueReader | None = None
        """Reads the current key or value."""
        self._key = ""
        self._read: list[str] = []
        self._piece: list[str] = []
        """The text of the current key or value."""
        self._name: str | None = None
        self._has_arguments = False
        self._waiting: list[str] = []
        """Pieces of arguments that are not yielded yet."""

    @property
    def text(self) -> str:
        """The text read so far of an object that is not announced."""
        return "".join(self._read)

    def add(self, text: str) -> Iterator[Part]:
        """Yields the parts that `text` completes. The caller must exhaust the iterator."""
        position = 0
        while position < len(text) and not self.is_over:
            begin = position
            if self._value is None:
                position = self._between(text, position)
                self._keep(text[begin:position])
                if self.is_over and not self.is_broken and not self._has_arguments:
                    yield from self._arguments("{}")
            else:
                position = self._value.read(text, position)
                self._keep(text[begin:position])
                yield from self._in_value(text[begin:position], self._value.is_over)
        self.rest = text[position:]

    def _keep(self, text: str) -> None:
        if not self.is_announced:
            self._read.append(text)

    def _between(self, text: str, position: int) -> int:
        """Skips one character between keys and values, unless a key or value begins there; returns the position."""
        character = text[position]
        if character in _SPACE:
            return position + 1
        match self._place, character:
            case _Place.BEGIN, "{":
                self._place = _Place.KEY
            case _Place.KEY, '"':
                self._value, self._piece = ValueReader(), []
                return position
            case _Place.COLON, ":":
                self._place = _Place.VALUE
            case _Place.VALUE, _:
                self._value, self._piece = ValueReader(), []
                return position
            case _Place.COMMA, ",":
                self._place = _Place.KEY
            case _Place.COMMA, "}":
                self.is_over, self.is_broken = True, self._name is None
            case _:  # not part of the object; it belongs to the rest
                self._break()
                return position
        return position + 1

    def _in_value(self, piece: str, is_over: bool) -> Iterator[Part]:
        self._piece.append(piece)
        is_value = self._place is _Place.VALUE
        is_arguments = is_value and self._key == self._arguments_key and not self._has_arguments
        if is_arguments and self._piece[0].startswith("{"):
            yield from self._arguments(piece)
        if not is_over:
            return
        self._value = None
        value = _json("".join(self._piece))
        if not is_value:
            self._key, self._place = str(value), _Place.COLON
        elif isinstance(value, ValueError) or (is_arguments and not isinstance(value, dict)):
            self._break()
        else:
            self._place = _Place.COMMA
            self._has_arguments |= is_arguments
            if self._key == "name" and self._name is None:
                yield from self._take_name(value)

    def _take_name(self, value: object) -> Iterator[Part]:
        if not isinstance(value, str):
            self._break()
            return
        self._name = value
        if self._waiting:
            yield from self._arguments("")

    def _arguments(self, text: str) -> Iterator[Part]:
        """Yields all pending arguments if the name is known."""
        self._waiting.append(text)
        if self._name is None:
            return
        if not self.is_announced:
            self.is_announced = True
            self._read.clear()
            yield CallBegins(self._index, self._name)
        text = "".join(self._waiting)
        self._waiting.clear()
        if text:
            yield Arguments(self._index, text)

    def _break(self) -> None:
        self.is_over = self.is_broken = True


def _json(text: str) -> object:
    """Returns the value of a JSON text, or the error."""
    try:
        return json.loads(text, strict=False)
    except ValueError as error:
        return error
    except RecursionError:
        return ValueError("the JSON is nested too deeply")
