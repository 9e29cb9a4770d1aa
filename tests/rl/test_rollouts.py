"""Rollouts from transcripts, such as receipts of a server, are the rollouts that an engine in this process gives."""

import dataclasses
import json
from collections.abc import Callable

import pytest
from flax import nnx

from detjax.audit import Transcript, transcripts_of
from detjax.engine import Engine, Request, SamplingParams
from detjax.operands.options import Distribution
from detjax.rl.rollouts import Rollout, rollouts
from detjax.rl.trainer.sample_checks import check_drawn
from tests.rl import policies
from tests.support.bits import assert_same_bits, same_bits

DRAWN = Distribution(0.7, top_k=5)
SAMPLING = SamplingParams(6, n=2, seed=3, sampling_logprobs=True, **dataclasses.asdict(DRAWN))
PROMPT = "1+2="


@pytest.fixture(scope="module")
def receipts(engine: Engine) -> list[Transcript]:
    engine.update_weights(nnx.state(policies.policy()))
    (generation,) = engine.generate([Request(PROMPT, SAMPLING)])
    sealed = [transcript.sealed() for transcript in transcripts_of(generation, SAMPLING)]
    return [Transcript.from_json(json.loads(json.dumps(one.as_json()))) for one in sealed]


def test_a_receipt_holds_the_rollout_of_an_engine(engine: Engine, receipts: list[Transcript]) -> None:
    (expected,) = rollouts(engine, [PROMPT], SAMPLING, [3])
    for one, transcript in zip(expected, receipts, strict=True):
        given = Rollout.from_transcript(transcript)
        for name in ("prompt", "completion", "logprobs", "sampling_logprobs"):
            assert_same_bits(getattr(given, name), getattr(one, name))
        assert not same_bits(given.logprobs, given.sampling_logprobs)
        assert given.text == one.text
        sample = given.sample(one.logprobs)
        assert sample.old_logprobs is not None
        assert_same_bits(sample.old_logprobs, one.sampling_logprobs)
        check_drawn([sample], DRAWN)
        with pytest.raises(ValueError, match=r"sample 0 was drawn with temperature 0\.7, top_k 5"):
            check_drawn([sample], Distribution())


def test_a_receipt_without_sampling_logprobs_holds_a_rollout_without_them(receipts: list[Transcript]) -> None:
    given = Rollout.from_transcript(dataclasses.replace(receipts[0], sampling_logprobs=None).sealed())
    assert len(given.sampling_logprobs) == 0
    assert given.sample(given.logprobs).old_logprobs is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda one: dataclasses.replace(one, tokens=(*one.tokens[:-1], 1)), "its digest is of another content"),
        (lambda one: dataclasses.replace(one, logprobs=None).sealed(), "it has no logprobs"),
        (
            lambda one: dataclasses.replace(one, contradiction="the response's text is 'x'"),
            "the response's text is 'x'",
        ),
    ],
)
def test_a_receipt_that_was_altered_is_refused(
    receipts: list[Transcript], change: Callable[[Transcript], Transcript], says: str
) -> None:
    with pytest.raises(ValueError, match=f"the transcript cannot be used: {says}; accepted: an unaltered receipt"):
        Rollout.from_transcript(change(receipts[0]))
