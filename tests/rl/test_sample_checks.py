"""Samples that were drawn otherwise than the trainer assumes, or that lack what its loss needs, are refused."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from flax import nnx

from detjax.engine import Constraint, Engine, ReasoningBudget, ReasoningMarks, SamplingParams
from detjax.operands.options import Distribution
from detjax.rl import functional
from detjax.rl.policy_gradients.policy_gradient import PolicyGradient, supervised_samples
from detjax.rl.rollouts import Rollout, prompt_seeds, rollouts
from detjax.rl.trainer.losses import ClippedRatio, LogLikelihood
from detjax.rl.trainer.microbatches import Packed, Sample
from detjax.rl.trainer.sample_checks import check_certain, check_drawn, check_old_logprobs
from detjax.rl.trainer.step import Plan
from detjax.rl.trainer.trainer import Trainer
from tests.rl import policies
from tests.support.bits import assert_same_bits
from tests.support.unchecked import unchecked

PROMPTS = ["1+2=", "34="]
LAYOUT = Packed(64)


def drawn(engine: Engine, **fields: Any) -> list[Rollout]:
    """Rollouts of the initial policy by `SamplingParams` with fields, and with the defaults of all others."""
    engine.update_weights(nnx.state(policies.policy()))
    params = SamplingParams(**{"max_tokens": 6, "n": 2, "sampling_logprobs": True} | fields)
    return [one for group in rollouts(engine, PROMPTS, params, prompt_seeds(3, 2)) for one in group]


def weighted(flat: Sequence[Rollout]) -> list[Sample]:
    return [one.sample(np.full(len(one.completion), 0.25, np.float32)) for one in flat]


def by_hand(flat: Sequence[Rollout]) -> list[Sample]:
    """Samples that do not say how they were drawn."""
    return [dataclasses.replace(one, sampling=None) for one in weighted(flat)]


def said(**fields: Any) -> Sample:
    """A sample that says how it was drawn."""
    (plain,) = supervised_samples([([1, 2], [3])])
    return dataclasses.replace(plain, sampling=SamplingParams(**fields))


@functools.cache
def trainer(loss: Any, distribution: Distribution) -> Trainer:
    return Trainer(policies.policy(), policies.ADAMW, loss, Plan(LAYOUT), distribution=distribution)


@functools.cache
def ways(loss: Any, distribution: Distribution) -> dict[str, Callable[[list[Sample]], Any]]:
    """All that is done with samples."""
    one = trainer(loss, distribution)
    pure = functional.Training(policies.policy(), policies.ADAMW, loss, distribution=distribution)
    params = nnx.state(policies.policy())
    return {
        "step": one.step,
        "logprobs": one.logprobs,
        "scores": one.scores,
        "functional": lambda batch: pure.loss_and_gradients(params, batch, microbatch=LAYOUT),
    }


MODEL = Distribution()
OTHERS: dict[str, tuple[dict[str, Any], Distribution, str, str]] = {
    "the default of SamplingParams": ({}, MODEL, "temperature 0", "temperature 1"),
    "another temperature": ({"temperature": 0.7}, MODEL, "temperature 0.7", "temperature 1"),
    "another temperature of the trainer": ({"temperature": 1.0}, Distribution(0.7), "temperature 1", "temperature 0.7"),
    "a trainer of temperature 0": ({"temperature": 0.5}, Distribution(0.0), "temperature 0.5", "temperature 0"),
    "top-k": ({"temperature": 1.0, "top_k": 5}, MODEL, "temperature 1, top_k 5", "temperature 1"),
    "top-p": ({"temperature": 1.0, "top_p": 0.9}, MODEL, "temperature 1, top_p 0.9", "temperature 1"),
    "min-p": ({"temperature": 1.0, "min_p": 0.1}, MODEL, "temperature 1, min_p 0.1", "temperature 1"),
    "no top-k": ({"temperature": 1.0}, Distribution(1.0, top_k=5), "temperature 1", "temperature 1, top_k 5"),
    "another top-k": (
        {"temperature": 1.0, "top_k": 4},
        Distribution(1.0, top_k=5),
        "temperature 1, top_k 4",
        "temperature 1, top_k 5",
    ),
    "another top-p": (
        {"temperature": 1.0, "top_p": 0.25},
        Distribution(1.0, top_p=0.5),
        "temperature 1, top_p 0.25",
        "temperature 1, top_p 0.5",
    ),
    "another min-p": (
        {"temperature": 1.0, "min_p": 0.25},
        Distribution(1.0, min_p=0.5),
        "temperature 1, min_p 0.25",
        "temperature 1, min_p 0.5",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_samples_of_another_distribution_are_refused(name: str) -> None:
    fields, distribution, samples_have, trainer_has = OTHERS[name]
    says = f"sample 0 was drawn with {samples_have}, and the trainer's distribution has {trainer_has}; accepted: "
    with pytest.raises(ValueError) as raised:
        check_drawn([said(**fields)], distribution)
    assert str(raised.value).startswith(says)


def test_all_that_is_done_with_samples_refuses_those_of_another_distribution() -> None:
    (plain,) = supervised_samples([([1, 2], [3])])
    params = SamplingParams(temperature=0.5)
    others = [plain, said(temperature=1.0), *[dataclasses.replace(plain, sampling=params) for _ in range(2)]]
    for use in ways(LogLikelihood(), MODEL).values():
        with pytest.raises(ValueError, match=r"sample 2 was drawn with temperature 0\.5, and the trainer's"):
            use(others)


CHANGES: dict[str, Any] = {
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.2,
    "logit_bias": ((5, 2.0),),
    "allowed_token_ids": (5, 6),
    "bad_words": ("a",),
    "min_tokens": 3,
    "constraint": Constraint.choice(["a"]),
    "reasoning_budget": ReasoningBudget(3, ReasoningMarks((7,))),
}


@pytest.mark.parametrize("name", CHANGES)
def test_samples_with_penalties_biases_and_constraints_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"sample 0 was drawn with {name} .*, and the trainer's distribution has only"):
        check_drawn([said(temperature=1.0, **{name: CHANGES[name]})], MODEL)


@pytest.mark.parametrize(
    ("fields", "distribution"),
    [
        ({"temperature": 1.0}, MODEL),
        ({"temperature": 0.7, "top_k": 5}, Distribution(0.7, top_k=5)),
        ({"temperature": 0.0, "top_k": 5}, Distribution(0.0)),  # filters change nothing there
        ({"temperature": 0.0}, Distribution(0.0, top_p=0.5)),
        ({"temperature": 1.0, "ignore_eos": True, "n": 3, "seed": 9, "stop_token_ids": (4,)}, MODEL),
        ({"temperature": 1.0, "repetition_penalty": 1.0, "max_tokens": 5, "top_logprobs": 2}, MODEL),
    ],
)
def test_samples_of_the_trainers_distribution_are_accepted(fields: dict[str, Any], distribution: Distribution) -> None:
    check_drawn([said(**fields), *supervised_samples([([1, 2], [3])])], distribution)


def test_policy_gradients_keep_how_rollouts_were_drawn(engine: Engine) -> None:
    flat, gradient = drawn(engine, temperature=0.7), PolicyGradient()
    groups, rewards = [flat[:2], flat[2:]], np.array([[0.0, 1.0], [1.0, 0.0]])
    batch = gradient.samples(groups, rewards, [one.sampling_logprobs for one in flat])
    with pytest.raises(
        ValueError, match=r"sample 0 was drawn with temperature 0.7, and the trainer's .* temperature 1;"
    ):
        check_drawn(batch, MODEL)
    check_drawn(batch, Distribution(0.7))
    lacking = drawn(engine, temperature=0.7, sampling_logprobs=False)
    with pytest.raises(ValueError, match="4 of 4 rollouts have no sampling logprobs"):
        gradient.samples([lacking[:2], lacking[2:]], rewards, [one.logprobs for one in lacking])


def test_a_loss_that_compares_needs_logprobs(engine: Engine) -> None:
    unasked = weighted(drawn(engine, temperature=1.0, sampling_logprobs=False))
    assert [one.old_logprobs for one in unasked] == [None] * 4
    uses = ways(ClippedRatio(), MODEL)
    for name in ("step", "functional"):
        with pytest.raises(ValueError, match="sample 0 has no old_logprobs, and ClippedRatio compares with them"):
            uses[name](unasked)
    trainer(LogLikelihood(), MODEL).step(unasked)


class Unknown:
    """A loss that does not say whether it needs old logprobs."""


def test_an_unknown_loss_needs_logprobs_unless_it_says_that_it_does_not() -> None:
    check = unchecked(check_old_logprobs)
    (lacks,) = supervised_samples([([1, 2], [3, 4])])
    has = dataclasses.replace(lacks, old_logprobs=np.full(2, -1, np.float32))
    with pytest.raises(ValueError, match="sample 1 has no old_logprobs, and Unknown compares with them"):
        check([has, lacks], Unknown())
    check([has], Unknown())
    check([lacks], LogLikelihood())


def test_arrays_that_the_sampler_was_not_asked_for_are_named(engine: Engine) -> None:
    (one, *_) = drawn(engine, temperature=1.0, sampling_logprobs=False)
    with pytest.raises(
        ValueError, match=r"0 old logprobs; .* SamplingParams\(sampling_logprobs=True\) makes the sampler"
    ):
        Sample(one.tokens, np.ones(len(one.completion), np.float32), one.sampling_logprobs)


def test_samples_by_hand_that_were_drawn_at_temperature_0_are_refused(engine: Engine) -> None:
    """All of their ratios would be clipped, and the gradient zero."""
    batch = by_hand(drawn(engine))
    assert not any(np.any(one.old_logprobs) for one in batch)
    one = trainer(ClippedRatio(), MODEL)
    before = [np.asarray(weight).copy() for weight in one.weights]
    says = "old_logprobs of all 4 samples are 0, as for tokens drawn with temperature 0, and the trainer's "
    for use in (one.step, ways(ClippedRatio(), MODEL)["functional"]):
        with pytest.raises(ValueError, match=says + "distribution has temperature 1, whose logprobs add up to"):
            use(batch)
    assert_same_bits([np.asarray(weight) for weight in one.weights], before)
    one.step(by_hand(drawn(engine, temperature=1.0)))


def zeros(*values: float) -> Sample:
    """A sample by hand with these old logprobs."""
    (plain,) = supervised_samples([([1, 2], [3] * len(values))])
    return dataclasses.replace(plain, old_logprobs=np.array(values, np.float32))


CERTAIN = [np.array([-0.25, 0.0], np.float32), np.array([-0.25], np.float32)]
"""Logprobs whose sum is the least that counts as certain."""


@pytest.mark.parametrize("sure", [True, False])
def test_certain_tokens_are_not_taken_for_samples_of_temperature_0(sure: bool) -> None:
    """A policy may be sure of all tokens of a batch, so their logprobs under the trainer decide."""
    logprobs = CERTAIN if sure else [CERTAIN[0], np.nextafter(CERTAIN[1], np.float32(-1))]
    for loss in (ClippedRatio(), Unknown()):
        batch = [zeros(0, -0.0), zeros(0)]
        with contextlib.nullcontext() if sure else pytest.raises(ValueError, match=r"logprobs add up to -0.5; accept"):
            unchecked(check_certain)(batch, loss, Distribution(1e-6), lambda: logprobs)


@pytest.mark.parametrize(
    ("loss", "distribution", "batch"),
    [
        (LogLikelihood(), MODEL, [zeros(0)]),
        (ClippedRatio(), Distribution(0.0), [zeros(0)]),
        (ClippedRatio(), MODEL, [zeros(0), zeros(0, -1e-9)]),
    ],
    ids=["not compared", "temperature 0", "one is not 0"],
)
def test_the_trainers_logprobs_are_not_waited_for_where_old_ones_may_be_0(
    loss: Any, distribution: Distribution, batch: list[Sample]
) -> None:
    def logprobs() -> list[np.ndarray]:
        raise AssertionError("waits for the device")

    check_certain(batch, loss, distribution, logprobs)
