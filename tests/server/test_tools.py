"""Chats with tools: OpenAI's client gets calls that follow what it asked for, and the same ones whole and streamed."""

import json
import unittest.mock
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

import openai
import pytest

from detjax.engine import Completion, Engine, Generation, Request, Token
from detjax.models import Decoder, Tokenizer
from detjax.server.tools.definitions import ChatTool
from tests.server.running_server import MODEL, Running, serving
from tests.server.tool_models import HERMES, NOW, TEMPLATES, UNKNOWN, WEATHER, WITHOUT_TOOLS, with_marks

MESSAGES: Any = [{"role": "user", "content": "How is the weather?"}]
ASKED: Any = {"model": MODEL, "messages": MESSAGES, "tools": [WEATHER, NOW], "max_tokens": 250, "temperature": 1}
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
JSON: Any = {
    "type": "json_schema",
    "json_schema": {
        "name": "x",
        "schema": {
            "type": "object",
            "properties": {"n": {"const": 7}},
            "required": ["n"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def marked(loaded: tuple[Decoder, Tokenizer]) -> Tokenizer:
    return with_marks(loaded[1])


@pytest.fixture(scope="module")
def marked_engine(loaded: tuple[Decoder, Tokenizer], marked: Tokenizer) -> Iterator[Engine]:
    with Engine(loaded[0], marked, max_samples=16, token_budget=64, max_length=400) as one:
        yield one


@pytest.fixture(scope="module", params=[*TEMPLATES, "plain hermes", "plain mistral named"])
def running(
    request: pytest.FixtureRequest, loaded: tuple[Decoder, Tokenizer], marked: Tokenizer, marked_engine: Engine
) -> Iterator[Running]:
    """A server for each format, with marks as tokens of their own or, if plain, as text."""
    name = request.param
    is_plain = name.startswith("plain")
    tokenizer = (loaded[1] if is_plain else marked).with_chat_template(TEMPLATES[name.removeprefix("plain ")])
    engine = request.getfixturevalue("engine") if is_plain else marked_engine
    with serving(engine, (loaded[0], tokenizer)) as one:
        yield one


@pytest.fixture(scope="module")
def tooled(loaded: tuple[Decoder, Tokenizer], marked: Tokenizer, marked_engine: Engine) -> Iterator[openai.OpenAI]:
    """A client of a server with Qwen's format."""
    with serving(marked_engine, (loaded[0], marked.with_chat_template(HERMES))) as one, one.client() as client:
        yield client


def calls_of(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]


def streamed(client: Any, **asked: Any) -> tuple[str, list[tuple[str, str]], str | None, list[str]]:
    """The content, the calls, the reason of the end and the ids of the calls of a stream of one choice."""
    content, calls, ids, reason = "", list[list[str]](), list[str](), None
    for chunk in client.chat.completions.create(stream=True, **asked):
        (choice,) = chunk.choices
        assert reason is None
        reason = choice.finish_reason
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or ():
            if call.id is not None:
                assert (call.index, call.type, call.function.arguments) == (len(calls), "function", "")
                calls.append([call.function.name, ""])
                ids.append(call.id)
            else:
                calls[call.index][1] += call.function.arguments
    return content, [(name, arguments) for name, arguments in calls], reason, ids


def check_weather(arguments: str) -> None:
    value = json.loads(arguments)
    assert value.keys() == {"city", "days"}
    assert value["city"] in ("Verona", "Mantua")
    assert 0 <= value["days"] <= 9


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(3))
def test_a_required_call_follows_its_schema_in_every_format(running: Running, seed: int) -> None:
    asked = ASKED | {"tool_choice": "required", "parallel_tool_calls": False, "seed": seed}
    with running.client() as client:
        (choice,) = client.chat.completions.create(**asked).choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        ((name, arguments),) = calls_of(choice.message)
        assert name in ("weather", "now")
        if name == "now":
            assert json.loads(arguments) == {}
        else:
            check_weather(arguments)
        content, calls, reason, ids = streamed(client, **asked)
    assert (content, calls, reason) == ("", [(name, arguments)], "tool_calls")
    assert len(ids) == 1


@pytest.mark.sampled(2)
def test_a_named_tool_is_called_in_every_format(running: Running) -> None:
    asked = ASKED | {"tool_choice": NAMED, "n": 3}
    with running.client() as client:
        choices = client.chat.completions.create(**asked).choices
    for choice in choices:
        ((name, arguments),) = calls_of(choice.message)
        assert name == "weather"
        check_weather(arguments)
    assert len({choice.message.tool_calls[0].id for choice in choices}) == 3


@pytest.mark.sampled(1)
def test_strict_tools_and_content_of_a_form_are_kept_where_the_answer_is_free(running: Running) -> None:
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    with running.client() as client:
        for seed in range(3):
            asked = ASKED | {"tools": [strict], "seed": seed, "max_tokens": 60}
            (choice,) = client.chat.completions.create(**asked).choices
            for _, arguments in calls_of(choice.message)[: None if choice.finish_reason == "tool_calls" else -1]:
                check_weather(arguments)
            content, calls, _, _ = streamed(client, **asked)
            assert (content, calls) == (choice.message.content or "", calls_of(choice.message))


def test_content_of_a_form_may_stand_in_place_of_calls(tooled: openai.OpenAI) -> None:
    kinds = set[str]()
    for seed in range(2):
        (choice,) = tooled.chat.completions.create(**ASKED, response_format=JSON, seed=seed).choices
        kinds.add(choice.finish_reason)
        if choice.finish_reason == "stop":
            assert json.loads(choice.message.content)["n"] == 7
    assert kinds <= {"stop", "tool_calls", "length"}
    required = tooled.chat.completions.create(**ASKED, response_format=JSON, tool_choice=NAMED).choices[0]
    check_weather(calls_of(required.message)[0][1])


def test_answers_that_must_not_call_are_those_without_tools(tooled: openai.OpenAI) -> None:
    asked = ASKED | {"max_tokens": 12}
    plain = tooled.chat.completions.create(**{name: value for name, value in asked.items() if name != "tools"})
    none = tooled.chat.completions.create(**asked, tool_choice="none")
    assert none.choices[0].message == plain.choices[0].message
    assert none.usage == plain.usage


def test_the_template_gets_tools_and_calls_and_results(
    tooled: openai.OpenAI, marked: Tokenizer, marked_engine: Engine
) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Verona"}'}}
    messages: Any = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Sunny"},
    ]
    usage = tooled.chat.completions.create(**ASKED | {"messages": messages, "max_tokens": 1}).usage
    given = {"name": "weather", "arguments": {"city": "Verona"}}
    expected = [
        MESSAGES[0],
        {"role": "assistant", "content": "", "tool_calls": [{"function": given}]},
        {"role": "tool", "content": "Sunny"},
    ]
    template = marked.with_chat_template(HERMES)
    text = template.apply_chat_template(expected, tools=[WEATHER, NOW])
    assert 'arguments": {"city": "Verona"}}' in text
    assert usage is not None
    assert usage.prompt_tokens == len(marked.encode(text, add_special_tokens=False))


def test_tools_reach_the_template_as_it_expects_them() -> None:
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    assert [ChatTool(**tool).function.for_template() for tool in (strict, NOW)] == [WEATHER, NOW]


def answering(engine: Engine, tokenizer: Tokenizer, text: str, reason: str = "stop") -> Any:
    """A context in which the engine answers everything with a text."""
    tokens = tokenizer.encode(text, add_special_tokens=False)
    stream = tokenizer.stream()
    pieces, shown = list[str](), ""
    for token in tokens:
        known = stream.add(token)
        pieces.append(known[len(shown) :])
        shown = known

    async def generate_async(requests: Sequence[Request]) -> list[Generation]:
        logprobs = (-1.0,) * len(tokens)
        return [Generation((1,), (Completion(tuple(tokens), logprobs, ((),) * len(tokens), shown, reason),))]

    async def stream_all(requests: Sequence[Request]) -> AsyncGenerator[tuple[int, Token]]:
        for index, (token, piece) in enumerate(zip(tokens, pieces, strict=True)):
            is_last = index == len(tokens) - 1
            yield 0, Token(0, token, -1.0, (), piece, reason if is_last else None, 1)

    return unittest.mock.patch.multiple(engine, generate_async=generate_async, stream_all=stream_all)


TWO: dict[str, str] = {
    "hermes": 'I look.\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n<tool_call>\n'
    '{"name": "weather", "arguments": {"city": "V"}}\n</tool_call>',
    "mistral list": 'I look.[TOOL_CALLS] [{"name": "now", "arguments": {}}, '
    '{"name": "weather", "arguments": {"city": "V"}}]',
    "mistral named": 'I look.[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]weather[ARGS]{"city": "V"}',
}


@pytest.mark.parametrize("form", TWO)
def test_calls_are_read_whole_and_streamed(
    loaded: tuple[Decoder, Tokenizer], marked: Tokenizer, marked_engine: Engine, form: str
) -> None:
    tokenizer = marked.with_chat_template(TEMPLATES[form])
    expected = [("now", "{}"), ("weather", '{"city": "V"}')]
    with serving(marked_engine, (loaded[0], tokenizer)) as one, one.client() as client:
        with answering(marked_engine, tokenizer, TWO[form]):
            whole = client.chat.completions.create(**ASKED, logprobs=True)
            (choice,) = whole.choices
            assert (choice.message.content, calls_of(choice.message)) == ("I look.", expected)
            assert choice.finish_reason == "tool_calls"
            assert len(choice.logprobs.content) == len(tokenizer.encode(TWO[form], add_special_tokens=False))
            assert streamed(client, **ASKED)[:3] == ("I look.", expected, "tool_calls")
            ids = [call.id for call in choice.message.tool_calls]
            assert len(set(ids)) == 2
            if form.startswith("mistral"):  # whose templates take no other ids
                assert all(len(name) == 9 and name.isalnum() for name in ids)
            one_call = ASKED | {"parallel_tool_calls": False}
            assert calls_of(client.chat.completions.create(**one_call).choices[0].message) == expected[:1]
            assert streamed(client, **one_call)[1] == expected[:1]
            logged = client.chat.completions.create(**ASKED, logprobs=True, stream=True)
            counted = [len(chunk.choices[0].logprobs.content) for chunk in logged if chunk.choices[0].logprobs]
            assert sum(counted) == len(choice.logprobs.content)
        with answering(marked_engine, tokenizer, TWO[form], "length"):
            assert client.chat.completions.create(**ASKED).choices[0].finish_reason == "length"
        with answering(marked_engine, tokenizer, "No call."):
            message = client.chat.completions.create(**ASKED).choices[0].message
            assert (message.content, message.tool_calls) == ("No call.", None)


def test_ids_of_calls_are_functions_of_the_answers_id(
    loaded: tuple[Decoder, Tokenizer], marked: Tokenizer, marked_engine: Engine
) -> None:
    tokenizer = marked.with_chat_template(HERMES)
    with serving(marked_engine, (loaded[0], tokenizer)) as one, one.client() as client:
        with (
            answering(marked_engine, tokenizer, TWO["hermes"]),
            unittest.mock.patch(
                "detjax.server.api.api_calls.uuid.uuid4", return_value=unittest.mock.Mock(hex="0" * 32)
            ),
        ):
            answers = [client.chat.completions.create(**ASKED).choices[0].message for _ in range(2)]
            assert answers[0] == answers[1]
            assert streamed(client, **ASKED)[3] == [call.id for call in answers[0].tool_calls]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"tools": [{"type": "function"}]}, "tools.0.function is missing"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type is 'web_search'; accepted: 'function', because the server"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name is 'a b'"),
        ({"tools": [{"type": "function", "function": {"name": "a" * 65}}]}, "tools.0.function.name is 'aaa"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "string"}}}]},
            "tools.0.function.parameters is {'type': 'string'}; accepted: a JSON schema of type 'object'",
        ),
        ({"tools": [NOW, NOW]}, "accepted: tools with different names"),
        ({"tools": [NOW] * 129}, "at most 128 items"),
        ({"tool_choice": "any"}, "tool_choice is 'any'; accepted: 'none', 'auto', 'required', an object"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice is 'required' and the request has no tools"),
        ({"tools": [NOW], "tool_choice": NAMED}, "tool_choice names 'weather'; accepted: 'now'"),
        ({"extra_body": {"structured_outputs": {"regex": "a"}}}, "structured_outputs and tools are given"),
        ({"functions": [{"name": "a"}]}, "functions is [{'name': 'a'}]; accepted: [] or null"),
        ({"messages": [{"role": "assistant"}]}, "content is missing or null"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{"function": {}}]}]}, "tool_calls"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "y"}]}, "accepted: with role 'tool'"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "a", "parameters": {"properties": 3}}}],
                "tool_choice": "required",
            },
            "tool 0, 'a', cannot constrain the answer: the constraint's json_schema is not valid: properties must be",
        ),
        (
            {
                "tools": [
                    WEATHER,
                    {
                        "type": "function",
                        "function": {
                            "name": "a",
                            "parameters": {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]},
                        },
                    },
                ],
                "tool_choice": "required",
            },
            "tool 1, 'a', cannot constrain the answer: the constraint's json_schema is not valid: it has no",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(tooled: openai.OpenAI, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        tooled.chat.completions.create(**ASKED | fields)
    error: Any = raised.value.body
    assert says in error["message"]
    assert "\n" not in error["message"]
    assert error["param"] in ("tools" if "tool 1" in says else error["param"], *fields, *fields.get("extra_body", {}))


@pytest.mark.parametrize(("template", "says"), [(WITHOUT_TOOLS, "ignores them"), (UNKNOWN, "an unknown format")])
def test_models_whose_templates_have_no_tools_say_so(
    engine: Engine, loaded: tuple[Decoder, Tokenizer], template: str, says: str
) -> None:
    with serving(engine, (loaded[0], loaded[1].with_chat_template(template))) as one, one.client() as client:
        with pytest.raises(openai.BadRequestError, match=says):
            client.chat.completions.create(**ASKED)
        assert client.chat.completions.create(**ASKED | {"max_tokens": 1}, tool_choice="none").choices


def test_llamas_calls_and_content_of_a_form_exclude_each_other(
    loaded: tuple[Decoder, Tokenizer], marked: Tokenizer, marked_engine: Engine
) -> None:
    tokenizer = marked.with_chat_template(TEMPLATES["llama"])
    with serving(marked_engine, (loaded[0], tokenizer)) as one, one.client() as client:
        with pytest.raises(openai.BadRequestError, match="the model writes calls as JSON too"):
            client.chat.completions.create(**ASKED, response_format=JSON)


def test_arguments_of_earlier_calls_that_are_no_objects_stay_text(tooled: openai.OpenAI) -> None:
    for arguments in ("", "[1]", '{"a": ', "[" * 100_000):
        call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": arguments[:100]}}
        messages = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}, *MESSAGES]
        assert tooled.chat.completions.create(**ASKED | {"messages": messages, "max_tokens": 1}).choices


def test_arguments_of_earlier_calls_have_a_bound(tooled: openai.OpenAI) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": '{"a":[' + "[],[]," * 50_000}}
    messages = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}, *MESSAGES]
    with pytest.raises(openai.BadRequestError, match="up to 131072 items in the arguments"):
        tooled.chat.completions.create(**ASKED | {"messages": messages})
