"""Formats of tool calls: what an answer may be under every choice of tools, and the readers of complete answers."""

import functools
import json
import re
from typing import Any, Final

import pytest
from pydantic import TypeAdapter

from detjax.engine import Constraint, FieldError
from detjax.engine.constraints import ConstraintCompiler
from detjax.models import Tokenizer
from detjax.server.tools.answers import Answer, AnswerReader, Call
from detjax.server.tools.definitions import (
    AllowedToolsChoice,
    ChatTool,
    ChatToolChoice,
    NamedTool,
    ToolUse,
    tool_use,
)
from detjax.server.tools.formats import tool_format, why_no_tools
from detjax.server.tools.json_objects import HermesFormat, LlamaFormat
from detjax.server.tools.mistral import MistralListFormat, MistralNamedFormat
from detjax.server.tools.parts import Arguments, CallBegins, Content
from detjax.server.tools.tool_format import ToolFormat
from tests.server.tool_models import (
    HERMES,
    LLAMA,
    MISTRAL_LIST,
    MISTRAL_NAMED,
    TEMPLATES,
    UNKNOWN,
    WITHOUT_TOOLS,
    with_marks,
)

END: Final = 509
NUMBER: Final[dict[str, Any]] = {"type": "object", "properties": {"n": {"const": 7}}, "required": ["n"]}
NUMBER["additionalProperties"] = False
SEVEN: Final = '{"n": 7}'
ONE, TWO, THREE = (
    ChatTool.model_validate({"type": "function", "function": {"name": name} | more}).function
    for name, more in (("one", {"parameters": NUMBER}), ("two", {}), ("three", {"parameters": NUMBER, "strict": True}))
)
FORMS: Final = [*TEMPLATES, "plain hermes", "plain mistral list", "plain mistral named"]


@pytest.fixture(scope="module")
def marked(words: Tokenizer) -> Tokenizer:
    return with_marks(words)


@pytest.fixture(scope="module")
def written(request: pytest.FixtureRequest, words: Tokenizer, marked: Tokenizer) -> tuple[str, ToolFormat, Tokenizer]:
    """A form's name, its format and its tokenizer, with marks as tokens of their own or, if plain, as text."""
    form = request.param.removeprefix("plain ")
    tokenizer = (words if request.param.startswith("plain") else marked).with_chat_template(TEMPLATES[form])
    format_ = tool_format(tokenizer)
    assert format_ is not None
    return form, format_, tokenizer


def calls(form: str, *pairs: tuple[str, str]) -> str:
    """The text of calls, each with its arguments."""
    match form:
        case "hermes":
            texts = [f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>' for name, text in pairs]
            return "\n".join(texts)
        case "llama":
            return "; ".join(f'{{"name": "{name}", "parameters": {text}}}' for name, text in pairs)
        case "mistral list":
            inner = ", ".join(f'{{"name": "{name}", "arguments": {text}}}' for name, text in pairs)
            return f"[TOOL_CALLS] [{inner}]"
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{text}" for name, text in pairs)


@functools.cache
def compiler_of(tokenizer: Tokenizer) -> ConstraintCompiler:
    return ConstraintCompiler(tokenizer, 515, [END])


def accepts(constraint: Constraint | None, tokenizer: Tokenizer, text: str, *, is_whole: bool = True) -> bool:
    """Returns whether an answer may be a text, or begin with it."""
    assert constraint is not None
    compiler = compiler_of(tokenizer)
    matcher = compiler.compile(constraint).matcher()
    for token in [*tokenizer.encode(text, add_special_tokens=False), *[END] * is_whole]:
        if compiler.start_masks(1, {0: matcher}, functools.partial(list, [(matcher, token)])).result().failures:
            return False
    return True


def use(*tools: Any, required: bool = False, allowed: Any = None, one: bool = False) -> ToolUse:
    return ToolUse(tools, is_required=required, allowed=allowed, at_most_one=one)


type Written = tuple[str, ToolFormat, Tokenizer]


@pytest.mark.parametrize("written", FORMS, indirect=True, scope="module")
def test_a_required_call_is_all_that_an_answer_may_be(written: Written) -> None:
    form, format_, tokenizer = written
    constraint = format_.constraint(use(ONE, TWO, required=True), None)
    once, other = calls(form, ("one", SEVEN)), calls(form, ("two", "{}"))
    for text, expected in (
        (once, True),
        (other, True),
        (calls(form, ("one", SEVEN), ("two", "{}")), True),
        (calls(form, ("one", SEVEN), ("two", "{}"), ("one", SEVEN)), True),
        ("", False),
        ("I look.", False),
        (calls(form, ("three", SEVEN)), False),
        (calls(form, ("one", '{"n": 8}')), False),
        (calls(form, ("two", '{"n": 7}')), False),
        (once[:-1], False),
        (f"{once} I looked.", False),
    ):
        assert accepts(constraint, tokenizer, text) is expected, text
    single = format_.constraint(use(ONE, TWO, required=True, one=True), None)
    assert accepts(single, tokenizer, once) and accepts(single, tokenizer, other)
    assert not accepts(single, tokenizer, calls(form, ("one", SEVEN), ("two", "{}")))


@pytest.mark.parametrize("written", FORMS, indirect=True, scope="module")
def test_only_allowed_tools_are_called_and_only_strict_ones_keep_their_schema(written: Written) -> None:
    form, format_, tokenizer = written
    assert format_.constraint(use(ONE, TWO), None) is None
    strict = format_.constraint(use(ONE, THREE), None)
    allowed = format_.constraint(use(ONE, TWO, allowed=["two"]), None)
    said = "" if form == "llama" else "I look. "
    for constraint, name, arguments, expected in (
        (strict, "three", SEVEN, True),
        (strict, "three", '{"n": 8}', False),
        (strict, "one", '{"n": 8}', True),
        (strict, "one", "[]", False),
        (strict, "two", "{}", False),
        (allowed, "two", '{"x": 1}', True),
        (allowed, "one", SEVEN, False),
    ):
        text = said + calls(form, (name, arguments))
        assert accepts(constraint, tokenizer, text) is expected, text
    for constraint in (strict, allowed):
        assert accepts(constraint, tokenizer, "No call, é\n.")
        assert accepts(constraint, tokenizer, "")
    required = format_.constraint(use(ONE, TWO, required=True, allowed=["two"]), None)
    assert accepts(required, tokenizer, calls(form, ("two", "{}")))
    assert not accepts(required, tokenizer, calls(form, ("one", SEVEN)))
    several = calls(form, ("three", SEVEN), ("one", "{}"))
    assert accepts(strict, tokenizer, said + several)
    assert not accepts(format_.constraint(use(ONE, THREE, one=True), None), tokenizer, said + several)


@pytest.mark.parametrize("written", FORMS, indirect=True, scope="module")
def test_json_may_stand_in_place_of_calls(written: Written) -> None:
    form, format_, tokenizer = written
    wanted = Constraint.json_schema(NUMBER)
    if form == "llama":
        with pytest.raises(FieldError, match="the model writes calls as JSON too") as raised:
            format_.constraint(use(ONE), wanted)
        assert raised.value.field == "constraint"
    else:
        constraint = format_.constraint(use(ONE), wanted)
        for text, expected in ((SEVEN, True), (calls(form, ("one", "{}")), True), ("I look.", False), ("{}", False)):
            assert accepts(constraint, tokenizer, text) is expected, text
    required = format_.constraint(use(ONE, required=True), wanted)
    assert accepts(required, tokenizer, calls(form, ("one", SEVEN)))
    assert not accepts(required, tokenizer, SEVEN)


def test_a_template_with_ids_has_them_between_name_and_arguments(marked: Tokenizer) -> None:
    tokenizer = marked.with_chat_template(MISTRAL_NAMED + "{# [CALL_ID] #}")
    format_ = tool_format(tokenizer)
    assert format_ is not None
    constraint = format_.constraint(use(ONE, required=True), None)
    for text, expected in (
        (f"[TOOL_CALLS]one[CALL_ID]aZ3456789[ARGS]{SEVEN}", True),
        (f"[TOOL_CALLS]one[CALL_ID]a2345678[ARGS]{SEVEN}", False),
        (f"[TOOL_CALLS]one[CALL_ID]a234567890[ARGS]{SEVEN}", False),
        (f"[TOOL_CALLS]one[ARGS]{SEVEN}", False),
    ):
        assert accepts(constraint, tokenizer, text) is expected, text


def test_the_format_follows_the_template(words: Tokenizer) -> None:
    kinds = {
        HERMES: HermesFormat,
        LLAMA: LlamaFormat,
        MISTRAL_LIST: MistralListFormat,
        MISTRAL_NAMED: MistralNamedFormat,
        WITHOUT_TOOLS: type(None),
        UNKNOWN: type(None),
    }
    assert {template: type(tool_format(words.with_chat_template(template))) for template in kinds} == kinds
    assert "ignores them" in why_no_tools(words.with_chat_template(WITHOUT_TOOLS))
    assert "an unknown format of calls; supported: hermes, llama3_json, mistral, openai" in why_no_tools(
        words.with_chat_template(UNKNOWN)
    )
    assert "ignores them" in why_no_tools(words.with_chat_template("{{ pitools }}"))


def test_an_id_depends_on_the_answer_its_choice_and_the_place_of_the_call(words: Tokenizer) -> None:
    patterns = dict.fromkeys((HERMES, LLAMA), "call_[0-9a-f]{24}")
    for template, pattern in (patterns | dict.fromkeys((MISTRAL_LIST, MISTRAL_NAMED), "[0-9a-f]{9}")).items():
        format_ = tool_format(words.with_chat_template(template))
        assert format_ is not None
        ids = [format_.call_id(*parts) for parts in (("a", 0, 0), ("b", 0, 0), ("a", 1, 0), ("a", 0, 1), ("a", 1, 1))]
        assert len(set(ids)) == 5
        assert all(re.fullmatch(pattern, one) for one in ids)
        assert format_.call_id("a", 1, 0) == ids[2]
        assert format_.call_id("a", 11, 1) != format_.call_id("a", 1, 11)


# --- the choice of tools ----------------------------------------------------------------------------------------------


def test_the_choice_says_whether_which_and_how_many_tools_are_called() -> None:
    choices = TypeAdapter(ChatToolChoice)

    def chosen(choice: Any, parallel: bool | None = None) -> tuple[bool, Any, bool] | None:
        made = tool_use([ONE, TWO], None if choice is None else choices.validate_python(choice), parallel=parallel)
        return None if made is None else (made.is_required, made.allowed, made.at_most_one)

    def allowed(mode: str, *names: str) -> dict[str, Any]:
        tools = [{"type": "function", "function": {"name": name}} for name in names]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}

    named = {"type": "function", "function": {"name": "two"}}
    assert chosen(None) == chosen("auto") == chosen("auto", True) == (False, None, False)
    assert chosen("auto", False) == (False, None, True)
    assert chosen("required") == (True, None, False)
    assert chosen("required", False) == (True, None, True)
    assert chosen("none") is None
    assert chosen(named) == chosen(named, True) == (True, ["two"], True)
    assert chosen(allowed("auto", "two")) == (False, ["two"], False)
    assert chosen(allowed("required", "one", "two")) == (True, ["one", "two"], False)
    for choice, message in (
        (allowed("auto", "one", "x"), "tool_choice names 'x'; accepted: 'one', 'two'"),
        ({"type": "function", "function": {"name": "x"}}, "tool_choice names 'x'; accepted: 'one', 'two'"),
    ):
        with pytest.raises(FieldError, match=message) as raised:
            chosen(choice)
        assert raised.value.field == "tool_choice"
    nobody = NamedTool.model_validate(named)
    with pytest.raises(FieldError, match=r"names 'two'; accepted: no name, because the request has no tools"):
        tool_use([], nobody, parallel=None)
    assert tool_use([], "auto", parallel=None) is tool_use([], None, parallel=None) is None
    with pytest.raises(FieldError, match="'required' and the request has no tools") as raised:
        tool_use([], "required", parallel=None)
    assert raised.value.field == "tool_choice"
    many = [ONE.model_copy(update={"name": f"t{number}"}) for number in range(9)]
    with pytest.raises(FieldError, match=r"accepted: 't0', .*'t7'$"):
        tool_use(many, nobody, parallel=None)
    assert use(ONE, TWO).callable == [ONE, TWO]
    assert use(ONE, TWO, allowed=["two"]).callable == [TWO]
    assert AllowedToolsChoice.model_validate(allowed("auto", "two")).choice().names == ["two"]


def test_a_tool_reaches_the_template_without_what_it_lacks() -> None:
    assert TWO.for_template() == {"type": "function", "function": {"name": "two"}}
    assert THREE.for_template() == {"type": "function", "function": {"name": "three", "parameters": NUMBER}}


# --- readers of answers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("written", FORMS, indirect=True, scope="module")
def test_an_answer_is_read_whole_and_token_by_token(written: Written) -> None:
    form, format_, tokenizer = written
    said = "" if form == "llama" else "I look. é"
    text = said + calls(form, ("one", SEVEN), ("two", "{}"))
    tokens = tokenizer.encode(text, add_special_tokens=False)
    shown = tokenizer.decode(tokens, skip_special_tokens=True)
    pairs = [Call("one", SEVEN), Call("two", "{}")]
    for one in (False, True):
        read = AnswerReader(tokenizer, format_, use(ONE, TWO, one=one)).read(tokens, shown)
        assert read == Answer(said, pairs[:1] if one else pairs)
        reader, stream, content = AnswerReader(tokenizer, format_, use(ONE, TWO, one=one)), tokenizer.stream(), ""
        got, known = list[Call](), ""
        for token in (*tokens, None):
            if token is None:
                parts = reader.finish()
            else:
                before, known = known, stream.add(token)
                parts = reader.add(token, known[len(before) :])
            for part in parts:
                match part:
                    case Content(added):
                        content += added
                    case CallBegins(index, name):
                        assert index == len(got)
                        got.append(Call(name, ""))
                    case Arguments(index, added):
                        got[index] = Call(got[index].name, got[index].arguments + added)
        assert (content, got, reader.calls) == (said, pairs[:1] if one else pairs, 1 if one else 2)


def test_a_mark_that_nobody_sees_is_put_back_where_it_was(marked: Tokenizer) -> None:
    format_ = tool_format(marked.with_chat_template(MISTRAL_NAMED))
    assert format_ is not None
    assert format_.marks.hidden == {514: "[TOOL_CALLS]"}
    tokens = [*marked.encode("é"), 514, *marked.encode("one[ARGS]{}"), 514, *marked.encode("two[ARGS]{}")]
    reader = AnswerReader(marked, format_, use(ONE))
    assert reader.read(tokens, "éone[ARGS]{}two[ARGS]{}") == Answer("é", [Call("one", "{}"), Call("two", "{}")])


def test_long_answers_are_read_in_pieces(words: Tokenizer) -> None:
    format_ = tool_format(words.with_chat_template(HERMES))
    assert format_ is not None
    for length in (4095, 4096, 4097, 9001):
        text = "x" * length + f'<tool_call>{{"name": "a", "arguments": {json.dumps({"b": "y" * length})}}}</tool_call>'
        answer = AnswerReader(words, format_, use(ONE)).read([], text)
        assert answer == Answer("x" * length, [Call("a", json.dumps({"b": "y" * length}))])
