"""Structural tags allow the texts that xgrammar's documentation says they allow, and no others."""

import functools
from collections.abc import Mapping
from typing import Any, Final

import pytest

from detjax.engine import Constraint
from detjax.engine.constraints import ConstraintCompiler
from detjax.models import Tokenizer
from detjax.server.api.structural_tags import grammar_of
from tests.server.running_server import FIXTURE
from tests.server.tool_models import with_marks

SCHEMA: Final = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
JSON: Final = {"type": "json_schema", "json_schema": SCHEMA}
NUMBERS: Final = {"type": "json_schema", "json_schema": {"type": "array", "items": {"type": "integer"}}}
X: Final = {"begin": "<x>", "content": JSON, "end": "</x>"}
CALL: Final = '<x>{"a": 1}</x>'


@functools.cache
def compiler(has_marks: bool) -> tuple[ConstraintCompiler, Tokenizer]:
    """A compiler, and a tokenizer in which <tool_call> is a token if it has marks."""
    tokenizer = Tokenizer.load(FIXTURE)
    assert tokenizer is not None
    tokenizer = with_marks(tokenizer) if has_marks else tokenizer
    return ConstraintCompiler(tokenizer, 515, [509]), tokenizer


def accepts(tag: Mapping[str, Any], text: str, *, has_marks: bool = False) -> bool:
    made, tokenizer = compiler(has_marks)
    state = made.compile(Constraint("grammar", grammar_of(tag, tokenizer))).start()
    for token in tokenizer.encode(text, add_special_tokens=False):
        if not state.consume_token(token):
            return False
    return state.is_accepting()


def form(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": "structural_tag", "format": {"type": kind} | fields}


CASES: Final[dict[str, tuple[dict[str, Any], list[str], list[str]]]] = {
    "older form": (
        {
            "type": "structural_tag",
            "structures": [
                {"begin": "<f=one>", "schema": SCHEMA, "end": "</f>"},
                {"begin": "<f=two>", "schema": NUMBERS["json_schema"], "end": "</f>"},
            ],
            "triggers": ["<f="],
        },
        [
            "",
            "Text of any\nkind < f",
            'So: <f=one>{"a": 1}</f> and',
            '<f=two>[1, 2]</f>x<f=one>{"a": 1}</f>',
            "<f",
        ],
        ["<f=", "<f=one>[1]</f>", "<f=three>", 'a <f=one>{"a": 1}</f', '<f=one>{"b": 1}</f>'],
    ),
    "constant": (form("const_string", value="yes/no\n"), ["yes/no\n"], ["", "yes", "yes/no\nx"]),
    "schema": (form("json_schema", json_schema=SCHEMA), ['{"a": 1}'], ["", "{}", '{"a": 1}x']),
    "schema as text": (form("json_schema", json_schema='{"enum": [1]}'), ["1"], ["2"]),
    "any schema": (form("json_schema", json_schema=True), ["[null]"], ["x"]),
    "expression": (form("regex", pattern="a/b\\/c\n+"), ["a/b/c\n\n"], ["a/b/c", "a/bc\n"]),
    "text": (form("any_text"), ["", "any\n<x>"], []),
    "sequence": (
        form(
            "sequence",
            elements=[
                {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"},
                {"type": "or", "elements": [{"type": "const_string", "value": "yes"}, JSON]},
            ],
        ),
        ["<t>a\n<x></t>yes", '<t></t>{"a": 2}'],
        ["yes", "<t></t>", "<t>a</t></t>yes", "<t></t>yesyes"],
    ),
    "expression before its end": (
        form("tag", begin="<a>", content={"type": "regex", "pattern": "[a-z]+"}, end="end"),
        ["<a>xend", "<a>endend"],
        ["<a>end", "<a>x", "<a>xendx"],
    ),
    "expressions in a row": (
        form(
            "sequence",
            elements=[
                {"type": "regex", "pattern": "[a-z]+"},
                {"type": "const_string", "value": "no"},
                {"type": "regex", "pattern": "[0-9]?"},
            ],
        ),
        ["ano", "nono3"],
        ["no", "an", "ano34"],
    ),
    "several ends": (
        form("tag", begin="(", content={"type": "any_text"}, end=["]", ")"]),
        ["(a)", "(]"],
        ["(", "(a", "(a)b"],
    ),
    "triggers": (
        form("triggered_tags", triggers=["<x>"], tags=[X]),
        ["", "t", CALL, f"t{CALL}u{CALL}"],
        ["<x>", f"{CALL}<x>", "t<x>1</x>"],
    ),
    "at least one": (
        form("triggered_tags", triggers=["<x>"], tags=[X], at_least_one=True),
        [CALL, f"{CALL}t", f"{CALL}t{CALL}"],
        ["", "t", f"t{CALL}"],
    ),
    "stop after the first": (
        form("triggered_tags", triggers=["<x>"], tags=[X], stop_after_first=True),
        ["", "t", CALL, f"t{CALL}"],
        [f"{CALL}t", f"{CALL}{CALL}"],
    ),
    "exactly one": (
        form("triggered_tags", triggers=["<x>"], tags=[X], stop_after_first=True, at_least_one=True),
        [CALL],
        ["", "t", f"t{CALL}", f"{CALL}t"],
    ),
    "several triggers": (
        form(
            "triggered_tags",
            triggers=["<x>", "<y>"],
            tags=[X, {"begin": "<y>z", "content": {"type": "any_text"}, "end": "</y>"}],
        ),
        ["", f"a<y>zb<x></y>c{CALL}d", "<y>z</y><y>z</y>"],
        ["<y>b</y>", "<y>zb", "a<x>b"],
    ),
    "separated": (
        form("tags_with_separator", tags=[X], separator=", "),
        ["", CALL, f"{CALL}, {CALL}"],
        [f"{CALL}{CALL}", f"{CALL}, ", "t"],
    ),
    "separated, at least one": (
        form("tags_with_separator", tags=[X], separator=",", at_least_one=True),
        [CALL, f"{CALL},{CALL}"],
        [""],
    ),
    "separated, only the first": (
        form("tags_with_separator", tags=[X], separator=",", stop_after_first=True),
        ["", CALL],
        [f"{CALL},{CALL}"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_format_allows_its_texts_and_no_others(name: str) -> None:
    tag, allowed, refused = CASES[name]
    for text in allowed:
        assert accepts(tag, text), text
    for text in refused:
        assert not accepts(tag, text), text


@pytest.mark.parametrize("has_marks", [True, False])
def test_tags_are_tokens_where_the_tokenizer_has_them(has_marks: bool) -> None:
    tool = {"begin": '<tool_call>\n{"name": "f", "arguments": ', "content": JSON, "end": "}\n</tool_call>"}
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    free = form("triggered_tags", triggers=["<tool_call>"], tags=[tool])
    thought = {"type": "tag", "begin": "<tool_call>", "content": {"type": "any_text"}, "end": "</tool_call>"}
    for text in ("", "So.", f"So.\n{call}", f"{call}\n{call} t"):
        assert accepts(free, text, has_marks=has_marks), text
    for text in ("<tool_call>", "<tool_call>\n{}\n</tool_call>", f"{call}<tool_call>"):
        assert not accepts(free, text, has_marks=has_marks), text
    both = form("sequence", elements=[thought, NUMBERS])
    assert accepts(both, "<tool_call>a\nb</tool_call>[1]", has_marks=has_marks)
    assert not accepts(both, "<tool_call>a\nb[1]", has_marks=has_marks)


@pytest.mark.parametrize(
    ("tag", "says"),
    [
        ({}, "accepted: type structural_tag with format, or with structures and triggers"),
        ({"type": "x", "format": {}}, "has type 'x'"),
        ({"format": {"type": "any_text"}, "triggers": ["a"]}, "and format, triggers; accepted"),
        ({"structures": [{"begin": "a"}], "triggers": ["a"]}, r"structures\[0\] has begin; accepted: begin, schema"),
        ({"format": 3}, "format is a int; accepted: an object"),
        (form("grammar", grammar="x"), "format.type is 'grammar'; accepted: const_string, json_schema, regex"),
        (form("const_string"), "format has no field; accepted: value"),
        (form("const_string", value=3), "format.value is a int; accepted: a string"),
        (form("any_text", excludes=["a"]), "format has excludes; accepted: no other field"),
        (form("sequence", elements=[]), "format.elements is empty; accepted: a list with entries"),
        (form("json_schema", json_schema="{"), "format.json_schema is a string that is not JSON"),
        (form("triggered_tags", triggers=["<y>"], tags=[X]), "begins with 0 of the triggers; accepted: with one"),
        (form("triggered_tags", triggers=["<", "<x"], tags=[X]), "begins with 2 of the triggers"),
        (form("triggered_tags", triggers=["<x>", "y"], tags=[X]), "no tag that begins with trigger 'y'"),
        (form("triggered_tags", triggers=["<x>"], tags=[X], at_least_one=1), "at_least_one is a int; accepted: true"),
        (form("sequence", elements=[{"type": "any_text"}, JSON]), "any_text before the answer's end"),
        (
            form("sequence", elements=[{"type": "triggered_tags", "triggers": ["<x>"], "tags": [X]}, JSON]),
            "triggered_tags before the answer's end; accepted: there with at_least_one and stop_after_first",
        ),
        (form("tag", begin="a", content={"type": "any_text"}, end="x<|im_end|>"), "one special token, or has none"),
        (form("sequence", elements=[{"type": "any_text"}] * 1100), "more than 32 levels or 1024 formats|any_text"),
    ],
)
def test_formats_that_contradict_themselves_are_refused_by_place(tag: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        grammar_of(tag, compiler(False)[1])


def test_deep_formats_are_refused() -> None:
    tag: dict[str, Any] = {"type": "any_text"}
    for _ in range(40):
        tag = {"type": "sequence", "elements": [tag]}
    with pytest.raises(ValueError, match="more than 32 levels"):
        grammar_of({"format": tag}, compiler(False)[1])
