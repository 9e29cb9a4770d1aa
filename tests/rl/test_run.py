"""Whole runs: the trainer sees the sampler's bits, and a run that is killed and resumed ends with the same weights."""

import dataclasses
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax.audit.comparison.divergence import divergence
from detjax.engine import Engine, SamplingParams
from detjax.models import Decoder
from detjax.operands.options import Distribution
from detjax.rl.policy_gradients.policy_gradient import PolicyGradient
from detjax.rl.rollouts import Rollout, rollouts, seed_of
from detjax.rl.runs.run import Run, RunConfig, trainer_for
from detjax.rl.runs.run_state import RunState
from detjax.rl.trainer.microbatches import Layout, Packed, Rows, Sample
from detjax.rl.trainer.placement import Placement
from detjax.rl.trainer.step import Plan
from detjax.rl.trainer.train_state import initial_state
from detjax.rl.trainer.trainer import Trainer
from tests.rl import policies
from tests.rl.training_cases import ADAMW, network
from tests.support.bits import assert_same_bits

PROMPTS = ("1+2=", "34=", "7+9=", "5281=", "12=")


def engine_for(model: Decoder) -> Engine:
    return Engine(model, policies.tokenizer(), max_samples=8, token_budget=64, max_length=64)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with engine_for(policies.policy()) as engine:
        yield engine


def made(config: RunConfig, layout: Layout, engine: Engine | None = None) -> Run:
    return Run(config, policies.trainer(layout), policies.tokenizer(), policies.end_token(), engine)


def digest(trainer: Trainer) -> str:
    return hashlib.sha256(b"".join(np.asarray(weight).tobytes() for weight in trainer.weights)).hexdigest()


def sampled(engine: Engine, temperature: float = 1.0) -> list[Rollout]:
    sampling = SamplingParams(12, temperature, n=3)
    seeds = [seed_of(5, index) for index in range(len(PROMPTS))]
    return [one for group in rollouts(engine, PROMPTS, sampling, seeds) for one in group]


def samples_of(flat: list[Rollout]) -> list[Sample]:
    return [Sample(one.tokens, np.ones(len(one.completion), np.float32), one.logprobs) for one in flat]


@pytest.mark.parametrize("layout", [Rows(4, 32), Packed(64)], ids=["rows", "packed"])
def test_the_trainer_sees_the_samplers_bits_after_every_step(engine: Engine, layout: Layout) -> None:
    trainer = policies.trainer(layout)
    for step in range(2):
        engine.update_weights(trainer.params)
        flat = sampled(engine, 1.0 if step else 0.6)
        by_trainer = trainer.logprobs(samples_of(flat))
        between = divergence([one.logprobs for one in flat], by_trainer)
        assert between.unequal_tokens == 0
        assert (between.k1, between.k2, between.k3) == (0.0, 0.0, 0.0)
        report = trainer.step(samples_of(flat))
        # The forward pass of the step itself has these bits, too.
        assert [x.tobytes() for x in report.logprobs] == [x.tobytes() for x in by_trainer]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "distribution",
    [Distribution(1.5, top_k=5), Distribution(0.6), Distribution(1.0, top_p=0.7, min_p=0.05), Distribution(0.0)],
    ids=["top-k", "cool", "top-p", "greedy"],
)
def test_the_trainer_sees_the_bits_of_the_distribution_that_was_drawn_from(
    engine: Engine, distribution: Distribution
) -> None:
    trainer = policies.trainer(Packed(128), distribution=distribution)
    engine.update_weights(trainer.params)
    sampling = SamplingParams(12, n=3, sampling_logprobs=True, **dataclasses.asdict(distribution))
    groups = rollouts(engine, PROMPTS, sampling, [seed_of(6, index) for index in range(len(PROMPTS))])
    flat = [one for group in groups for one in group]
    by_trainer = trainer.logprobs(samples_of(flat))
    assert divergence([one.sampling_logprobs for one in flat], by_trainer).unequal_tokens == 0
    report = trainer.step(samples_of(flat))
    assert [x.tobytes() for x in report.logprobs] == [x.tobytes() for x in by_trainer]
    assert (report.gradient_norm == 0) == (distribution.temperature == 0)


@pytest.mark.sampled(0)
def test_stock_numerics_differ_between_sampler_and_trainer() -> None:
    with detjax.use_backend("stock"), engine_for(policies.policy()) as engine:
        trainer = policies.trainer(Rows(4, 32))
        flat = sampled(engine)
        between = divergence([one.logprobs for one in flat], trainer.logprobs(samples_of(flat)))
    assert between.unequal_share > 0.2
    assert between.k3 > 0


def test_a_supervised_run_lowers_the_loss_and_does_not_depend_on_the_layout() -> None:
    config, digests = policies.config("supervised", 12), set()
    for layout in (Rows(8, 16), Packed(48)):
        run = made(config, layout)
        losses = [metrics["loss"] for _, metrics in run.steps()]
        assert losses[-1] < 0.75 * losses[0]
        digests.add(digest(run.trainer))
    assert len(digests) == 1


def test_a_run_of_policy_gradients_has_no_unequal_bit_at_any_step(engine: Engine) -> None:
    run = made(policies.config("reinforcement", 3), Packed(256), engine)
    metrics = [metrics for _, metrics in run.steps()]
    assert [one["unequal_tokens"] for one in metrics] == [0, 0, 0]
    assert all(one["k3"] == 0.0 and one["effective_sample_size"] == one["tokens"] for one in metrics)


def test_the_step_size_rises_and_falls_as_the_configuration_says() -> None:
    config = dataclasses.replace(
        policies.config("supervised", 11), learning_rate=0.5, warmup=4, final_share=0.1, max_norm=1e9
    )
    optimizer = trainer_for(config, policies.policy(), Plan(Packed(64))).optimizer
    param, rates = jnp.zeros(1), []
    state = optimizer.init(param)
    for _ in range(config.steps):
        # With gradients of 1, the quotient of the moments is 1.
        change, state = optimizer.update(jnp.ones(1), state, param)
        rates.append(-float(np.asarray(change)[0]))
    expected = [0.5 * min(1, (step + 1) / 4) * (1 - 0.9 * step / 10) for step in range(11)]
    np.testing.assert_allclose(rates, expected, rtol=1e-3)
    assert trainer_for(config, policies.policy(), Plan(Rows(1, 64))).optimizer is optimizer


KILLED = """
import os, signal, sys
from pathlib import Path
from detjax.rl.trainer.microbatches import Packed, Rows
from detjax.rl.runs.run_state import RunState
from tests.rl import policies
from tests.rl.test_run import digest, made

config = policies.config("supervised", 9)
run = made(config, eval(sys.argv[2]))
with RunState(Path(sys.argv[1]), config.as_json()) as state:
    for step, _ in run.steps(state, save_every=2):
        if step == int(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)
print(digest(run.trainer))
"""


# The step that is killed may or may not have been saved. Each process lays its batches out in its own way.
KILLS = ("Packed(48)", 2), ("Rows(3, 32)", 5), ("Packed(128)", 7)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kills", [KILLS[:1], KILLS], ids=["once", "three times"])
def test_a_run_that_is_killed_and_resumed_ends_with_the_same_bytes(
    tmp_path: Path, kills: tuple[tuple[str, int], ...]
) -> None:
    def process(directory: str, layout: str, killed_after: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", KILLED, str(tmp_path / directory), layout, str(killed_after)]
        # The processes share their programs. None is killed while it writes one.
        environment = os.environ | {"PYTHONPATH": os.getcwd(), "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs")}
        environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    whole = process("whole", "Rows(8, 16)", 99)
    assert whole.returncode == 0, whole.stderr
    for layout, killed_after in kills:
        assert process("killed", layout, killed_after).returncode == -signal.SIGKILL
    resumed = process("killed", "Rows(2, 16)", 99)
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout == whole.stdout


def test_a_state_of_another_run_is_refused_by_what_differs(tmp_path: Path) -> None:
    config = policies.config("supervised", 2)
    run = made(config, Rows(8, 16))
    with RunState(tmp_path, config.as_json()) as state:
        list(run.steps(state))
    other = dataclasses.replace(config, seed=1)
    with RunState(tmp_path, other.as_json()) as state, pytest.raises(ValueError, match="configuration has seed 0"):
        list(made(other, Rows(8, 16)).steps(state))
    wider = Run(config, policies.trainer(Rows(8, 16), jnp.float32), policies.tokenizer(), policies.end_token())
    with RunState(tmp_path, config.as_json()) as state:
        # Masters are float32 whatever the weights' dtype: the saved state serves, and the weights are rounded again.
        assert not list(wider.steps(state))


def test_a_state_with_a_weight_that_is_not_trained_is_found_again(tmp_path: Path) -> None:
    net, weights = network("deepseek-v3", "float32")
    state = initial_state(weights, ADAMW, Placement(2), trained=net.trained)
    assert None in state.optimizer
    with RunState(tmp_path, {}) as saved:
        saved.save(3, state)
    with RunState(tmp_path, {}) as saved:
        newest = saved.newest(state)
    assert newest is not None
    assert newest[0] == 3
    assert_same_bits(newest[1], state)


def test_a_finished_run_has_nothing_left_to_do(tmp_path: Path) -> None:
    config = policies.config("supervised", 2)
    with RunState(tmp_path, config.as_json()) as state:
        first = made(config, Rows(8, 16))
        list(first.steps(state))
    with RunState(tmp_path, config.as_json()) as state:
        again = made(config, Rows(8, 16))
        assert not list(again.steps(state))
    assert digest(again.trainer) == digest(first.trainer)


def test_learning_from_rollouts_needs_an_engine() -> None:
    with pytest.raises(ValueError, match="engine is None; accepted: an engine"):
        made(policies.config("reinforcement", 1), Rows(8, 16))


def test_an_engine_with_another_cache_is_refused(engine: Engine) -> None:
    config = dataclasses.replace(policies.config("reinforcement", 1), kv_cache_dtype="q4_0")
    with pytest.raises(ValueError, match="the engine's kv_cache_dtype is None; accepted: q4_0"):
        made(config, Rows(8, 16), engine)


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
    "min-p": Distribution(1.0, top_p=0.9, min_p=0.2),
    "greedy": Distribution(0.0),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ENTROPIES)
def test_the_entropy_is_that_of_the_distribution_over_all_tokens(name: str) -> None:
    drawn = ENTROPIES[name]
    given = [Sample(np.arange(1, 9, dtype=np.int32), np.zeros(5, np.float32), np.zeros(5, np.float32))]
    given.append(Sample(np.arange(3, 20, dtype=np.int32), np.zeros(9, np.float32), np.zeros(9, np.float32)))
    scores = policies.trainer(Packed(64), distribution=drawn).scores(given)
    rows = policies.trainer(Rows(1, 32), distribution=drawn).scores(given)
    assert [x.tobytes() for x in rows.entropies] == [x.tobytes() for x in scores.entropies]
    by_trainer = policies.trainer(Packed(64), distribution=drawn).logprobs(given)
    assert [x.tobytes() for x in scores.logprobs] == [x.tobytes() for x in by_trainer]
    for sample, entropies in zip(given, scores.entropies, strict=True):
        logits = np.asarray(policies.policy()(jnp.asarray(sample.tokens[None])), np.float64)
        logits = logits[0, sample.prompt_tokens - 1 : -1]
        assert entropies.shape == sample.weights.shape
        for row, entropy in zip(logits, entropies, strict=True):
            np.testing.assert_allclose(entropy, expected_entropy(row, drawn), rtol=1e-3, atol=1e-4)


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
