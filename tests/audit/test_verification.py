"""Honest transcripts are verified whatever the batch was; any alteration of them is refused."""

import dataclasses
import functools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from detjax import cli, models
from detjax.audit import Origin, Transcript, Verdict, Verifier, read_transcripts, transcripts_of, verify
from detjax.audit.verification import replay
from detjax.demo import CHECKPOINT
from detjax.engine import Constraint, Engine, Request, SamplingParams, generate
from detjax.models import Decoder, Tokenizer
from tests.support import commands
from tests.support.one_layer import one_layer

FIXTURE = Path(__file__).parents[1] / "fixtures" / "qwen3"
BATCHES = 20
"""Batches of 50 transcripts: 1000 honest ones in all, and as many for each alteration."""
SIZES: Any = {"max_samples": 2, "token_budget": 32, "max_length": 160, "num_pages": 3}
CACHES = "int8", "fp8_e4m3"
STYLES = (
    SamplingParams(),
    SamplingParams(temperature=1.0, n=2, top_logprobs=2),
    SamplingParams(temperature=0.7, top_k=20),
    SamplingParams(temperature=1.3, top_p=0.8, min_p=0.01, sampling_logprobs=True),
    SamplingParams(temperature=1.0, presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.2),
    SamplingParams(temperature=0.9, logit_bias=((11, 100.0), (9, -4.0)), min_tokens=4, stop_token_ids=(11, 12)),
    SamplingParams(temperature=1.0, constraint=Constraint("regex", "[A-Z]{2,4}: [a-z ]{3,12}[.]")),
    SamplingParams(temperature=1.0, stop=("e",), n=2),
)


@functools.cache
def loaded() -> tuple[Decoder, Tokenizer]:
    return one_layer(FIXTURE, seed=1)


@functools.cache
def requests(batch: int, quantized: bool) -> list[Request]:
    """Requests for 25 samples: prompts of many lengths, some with a common page; most fill a page midway."""
    draw, made = random.Random(f"{batch} {quantized}"), []
    shared = [random.Random(batch).randrange(515) for _ in range(130)]
    while (missing := 25 - sum(request.sampling.n for request in made)) > 0:
        style = STYLES[len(made) % len(STYLES)]
        # Two samples share a page that ends with the prompt.
        length = 128 if len(made) == 7 else draw.choice([1, 30, 120, 122, 124, 125, 126])
        prompt = [draw.randrange(515) for _ in range(length)] if len(made) % 4 > 1 else [*shared, draw.randrange(515)]
        tokens = draw.randint(5, 10)
        params = dataclasses.replace(style, seed=draw.getrandbits(64), max_tokens=tokens, n=min(style.n, missing))
        made.append(Request(prompt, params))
    return made


@functools.cache
def honest(batch: int) -> list[Transcript]:
    """50 sealed transcripts, half of them with a quantized cache, of engines that had to preempt samples."""
    transcripts, preemptions, shared = list[Transcript](), 0, 0
    for cache in (None, CACHES[batch % len(CACHES)]):
        given = requests(batch, cache is not None)
        with Engine(*loaded(), kv_cache_dtype=cache, **SIZES) as engine:
            answers = engine.generate(given)
            preemptions += engine.stats().preemptions
        shared += sum(answer.cached_tokens > 0 for answer in answers)
        origin = Origin.here(*loaded(), kv_cache_dtype=cache)
        for request, answer in zip(given, answers, strict=True):
            transcripts += [one.sealed() for one in transcripts_of(answer, request.sampling, origin)]
    assert len(transcripts) == 50 and preemptions and shared
    return transcripts


def checked(transcripts: list[Transcript], model: Decoder | None = None) -> list[Verdict]:
    return verify(model or loaded()[0], transcripts, loaded()[1])


def unsealed(transcript: Transcript, **changes: Any) -> Transcript:
    """The transcript with changes and without a digest, as a forger would submit it."""
    return dataclasses.replace(transcript, digest=None, text=None, **changes)


batches = pytest.mark.parametrize(
    "batch", [0, *(pytest.param(batch, marks=pytest.mark.nightly) for batch in range(1, BATCHES))]
)


@batches
def test_honest_transcripts_are_verified_in_any_order(batch: int) -> None:
    transcripts = [Transcript.from_json(json.loads(json.dumps(one.as_json()))) for one in honest(batch)]
    assert transcripts == honest(batch)
    random.Random(batch).shuffle(transcripts)
    assert [str(verdict) for verdict in checked(transcripts)] == ["verified"] * 50


# --- alterations ------------------------------------------------------------------------------------------------------


def other_token(draw: random.Random, one: Transcript) -> Transcript:
    place = draw.randrange(len(one.tokens))
    tokens = (*one.tokens[:place], (one.tokens[place] + draw.randrange(1, 515)) % 515, *one.tokens[place + 1 :])
    return unsealed(one, tokens=tokens)


def other_bit(draw: random.Random, one: Transcript) -> Transcript:
    assert one.logprobs is not None
    place, bits = draw.randrange(len(one.tokens)), np.float32(one.logprobs).view(np.uint32)
    bits[place] ^= 1 << draw.randrange(23)  # pyright: ignore[reportCallIssue]
    return unsealed(one, logprobs=tuple(map(float, bits.view(np.float32))))


def other_prompt(draw: random.Random, one: Transcript) -> Transcript:
    place = draw.randrange(len(one.prompt))
    token = (one.prompt[place] + draw.randrange(1, 515)) % 515
    return unsealed(one, prompt=(*one.prompt[:place], token, *one.prompt[place + 1 :]))


UNREPORTED: Any = {"sampling_logprobs": None, "top_logprobs": None}


def shorter(draw: random.Random, one: Transcript) -> Transcript:
    count = max(1, len(one.tokens) - draw.randint(1, 3))
    assert one.logprobs is not None
    changes = {"tokens": one.tokens[:count], "logprobs": one.logprobs[:count]}
    return unsealed(one, **UNREPORTED, **changes)


def other_end(draw: random.Random, one: Transcript) -> Transcript:
    return unsealed(one, finish_reason="stop" if one.finish_reason == "length" else "length")


ALTERATIONS: dict[str, tuple[Callable[[random.Random, Transcript], Transcript], set[str]]] = {
    "one token": (other_token, {"token", "end"}),
    "one logprob bit": (other_bit, {"logprob"}),
    "the prompt": (other_prompt, {"token", "logprob"}),
    "the end": (other_end, {"end"}),
}


@batches
def test_what_is_altered_is_refused_without_a_digest(batch: int) -> None:
    for kind, (alter, reasons) in ALTERATIONS.items():
        draw = random.Random(f"{kind} {batch}")
        # In the batch that always runs, each alteration has a fourth of the transcripts.
        given = honest(batch)[list(ALTERATIONS).index(kind) :: 4] if batch == 0 else honest(batch)
        verdicts = checked([alter(draw, one) for one in given])
        assert {verdict.reason for verdict in verdicts} <= reasons, kind


def other_seed(draw: random.Random, params: SamplingParams) -> SamplingParams:
    return dataclasses.replace(params, seed=params.seed ^ 1 << draw.randrange(64))


def other_temperature(draw: random.Random, params: SamplingParams) -> SamplingParams:
    return dataclasses.replace(params, temperature=params.temperature + draw.choice([0.5, 1.0, 3.0]))


def test_other_parameters_are_refused_and_a_seed_that_does_not_matter_is_not() -> None:
    draw, given = random.Random(0), honest(0)
    greedy = [one for one in given if one.sampling.temperature == 0]
    drawn = [one for one in given if one.sampling.temperature == 1.3]
    seeds = [dataclasses.replace(one, sampling=other_seed(draw, one.sampling)) for one in (*greedy, *drawn)]
    hotter = [dataclasses.replace(one, sampling=other_temperature(draw, one.sampling)) for one in drawn]
    assert {verdict.reason for verdict in checked([*seeds, *hotter])} == {"digest"}
    reasons = [verdict.reason for verdict in checked([unsealed(one) for one in (*seeds, *hotter)])]
    assert reasons[: len(greedy)] == [None] * len(greedy) and len(greedy) > 2 and len(drawn) > 2
    # A token may be the same by chance, but not all tokens of an answer with their logprobs.
    assert set(reasons[len(greedy) :]) <= {"token", "sampling_logprob", "end"}


@pytest.mark.parametrize("few", [True, pytest.param(False, marks=pytest.mark.nightly)])
@batches
def test_other_parameters_are_refused_wherever_they_give_another_answer(batch: int, few: bool) -> None:
    """With its digest every transcript is refused; without, every one that these parameters do not give."""
    draw, transcripts = random.Random(batch), [one for one in honest(batch) if one.origin.kv_cache_dtype is None]
    transcripts = transcripts[:3] if few else transcripts
    altered = [
        dataclasses.replace(one, sampling=alter(draw, one.sampling))
        for alter in (other_seed, other_temperature)
        for one in transcripts
    ]
    assert {verdict.reason for verdict in checked(altered)} == {"digest"}
    asks = [Request(one.prompt, reporting(one)) for one in altered]
    with Engine(*loaded(), **SIZES) as engine:
        answers = engine.generate(asks)
    same = [
        (answer.completions[one.index].tokens, answer.completions[one.index].sampling_logprobs or None)
        == (one.tokens, one.sampling_logprobs)
        for one, answer in zip(altered, answers, strict=True)
    ]
    assert [verdict.is_verified for verdict in checked([unsealed(one) for one in altered])] == same
    assert few or sum(same) < len(same) / 2


def reporting(transcript: Transcript) -> SamplingParams:
    """The parameters with reports of all that the transcript has."""
    return dataclasses.replace(transcript.sampling, sampling_logprobs=transcript.sampling_logprobs is not None)


@batches
def test_another_weight_is_refused_by_its_digest_and_by_its_bits(batch: int) -> None:
    graph, state = nnx.split(loaded()[0])
    weights = jax.tree.leaves(state)
    draw = random.Random(batch)
    # A number of the last norm is in every logit.
    index = next(number for number, (path, _) in enumerate(jax.tree.leaves_with_path(state)) if _is_last_norm(path))
    place = draw.randrange(weights[index].size)
    weights[index] = weights[index].at[place].multiply(jnp.asarray(1.25, weights[index].dtype))
    other = nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(state), weights))
    other.generation_defaults = loaded()[0].generation_defaults
    assert {verdict.reason for verdict in checked(honest(batch), other)} == {"model"}
    caches = [Origin(kv_cache_dtype=one.origin.kv_cache_dtype) for one in honest(batch)]
    unnamed = [unsealed(one, origin=cache) for one, cache in zip(honest(batch), caches, strict=True)]
    verdicts = checked(unnamed, other)
    assert {verdict.reason for verdict in verdicts} <= {"token", "logprob"}


def _is_last_norm(path: Any) -> bool:
    name = jax.tree_util.keystr(path)
    return "norm" in name and "layers" not in name


# --- what a verdict says ----------------------------------------------------------------------------------------------


def test_the_first_token_that_could_not_have_been_produced_is_named() -> None:
    one = next(one for one in honest(0) if len(one.tokens) >= 5 and one.sampling.temperature == 0)
    expected = one.tokens[2]
    token = (expected + 1) % 515
    tokens = (*one.tokens[:2], token, *one.tokens[3:4], (one.tokens[4] + 1) % 515, *one.tokens[5:])
    (verdict,) = checked([unsealed(one, tokens=tokens)])
    assert (verdict.reason, verdict.position, verdict.expected, verdict.given) == ("token", 2, expected, token)
    assert one.logprobs is not None
    logprobs = list(one.logprobs)
    logprobs[3] = float(np.nextafter(np.float32(logprobs[3]), np.float32(0)))
    (verdict,) = checked([unsealed(one, logprobs=tuple(logprobs))])
    assert (verdict.reason, verdict.position, verdict.ulps) == ("logprob", 3, 1)
    assert (verdict.expected, verdict.given) == (one.logprobs[3], logprobs[3])
    logprobs[3] = round(one.logprobs[3], 4)
    (verdict,) = checked([unsealed(one, logprobs=tuple(logprobs))])
    assert (verdict.reason, verdict.position) == ("logprob", 3)


def test_tokens_alone_are_checked() -> None:
    one = next(one for one in honest(0) if one.sampling.temperature == 0)
    alone = unsealed(one, logprobs=None)
    wrong = unsealed(one, logprobs=None, tokens=((one.tokens[0] + 1) % 515, *one.tokens[1:]))
    assert [verdict.reason for verdict in checked([alone, wrong])] == [None, "token"]


def test_a_number_next_to_a_float32_number_does_not_pass_for_it() -> None:
    one = honest(0)[0]
    assert one.logprobs is not None
    (verdict,) = checked([unsealed(one, logprobs=(np.nextafter(one.logprobs[0], 0.0).item(), *one.logprobs[1:]))])
    assert (verdict.reason, verdict.position, verdict.ulps) == ("logprob", 0, 0)


def test_reports_of_likeliest_tokens_and_sampling_logprobs_are_checked() -> None:
    with_top = next(one for one in honest(0) if one.top_logprobs)
    assert with_top.top_logprobs is not None
    swapped = (with_top.top_logprobs[0][::-1], *with_top.top_logprobs[1:])
    drawn = next(one for one in honest(0) if one.sampling_logprobs)
    assert drawn.sampling_logprobs is not None
    zeros = (*drawn.sampling_logprobs[:1], 0.5, *drawn.sampling_logprobs[2:])
    verdicts = checked([unsealed(with_top, top_logprobs=swapped), unsealed(drawn, sampling_logprobs=zeros)])
    assert [(verdict.reason, verdict.position) for verdict in verdicts] == [
        ("top_logprobs", 0),
        ("sampling_logprob", 1),
    ]


def test_an_answer_that_goes_on_or_ends_too_early_is_refused() -> None:
    by_length = next(one for one in honest(0) if one.finish_reason == "length" and one.logprobs is not None)
    by_stop = next(one for one in honest(0) if one.finish_reason == "stop" and one.sampling.stop)
    longer = unsealed(
        by_stop,
        tokens=(*by_stop.tokens, 5),
        logprobs=None,
        top_logprobs=None,
        sampling=dataclasses.replace(by_stop.sampling, max_tokens=50),
    )
    assert by_length.logprobs is not None
    # One token less than the most that the request allows.
    cut = unsealed(by_length, tokens=by_length.tokens[:-1], logprobs=by_length.logprobs[:-1], **UNREPORTED)
    verdicts = checked([longer, cut, dataclasses.replace(cut, finish_reason=None)])
    assert [verdict.reason for verdict in verdicts] == ["end", "end", None]
    assert verdicts[0].position == len(by_stop.tokens)


def test_another_text_is_refused() -> None:
    one = dataclasses.replace(honest(0)[0], text="another", digest=None)
    assert checked([one])[0].reason == "text"


def test_what_a_model_cannot_be_asked_is_refused_by_name() -> None:
    one = honest(0)[0]
    cases = {
        "has token 515": unsealed(one, prompt=(515,)),
        "the answer has token 600": unsealed(one, tokens=(600,), logprobs=None),
        "accepted": unsealed(one, sampling=dataclasses.replace(one.sampling, max_tokens=10**9)),
        "is not valid": unsealed(one, sampling=dataclasses.replace(one.sampling, constraint=Constraint("regex", "("))),
    }
    verdicts = checked(list(cases.values()))
    assert [verdict.reason for verdict in verdicts] == ["request"] * len(cases)
    for part, verdict in zip(cases, verdicts, strict=True):
        assert part in verdict.detail


def test_a_transcript_of_another_environment_is_refused() -> None:
    one = honest(0)[0]
    other = dataclasses.replace(one, origin=dataclasses.replace(one.origin, environment="0" * 16)).sealed()
    assert checked([other])[0].reason == "environment"


# --- schedules of the check -------------------------------------------------------------------------------------------


def test_no_verdict_depends_on_sizes_and_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small steps split transcripts into chunks and batches at positions that depend on all others."""
    draw, plain = random.Random(0), [one for one in honest(0) if one.origin.kv_cache_dtype is None]
    common = [one for one in plain if not replay._is_rare(reporting(one)) and one.top_logprobs is None]
    transcripts = [other_bit(draw, one) if number % 3 == 0 else one for number, one in enumerate(common)]
    expected = checked(transcripts)
    assert {verdict.reason for verdict in expected} == {None, "logprob"}
    monkeypatch.setattr(replay, "_MAX_ROWS", 48)
    monkeypatch.setattr(replay, "_MAX_SAMPLED", 16)
    assert checked(transcripts) == expected
    few = transcripts[3:6]
    assert Verifier(*loaded()).verify(few) == expected[3:6]


def test_four_bits_of_a_cache_are_those_of_the_answer() -> None:
    model, tokenizer = one_layer(CHECKPOINT, seed=2)
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=3)
    generations = generate(model, ["ROMEO:", "JULIET: O"], params, tokenizer=tokenizer, kv_cache_dtype="q4_0")
    quantized, plain = (
        [one for answer in generations for one in transcripts_of(answer, params, Origin(kv_cache_dtype=cache))]
        for cache in ("q4_0", None)
    )
    verdicts = verify(model, [*quantized, *plain], tokenizer)
    assert [verdict.is_verified for verdict in verdicts] == [True, True, False, False]


# --- files and the command --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ("3", "line 2 is not an object"),
        ('{"tokens": [1]}', "a transcript has no 'prompt'"),
        ('{"prompt": [1], "tokens": [1], "sampling": {"colour": 1}}', "sampling has 'colour'"),
        ('{"prompt": [1], "tokens": [1], "images": []}', "a transcript has images"),
        ('{"prompt": [1], "tokens": [1], "logprobs": []}', "0 logprobs, 1 tokens"),
        ('{"prompt": [1], "tokens": [1], "index": 1}', "index is 1; accepted: 0 to 0"),
        ('{"prompt": [1], "tokens": [1.5]}', "tokens is 1.5; accepted: an integer"),
        ('{"prompt": [1], "tokens": [1], "kv_cache_dtype": "int3"}', "kv_cache_dtype is 'int3'"),
        ('{"prompt": "x", "tokens": [1]}', "prompt is text but there is no tokenizer"),
        ('{"choices": [{"text": "x"}]}', "a response has no receipt"),
    ],
)
def test_a_line_that_is_no_transcript_is_named(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "transcripts.jsonl"
    file.write_text('{"prompt": [1], "tokens": [1]}\n' + line)
    with pytest.raises(ValueError, match="line 2") as error:
        read_transcripts(file)
    assert message in str(error.value)


@pytest.mark.parametrize("text", ["", "\n\n", "[]"])
def test_a_file_without_an_answer_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "transcripts.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"transcripts\.jsonl holds no answers; accepted: transcripts"):
        read_transcripts(file)


def test_the_command_verifies_a_file_and_ends_with_1_where_an_answer_is_refused(tmp_path: Path) -> None:
    checkpoint, file, verdicts = tmp_path / "checkpoint", tmp_path / "transcripts.jsonl", tmp_path / "verdicts.json"
    model, tokenizer = loaded()
    models.save(model, checkpoint, tokenizer=tokenizer)
    made = [one.as_json() for one in honest(0)[:3]]
    file.write_text("\n".join(map(json.dumps, made)))
    arguments = ["verify", str(file), "--model", str(checkpoint), "--json", str(verdicts)]
    accepted = commands.run(cli.main, *arguments)
    assert (accepted.exit_code, accepted.stdout) == (0, "3 of 3 answers are verified\n"), accepted.output
    made[1] = other_bit(random.Random(1), honest(0)[1]).as_json()
    file.write_text("\n".join(map(json.dumps, made)))
    refused = commands.run(cli.main, *arguments)
    assert refused.exit_code == 1
    assert "line 2: refused at token" in refused.stdout
    assert [one["reason"] for one in json.loads(verdicts.read_text())] == [None, "logprob", None]
