"""Tool calls as JSON objects: the formats of Hermes and Qwen, and of Llama 3."""

from collections.abc import Iterator, Sequence
from typing import Final

from detjax.engine import Constraint, FieldError
from detjax.server.tools.call_readers import CallReader
from detjax.server.tools.definitions import FunctionFields
from detjax.server.tools.marks import literal
from detjax.server.tools.parsers import AnswerParser, MarkedParser, Written, as_text, length_of_begun
from detjax.server.tools.parts import Content, Part
from detjax.server.tools.tool_format import ToolFormat


class HermesParser(MarkedParser):
    """The format of Hermes and of Qwen 2.5 and 3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

    BEGIN: Final = "<tool_call>"
    END: Final = "</tool_call>"

    def __init__(self, written: Written = as_text) -> None:
        """A parser at the beginning of an answer."""
        super().__init__(written(self.BEGIN))
        self._end = written(self.END)

    def _begin_call(self, mark: str) -> None:
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
            end = self._text.find(self._end)
            if end < 0:  # only the end tag may follow, so anything else is dropped
                self._text = self._text[len(self._text) - length_of_begun(self._text, self._end) :]
                return
            self._text = self._text[end + len(self._end) :]
            self._calls += 1
            self._end_calls()

    def finish(self) -> Iterator[Part]:
        if not self._in_call:
            yield from self._content(self._text)
        elif not self._call.is_announced:
            yield from self._content(self.BEGIN + self._call.text)


class LlamaParser(AnswerParser):
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


class HermesFormat(ToolFormat):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

    NAME = "hermes"
    BEGIN = HermesParser.BEGIN
    MARKS = (HermesParser.BEGIN, HermesParser.END)

    def parser(self, tools: Sequence[FunctionFields], begun: str = "") -> AnswerParser:
        return HermesParser(self.marks.written)

    def _rules(self, tools: Sequence[FunctionFields], *, at_most_one: bool) -> list[str]:
        more = "" if at_most_one else rf' ("\n" {self.marks.literal(self.BEGIN)} call)*'
        return [
            f"calls: call{more}",
            rf'call: "\n" ({object_rules(tools, "arguments")}) "\n" {self.marks.literal(HermesParser.END)}',
        ]


class LlamaFormat(ToolFormat):
    """`{"name": ..., "parameters": {...}}`, and nothing else in the answer."""

    NAME = "llama3_json"
    BEGIN = ""
    MARKS = ()

    def parser(self, tools: Sequence[FunctionFields], begun: str = "") -> AnswerParser:
        return LlamaParser()

    def _calls(self) -> str:
        return "calls"

    def _calls_or_form(self, form: Constraint) -> str:
        raise FieldError(
            "response_format is given with tools, and the model writes calls as JSON too; accepted: response_format "
            "with tool_choice 'none' or 'required', or without tools",
            "constraint",
        )

    def _text_and_calls(self) -> str:
        return "answer: calls | TEXT\nTEXT: /(\\s*[^\\s{](.|\\n)*)?/"

    def _rules(self, tools: Sequence[FunctionFields], *, at_most_one: bool) -> list[str]:
        more = "" if at_most_one else ' ("; " call)*'
        return [f"calls: call{more}", f"call: {object_rules(tools, 'parameters')}"]


def object_rules(tools: Sequence[FunctionFields], key: str) -> str:
    """Returns an expression for a JSON object that calls one of the tools."""
    heads = (literal(f'{{"name": "{tool.name}", "{key}": ') for tool in tools)
    return " | ".join(f'{head} arguments_{number} "}}"' for number, head in enumerate(heads))
