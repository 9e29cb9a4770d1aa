"""Readers of the JSON in tool calls, which find where it ends while its text still grows.

Each character is looked at once, so a call takes time in proportion to its text, whatever it is. A parser of partial
JSON would read the text again with each piece, and would give values where clients get the text that the model wrote.
"""

import dataclasses
import enum
import json
import re
from collections.abc import Iterator
from typing import Final

_IN_STRING: Final = re.compile(r'[^"\\]+')
_IN_BRACKETS: Final = re.compile(r'[^"\[\]{}]+')
_SCALAR: Final = re.compile(r"[-+.\w]+")
_SPACE: Final = " \n\r\t"


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


class ValueReader:
    """Finds the end of a JSON value. Whether what it reads is JSON at all, only a parser can tell.

    Attributes:
        is_over: whether the value has ended.
    """

    def __init__(self) -> None:
        self.is_over = False
        self._has_begun = self._in_string = self._is_escaped = False
        self._depth = 0

    def read(self, text: str, start: int) -> int:
        """Returns where the value ends in a further piece of text, which goes on at `start`."""
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
        self.is_over = True  # the character after a number, true, false or null is no part of it
        return position


class _Place(enum.Enum):
    """What a JSON object needs next."""

    BEGIN = enum.auto()
    KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    COMMA = enum.auto()


class CallReader:
    """Reads a JSON object with a name and with arguments.

    Arguments are yielded as they come if the name stands before them, and when the name comes otherwise.

    Attributes:
        is_over: whether the object has ended, or has turned out to be none.
        is_broken: whether it is not an object with a name and with an object of arguments.
        is_announced: whether `CallBegins` was yielded.
        rest: the text after the object, which was not read.
    """

    def __init__(self, index: int, arguments: str) -> None:
        """A reader of an object that has not begun.

        Args:
            index: the number of the call in its answer.
            arguments: the key of the arguments.
        """
        self.is_over = self.is_broken = self.is_announced = False
        self.rest = ""
        self._index, self._arguments_key = index, arguments
        self._place = _Place.BEGIN
        self._value: ValueReader | None = None
        """Reads the key or the value that has begun."""
        self._key = ""
        self._read: list[str] = []
        self._piece: list[str] = []
        """The text of the key or the value."""
        self._name: str | None = None
        self._has_arguments = False
        self._waiting: list[str] = []
        """Pieces of arguments that were not yielded yet."""

    @property
    def text(self) -> str:
        """What was read of an object that was not announced."""
        return "".join(self._read)

    def add(self, text: str) -> Iterator[Part]:
        """Yields what is known of the call after further text. The caller must take all of it."""
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
        """Returns the position after a character that is no part of a key or value, or where one begins."""
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
            case _:  # the character may begin something else
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
        """Yields a piece of the arguments if the name is known."""
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
    """Returns the value, or the error if the text is not JSON."""
    try:
        return json.loads(text, strict=False)
    except ValueError as error:
        return error
    except RecursionError:
        return ValueError("the JSON has too many brackets within one another")
