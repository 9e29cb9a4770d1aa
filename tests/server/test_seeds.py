"""Requests without a seed get one that nobody can foresee, and the answer says which, so that it can be asked again."""

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from detjax.audit import read_transcripts, verify
from detjax.engine import Engine
from detjax.models import Decoder, Tokenizer
from detjax.server import Settings
from tests.server.running_server import MODEL, Running, serving

PROMPT = "A prompt of some length, "
MESSAGES: Any = [{"role": "user", "content": "Who?"}]
ASKED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 24, "ignore_eos": True},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 24, "ignore_eos": True},
    "/v1/responses": {"input": "Who?", "max_output_tokens": 24, "ignore_eos": True},
}
MAX_DRAWN = 2**53 - 1
"""The largest integer that JavaScript holds exactly, as all below it."""


@pytest.fixture(scope="module")
def running(engine: Engine, loaded: tuple[Decoder, Tokenizer]) -> Iterator[Running]:
    with serving(engine, loaded, unseeded="random") as one:
        yield one


def post(server: Running, path: str, **body: Any) -> Any:
    """Returns the server's answer; for a stream, the list of its chunks."""
    data = json.dumps({"model": MODEL} | body).encode()
    request = urllib.request.Request(f"{server.url}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        text = answer.read().decode()
    if not body.get("stream"):
        return json.loads(text)
    return [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: {")]


def said(answer: Any) -> list[tuple[str, int]]:
    """The texts of an answer, each with its seed."""
    if "output" in answer:
        return [(answer["output"][0]["content"][0]["text"], answer["seed"])]
    return [(one["text"] if "text" in one else one["message"]["content"], one["seed"]) for one in answer["choices"]]


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize(
    "unseeded", [{}, *(pytest.param({"seed": seed}, marks=pytest.mark.nightly) for seed in (None, -1))]
)
def test_eight_requests_are_eight_draws_and_each_can_be_asked_again(
    running: Running, path: str, unseeded: dict[str, Any]
) -> None:
    draws = [said(post(running, path, temperature=1, **ASKED[path], **unseeded))[0] for _ in range(8)]
    assert len(set(draws)) == len({text for text, _ in draws}) == len({seed for _, seed in draws}) == 8
    for text, seed in draws[:2]:
        assert 0 <= seed <= MAX_DRAWN
        assert said(post(running, path, temperature=1, seed=seed, **ASKED[path])) == [(text, seed)]


def test_samples_and_prompts_of_one_request_differ_and_can_be_asked_again(running: Running) -> None:
    asked = ASKED["/v1/completions"] | {"temperature": 1, "n": 3}
    choices = said(post(running, "/v1/completions", **asked | {"prompt": [PROMPT, PROMPT]}))
    assert len({text for text, _ in choices}) == 6  # one prompt twice
    seeds = [seed for _, seed in choices]
    assert (len(set(seeds[:3])), len(set(seeds[3:])), len(set(seeds))) == (1, 1, 2)
    for prompt in (0, 1):
        again = said(post(running, "/v1/completions", **asked, seed=seeds[3 * prompt]))
        assert again == choices[3 * prompt : 3 * prompt + 3]


@pytest.mark.parametrize("path", ASKED)
def test_the_last_chunk_of_a_stream_says_the_seed(running: Running, path: str) -> None:
    chunks = post(running, path, temperature=1, stream=True, **ASKED[path])
    if path == "/v1/responses":
        seeds = {chunk["response"]["seed"] for chunk in chunks if "response" in chunk}
        text = "".join(chunk["delta"] for chunk in chunks if chunk["type"] == "response.output_text.delta")
    else:
        choices = [chunk["choices"][0] for chunk in chunks]
        assert [bool(choice["finish_reason"]) for choice in choices] == ["seed" in choice for choice in choices]
        seeds = {choice["seed"] for choice in choices if "seed" in choice}
        text = "".join(one["text"] if "text" in one else one["delta"].get("content") or "" for one in choices)
    (seed,) = seeds
    assert said(post(running, path, temperature=1, seed=seed, **ASKED[path])) == [(text, seed)]


@pytest.mark.parametrize("path", ASKED)
def test_the_receipt_has_the_seed_and_is_verified(
    running: Running, path: str, loaded: tuple[Decoder, Tokenizer], tmp_path: Path
) -> None:
    answer = post(running, path, temperature=1, receipt=True, **ASKED[path])
    receipt = answer["receipt"] if "output" in answer else answer["choices"][0]["receipt"]
    assert receipt["sampling"]["seed"] == said(answer)[0][1]
    file = tmp_path / "answer.json"
    file.write_text(json.dumps(answer))
    (verdict,) = verify(loaded[0], list(read_transcripts(file, loaded[1]).values()), loaded[1])
    assert verdict.is_verified, verdict


@pytest.mark.parametrize("path", ASKED)
def test_a_seed_of_the_request_is_kept_and_repeated(running: Running, path: str) -> None:
    largest = 2**64 - 1
    ((_, seed),) = said(post(running, path, temperature=1, seed=largest, **ASKED[path]))
    assert seed == largest


def test_the_likeliest_tokens_need_no_seed(running: Running) -> None:
    answers = [said(post(running, path, temperature=0, **body)) for path, body in ASKED.items() for _ in range(2)]
    assert [seed for ((_, seed),) in answers] == [0] * 6
    assert answers[0::2] == answers[1::2]
    scored = post(running, "/v1/completions", prompt=PROMPT, max_tokens=0, echo=True, logprobs=1)
    assert scored["choices"][0]["seed"] == 0


def test_fixed_seeds_give_one_answer(engine: Engine, loaded: tuple[Decoder, Tokenizer]) -> None:
    with serving(engine, loaded, unseeded="fixed") as one:
        for path, body in ASKED.items():
            answers = [said(post(one, path, temperature=1, **body, **seed)) for seed in ({}, {}, {"seed": 0})]
            assert answers[0] == answers[1] == answers[2]
            assert answers[0][0][1] == 0


def test_servers_draw_seeds_by_default_and_refuse_other_names() -> None:
    assert Settings(MODEL).unseeded == "random"
    with pytest.raises(ValueError, match=r"unseeded is 'none'; accepted: random, fixed"):
        Settings(MODEL, unseeded="none")  # pyright: ignore[reportArgumentType]


def test_openais_client_sees_the_seed(running: Running) -> None:
    with running.client() as client:
        choice = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=4, temperature=1).choices[0]
        again = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=4, temperature=1, seed=choice.seed)
        assert isinstance(client, openai.OpenAI)
    assert again.choices[0] == choice
