"""Each field of a body reaches the engine as what it says, changes nothing else, and is accepted up to its limits."""

import dataclasses
import json
from typing import Any, Final

import pytest

from detjax.engine import Constraint, SamplingParams
from detjax.models import GenerationDefaults, ModelMetadata, Tokenizer
from detjax.server.api.answer_forms import ResponseFormat, StructuredOutputs
from detjax.server.api.field_marks import Unserved
from detjax.server.api.request_fields import StreamOptions
from detjax.server.api.response_fields import ResponsesRequest, TextFormat
from detjax.server.api.schemas import ChatRequest, CompletionRequest
from detjax.server.http import bodies
from detjax.server.http.errors import ApiError
from detjax.server.http.field_types import RESERVED_VARIABLES
from tests.server.running_server import MODEL
from tests.server.scripted import LENGTH, Client, scripted

MESSAGES: Final[Any] = [{"role": "user", "content": "Hi"}]
LEAST: Final[dict[str, Any]] = {
    "/v1/completions": {"prompt": [5, 6, 7]},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/responses": {"input": "Hi"},
}
"""The least body of each endpoint."""
LARGEST: Final = 2**31 - 1
ONE_FORM: Final = "one of json, json_object: true, regex, choice, grammar and structural_tag"

SHARED: Final[dict[str, tuple[Any, Any]]] = {
    "temperature": (0.5, 0.5),
    "top_p": (0.25, 0.25),
    "top_k": (7, 7),
    "min_p": (0.125, 0.125),
    "seed": (9, 9),
    "presence_penalty": (0.5, 0.5),
    "frequency_penalty": (-0.25, -0.25),
    "repetition_penalty": (1.5, 1.5),
    "min_tokens": (3, 3),
    "stop": (["x", "yz"], ("x", "yz")),
    "stop_token_ids": ([5, 8], (5, 8)),
    "ignore_eos": (True, True),
    "logit_bias": ({"7": 2.5, "11": -3}, ((7, 2.5), (11, -3.0))),
    "allowed_token_ids": ([5, 8, 5], (5, 8)),
    "bad_words": (["x", "y z", "x"], ("x", "y z")),
    "include_stop_str_in_output": (True, True),
    "skip_special_tokens": (False, False),
}
"""Fields of every endpoint that are fields of `SamplingParams`: what is given, and what the engine gets."""


def default(path: str, prompt: int) -> SamplingParams:
    """The engine's parameters for the least body, whose prompt has this many tokens."""
    return SamplingParams(max_tokens=16 if path == "/v1/completions" else LENGTH - prompt, temperature=1.0)


@pytest.mark.parametrize("path", LEAST)
def test_the_least_body_has_the_documented_defaults(api: Client, path: str) -> None:
    request = api.asked(path, **LEAST[path])
    assert request.sampling == default(path, len(request.prompt))
    assert (request.cache_salt, request.client, [*request.images], [*request.generated]) == (None, None, [], [])


@pytest.mark.parametrize("path", LEAST)
def test_a_field_reaches_the_engine_and_changes_nothing_else(api: Client, path: str) -> None:
    plain = api.asked(path, **LEAST[path])
    for name, (given, expected) in SHARED.items():
        request = api.asked(path, **LEAST[path], **{name: given})
        assert request.sampling == dataclasses.replace(plain.sampling, **{name: expected}), name
        assert request.prompt == plain.prompt
    salted = api.asked(path, **LEAST[path], cache_salt="salt")
    assert (salted.cache_salt, salted.sampling) == ("salt", plain.sampling)
    for given in ({"top_k": -1}, {"top_k": 0}, {"seed": -1}, {"stop": []}, {"ignore_eos": None}, {"logit_bias": {}}):
        assert api.asked(path, **LEAST[path], **given) == plain, given
    for name in ("include_stop_str_in_output", "no_stop_trim", "return_tokens_as_token_ids", "sampling_logprobs"):
        assert api.asked(path, **LEAST[path], **{name: False}) == plain, name
    for given in ({"bad_words": []}, {"skip_special_tokens": True}, {"spaces_between_special_tokens": False}):
        assert api.asked(path, **LEAST[path], **given) == plain, given
    trimmed = api.asked(path, **LEAST[path], no_stop_trim=True)
    assert trimmed == api.asked(path, **LEAST[path], include_stop_str_in_output=True)
    assert trimmed.sampling.include_stop_str_in_output
    assert api.asked(path, **LEAST[path], stop="one").sampling.stop == ("one",)


def test_lengths_samples_and_logprobs_reach_the_engine(api: Client) -> None:
    complete, chat, respond = LEAST
    cases: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        (complete, {"max_tokens": 7}, {"max_tokens": 7}),
        (complete, {"max_tokens": 0, "echo": True}, {"max_tokens": 1}),
        (complete, {"n": 3}, {"n": 3}),
        (complete, {"n": 3, "best_of": 3}, {"n": 3}),
        (complete, {"logprobs": 3}, {"top_logprobs": 3}),
        (complete, {"logprobs": 0}, {}),
        (complete, {"echo": True}, {}),
        (complete, {"logprobs": 3, "echo": True}, {"top_logprobs": 3, "prompt_logprobs": True}),
        (complete, {"logprobs": 0, "echo": True}, {"prompt_logprobs": True}),
        (complete, {"prompt_logprobs": 0}, {"prompt_logprobs": True}),
        (complete, {"prompt_logprobs": 2}, {"top_logprobs": 2, "prompt_logprobs": True}),
        (complete, {"prompt_logprobs": 2, "logprobs": 3}, {"top_logprobs": 3, "prompt_logprobs": True}),
        (complete, {"prompt_logprobs": 3, "logprobs": 2}, {"top_logprobs": 3, "prompt_logprobs": True}),
        (chat, {"max_tokens": 7}, {"max_tokens": 7}),
        (chat, {"max_completion_tokens": 8}, {"max_tokens": 8}),
        (chat, {"max_tokens": 9, "max_completion_tokens": 9}, {"max_tokens": 9}),
        (chat, {"n": 3}, {"n": 3}),
        (chat, {"logprobs": True}, {}),
        (chat, {"logprobs": True, "top_logprobs": 3}, {"top_logprobs": 3}),
        (chat, {"logprobs": False, "top_logprobs": 0}, {}),
        (chat, {"prompt_logprobs": 2}, {"top_logprobs": 2, "prompt_logprobs": True}),
        (chat, {"prompt_logprobs": 0}, {"prompt_logprobs": True}),
        (
            chat,
            {"prompt_logprobs": 1, "logprobs": True, "top_logprobs": 2},
            {"top_logprobs": 2, "prompt_logprobs": True},
        ),
        (respond, {"max_output_tokens": 7}, {"max_tokens": 7}),
        (respond, {"top_logprobs": 3, "include": ["message.output_text.logprobs"]}, {"top_logprobs": 3}),
        (respond, {"include": ["message.output_text.logprobs"]}, {}),
        (respond, {"include": ["reasoning.encrypted_content"]}, {}),
    ]
    for path, given, expected in cases:
        plain, request = api.asked(path, **LEAST[path]), api.asked(path, **LEAST[path], **given)
        assert request == dataclasses.replace(plain, sampling=dataclasses.replace(plain.sampling, **expected)), given


RECOMMENDED: Final = {"temperature": 0.5, "top_k": 5, "top_p": 0.75, "min_p": 0.0625, "repetition_penalty": 1.25}


@pytest.mark.parametrize("do_sample", [True, False, None])
def test_a_silent_request_has_what_the_checkpoint_recommends(
    metadata: ModelMetadata, words: Tokenizer, do_sample: bool | None
) -> None:
    numbers = {name: value for name, value in RECOMMENDED.items() if name != "repetition_penalty"}
    recommended = None
    if do_sample is not None:
        unread = json.dumps({"repetition_penalty": 1.25})
        recommended = GenerationDefaults(eos_token_ids=(509,), do_sample=do_sample, unread=unread, **numbers)  # pyright: ignore[reportArgumentType]
    expected = {True: RECOMMENDED, False: {"temperature": 1.0, "repetition_penalty": 1.25}, None: {"temperature": 1.0}}
    with scripted(dataclasses.replace(metadata, generation_defaults=recommended), words) as api:
        silent = SamplingParams(max_tokens=16, **expected[do_sample])  # pyright: ignore[reportArgumentType]
        assert api.asked("/v1/completions", prompt=[5]).sampling == silent
        for name, value in {
            "temperature": 0.0,
            "top_k": 0,
            "top_p": 1.0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
        }.items():
            request = api.asked("/v1/completions", prompt=[5], **{name: value})
            assert request.sampling == dataclasses.replace(silent, **{name: value}), name


def test_each_prompt_of_a_request_is_a_request_of_the_engine(api: Client, words: Tokenizer) -> None:
    for prompt, expected in (
        ("Hi", [words.encode("Hi")]),
        (["Hi", "You"], [words.encode("Hi"), words.encode("You")]),
        ([5], [[5]]),
        ([5, 6], [[5, 6]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
    ):
        before = len(api.script.asked)
        api.ask("/v1/completions", prompt=prompt)
        assert [request.prompt for request in api.script.asked[before:]] == expected


# --- the form of the answer -------------------------------------------------------------------------------------------


def test_forms_of_an_answer_become_constraints(api: Client) -> None:
    complete, chat, respond = LEAST
    schema = {"type": "object", "properties": {"a": {"const": 1}}}
    named = {"name": "n", "description": "d", "strict": True, "schema": schema}
    wanted = Constraint.json_schema(schema)
    anything = Constraint.json_schema({"type": "object"})
    forms: list[tuple[dict[str, Any], Constraint | None]] = [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, anything),
        ({"response_format": {"type": "json_schema", "json_schema": named}}, wanted),
        ({"structured_outputs": {"json": schema}}, wanted),
        ({"structured_outputs": {"json": schema, "disable_any_whitespace": True}}, wanted),
        (
            {"structured_outputs": {"json": schema, "disable_any_whitespace": False}},
            Constraint.json_schema(schema, any_whitespace=True),
        ),
        ({"structured_outputs": {"regex": "a+"}}, Constraint("regex", "a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Constraint.choice(["a", "b"])),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, Constraint("grammar", 'start: "a"')),
        ({"structured_outputs": {"regex": "a+"}, "response_format": {"type": "text"}}, Constraint("regex", "a+")),
    ]
    for path in (complete, chat):
        for given, expected in forms:
            assert api.asked(path, **LEAST[path], **given).sampling.constraint == expected, given
    assert Constraint.json_schema(schema, any_whitespace=True) != wanted != anything
    for form, expected in (
        ({"type": "text"}, None),
        ({"type": "json_object"}, anything),
        ({"type": "json_schema", "name": "n", "schema": schema, "strict": True}, wanted),
    ):
        assert api.asked(respond, input="Hi", text={"format": form}).sampling.constraint == expected
    assert api.asked(respond, input="Hi", text={"verbosity": "medium"}).sampling.constraint is None


@pytest.mark.parametrize(
    ("schema", "body", "says"),
    [
        (ResponseFormat, {"type": "json_object", "json_schema": {"schema": {}}}, "with no other type"),
        (ResponseFormat, {"type": "text", "json_schema": {"schema": {}}}, "with no other type"),
        (ResponseFormat, {"type": "json_schema"}, "accepted: json_schema with type 'json_schema'"),
        (TextFormat, {"type": "json_object", "schema": {}}, "with no other type"),
        (TextFormat, {"type": "json_schema"}, "accepted: schema with type 'json_schema'"),
        (StructuredOutputs, {}, ONE_FORM),
        (StructuredOutputs, {"regex": None}, ONE_FORM),
        (StructuredOutputs, {"disable_any_whitespace": True}, ONE_FORM),
        (StructuredOutputs, {"json": {}, "regex": "a"}, ONE_FORM),
        (StructuredOutputs, {"regex": "a", "disable_any_whitespace": False}, "false only with json"),
        (StructuredOutputs, {"choice": []}, "at least 1 item"),
        (StructuredOutputs, {"choice": ["a"] * 1025}, "at most 1024 items"),
    ],
)
def test_forms_that_contradict_themselves_are_refused(schema: Any, body: dict[str, Any], says: str) -> None:
    with pytest.raises(ApiError, match=says):
        bodies.parse(json.dumps(body).encode(), schema)
    assert len(bodies.parse(json.dumps({"choice": ["a"] * 1024}).encode(), StructuredOutputs).choice or ()) == 1024
    bodies.parse(json.dumps({"regex": "a", "disable_any_whitespace": True}).encode(), StructuredOutputs)


# --- limits -----------------------------------------------------------------------------------------------------------

type Limits = dict[str, tuple[list[Any], list[tuple[Any, str]]]]
SAMPLING: Final[Limits] = {
    "temperature": (
        [0, 1e-30, 1e30],
        [(-0.1, "equal to 0"), (9e-31, "accepted: 0, or 1e-30 to 1e30"), (1.1e30, f"equal to {10**30}")],
    ),
    "top_p": ([1e-9, 1], [(0, "greater than 0"), (1.001, "equal to 1")]),
    "top_k": ([-1, 0, 1, LARGEST], [(-2, "equal to -1"), (LARGEST + 1, f"equal to {LARGEST}")]),
    "min_p": ([0, 1], [(-0.001, "equal to 0"), (1.001, "equal to 1")]),
    "seed": ([-1, 0, 2**64 - 1], [(-2, "equal to -1"), (2**64, f"less than {2**64}")]),
    "presence_penalty": ([-2, 2], [(-2.01, "equal to -2"), (2.01, "equal to 2")]),
    "frequency_penalty": ([-2, 2], [(-2.01, "equal to -2"), (2.01, "equal to 2")]),
    "repetition_penalty": ([1e-6, 1e6], [(9e-7, "equal to 0.000001"), (1_000_001, "equal to 1000000")]),
    "min_tokens": ([0, LARGEST], [(-1, "equal to 0"), (LARGEST + 1, f"equal to {LARGEST}")]),
    "stop": (
        ["a" * 256, ["a"] * 16, ["a" * 256], []],
        [("", "at least 1 character"), ("a" * 257, "at most 256"), (["a"] * 17, "at most 16"), (["a" * 257], "256")],
    ),
    "stop_token_ids": (
        [[], [0], [LARGEST], [1] * 1024],
        [([-1], "equal to 0"), ([LARGEST + 1], f"equal to {LARGEST}"), ([1] * 1025, "at most 1024")],
    ),
    "logit_bias": (
        [{"5": -100, "6": 100}, {str(token): 1 for token in range(300)}, {"0123456789": 1}],
        [
            ({"5": -100.5}, "equal to -100"),
            ({"5": 100.5}, "equal to 100"),
            ({str(token): 1 for token in range(301)}, "up to 300 entries"),
            ({"01234567890": 1}, "should match pattern"),
            ({"-1": 1}, "should match pattern"),
            ({"": 1}, "should match pattern"),
            ({"5": True}, "valid number"),
        ],
    ),
    "allowed_token_ids": (
        [[0], [LARGEST], [1] * 1000],
        [([], "at least 1 item"), ([-1], "equal to 0"), ([LARGEST + 1], f"equal to {LARGEST}"), ([True], "integer")],
    ),
    "bad_words": (
        [[], ["a" * 256], ["a"] * 256],
        [([""], "at least 1 character"), (["a" * 257], "at most 256"), (["a"] * 257, "at most 256"), ("a", "list")],
    ),
    "truncate_prompt_tokens": (
        [-1, 1, LARGEST],
        [(-2, "equal to -1"), (0, "accepted: at least 1, or -1"), (LARGEST + 1, f"equal to {LARGEST}")],
    ),
    "cache_salt": (["a", "a" * 256], [("", "at least 1 character"), ("a" * 257, "at most 256")]),
    "metadata": (
        [{str(entry): "" for entry in range(64)}],
        [({str(entry): "" for entry in range(65)}, "up to 64 entries"), ({"a": 1}, "valid string")],
    ),
    "receipt": ([True, False], [("true", "valid boolean"), (1, "valid boolean")]),
    "stream": ([True, False], [("true", "valid boolean"), (1, "valid boolean")]),
}
"""The values at the limits of each field, and those beyond with what their error says."""
GENERATION: Final[Limits] = {
    "n": ([1, 128], [(0, "equal to 1"), (129, "equal to 128")]),
    "prompt_logprobs": ([0, LARGEST], [(-1, "equal to 0"), (LARGEST + 1, f"equal to {LARGEST}")]),
}
COUNT: Final = ([1, LARGEST], [(0, "equal to 1"), (LARGEST + 1, f"equal to {LARGEST}")])
TOOL: Final = {"type": "function", "function": {"name": "a"}}
CALL: Final = {"function": {"name": "a", "arguments": "{}"}}
VARIABLES: Final = (
    [{"a_1": "x", "b": 1, "c": 1.5, "d": True, "e": None}, {f"a{entry}": 1 for entry in range(64)}],
    [
        ({f"a{entry}": 1 for entry in range(65)}, "up to 64 entries"),
        ({"a": []}, "strings, numbers, booleans or null"),
        ({"1a": 1}, "letters, digits and underscores"),
        *(({name: 1}, f"variables other than {name}") for name in sorted(RESERVED_VARIABLES)),
    ],
)
COMPLETION: Final[Limits] = {
    "prompt": (
        ["", ["a"] * 2048, [0, LARGEST], [[1]] * 2048],
        [
            (["a"] * 2049, "at most 2048"),
            ([[1]] * 2049, "at most 2048"),
            ([-1], "equal to 0"),
            ([LARGEST + 1], f"equal to {LARGEST}"),
            ([], "accepted: a string, or a list of strings"),
            ([[]], "at least 1 item"),
        ],
    ),
    "max_tokens": ([1, LARGEST], [(-1, "equal to 0"), (LARGEST + 1, f"equal to {LARGEST}"), (0, "or 0 with echo")]),
    "logprobs": ([0, LARGEST], [(-1, "equal to 0"), (LARGEST + 1, f"equal to {LARGEST}")]),
    "best_of": ([1], [(2, "best_of is 2; accepted: n, which is 1"), (0, "best_of is 0")]),
}
CHAT: Final[Limits] = {
    "messages": (
        [MESSAGES * 4096, [{"role": "user", "content": [{"type": "text", "text": ""}] * 1024}]]
        + [[{"role": "assistant", "tool_calls": [CALL] * 128}]]
        + [[{"role": role, "content": ""}] for role in ("system", "developer", "user", "assistant", "tool")],
        [
            ([], "at least 1 item"),
            (MESSAGES * 4097, "at most 4096"),
            ([{"role": "user", "content": [{"type": "text", "text": ""}] * 1025}], "at most 1024"),
            ([{"role": "assistant", "tool_calls": [CALL] * 129}], "at most 128"),
            ([{"role": "assistant", "tool_calls": []}], "content is missing or null"),
            ([{"role": "function", "content": ""}], "role"),
        ],
    ),
    "max_tokens": COUNT,
    "max_completion_tokens": COUNT,
    "top_logprobs": ([0], [(-1, "equal to 0"), (LARGEST + 1, f"equal to {LARGEST}"), (1, "with logprobs: true")]),
    "chat_template_kwargs": VARIABLES,
    "tools": (
        [[{"type": "function", "function": {"name": f"a{entry}"}} for entry in range(128)]]
        + [[{"type": "function", "function": {"name": name}}] for name in ("a" * 64, "aZ0_-")]
        + [[{"type": "function", "function": {"name": "a", "parameters": {}}}]],
        [
            ([{"type": "function", "function": {"name": f"a{entry}"}} for entry in range(129)], "at most 128"),
            ([{"type": "function", "function": {"name": ""}}], "should match pattern"),
            ([{"type": "function", "function": {"name": "a" * 65}}], "should match pattern"),
            ([{"type": "function", "function": {"name": "a.b"}}], "should match pattern"),
            ([TOOL, TOOL], "tools with different names"),
        ],
    ),
}
RESPONSE: Final[Limits] = {
    "input": (
        ["", [{"role": "user", "content": ""}] * 4096],
        [([{"role": "user", "content": ""}] * 4097, "at most 4096"), ([], "at least 1 item")],
    ),
    "max_output_tokens": COUNT,
    "top_logprobs": ([0], [(-1, "equal to 0"), (LARGEST + 1, f"equal to {LARGEST}"), (1, "with include")]),
    "chat_template_kwargs": VARIABLES,
    "include": (
        [["message.output_text.logprobs", "reasoning.encrypted_content"], []],
        [(["reasoning.encrypted_content"] * 3, "at most 2"), (["other"], "include.0 is 'other'")],
    ),
}
SCHEMAS: Final[list[tuple[Any, str, Limits]]] = [
    (CompletionRequest, "/v1/completions", SAMPLING | GENERATION | COMPLETION),
    (ChatRequest, "/v1/chat/completions", SAMPLING | GENERATION | CHAT),
    (ResponsesRequest, "/v1/responses", SAMPLING | RESPONSE),
]


@pytest.mark.parametrize(("schema", "path", "limits"), SCHEMAS, ids=lambda value: getattr(value, "__name__", None))
def test_values_up_to_the_limits_are_accepted_and_others_refused(schema: Any, path: str, limits: Limits) -> None:
    least, wrong = {"model": MODEL} | LEAST[path], list[object]()
    for name, (accepted, refused) in limits.items():
        for value in accepted:
            bodies.parse(json.dumps(least | {name: value}).encode(), schema)
        for value, says in refused:
            with pytest.raises(ApiError) as raised:
                bodies.parse(json.dumps(least | {name: value}).encode(), schema)
            error = raised.value.body["error"]
            if says not in error["message"] or error["param"] != name:
                wrong.append((name, says, error))
    assert wrong == []


def test_a_second_limit_needs_another_field() -> None:
    least = {"model": MODEL} | LEAST["/v1/completions"]
    for given, says in (
        ({"n": 2, "best_of": 3}, "best_of is 3; accepted: n, which is 2"),
        ({"n": 2, "best_of": 1}, "best_of is 1; accepted: n, which is 2"),
        ({"max_tokens": 0, "echo": False}, "max_tokens is 0; accepted: at least 1, or 0 with echo"),
        ({"max_tokens": 0, "echo": True, "receipt": True}, "receipt is true and max_tokens is 0"),
        ({"stream": True, "echo": True, "logprobs": 0}, "stream, echo and logprobs are given"),
        ({"stream": True, "prompt_logprobs": 0}, None),  # the call refuses it
        ({"stream_options": {}, "stream": False}, "stream_options is given and stream is not true"),
        ({"stream": True, "echo": True}, None),
        ({"stream": True, "logprobs": 0}, None),
        ({"echo": True, "logprobs": 0}, None),
        ({"max_tokens": 0, "echo": True}, None),
    ):
        body = json.dumps(least | given).encode()
        if says is None:
            bodies.parse(body, CompletionRequest)
        else:
            with pytest.raises(ApiError, match=says):
                bodies.parse(body, CompletionRequest)


def test_fields_of_several_kinds_are_refused_together() -> None:
    least = {"model": MODEL, "messages": MESSAGES}
    for given, says in (
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens and max_completion_tokens differ"),
        ({"structured_outputs": {"regex": "a"}, "tools": [TOOL]}, "structured_outputs and tools are given"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "are given; accepted"),
    ):
        with pytest.raises(ApiError, match=says):
            bodies.parse(json.dumps(least | given).encode(), ChatRequest)
    for given in (
        {"structured_outputs": {"regex": "a"}, "tools": [TOOL], "tool_choice": "none"},
        {"structured_outputs": {"regex": "a"}, "tools": []},
    ):
        bodies.parse(json.dumps(least | given).encode(), ChatRequest)
    with pytest.raises(ApiError, match=r"include has message.output_text.logprobs and tools are given"):
        tools = [{"type": "function", "name": "a"}]
        given = {"model": MODEL, "input": "x", "include": ["message.output_text.logprobs"], "tools": tools}
        bodies.parse(json.dumps(given).encode(), ResponsesRequest)


def test_the_items_of_all_arguments_are_counted_together() -> None:
    def body(items: int) -> bytes:
        half = items // 2
        calls = [{"function": {"name": "a", "arguments": "[" * count}} for count in (half, items - half)]
        messages = [{"role": "assistant", "tool_calls": [call]} for call in calls]
        return json.dumps({"model": MODEL, "messages": messages}).encode()

    bodies.parse(body(1 << 17), ChatRequest)
    with pytest.raises(ApiError, match=r"up to 131072 items in the arguments of all tool_calls") as raised:
        bodies.parse(body((1 << 17) + 1), ChatRequest)
    assert raised.value.body["error"]["param"] == "messages"
    for item in ("{", ":", ","):
        with pytest.raises(ApiError, match="up to 131072 items"):
            bodies.parse(body((1 << 17) + 1).replace(b"[" * 100, item.encode() * 100), ChatRequest)


def test_the_items_of_all_calls_of_a_response_are_counted_together() -> None:
    def body(items: int) -> bytes:
        half = items // 2
        call = {"type": "function_call", "call_id": "c", "name": "f"}
        calls = [call | {"arguments": "[" * count} for count in (half, items - half)]
        return json.dumps({"model": MODEL, "input": calls}).encode()

    bodies.parse(body(1 << 17), ResponsesRequest)
    with pytest.raises(ApiError, match=r"up to 131072 items in the arguments of all tool_calls") as raised:
        bodies.parse(body((1 << 17) + 1), ResponsesRequest)
    assert raised.value.body["error"]["param"] == "input"


def test_the_server_serves_as_many_samples_as_it_says(api: Client) -> None:
    assert len(api.ask("/v1/completions", prompt=[[5]] * 8, n=128)["choices"]) == 1024
    status, error = api.refusal("/v1/completions", prompt=[[5]] * 9, n=114)
    assert (status, error["param"]) == (400, "n")
    assert error["message"] == "the request has 1026 samples; accepted: up to 1024 at once"


# --- fields without an effect -----------------------------------------------------------------------------------------


def marked(schema: Any) -> dict[str, Unserved]:
    return {
        name: mark
        for name, field in schema.model_fields.items()
        for mark in field.metadata
        if isinstance(mark, Unserved)
    }


def test_values_that_are_what_the_server_does_are_those_of_the_table() -> None:
    """A value that is accepted without an effect is a promise, so all of them are listed here."""
    shared: dict[str, list[Any]] = {
        "prompt_cache_options": [{}],
        "guided_decoding_backend": ["auto", "guidance"],
        "return_hidden_states": [False],
        "use_beam_search": [False],
        "length_penalty": [1],
        "early_stopping": [False],
        "logits_processors": [[]],
        "vllm_xargs": [{}],
        "truncation_side": ["left"],
        "watermarking": [False],
        "stream_interval": [1],
        "stop_regex": [[]],
        "routed_experts_prompt_start": [0],
        "routed_experts_start_len": [0],
        "return_mm_kwargs": [True],
        "session_params": [{}],
        "custom_params": [{}],
        "images_config": [{}],
    }
    reports = "routed_experts", "meta_info", "prompt_text", "prompt_token_ids", "cached_tokens_details", "token_offsets"
    shared |= {f"return_{name}": [False] for name in reports}
    nothing = (
        *("custom_logit_processor", "guided_whitespace_pattern", "lora_path", "kv_transfer_params", "moderation"),
        *("repetition_detection", "logprob_token_ids", "ec_transfer_params", "ngram_corpus_id", "bootstrap_host"),
        *("bootstrap_port", "bootstrap_room", "routed_dp_rank", "disagg_prefill_dp_rank", "data_parallel_rank"),
    )
    shared |= {name: [] for name in nothing}
    assert {name: list(mark.values) for name, mark in marked(CompletionRequest).items()} == shared | {
        "suffix": [""],
        "add_special_tokens": [True],
        "prompt_embeds": [],
        "thinking_token_budget": [-1],
    }
    assert {name: list(mark.values) for name, mark in marked(ChatRequest).items()} == shared | {
        "functions": [[]],
        "function_call": ["none", "auto"],
        "modalities": [["text"]],
        "audio": [],
        "prediction": [],
        "web_search_options": [],
        "separate_reasoning": [True],
        "stream_reasoning": [True],
        "verbosity": ["medium"],
        "add_special_tokens": [False],
        "chat_template": [],
        "documents": [[]],
        "mm_processor_kwargs": [{}],
        "media_io_kwargs": [{}],
        "max_dynamic_patch": [],
        "min_dynamic_patch": [],
        "use_audio_in_video": [False],
        "input_ids": [],
        "task": [],
    }
    assert {name: list(mark.values) for name, mark in marked(ResponsesRequest).items()} == shared | {
        "previous_response_id": [],
        "conversation": [],
        "background": [False],
        "prompt": [],
        "truncation": ["disabled"],
        "context_management": [[]],
    }
    assert marked(StreamOptions)["include_obfuscation"].values == (False,)


def test_true_is_not_one() -> None:
    least = {"model": MODEL} | LEAST["/v1/completions"]
    for given in ({"length_penalty": True}, {"use_beam_search": 0}, {"return_hidden_states": 0}):
        with pytest.raises(ApiError, match="accepted: "):
            bodies.parse(json.dumps(least | given).encode(), CompletionRequest)
    bodies.parse(json.dumps(least | {"length_penalty": 1.0}).encode(), CompletionRequest)
