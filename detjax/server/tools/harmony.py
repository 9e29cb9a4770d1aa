"""Harmony, the format of gpt-oss: an answer is a sequence of messages, each with a header.

A header may name a channel, which says what the message is (analysis: reasoning; commentary: a text before calls;
final: the answer), a recipient, which makes the message a call, and the type of its text. The prompt ends within the
header of the first message. See https://github.com/openai/harmony.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Final

from detjax.engine import Constraint, FieldError
from detjax.models import Tokenizer
from detjax.server.tools import grammars
from detjax.server.tools.definitions import FunctionFields, ToolUse
from detjax.server.tools.marks import Marks, literal
from detjax.server.tools.parsers import AnswerParser, Written, as_text, first_mark, length_of_begun
from detjax.server.tools.parts import Arguments, CallBegins, Content, Part, Reasoning
from detjax.server.tools.reasoning import ReasoningFormat, Start
from detjax.server.tools.tool_format import ToolFormat

START: Final = "<|start|>"
CHANNEL: Final = "<|channel|>"
CONSTRAIN: Final = "<|constrain|>"
MESSAGE: Final = "<|message|>"
END: Final = "<|end|>"
RETURN: Final = "<|return|>"
CALL: Final = "<|call|>"
MARKS: Final = (START, CHANNEL, CONSTRAIN, MESSAGE, END, RETURN, CALL)
_RECIPIENT: Final = re.compile(r"(?:^|\s)to=(\S+)")
_FUNCTIONS: Final = "functions."


class HarmonyParser(AnswerParser):
    """Splits an answer into the parts that its messages are. No header reaches a part.

    Messages of the same kind are separated by a line break. A message with a recipient is a call; "functions." is not
    part of its name, while the names of built-in tools, such as `browser.search`, have their namespace.
    """

    def __init__(self, begun: str = "", written: Written = as_text, *, has_calls: bool = True) -> None:
        """A parser after a prompt that ends with `begun`, the beginning of a message.

        Without `has_calls`, messages with a recipient are content.
        """
        self._marks = {mark: written(mark) for mark in MARKS}
        self._texts = {text: mark for mark, text in self._marks.items()}
        self._has_calls = has_calls
        self._begun = begun
        self._text = ""
        self._header: list[str] | None = []
        """The pieces of the header so far, with its marks as plain text; None within a message."""
        self._has_messages = False
        self._kind: type[Content] | type[Reasoning] | None = Content
        """The kind of the current message; None: a call."""
        self._has_text = {Content: False, Reasoning: False}
        """True if an earlier message of the kind has text."""
        self._is_first = True
        """True at the beginning of a message's text."""
        self._calls = 0
        for _ in self.add(self._written_begin(begun)):
            pass
        self._has_text = {Content: False, Reasoning: False}

    def _written_begin(self, begun: str) -> str:
        for mark, text in self._marks.items():
            begun = begun.replace(mark, text)
        return begun

    def add(self, text: str) -> Iterator[Part]:
        self._text += text
        marks = tuple(self._texts)
        while True:
            position, mark = first_mark(self._text, marks)
            if mark is None:
                position = len(self._text) - length_of_begun(self._text, *marks)
            before, self._text = self._text[:position], self._text[position + len(mark or "") :]
            yield from self._take(before)
            if mark is None:
                return
            yield from self._pass(self._texts[mark])

    def _take(self, text: str) -> Iterator[Part]:
        """Yields the part of a text between marks."""
        if self._header is not None:
            self._header.append(text)
        elif text and self._kind is None:
            yield Arguments(self._calls - 1, text)
        elif text and self._kind is not None:
            if self._is_first and self._has_text[self._kind]:
                text = "\n" + text
            self._is_first, self._has_text[self._kind] = False, True
            yield self._kind(text)

    def _pass(self, mark: str) -> Iterator[Part]:
        """Passes a mark."""
        if mark == MESSAGE:
            if self._header is not None:
                header, self._header = "".join(self._header), None
                yield from self._begin(header)
        elif self._header is not None and mark in (CHANNEL, CONSTRAIN):
            self._header.append(mark)
        elif mark != CONSTRAIN:  # the end of a message; the next header may come without its beginning
            self._header = [mark] if mark == CHANNEL else []

    def _begin(self, header: str) -> Iterator[Part]:
        """Begins the message after a header."""
        header = header.partition(CONSTRAIN)[0]
        role, _, channel = header.partition(CHANNEL)
        recipient = _RECIPIENT.search(channel) or _RECIPIENT.search(role)
        self._is_first = self._has_messages = True
        self._kind = Reasoning if channel.split()[:1] == ["analysis"] else Content
        if recipient is not None and self._has_calls:
            self._kind = None
            self._calls += 1
            yield CallBegins(self._calls - 1, recipient[1].removeprefix(_FUNCTIONS))

    def finish(self) -> Iterator[Part]:
        yield from self._take(self._text)
        text = "".join(self._header or ()).removeprefix(self._begun)
        is_header = _RECIPIENT.search(text) or any(mark in text for mark in MARKS)
        if text and not self._has_messages and not is_header:
            yield Content(text)  # the answer is not in the format


class HarmonyReasoning(ReasoningFormat):
    """The messages of the channel analysis."""

    repeats = True

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer, f"{CHANNEL}analysis{MESSAGE}", END)
        self.marks = Marks(tokenizer, MARKS)
        if CHANNEL in self.marks.tokens and MESSAGE in self.marks.tokens and END in self.marks.tokens:
            self.begin_tokens = tuple(tokenizer.encode(self.begin, add_special_tokens=False))
            self.end_tokens = (self.marks.tokens[END],)

    def start(self, ending: str) -> Start:
        header, message, text = begun_message(ending).partition(MESSAGE)
        if not message:
            return Start.FREE
        return (
            Start.OPEN if header.partition(CHANNEL)[2].split()[:1] == ["analysis"] and END not in text else Start.CLOSED
        )

    def continued(self, text: str) -> str:
        return text

    def rules(self, ending: str) -> str:
        return ""  # the format's own grammar has it


def begun_message(ending: str) -> str:
    """Returns the message that a prompt begins, without its mark, given the prompt's end."""
    return ending.rpartition(START)[2]


class HarmonyFormat(ToolFormat):
    """The format of gpt-oss."""

    NAME = "openai"
    BEGIN = CHANNEL
    MARKS = MARKS
    STOPS = (RETURN, CALL)
    has_messages = True

    def parser(self, tools: Sequence[FunctionFields], begun: str = "") -> AnswerParser:
        return HarmonyParser(begun_message(begun), self.marks.written, has_calls=bool(tools))

    def constraint(
        self, use: ToolUse | None, form: Constraint | None, reasoning: str = "", begun: str = ""
    ) -> Constraint | None:
        mark = self.marks.literal
        is_free = use is None or (use.allowed is None and not any(tool.strict for tool in use.tools))
        if form is None and is_free and not (use is not None and use.is_required):
            return None
        if any(text not in self.marks.tokens for text in MARKS):
            raise FieldError(
                "the answer is constrained, and the tokenizer does not have the marks of messages as tokens; accepted: "
                "a request without a constraint",
                "constraint",
            )
        header, is_message, _ = begun_message(begun).partition(MESSAGE)
        channel = header.partition(CHANNEL)[2].split()[:1]
        rules = [self.marks.text_rules("text", *MARKS)]
        answers = list[str]()
        if use is not None:
            rules += self._grammar(use)
            answers.append("calls")
        if use is None or not use.is_required:
            final = grammars.FORM if form is not None else "text"
            rules += [] if form is None else [grammars.form_rules(form)]
            if is_message and channel != ["analysis"]:
                return Constraint("grammar", "\n".join([f"start: {final}", *rules]))
            answers.append(f"{mark(CHANNEL + 'final' + MESSAGE)} {final}")
        opened = f"text {mark(END + START + 'assistant')} " if is_message else ""
        begun_channel = "" if is_message or not header.partition(CHANNEL)[1] else header
        if begun_channel or (is_message and channel != ["analysis"]):
            raise FieldError(
                f"the prompt ends with {header[-40:]!r}, within a message, so the answer cannot be constrained; "
                "accepted: a request without a constraint, or a chat template that only begins a message",
                "constraint",
            )
        return Constraint(
            "grammar",
            "\n".join(
                [
                    f"start: {opened}before* ({' | '.join(answers)})",
                    f'before: {mark(CHANNEL)} ("analysis" | "commentary") {mark(MESSAGE)} text '
                    f"{mark(END + START + 'assistant')}",
                    *rules,
                ]
            ),
        )

    def _rules(self, tools: Sequence[FunctionFields], *, at_most_one: bool) -> list[str]:
        mark = self.marks.literal
        named = (
            f'("commentary" {literal(f" to={_FUNCTIONS}{tool.name}")} (" "? {mark(CONSTRAIN)} "json")? '
            f"{mark(MESSAGE)} arguments_{number})"
            for number, tool in enumerate(tools)
        )
        addressed = (
            f'({literal(f" to={_FUNCTIONS}{tool.name}")} {mark(CHANNEL)} "commentary" '
            f'(" "? {mark(CONSTRAIN)} "json")? {mark(MESSAGE)} arguments_{number})'
            for number, tool in enumerate(tools)
        )
        return [f"calls: ({mark(CHANNEL)} ({' | '.join(named)}) | {' | '.join(addressed)}) {mark(CALL)}"]
