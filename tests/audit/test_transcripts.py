"""Transcripts as JSON: every field survives, each is part of the digest, and responses may not contradict receipts."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from detjax.audit import Origin, Transcript, read_transcripts
from detjax.audit.verification.transcripts import transcript_of, transcripts_of
from detjax.engine import Completion, Constraint, Generation, SamplingParams
from detjax.engine.reasoning_budget import ReasoningBudget, ReasoningMarks

WHOLE = Transcript(
    prompt=(3, 1),
    sampling=SamplingParams(n=2),
    tokens=(5, 9),
    logprobs=(-0.5, -math.inf),
    index=0,
    finish_reason="stop",
    text="ab",
    sampling_logprobs=(-0.25, -1.5),
    top_logprobs=(((5, -0.5), (7, -math.inf)), ()),
    origin=Origin("e" * 16, "m" * 16, "int8"),
)
CHANGES: dict[str, Any] = {
    "prompt": (3, 2),
    "tokens": (5, 8),
    "logprobs": (-0.5, -1.0),
    "index": 1,
    "finish_reason": "length",
    "text": "abc",
    "sampling_logprobs": (-0.25, -1.25),
    "top_logprobs": (((5, -0.5), (8, -math.inf)), ()),
}
ORIGINS: dict[str, Any] = {"environment": "f" * 16, "model": "n" * 16, "kv_cache_dtype": None}
SAMPLING: dict[str, Any] = {
    "max_tokens": 127,
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.5,
    "min_p": 0.5,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.5,
    "logit_bias": ((4, 1.5), (2, -1.0)),
    "min_tokens": 1,
    "seed": 2**64 - 1,
    "n": 3,
    "stop": ("a", "b"),
    "stop_token_ids": (7, 6),
    "ignore_eos": True,
    "allowed_token_ids": (3, 1),
    "bad_words": ("a", "b c"),
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "reasoning_budget": ReasoningBudget(3, ReasoningMarks((7, 8), (6,), is_open=True)),
    "constraint": Constraint("regex", "a+"),
}


def altered() -> dict[str, Transcript]:
    """The transcript with each field changed alone."""
    changed = {name: dataclasses.replace(WHOLE, **{name: value}) for name, value in CHANGES.items()}
    changed |= {
        name: dataclasses.replace(WHOLE, origin=dataclasses.replace(WHOLE.origin, **{name: value}))
        for name, value in ORIGINS.items()
    }
    return changed | {
        f"sampling.{name}": dataclasses.replace(WHOLE, sampling=dataclasses.replace(WHOLE.sampling, **{name: value}))
        for name, value in SAMPLING.items()
    }


def test_every_field_is_changed_alone() -> None:
    reports = {"top_logprobs", "prompt_logprobs", "sampling_logprobs", "scored_answer"}
    assert SAMPLING.keys() | reports == {one.name for one in dataclasses.fields(SamplingParams)}
    assert ORIGINS.keys() == {one.name for one in dataclasses.fields(Origin)}
    others = {"sampling", "origin", "digest", "contradiction"}
    assert CHANGES.keys() | others == {one.name for one in dataclasses.fields(Transcript)}


@pytest.mark.parametrize("name", ["whole", *altered()])
def test_each_field_survives_and_is_part_of_the_digest(name: str) -> None:
    one = altered().get(name, WHOLE)
    assert Transcript.from_json(json.loads(json.dumps(one.as_json()))) == one
    sealed = one.sealed()
    assert Transcript.from_json(json.loads(json.dumps(sealed.as_json()))) == sealed
    assert sealed.digest == sealed.computed_digest() == one.computed_digest()
    assert (one.computed_digest() == WHOLE.computed_digest()) == (name == "whole")


def test_a_digest_is_that_of_the_same_json_in_every_version() -> None:
    one = Transcript((1,), SamplingParams(seed=3), (2,), (-0.5,))
    text = '{"index":0,"logprobs":[-0.5],"prompt":[1],"sampling":{"seed":3},"tokens":[2]}'
    assert json.dumps(one.as_json(), sort_keys=True, separators=(",", ":")) == text
    assert one.computed_digest() == "6112c8a09e46cbac59231e1530b3f26cca7202e9c487c665ee41f3b0aed39570"


def test_requested_reports_are_no_part_of_a_transcript() -> None:
    params = SamplingParams(top_logprobs=2, prompt_logprobs=True, sampling_logprobs=True, seed=4)
    completion = Completion(
        tokens=(5,),
        logprobs=(-0.5,),
        finish_reason="stop",
        text="a",
        top_logprobs=(((5, -0.5),),),
        sampling_logprobs=(-0.1,),
    )
    one = transcript_of([1, 2], completion, params, index=0)
    assert one.sampling == SamplingParams(seed=4) and one.origin == Origin()
    assert (one.top_logprobs, one.sampling_logprobs) == ((((5, -0.5),),), (-0.1,))
    plain = dataclasses.replace(completion, sampling_logprobs=())
    silent = transcript_of([1, 2], plain, SamplingParams(seed=4), origin=Origin("e"))
    assert silent.top_logprobs is silent.sampling_logprobs is None and silent.origin == Origin("e")
    assert silent.prompt == (1, 2) and (silent.tokens, silent.text, silent.finish_reason) == ((5,), "a", "stop")


def test_samples_of_a_request_have_their_indices() -> None:
    completions = tuple(Completion((k,), (-0.5,), (), "a", "length") for k in (4, 6))
    generation = Generation(prompt_tokens=(1,), completions=completions)
    made = transcripts_of(generation, SamplingParams(n=2))
    assert [(one.index, one.tokens) for one in made] == [(0, (4,)), (1, (6,))]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling_logprobs": (1.0,)}, "1 sampling_logprobs, 2 tokens"),
        ({"top_logprobs": ((), (), ())}, "3 top_logprobs, 2 tokens"),
        ({"prompt": ()}, "prompt is empty"),
        ({"tokens": (), "logprobs": None, "sampling_logprobs": None, "top_logprobs": None}, "tokens is empty"),
        ({"index": 2}, "index is 2; accepted: 0 to 1"),
        ({"index": -1}, "index is -1"),
        ({"finish_reason": "tool_calls"}, "finish_reason is 'tool_calls'"),
    ],
)
def test_what_is_no_transcript_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(WHOLE, **changes)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"tokens": "12"}, "tokens is '12'; accepted: token ids"),
        ({"tokens": [True]}, "tokens is True; accepted: an integer"),
        ({"logprobs": ["x"]}, "a logprob is 'x'; accepted: a number"),
        ({"logprobs": [True]}, "a logprob is True"),
        ({"logprobs": 3}, "a transcript has a field that cannot be read"),
        ({"finish_reason": 3}, "finish_reason is 3; accepted: a string"),
        ({"text": 3}, "text is 3; accepted: a string"),
        ({"digest": 3}, "digest is 3; accepted: a string"),
        ({"index": 0.5}, "index is 0.5; accepted: an integer"),
        ({"sampling": 3}, "sampling is 3; accepted: an object"),
        ({"sampling": {"top_logprobs": 3}}, "sampling has 'top_logprobs'"),
        ({"sampling": {"seed": 1.5}}, "seed is 1.5; accepted: an integer"),
        ({"sampling": {"temperature": "hot"}}, "temperature is 'hot'; accepted: a number"),
        ({"sampling": {"temperature": -1}}, "temperature is -1"),
        ({"top_logprobs": [[[0.5, -1.0]]]}, "a token is 0.5; accepted: an integer"),
    ],
)
def test_each_field_of_json_is_checked(content: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Transcript.from_json({"prompt": [1], "tokens": [1]} | content)


def test_a_stop_string_may_stand_alone() -> None:
    one = Transcript.from_json({"prompt": [1], "tokens": [1], "sampling": {"stop": "ab"}})
    assert one.sampling.stop == ("ab",)


# --- responses --------------------------------------------------------------------------------------------------------

RECEIPT = WHOLE.as_json()
COMPLETION: dict[str, Any] = {
    "text": "ab",
    "finish_reason": "stop",
    "token_ids": [5, 9],
    "prompt_token_ids": [3, 1],
    "seed": 0,
    "logprobs": {"token_logprobs": [-0.5, -9999.0]},
    "receipt": RECEIPT,
}
CHAT: dict[str, Any] = {
    "message": {"content": "ab"},
    "finish_reason": "stop",
    "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -9999.0}]},
    "receipt": RECEIPT,
}


def response(text: str, logprobs: list[float], status: str = "completed", **others: Any) -> dict[str, Any]:
    """A response of /v1/responses."""
    parts = [{"text": text, "logprobs": [{"logprob": x} for x in logprobs]}]
    return {"output": [{"type": "message", "content": parts}], "status": status, "receipt": RECEIPT} | others


def read(tmp_path: Path, *values: Any) -> dict[str, Transcript]:
    file = tmp_path / "responses.jsonl"
    file.write_text("\n".join(map(json.dumps, values)))
    return read_transcripts(file)


def test_responses_that_agree_with_their_receipts_have_no_contradiction(tmp_path: Path) -> None:
    echoed = COMPLETION | {"logprobs": {"token_logprobs": [None, -3.0, -0.5, -9999.0]}}
    called = CHAT | {"message": {"content": None, "tool_calls": [{}]}, "finish_reason": "tool_calls"}
    named = {"system_fingerprint": f"x-{'e' * 16}", "choices": [COMPLETION, CHAT | {"index": 1}]}
    made = read(tmp_path, named, {"choices": [echoed, called]}, response("ab", [-0.5, -9999.0], seed=0))
    assert list(made) == [*(f"line {line}, choice {index}" for line in (1, 2) for index in (0, 1)), "line 3"]
    assert [one.contradiction for one in made.values()] == [None] * len(made)


def test_no_choice_hides_another_of_its_index(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="line 1: a response has two choices of index 0; accepted: each index once"):
        read(tmp_path, {"choices": [COMPLETION | {"index": 0}, COMPLETION | {"index": 0}]})


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ({"choices": [COMPLETION | {"text": "abc"}]}, "text"),
        ({"choices": [COMPLETION | {"finish_reason": "length"}]}, "finish_reason"),
        ({"choices": [COMPLETION | {"token_ids": [5, 8]}]}, "token_ids"),
        ({"choices": [COMPLETION | {"prompt_token_ids": [3]}]}, "prompt_token_ids"),
        ({"choices": [COMPLETION | {"seed": 1}]}, "seed"),
        ({"choices": [COMPLETION | {"logprobs": {"token_logprobs": [-0.5, -1.0]}}]}, "logprobs"),
        ({"choices": [CHAT | {"message": {"content": "b"}}]}, "text"),
        ({"choices": [CHAT | {"finish_reason": "length"}]}, "finish_reason"),
        ({"choices": [CHAT | {"logprobs": {"content": [{"logprob": -0.5}, {"logprob": -1.0}]}}]}, "logprobs"),
        (response("abc", [-0.5, -9999.0]), "text"),
        (response("ab", [-0.25, -9999.0]), "logprobs"),
        (response("ab", [-0.5, -9999.0], "incomplete"), "finish_reason"),
        (response("ab", [-0.5, -9999.0], seed=3), "seed"),
        ({"system_fingerprint": "x-y", "choices": [COMPLETION]}, "system_fingerprint"),
    ],
)
def test_each_field_that_contradicts_a_receipt_is_named(value: Any, field: str, tmp_path: Path) -> None:
    (one,) = read(tmp_path, value).values()
    assert one.contradiction is not None and f"the response's {field} is" in one.contradiction


def test_entries_of_a_list_and_lines_are_named_by_their_positions(tmp_path: Path) -> None:
    one, other = ({"prompt": [1], "tokens": [k]} for k in (1, 2))
    whole = tmp_path / "whole.json"
    whole.write_text(json.dumps([one, other], indent=1))
    assert {name: made.tokens for name, made in read_transcripts(whole).items()} == {"entry 0": (1,), "entry 1": (2,)}
    lines = tmp_path / "lines.jsonl"
    lines.write_text(f"{json.dumps(one)}\n\n{json.dumps(other)}\n")
    assert list(read_transcripts(lines)) == ["line 1", "line 3"]
    whole.write_text(json.dumps(one, indent=1))
    assert list(read_transcripts(whole)) == ["line 1"]
