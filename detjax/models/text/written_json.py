"""JSON that chat templates read as objects and write as the text that a model wrote.

A template that writes the arguments of an earlier call as JSON would format them in its own way, so that the prompt of
the next turn would not continue the text of the last one.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, Final

_SPACE: Final = re.compile(r"[ \t\r\n]*")
_DECODER: Final = json.JSONDecoder(strict=False)


class _Written:
    """A value with its JSON text, which templates write in place of the value."""

    __written: str

    def _set(self, text: str) -> Any:
        self.__written = text
        return self

    def __str__(self) -> str:
        return self.__written

    def __add__(self, other: Any) -> Any:
        return self.__written + other if isinstance(other, str) else NotImplemented

    def __radd__(self, other: Any) -> Any:
        return other + self.__written if isinstance(other, str) else NotImplemented


class WrittenObject(_Written, dict[str, Any]):
    """An object with its text."""


class WrittenList(_Written, list[Any]):
    """A list with its text."""


def written_object(text: str) -> WrittenObject | None:
    """Returns an object with its text, and with the texts of the objects and lists in it; None for other texts."""
    try:
        pairs = dict(_pairs(text)) if isinstance(json.loads(text, strict=False), dict) else None
    except (ValueError, RecursionError):
        return None
    return None if pairs is None else WrittenObject(pairs)._set(text)


def _pairs(text: str) -> Iterator[tuple[str, Any]]:
    """Yields the keys and values of an object."""
    position = _after_space(text, 0) + 1
    while text[position := _after_space(text, position)] != "}":
        key, position = _DECODER.raw_decode(text, position)
        begin = _after_space(text, _after_space(text, position) + 1)
        value, position = _DECODER.raw_decode(text, begin)
        if isinstance(value, dict | list):
            kind = WrittenObject if isinstance(value, dict) else WrittenList
            value = kind(value)._set(text[begin:position])
        yield key, value
        position = _after_space(text, position)
        position += text[position] == ","


def _after_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    assert match is not None
    return match.end()


def with_texts(value: Any, texts: list[str]) -> Any:
    """Returns a value with placeholders for the written values in it, whose texts are appended to `texts`."""
    if isinstance(value, _Written):
        texts.append(str(value))
        return placeholder(len(texts) - 1)
    if isinstance(value, dict):
        return {key: with_texts(item, texts) for key, item in value.items()}
    return [with_texts(item, texts) for item in value] if isinstance(value, list | tuple) else value


def placeholder(number: int) -> str:
    """Returns the string that stands for a written value while the values around it become JSON."""
    return f"\x00written {number}\x00"
