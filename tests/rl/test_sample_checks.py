"""Samples that were drawn otherwise than the trainer assumes, or that lack what its loss needs, are refused."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from flax import nnx

from detjax.engine import Constraint, Engine, SamplingParams
from detjax.operands.options import Distribution
from detjax.rl import functional
from detjax.rl.policy_gradients.policy_gradient import PolicyGradient, supervised_samples
from detjax.rl.rollouts import Rollout, prompt_seeds, rollouts
from detjax.rl.trainer.losses import ClippedRatio, LogLikelihood
from detjax.rl.trainer.microbatches import Packed, Sample
from detjax.rl.trainer.optimizers import adamw
from detjax.rl.trainer.step import Plan
from detjax.rl.trainer.trainer import Trainer
from tests.rl import policies
from tests.support.bits import assert_same_bits

PROMPTS = ["1+2=", "34="]
LAYOUT = Packed(128)
ADAMW = adamw(policies.LEARNING_RATE)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(policies.policy(), policies.tokenizer(), max_samples=8, token_budget=64, max_length=64) as one:
        yield one


def drawn(engine: Engine, **fields: Any) -> list[Rollout]:
    """Rollouts by `SamplingParams` with fields, and with the defaults of all others."""
    params = SamplingParams(**{"max_tokens": 6, "n": 2, "sampling_logprobs": True} | fields)
    return [one for group in rollouts(engine, PROMPTS, params, prompt_seeds(3, 2)) for one in group]


def weighted(flat: Sequence[Rollout]) -> list[Sample]:
    return [one.sample(np.full(len(one.completion), 0.25, np.float32)) for one in flat]


def by_hand(flat: Sequence[Rollout]) -> list[Sample]:
    """Samples that do not say how they were drawn."""
    return [dataclasses.replace(one, sampling=None) for one in weighted(flat)]


@functools.cache
def trainer(loss: Any, distribution: Distribution) -> Trainer:
    return Trainer(policies.policy(), ADAMW, loss, Plan(LAYOUT), distribution=distribution)


@functools.cache
def ways(loss: Any, distribution: Distribution) -> dict[str, Callable[[list[Sample]], Any]]:
    """All that is done with samples."""
    one = trainer(loss, distribution)
    pure = functional.Training(policies.policy(), ADAMW, loss, distribution=distribution)
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
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", OTHERS)
def test_samples_of_another_distribution_are_refused_by_both(engine: Engine, name: str) -> None:
    fields, distribution, samples_have, trainer_has = OTHERS[name]
    batch = weighted(drawn(engine, **fields))
    says = f"sample 0 was drawn with {samples_have}, and the trainer's distribution has {trainer_has}; accepted: "
    for use in ways(LogLikelihood(), distribution).values():
        with pytest.raises(ValueError) as raised:
            use(batch)
        assert str(raised.value).startswith(says)


CHANGES: dict[str, Any] = {
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.2,
    "logit_bias": ((5, 2.0),),
    "min_tokens": 3,
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CHANGES)
def test_samples_with_penalties_and_biases_are_refused(engine: Engine, name: str) -> None:
    batch = weighted(drawn(engine, temperature=1.0, **{name: CHANGES[name]}))
    for use in ways(LogLikelihood(), MODEL).values():
        with pytest.raises(ValueError, match=f"sample 0 was drawn with {name} .*, and the trainer's distribution has"):
            use(batch)


def test_samples_with_a_constraint_are_refused() -> None:
    params = SamplingParams(temperature=1.0, constraint=Constraint.choice(["a"]))
    (plain,) = supervised_samples([([1, 2], [3])])
    for use in ways(LogLikelihood(), MODEL).values():
        with pytest.raises(ValueError, match="sample 1 was drawn with constraint"):
            use([plain, dataclasses.replace(plain, sampling=params)])


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("fields", "distribution"),
    [
        ({"temperature": 1.0}, MODEL),
        ({"temperature": 0.7, "top_k": 5}, Distribution(0.7, top_k=5)),
        ({"temperature": 0.0, "top_k": 5}, Distribution(0.0)),  # filters change nothing there
        ({"temperature": 1.0, "ignore_eos": True, "n": 3, "seed": 9, "stop_token_ids": (4,)}, MODEL),
    ],
)
def test_samples_of_the_trainers_distribution_are_taken(
    engine: Engine, fields: dict[str, Any], distribution: Distribution
) -> None:
    flat = drawn(engine, **fields)
    logprobs = Trainer(policies.policy(), ADAMW, LogLikelihood(), Plan(LAYOUT), distribution=distribution).logprobs
    assert_same_bits(logprobs(weighted(flat)), [one.sampling_logprobs for one in flat])


def test_policy_gradients_keep_how_rollouts_were_drawn(engine: Engine) -> None:
    flat, gradient = drawn(engine, temperature=0.7), PolicyGradient()
    groups, rewards = [flat[:2], flat[2:]], np.array([[0.0, 1.0], [1.0, 0.0]])
    batch = gradient.samples(groups, rewards, [one.sampling_logprobs for one in flat])
    with pytest.raises(
        ValueError, match=r"sample 0 was drawn with temperature 0.7, and the trainer's .* temperature 1;"
    ):
        trainer(LogLikelihood(), MODEL).step(batch)
    trainer(LogLikelihood(), Distribution(0.7)).step(batch)
    lacking = drawn(engine, temperature=0.7, sampling_logprobs=False)
    with pytest.raises(ValueError, match="4 of 4 rollouts have no sampling logprobs"):
        gradient.samples([lacking[:2], lacking[2:]], rewards, [one.logprobs for one in lacking])


def test_a_loss_that_compares_needs_logprobs(engine: Engine) -> None:
    unasked = weighted(drawn(engine, temperature=1.0, sampling_logprobs=False))
    assert [one.old_logprobs for one in unasked] == [None] * 4
    for batch in (unasked, supervised_samples([([1, 2], [3, 4])])):
        uses = ways(ClippedRatio(), MODEL)
        for name in ("step", "functional"):
            with pytest.raises(ValueError, match="sample 0 has no old_logprobs, and ClippedRatio compares with them"):
                uses[name](batch)
        for use in ways(LogLikelihood(), MODEL).values():
            use(batch)


def test_an_unknown_loss_needs_logprobs_unless_it_says_that_it_does_not() -> None:
    class Other(LogLikelihood):
        needs_old_logprobs = True  # pyright: ignore[reportIncompatibleVariableOverride]

    (one,) = supervised_samples([([1, 2], [3, 4])])
    with pytest.raises(ValueError, match="sample 0 has no old_logprobs, and Other compares with them"):
        trainer(Other(), MODEL).step([one])


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
    for accepted in (trainer(ClippedRatio(), Distribution(0.0)), trainer(LogLikelihood(), MODEL)):
        accepted.step(batch)
    trainer(ClippedRatio(), MODEL).step(by_hand(drawn(engine, temperature=1.0)))


@pytest.mark.sampled(0)
def test_certain_tokens_are_not_taken_for_samples_of_temperature_0(engine: Engine) -> None:
    """A policy may be sure of all tokens of a batch, so their logprobs under the trainer decide."""
    sure = Distribution(1e-6)
    batch = by_hand(drawn(engine, temperature=1e-6))
    assert not any(np.any(one.old_logprobs) for one in batch)
    trainer(ClippedRatio(), sure).step(batch)
