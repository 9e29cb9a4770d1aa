"""Every field of an answer, whole and streamed, of each endpoint: written answers, compared with JSON in full."""

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any, Final
from unittest import mock

import pytest

from detjax.models import ModelMetadata, Tokenizer
from tests.server.running_server import MODEL
from tests.server.scripted import LENGTH, ORIGIN, Client, Script, scripted
from tests.server.tool_models import HERMES, MISTRAL_LIST

TIME: Final = 1_234_567_890
HEX: Final = "0123456789abcdef" * 2
MESSAGES: Final[Any] = [{"role": "user", "content": "Hi"}]
USAGE: Final[Any] = {"include_usage": True}
TOOLS: Final[Any] = [{"type": "function", "function": {"name": "now"}}]


@pytest.fixture(autouse=True)
def fixed_time_and_ids() -> Iterator[None]:
    with (
        mock.patch("detjax.server.api.api_calls.uuid.uuid4", lambda: mock.Mock(hex=HEX)),
        mock.patch("time.time", lambda: TIME + 0.75),
    ):
        yield


def envelope(api: Client, prefix: str, kind: str, choices: list[Any], **fields: Any) -> dict[str, Any]:
    head = {"id": f"{prefix}-{HEX}", "object": kind, "created": TIME, "model": MODEL}
    fingerprint = api.get("/v1/models").json()["data"][0]["system_fingerprint"]
    return head | {"system_fingerprint": fingerprint, "choices": choices} | fields


def usage(prompt: int, generated: int, cached: int = 0) -> dict[str, Any]:
    counts = {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}
    return counts | {"prompt_tokens_details": {"cached_tokens": cached}}


def completion_choice(index: int, text: str, reason: str | None = "length", logprobs: Any = None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


# Tokens 5, 6 and 7 of the tokenizer are the characters &, ' and (; 40 is I.


def test_a_whole_completion_has_the_least_fields(api: Client) -> None:
    expected = envelope(api, "cmpl", "text_completion", [completion_choice(0, "xy") | {"seed": 0}], usage=usage(3, 2))
    assert api.ask("/v1/completions", prompt=[5, 6, 7]) == expected


def test_a_whole_completion_has_every_field(api: Client) -> None:
    api.script.cached = 2
    asked: Any = {"prompt": [[5, 6, 7], [8, 9]], "n": 2, "logprobs": 1, "prompt_logprobs": 2, "echo": True, "seed": 3}
    answer = api.ask("/v1/completions", **asked, return_token_ids=True)
    choices = []
    for index, (prompt, sample) in enumerate(itertools.product(range(2), range(2))):
        tokens, echoed = ([5, 6, 7], "&'(") if prompt == 0 else ([8, 9], ")*")
        scores = [-4 - place / 8 for place in range(len(tokens) - 1)]
        logprobs = [None, *scores, -1.0 - sample, -1.125 - sample]
        texts = [*echoed, "&", "'"]
        pairs = zip(texts[1:], logprobs[1:], strict=True)
        choices.append(
            completion_choice(index, f"{echoed}xy")
            | {
                "logprobs": {
                    "tokens": texts,
                    "token_logprobs": logprobs,
                    "top_logprobs": [None, *({"I": -0.5, text: value} for text, value in pairs)],
                    "text_offset": list(range(len(texts))),
                },
                "token_ids": [5, 6],
                "prompt_token_ids": tokens,
                "prompt_logprobs": [
                    None,
                    *(
                        {
                            str(token): {"logprob": score, "decoded_token": text},
                            "40": {"logprob": -0.5, "rank": 1, "decoded_token": "I"},
                            "41": {"logprob": -1.25, "rank": 2, "decoded_token": "J"},
                        }
                        for token, score, text in zip(tokens[1:], scores, echoed[1:], strict=True)
                    ),
                ],
                "seed": 3,
            }
        )
    assert answer == envelope(api, "cmpl", "text_completion", choices, usage=usage(5, 8, 4))


def test_logprobs_of_an_answer_alone_have_none_of_the_prompt(api: Client) -> None:
    (choice,) = api.ask("/v1/completions", prompt=[5, 6, 7], logprobs=0)["choices"]
    assert choice["logprobs"] == {
        "tokens": ["&", "'"],
        "token_logprobs": [-1.0, -1.125],
        "top_logprobs": None,
        "text_offset": [0, 1],
    }
    (choice,) = api.ask("/v1/completions", prompt=[5, 6, 7], echo=True)["choices"]
    assert (choice["text"], choice["logprobs"]) == ("&'(xy", None)
    (choice,) = api.ask("/v1/completions", prompt=[5, 6, 7], logprobs=1, prompt_logprobs=3)["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"I": -0.5, "&": -1.0}, {"I": -0.5, "'": -1.125}]
    assert [entry and len(entry) for entry in choice["prompt_logprobs"]] == [None, 4, 4]


def test_a_prompt_that_is_only_scored_has_no_answer(api: Client) -> None:
    asked: Any = {"prompt": [5, 6, 7], "max_tokens": 0, "echo": True, "return_token_ids": True}
    logprobs = {
        "tokens": ["&", "'", "("],
        "token_logprobs": [None, -4.0, -4.125],
        "top_logprobs": [None, {"I": -0.5, "'": -4.0}, {"I": -0.5, "(": -4.125}],
        "text_offset": [0, 1, 2],
    }
    ids = {"token_ids": [], "prompt_token_ids": [5, 6, 7], "seed": 0}
    scored = completion_choice(0, "&'(", logprobs=logprobs) | ids
    expected = envelope(api, "cmpl", "text_completion", [scored], usage=usage(3, 0))
    assert api.ask("/v1/completions", **asked, logprobs=1) == expected
    api.script.tokens, api.script.texts = [5], ["x"]
    chunks = api.ask("/v1/completions", **asked, stream=True, stream_options=USAGE)
    assert [chunk["choices"] for chunk in chunks] == [
        [completion_choice(0, "&'(", None) | {"token_ids": [], "prompt_token_ids": [5, 6, 7]}],
        [completion_choice(0, "") | {"seed": 0}],
        [],
    ]
    assert chunks[-1]["usage"] == usage(3, 0)


def test_a_streamed_completion_has_every_field(api: Client) -> None:
    api.script.cached = 2
    asked: Any = {"prompt": [[5, 6, 7], [8, 9]], "logprobs": 1, "return_token_ids": True, "seed": 3, "stream": True}
    options = USAGE | {"continuous_usage_stats": True, "include_batch": True}
    chunks = api.ask("/v1/completions", **asked, stream_options=options)

    def expected(choices: list[Any], generated: int, cached: int, **fields: Any) -> dict[str, Any]:
        return envelope(api, "cmpl", "text_completion", choices, usage=usage(5, generated, cached)) | fields

    def token(index: int, text: str, place: int) -> dict[str, Any]:
        shown = "&'"[place]
        logprobs = {
            "tokens": [shown],
            "token_logprobs": [-1.0 - place / 8],
            "top_logprobs": [{"I": -0.5, shown: -1.0 - place / 8}],
            "text_offset": [place],
        }
        choice = completion_choice(index, text, "length" if place else None, logprobs) | {"token_ids": [5 + place]}
        return choice | ({"seed": 3} if place else {})

    begins = [
        completion_choice(index, "", None) | {"token_ids": [], "prompt_token_ids": prompt}
        for index, prompt in enumerate(asked["prompt"])
    ]
    assert chunks == [
        expected([begins[0]], 0, 0),
        expected([begins[1]], 0, 0),
        expected([token(0, "x", 0)], 1, 2, batch=3),
        expected([token(0, "y", 1)], 2, 2, batch=3),
        expected([token(1, "x", 0)], 3, 4, batch=3),
        expected([token(1, "y", 1)], 4, 4, batch=3),
        expected([], 4, 4),
    ]


def test_options_of_a_stream_have_no_effect_without_their_own_field(api: Client) -> None:
    asked: Any = {"prompt": [5, 6, 7], "stream": True}
    plain = api.ask("/v1/completions", **asked)
    assert [chunk["choices"] for chunk in plain] == [
        [completion_choice(0, "x", None)],
        [completion_choice(0, "y") | {"seed": 0}],
    ]
    assert not any({"usage", "batch"} & chunk.keys() for chunk in plain)
    counted = api.ask("/v1/completions", **asked, stream_options=USAGE)
    assert [chunk["usage"] for chunk in counted] == [None, None, usage(3, 2)]
    for options in ({"continuous_usage_stats": True}, {"include_usage": False}, {"include_batch": False}, {}):
        assert api.ask("/v1/completions", **asked, stream_options=options) == plain, options
    echoed = api.ask("/v1/completions", **asked, echo=True)
    assert [chunk["choices"][0]["text"] for chunk in echoed] == ["&'(", "x", "y"]


def test_tokens_without_text_have_no_chunk_unless_they_tell_something(api: Client) -> None:
    api.script.tokens, api.script.texts = [5, 6, 7], ["", "x", ""]
    asked: Any = {"stream": True}
    for path, first in (("/v1/completions", 0), ("/v1/chat/completions", 1)):
        prompt: Any = {"messages": MESSAGES} if first else {"prompt": [5]}
        chunks = api.ask(path, **prompt, **asked)
        assert len(chunks) == 2 + first
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        logged: Any = {"logprobs": True} if first else {"logprobs": 0}
        assert len(api.ask(path, **prompt, **asked, **logged)) == 3 + first
        assert len(api.ask(path, **prompt, **asked, return_token_ids=True)) == 4


def scored(place: int, sample: int = 0, top: int = 0) -> dict[str, Any]:
    """The logprob of a token in the format of chats."""

    def entry(text: str, logprob: float) -> dict[str, Any]:
        return {"token": text, "logprob": logprob, "bytes": [ord(text)]}

    likeliest = [entry("I", -0.5), entry("J", -1.25), entry("K", -2.0)][:top]
    return entry("&'"[place], -1.0 - sample - place / 8) | {"top_logprobs": likeliest}


def test_a_whole_chat_has_the_least_fields(api: Client) -> None:
    answer = api.ask("/v1/chat/completions", messages=MESSAGES)
    prompt = len(api.script.asked[-1].prompt)
    message = {"role": "assistant", "content": "xy", "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "length", "seed": 0}
    assert answer == envelope(api, "chatcmpl", "chat.completion", [choice], usage=usage(prompt, 2))


def test_a_whole_chat_has_every_field(api: Client) -> None:
    api.script.cached = 2
    asked: Any = {"messages": MESSAGES, "n": 2, "logprobs": True, "top_logprobs": 1, "prompt_logprobs": 2, "seed": 3}
    answer = api.ask("/v1/chat/completions", **asked, return_token_ids=True)
    prompt = [*api.script.asked[-1].prompt]
    choices = [
        {
            "index": sample,
            "message": {"role": "assistant", "content": "xy", "refusal": None},
            "logprobs": {"content": [scored(0, sample, 1), scored(1, sample, 1)], "refusal": None},
            "finish_reason": "length",
            "token_ids": [5, 6],
            "seed": 3,
        }
        for sample in range(2)
    ]
    logprobs = answer.pop("prompt_logprobs")
    more = {"usage": usage(len(prompt), 4, 2), "prompt_token_ids": prompt}
    assert answer == envelope(api, "chatcmpl", "chat.completion", choices, **more)
    assert len(logprobs) == len(prompt)
    assert logprobs[0] is None
    assert logprobs[2][str(prompt[2])]["logprob"] == -4.125
    assert [*logprobs[1]] == [str(prompt[1]), "40", "41"]


def test_a_streamed_chat_has_every_field(api: Client) -> None:
    asked: Any = {"messages": MESSAGES, "n": 2, "logprobs": True, "top_logprobs": 1, "seed": 3}
    options = USAGE | {"include_batch": True}
    chunks = api.ask("/v1/chat/completions", **asked, return_token_ids=True, stream=True, stream_options=options)
    prompt = [*api.script.asked[-1].prompt]

    def expected(choice: dict[str, Any], **fields: Any) -> dict[str, Any]:
        return envelope(api, "chatcmpl", "chat.completion.chunk", [choice], usage=None) | fields

    begin = {"delta": {"role": "assistant", "content": "", "refusal": None}, "logprobs": None, "finish_reason": None}

    def token(sample: int, place: int) -> dict[str, Any]:
        logprobs = {"content": [scored(place, sample, 1)], "refusal": None}
        end = {"finish_reason": "length", "seed": 3} if place else {"finish_reason": None}
        choice = {"index": sample, "delta": {"content": "xy"[place]}, "logprobs": logprobs, "token_ids": [5 + place]}
        return expected(choice | end, batch=3)

    assert chunks == [
        *(expected({"index": sample} | begin, prompt_token_ids=prompt) for sample in range(2)),
        *(token(sample, place) for sample in range(2) for place in range(2)),
        envelope(api, "chatcmpl", "chat.completion.chunk", [], usage=usage(len(prompt), 4)),
    ]


# --- responses --------------------------------------------------------------------------------------------------------


def response(api: Client, status: str, output: list[Any], counts: Any, **fields: Any) -> dict[str, Any]:
    details = {"reason": "max_output_tokens"} if status == "incomplete" else None
    return {
        "id": f"resp_{HEX}",
        "object": "response",
        "created_at": TIME,
        "completed_at": TIME if status == "completed" else None,
        "status": status,
        "error": None,
        "incomplete_details": details,
        "model": MODEL,
        "system_fingerprint": api.get("/v1/models").json()["data"][0]["system_fingerprint"],
        "output": output,
        "usage": counts,
        "instructions": None,
        "max_output_tokens": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "background": False,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": 1.0,
        "seed": 0,
        "top_p": 1.0,
        "top_logprobs": 0,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "truncation": "disabled",
    } | fields


def counted(prompt: int, generated: int, cached: int = 0) -> dict[str, Any]:
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": generated,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + generated,
    }


def text_part(text: str, logprobs: Any = ()) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": [*logprobs]}


def message_item(status: str, content: list[Any], number: int = 0) -> dict[str, Any]:
    head = {"id": f"msg_{HEX}_{number}", "status": status, "type": "message"}
    return head | {"role": "assistant", "content": content}


@pytest.mark.parametrize(("reason", "status"), [("length", "incomplete"), ("stop", "completed")])
def test_a_whole_response_has_the_least_fields(api: Client, reason: str, status: str) -> None:
    api.script.reason = reason
    answer = api.ask("/v1/responses", input="Hi")
    prompt = len(api.script.asked[-1].prompt)
    assert answer == response(api, status, [message_item(status, [text_part("xy")])], counted(prompt, 2))


def test_a_response_repeats_the_fields_of_its_request(api: Client) -> None:
    api.script.cached, api.script.reason = 2, "stop"
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    repeated: dict[str, Any] = {
        "instructions": "Be brief.",
        "max_output_tokens": 9,
        "metadata": {"a": "b"},
        "temperature": 0.5,
        "seed": 3,
        "top_p": 0.25,
        "top_logprobs": 1,
        "text": {"format": form},
    }
    logged: Any = {"include": ["message.output_text.logprobs"]}
    answer = api.ask("/v1/responses", input="Hi", **repeated, **logged)
    prompt = len(api.script.asked[-1].prompt)
    item = message_item("completed", [text_part("xy", [scored(0, top=1), scored(1, top=1)])])
    assert answer == response(api, "completed", [item], counted(prompt, 2, 2), **repeated)
    whole = api.ask("/v1/responses", input="Hi", parallel_tool_calls=False, tool_choice="none")
    assert (whole["parallel_tool_calls"], whole["tool_choice"]) == (False, "none")
    assert whole["text"] == {"format": {"type": "text"}}
    assert whole["output"][0]["content"] == [text_part("xy")]


def test_a_streamed_response_has_every_event(api: Client) -> None:
    api.script.texts = ["", "xy"]
    asked: Any = {"input": "Hi", "include": ["message.output_text.logprobs"], "top_logprobs": 1}
    raw = api.post("/v1/responses", json={"model": MODEL, "stream": True} | asked).text
    prompt = len(api.script.asked[-1].prompt)
    begun = response(api, "in_progress", [], None, top_logprobs=1)
    place = {"output_index": 0, "item_id": f"msg_{HEX}_0", "content_index": 0}
    item = message_item("incomplete", [text_part("xy")])
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
        {"type": "response.output_item.added", "output_index": 0, "item": message_item("in_progress", [])},
        {"type": "response.content_part.added", "part": text_part("")} | place,
        {"type": "response.output_text.delta", "delta": "xy", "logprobs": [scored(0, top=1), scored(1, top=1)]} | place,
        {"type": "response.output_text.done", "text": "xy", "logprobs": []} | place,
        {"type": "response.content_part.done", "part": text_part("xy")} | place,
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {
            "type": "response.incomplete",
            "response": response(api, "incomplete", [item], counted(prompt, 2), top_logprobs=1),
        },
    ]
    parts = [part for part in raw.split("\n\n") if part]
    assert raw.endswith("\n\n") and "[DONE]" not in raw
    assert [part.split("\n")[0] for part in parts] == [f"event: {event['type']}" for event in events]
    got = [json.loads(part.split("\n", 1)[1].removeprefix("data: ")) for part in parts]
    assert got == [event | {"sequence_number": number} for number, event in enumerate(events)]


def test_an_answer_without_a_token_of_text_is_an_empty_message(api: Client) -> None:
    api.script.texts, api.script.reason = [None, None], "stop"
    whole = api.ask("/v1/responses", input="Hi")
    assert whole["output"] == [message_item("completed", [text_part("")])]
    events = api.ask("/v1/responses", input="Hi", stream=True)
    assert [event["type"].removeprefix("response.") for event in events] == [
        *("created", "in_progress", "output_item.added", "content_part.added", "output_text.done"),
        *("content_part.done", "output_item.done", "completed"),
    ]
    assert events[-1]["response"] == whole
    assert api.ask("/v1/completions", prompt=[5])["choices"][0]["text"] == ""
    assert api.ask("/v1/chat/completions", messages=MESSAGES)["choices"][0]["message"]["content"] == ""


# --- calls of tools ---------------------------------------------------------------------------------------------------


def calling(metadata: ModelMetadata, words: Tokenizer, template: str, text: str, reason: str = "stop") -> Any:
    """A client of a server whose answers are this text, one character a token."""
    script = Script(words.encode("a") * len(text), [*text])
    script.reason = reason
    return scripted(metadata, words.with_chat_template(template), script)


@pytest.mark.parametrize(
    ("template", "text", "made"),
    [
        (HERMES, 'So.\n<tool_call>{"name": "now", "arguments": {"a": 1}}</tool_call>', r"call_[0-9a-f]{24}"),
        (MISTRAL_LIST, 'So.[TOOL_CALLS] [{"name": "now", "arguments": {"a": 1}}]', r"[0-9a-f]{9}"),
    ],
    ids=["hermes", "mistral"],
)
def test_calls_have_every_field_whole_and_streamed(
    metadata: ModelMetadata, words: Tokenizer, template: str, text: str, made: str
) -> None:
    with calling(metadata, words, template, text) as api:
        (choice,) = api.ask("/v1/chat/completions", messages=MESSAGES, tools=TOOLS)["choices"]
        (call,) = choice["message"]["tool_calls"]
        assert re.fullmatch(made, call["id"])
        function = {"name": "now", "arguments": '{"a": 1}'}
        assert choice == {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "So.",
                "refusal": None,
                "tool_calls": [{"id": call["id"], "type": "function", "function": function}],
            },
            "logprobs": None,
            "finish_reason": "tool_calls",
            "seed": 0,
        }
        chunks = api.ask("/v1/chat/completions", messages=MESSAGES, tools=TOOLS, stream=True)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        begins = [delta["tool_calls"][0] for delta in deltas if "id" in delta.get("tool_calls", [{}])[0]]
        assert begins == [{"index": 0, "id": call["id"], "type": "function", "function": function | {"arguments": ""}}]
        pieces = [delta["tool_calls"][0] for delta in deltas if "id" not in delta.get("tool_calls", [{"id": 0}])[0]]
        assert "".join(piece["function"]["arguments"] for piece in pieces) == '{"a": 1}'
        assert all(piece.keys() == {"index", "function"} and piece["index"] == 0 for piece in pieces)
        assert "".join(delta.get("content") or "" for delta in deltas) == "So."
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["tool_calls"]


def test_a_call_without_content_has_null_and_one_that_was_cut_keeps_its_reason(
    metadata: ModelMetadata, words: Tokenizer
) -> None:
    text = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    with calling(metadata, words, HERMES, text, "length") as api:
        (choice,) = api.ask("/v1/chat/completions", messages=MESSAGES, tools=TOOLS)["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (None, "length")
        assert (
            api.ask("/v1/chat/completions", messages=MESSAGES, tools=TOOLS, stream=True)[-1]["choices"][0][
                "finish_reason"
            ]
            == "length"
        )
    with calling(metadata, words, HERMES, "No call.") as api:
        (choice,) = api.ask("/v1/chat/completions", messages=MESSAGES, tools=TOOLS)["choices"]
        assert choice["message"] == {"role": "assistant", "content": "No call.", "refusal": None}
        assert choice["finish_reason"] == "stop"


def test_each_call_of_each_choice_has_an_id_of_its_own(metadata: ModelMetadata, words: Tokenizer) -> None:
    text = '<tool_call>{"name": "now", "arguments": {}}</tool_call>' * 2
    with calling(metadata, words, HERMES, text) as api:
        asked: Any = {"messages": MESSAGES, "tools": TOOLS}
        choices = api.ask("/v1/chat/completions", **asked, n=2)["choices"]
        ids = [call["id"] for choice in choices for call in choice["message"]["tool_calls"]]
        assert len(set(ids)) == 4
        chunks = api.ask("/v1/chat/completions", **asked, n=2, stream=True)
        calls = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", ())]
        assert [call["id"] for call in calls if "id" in call] == ids
        assert [call["index"] for call in calls if "id" in call] == [0, 1, 0, 1]
        one = api.ask("/v1/chat/completions", **asked, parallel_tool_calls=False)["choices"][0]["message"]
        assert [call["id"] for call in one["tool_calls"]] == ids[:1]


def test_calls_of_a_response_have_every_event(metadata: ModelMetadata, words: Tokenizer) -> None:
    text = 'So.\n<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    tools: Any = [{"type": "function", "name": "now", "description": "d", "strict": True}]
    asked: Any = {"input": "Hi", "tools": tools, "tool_choice": {"type": "function", "name": "now"}}
    with calling(metadata, words, HERMES, text) as api:
        whole = api.ask("/v1/responses", **asked)
        message, call = whole["output"]
        assert message == message_item("completed", [text_part("So.")])
        assert re.fullmatch(r"call_[0-9a-f]{24}", call["call_id"])
        ended = {"id": f"fc_{HEX}_1", "status": "completed", "type": "function_call", "call_id": call["call_id"]}
        ended |= {"name": "now", "arguments": "{}"}
        assert call == ended
        assert whole["tools"] == [tools[0] | {"parameters": None}]
        assert whole["tool_choice"] == asked["tool_choice"]
        events = api.ask("/v1/responses", **asked, stream=True)
        place = {"output_index": 1, "item_id": ended["id"]}
        kept = [event for event in events if event.get("output_index") == 1]
        added = ended | {"status": "in_progress", "arguments": ""}
        deltas = [event for event in kept if event["type"] == "response.function_call_arguments.delta"]
        assert "".join(event["delta"] for event in deltas) == "{}"
        assert all(place.items() <= event.items() for event in deltas)
        numbered = [{name: value for name, value in event.items() if name != "sequence_number"} for event in kept]
        assert [event for event in numbered if not event["type"].endswith(".delta")] == [
            {"type": "response.output_item.added", "output_index": 1, "item": added},
            {"type": "response.function_call_arguments.done", "name": "now", "arguments": "{}"} | place,
            {"type": "response.output_item.done", "output_index": 1, "item": ended},
        ]
        assert events[-1]["type"] == "response.completed"
        assert events[-1]["response"] == whole
        assert [event["sequence_number"] for event in events] == list(range(len(events)))


# --- receipts and seeds -----------------------------------------------------------------------------------------------


def test_receipts_say_what_was_asked_and_answered(api: Client) -> None:
    asked: Any = {"prompt": [[5, 6, 7], [8, 9]], "n": 2, "receipt": True, "seed": 3, "top_k": 7, "logprobs": 1}
    choices = api.ask("/v1/completions", **asked)["choices"]
    for index, choice in enumerate(choices):
        receipt = choice["receipt"]
        assert receipt["prompt"] == asked["prompt"][index // 2]
        assert (receipt["environment"], receipt["model"]) == (ORIGIN.environment, ORIGIN.model)
        assert receipt["tokens"] == [5, 6]
        assert receipt["logprobs"] == [-1.0 - index % 2, -1.125 - index % 2]
        assert (receipt["sampling"]["seed"], receipt["sampling"]["top_k"], receipt["index"]) == (3, 7, index % 2)
    chunks = api.ask("/v1/completions", **asked, stream=True)
    streamed = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["finish_reason"]]
    assert [choice["receipt"] for choice in streamed] == [choice["receipt"] for choice in choices]
    assert not any("receipt" in chunk["choices"][0] for chunk in chunks if not chunk["choices"][0]["finish_reason"])
    chat = api.ask("/v1/chat/completions", messages=MESSAGES, receipt=True)["choices"][0]["receipt"]
    response = api.ask("/v1/responses", input="Hi", receipt=True)["receipt"]
    assert chat["prompt"] == response["prompt"] == [*api.script.asked[-1].prompt]
    last = api.ask("/v1/responses", input="Hi", receipt=True, stream=True)[-1]
    assert last["response"]["receipt"] == response
    assert "receipt" not in api.ask("/v1/responses", input="Hi", receipt=False)


def test_seeds_are_drawn_for_each_prompt_that_samples_and_has_none(metadata: ModelMetadata, words: Tokenizer) -> None:
    drawn = iter(range(100, 200))
    with (
        mock.patch("detjax.server.api.api_calls.secrets.randbits", lambda bits: next(drawn) + (bits << 32)),
        scripted(metadata, words, unseeded="random") as api,
    ):

        def seeds(path: str, **body: Any) -> list[int]:
            answer = api.ask(path, **body)
            given = [answer["seed"]] if "seed" in answer else [choice["seed"] for choice in answer["choices"]]
            assert given == [one.sampling.seed for one in api.script.asked[-1:] for _ in given] or len(given) > 1
            return [seed - (53 << 32) for seed in given]

        assert seeds("/v1/completions", prompt=[[5], [6]], n=2) == [100, 100, 101, 101]
        assert seeds("/v1/chat/completions", messages=MESSAGES, n=2) == [102, 102]
        assert seeds("/v1/responses", input="Hi") == [103]
        assert seeds("/v1/responses", input="Hi", seed=None) == [104]
        assert seeds("/v1/completions", prompt=[5], seed=-1) == [105]
        for given in ({"seed": 7}, {"temperature": 0}, {"max_tokens": 0, "echo": True}):
            (choice,) = api.ask("/v1/completions", prompt=[5], **given)["choices"]
            assert choice["seed"] == given.get("seed", 0)
        assert next(drawn) == 106


def test_a_chat_without_a_length_takes_the_room_that_is_left(api: Client) -> None:
    request = api.asked("/v1/chat/completions", messages=MESSAGES)
    assert len(request.prompt) + request.sampling.max_tokens == LENGTH


# --- texts and models -------------------------------------------------------------------------------------------------


def test_models_have_every_field(metadata: ModelMetadata, words: Tokenizer) -> None:
    with scripted(metadata, words, more_names=("other", MODEL)) as api:
        listed = api.get("/v1/models").json()
        one = {
            "id": MODEL,
            "object": "model",
            "created": TIME,
            "owned_by": "detjax",
            "max_model_len": LENGTH,
            "chat": True,
            "system_fingerprint": listed["data"][0]["system_fingerprint"],
        }
        assert listed == {"object": "list", "data": [one, one | {"id": "other"}]}
        assert api.get("/v1/models/other").json() == one | {"id": "other"}
        answer = api.post("/v1/completions", json={"model": "other", "prompt": [5]}).json()
        assert (answer["model"], answer["system_fingerprint"]) == ("other", one["system_fingerprint"])
    silent = Tokenizer({"tokenizer.json": words.files["tokenizer.json"]}, "the test")
    with scripted(metadata, silent) as api:
        assert api.get("/v1/models").json()["data"][0]["chat"] is False


def test_tokenize_adds_special_tokens_as_it_is_told(metadata: ModelMetadata, words: Tokenizer) -> None:
    content = json.loads(words.files["tokenizer.json"])
    special = {"I": {"id": "I", "ids": [40], "tokens": ["I"]}}
    single = [{"SpecialToken": {"id": "I", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    content["post_processor"] = {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": special}
    tokenizer = Tokenizer(words.files | {"tokenizer.json": json.dumps(content).encode()}, "the test")
    plain = words.encode("Hi")
    chat = words.encode(words.apply_chat_template(MESSAGES), add_special_tokens=False)
    with scripted(metadata, tokenizer) as api:
        for body, tokens in (
            ({"prompt": "Hi"}, [40, *plain]),
            ({"prompt": "Hi", "add_special_tokens": True}, [40, *plain]),
            ({"prompt": "Hi", "add_special_tokens": False}, plain),
            ({"messages": MESSAGES}, chat),
            ({"messages": MESSAGES, "add_special_tokens": False}, chat),
            ({"messages": MESSAGES, "add_special_tokens": True}, [40, *chat]),
        ):
            answer = api.post("/tokenize", json=body).json()
            expected = {"count": len(tokens), "max_model_len": LENGTH, "tokens": tokens, "token_strs": None}
            assert answer == expected, body
        assert [*api.asked("/v1/completions", prompt="Hi").prompt] == [40, *plain]
        assert [*api.asked("/v1/chat/completions", messages=MESSAGES).prompt] == chat
        assert api.post("/detokenize", json={"tokens": [511, 40]}).json() == {"prompt": "<|im_start|>I"}
