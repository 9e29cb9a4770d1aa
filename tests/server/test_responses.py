"""/v1/responses: OpenAI's client gets items and events as it expects them, with the answers that chats have."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from detjax.engine import Engine
from detjax.models import Decoder, Tokenizer
from tests.server.running_server import MODEL, Running, serving, streams_held
from tests.server.test_tools import TWO, answering, check_weather
from tests.server.tool_models import HERMES, NOW, WEATHER, with_marks

TOOLS: Any = [{"type": "function"} | tool["function"] for tool in (WEATHER, NOW)]
ASKED: Any = {"model": MODEL, "input": "How is the weather?", "max_output_tokens": 8}
NAMED: Any = {"type": "function", "name": "weather"}
SCHEMA: Any = {
    "type": "object",
    "properties": {"n": {"const": 7}},
    "required": ["n"],
    "additionalProperties": False,
}
TEXT: Any = {"format": {"type": "json_schema", "name": "number", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def marked(loaded: tuple[Decoder, Tokenizer]) -> Tokenizer:
    return with_marks(loaded[1]).with_chat_template(HERMES)


@pytest.fixture(scope="module")
def marked_engine(loaded: tuple[Decoder, Tokenizer], marked: Tokenizer) -> Iterator[Engine]:
    with Engine(loaded[0], marked, max_samples=16, token_budget=64, max_length=400) as one:
        yield one


@pytest.fixture(scope="module")
def tooled(loaded: tuple[Decoder, Tokenizer], marked: Tokenizer, marked_engine: Engine) -> Iterator[Any]:
    """A client of a server with tools."""
    with serving(marked_engine, (loaded[0], marked)) as one, one.client() as client:
        yield client


def without_ids(response: Any) -> Any:
    """A response without what differs from one answer to the same request to the next."""
    content = response.model_dump(exclude={"id", "created_at", "completed_at"})
    for item in content["output"]:
        del item["id"]
        item.pop("call_id", None)
    return content


@pytest.mark.parametrize("temperature", [0, 1])
def test_an_answer_is_the_chats(client: openai.OpenAI, temperature: float) -> None:
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]
    given: Any = {"model": MODEL, "temperature": temperature}
    chat = client.chat.completions.create(messages=messages, max_completion_tokens=8, **given)
    asked: Any = given | {"instructions": "Be brief.", "max_output_tokens": 8}
    for form in ("Who?", [messages[1]], [messages[1] | {"content": [{"type": "input_text", "text": "Who?"}]}]):
        response = client.responses.create(input=form, **asked)
        assert response.output_text == chat.choices[0].message.content
        assert response.usage is not None and chat.usage is not None
        assert response.usage.input_tokens == chat.usage.prompt_tokens
        assert response.usage.output_tokens == chat.usage.completion_tokens
    (item,) = response.output
    assert (response.status, item.status) == ("incomplete", "incomplete")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.to_dict()["store"] is False
    assert response.to_dict()["system_fingerprint"] == chat.system_fingerprint


def test_a_stream_ends_with_the_whole_answer(client: openai.OpenAI) -> None:
    whole = client.responses.create(**ASKED, metadata={"a": "b"}, store=True)
    events = list(client.responses.create(**ASKED, metadata={"a": "b"}, store=True, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert kinds == [
        *("response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"),
        *["response.output_text.delta"] * len(deltas),
        *("response.output_text.done", "response.content_part.done", "response.output_item.done"),
        "response.incomplete",
    ]
    assert "".join(event.delta for event in deltas) == whole.output_text
    last: Any = events[-1]
    assert without_ids(last.response) == without_ids(whole)
    assert whole.metadata == {"a": "b"}
    assert events[0].response.output == []  # type: ignore
    assert last.response.output[0].id == deltas[0].item_id


def test_a_required_call_follows_its_schema(tooled: Any) -> None:
    asked = ASKED | {"tools": TOOLS, "tool_choice": NAMED, "max_output_tokens": 200}
    whole = tooled.responses.create(**asked)
    (call,) = whole.output
    assert (call.type, call.name, whole.status) == ("function_call", "weather", "completed")
    check_weather(call.arguments)
    events = list(tooled.responses.create(**asked, stream=True))
    assert without_ids(events[-1].response) == without_ids(whole)
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert "".join(deltas) == call.arguments == done.arguments
    assert (events[2].type, events[2].item.arguments) == ("response.output_item.added", "")
    later = [{"role": "user", "content": "How is it?"}, *events[-1].response.output]
    later += [{"type": "function_call_output", "call_id": events[2].item.call_id, "output": "Sunny"}]
    assert tooled.responses.create(**ASKED | {"input": later}, tools=TOOLS).output


def test_the_prompt_is_that_of_the_chat_with_the_same_calls(tooled: Any) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Verona"}'}}
    messages: Any = [
        {"role": "user", "content": "How?"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "c1", "content": "Sunny"},
    ]
    chat = tooled.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER, NOW], max_tokens=4)
    item = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Verona"}'}
    items: Any = [
        messages[0],
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        item,
        item,
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "Sunny"}]},
    ]
    response = tooled.responses.create(model=MODEL, input=items, tools=TOOLS, max_output_tokens=4)
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.output_text == chat.choices[0].message.content


def test_text_and_calls_are_items_in_their_order(tooled: Any, marked: Tokenizer, marked_engine: Engine) -> None:
    with answering(marked_engine, marked, TWO["hermes"] + "\nDone."):
        whole = tooled.responses.create(**ASKED, tools=TOOLS)
        assert [item.type for item in whole.output] == ["message", "function_call", "function_call", "message"]
        assert [part.text for item in (whole.output[0], whole.output[3]) for part in item.content] == [
            "I look.",
            "Done.",
        ]
        assert len({item.id for item in whole.output}) == 4
        *_, last = tooled.responses.create(**ASKED, tools=TOOLS, stream=True)
        assert last.type == "response.completed"
        assert without_ids(last.response) == without_ids(whole)
        one = tooled.responses.create(**ASKED, tools=TOOLS, parallel_tool_calls=False)
        assert [item.type for item in one.output].count("function_call") == 1


def test_an_answer_follows_its_json_schema(client: openai.OpenAI) -> None:
    response = client.responses.create(**ASKED | {"text": TEXT, "max_output_tokens": 100})
    assert json.loads(response.output_text) == {"n": 7}
    assert response.text is not None
    assert response.text.to_dict() == TEXT


def test_logprobs_are_those_of_the_chat(client: openai.OpenAI) -> None:
    asked: Any = ASKED | {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    messages: Any = [{"role": "user", "content": ASKED["input"]}]
    chat = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=8, logprobs=True, top_logprobs=2)
    expected = [entry.model_dump() for entry in chat.choices[0].logprobs.content]  # type: ignore
    response: Any = client.responses.create(**asked)
    assert [entry.model_dump() for entry in response.output[0].content[0].logprobs] == expected
    streamed = [
        entry.logprob
        for event in client.responses.create(**asked, stream=True)
        if event.type == "response.output_text.delta"
        for entry in event.logprobs
    ]
    assert streamed == [entry["logprob"] for entry in expected]


def test_an_error_within_a_stream_is_an_event(engine: Engine, loaded: tuple[Decoder, Tokenizer]) -> None:
    with streams_held(engine), serving(engine, loaded, request_seconds=1) as running, running.client() as client:
        with pytest.raises(openai.APIError, match="took longer than"):
            events = client.responses.create(**ASKED | {"max_output_tokens": 300}, stream=True)
            for event in events:
                if event.type == "error":
                    raise openai.APIError(event.message, request=None, body=None)  # type: ignore


def test_responses_are_not_stored(client: openai.OpenAI) -> None:
    made = client.responses.create(**ASKED)
    for ask in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="the server stores none"):
            ask(made.id)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            {"previous_response_id": "resp_1"},
            "previous_response_id is 'resp_1'; accepted: null, because the server keeps",
        ),
        ({"conversation": "conv_1"}, "conversation is 'conv_1'; accepted: null"),
        ({"background": True}, "background is True; accepted: false or null"),
        ({"truncation": "auto"}, "truncation is 'auto'; accepted: \"disabled\" or null"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type is 'web_search'; accepted: 'function'"),
        ({"tools": TOOLS[1:], "tool_choice": NAMED}, "tool_choice names 'weather'; accepted: 'now'"),
        ({"reasoning": {"summary": "detailed"}}, 'reasoning.summary is \'detailed\'; accepted: "auto" or "none" or'),
        ({"extra_body": {"thinking_token_budget": 3}}, "thinking_token_budget is 3, and the model's chat template has"),
        ({"input": []}, "input is []"),
        ({"input": [{"type": "web_search_call"}]}, "accepted: items of type message, reasoning, function_call or"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "input.0.content.0.type is 'input_audio'",
        ),
        ({"input": 3}, "input is 3; accepted: a string, or a list of items"),
        ({"input": "word " * 2000}, "input has"),
        ({"text": {"format": {"type": "json_schema"}}}, "accepted: schema with type 'json_schema'"),
        ({"top_logprobs": 2}, "top_logprobs is given and include has no message.output_text.logprobs"),
        ({"include": ["file_search_call.results"]}, "include.0 is 'file_search_call.results'"),
        ({"max_output_tokens": 0}, "max_output_tokens is 0"),
        ({"extra_body": {"nonsense": 1}}, "there is no field nonsense"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(client: Any, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.responses.create(**ASKED | fields)
    assert says in raised.value.body["message"]  # type: ignore


def test_requests_are_counted_under_their_path(server: Running, client: openai.OpenAI) -> None:
    client.responses.create(**ASKED)
    with openai.OpenAI(base_url=server.url, api_key="x") as root:
        text = root.get("/metrics", cast_to=str)
    assert 'detjax_requests_total{path="/v1/responses",status="200"}' in str(text)
