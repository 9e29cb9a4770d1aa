"""/tokenize and /detokenize give what the tokenizer and the chat template give, in vLLM's form."""

import json
import threading
import urllib.error
import urllib.request
from typing import Any

import pytest

from detjax.engine import Engine
from detjax.models import Decoder, Tokenizer
from detjax.server.http.field_types import MAX_TOKENS
from detjax.version import __version__
from tests.server.running_server import MODEL, Running, serving
from tests.support.waits import HANGS_AFTER

TEXT = "Some é你 words <|im_end|> more"
MESSAGES = [{"role": "user", "content": "Who?"}]


def send(url: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"} | headers)
    try:
        with urllib.request.urlopen(request, timeout=HANGS_AFTER) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_texts_become_tokens_and_texts_again(server: Running, loaded: tuple[Decoder, Tokenizer]) -> None:
    tokenizer = loaded[1]
    for text in (TEXT, "", TEXT * 2000):  # the last one is for a worker, and has more tokens than the model's context
        tokens = tokenizer.encode(text)
        status, answer = send(f"{server.url}/tokenize", {"prompt": text, "return_token_strs": True})
        assert status == 200
        assert answer == {
            "count": len(tokens),
            "max_model_len": server.engine.max_length,
            "tokens": tokens,
            "token_strs": [tokenizer.token_bytes(token).decode(errors="replace") for token in tokens],
        }
        status, answer = send(f"{server.url}/detokenize", {"model": MODEL, "tokens": tokens})
        assert (status, answer) == (200, {"prompt": text})
    assert send(f"{server.url}/tokenize", {"prompt": "x"})[1]["token_strs"] is None


def test_conversations_become_the_tokens_of_the_chat_template(
    server: Running, loaded: tuple[Decoder, Tokenizer]
) -> None:
    tokenizer = loaded[1]
    for generation_prompt in (True, False):
        body = {"messages": MESSAGES, "add_generation_prompt": generation_prompt, "model": MODEL}
        text = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=generation_prompt)
        expected = tokenizer.encode(text, add_special_tokens=False)
        assert send(f"{server.url}/tokenize", body)[1]["tokens"] == expected
    default = send(f"{server.url}/tokenize", {"messages": MESSAGES})[1]["tokens"]
    text = tokenizer.apply_chat_template(MESSAGES)
    assert default == tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("tokenize", {}, 400, "neither prompt nor messages is given; accepted: one of them"),
        ("tokenize", {"prompt": "x", "messages": MESSAGES}, 400, "prompt and messages are given"),
        ("tokenize", {"prompt": "x", "add_generation_prompt": True}, 400, "that field with messages"),
        ("tokenize", {"prompt": "x", "model": "gpt"}, 404, "accepted: 'little'"),
        ("tokenize", {"prompt": "x", "nonsense": 1}, 400, "there is no field nonsense"),
        ("tokenize", {"prompt": "\n\0" * (MAX_TOKENS // 2 + 1)}, 400, f"accepted: up to {MAX_TOKENS} tokens"),
        ("detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("detokenize", {"tokens": "x"}, 400, "tokens"),
        ("detokenize", {}, 400, "tokens is missing"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_cannot_be_tokenized_is_refused(server: Running, path: str, body: Any, status: int, says: str) -> None:
    answered, answer = send(f"{server.url}/{path}", body)
    assert answered == status, answer
    assert says in answer["error"]["message"]


def test_the_version_is_told(server: Running) -> None:
    assert send(f"{server.url}/version") == (200, {"version": __version__})


def test_these_routes_need_the_key_too(engine: Engine, loaded: tuple[Decoder, Tokenizer]) -> None:
    with serving(engine, loaded, api_keys=["the-key"]) as running:
        for path, body in (("tokenize", {"prompt": "x"}), ("detokenize", {"tokens": [1]}), ("version", None)):
            assert send(f"{running.url}/{path}", body)[0] == 401
            assert send(f"{running.url}/{path}", body, Authorization="Bearer the-key")[0] == 200


def test_a_full_server_is_full_for_texts_too(engine: Engine, loaded: tuple[Decoder, Tokenizer]) -> None:
    with serving(engine, loaded, max_in_flight=1) as running:
        running.app.state.guard.in_flight = 1
        assert send(f"{running.url}/tokenize", {"prompt": "x"})[0] == 429
        running.app.state.guard.in_flight = 0
        assert send(f"{running.url}/tokenize", {"prompt": "x"})[0] == 200


def test_others_are_answered_while_a_long_text_is_tokenized(server: Running) -> None:
    send(f"{server.url}/tokenize", {"prompt": "x" * 200_000})  # a worker that starts gives others time
    tokenized: list[tuple[int, Any]] = []
    body = {"prompt": "some words and " * 40_000}
    thread = threading.Thread(target=lambda: tokenized.append(send(f"{server.url}/tokenize", body)))
    thread.start()
    answers = 0
    while thread.is_alive():
        answers += send(f"{server.url}/health")[0] == 200
    assert tokenized[0][0] == 200
    assert answers >= 10
