"""Receipts of the server: `detjax verify` finds them true, and whatever contradicts them is refused."""

import copy
import json
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from detjax.audit import Transcript, Verdict, read_transcripts, transcripts_in, verify
from detjax.models import Decoder, Tokenizer
from tests.server.running_server import MODEL, Running

MESSAGES: Any = [{"role": "user", "content": "Who?"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "prompt": ["A prompt", "Another"],
        "n": 2,
        "logprobs": 2,
        "echo": True,
        "temperature": 0.9,
        "top_p": 0.9,
        "presence_penalty": 0.5,
        "logit_bias": {"7": 2},
        "min_tokens": 3,
        "return_token_ids": True,
        "max_tokens": 5,
    },
    "/v1/chat/completions": {"messages": MESSAGES, "logprobs": True, "return_token_ids": True, "max_tokens": 5},
    "/v1/responses": {
        "input": "Who?",
        "max_output_tokens": 5,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    },
}


def post(server: Running, path: str, body: dict[str, Any]) -> tuple[int, str]:
    """The status and the body of an answer."""
    data = json.dumps({"model": MODEL, "receipt": True, "seed": 3} | body).encode()
    request = urllib.request.Request(f"{server.url}{path}", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.fixture(scope="module")
def responses(server: Running) -> dict[str, dict[str, Any]]:
    """A response of each endpoint, with receipts."""
    return {path: json.loads(post(server, path, body)[1]) for path, body in BODIES.items()}


def verdicts(responses: list[Any], loaded: tuple[Decoder, Tokenizer], folder: Path) -> list[Verdict]:
    file = folder / "responses.jsonl"
    file.write_text("\n".join(map(json.dumps, responses)))
    model, tokenizer = loaded
    return verify(model, list(read_transcripts(file, tokenizer).values()), tokenizer)


def test_receipts_of_every_endpoint_are_verified(
    responses: dict[str, dict[str, Any]], loaded: tuple[Decoder, Tokenizer], tmp_path: Path
) -> None:
    checked = verdicts(list(responses.values()), loaded, tmp_path)
    assert [str(verdict) for verdict in checked] == ["verified"] * 6


def test_a_response_in_memory_is_read_as_a_file_is(
    responses: dict[str, dict[str, Any]], loaded: tuple[Decoder, Tokenizer], tmp_path: Path
) -> None:
    for path, response in responses.items():
        altered = copy.deepcopy(response) | {"system_fingerprint": "detjax-1-0-0"}
        for one in (response, altered):
            (tmp_path / "response.json").write_text(json.dumps(one))
            expected = list(read_transcripts(tmp_path / "response.json", loaded[1]).values())
            assert transcripts_in(one, loaded[1]) == expected, path
            assert {transcript.contradiction is None for transcript in expected} == {one is response}
    with pytest.raises(ValueError, match="the response: a response has no receipt"):
        transcripts_in({"choices": [{"text": "x", "finish_reason": "abort"}]})


def test_streams_end_with_the_receipts_of_whole_responses(
    responses: dict[str, dict[str, Any]], server: Running
) -> None:
    for path in ("/v1/chat/completions", "/v1/responses"):
        lines = post(server, path, BODIES[path] | {"stream": True})[1].splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        if path == "/v1/responses":
            assert events[-1]["response"]["receipt"] == responses[path]["receipt"]
            continue
        given = [choice["receipt"] for event in events for choice in event["choices"] if "receipt" in choice]
        assert given == [responses[path]["choices"][0]["receipt"]]


def test_answers_without_the_field_have_no_receipt(server: Running) -> None:
    _, answer = post(server, "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1, "receipt": False})
    assert "receipt" not in json.loads(answer)["choices"][0]


ALTERED: dict[str, tuple[str, Callable[[dict[str, Any]], Any], str]] = {
    "text": ("/v1/completions", lambda r: r["choices"][1].update(text="another text"), "response"),
    "token": ("/v1/completions", lambda r: r["choices"][2]["token_ids"].__setitem__(1, 1), "response"),
    "prompt": ("/v1/completions", lambda r: r["choices"][2]["prompt_token_ids"].append(1), "response"),
    "logprob": ("/v1/completions", lambda r: r["choices"][0]["logprobs"]["token_logprobs"].append(-1.0), "response"),
    "end": ("/v1/chat/completions", lambda r: r["choices"][0].update(finish_reason="stop"), "response"),
    "message": ("/v1/chat/completions", lambda r: r["choices"][0]["message"].update(content="No"), "response"),
    "chat logprob": (
        "/v1/chat/completions",
        lambda r: r["choices"][0]["logprobs"]["content"][0].update(logprob=-2.5),
        "response",
    ),
    "output": ("/v1/responses", lambda r: r["output"][0]["content"][0].update(text="No"), "response"),
    "seed": ("/v1/completions", lambda r: r["choices"][1].update(seed=4), "response"),
    "seed of the response": ("/v1/responses", lambda r: r.update(seed=4), "response"),
    "status": ("/v1/responses", lambda r: r.update(status="completed"), "response"),
    "server": ("/v1/responses", lambda r: r.update(system_fingerprint="detjax-1-0-0"), "response"),
    "seed in the receipt": ("/v1/responses", lambda r: r["receipt"]["sampling"].update(seed=4), "response"),
    "seed in both": (
        "/v1/responses",
        lambda r: (r["receipt"]["sampling"].update(seed=4), r.update(seed=4)),
        "digest",
    ),
    "weights in the receipt": ("/v1/responses", lambda r: r["receipt"].update(model="0" * 64), "digest"),
}


@pytest.mark.parametrize("name", ALTERED)
def test_an_altered_response_is_refused(
    responses: dict[str, dict[str, Any]], loaded: tuple[Decoder, Tokenizer], tmp_path: Path, name: str
) -> None:
    path, change, reason = ALTERED[name]
    response = copy.deepcopy(responses[path])
    change(response)
    reasons = [verdict.reason for verdict in verdicts([response], loaded, tmp_path)]
    assert [one for one in reasons if one is not None] == [reason]


def test_a_receipt_that_was_sealed_again_is_refused_for_what_it_says(
    responses: dict[str, dict[str, Any]], loaded: tuple[Decoder, Tokenizer]
) -> None:
    receipt = responses["/v1/completions"]["choices"][3]["receipt"]
    changes = {"environment": "0" * 16, "model": "0" * 64, "logprobs": [-1.0, *receipt["logprobs"][1:]]}
    forged = [Transcript.from_json(receipt | {name: value}).sealed() for name, value in changes.items()]
    reasons = [verdict.reason for verdict in verify(loaded[0], forged, loaded[1])]
    assert reasons == ["environment", "model", "logprob"]


@pytest.mark.parametrize(
    ("path", "sent", "reason"),
    [
        ("/v1/completions", {"prompt": "x", "max_tokens": 0, "echo": True}, "receipt is true and max_tokens is 0"),
        ("/v1/chat/completions", {"messages": MESSAGES, "receipt": "yes, please"}, "receipt"),
    ],
)
def test_what_has_no_receipt_is_refused(server: Running, path: str, sent: dict[str, Any], reason: str) -> None:
    status, answer = post(server, path, sent)
    assert (status, reason in json.loads(answer)["error"]["message"]) == (400, True)
