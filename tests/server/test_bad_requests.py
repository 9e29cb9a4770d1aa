"""Bad requests get errors that say what is wrong, and the engine continues without a leak."""

import json
import random
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import schemathesis.openapi
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi.checks import (
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from detjax.engine import Engine, Request, SamplingParams
from detjax.models import Decoder, ModelMetadata, Tokenizer
from tests.server.running_server import MODEL, Running, serving, streams_held, wait_until
from tests.server.scripted import Client, scripted

COMPLETION = {"model": MODEL, "prompt": "x", "max_tokens": 1}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}


OF_SEVERAL_FIELDS = (
    "response_format and structured_outputs are given",
    "max_tokens and max_completion_tokens differ",
    "stream, echo and logprobs are given",
)
"""Messages about combinations of fields, without a single faulty field."""
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def post(url: str, body: Any, path: str = "completions", **headers: str) -> tuple[int, dict]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"{url}/v1/{path}", data, {"Content-Type": "application/json"} | headers)
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def wait_until_idle(server: Running) -> None:
    def is_idle() -> bool:
        stats = server.engine.stats()
        return not (stats.running or stats.waiting or server.app.state.guard.in_flight)

    wait_until(is_idle)


@pytest.fixture(scope="module")
def strict(metadata: ModelMetadata, words: Tokenizer) -> Iterator[Client]:
    """A client of a server that refuses what an engine refuses, and computes nothing."""
    with scripted(metadata, words, is_strict=True) as client:
        yield client


def refusal(client: Client, body: Any, path: str = "completions") -> tuple[int, dict[str, Any]]:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = client.post(f"/v1/{path}", content=content, headers={"Content-Type": "application/json"})
    return answer.status_code, answer.json()


@pytest.fixture
def unharmed(server: Running) -> Iterator[None]:
    """After each test the server answers as before, and nothing is in flight."""
    yield
    status, response = post(server.url, COMPLETION | {"temperature": 0, "max_tokens": 3})
    assert status == 200
    greedy = SamplingParams(temperature=0.0, max_tokens=3)
    assert response["choices"][0]["text"] == server.engine.generate([Request("x", greedy)])[0].completions[0].text
    assert server.engine.stats().pages_in_use == 0
    assert server.app.state.guard.in_flight == 0


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "EOF"),
        (b"{", "EOF"),
        (b"[]", "object"),
        (b'"x"', "object"),
        (b'{"model": "little", "prompt": "\xff\xfe"}', "JSON"),
        (b'{"model": "little", "prompt": "\\ud800"}', "JSON"),
        (b"[" * 100_000, "recursion"),
        (b'{"model": "little", "prompt": "x", "temperature": NaN}', "temperature"),
        (b'{"model": "little", "prompt": "x", "seed": 1e400}', "seed"),
        ({"prompt": "x"}, "model is missing"),
        ({"model": MODEL}, "prompt is missing"),
        (COMPLETION | {"prompt": ""}, "request 0 has no tokens; accepted: a prompt of at least one token"),
        (COMPLETION | {"prompt": ["x", ""]}, "request 1 has no tokens; accepted: a prompt of at least one token"),
        (COMPLETION | {"prompt": []}, "prompt is []; accepted: a string, or a list of strings"),
        (COMPLETION | {"prompt": [[]]}, "prompt.0 is []: List should have at least 1 item"),
        (COMPLETION | {"prompt": {"a": 1}}, "prompt is {'a': 1}; accepted: a string, or a list of strings"),
        (COMPLETION | {"prompt": ["a", 1]}, "prompt.1 is 1: Input should be a valid string"),
        (COMPLETION | {"prompt": [1, True]}, "prompt.1 is True: Input should be a valid integer"),
        (COMPLETION | {"prompt": [[1], [2, "a"]]}, "prompt.1.1 is 'a': Input should be a valid integer"),
        (COMPLETION | {"prompt": ["a"] * 2049}, "prompt is ['a', 'a', 'a', ...]: List should have at most 2048 items"),
        (COMPLETION | {"prompt": [515]}, "token 515; accepted: ids 0 to 514"),
        (COMPLETION | {"prompt": [-1]}, "prompt.0 is -1"),
        (COMPLETION | {"prompt": [1] * 400}, "accepted: 400 in all"),
        (COMPLETION | {"prompt": "word " * 2000}, "Lower max_tokens or shorten the prompt"),
        (COMPLETION | {"max_tokens": -1}, "max_tokens is -1"),
        (COMPLETION | {"max_tokens": 0}, "max_tokens is 0; accepted: at least 1, or 0 with echo"),
        (COMPLETION | {"max_tokens": "1"}, "max_tokens is '1'"),
        (COMPLETION | {"max_tokens": 1.5}, "max_tokens is 1.5"),
        (COMPLETION | {"max_tokens": True}, "max_tokens is True"),
        (COMPLETION | {"max_tokens": 400}, "accepted: 400 in all"),
        (COMPLETION | {"max_tokens": 10**30}, "max_tokens"),
        (COMPLETION | {"n": 0}, "n is 0"),
        (COMPLETION | {"n": 129}, "n is 129"),
        (COMPLETION | {"prompt": ["x"] * 10, "n": 128}, "1280 samples; accepted: up to 1024"),
        (COMPLETION | {"best_of": 3}, "best_of is 3"),
        (COMPLETION | {"temperature": -0.1}, "temperature is -0.1"),
        (COMPLETION | {"temperature": 1e-40}, "accepted: 0, or 1e-30 to 1e30"),
        (COMPLETION | {"temperature": 1e300}, "temperature"),
        (COMPLETION | {"top_p": 0}, "top_p is 0"),
        (COMPLETION | {"top_k": 2**31}, "top_k"),
        (COMPLETION | {"top_k": -2}, "top_k is -2"),
        (COMPLETION | {"seed": -2}, "seed is -2"),
        (COMPLETION | {"seed": 2**64}, "seed"),
        (COMPLETION | {"logprobs": 21}, "top_logprobs is 21; accepted: up to 20"),
        (COMPLETION | {"stop": ""}, "stop is '': String should have at least 1 character"),
        (COMPLETION | {"stop": 1}, "stop is 1; accepted: a string of 1 to 256 characters, or a list of up to 16"),
        (COMPLETION | {"stop": ["a", ""]}, "stop.1 is ''"),
        (COMPLETION | {"stop": ["a"] * 17}, "stop is ['a', 'a', 'a', ...]: List should have at most 16 items"),
        (
            COMPLETION | {"stop_token_ids": [1] * 1025},
            "stop_token_ids is [1, 1, 1, ...]: List should have at most",
        ),
        (COMPLETION | {"stop": "a" * 257}, "stop"),
        (COMPLETION | {"logit_bias": {str(token): 0 for token in range(301)}}, "accepted: up to 300 entries"),
        (COMPLETION | {"logit_bias": {"5": 101}}, "logit_bias.5 is 101"),
        (COMPLETION | {"logit_bias": {"a": 1}}, "logit_bias.a.[key] is 'a'"),
        (COMPLETION | {"logit_bias": {"515": 1}}, "logit_bias has token 515; accepted: ids 0 to 514"),
        (COMPLETION | {"presence_penalty": 2.1}, "presence_penalty is 2.1"),
        (COMPLETION | {"frequency_penalty": -2.1}, "frequency_penalty is -2.1"),
        (COMPLETION | {"repetition_penalty": 0}, "repetition_penalty is 0"),
        (COMPLETION | {"min_tokens": 2}, "min_tokens is 2; accepted: 0 to 1, max_tokens"),
        (COMPLETION | {"metadata": {str(entry): "" for entry in range(65)}}, "accepted: up to 64 entries"),
        (
            COMPLETION | {"use_beam_search": True},
            "use_beam_search is True; accepted: false or null, because",
        ),
        (COMPLETION | {"use_beam_search": 0}, "use_beam_search is 0; accepted: false or null"),
        (COMPLETION | {"stream_options": {}}, "stream_options is given and stream is not true"),
        (COMPLETION | {"stream": True, "echo": True, "logprobs": 1}, "accepted: any two of them"),
        (COMPLETION | {"stream": True, "max_tokens": 400}, "accepted: 400 in all"),
        (COMPLETION | {"nonsense": 1}, "there is no field nonsense"),
        (COMPLETION | {f"nonsense{name}": 1 for name in range(200)}, "there are no fields nonsense0, nonsense1, "),
        (COMPLETION | {f"nonsense{name}": 1 for name in range(20)}, "and 15 more"),
        (CHAT | {"messages": []}, "messages is []"),
        (CHAT | {"messages": [{"role": "king", "content": "x"}]}, "messages.0.role is 'king'"),
        (
            CHAT | {"messages": [{"role": "user", "content": 3}]},
            "messages.0.content is 3; accepted: a string, or",
        ),
        (
            CHAT | {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "content.0.text is missing",
        ),
        (
            CHAT | {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages have images, but the model reads only text; accepted: text parts",
        ),
        (
            CHAT | {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "messages.0.content.0.type is 'input_audio'; accepted: 'text', 'image_url' or 'video_url', because",
        ),
        (
            CHAT | {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            "messages.0.content.0.image_url is 'x'",
        ),
        (
            CHAT
            | {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x", "detail": "low"}}]}
                ]
            },
            "image_url.detail is 'low'; accepted: \"auto\" or null",
        ),
        (CHAT | {"messages": [{"role": "assistant", "content": "x", "refusal": "No."}]}, "messages.0.refusal is 'No.'"),
        (CHAT | {"messages": [{"role": "user", "content": "x"}] * 4097}, "List should have at most 4096 items"),
        (CHAT | {"messages": [{"role": "user", "content": "x" * 5000}]}, "which leaves room for one more"),
        (CHAT | {"max_completion_tokens": 2}, "max_tokens and max_completion_tokens differ; accepted: one of them"),
        (CHAT | {"top_logprobs": 2}, "top_logprobs is given and logprobs is not true"),
        (CHAT | {"response_format": {"type": "json_schema"}}, "accepted: json_schema with type 'json_schema'"),
        (CHAT | {"response_format": {"type": "xml"}}, "response_format.type is 'xml'"),
        (
            CHAT | {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "foo"}}}},
            "the constraint's json_schema is not valid: Invalid type: foo",
        ),
        (CHAT | {"structured_outputs": {"regex": "a", "choice": ["b"]}}, "accepted: one of json, json_object: true"),
        (CHAT | {"structured_outputs": {}}, "accepted: one of json, json_object: true"),
        (CHAT | {"structured_outputs": {"regex": "(a"}}, "the constraint's regex is not valid"),
        (CHAT | {"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "constraint is given with ignore_eos True"),
        (
            CHAT | {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "response_format and structured_outputs are given; accepted: one of them",
        ),
        (CHAT | {"chat_template_kwargs": {"messages": 1}}, "accepted: variables other than messages"),
        (CHAT | {"chat_template_kwargs": {"self": 1}}, "accepted: variables other than self"),
        (CHAT | {"chat_template_kwargs": {"no name": 1}}, "accepted: names that a chat template can use"),
        (CHAT | {"chat_template_kwargs": {"a": [1]}}, "accepted: variables that are strings, numbers, booleans"),
        (CHAT | {"chat_template_kwargs": {f"a{name}": 1 for name in range(65)}}, "accepted: up to 64 entries"),
    ],
    ids=lambda value: str(value)[:200],
)
def test_what_cannot_be_served_is_refused_by_name(strict: Client, body: Any, says: str) -> None:
    path = "chat/completions" if isinstance(body, dict) and "messages" in body else "completions"
    status, response = refusal(strict, body, path)
    error = response["error"]
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert says in error["message"]
    assert "\n" not in error["message"]
    if isinstance(body, bytes) or any(pair in error["message"] for pair in OF_SEVERAL_FIELDS):
        assert error["param"] is None or f'"{error["param"]}"'.encode() in body
    elif error["message"].endswith(" is missing") and error["param"] in ("model", "prompt"):
        assert error["message"] == f"{error['param']} is missing"
    else:
        assert error["param"] in body


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("completions", {"prompt": [515]}, "prompt"),
        ("completions", {"prompt": ["x", ""]}, "prompt"),
        ("completions", {"prompt": [1] * 400}, "prompt"),
        ("completions", {"max_tokens": 400}, "max_tokens"),
        ("completions", {"logprobs": 21}, "logprobs"),
        ("completions", {"prompt_logprobs": 21, "logprobs": 2}, "prompt_logprobs"),
        ("completions", {"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ("completions", {"structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs"),
        (
            "completions",
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "foo"}}}},
            "response_format",
        ),
        ("chat/completions", {"max_tokens": 400}, "max_tokens"),
        ("chat/completions", {"max_tokens": None, "max_completion_tokens": 400}, "max_completion_tokens"),
        ("chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("chat/completions", {"messages": [{"role": "user", "content": "x " * 2000}]}, "messages"),
        ("chat/completions", {"tool_choice": "required"}, "tool_choice"),
        ("responses", {"input": "x", "max_output_tokens": 400}, "max_output_tokens"),
        ("responses", {"input": "x", "tool_choice": "required"}, "tool_choice"),
        ("responses", {"input": "x", "top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
        ("responses", {"input": "x", "text": {"format": {"type": "json_schema", "schema": {"$ref": "#"}}}}, "text"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_error_names_the_field_by_its_name_in_the_body(
    strict: Client, path: str, fields: dict[str, Any], param: str, stream: bool
) -> None:
    base = {"completions": COMPLETION, "chat/completions": CHAT, "responses": {"model": MODEL}}[path]
    status, response = refusal(strict, base | fields | ({"stream": True} if stream else {}), path)
    assert (status, response["error"]["param"]) == (400, param)
    assert "\n" not in response["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_look_ahead_is_refused_in_a_line(strict: Client, stream: bool) -> None:
    _, response = refusal(strict, COMPLETION | {"structured_outputs": {"regex": "(?=a)b"}, "stream": stream})
    assert response["error"]["message"] == (
        'the constraint\'s regex is not valid: at 1(8): invalid regex "(?=a)b" (in regex): regex parse error: '
        "look-around, including look-ahead and look-behind, is not supported; accepted: the syntax of Rust's crate "
        "regex, without look-around and backreferences"
    )


@pytest.mark.usefixtures("unharmed")
def test_other_models_paths_methods_and_types_are_refused(server: Running) -> None:
    status, response = post(server.url, COMPLETION | {"model": "gpt"})
    assert (status, response["error"]["code"]) == (404, "model_not_found")
    assert "accepted: 'little'" in response["error"]["message"]
    status, response = post(server.url, COMPLETION | {"model": "m" * 100_000})
    assert (status, len(response["error"]["message"]) < 200) == (404, True)
    assert post(server.url, COMPLETION, "nowhere")[0] == 404
    assert post(server.url, COMPLETION, "models")[0] == 405
    assert post(server.url, COMPLETION, **{"Content-Type": "text/plain"})[0] == 415
    for path in ("v1/models/other", "page/../app.py"):
        with pytest.raises(urllib.error.HTTPError, match="404") as raised:
            urllib.request.urlopen(f"{server.url}/{path}")
        raised.value.close()


def test_chats_with_a_model_that_has_no_chat_template_are_refused(metadata: ModelMetadata, words: Tokenizer) -> None:
    files = {name: content for name, content in words.files.items() if name != "chat_template.jinja"}
    with scripted(metadata, Tokenizer(files, "the test")) as client:
        for stream in (False, True):
            status, response = refusal(client, CHAT | {"stream": stream}, "chat/completions")
            assert (status, response["error"]["type"]) == (400, "invalid_request_error")
            assert response["error"]["message"] == "the model has no chat template; accepted: /v1/completions"


@pytest.mark.usefixtures("unharmed")
def test_requests_that_are_too_large_are_refused(engine: Engine, loaded: tuple[Decoder, Tokenizer]) -> None:
    with serving(engine, loaded, max_body=2000) as running:
        assert post(running.url, COMPLETION | {"prompt": "x" * 1000})[0] == 400  # too many tokens
        assert post(running.url, COMPLETION | {"prompt": "x" * 2000})[0] == 413
        with socket.create_connection(("127.0.0.1", int(running.url.rsplit(":", 1)[1]))) as connection:
            connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"400\r\n" + b"x" * 1024 + b"\r\n")
            connection.sendall(b"400\r\n" + b"x" * 1024 + b"\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 413")


@pytest.mark.usefixtures("unharmed")
def test_requests_that_are_sent_too_slowly_are_refused(engine: Engine, loaded: tuple[Decoder, Tokenizer]) -> None:
    with serving(engine, loaded, body_seconds=0.05) as running:
        with socket.create_connection(("127.0.0.1", int(running.url.rsplit(":", 1)[1]))) as connection:
            connection.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
            assert connection.recv(100).startswith(b"HTTP/1.1 408")


@pytest.mark.usefixtures("unharmed")
def test_an_answer_that_takes_too_long_is_ended(engine: Engine, loaded: tuple[Decoder, Tokenizer]) -> None:
    with streams_held(engine), serving(engine, loaded, request_seconds=1) as running:
        with running.client() as client, pytest.raises(openai.APIError, match="took longer than"):
            for _ in client.completions.create(
                model=MODEL, prompt="x", max_tokens=390, n=4, stream=True, extra_body={"ignore_eos": True}
            ):
                pass
        wait_until_idle(running)
    with serving(engine, loaded, request_seconds=0.001) as running:
        status, response = post(running.url, COMPLETION | {"max_tokens": 390, "ignore_eos": True, "n": 4})
        assert (status, response["error"]["code"]) == (504, "timeout")
        wait_until_idle(running)
    assert engine.stats().pages_in_use == 0


@pytest.mark.usefixtures("unharmed")
def test_clients_that_vanish_are_dropped(server: Running) -> None:
    host = ("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
    draw = random.Random(0)
    for stream in (True, False) * 10:
        body = json.dumps(COMPLETION | {"max_tokens": 390, "ignore_eos": True, "stream": stream, "n": 3}).encode()
        sent = HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body
        with socket.create_connection(host) as connection:
            if draw.random() < 0.2:
                connection.sendall(sent[: draw.randrange(len(sent))])
                continue
            connection.sendall(sent)
            if stream and draw.random() < 0.5:
                connection.recv(1000)
    wait_until_idle(server)


# The warning is about schemathesis' own strategies.
@pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")
@pytest.mark.parametrize("examples", [12, pytest.param(100, marks=pytest.mark.nightly)])
def test_nothing_makes_the_server_fail(strict: Client, examples: int) -> None:
    statuses: set[int] = set()
    always = [not_a_server_error, status_code_conformance, response_schema_conformance]
    checks = {GenerationMode.POSITIVE: always, GenerationMode.NEGATIVE: [*always, negative_data_rejection]}
    options: Any = {"deadline": None, "database": None, "derandomize": True, "suppress_health_check": [*HealthCheck]}

    def no_server_error(operation: APIOperation, mode: GenerationMode) -> None:
        @settings(max_examples=examples, phases=[Phase.explicit, Phase.generate], **options)
        @given(case=operation.as_strategy(mode))
        def check(case: Case) -> None:
            statuses.add(case.call_and_validate(checks=checks[mode]).status_code)

        check()

    for result in schemathesis.openapi.from_asgi("/openapi.json", strict.app).get_all_operations():
        operation = result.ok()  # pyright: ignore[reportAttributeAccessIssue]
        no_server_error(operation, GenerationMode.POSITIVE)
        if operation.body:
            no_server_error(operation, GenerationMode.NEGATIVE)
    assert statuses >= {200, 400, 404}
