"""Answers split into reasoning, content and tool calls."""

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from detjax.models import Tokenizer
from detjax.server.text.token_texts import TextOffsets
from detjax.server.tools.definitions import ToolUse
from detjax.server.tools.parsers import HIDDEN, AnswerParser, ContentParser
from detjax.server.tools.parts import Arguments, CallBegins, Content, Part, Reasoning
from detjax.server.tools.reasoning import ReasoningFormat, ThoughtReader
from detjax.server.tools.tool_format import ToolFormat

_PIECE: Final = 1 << 12
"""Characters to parse at a time."""


@dataclasses.dataclass(frozen=True)
class Call:
    """A tool call: the tool's name, the arguments as the model wrote them, and the id, if the model wrote one."""

    name: str
    arguments: str
    id: str | None = None


@dataclasses.dataclass(frozen=True)
class Answer:
    """An answer's content, tool calls and reasoning."""

    content: str
    calls: Sequence[Call]
    reasoning: str = ""


class AnswerReader:
    """Splits an answer into reasoning, content and calls while it grows.

    Attributes:
        calls: number of calls that have begun.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        tools: ToolFormat | None,
        use: ToolUse | None = None,
        reasoning: ReasoningFormat | None = None,
        ending: str = "",
        *,
        shows_special: bool = False,
    ) -> None:
        """A reader at the beginning of an answer.

        Args:
            tokenizer: the tokenizer of the answer.
            tools: the format of tool calls.
            use: the tools that the answer may call; calls of a format without messages are content without it.
            reasoning: the format of reasoning; None: reasoning is part of the content.
            ending: the text of the end of the prompt.
            shows_special: the answer's text has its special tokens.
        """
        self.calls = 0
        self._thoughts: ThoughtReader | None = None
        self._parser: AnswerParser = ContentParser()
        hidden: dict[int, str] = {}
        if reasoning is not None and not (tools is not None and tools.has_messages):
            ends = [tools.BEGIN] if tools is not None and tools.ENDS_REASONING else []
            marks = [reasoning.marks, *([tools.marks] if tools is not None and ends else [])]

            def written(text: str) -> str:
                for one in () if shows_special else marks:
                    text = one.written(text)
                return text

            self._thoughts = reasoning.reader(ending, ends, written)
            hidden |= {token: text for one in marks for token, text in one.hidden.items()}
        if tools is not None and (use is not None or tools.has_messages):
            if shows_special:
                tools = tools.with_shown_marks()
            self._parser = tools.parser(() if use is None else use.tools, ending)
            hidden |= tools.marks.hidden
        self._marks = _Inserted(tokenizer, hidden) if hidden and not shows_special else None
        self._most = 1 if use is not None and use.at_most_one else None

    def add(self, token: int, text: str) -> Iterator[Part]:
        """Yields the parts that a token and its text complete."""
        tokens = [token] if token >= 0 else []  # an aborted stream ends without a token
        yield from self._parts(self._add(self._marks.inserted(tokens, text) if self._marks else text))

    def finish(self) -> Iterator[Part]:
        """Yields the remaining parts at the end of the answer."""
        yield from self._parts(self._finish())

    def parts(self, tokens: Sequence[int], text: str) -> Iterator[Part]:
        """Yields all parts of a complete answer."""
        if self._marks is not None:
            text = self._marks.inserted(tokens, text)
        pieces = (text[start : start + _PIECE] for start in range(0, len(text), _PIECE))
        yield from self._parts(itertools.chain.from_iterable(map(self._add, pieces)))
        yield from self._parts(self._finish())

    def read(self, tokens: Sequence[int], text: str) -> Answer:
        """Splits a complete answer into its parts."""
        content, reasoning = list[str](), list[str]()
        calls = list[tuple[CallBegins, list[str]]]()
        for part in self.parts(tokens, text):
            match part:
                case Content(text):
                    content.append(text)
                case Reasoning(text):
                    reasoning.append(text)
                case CallBegins():
                    calls.append((part, []))
                case Arguments(index, text):
                    calls[index][1].append(text)
        return Answer(
            "".join(content),
            [Call(call.name, "".join(arguments), call.id) for call, arguments in calls],
            "".join(reasoning),
        )

    def _add(self, text: str) -> Iterator[Part]:
        if self._thoughts is None:
            yield from self._parser.add(text)
            return
        yield from self._thoughts.add(text)
        if rest := self._thoughts.rest():
            yield from self._parser.add(rest)

    def _finish(self) -> Iterator[Part]:
        if self._thoughts is not None:
            yield from self._thoughts.finish()
            if rest := self._thoughts.rest():
                yield from self._parser.add(rest)
        yield from self._parser.finish()

    def _parts(self, parts: Iterator[Part]) -> Iterator[Part]:
        for part in parts:
            match part:
                case Reasoning(text) | Content(text):
                    if HIDDEN in text:
                        part = dataclasses.replace(part, text=text.replace(HIDDEN, ""))
                    yield part
                case CallBegins(index) | Arguments(index):
                    if self._most is None or index < self._most:
                        self.calls += isinstance(part, CallBegins)
                        if isinstance(part, Arguments) and HIDDEN in part.text:
                            part = Arguments(index, part.text.replace(HIDDEN, ""))
                        yield part


class _Inserted:
    """Reinserts marks into an answer's text, which omits special tokens."""

    def __init__(self, tokenizer: Tokenizer, hidden: Mapping[int, str]) -> None:
        self._hidden = {token: HIDDEN + text for token, text in hidden.items()}
        self._offsets = TextOffsets(tokenizer)
        self._waiting = collections.deque[tuple[int, str]]()
        """Marks beyond the text so far, with their offsets."""
        self._length = 0

    def inserted(self, tokens: Sequence[int], text: str) -> str:
        """Returns the text of the next tokens with its marks."""
        for token in tokens:
            offset = self._offsets.add(token)
            if token in self._hidden:
                self._waiting.append((offset, self._hidden[token]))
        pieces, begin = list[str](), 0
        while self._waiting and self._waiting[0][0] <= self._length + len(text):
            offset, mark = self._waiting.popleft()
            end = max(offset - self._length, begin)
            pieces += (text[begin:end], mark)
            begin = end
        self._length += len(text)
        return "".join([*pieces, text[begin:]])
