"""Whole runs: the trainer sees the sampler's bits, and a run that is killed and resumed ends with the same weights."""

import dataclasses
import functools
import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax.audit.comparison.divergence import divergence
from detjax.engine import Engine, SamplingParams
from detjax.operands.options import Distribution
from detjax.ops.token_logprobs import CHUNK
from detjax.rl.policy_gradients.policy_gradient import PolicyGradient
from detjax.rl.rollouts import Rollout, rollouts, seed_of
from detjax.rl.runs.run import Run, RunConfig
from detjax.rl.runs.run_state import RunState
from detjax.rl.trainer.entropy import entropies
from detjax.rl.trainer.microbatches import Layout, Packed, Rows, Sample
from detjax.rl.trainer.trainer import Trainer
from tests.rl import policies
from tests.support import kept_programs
from tests.support.bits import assert_same_bits, same_bits

PROMPTS = ("1+2=", "34=", "7+9=", "5281=", "12=")
ROWS, PACKED = Rows(4, 32), Packed(64)
"""The layouts of these tests, which share programs."""


def made(config: RunConfig, layout: Layout, engine: Engine | None = None) -> Run:
    return Run(config, policies.trainer(layout), policies.tokenizer(), policies.end_token(), engine)


def digest(trainer: Trainer) -> str:
    return hashlib.sha256(b"".join(np.asarray(weight).tobytes() for weight in trainer.weights)).hexdigest()


def sampled(engine: Engine, distribution: Distribution) -> list[Rollout]:
    sampling = SamplingParams(12, n=3, sampling_logprobs=True, **dataclasses.asdict(distribution))
    seeds = [seed_of(5, index) for index in range(len(PROMPTS))]
    return [one for group in rollouts(engine, PROMPTS, sampling, seeds) for one in group]


def samples_of(flat: list[Rollout]) -> list[Sample]:
    return [Sample(one.tokens, np.ones(len(one.completion), np.float32), one.logprobs) for one in flat]


@pytest.mark.parametrize("layout", [ROWS, PACKED], ids=["rows", "packed"])
def test_the_trainer_sees_the_samplers_bits_after_every_step(engine: Engine, layout: Layout) -> None:
    trainer = policies.trainer(layout)
    for temperature in (0.6, 1.0):
        engine.update_weights(trainer.params)
        flat = sampled(engine, Distribution(temperature))
        by_trainer = trainer.logprobs(samples_of(flat))
        between = divergence([one.logprobs for one in flat], by_trainer)
        assert between.unequal_tokens == 0
        assert (between.k1, between.k2, between.k3) == (0.0, 0.0, 0.0)
        # Only at temperature 1 does the distribution have the model's logprobs.
        drawn = [one.sampling_logprobs for one in flat]
        assert same_bits(drawn, by_trainer) == (temperature == 1)
        report = trainer.step(samples_of(flat))
        # The forward pass of the step itself has these bits, too.
        assert_same_bits(report.logprobs, by_trainer)
    # The control: weights of one step later.
    assert not same_bits(trainer.logprobs(samples_of(flat)), by_trainer)


@pytest.mark.parametrize(
    "distribution",
    [
        pytest.param(Distribution(1.3, top_k=9, top_p=0.9, min_p=0.05), id="all filters"),
        *(
            pytest.param(one, id=name, marks=pytest.mark.nightly)
            for name, one in {
                "top-k": Distribution(1.5, top_k=5),
                "cool": Distribution(0.6),
                "top-p": Distribution(1.0, top_p=0.7, min_p=0.05),
                "greedy": Distribution(0.0),
            }.items()
        ),
    ],
)
def test_the_trainer_sees_the_bits_of_the_distribution_that_was_drawn_from(
    engine: Engine, distribution: Distribution
) -> None:
    trainer = policies.trainer(PACKED, distribution=distribution)
    engine.update_weights(trainer.params)
    flat = sampled(engine, distribution)
    report = trainer.step([one.sample(np.ones(len(one.completion), np.float32)) for one in flat])
    assert_same_bits(report.logprobs, [one.sampling_logprobs for one in flat])
    assert not same_bits(report.logprobs, [one.logprobs for one in flat])
    assert (report.gradient_norm == 0) == (distribution.temperature == 0)


SUPERVISED = policies.config("supervised", 9)


@functools.cache
def whole_run() -> str:
    """The digest of the weights after an undisturbed run."""
    run = made(SUPERVISED, ROWS)
    losses = [metrics["loss"] for _, metrics in run.steps()]
    assert losses[-1] < 0.75 * losses[0]
    return digest(run.trainer)


def test_a_supervised_run_lowers_the_loss_and_does_not_depend_on_the_layout() -> None:
    run = made(SUPERVISED, PACKED)
    assert len(list(run.steps())) == 9
    assert digest(run.trainer) == whole_run() != digest(policies.trainer(PACKED))


def test_a_run_of_policy_gradients_has_no_unequal_bit_at_any_step(engine: Engine) -> None:
    run = made(policies.config("reinforcement", 3), PACKED, engine)
    metrics = [metrics for _, metrics in run.steps()]
    assert [one["unequal_tokens"] for one in metrics] == [0, 0, 0]
    assert all(one["k3"] == 0.0 and one["effective_sample_size"] == one["tokens"] for one in metrics)


KILLED = """
import os, signal, sys
from pathlib import Path
import jax
from detjax.rl.trainer.microbatches import Packed, Rows
from detjax.rl.runs.run_state import RunState
from tests.rl.test_run import SUPERVISED, made

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
run = made(SUPERVISED, eval(sys.argv[2]))
with RunState(Path(sys.argv[1]), SUPERVISED.as_json()) as state:
    for step, _ in run.steps(state, save_every=2):
        if step == int(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)
"""


# The step that is killed may or may not have been saved. Each process lays its batches out in its own way.
KILLS = ("Packed(48)", 5), ("Rows(3, 32)", 6), ("Packed(128)", 7)


@pytest.mark.parametrize("kills", [KILLS[:1], pytest.param(KILLS, marks=pytest.mark.nightly)], ids=["once", "thrice"])
def test_a_run_that_is_killed_and_resumed_ends_with_the_same_bytes(
    tmp_path: Path, kills: tuple[tuple[str, int], ...]
) -> None:
    for layout, killed_after in kills:
        command = [sys.executable, "-c", KILLED, str(tmp_path), layout, str(killed_after)]
        environment = os.environ | kept_programs.VARIABLES | {"PYTHONPATH": os.getcwd()}
        process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert process.returncode == -signal.SIGKILL, process.stderr
    run = made(SUPERVISED, PACKED)
    with RunState(tmp_path, SUPERVISED.as_json()) as state:
        steps = [step for step, _ in run.steps(state)]
    # The saves after step 2 were complete when the one after step 4 began.
    assert steps[0] > 1 and steps[-1] == 8
    assert digest(run.trainer) == whole_run()


def test_a_finished_run_has_nothing_left_to_do_in_any_dtype(tmp_path: Path) -> None:
    config = policies.config("supervised", 2)
    first, again = made(config, ROWS), made(config, ROWS)
    wider = Run(config, policies.trainer(ROWS, jnp.float32), policies.tokenizer(), policies.end_token())
    with RunState(tmp_path, config.as_json()) as state:
        assert len(list(first.steps(state))) == 2
    for run in (again, wider):
        with RunState(tmp_path, config.as_json()) as state:
            assert not list(run.steps(state))
    assert digest(again.trainer) == digest(first.trainer)
    assert_same_bits(again.trainer.state, first.trainer.state)
    # Masters are float32 whatever the weights' dtype: the saved state serves, and the weights are rounded again.
    rounded = [np.asarray(weight).astype("bfloat16") for weight in wider.trainer.weights]
    assert_same_bits(rounded, list(map(np.asarray, first.trainer.weights)))


def test_weights_of_terms_come_from_advantages_corrections_and_lengths() -> None:
    def rollout(length: int, logprob: float) -> Rollout:
        logprobs = np.full(length, logprob, np.float32)
        return Rollout(np.array([1], np.int32), np.zeros(length, np.int32), "", logprobs, logprobs)

    groups, rewards = [[rollout(1, -1.0), rollout(3, -1.0)]], np.array([[1.0, 0.0]])
    trainer = [np.full(1, -1.0, np.float32), np.full(3, 0.0, np.float32)]
    plain = PolicyGradient(estimator="rloo").samples(groups, rewards, trainer)
    assert [sample.weights.tolist() for sample in plain] == [[0.25], [-0.25] * 3]
    truncated = PolicyGradient(estimator="rloo", correction="token_truncated", cap=2.0)
    weights = [sample.weights.tolist() for sample in truncated.samples(groups, rewards, trainer)]
    assert weights == [[0.25], [-0.5] * 3]
    assert [sample.old_logprobs.tolist() for sample in plain] == [x.tolist() for x in trainer]


ENTROPIES = {
    "model": Distribution(),
    "cool": Distribution(0.6),
    "top-k": Distribution(1.5, top_k=3),
    "top-p": Distribution(1.0, top_p=0.7),
    "min-p": Distribution(1.0, top_p=0.9, min_p=0.2),
    "greedy": Distribution(0.0),
}


@pytest.mark.parametrize("name", ENTROPIES)
def test_the_entropy_is_that_of_the_distribution_over_all_tokens(name: str) -> None:
    drawn, model = ENTROPIES[name], policies.policy(jnp.float32)
    hidden = 4 * np.random.default_rng(0).standard_normal((7, model.config.hidden_size)).astype(np.float32)
    result = detjax.jit(lambda hidden: entropies(model, hidden, drawn))(jnp.asarray(hidden))
    logits = np.asarray(model.logits(jnp.asarray(hidden)), np.float64)
    expected = [expected_entropy(row, drawn) for row in logits]
    assert result.dtype == jnp.float32 and np.ptp(expected) > (0.02 if drawn.temperature else -1)
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)


def test_entropies_have_the_same_bits_in_any_number_of_chunks() -> None:
    model = policies.policy(jnp.float32)
    hidden = np.random.default_rng(0).standard_normal((3, CHUNK // 3 + 1, model.config.hidden_size)).astype(np.float32)
    assert hidden[..., 0].size > CHUNK
    together = entropies(model, jnp.asarray(hidden), Distribution())
    assert together.shape == hidden.shape[:2]
    for row in range(3):
        assert_same_bits(entropies(model, jnp.asarray(hidden[row]), Distribution()), together[row])


def test_scores_are_logprobs_and_entropies_of_completions_in_any_layout() -> None:
    given = [Sample(np.arange(1, 9, dtype=np.int32), np.zeros(5, np.float32), np.zeros(5, np.float32))]
    given.append(Sample(np.arange(3, 20, dtype=np.int32), np.zeros(9, np.float32), np.zeros(9, np.float32)))
    packed, rows = policies.trainer(PACKED), policies.trainer(ROWS)
    scores = packed.scores(given)
    assert_same_bits(rows.scores(given), scores)
    assert_same_bits(scores.logprobs, packed.logprobs(given))
    for sample, values in zip(given, scores.entropies, strict=True):
        hidden, _ = policies.policy().hidden(jnp.asarray(sample.tokens[None]), None)
        expected = entropies(policies.policy(), hidden[0, sample.prompt_tokens - 1 : -1], Distribution())
        np.testing.assert_allclose(values, expected, rtol=1e-6)


def expected_entropy(logits: np.ndarray, drawn: Distribution) -> float:
    """The entropy in float64."""
    if drawn.temperature == 0:
        return 0.0
    ordered = np.sort(logits / drawn.temperature)[::-1]
    if drawn.top_k:
        ordered = ordered[: drawn.top_k]
    p = np.exp(ordered - ordered[0])
    p /= p.sum()
    kept = (np.cumsum(p) - p < drawn.top_p) & (p >= drawn.min_p * p[0])
    p = p[kept] / p[kept].sum()
    return float(-(p * np.log(p)).sum())
