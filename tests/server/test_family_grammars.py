"""Grammars of each family's answers: what an answer may be when calls are required or tools are strict."""

import functools
import json
from typing import Any, Final

import pytest

from detjax.engine import Constraint, FieldError
from detjax.engine.constraints import ConstraintCompiler
from detjax.models import Tokenizer
from detjax.server.tools.definitions import FunctionFields, ToolUse
from detjax.server.tools.formats import reasoning_format, tool_format
from tests.server.families import DEEPSEEK_V31, FAMILIES, GLM, HERMES, OPENAI, QWEN_CODER, Family

END: Final = 509
WEATHER: Final = FunctionFields(
    name="weather",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 8},
            "days": {"type": "integer", "minimum": 0, "maximum": 9},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
)
NOW: Final = FunctionFields(name="now")
GOOD: Final = {"city": "Oslo", "days": 2}
OPEN: Final = {"deepseek_v31": "<think>", "qwen3_coder": "<think>\n"}
"""Ends of prompts that open reasoning."""


def call(family: str, name: str, arguments: dict[str, Any]) -> str:
    """A call without the marks around all calls."""
    text = json.dumps(arguments)
    match family:
        case "hermes":
            return f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>'
        case "llama3_json":
            return f'{{"name": "{name}", "parameters": {text}}}'
        case "mistral":
            return f"[TOOL_CALLS]{name}[CALL_ID]aB3456789[ARGS]{text}"
        case "openai":
            return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{text}<|call|>"
        case "deepseek_v3":
            return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{text}\n```<｜tool▁call▁end｜>"
        case "deepseek_v31":
            return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{text}<｜tool▁call▁end｜>"
        case "kimi_k2":
            return f"<|tool_call_begin|>functions.{name}:12<|tool_call_argument_begin|>{text}<|tool_call_end|>"
    written = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    match family:
        case "qwen3_coder":
            inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in written.items())
            return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"
        case "glm45":
            pairs = (f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in written.items())
            return f"<tool_call>{name}\n{''.join(pairs)}</tool_call>"
    parts = (
        f'<｜DSML｜parameter name="{key}" string="{str(isinstance(arguments[key], str)).lower()}">{value}'
        "</｜DSML｜parameter>\n"
        for key, value in written.items()
    )
    return f'<｜DSML｜invoke name="{name}">\n{"".join(parts)}</｜DSML｜invoke>\n'


def calls(family: str, *made: tuple[str, dict[str, Any]]) -> str:
    """An answer that consists of calls."""
    texts = [call(family, name, arguments) for name, arguments in made]
    match family:
        case "deepseek_v3" | "deepseek_v31":
            between = "\n" if family == "deepseek_v3" else ""
            return f"<｜tool▁calls▁begin｜>{between.join(texts)}<｜tool▁calls▁end｜>"
        case "kimi_k2":
            return f"<|tool_calls_section_begin|>{''.join(texts)}<|tool_calls_section_end|>"
        case "deepseek_v32":
            return f"<｜DSML｜function_calls>\n{''.join(texts)}</｜DSML｜function_calls>"
        case "llama3_json":
            return "; ".join(texts)
        case "mistral":
            return "".join(texts)
    return "\n".join(texts)


@functools.cache
def made(words: Tokenizer, name: str, *, plain: bool = False) -> tuple[Tokenizer, ConstraintCompiler, Any, Any]:
    """A family's tokenizer with its compiler of grammars, its format of calls, and its format of reasoning."""
    tokenizer = FAMILIES[name].tokenizer(words, plain=plain)
    format_ = tool_format(tokenizer)
    assert format_ is not None
    assert format_.NAME == name
    compiler = ConstraintCompiler(tokenizer, 540, [END, *format_.stop_tokens])
    return tokenizer, compiler, format_, reasoning_format(tokenizer, format_)


def accepts(
    words: Tokenizer, family: Family, text: str, use: ToolUse | None, form: Constraint | None = None, **options: Any
) -> bool:
    """Returns whether an answer may be a text."""
    tokenizer, compiler, format_, reasoning = made(words, family.name, plain=options.get("plain", False))
    ending = options.get("ending", "<|start|>assistant")
    rules = "" if reasoning is None else reasoning.rules(ending)
    constraint = format_.constraint(use, form, rules, ending)
    assert constraint is not None
    tokens = tokenizer.encode(text, add_special_tokens=False)
    if not (tokens and tokens[-1] in format_.stop_tokens):
        tokens.append(END)
    masks = [*compiler.masks_of(compiler.compile(constraint), tokens)]
    return len(masks) == len(tokens) and all(
        mask[token // 32] >> (token % 32) & 1 for mask, token in zip(masks, tokens, strict=True)
    )


def use(*tools: FunctionFields, required: bool = False, allowed: Any = None, one: bool = False) -> ToolUse:
    return ToolUse(tools, is_required=required, allowed=allowed, at_most_one=one)


BY_NAME: Final = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


@BY_NAME
def test_a_required_call_follows_its_schema(words: Tokenizer, family: Family) -> None:
    name, required = family.name, use(WEATHER, NOW, required=True)
    good = calls(name, ("weather", GOOD))
    for text, expected in (
        (good, True),
        (calls(name, ("now", {})), True),
        (calls(name, ("weather", {"city": "Rome"})), True),
        (calls(name, ("weather", {"days": 2})), False),
        (calls(name, ("weather", GOOD | {"days": 10})), False),
        (calls(name, ("weather", GOOD | {"city": "Trondheim"})), False),
        (calls(name, ("weather", GOOD | {"x": 1})), False),
        (calls(name, ("other", {})), False),
        ("I look.", False),
        ("", False),
        (good[: len(good) // 2], False),
    ):
        assert accepts(words, family, text, required) is expected, text
    several = calls(name, ("weather", GOOD), ("now", {}))
    assert accepts(words, family, several, required) is (name != "openai")
    assert not accepts(words, family, several, use(WEATHER, NOW, required=True, one=True))
    assert not accepts(words, family, calls(name, ("now", {})), use(WEATHER, NOW, required=True, allowed=["weather"]))


@BY_NAME
def test_strict_tools_keep_their_schema_and_others_are_free(words: Tokenizer, family: Family) -> None:
    name, strict = family.name, WEATHER.model_copy(update={"strict": True})
    said = "<|channel|>final<|message|>No." if name == "openai" else "No."
    before = "" if name in ("llama3_json", "openai") else "I look."
    free = FunctionFields(name="free", parameters=WEATHER.parameters)
    some = use(strict, free)
    for text, expected in (
        (said, True),
        (before + calls(name, ("weather", GOOD)), True),
        (before + calls(name, ("free", {"y": "z", "days": 99})), True),
        (before + calls(name, ("weather", GOOD | {"days": 10})), False),
        (before + calls(name, ("other", {})), False),
    ):
        assert accepts(words, family, text, some) is expected, text
    assert made(words, name)[2].constraint(use(WEATHER, NOW), None) is None


@BY_NAME
def test_reasoning_comes_first_where_the_prompt_opens_it_or_the_model_may(words: Tokenizer, family: Family) -> None:
    name, required = family.name, use(WEATHER, NOW, required=True)
    good, form = calls(name, ("now", {})), Constraint.json_schema({"const": 7})
    reasoning = made(words, name)[3]
    final = "<|channel|>final<|message|>" if name == "openai" else ""
    assert accepts(words, family, final + "7", None, form) if reasoning else True
    assert not accepts(words, family, final + "8", None, form) if reasoning else True
    if reasoning is None:
        assert made(words, name)[2].constraint(None, form) is form
        return
    if name == "openai":
        thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
        for text, expected in ((thought + good, True), (thought + final + "7", False), (thought, False)):
            assert accepts(words, family, text, required) is expected, text
        assert accepts(words, family, thought + final + "7", None, form)
        opened = "<|start|>assistant<|channel|>analysis<|message|>"
        assert accepts(words, family, "m.<|end|><|start|>assistant" + good, required, ending=opened)
        assert accepts(words, family, "7", None, form, ending="<|start|>assistant<|channel|>final<|message|>")
        return
    for ending, text, expected in (
        ("", "<think>\nI must.\n</think>\n\n" + good, True),
        ("", good, True),
        ("", "I must.</think>" + good, False),
        ("<think>\n", "I must.\n</think>\n\n" + good, True),
        ("<think>", "I must.</think>" + good, True),
        ("<think>\n", good, False),
        ("<think>\n\n</think>\n\n", good, True),
        ("</think>", "<think>I must.</think>" + good, False),
    ):
        assert accepts(words, family, text, required, ending=ending) is expected, (ending, text)
    assert accepts(words, family, "I must.</think>\n\n7", None, form, ending="<think>")
    assert not accepts(words, family, "7", None, form, ending="<think>")
    both = use(WEATHER, NOW)
    for text, expected in (("a</think>7", True), ("a</think>" + good, True), ("a</think>8", False)):
        assert accepts(words, family, text, both, form, ending="<think>") is expected, text


@pytest.mark.parametrize("family", [QWEN_CODER, GLM, HERMES], ids=lambda family: family.name)
def test_marks_that_are_plain_text_have_the_same_grammar(words: Tokenizer, family: Family) -> None:
    good = calls(family.name, ("weather", GOOD))
    for text, expected in ((good, True), ("x" + good, False), (calls(family.name, ("other", {})), False)):
        assert accepts(words, family, text, use(WEATHER, NOW, required=True), plain=True) is expected
        thought = f"a < b\n</think>\n\n{text}"
        assert accepts(words, family, thought, use(WEATHER, required=True), plain=True, ending="<think>\n") is expected


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        (Constraint("regex", r"a/b\d+"), "a/b12", "a/b"),
        (Constraint.choice(["yes", 'n"o']), 'n"o', "maybe"),
        (
            Constraint("grammar", 'start: "start" more // start\nmore: /start+/ | %json {"const": "start"}'),
            'start"start"',
            "start",
        ),
    ],
)
def test_every_kind_of_form_follows_reasoning(words: Tokenizer, form: Constraint, good: str, bad: str) -> None:
    for text, expected in ((good, True), (bad, False)):
        assert accepts(words, HERMES, f"Hm.</think>{text}", None, form, ending="<think>") is expected
        assert accepts(words, OPENAI, f"<|channel|>final<|message|>{text}", None, form) is expected


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string", "pattern": "^[a-z]+/[0-9]$"}, "ab/1", "ab/1x"),
        ({"type": "string", "pattern": "[0-9]"}, "a\n1b", "ab"),
        ({"type": "string", "minLength": 2}, "ab", "a"),
        ({"enum": ["a", 7, None]}, "7", "8"),
        ({"anyOf": [{"type": "string", "maxLength": 1}, {"type": "null"}]}, "null", "ab"),
        ({"$ref": "#/$defs/name"}, "Oslo", "Rome"),
        ({"type": "boolean"}, "true", "True"),
        ({"type": "array", "items": {"$ref": "#/$defs/number"}}, "[1, 2]", '["a"]'),
        ({"type": "string"}, "a </parameter", "</parameter>"),
        ({}, "any\ntext", "</parameter>"),
    ],
)
def test_values_of_tagged_arguments_follow_their_schemas(words: Tokenizer, schema: Any, good: str, bad: str) -> None:
    definitions = {"name": {"const": "Oslo"}, "number": {"type": "integer"}}
    tool = FunctionFields(
        name="f", parameters={"type": "object", "properties": {"v": schema}, "required": ["v"], "$defs": definitions}
    )
    for value, expected in ((good, True), (bad, False)):
        text = f"<tool_call>\n<function=f>\n<parameter=v>\n{value}\n</parameter>\n</function>\n</tool_call>"
        assert accepts(words, QWEN_CODER, text, use(tool, required=True), ending="</think>") is expected, value


def test_what_tagged_arguments_cannot_enforce_is_refused_by_name(words: Tokenizer) -> None:
    format_ = made(words, "qwen3_coder")[2]
    for schema, says in (
        ({"type": "string", "pattern": "^a|b$"}, r"the parameter 'v' of the tool 'f' has the pattern"),
        ({"allOf": [{"type": "string", "minLength": 1}, {"type": "string"}]}, "has several schemas in allOf"),
    ):
        tool = FunctionFields(name="f", parameters={"type": "object", "properties": {"v": schema}})
        with pytest.raises(FieldError, match=says) as raised:
            format_.constraint(use(tool, required=True), None)
        assert raised.value.field == "tools"
        assert format_.constraint(use(tool), None) is None


def test_a_prompt_within_a_header_cannot_be_constrained(words: Tokenizer) -> None:
    format_ = made(words, "openai")[2]
    for ending in ("<|start|>assistant<|channel|>analysis", "<|start|>assistant<|channel|>final<|message|>"):
        with pytest.raises(FieldError, match="within a message, so the answer cannot be constrained"):
            format_.constraint(use(NOW, required=True), None, "", ending)


def test_the_bars_of_deepseek_are_tokens_or_refused(words: Tokenizer) -> None:
    tokenizer, _, format_, _ = made(words, DEEPSEEK_V31.name)
    assert set(format_.marks.tokens) == set(format_.MARKS)
    assert all(tokenizer.is_left_out(token) for token in format_.marks.tokens.values())
