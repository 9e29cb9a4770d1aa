"""Every status: when it is answered, with which error and which headers, and what the log and the metrics say of it."""

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any, Final
from unittest import mock

import pytest
from pydantic import ValidationError

from detjax.engine import EngineClosed, FieldError, NotFinite, Request, Token
from detjax.models import ModelMetadata, Tokenizer
from detjax.server.api import openapi
from detjax.server.api.pooling_routes import POOLING_ROUTES
from detjax.server.api.schemas import CompletionRequest
from detjax.server.http import errors
from detjax.server.http.errors import ApiError, from_validation_error, to_api_error
from detjax.server.http.requests import RequestLog, RequestRecord, record_of
from detjax.version import __version__
from tests.server.running_server import MODEL
from tests.server.scripted import LENGTH, Client, scripted

BODY: Final = {"model": MODEL, "prompt": [5, 6, 7]}
MESSAGES: Final[Any] = [{"role": "user", "content": "Hi"}]


def error(message: str, kind: str = "invalid_request_error", param: str | None = None, code: str | None = None) -> Any:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


# --- what a request is refused for ------------------------------------------------------------------------------------


def test_types_of_errors_are_openais() -> None:
    kinds = {status: ApiError(status, "m").body["error"]["type"] for status in (400, 401, 403, 404, 413, 429, 500, 503)}
    assert kinds == {
        400: "invalid_request_error",
        401: "authentication_error",
        403: "invalid_request_error",
        404: "not_found_error",
        413: "invalid_request_error",
        429: "rate_limit_error",
        500: "server_error",
        503: "server_error",
    }


def test_keys_are_compared_whole_and_their_kind_is_read_in_any_case(metadata: ModelMetadata, words: Tokenizer) -> None:
    with scripted(metadata, words, api_keys=("one", "two")) as api:
        routes = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize")
        for headers, accepted in (
            ({}, False),
            ({"Authorization": "Bearer one"}, True),
            ({"Authorization": "bearer two"}, True),
            ({"Authorization": "Bearer  two "}, True),
            ({"Authorization": "Basic one"}, False),
            ({"Authorization": "one"}, False),
            ({"Authorization": "Bearer on"}, False),
            ({"Authorization": "Bearer onex"}, False),
            ({"Authorization": "Bearer \xe9".encode("latin-1")}, False),
            ({"Authorization": "Bearer"}, False),
        ):
            answer = api.get("/v1/models", headers=headers)
            assert answer.status_code == (200 if accepted else 401), headers
            if not accepted:
                sent = headers.get("Authorization", "")
                is_key = len(sent.split()) > 1
                problem = "the API key is wrong" if is_key else "no API key was sent"
                expected = f"{problem}; expected: the header 'Authorization: Bearer KEY' with a key of this server"
                assert answer.json() == error(expected, "authentication_error", code="invalid_api_key")
                assert answer.headers["WWW-Authenticate"] == "Bearer"
        for path in routes:
            assert api.post(path, json={}).status_code == 401, path
        for path in ("/v1/models/little", "/v1/responses/x", "/version"):
            assert api.get(path).status_code == 401, path
        for path in ("/health", "/metrics", "/openapi.json", "/"):
            assert api.get(path).status_code == 200, path


def test_the_key_is_the_client_and_may_have_prefixes_of_its_own(metadata: ModelMetadata, words: Tokenizer) -> None:
    asked: dict[tuple[str, bool], Request] = {}
    for separate in (False, True):
        with scripted(metadata, words, api_keys=("one", "two"), separate_prefixes=separate) as api:
            for key in ("one", "two"):
                api.headers["Authorization"] = f"Bearer {key}"
                asked[key, separate] = api.asked("/v1/completions", prompt=[5])
                salted = api.asked("/v1/completions", prompt=[5], cache_salt="s")
                assert (salted.cache_salt == "s") is not separate
                assert salted.cache_salt != asked[key, separate].cache_salt
    assert asked["one", False].client == asked["one", True].client != asked["two", False].client
    assert re.fullmatch("[0-9a-f]{64}", asked["one", False].client or "")
    assert [asked[key, False].cache_salt for key in ("one", "two")] == [None, None]
    assert asked["one", True].cache_salt != asked["two", True].cache_salt


def test_unknown_models_responses_and_paths_are_not_found(api: Client) -> None:
    message = "model is 'gpt'; accepted: 'little'"
    missing = error(message, "not_found_error", param="model", code="model_not_found")
    for path, body in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/responses", {"input": "x"}),
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [1]}),
    ):
        answer = api.post(path, json={"model": "gpt"} | body)
        assert (answer.status_code, answer.json()) == (404, missing), path
    assert api.get("/v1/models/gpt").json() == missing
    for method in ("GET", "POST", "DELETE"):
        answer = api.request(method, "/v1/responses/resp_1/cancel")
        expected = "response 'resp_1/cancel' does not exist: the server stores none"
        assert (answer.status_code, answer.json()) == (404, error(expected, "not_found_error"))
    assert api.get("/nowhere").json() == error("Not Found", "not_found_error")
    answer = api.get("/v1/completions")
    assert (answer.status_code, answer.headers["Allow"]) == (405, "POST")
    assert answer.json() == error("Method Not Allowed")


def test_only_json_is_read_up_to_its_size_in_bytes(metadata: ModelMetadata, words: Tokenizer) -> None:
    body = json.dumps(BODY).encode()
    with scripted(metadata, words, max_body=len(body)) as api:
        for kind, accepted in (
            ("application/json", True),
            ("Application/JSON; charset=utf-8", True),
            (" application/json ;x", True),
            ("text/plain", False),
            ("application/jsonl", False),
            ("", False),
        ):
            answer = api.post("/v1/completions", content=body, headers={"Content-Type": kind})
            assert answer.status_code == (200 if accepted else 415), kind
        expected = "the content type is 'text/plain'; accepted: application/json"
        answer = api.post("/v1/completions", content=body, headers={"Content-Type": "Text/Plain; x"})
        assert answer.json() == error(expected)
        headers = {"Content-Type": "application/json"}
        too_large = error(f"the request is too large; accepted: up to {len(body)} bytes")
        answer = api.post("/v1/completions", content=body + b" ", headers=headers)
        assert (answer.status_code, answer.json()) == (413, too_large)
        for more, status in ((b"", 200), (b" ", 413)):  # without a length, in parts

            def parts(more: bytes = more) -> Iterator[bytes]:
                yield body[:10]
                yield body[10:] + more

            assert api.post("/v1/completions", content=parts(), headers=headers).status_code == status
        lying = api.post("/v1/completions", content=body, headers=headers | {"Content-Length": "1000"})
        assert lying.status_code == 413


def test_a_queue_is_full_at_its_capacity(metadata: ModelMetadata, words: Tokenizer) -> None:
    with scripted(metadata, words, max_in_flight=3) as api:
        api.app.state.guard.in_flight = 2  # pyright: ignore[reportAttributeAccessIssue]
        assert api.post("/v1/completions", json=BODY).status_code == 200
        answer = api.post("/v1/completions", json=BODY | {"n": 2})
        message = (
            "the queue is full: 2 samples are in flight and the request has 2; accepted: up to 3 in total. Retry later."
        )
        assert answer.json() == error(message, "rate_limit_error", code="queue_full")
        assert (answer.status_code, answer.headers["Retry-After"]) == (429, "1")
        answer = api.post("/v1/completions", json=BODY | {"n": 4})
        assert answer.json() == error("the request has 4 samples; accepted: up to 3 at once", param="n")
        assert api.post("/tokenize", json={"prompt": "x"}).status_code == 200
        api.app.state.guard.in_flight = 3  # pyright: ignore[reportAttributeAccessIssue]
        assert api.post("/tokenize", json={"prompt": "x"}).status_code == 429
        assert api.post("/v1/responses", json={"model": MODEL, "input": "x"}).status_code == 429
        assert api.app.state.guard.in_flight == 3  # pyright: ignore[reportAttributeAccessIssue]


def test_a_server_that_shuts_down_or_has_failed_says_so(api: Client) -> None:
    assert api.get("/health").json() == {"status": "ok"}
    api.app.state.guard.drain()  # pyright: ignore[reportAttributeAccessIssue]
    answer = api.post("/v1/completions", json=BODY)
    expected = error("the server is shutting down; send the request to another server", "server_error")
    assert (answer.status_code, answer.json(), answer.headers["Connection"]) == (503, expected, "close")
    health = api.get("/health")
    assert (health.status_code, health.json()) == (503, {"status": "shutting down"})
    api.script.failure = RuntimeError("lost")
    health = api.get("/health")
    assert (health.status_code, health.json()) == (503, {"status": "the engine has failed"})


def test_a_request_ends_at_its_deadline(metadata: ModelMetadata, words: Tokenizer) -> None:
    async def never(*_: object, **__: object) -> AsyncGenerator[Any]:
        await asyncio.Event().wait()
        yield []

    message = "the request took longer than 0.02 s, the server's limit. Ask for fewer tokens."
    late = error(message, "server_error", code="timeout")
    with scripted(metadata, words, request_seconds=0.02) as api, mock.patch.object(api.script, "stream", never):
        for stream in (False, True):
            answer = api.post("/v1/completions", json=BODY | {"stream": stream})
            assert (answer.status_code, answer.json()) == (504, late)
        assert api.app.state.guard.in_flight == 0  # pyright: ignore[reportAttributeAccessIssue]


def test_a_body_that_does_not_arrive_in_time_is_refused(metadata: ModelMetadata, words: Tokenizer) -> None:
    async def ask() -> list[dict[str, Any]]:
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            await asyncio.Event().wait()
            return {}

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
        await app(scope, receive, send)
        return sent

    with scripted(metadata, words, body_seconds=0.02) as api:
        app: Any = api.app
        start, body = asyncio.run(ask())
    assert start["status"] == 408
    message = "the request did not arrive within 0.02 s, the server's limit"
    assert json.loads(body["body"]) == error(message, code="timeout")


def test_errors_of_the_engine_have_their_status_whole_and_streamed(
    api: Client, caplog: pytest.LogCaptureFixture
) -> None:
    bug = "internal error: this is a bug in the server; its log has the details"
    for raised, status, expected in (
        (FieldError("too hot", "temperature"), 400, error("too hot", param="temperature")),
        (FieldError("no prompt", "prompt"), 400, error("no prompt", param="prompt")),
        (ValueError("too much"), 400, error("too much")),
        (NotFinite("NaN"), 500, error("NaN", "server_error")),
        (RuntimeError("a secret"), 500, error(bug, "server_error")),
        (ApiError(418, "m", param="p", code="c"), 418, error("m", param="p", code="c")),
    ):
        api.script.error = raised
        for stream in (False, True):
            answer = api.post("/v1/completions", json=BODY | {"stream": stream})
            assert (answer.status_code, answer.json()) == (status, expected)
    assert "a secret" in caplog.text
    assert to_api_error(EngineClosed("gone")).status == 503
    assert to_api_error(FieldError("m", "f")).body == error("m")


def test_an_error_after_the_first_event_is_an_event(api: Client) -> None:
    async def stream(requests: Sequence[Request], *, is_whole: bool) -> AsyncGenerator[Any]:
        yield [(0, Token(0, 5, -1.0, (), "x", None, 1))]
        yield FieldError("too late", "temperature")

    with mock.patch.object(api.script, "stream", stream):
        answer = api.post("/v1/completions", json=BODY | {"stream": True})
        assert answer.status_code == 200
        *_, last, rest = answer.text.split("\n\n")
        assert (json.loads(last.removeprefix("data: ")), rest) == (error("too late", param="temperature"), "")
        answer = api.post("/v1/responses", json={"model": MODEL, "input": "Hi", "stream": True})
        *events, last, rest = answer.text.split("\n\n")
        number = len(events)
        event = {
            "type": "error",
            "sequence_number": number,
            "code": None,
            "message": "too late",
            "param": "temperature",
        }
        assert (last.split("\n")[0], json.loads(last.split("\n")[1].removeprefix("data: "))) == ("event: error", event)
    assert api.app.state.guard.in_flight == 0  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_that_leave_no_room_are_too_long(api: Client, stream: bool) -> None:
    code = "context_length_exceeded"
    words = "word " * 500
    asked = {"stream": stream}
    status, given = api.refusal("/v1/completions", prompt=["x", words], max_tokens=9, **asked)
    assert (status, given["param"], given["code"]) == (400, "prompt", code)
    assert re.fullmatch(
        r"prompt 1 has \d+ tokens and asks for 9 more tokens; accepted: 400 in total, the server's context length. "
        "Lower max_tokens or shorten the prompt.",
        given["message"],
    )
    for path, field, body in (
        ("/v1/chat/completions", "messages have", {"messages": [{"role": "user", "content": words}]}),
        ("/v1/responses", "input has", {"input": words}),
    ):
        status, given = api.refusal(path, **body, **asked)
        assert (status, given["param"], given["code"]) == (400, field.split()[0], code)
        pattern = (
            rf"{field} \d+ tokens; accepted: up to 399 tokens, which leaves room for one more. Shorten the messages."
        )
        assert re.fullmatch(pattern, given["message"])


def test_a_conversation_may_leave_room_for_one_token(metadata: ModelMetadata, words: Tokenizer) -> None:
    tokenizer = words.with_chat_template("{{ messages[0].content }}")
    with scripted(metadata, tokenizer) as api:
        for tokens, accepted in ((LENGTH - 1, True), (LENGTH, False)):
            text = "\n\0" * (tokens // 2) + "\n" * (tokens % 2)
            assert len(words.encode(text)) == tokens
            answer = api.post(
                "/v1/chat/completions", json={"model": MODEL, "messages": [{"role": "user", "content": text}]}
            )
            assert (answer.status_code == 200) is accepted
        assert api.script.asked[-1].sampling.max_tokens == 1


def test_no_more_than_five_faults_are_told() -> None:
    def fault_of(**fields: Any) -> dict[str, Any]:
        with pytest.raises(ValidationError) as raised:
            CompletionRequest.model_validate(BODY | fields)
        return from_validation_error(raised.value).body["error"]

    five = dict.fromkeys(("temperature", "top_p", "min_p", "n", "max_tokens"), -1)
    assert fault_of(**five)["message"].count("; ") == 4
    assert "more" not in fault_of(**five)["message"].split("; ")[-1].split()
    six = fault_of(**five, logprobs=-1)
    assert six["message"].endswith("; and 1 more")
    assert six["param"] == "temperature"
    assert fault_of(**{"a" * 81: 1}) == {
        "message": f"there is no field {'a' * 80}...",
        "type": "invalid_request_error",
        "param": f"{'a' * 80}...",
        "code": "extra_forbidden",
    }
    many = fault_of(**{f"nonsense{number}": 1 for number in range(300)})
    assert many["message"] == "there are no fields nonsense0, nonsense1, nonsense2, ..."
    assert (many["param"], many["code"]) == ("nonsense0", "extra_forbidden")
    assert fault_of(seed="\ud800")["message"].isascii()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a" * 78, "'" + "a" * 78 + "'"),
        ("a" * 79, "'" + "a" * 79 + "..."),
        (list(range(3)), "[0, 1, 2]"),
        (list(range(4)), "[0, 1, 2, ...]"),
        ({"a": 1, "b": 2, "c": 3, "d": 4}, "{'a': 1, 'b': 2, 'c': 3, ...}"),
        ([[], [[]], {}, 1], "[[], [[]], {}, ...]"),
        ([[[1]], [[2]]], "[[[...]], [[...]]]"),
        (10**100, "1" + "0" * 79 + "..."),
        (True, "True"),
    ],
)
def test_values_are_quoted_up_to_their_limits(value: object, text: str) -> None:
    assert errors.quote(value) == text


# --- hosts and origins ------------------------------------------------------------------------------------------------


def test_hosts_are_compared_without_port_case_and_last_dot(metadata: ModelMetadata, words: Tokenizer) -> None:
    hosts = ("localhost", "[::1]", "*.Example.com")
    with scripted(metadata, words, allowed_hosts=hosts) as api:
        for host, accepted in (
            ("localhost", True),
            ("LOCALHOST.:80", True),
            ("[::1]:8000", True),
            ("[::1]", True),
            ("a.b.EXAMPLE.com", True),
            ("example.com", False),
            ("xexample.com", False),
            ("localhost.attacker", False),
            ("attacker:localhost", False),
        ):
            answer = api.get("/health", headers={"Host": host})
            assert answer.status_code == (200 if accepted else 403), host
        expected = (
            "the request is for the host 'attacker'; accepted: localhost, [::1], *.Example.com. Start the server with "
        )
        for names in (("localhost", "attacker"), ("localhost", "localhost")):
            twice = [("Host", name) for name in names]
            assert api.get("/health", headers=twice).status_code == 403, "a proxy may have read the other one"
        answer = api.get("/health", headers={"Host": "Attacker:80"})
        assert answer.json() == error(f"{expected}--allowed-host to accept another one.", code="host_not_allowed")
    for hosts in (("*",), None):
        with scripted(metadata, words, allowed_hosts=hosts) as api:
            assert api.get("/health", headers={"Host": "anything"}).status_code == 200


def test_browsers_may_send_keys_and_read_ids_from_allowed_origins(metadata: ModelMetadata, words: Tokenizer) -> None:
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    with scripted(metadata, words, allowed_origins=("https://a.example",)) as api:
        preflight = api.options("/v1/completions", headers={"Origin": "https://a.example"} | asked)
        assert preflight.headers["Access-Control-Allow-Methods"] == "GET, POST"
        assert preflight.headers["Access-Control-Allow-Headers"] == "authorization"
        refused = api.options(
            "/v1/completions",
            headers={"Origin": "https://a.example"} | asked | {"Access-Control-Request-Method": "DELETE"},
        )
        assert refused.status_code == 400
        answer = api.get("/health", headers={"Origin": "https://a.example"})
        assert answer.headers["Access-Control-Expose-Headers"] == "X-Request-Id"


def test_the_page_has_headers_that_keep_others_out(api: Client) -> None:
    for path in ("/", "/page/sha256.js"):
        headers = api.get(path).headers
        policy = "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
        assert headers["Content-Security-Policy"] == policy
        assert (headers["X-Content-Type-Options"], headers["Cache-Control"]) == ("nosniff", "no-cache")
    stream = api.post("/v1/completions", json=BODY | {"stream": True})
    assert stream.headers["Cache-Control"] == "no-cache"
    assert stream.headers["Content-Type"].startswith("text/event-stream")
    assert "Content-Length" not in stream.headers
    assert api.get("/metrics").headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert api.get("/version").json() == {"version": __version__}


# --- the log and the metrics ------------------------------------------------------------------------------------------


def numbers(api: Client) -> dict[str, float]:
    lines = (line.rsplit(" ", 1) for line in api.get("/metrics").text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in lines}


def test_metrics_count_requests_and_tokens(api: Client) -> None:
    api.post("/v1/completions", json=BODY | {"n": 2})
    api.post("/v1/completions", json=BODY | {"n": 2, "stream": True})
    api.post("/v1/completions", json=BODY | {"n": 0})
    api.get("/v1/models/gpt")
    got = numbers(api)
    assert got['detjax_requests_total{path="/v1/completions",status="200"}'] == 2
    assert got['detjax_requests_total{path="/v1/completions",status="400"}'] == 1
    assert got['detjax_requests_total{path="other",status="404"}'] == 1
    assert got['detjax_request_seconds_count{path="/v1/completions"}'] == 3
    assert got["detjax_prompt_tokens_total"] == 6
    assert got["detjax_generated_tokens_total"] == 8
    assert got["detjax_first_token_seconds_count"] == 1
    assert got["detjax_next_token_seconds_count"] == 2
    assert got["detjax_lost_replicas_total"] == 0
    names = [name for name in got if name.startswith("detjax_first_token_seconds_bucket")]
    bounds = "0.005 0.01 0.025 0.05 0.1 0.25 0.5 1.0 2.5 5.0 10.0 30.0 60.0 120.0 300.0 600.0 +Inf".split()
    assert names == [f'detjax_first_token_seconds_bucket{{le="{bound}"}}' for bound in bounds]


@contextlib.contextmanager
def lines() -> Iterator[list[Any]]:
    """The fields of the access log's lines, each with its message."""
    written: list[Any] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            written.append(record.__dict__["fields"] | {"message": record.getMessage()})

    log = logging.getLogger("detjax.server.http.requests")
    kept, level = Kept(), log.level
    log.addHandler(kept)
    log.setLevel(logging.INFO)
    try:
        yield written
    finally:
        log.removeHandler(kept)
        log.setLevel(level)


def test_a_line_of_the_log_has_every_field(api: Client) -> None:
    with lines() as written:
        api.post("/v1/completions", json=BODY | {"n": 2})
        api.post("/v1/completions", json=BODY | {"n": 2, "stream": True})
        api.post("/v1/completions", json=BODY | {"n": 0})
        api.get("/" + "x" * 300)
    for line in written:
        assert line.pop("seconds") >= 0
        line["message"] = re.sub(r"\d\.\d{3} s", "T s", line["message"])
    place = {"client": "testclient:50000", "method": "POST", "path": "/v1/completions", "complete": True}
    said = 'testclient:50000 "POST /v1/completions"'
    assert written[:3] == [
        *[place | {"status": 200, "prompt_tokens": 3, "generated_tokens": 4, "message": f"{said} 200 T s 3 + 4 tokens"}]
        * 2,
        place | {"status": 400, "prompt_tokens": None, "generated_tokens": 0, "message": f"{said} 400 T s"},
    ]
    assert len(written[3]["path"]) == 200


def test_requests_that_end_early_have_statuses_of_their_own() -> None:
    async def answer(scope: Any, receive: Any, send: Any) -> None:
        record_of(scope).generated_tokens = 7
        match scope["path"]:
            case "/breaks":
                raise RuntimeError("a bug")
            case "/half":
                await send({"type": "http.response.start", "status": 200})
                await send({"type": "http.response.body", "body": b"x", "more_body": True})
            case "/whole":
                await send({"type": "http.response.start", "status": 201, "headers": [(b"a", b"b")]})
                await send({"type": "http.response.body", "body": b"x"})

    async def ask(path: str, *headers: tuple[bytes, bytes]) -> list[Any]:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "GET", "path": path, "headers": headers}
        with contextlib.suppress(RuntimeError):
            await RequestLog(answer)(scope, mock.AsyncMock(), send)
        return sent

    with lines() as written:
        for path in ("/breaks", "/half", "/left", "/whole"):
            asyncio.run(ask(path))
    got = [(line["path"], line["status"], line["complete"], line["generated_tokens"]) for line in written]
    assert got == [
        ("/breaks", 500, False, 7),
        ("/half", 200, False, 7),
        ("/left", 499, False, 7),
        ("/whole", 201, True, 7),
    ]
    assert [" cut off" in line["message"] for line in written] == [True, True, True, False]
    longest = b"a" * 128
    for given, is_kept in (
        (longest, True),
        (longest + b"a", False),
        (b"aZ0._:@/+=-", True),
        (b"", False),
        (b"a\n", False),
    ):
        start, _ = asyncio.run(ask("/whole", (b"x-request-id", given)))
        (made,) = [value for name, value in start["headers"] if name == b"x-request-id"]
        assert (made == given) is is_kept
        assert is_kept or re.fullmatch(rb"req-[0-9a-f]{32}", made)
        assert (b"a", b"b") in start["headers"]
    assert RequestRecord("x") == RequestRecord("x", None, 0)


# --- the document -----------------------------------------------------------------------------------------------------


def test_the_document_tells_every_status_of_every_operation() -> None:
    document = openapi.document("m", needs_key=True)
    statuses = {
        f"{method} {path}": sorted(map(int, operation["responses"]))
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
        if method != "parameters"
    }
    generates = [200, 400, 401, 404, 408, 413, 415, 429, 503, 504]
    assert statuses == {
        "post /v1/completions": generates,
        "post /v1/chat/completions": generates,
        "post /v1/responses": generates,
        "get /v1/responses/{id}": [401, 404],
        "delete /v1/responses/{id}": [401, 404],
        **{f"post {path}": generates for path in POOLING_ROUTES},
        "post /tokenize": generates,
        "post /detokenize": generates,
        "get /version": [200, 401],
        "get /v1/models": [200, 401],
        "get /v1/models/{name}": [200, 401, 404],
        "get /health": [200, 503],
        "get /metrics": [200],
    }
    assert document["security"] == [{"key": []}]
    assert document["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    assert [path for path, one in document["paths"].items() if one.get("get", {}).get("security") == []] == [
        "/health",
        "/metrics",
    ]
    open_to_all = openapi.document("m", needs_key=False)
    assert "security" not in open_to_all and "securitySchemes" not in open_to_all["components"]
    for schema in ("CompletionRequest", "ChatRequest", "ResponsesRequest"):
        assert document["components"]["schemas"][schema]["properties"]["model"]["enum"] == ["m"]
    choice = document["paths"]["/v1/completions"]["post"]["responses"]["200"]["content"]
    assert set(choice) == {"application/json", "text/event-stream"}
