"""The formats in which models write tool calls: their parsers, and grammars for constrained answers.

Grammars are in llguidance's variant of Lark's syntax. A mark such as `<tool_call>` is a special token in some
tokenizers and plain text in others; the grammar follows the tokenizer.
"""

import abc
import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any, Final

from detjax.engine import Constraint, FieldError
from detjax.models import Tokenizer
from detjax.server.tools.definitions import FunctionFields, ToolUse
from detjax.server.tools.parsers import HermesParser, LlamaParser, MistralParser, ToolCallParser, parser_of

_NO_ARGUMENTS: Final = {"type": "object", "properties": {}, "additionalProperties": False}


class ToolFormat(abc.ABC):
    """A model's format of tool calls.

    Attributes:
        parser: the parser of the calls.
        hidden: special tokens that mark calls but are omitted from an answer's text, with their texts.
    """

    parser: type[ToolCallParser]
    _BEGIN: str
    """The mark at the beginning of calls."""
    _MARKS: tuple[str, ...]

    def __init__(self, tokenizer: Tokenizer) -> None:
        """The format with a tokenizer's tokens for the marks."""
        texts = {token: tokenizer.token_bytes(token).decode(errors="replace") for token in tokenizer.added_tokens}
        self._tokens = {text: token for token, text in texts.items() if text in self._MARKS}
        self.hidden = {token: text for text, token in self._tokens.items() if tokenizer.is_left_out(token)}
        self._text_tokens = [
            token for token, text in texts.items() if text not in self._MARKS and not tokenizer.is_left_out(token)
        ]
        """Added tokens that are ordinary text, such as the tags around a model's thoughts."""

    def constraint(self, use: ToolUse, form: Constraint | None) -> Constraint | None:
        """Returns the constraint of an answer, given the constraint `form` of answers without calls; None for any text.

        Raises a ValueError if the format cannot combine tools with `form`.
        """
        if use.is_required:
            return Constraint("grammar", self._grammar(use, f"start: {self._calls()}"))
        if form is not None:
            return Constraint("grammar", self._grammar(use, self._calls_or_json(form)))
        if use.allowed is not None or any(tool.strict for tool in use.tools):
            return Constraint("grammar", self._grammar(use, self._text_and_calls()))
        return None

    def call_id(self, answer: str, choice: int, index: int) -> str:
        """Returns the id of a call, determined by its answer's id, its choice and its index."""
        return f"call_{_digest(answer, choice, index)[:24]}"

    def _grammar(self, use: ToolUse, start: str) -> str:
        tools = use.callable
        arguments = (
            f"arguments_{number}: %json {json.dumps(self._schema(tool, use.is_required))}"
            for number, tool in enumerate(tools)
        )
        return "\n".join([start, *self._rules(tools, at_most_one=use.at_most_one), *arguments])

    def _schema(self, tool: FunctionFields, is_required: bool) -> dict[str, Any]:
        """Returns the schema of a call's arguments. If calls are optional, only strict tools enforce theirs."""
        if not is_required and not tool.strict:
            schema = {}
        else:
            schema = _NO_ARGUMENTS if tool.parameters is None else tool.parameters
        return {"type": "object"} | dict(schema)

    def _calls(self) -> str:
        """Returns an expression for an answer that consists of calls."""
        return f"{self._mark(self._BEGIN)} calls"

    def _calls_or_json(self, form: Constraint) -> str:
        """Returns rules for an answer that consists of calls or of JSON."""
        return f"start: {self._calls()} | content\ncontent: %json {form.text}"

    def _text_and_calls(self) -> str:
        """Returns rules for any text, optionally followed by calls."""
        if self._BEGIN in self._tokens:
            text = " | ".join([r"/(.|\n)+/", *(f"<[{token}]>" for token in self._text_tokens)])
            return f"start: text ({self._calls()})?\ntext: ({text})*"
        mark = re.escape(self._BEGIN).replace("/", r"\/")
        return "\n".join(
            [
                "start: text_to_mark calls | TEXT",
                rf"text_to_mark[lazy]: /(.|\n)*{mark}/",
                rf"TEXT: /(.|\n)*/ & ~/(.|\n)*{mark}(.|\n)*/",
            ]
        )

    def _mark(self, text: str) -> str:
        return f"<[{self._tokens[text]}]>" if text in self._tokens else _literal(text)

    @abc.abstractmethod
    def _rules(self, tools: Sequence[FunctionFields], *, at_most_one: bool) -> list[str]:
        """Returns the rule `calls` for the text after the first mark, and the rules that it uses."""


class HermesFormat(ToolFormat):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

    parser = HermesParser
    _BEGIN = HermesParser.BEGIN
    _MARKS = (HermesParser.BEGIN, HermesParser.END)

    def _rules(self, tools: Sequence[FunctionFields], *, at_most_one: bool) -> list[str]:
        more = "" if at_most_one else rf' ("\n" {self._mark(self._BEGIN)} call)*'
        return [
            f"calls: call{more}",
            rf'call: "\n" ({_objects(tools, "arguments")}) "\n" {self._mark(HermesParser.END)}',
        ]


class LlamaFormat(ToolFormat):
    """`{"name": ..., "parameters": {...}}`, and nothing else in the answer."""

    parser = LlamaParser
    _BEGIN = ""
    _MARKS = ()

    def _calls(self) -> str:
        return "calls"

    def _calls_or_json(self, form: Constraint) -> str:
        raise FieldError(
            "response_format is given with tools, and the model writes calls as JSON too; accepted: response_format "
            "with tool_choice 'none' or 'required', or without tools",
            "constraint",
        )

    def _text_and_calls(self) -> str:
        return "start: calls | TEXT\nTEXT: /(\\s*[^\\s{](.|\\n)*)?/"

    def _rules(self, tools: Sequence[FunctionFields], *, at_most_one: bool) -> list[str]:
        more = "" if at_most_one else ' ("; " call)*'
        return [f"calls: call{more}", f"call: {_objects(tools, 'parameters')}"]


class MistralListFormat(ToolFormat):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`."""

    parser = MistralParser
    _BEGIN = MistralParser.BEGIN
    _MARKS = (MistralParser.BEGIN,)

    def call_id(self, answer: str, choice: int, index: int) -> str:
        return _short_id(answer, choice, index)

    def _rules(self, tools: Sequence[FunctionFields], *, at_most_one: bool) -> list[str]:
        more = "" if at_most_one else ' (", " call)*'
        return [f'calls: " "? "[" call{more} "]"', f"call: {_objects(tools, 'arguments')}"]


class MistralNamedFormat(ToolFormat):
    """`[TOOL_CALLS]name[ARGS]{...}`, with an id between name and arguments if the chat template writes one."""

    parser = MistralParser
    ARGUMENTS: Final = "[ARGS]"
    ID: Final = "[CALL_ID]"
    _BEGIN = MistralParser.BEGIN
    _MARKS = (MistralParser.BEGIN, ID, ARGUMENTS)

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self._has_ids = self.ID in (tokenizer.tool_template or "")

    def call_id(self, answer: str, choice: int, index: int) -> str:
        return _short_id(answer, choice, index)

    def _rules(self, tools: Sequence[FunctionFields], *, at_most_one: bool) -> list[str]:
        id_ = f"{self._mark(self.ID)} /[a-zA-Z0-9]{{9}}/ " if self._has_ids else ""
        more = "" if at_most_one else f" ({self._mark(self._BEGIN)} call)*"
        named = (
            f"{_literal(tool.name)} {id_}{self._mark(self.ARGUMENTS)} arguments_{number}"
            for number, tool in enumerate(tools)
        )
        return [f"calls: call{more}", f"call: {' | '.join(named)}"]


def tool_format(tokenizer: Tokenizer) -> ToolFormat | None:
    """Returns the tool call format of a tokenizer's chat template, or None if it is unknown."""
    template = tokenizer.tool_template or ""
    parser = parser_of(template)
    if parser is MistralParser:
        is_named = MistralNamedFormat.ARGUMENTS in template
        return MistralNamedFormat(tokenizer) if is_named else MistralListFormat(tokenizer)
    formats: dict[Any, type[ToolFormat]] = {HermesParser: HermesFormat, LlamaParser: LlamaFormat}
    return formats[parser](tokenizer) if parser in formats else None


def why_no_tools(tokenizer: Tokenizer) -> str:
    """Returns the error message for tools if the model's format is unknown."""
    if re.search(r"\btools\b", tokenizer.tool_template or "") is None:
        return "tools are given, but the model's chat template ignores them; accepted: a request without tools"
    return (
        "tools are given, but the model's chat template has an unknown format of calls; supported: Hermes, Qwen, "
        "Llama 3 and Mistral; accepted: a request without tools"
    )


def _objects(tools: Sequence[FunctionFields], key: str) -> str:
    """Returns an expression for a JSON object that calls one of the tools."""
    heads = (_literal(f'{{"name": "{tool.name}", "{key}": ') for tool in tools)
    return " | ".join(f'{head} arguments_{number} "}}"' for number, head in enumerate(heads))


def _literal(text: str) -> str:
    return json.dumps(text)


def _digest(*parts: object) -> str:
    return hashlib.sha256(" ".join(map(str, parts)).encode()).hexdigest()


def _short_id(*parts: object) -> str:
    """Returns an id of nine letters and digits, as Mistral's chat templates require."""
    return _digest(*parts)[:9]
