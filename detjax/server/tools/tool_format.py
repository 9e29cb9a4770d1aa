"""The format in which a model writes tool calls: its marks, its parser, and its grammar for constrained answers.

A mark such as `<tool_call>` is a special token in some tokenizers and plain text in others; parsers and grammars follow
the tokenizer.
"""

import abc
import copy
import hashlib
import json
from collections.abc import Sequence
from typing import Any, ClassVar, Final

from detjax.engine import Constraint
from detjax.models import Tokenizer
from detjax.server.tools import grammars
from detjax.server.tools.definitions import FunctionFields, ToolUse
from detjax.server.tools.marks import Marks, pattern, text_without
from detjax.server.tools.parsers import AnswerParser

_NO_ARGUMENTS: Final = {"type": "object", "properties": {}, "additionalProperties": False}


class ToolFormat(abc.ABC):
    """A model's format of tool calls.

    Attributes:
        NAME: the name of the format, as vLLM has it for its option `--tool-call-parser`.
        BEGIN: the mark at the beginning of calls.
        MARKS: all marks of the format.
        ENDS_REASONING: True if the mark at the beginning of calls also ends reasoning.
        STOPS: tokens that end an answer.
        marks: the marks with the tokenizer.
        has_messages: True if answers consist of messages, whose headers the parser of answers without tools removes.
    """

    NAME: ClassVar[str]
    BEGIN: ClassVar[str]
    MARKS: ClassVar[tuple[str, ...]]
    ENDS_REASONING: ClassVar[bool] = False
    STOPS: ClassVar[tuple[str, ...]] = ()
    has_messages: ClassVar[bool] = False

    def __init__(self, tokenizer: Tokenizer) -> None:
        """The format with a tokenizer's tokens for the marks."""
        self.marks = Marks(tokenizer, self.MARKS)
        added = {tokenizer.token_bytes(token).decode(errors="replace"): token for token in tokenizer.added_tokens}
        self.stop_tokens = tuple(added[text] for text in self.STOPS if text in added)

    def with_shown_marks(self) -> "ToolFormat":
        """Returns the format for answers whose text has all special tokens."""
        shown = copy.copy(self)
        shown.marks = self.marks.shown()
        return shown

    @abc.abstractmethod
    def parser(self, tools: Sequence[FunctionFields], begun: str = "") -> AnswerParser:
        """Returns a parser of an answer that may call these tools.

        `begun` is the end of the prompt, from the beginning of the answer's message on, if answers have messages.
        """

    def constraint(
        self, use: ToolUse | None, form: Constraint | None, reasoning: str = "", begun: str = ""
    ) -> Constraint | None:
        """Returns the constraint of an answer; None for any text.

        Args:
            use: the tools that the answer may or must call.
            form: the constraint of an answer without calls.
            reasoning: the rule `reasoning` for the reasoning before the answer, with the rules that it uses; empty:
                the answer has none.
            begun: see `parser`.

        Raises:
            ValueError: the format cannot combine tools with `form`, or cannot constrain arguments to a tool's schema.
        """
        if use is None and (form is None or not reasoning):
            return form
        if use is None and form is not None:
            answer = [f"answer: {grammars.FORM}", grammars.form_rules(form)]
        elif use is not None and use.is_required:
            answer = self._grammar(use, f"answer: {self._calls()}")
        elif use is not None and form is not None:
            answer = self._grammar(use, self._calls_or_form(form))
        elif use is not None and (use.allowed is not None or any(tool.strict for tool in use.tools)):
            answer = self._grammar(use, self._text_and_calls())
        else:
            return None
        return Constraint(
            "grammar", "\n".join([f"start: {'reasoning ' if reasoning else ''}answer", *answer, reasoning])
        )

    def call_id(self, answer: str, choice: int, index: int) -> str:
        """Returns the id of a call, determined by its answer's id, its choice and its index."""
        return f"call_{_digest(answer, choice, index)[:24]}"

    def _grammar(self, use: ToolUse, *rules: str) -> list[str]:
        """Returns the rules of a grammar with calls."""
        tools = use.callable
        return [*rules, *self._rules(tools, at_most_one=use.at_most_one), *self._arguments(tools, use.is_required)]

    def _arguments(self, tools: Sequence[FunctionFields], is_required: bool) -> list[str]:
        """Returns the rule `arguments_N` for the arguments of each tool."""
        schemas = (self.schema(tool, is_required) for tool in tools)
        return [f"arguments_{number}: %json {json.dumps(schema)}" for number, schema in enumerate(schemas)]

    @staticmethod
    def schema(tool: FunctionFields, is_required: bool) -> dict[str, Any]:
        """Returns the schema of a call's arguments. If calls are optional, only strict tools enforce theirs."""
        if not is_required and not tool.strict:
            schema = {}
        else:
            schema = _NO_ARGUMENTS if tool.parameters is None else tool.parameters
        return {"type": "object"} | dict(schema)

    def _calls(self) -> str:
        """Returns an expression for an answer that consists of calls."""
        return f"{self.marks.literal(self.BEGIN)} calls"

    def _calls_or_form(self, form: Constraint) -> str:
        """Returns rules for an answer that consists of calls or has a form."""
        return f"answer: {self._calls()} | {grammars.FORM}\n{grammars.form_rules(form)}"

    def _text_and_calls(self) -> str:
        """Returns rules for any text, optionally followed by calls."""
        if (first := next((mark for mark in self.marks.tokens if mark in self.BEGIN), None)) is not None:
            # Text before the token is not distinguished from the answer's text.
            calls = f"{self.marks.literal(first + self.BEGIN.partition(first)[2])} calls"
            return "\n".join([f"answer: text ({calls})?", self.marks.text_rules("text", first)])
        mark = pattern(self.BEGIN)
        return "\n".join(
            [
                "answer: text_to_mark calls | TEXT",
                rf"text_to_mark[lazy]: /(.|\n)*{mark}/",
                f"TEXT: {text_without(self.BEGIN)}",
            ]
        )

    @abc.abstractmethod
    def _rules(self, tools: Sequence[FunctionFields], *, at_most_one: bool) -> list[str]:
        """Returns the rule `calls` for the text after the first mark, and the rules that it uses."""


def _digest(*parts: object) -> str:
    return hashlib.sha256(" ".join(map(str, parts)).encode()).hexdigest()


def short_id(*parts: object) -> str:
    """Returns an id of nine letters and digits, as Mistral's chat templates require."""
    return _digest(*parts)[:9]
