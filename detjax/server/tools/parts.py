"""The parts of an answer: reasoning, content, and tool calls.

A parser yields them in the order of the answer's text. The pieces of each part concatenate to the same text, however
the answer was split.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Reasoning:
    """Text of the model's reasoning."""

    text: str


@dataclasses.dataclass(frozen=True)
class Content:
    """Text outside of reasoning and tool calls."""

    text: str


@dataclasses.dataclass(frozen=True)
class CallBegins:
    """The beginning of a call, whose arguments follow.

    Attributes:
        index: the number of calls before it in the answer.
        name: the tool's name.
        id: the id that the model wrote, in formats in which models write ids.
    """

    index: int
    name: str
    id: str | None = None


@dataclasses.dataclass(frozen=True)
class Arguments:
    """A piece of a call's arguments. The pieces of a call form a JSON object, if the model wrote a valid one."""

    index: int
    text: str


type Part = Reasoning | Content | CallBegins | Arguments
