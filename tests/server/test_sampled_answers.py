"""Answers of a model: sampling logprobs are a trainer's, and fields of vLLM keep the bits."""

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from starlette.testclient import TestClient

from detjax import demo
from detjax.audit import Transcript, read_transcripts, verify
from detjax.engine import Engine
from detjax.models import Decoder, Tokenizer, load
from detjax.operands.options import Distribution
from detjax.rl.trainer.losses import LogLikelihood
from detjax.rl.trainer.microbatches import Rows, Sample
from detjax.rl.trainer.optimizers import adamw
from detjax.rl.trainer.step import Plan
from detjax.rl.trainer.trainer import Trainer
from detjax.server import Settings, create_app
from tests.server.running_server import MODEL, Running
from tests.support.bits import assert_same_bits, same_bits

COMPLETE, CHAT, RESPOND = "/v1/completions", "/v1/chat/completions", "/v1/responses"


class Client(TestClient):
    """A client of a server in this process."""

    def ask(self, path: str, **body: Any) -> Any:
        """The JSON of an answer; for a stream, its events without [DONE]."""
        answer = self.post(path, json={"model": MODEL} | body)
        assert answer.status_code == 200, answer.text
        if not body.get("stream"):
            return answer.json()
        lines = [line[6:] for line in answer.text.split("\n") if line.startswith("data: {")]
        return [json.loads(line) for line in lines]


@contextlib.contextmanager
def client_of(engine: Engine, loaded: tuple[Decoder, Tokenizer], **settings: Any) -> Iterator[Client]:
    app = create_app(engine, *loaded, Settings(MODEL, **{"unseeded": "fixed"} | settings))
    with contextlib.closing(app.state.texts), Client(app) as client:
        yield client


# --- a trainer's logprobs ---------------------------------------------------------------------------------------------

DISTRIBUTION: Final = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}


@pytest.fixture(scope="module")
def shakespeare() -> tuple[Decoder, Tokenizer]:
    model, tokenizer = load(demo.CHECKPOINT, progress=False)
    assert tokenizer is not None
    return model, tokenizer


@pytest.fixture(scope="module")
def playing(shakespeare: tuple[Decoder, Tokenizer]) -> Iterator[Client]:
    """A client of a server of the demonstration's checkpoint that reports processed logprobs."""
    with (
        Engine(*shakespeare, max_samples=2, token_budget=64, max_length=128, top_logprobs=1) as engine,
        client_of(engine, shakespeare, logprobs_mode="processed_logprobs") as client,
    ):
        yield client


def test_the_importance_ratio_to_a_trainer_is_one(playing: Client, shakespeare: tuple[Decoder, Tokenizer]) -> None:
    """Reported when tokens were drawn, scored as a prompt, and computed by the trainer: three times the same bits."""
    asked: Any = {"prompt": "ROMEO:", "max_tokens": 24, "logprobs": 0, "return_token_ids": True, "n": 2, "seed": 3}
    choices = playing.ask(COMPLETE, **asked, **DISTRIBUTION)["choices"]
    distribution = Distribution(**DISTRIBUTION)
    trainer = Trainer(
        shakespeare[0], adamw(1e-3), LogLikelihood(), Plan(Rows(sequences=2, length=64)), distribution=distribution
    )
    samples, drawn = [], []
    for choice in choices:
        tokens = np.asarray([*choice["prompt_token_ids"], *choice["token_ids"]], np.int32)
        samples.append(Sample(tokens, np.ones(len(choice["token_ids"]), np.float32)))
        drawn.append(np.float32(choice["logprobs"]["token_logprobs"]))
        scored = playing.ask(COMPLETE, prompt=tokens.tolist(), max_tokens=1, prompt_logprobs=0, **DISTRIBUTION)
        entries = scored["choices"][0]["prompt_logprobs"][-len(choice["token_ids"]) :]
        values = [entry[str(token)]["logprob"] for entry, token in zip(entries, choice["token_ids"], strict=True)]
        assert_same_bits(np.float32(values), drawn[-1])
    trained = trainer.logprobs(samples)
    assert_same_bits([*trained], drawn)
    assert all((np.exp(new - old) == 1).all() for new, old in zip(trained, drawn, strict=True))
    plain = Trainer(shakespeare[0], adamw(1e-3), LogLikelihood(), Plan(Rows(sequences=2, length=64)))
    assert not same_bits([*plain.logprobs(samples)], drawn)


def test_all_endpoints_report_the_same_logprobs(playing: Client) -> None:
    prompt = "[user]Hi"
    complete: Any = {"max_tokens": 6, "logprobs": 1, "seed": 5, "presence_penalty": 1.0} | DISTRIBUTION
    (whole,) = playing.ask(COMPLETE, prompt=prompt, **complete, sampling_logprobs=True)["choices"]
    streamed = playing.ask(COMPLETE, prompt=prompt, **complete, stream=True)
    parts = [chunk["choices"][0]["logprobs"] for chunk in streamed]
    assert [x for part in parts for x in part["token_logprobs"]] == whole["logprobs"]["token_logprobs"]
    assert [x for part in parts for x in part["top_logprobs"]] == whole["logprobs"]["top_logprobs"]
    assert whole["logprobs"]["sampling_logprobs"] == whole["logprobs"]["token_logprobs"]


# --- fields of vLLM and SGLang ----------------------------------------------------------------------------------------

FIELDS: Final[dict[str, Any]] = {
    "skip_special_tokens": False,
    "include_stop_str_in_output": True,
    "allowed_token_ids": [*range(40, 512)],
    "bad_words": ["e", "th", "an"],
    "min_tokens": 4,
    "stop": ["a", "i"],
}
PROMPT: Final = [5, 9, 300]
BASE: Final[dict[str, Any]] = {"prompt": PROMPT, "max_tokens": 12, "temperature": 1.0, "seed": 2, "n": 2}
SUBSETS: Final = [
    {*FIELDS},
    *({name} for name in FIELDS),
    *({one, other} for one, other in itertools.combinations(FIELDS, 2)),
]


@pytest.fixture(scope="module")
def client(engine: Engine, loaded: tuple[Decoder, Tokenizer]) -> Iterator[Client]:
    with client_of(engine, loaded) as one:
        yield one


@pytest.mark.sampled(8)
@pytest.mark.parametrize("names", SUBSETS, ids=lambda names: " ".join(sorted(names)) if len(names) < 3 else "all")
def test_answers_verify_alone_whole_and_streamed(
    client: Client, loaded: tuple[Decoder, Tokenizer], tmp_path: Path, names: set[str]
) -> None:
    asked = BASE | {name: FIELDS[name] for name in names} | {"receipt": True, "return_token_ids": True}
    whole = client.ask(COMPLETE, **asked)
    texts, receipts = ["", ""], [{}, {}]
    for chunk in client.ask(COMPLETE, **asked, stream=True):
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        receipts[choice["index"]] |= choice.get("receipt", {})
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert receipts == [choice["receipt"] for choice in whole["choices"]]
    file = tmp_path / "answer.json"
    file.write_text(json.dumps(whole))
    model, tokenizer = loaded
    transcripts = [*read_transcripts(file, tokenizer).values()]
    assert {str(verdict) for verdict in verify(model, transcripts, tokenizer)} == {"verified"}
    if "stop" in names:
        for choice in whole["choices"]:
            ended = next((text for text in FIELDS["stop"] if text in choice["text"]), None)
            includes = "include_stop_str_in_output" in names
            if choice["finish_reason"] == "stop" and len(choice["token_ids"]) < 12 and "min_tokens" not in names:
                assert (ended is not None) == includes
            if choice["finish_reason"] == "stop" and "min_tokens" in names:
                assert len(choice["token_ids"]) > FIELDS["min_tokens"]


def test_a_receipt_with_a_field_changed_is_refused(client: Client, loaded: tuple[Decoder, Tokenizer]) -> None:
    asked = {"receipt": True, "stop": ["o", "s", "r", "t"], "max_tokens": 40, "n": 24, "seed": 10}
    answer = client.ask(COMPLETE, **BASE | FIELDS | asked)
    honest = [Transcript.from_json(choice["receipt"]) for choice in answer["choices"]]
    assert any(one.finish_reason == "stop" for one in honest)
    model, tokenizer = loaded
    changes: dict[str, Any] = {
        "include_stop_str_in_output": False,
        "allowed_token_ids": (),
        "bad_words": (),
        "min_tokens": 0,
    }
    for name, value in changes.items():
        altered = [
            dataclasses.replace(one, sampling=dataclasses.replace(one.sampling, **{name: value}), digest=None)
            for one in honest
        ]
        verdicts = verify(model, altered, tokenizer)
        assert not all(verdict.is_verified for verdict in verdicts), name


def test_a_stop_token_and_special_tokens_are_in_the_text_on_request(
    client: Client, loaded: tuple[Decoder, Tokenizer]
) -> None:
    tokenizer = loaded[1]
    (end,), (letter,) = tokenizer.encode("<|im_end|>"), tokenizer.encode("b")
    ending = {"max_tokens": 5, "temperature": 0}
    for token, text in ((end, "<|im_end|>"), (letter, "b")):
        forced = {"allowed_token_ids": [token], "stop_token_ids": [token]} | ending
        for fields, expected in (
            ({}, ""),
            ({"include_stop_str_in_output": True}, "" if token == end else text),
            ({"skip_special_tokens": False}, ""),
            ({"skip_special_tokens": False, "include_stop_str_in_output": True}, text),
        ):
            for stream in (False, True):
                answer = client.ask(COMPLETE, prompt=PROMPT, **forced, **fields, stream=stream, return_token_ids=True)
                choices = [chunk["choices"][0] for chunk in (answer if stream else [answer])]
                assert "".join(choice["text"] for choice in choices) == expected, (fields, stream)
                assert choices[-1]["finish_reason"] == "stop"
                assert [token for choice in choices for token in choice["token_ids"]] == [token]


TAG: Final = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<f="],
        "tags": [
            {"begin": f"<f={name}>", "content": {"type": "json_schema", "json_schema": {"enum": [name]}}, "end": "</f>"}
            for name in ("one", "two")
        ],
        "at_least_one": True,
        "stop_after_first": True,
    },
}


def test_structural_tags_constrain_answers_next_to_other_fields(
    client: Client, loaded: tuple[Decoder, Tokenizer], tmp_path: Path
) -> None:
    asked = BASE | {"max_tokens": 40, "response_format": TAG, "receipt": True}
    answers = client.ask(COMPLETE, **asked), client.ask(COMPLETE, **asked, bad_words=["w", "two"])
    texts = [[choice["text"] for choice in answer["choices"]] for answer in answers]
    assert {*texts[0]} <= {'<f=one>"one"</f>', '<f=two>"two"</f>'}
    assert {*texts[1]} == {'<f=one>"one"</f>'}
    file = tmp_path / "answers.jsonl"
    file.write_text("\n".join(map(json.dumps, answers)))
    transcripts = [*read_transcripts(file, loaded[1]).values()]
    assert {str(verdict) for verdict in verify(loaded[0], transcripts, loaded[1])} == {"verified"}


def test_processed_logprobs_agree_with_their_receipts(
    engine: Engine, loaded: tuple[Decoder, Tokenizer], tmp_path: Path
) -> None:
    bodies: dict[str, dict[str, Any]] = {
        COMPLETE: {"prompt": "A prompt", "n": 2, "logprobs": 2, "echo": True, "max_tokens": 5},
        CHAT: {"messages": [{"role": "user", "content": "Who?"}], "logprobs": True, "max_tokens": 5},
        RESPOND: {"input": "Who?", "max_output_tokens": 5, "include": ["message.output_text.logprobs"]},
    }
    turns = [*bodies[CHAT]["messages"], {"role": "assistant", "content": "He said"}]
    echoing = bodies[CHAT] | {"messages": turns, "echo": True, "continue_final_message": True}
    with client_of(engine, loaded, logprobs_mode="processed_logprobs") as client:
        asked = [*bodies.items(), (CHAT, echoing)]
        answers = [client.ask(path, **body, temperature=0.7, receipt=True) for path, body in asked]
    assert answers[-1]["choices"][0]["message"]["content"].startswith("He said")
    model, tokenizer = loaded
    file = tmp_path / "answers.jsonl"
    file.write_text("\n".join(map(json.dumps, answers)))
    transcripts = [*read_transcripts(file, tokenizer).values()]
    assert {str(verdict) for verdict in verify(model, transcripts, tokenizer)} == {"verified"}
    del answers[0]["choices"][0]["logprobs_mode"]
    file.write_text(json.dumps(answers[0]))
    first = next(iter(read_transcripts(file, tokenizer).values()))
    assert first.contradiction is not None and "logprobs" in first.contradiction


def test_others_streams_go_on_when_a_request_may_choose_nothing(server: Running, loaded: Any) -> None:
    (letter,) = loaded[1].encode("a")
    with server.client() as client:
        stream = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=30, stream=True, temperature=0)
        first = next(iter(stream))
        with pytest.raises(Exception, match="leave no token to choose"):
            fields = {"allowed_token_ids": [letter], "bad_words": ["aa"]}
            client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=5, extra_body=fields)
        text = first.choices[0].text + "".join(chunk.choices[0].text for chunk in stream)
        whole = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=30, temperature=0)
    assert text == whole.choices[0].text
