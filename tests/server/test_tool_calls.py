"""Parsers of the tool calls in an answer."""

import json
import time
from collections.abc import Iterable

import hypothesis
import pytest
from hypothesis import strategies

from detjax.server.tools.call_readers import ValueReader
from detjax.server.tools.formats import format_name
from detjax.server.tools.json_objects import HermesParser, LlamaParser
from detjax.server.tools.mistral import MistralParser
from detjax.server.tools.parsers import AnswerParser
from detjax.server.tools.parts import Arguments, CallBegins, Content

type Calls = list[tuple[str, str]]


def parsed(parser: AnswerParser, pieces: Iterable[str]) -> tuple[str, Calls]:
    """The content, and the calls with the text of their arguments."""
    content, calls = "", list[list[str]]()

    def take(parts: Iterable[object]) -> None:
        nonlocal content
        for part in parts:
            match part:
                case Content(text):
                    content += text
                case CallBegins(index, name):
                    assert index == len(calls)
                    calls.append([name, ""])
                case Arguments(index, text):
                    assert text
                    calls[index][1] += text

    for piece in pieces:
        take(parser.add(piece))
    take(parser.finish())
    return content, [(name, arguments) for name, arguments in calls]


PATH = '{"dir": "C:\\\\", "q": "\\\\\\"}]", "end": "\\\\"}'
"""Arguments with strings that end with a backslash."""
WEATHER = '{"city": "Verona", "days": [1, 2], "text": "a \\"}</tool_call>{ b"}'
HERMES = [
    ("No call.", ("No call.", [])),
    ("a < b <tool", ("a < b <tool", [])),
    ("two\n\nlines  ", ("two\n\nlines", [])),
    (f'<tool_call>\n{{"name": "weather", "arguments": {WEATHER}}}\n</tool_call>', ("", [("weather", WEATHER)])),
    (f'I look.\n<tool_call>{{"arguments": {WEATHER} , "name": "w"}}</tool_call>', ("I look.", [("w", WEATHER)])),
    (
        '<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "b", "arguments": {"x": 1}}\n'
        "</tool_call>",
        ("", [("a", "{}"), ("b", '{"x": 1}')]),
    ),
    ('<tool_call>{"name": "now"}</tool_call> done', ("done", [("now", "{}")])),
    ('<tool_call>{"name": "\\u00e9", "n": -1.5, "arguments": {}}</tool_call>', ("", [("é", "{}")])),
    ('<tool_call>{"name": "a", "arguments": {"x": [1, ', ("", [("a", '{"x": [1, ')])),
    (
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', []),
    ),
    (
        '<tool_call>{"name": "a", "arguments": 3}</tool_call>',
        ('<tool_call>{"name": "a", "arguments": 3}</tool_call>', []),
    ),
    (f'<tool_call>{{"name": "a", "arguments": {PATH}}}</tool_call> done', ("done", [("a", PATH)])),
    ('<tool_call>{"name": "C:\\\\", "arguments": {}}</tool_call>', ("", [("C:\\", "{}")])),
    (
        '<tool_call>{"note": "\\\\", "name": "a", "arguments": {"x": "\\\\"}}</tool_call>',
        ("", [("a", '{"x": "\\\\"}')]),
    ),
    ('<tool_call>{"name": "a", "arguments": {}, "arguments": {"x": 1}}</tool_call>', ("", [("a", "{}")])),
    ('<tool_call>{"name": "a", "name": "b", "arguments": {}}</tool_call>', ("", [("a", "{}")])),
    ('<tool_call>{"arguments": {}}</tool_call>', ('<tool_call>{"arguments": {}}</tool_call>', [])),
    ('<tool_call>["name"]</tool_call>', ('<tool_call>["name"]</tool_call>', [])),
    ('<tool_call>{"name": "a" "b": 1}</tool_call>', ('<tool_call>{"name": "a" "b": 1}</tool_call>', [])),
    ('<tool_call>{"name": "a", "n": 1e5, "t": true, "arguments": {}}</tool_call>', ("", [("a", "{}")])),
    ("<tool_call>weather(3)</tool_call>", ("<tool_call>weather(3)</tool_call>", [])),
    ('<tool_call>{"name": "a", "argu', ('<tool_call>{"name": "a", "argu', [])),
]
LLAMA = [
    ("No call.", ("No call.", [])),
    (' {"name": "weather", "parameters": {"x": "}"}}', ("", [("weather", '{"x": "}"}')])),
    ('{"name": "a", "parameters": {}}; {"name": "b", "parameters": {"y": 2}}', ("", [("a", "{}"), ("b", '{"y": 2}')])),
    (f'{{"name": "a", "parameters": {PATH}}}', ("", [("a", PATH)])),
    ('{"name": "a", "parameters": {}} and more', ("", [("a", "{}")])),
    ('{"name": "a", "parameters": {}};\t\r\n{"name": "b"}', ("", [("a", "{}"), ("b", "{}")])),
    ('{"name": "a", "arguments": {"x": 1}}', ("", [("a", "{}")])),
    ('{"answer": 42}', ('{"answer": 42}', [])),
    ('{"name": "a"', ('{"name": "a"', [])),
    ("", ("", [])),
]
MISTRAL = [
    ("No call.", ("No call.", [])),
    (f'[TOOL_CALLS] [{{"name": "weather", "arguments": {WEATHER}}}]', ("", [("weather", WEATHER)])),
    (
        '[TOOL_CALLS][{"name": "a", "arguments": {}, "id": "123456789"}, {"arguments": {"x": 1}, "name": "b"}]',
        ("", [("a", "{}"), ("b", '{"x": 1}')]),
    ),
    (f"I look.\n[TOOL_CALLS]weather[ARGS]{WEATHER}", ("I look.", [("weather", WEATHER)])),
    ('[TOOL_CALLS]a[CALL_ID]123456789[ARGS]{}[TOOL_CALLS]b{"x": 1}', ("", [("a", "{}"), ("b", '{"x": 1}')])),
    ('[TOOL_CALLS][TOOL_CALLS]a[ARGS]{"x": [1, ', ("[TOOL_CALLS]", [("a", '{"x": [1, ')])),
    (f'[TOOL_CALLS] [{{"name": "a", "arguments": {PATH}}}]', ("", [("a", PATH)])),
    (f"[TOOL_CALLS]a[ARGS]{PATH}[TOOL_CALLS]b{{}}", ("", [("a", PATH), ("b", "{}")])),
    ("[TOOL_CALLS]a[ARGS]{} and more", ("and more", [("a", "{}")])),
    ('[TOOL_CALLS][{"name": "a"}] and more', ("and more", [("a", "{}")])),
    (f"[TOOL_CALLS]{'a' * 64}[ARGS]{{}}", ("", [("a" * 64, "{}")])),
    (f"[TOOL_CALLS]{'a' * 65}[ARGS]{{}}", (f"[TOOL_CALLS]{'a' * 65}[ARGS]{{}}", [])),
    ("[TOOL_CALLS]no call at all", ("[TOOL_CALLS]no call at all", [])),
    ("[TOOL_CALLS]no call {}", ("[TOOL_CALLS]no call {}", [])),
    ("[TOOL_CALLS][1, 2]", ("[TOOL_CALLS][1, 2]", [])),
    ("a [TOOL_CA", ("a [TOOL_CA", [])),
]
CASES = [(HermesParser, *case) for case in HERMES] + [(LlamaParser, *case) for case in LLAMA]
CASES += [(MistralParser, *case) for case in MISTRAL]


@pytest.mark.parametrize(("parser", "text", "expected"), CASES)
def test_a_whole_text(parser: type[AnswerParser], text: str, expected: tuple[str, Calls]) -> None:
    assert parsed(parser(), [text]) == expected


@pytest.mark.parametrize(("parser", "text", "expected"), CASES)
def test_a_text_that_comes_one_character_after_the_other(
    parser: type[AnswerParser], text: str, expected: tuple[str, Calls]
) -> None:
    assert parsed(parser(), text) == expected


@pytest.mark.parametrize(("parser", "text", "expected"), CASES)
def test_a_text_that_is_cut_in_two_anywhere(parser: type[AnswerParser], text: str, expected: tuple[str, Calls]) -> None:
    for cut in range(1, len(text)):
        assert parsed(parser(), [text[:cut], text[cut:]]) == expected, cut


@pytest.mark.parametrize(
    ("value", "rest"),
    [
        ('"C:\\\\"', '"'),
        ('"\\\\\\""', ","),
        ('"\\\\\\\\"', "}"),
        ('""', '"x"'),
        ("[]", "]"),
        ('{"a": ["]}", {}]}', "}"),
        ("-1.5e+3", ","),
        ("true", "}"),
        ("null", " "),
        ('["\\\\", "\\\\"]', "x"),
    ],
)
def test_a_value_ends_where_it_ends_however_it_is_cut(value: str, rest: str) -> None:
    text = value + rest
    for cut in range(len(text)):
        reader = ValueReader()
        end = reader.read(text[:cut], 0)
        assert end == min(cut, len(value))
        end += reader.read(text[end:], 0)
        assert (end, reader.is_over) == (len(value), True)


FRAGMENTS = strategies.lists(
    strategies.one_of(
        strategies.sampled_from(["<tool_call>", "</tool_call>", "<tool", '{"name": "f"', ', "arguments": ']),
        strategies.sampled_from(["[TOOL_CALLS]", "f[ARGS]", "[TOOL", '[{"name": "f"', ', "arguments": {', '"a": 1']),
        strategies.sampled_from(['{"x": "}"}', '{"name": "g", "parameters": {}}', "text", *'{}[]":,;3\\ \n']),
    ),
    max_size=12,
)


@pytest.mark.parametrize("parser", [HermesParser, LlamaParser, MistralParser])
@hypothesis.given(pieces=FRAGMENTS)
@hypothesis.settings(deadline=None)
def test_the_pieces_of_a_text_make_no_difference(parser: type[AnswerParser], pieces: list[str]) -> None:
    whole = parsed(parser(), ["".join(pieces)])
    assert parsed(parser(), pieces) == whole
    assert parsed(parser(), "".join(pieces)) == whole


@pytest.mark.parametrize("parser", [HermesParser, LlamaParser, MistralParser])
@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>" * 100_000,
        "[TOOL_CALLS]" * 100_000,
        '<tool_call>{"a":[' * 50_000 + "]" * 50_000,
        '<tool_call>{"a":[' * 8_000 + "]}" * 8_000,
        '[TOOL_CALLS][{"a":[' * 50_000 + "]" * 50_000,
        '{"name": "f", "parameters": {' + '"a": [[' * 100_000,
        '{"name": ' + "1" * 1_000_000,
        '[TOOL_CALLS]f[ARGS]{"a": "' + '\\"' * 500_000,
        " " * 1_000_000,
    ],
    ids=lambda text: text[:20],
)
def test_a_text_takes_time_in_proportion_to_its_length(parser: type[AnswerParser], text: str) -> None:
    """It takes a second or so. Where a text is read again and again it takes hours."""
    pieces = (text[start : start + 1000] for start in range(0, len(text), 1000))
    began = time.process_time()
    parsed(parser(), pieces)
    assert time.process_time() - began < 20


def test_arguments_are_told_as_they_come() -> None:
    parser = HermesParser()
    list(parser.add('<tool_call>{"name": "f", "arguments": '))
    assert list(parser.add('{"x": ')) == [CallBegins(0, "f"), Arguments(0, '{"x": ')]
    assert list(parser.add("1")) == [Arguments(0, "1")]
    assert list(parser.add("}}")) == [Arguments(0, "}")]


def test_arguments_of_complete_calls_are_json() -> None:
    _, calls = parsed(HermesParser(), [HERMES[3][0]])
    assert json.loads(calls[0][1])["city"] == "Verona"


def test_the_format_is_that_of_the_chat_template() -> None:
    assert format_name("... return <tool_call> XML tags ...") == "hermes"
    assert format_name('{% if tools %}{"name": function name, "parameters": ...}') == "llama3_json"
    assert format_name("{{ '[TOOL_CALLS]' }}") == "mistral"
    assert format_name("<tool_call>\\n<function=example_function_name>") == "qwen3_coder"
    assert format_name("{{ messages }}") is None
