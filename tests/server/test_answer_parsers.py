"""Parsers of answers in each family's format: every split of an answer has the parts of the whole one."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import hypothesis
import pytest
from hypothesis import strategies

from detjax.server.tools.definitions import FunctionFields
from detjax.server.tools.harmony import HarmonyParser
from detjax.server.tools.parsers import AnswerParser
from detjax.server.tools.parts import Arguments, CallBegins, Content, Reasoning
from detjax.server.tools.reasoning import Start, ThoughtReader
from detjax.server.tools.sectioned import DeepSeekParser, KimiParser
from detjax.server.tools.tagged import DsmlParser, GlmParser, QwenParser

type Parts = list[tuple[str, ...]]

PROPERTIES: Final[dict[str, Any]] = {
    "a": {"type": "integer"},
    "s": {"type": "string"},
    "n": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "b": {"type": "boolean"},
    "l": {"type": "array", "items": {"type": "number"}},
    "r": {"$ref": "#/$defs/size"},
}
TOOLS: Final = [
    FunctionFields(
        name="add",
        parameters={"type": "object", "properties": PROPERTIES, "$defs": {"size": {"type": ["number", "null"]}}},
    ),
    FunctionFields(name="f", parameters={"type": "object", "properties": {"n": {"type": "integer"}}}),
    FunctionFields(name="text", parameters={"type": "object", "properties": {"a": {"type": "string"}}}),
    FunctionFields(name="now"),
]


def parsed(parser: AnswerParser, pieces: Iterable[str]) -> Parts:
    """The parts of an answer, with the pieces of a part joined."""
    parts: list[list[str]] = []

    def take(some: Iterable[object]) -> None:
        for part in some:
            match part:
                case CallBegins(index, name, id_):
                    parts.append([f"call {index}", name, *([id_] if id_ else []), ""])
                case Arguments(index, text):
                    assert text and parts[-1][0] == f"call {index}"
                    parts[-1][-1] += text
                case Content(text) | Reasoning(text):
                    assert text
                    if not parts or parts[-1][0] != type(part).__name__.lower():
                        parts.append([type(part).__name__.lower(), ""])
                    parts[-1][-1] += text

    for piece in pieces:
        take(parser.add(piece))
    take(parser.finish())
    return [tuple(part) for part in parts]


def qwen() -> AnswerParser:
    return QwenParser(TOOLS)


def glm() -> AnswerParser:
    return GlmParser(TOOLS)


def dsml() -> AnswerParser:
    return DsmlParser(TOOLS)


def harmony() -> AnswerParser:
    return HarmonyParser("assistant")


def open_harmony() -> AnswerParser:
    return HarmonyParser("assistant<|channel|>analysis<|message|>")


def call(index: int, name: str, arguments: str) -> tuple[str, ...]:
    return f"call {index}", name, arguments


def qwen_call(*arguments: tuple[str, str], name: str = "add") -> str:
    """A call as Qwen 3 Coder writes it."""
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments)
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


CODE: Final = "def f():\n\n    return '</parameter>'\n"
BEGIN, SEP, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
SECTION, SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
KIMI, KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"


def kimi_call(id_: str, arguments: str) -> str:
    return f"<|tool_call_begin|>{id_}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def fenced(name: str, arguments: str) -> str:
    """A call as DeepSeek V3 writes it."""
    return f"{BEGIN}function{SEP}{name}\n```json\n{arguments}\n```{END}"


def dsml_call(*arguments: tuple[str, str, str], name: str = "f") -> str:
    inner = "".join(
        f'<｜DSML｜parameter name="{key}" string="{flag}">{value}</｜DSML｜parameter>\n'
        for key, flag, value in arguments
    )
    return f'<｜DSML｜invoke name="{name}">\n{inner}</｜DSML｜invoke>\n'


def in_dsml(*calls: str) -> str:
    return f"<｜DSML｜function_calls>\n{''.join(calls)}</｜DSML｜function_calls>"


CASES: Final[list[tuple[Callable[[], AnswerParser], str, Parts]]] = [
    # Harmony.
    (
        harmony,
        "<|channel|>analysis<|message|>Need sum.<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>",
        [("reasoning", "Need sum."), ("content", "4")],
    ),
    (
        harmony,
        '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city":"Oslo"}<|call|>',
        [call(0, "get_weather", '{"city":"Oslo"}')],
    ),
    (
        harmony,
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant to=functions.f<|channel|>commentary<|message|>{}"
        "<|call|>",
        [("reasoning", "a"), call(0, "f", "{}")],
    ),
    (
        harmony,
        '<|channel|>analysis to=browser.search code<|message|>{"query": "x"}<|call|>',
        [call(0, "browser.search", '{"query": "x"}')],
    ),
    (
        harmony,
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|><|start|>"
        "assistant<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
        "to=functions.f<|constrain|>json<|message|>{}<|call|>",
        [("reasoning", "a\nb"), ("content", "I look."), call(0, "f", "{}")],
    ),
    (
        harmony,
        "<|channel|>commentary<|message|>One.<|end|><|start|>assistant<|channel|>final<|message|>Two.<|return|>",
        [("content", "One.\nTwo.")],
    ),
    (harmony, "<|channel|>final<|message|>", []),
    (harmony, "<|channel|>analysis<|message|>cut", [("reasoning", "cut")]),
    (harmony, '<|channel|>commentary to=functions.f<|message|>{"x": [1,', [call(0, "f", '{"x": [1,')]),
    (harmony, "No header.", [("content", "No header.")]),
    (harmony, "<|channel|>analysis<|message|>a<|channel|>final<|message|>b", [("reasoning", "a"), ("content", "b")]),
    (
        open_harmony,
        "more<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>",
        [("reasoning", "more"), ("content", "4")],
    ),
    # DeepSeek V3 and V3.1.
    (DeepSeekParser, SECTION + fenced("add", '{"a":1}') + SECTION_END, [call(0, "add", '{"a":1}')]),
    (
        DeepSeekParser,
        f'{SECTION}{BEGIN}f{SEP}{{}}{END}{BEGIN}g{SEP}{{"x":2}}{END}{SECTION_END}',
        [call(0, "f", "{}"), call(1, "g", '{"x":2}')],
    ),
    (
        DeepSeekParser,
        f"{SECTION}{BEGIN}function_lookup{SEP}{{}}{END}{BEGIN}function{SEP}{{}}{END}{SECTION_END}",
        [call(0, "function_lookup", "{}"), call(1, "function", "{}")],
    ),
    (
        DeepSeekParser,
        f"I look.\n{SECTION}{fenced('add', '{"s": "```\\n```", "t": "}"}')}\n{fenced('f', '{}')}{SECTION_END}\nDone.",
        [
            ("content", "I look."),
            call(0, "add", '{"s": "```\\n```", "t": "}"}'),
            call(1, "f", "{}"),
            ("content", "Done."),
        ],
    ),
    (DeepSeekParser, f'{SECTION}{BEGIN}f{SEP}{{"x": [1', [call(0, "f", '{"x": [1')]),
    (DeepSeekParser, f'{SECTION}{BEGIN}function{SEP}add\n```json\n{{"a":1}}', [call(0, "add", '{"a":1}')]),
    (
        DeepSeekParser,
        f'{SECTION}{BEGIN}f{SEP}{{"x": 1}}{BEGIN}g{SEP}{{}}',
        [call(0, "f", '{"x": 1}'), call(1, "g", "{}")],
    ),
    (DeepSeekParser, f"{SECTION}{BEGIN}f{SEP}not JSON\n```{END}{SECTION_END}", [call(0, "f", "not JSON")]),
    (DeepSeekParser, f"{SECTION}{BEGIN}f{SEP}{END}{SECTION_END}", [call(0, "f", "{}")]),
    (DeepSeekParser, f"{SECTION} no call", [("content", f"{SECTION} no call")]),
    (DeepSeekParser, f"{SECTION}{BEGIN}f", [("content", f"{SECTION}{BEGIN}f")]),
    # Kimi K2.
    (
        KimiParser,
        KIMI + kimi_call("functions.get_weather:0", '{"city":"Oslo"}') + KIMI_END,
        [("call 0", "get_weather", "functions.get_weather:0", '{"city":"Oslo"}')],
    ),
    (
        KimiParser,
        f"Both.{KIMI}{kimi_call('functions.f:3', '{}')}{kimi_call('functions.g:4', '{"x": 1}')}{KIMI_END}After.",
        [
            ("content", "Both."),
            ("call 0", "f", "functions.f:3", "{}"),
            ("call 1", "g", "functions.g:4", '{"x": 1}'),
            ("content", "After."),
        ],
    ),
    (
        KimiParser,
        KIMI + "".join(kimi_call(id_, "{}") for id_ in ("functions.a.b:c:0", "get_weather:1", "f")) + KIMI_END,
        [
            ("call 0", "a.b:c", "functions.a.b:c:0", "{}"),
            ("call 1", "get_weather", "get_weather:1", "{}"),
            ("call 2", "f", "f", "{}"),
        ],
    ),
    (
        KimiParser,
        f'{KIMI}<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{{"a',
        [("call 0", "f", "functions.f:0", '{"a')],
    ),
    # Qwen 3 Coder.
    (qwen, qwen_call(("a", "1")), [call(0, "add", '{"a": 1}')]),
    (qwen, qwen_call(("a", "1"), name="text"), [call(0, "text", '{"a": "1"}')]),
    (
        qwen,
        qwen_call(("s", f"\n  {CODE}"), ("n", "null"), ("b", "True")),
        [call(0, "add", '{"s": "\\n  def f():\\n\\n    return \'</parameter>\'\\n", "n": null, "b": true}')],
    ),
    (qwen, qwen_call(("n", "nul")), [call(0, "add", '{"n": "nul"}')]),
    (qwen, qwen_call(("r", "1.50"), ("l", "[1, 2]")), [call(0, "add", '{"r": 1.50, "l": [1, 2]}')]),
    (qwen, qwen_call(("a", "one"), ("b", "no")), [call(0, "add", '{"a": "one", "b": "no"}')]),
    (qwen, qwen_call(("x", '{"y": "é"}'), name="unknown"), [call(0, "unknown", '{"x": "{\\"y\\": \\"é\\"}"}')]),
    (qwen, qwen_call(name="now"), [call(0, "now", "{}")]),
    (
        qwen,
        f"I look.\n{qwen_call(('a', '1'))}\n{qwen_call(('n', '3'), name='f')}\nDone.",
        [("content", "I look."), call(0, "add", '{"a": 1}'), call(1, "f", '{"n": 3}'), ("content", "Done.")],
    ),
    (
        qwen,
        "<function=add>\n<parameter=s>\nx</parameter></parameter>\n<parameter=a>\n2\n</parameter>\n</function>\n</tool_call>",
        [call(0, "add", '{"s": "x</parameter>", "a": 2}')],
    ),
    (
        qwen,
        "<tool_call>\n<function=add>\n<parameter=s>\nx\n<parameter=a>\n2\n</function>\n</tool_call>",
        [call(0, "add", '{"s": "x", "a": 2}')],
    ),
    (qwen, "<tool_call>\n<function=add>\n<parameter=s>\nab\n</par", [call(0, "add", '{"s": "ab')]),
    (qwen, "<tool_call>\n<function=add>\n<parameter=a>\n12", [call(0, "add", '{"a": 12')]),
    (qwen, "<tool_call>\n<function=add>\n<parameter=a>\n12\n</parameter>\n", [call(0, "add", '{"a": 12')]),
    (qwen, "a <tool_call> b <function=x y", [("content", "a <tool_call> b <function=x y")]),
    (qwen, "x < y <tool", [("content", "x < y <tool")]),
    # GLM 4.5 to 4.7.
    (
        glm,
        "<tool_call>f\n<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        [call(0, "f", '{"n": 3}')],
    ),
    (glm, "<tool_call>now\n</tool_call>", [call(0, "now", "{}")]),
    (
        glm,
        "<tool_call>now</tool_call><tool_call> add <arg_key>s</arg_key><arg_value> a\n</arg_value></tool_call>.",
        [call(0, "now", "{}"), call(1, "add", '{"s": " a\\n"}'), ("content", ".")],
    ),
    (
        glm,
        "<tool_call>add\n<arg_key>s</arg_key>\n<arg_value></arg_value> x</arg_value>\n<arg_key>a</arg_key>\n"
        "<arg_value>1</arg_value>\n</tool_call>",
        [call(0, "add", '{"s": "</arg_value> x", "a": 1}')],
    ),
    (glm, "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1", [call(0, "add", '{"a": 1')]),
    (glm, "<tool_call>no call < here", [("content", "<tool_call>no call < here")]),
    # DeepSeek V3.2.
    (
        dsml,
        f"Hm.\n\n{in_dsml(dsml_call(('n', 'false', '5'), ('x', 'true', '5')), dsml_call(name='now'))} End.",
        [("content", "Hm."), call(0, "f", '{"n": 5, "x": "5"}'), call(1, "now", "{}"), ("content", "End.")],
    ),
    (dsml, in_dsml(dsml_call(("n", "false", "True"), ("m", "false", "{a"))), [call(0, "f", '{"n": true, "m": "{a"}')]),
    (
        dsml,
        in_dsml(dsml_call(("x", "true", "</｜DSML｜parameter> \n"))),
        [call(0, "f", '{"x": "</｜DSML｜parameter> \\n"}')],
    ),
    (dsml, '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜para', [call(0, "f", "")]),
]


@pytest.mark.parametrize(("parser", "text", "expected"), CASES)
def test_every_split_of_an_answer_has_the_same_parts(
    parser: Callable[[], AnswerParser], text: str, expected: Parts
) -> None:
    assert parsed(parser(), [text]) == expected
    assert parsed(parser(), text) == expected
    for cut in range(1, len(text)):
        assert parsed(parser(), [text[:cut], text[cut:]]) == expected, cut


FRAGMENTS: Final = strategies.lists(
    strategies.sampled_from(
        [
            *("<tool_call>", "</tool_call>", "<function=add>", "<parameter=s>", "<parameter=a>", "</parameter>"),
            *("</function>", "\n", "x", "<", "</", "add", "1", "<arg_key>", "a</arg_key>", "<arg_value>"),
            *(
                "</arg_value>",
                SECTION,
                BEGIN,
                SEP,
                END,
                "function",
                "```",
                "{}",
                '"',
                KIMI,
                "<|tool_call_begin|>",
                ":0",
            ),
            *("<|tool_call_argument_begin|>", "<|tool_call_end|>", " ", "<|channel|>", "analysis", "<|message|>"),
            *("<|end|>", "<|start|>", " to=f", "<|call|>", "<｜DSML｜function_calls>", "</｜DSML｜invoke>"),
            *('<｜DSML｜invoke name="f">', '<｜DSML｜parameter name="x" string="true">', "</｜DSML｜parameter>"),
        ]
    ),
    max_size=14,
)


@pytest.mark.parametrize("parser", [qwen, glm, dsml, harmony, DeepSeekParser, KimiParser])
@hypothesis.given(pieces=FRAGMENTS)
@hypothesis.settings(deadline=None, max_examples=60)
def test_the_pieces_of_any_text_make_no_difference(parser: Callable[[], AnswerParser], pieces: list[str]) -> None:
    whole = parsed(parser(), ["".join(pieces)])
    assert parsed(parser(), pieces) == whole
    assert parsed(parser(), "".join(pieces)) == whole


@pytest.mark.parametrize("parser", [qwen, glm, dsml, harmony, DeepSeekParser, KimiParser])
@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\n<function=add>\n<parameter=s>\n" + "</parameter>\n" * 80_000,
        "<tool_call>\n<function=add>\n<parameter=l>\n" + "[1, " * 200_000,
        "<tool_call>f\n" + "<arg_key>n</arg_key><arg_value>1</arg_value>" * 20_000,
        SECTION + fenced("f", '{"a": "' + "`" * 1_000_000),
        KIMI + " " * 1_000_000,
        "<|channel|>" * 100_000,
        "<tool_call>" + "\n" * 1_000_000,
    ],
    ids=lambda text: text[:24],
)
def test_a_text_takes_time_in_proportion_to_its_length(parser: Callable[[], AnswerParser], text: str) -> None:
    """It takes minutes if a text is read again and again."""
    began = time.process_time()
    parsed(parser(), (text[start : start + 200] for start in range(0, len(text), 200)))
    assert time.process_time() - began < 20


def test_arguments_come_as_soon_as_their_type_is_known() -> None:
    parser = qwen()
    list(parser.add("<tool_call>\n<function=add>\n"))
    assert list(parser.add("<parameter=s>\nab")) == [Arguments(0, '{"s": "'), Arguments(0, "ab")]
    assert list(parser.add('\n"c')) == [Arguments(0, '\\n\\"c')]
    assert list(parser.add("\n</parameter>\n<parameter=a>\n1")) == [Arguments(0, '"'), Arguments(0, ', "a": ')]
    assert list(parser.add("2\n</parameter>\n<")) == []
    assert list(parser.add("/function>")) == [Arguments(0, "12"), Arguments(0, "}")]


# --- reasoning --------------------------------------------------------------------------------------------------------


class Thoughts(AnswerParser):
    """The reasoning of an answer, and the rest as content."""

    def __init__(self, start: Start, also_ends: Sequence[str] = ()) -> None:
        self._reader = ThoughtReader("<think>", "</think>", start, also_ends)

    def add(self, text: str) -> Any:
        yield from self._reader.add(text)
        if rest := self._reader.rest():
            yield Content(rest)

    def finish(self) -> Any:
        yield from self._reader.finish()
        if rest := self._reader.rest():
            yield Content(rest)


@pytest.mark.parametrize(
    ("start", "text", "expected"),
    [
        (Start.FREE, "<think>\na\n</think>\n\nb", [("reasoning", "a"), ("content", "b")]),
        (Start.FREE, "\n <think>a\n\nb\n\n</think>c", [("reasoning", "a\n\nb\n"), ("content", "c")]),
        (Start.FREE, "a <think>b</think>", [("content", "a <think>b</think>")]),
        (Start.FREE, " \n", [("content", " \n")]),
        (Start.FREE, "<thin", [("content", "<thin")]),
        (Start.FREE, "<think>\n\n</think>\n\nb", [("content", "b")]),
        (Start.OPEN_LINE, "a\n</think>\nb\n", [("reasoning", "a"), ("content", "b\n")]),
        (Start.OPEN_LINE, "\na", [("reasoning", "\na")]),
        (Start.OPEN, "\na", [("reasoning", "a")]),
        (Start.OPEN, "a < b </thin", [("reasoning", "a < b </thin")]),
        (Start.OPEN, "never\nends\n", [("reasoning", "never\nends\n")]),
        (Start.OPEN, 'the mark "</think>" ends it', [("reasoning", 'the mark "'), ("content", '" ends it')]),
        (Start.OPEN, "a</think>\n\n<think>b</think>", [("reasoning", "a"), ("content", "<think>b</think>")]),
        (Start.OPEN, "a\n<calls>x", [("reasoning", "a"), ("content", "<calls>x")]),
        (Start.CLOSED, "<think>a", [("content", "<think>a")]),
        (Start.CLOSED, "\n\na", [("content", "\n\na")]),
    ],
)
def test_every_split_of_an_answer_has_the_same_reasoning(start: Start, text: str, expected: Parts) -> None:
    ends = ["<calls>"]
    assert parsed(Thoughts(start, ends), [text]) == expected
    assert parsed(Thoughts(start, ends), text) == expected
    for cut in range(1, len(text)):
        assert parsed(Thoughts(start, ends), [text[:cut], text[cut:]]) == expected, cut


def test_a_line_break_in_reasoning_waits_for_the_next_character() -> None:
    reader = ThoughtReader("<think>", "</think>", Start.OPEN)
    assert list(reader.add("a\n")) == [Reasoning("a")]
    assert list(reader.add("b")) == [Reasoning("\nb")]
    assert list(reader.add("\n")) == []
    assert list(reader.add("</think>\n")) == []
    assert (reader.rest(), reader.is_over) == ("", True)
