"""The loop of a run, without models: which examples, seeds and samples a step has, and which states are saved."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from detjax.engine import EngineConfig, SamplingParams
from detjax.operands.options import Distribution
from detjax.rl.policy_gradients.policy_gradient import PolicyGradient
from detjax.rl.rollouts import Rollout, prompt_seeds, seed_of
from detjax.rl.runs import run as running
from detjax.rl.runs.run import Run, RunConfig
from detjax.rl.tasks import TASKS
from detjax.rl.trainer.losses import ClippedRatio
from detjax.rl.trainer.microbatches import Packed, Sample
from detjax.rl.trainer.step import Plan
from detjax.rl.trainer.trainer import Scores, StepReport
from tests.rl import policies
from tests.support.unchecked import unchecked

CONFIG = RunConfig(
    kind="reinforcement",
    tasks=(("addition", 1), ("sorting", 2), ("addition", 3)),
    steps=5,
    seed=11,
    prompts=4,
    samples=2,
    max_tokens=9,
    distribution=Distribution(0.7, top_k=5),
)


class RecordingTrainer:
    """A trainer whose state is the number of its steps, and which keeps the samples that it is given."""

    def __init__(self, distribution: Distribution = CONFIG.distribution) -> None:
        self.plan, self.distribution = Plan(Packed(64)), distribution
        self.network, self.state = None, 0
        self.scored: list[Sequence[Sample]] = []
        self.trained: list[Sequence[Sample]] = []

    @property
    def weights(self) -> str:
        return f"after {self.state}"

    def scores(self, samples: Sequence[Sample]) -> Scores:
        self.scored.append(samples)
        logprobs = [np.full(len(sample.weights), -0.5, np.float32) for sample in samples]
        return Scores(logprobs, [2 * np.arange(len(one), dtype=np.float32) for one in logprobs])

    def step(self, samples: Sequence[Sample]) -> StepReport:
        self.state += 1
        self.trained.append(samples)
        # Means over tokens and over sequences differ.
        return StepReport([np.arange(len(sample.weights), dtype=np.float32) - 3 for sample in samples], 0.25)


class RecordingEngine:
    """An engine that keeps the weights that it is given."""

    def __init__(self, **options: Any) -> None:
        self.config = EngineConfig(**options)
        self.weights: list[str] = []

    def update_weights(self, params: str) -> None:
        self.weights.append(params)


@dataclasses.dataclass
class Asked:
    """A call of `rollouts`."""

    weights: str
    prompts: list[str]
    sampling: SamplingParams
    seeds: list[int]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Asked]:
    """The calls of `rollouts`, whose first answer to a prompt of addition is right and whose others are wrong."""
    calls: list[Asked] = []

    def rollouts(
        engine: Any, prompts: list[str], sampling: SamplingParams, seeds: list[int], *, adapter: str | None
    ) -> list[list[Rollout]]:
        assert adapter is None
        calls.append(Asked(engine.weights[-1], prompts, sampling, seeds))
        groups = []
        for prompt in prompts:
            right = str(sum(map(int, prompt[:-1].split("+")))) if "+" in prompt else "wrong"
            texts = [right, *(["wrong"] * (sampling.n - 1))]
            tokens = np.array(policies.tokenizer().encode(prompt), np.int32)
            groups.append([rollout(tokens, text, 1 + index) for index, text in enumerate(texts)])
        return groups

    def rollout(prompt: np.ndarray, text: str, length: int) -> Rollout:
        logprobs = np.full(length, -0.25, np.float32)
        return Rollout(prompt, np.full(length, 3, np.int32), text, logprobs - 1, logprobs, SamplingParams())

    monkeypatch.setattr(running, "rollouts", rollouts)
    monkeypatch.setattr(running, "give_policy", lambda engine, _, weights: engine.update_weights(weights))
    return calls


def made(config: RunConfig, trainer: Any, engine: Any = None) -> Run:
    return unchecked(Run)(config, trainer, policies.tokenizer(), policies.end_token(), engine)


def test_examples_follow_one_another_over_the_steps_and_cycle_through_the_tasks() -> None:
    run = made(CONFIG, RecordingTrainer(), RecordingEngine())
    drawn = [pair for step in range(3) for pair in run.examples(step)]
    cycle = [CONFIG.tasks[number % 3] for number in range(12)]
    expected = [TASKS[name].example(11, number, level) for number, (name, level) in enumerate(cycle)]
    assert drawn == [(TASKS[name], example) for (name, _), example in zip(cycle, expected, strict=True)]
    other = made(dataclasses.replace(CONFIG, seed=12), RecordingTrainer(), RecordingEngine())
    assert run.examples(1) == run.examples(1) != other.examples(1)


def test_each_step_draws_with_seeds_of_its_own_from_the_weights_before_it(asked: list[Asked]) -> None:
    trainer, engine = RecordingTrainer(), RecordingEngine()
    run = made(CONFIG, trainer, engine)
    assert [step for step, _ in run.steps()] == list(range(5))
    assert [call.weights for call in asked] == [f"after {step}" for step in range(5)]
    assert [call.prompts for call in asked] == [
        [example.prompt for _, example in run.examples(step)] for step in range(5)
    ]
    assert [call.seeds for call in asked] == [prompt_seeds(seed_of(11, step), 4) for step in range(5)]
    assert len({seed for call in asked for seed in call.seeds}) == 5 * 4
    wanted = SamplingParams(9, n=2, sampling_logprobs=True, temperature=0.7, top_k=5)
    assert all(call.sampling == wanted for call in asked)
    # Another run draws with other seeds.
    list(made(dataclasses.replace(CONFIG, seed=12, steps=1), RecordingTrainer(), RecordingEngine()).steps())
    assert not set(asked[-1].seeds) & {seed for call in asked[:-1] for seed in call.seeds}


def test_a_step_trains_on_its_rollouts_and_reports_rewards_and_divergence(asked: list[Asked]) -> None:
    trainer = RecordingTrainer()
    gradient = PolicyGradient(estimator="reinforce", correction="token_truncated", cap=1.5)
    config = dataclasses.replace(CONFIG, steps=1, policy_gradient=gradient)
    ((_, metrics),) = made(config, trainer, RecordingEngine()).steps()
    (scored,), (trained,) = trainer.scored, trainer.trained
    assert [one.tokens.tolist() for one in scored] == [one.tokens.tolist() for one in trained]
    assert [len(one.weights) for one in trained] == [1, 2] * 4
    # Tasks 0, 2 and 3 are additions, whose first answer has the reward 1. The ratio of the logprobs is exp(-0.25).
    first = np.float32(np.exp(-0.25) / 12)
    assert [one.weights.tolist() for one in trained] == [
        [first], [0.0, 0.0], [0.0], [0.0, 0.0], [first], [0.0, 0.0], [first], [0.0, 0.0],
    ]  # fmt: skip
    # The loss compares with the trainer's logprobs; the divergence is from the sampler's own distribution.
    assert all((one.old_logprobs == -0.5).all() for one in trained)  # pyright: ignore[reportOptionalMemberAccess]
    assert metrics["reward"] == 3 / 8
    assert metrics["unequal_tokens"] == metrics["tokens"] == 12 and metrics["k1"] == pytest.approx(0.25)
    assert metrics["entropy"] == pytest.approx(2 * 4 / 12)
    assert metrics["gradient_norm"] == 0.25 and metrics["seconds"] >= 0


def test_a_supervised_step_trains_on_the_answers_and_reports_the_mean_over_tokens() -> None:
    trainer = RecordingTrainer(Distribution())
    config = dataclasses.replace(CONFIG, kind="supervised", distribution=Distribution(), steps=2)
    run = made(config, trainer)
    metrics = [metrics for _, metrics in run.steps()]
    for step, (batch, one) in enumerate(zip(trainer.trained, metrics, strict=True)):
        examples, encode = run.examples(step), policies.tokenizer().encode
        tokens = [[*encode(task.solution(example)), policies.end_token()] for task, example in examples]
        for sample, (_, example), answer in zip(batch, examples, tokens, strict=True):
            assert sample.tokens.tolist() == [*encode(example.prompt), *answer]
            assert sample.weights.tolist() == [np.float32(1 / sum(map(len, tokens)))] * len(answer)
        values = [index - 3 for answer in tokens for index in range(len(answer))]
        assert one["loss"] == -np.mean(values) and one["tokens"] == len(values)
        assert one["gradient_norm"] == 0.25 and set(one) == {"loss", "tokens", "gradient_norm", "seconds"}


class RecordingState:
    """A state on disk that keeps what it is asked to save."""

    def __init__(self, newest: tuple[int, Any] | None = None) -> None:
        self._newest, self.like, self.saved = newest, [], []

    def newest(self, like: Any) -> Any:
        self.like.append(like)
        return self._newest

    def save(self, step: int, state: Any) -> None:
        self.saved.append((step, state))


SUPERVISED = dataclasses.replace(CONFIG, kind="supervised", distribution=Distribution())


@pytest.mark.parametrize(
    ("newest", "every", "steps", "saved"),
    [
        (None, 50, [0, 1, 2, 3, 4], [5]),
        (None, 2, [0, 1, 2, 3, 4], [2, 4, 5]),
        (None, 5, [0, 1, 2, 3, 4], [5]),
        (None, 1, [0, 1, 2, 3, 4], [1, 2, 3, 4, 5]),
        ((3, 3), 2, [3, 4], [4, 5]),
        ((5, 5), 1, [], []),
    ],
)
def test_states_are_saved_after_every_few_steps_and_after_the_last(
    newest: tuple[int, int] | None, every: int, steps: list[int], saved: list[int]
) -> None:
    trainer, state = RecordingTrainer(Distribution()), RecordingState(newest)
    assert [step for step, _ in unchecked(made(SUPERVISED, trainer).steps)(state, save_every=every)] == steps
    # A run continues from the saved state, which is the number of steps here.
    assert state.saved == [(step, step) for step in saved] and state.like == [0]
    assert trainer.state == 5


def test_a_step_is_saved_after_its_metrics_are_out() -> None:
    """A run that is killed between the two computes the step again; one that saved first would lack its line."""
    state = RecordingState()
    steps = unchecked(made(SUPERVISED, RecordingTrainer(Distribution())).steps)(state, save_every=1)
    for step, _ in steps:
        assert len(state.saved) == step


@pytest.mark.parametrize("default", [50])
def test_a_state_is_saved_every_50_steps_by_default(default: int) -> None:
    state = RecordingState()
    config = dataclasses.replace(SUPERVISED, steps=2 * default + 1, prompts=1)
    list(unchecked(made(config, RecordingTrainer(Distribution())).steps)(state))
    assert [step for step, _ in state.saved] == [default, 2 * default, 2 * default + 1]


# What must agree.


@pytest.mark.parametrize(
    ("changes", "engine", "message"),
    [
        ({}, None, "Run: engine is None; accepted: an engine, since the run trains on rollouts"),
        ({"shards": 4}, {}, "Run: the trainer's plan has 8 shards; accepted: 4"),
        ({"distribution": Distribution(0.7)}, {}, r"Run: the trainer's distribution is .*top_k=5.*; accepted: .*k=0"),
        ({"kv_cache_dtype": "q4_0"}, {}, "Run: the engine's kv_cache_dtype is None; accepted: q4_0"),
        ({}, {"kv_cache_dtype": "int8"}, "Run: the engine's kv_cache_dtype is int8; accepted: None"),
        ({"tasks": (("addition", 1), ("plus", 1))}, {}, "name is 'plus'; accepted: 'addition'"),
    ],
)
def test_a_trainer_and_an_engine_of_another_run_are_refused(
    changes: dict[str, Any], engine: dict[str, Any] | None, message: str
) -> None:
    config = dataclasses.replace(CONFIG, **changes)
    with pytest.raises(ValueError, match=message):
        made(config, RecordingTrainer(), None if engine is None else RecordingEngine(**engine))


# The configuration.

CHANGES: dict[str, Any] = {
    "kind": "supervised",
    "tasks": (("addition", 1), ("sorting", 2), ("addition", 4)),
    "steps": 6,
    "seed": 12,
    "prompts": 5,
    "samples": 3,
    "max_tokens": 10,
    "distribution": Distribution(0.7, top_k=6),
    "kv_cache_dtype": "int8",
    "policy_gradient": PolicyGradient(loss=ClippedRatio()),
    "learning_rate": 1.5e-3,
    "warmup": 1,
    "final_share": 0.5,
    "max_norm": 2.0,
    "shards": 4,
    "data": "the digest of a file",
}


def test_each_field_of_a_configuration_shows_in_what_a_state_is_saved_with() -> None:
    assert list(CHANGES) == [field.name for field in dataclasses.fields(RunConfig)]
    changed = [dataclasses.replace(CONFIG, **{name: value}) for name, value in CHANGES.items()]
    parts = {"estimator": "rloo", "normalization": "sequence", "constant": 3, "correction": "sequence_masked", "cap": 3}
    gradients = [PolicyGradient(**{name: value}) for name, value in parts.items()]
    gradients += [PolicyGradient(loss=loss) for loss in (ClippedRatio(0.1), ClippedRatio(0.2, 0.3))]
    changed += [dataclasses.replace(CONFIG, policy_gradient=one) for one in gradients]
    others = (Distribution(), Distribution(0.7, top_k=5, top_p=0.9), Distribution(0.7, top_k=5, min_p=0.1))
    changed += [dataclasses.replace(CONFIG, distribution=one) for one in others]
    texts = {str(config.as_json()) for config in (CONFIG, *changed)}
    assert len(texts) == 1 + len(changed)
    for name, config in zip(CHANGES, changed, strict=False):
        # Without data the key is missing, as in states of earlier versions.
        here, there = CONFIG.as_json(), config.as_json()
        assert [key for key in there if here.get(key) != there[key]] == [name]


def test_a_trainer_has_the_settings_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "Trainer", lambda *given, **named: (given, named))
    config = dataclasses.replace(CONFIG, max_norm=3.0, policy_gradient=PolicyGradient(loss=ClippedRatio(0.1)))
    plan, model = Plan(Packed(64)), policies.policy()
    given, named = unchecked(running.trainer_for)(config, model, plan)
    assert given[0] is model and given[2:] == (ClippedRatio(0.1), plan)
    assert named == {"max_norm": 3.0, "distribution": config.distribution}


@pytest.mark.parametrize(
    ("warmup", "share", "steps", "factors"),
    [
        (0, 1.0, 3, [1, 1, 1]),
        (2, 1.0, 4, [1 / 2, 1, 1, 1]),
        (0, 0.25, 4, [1, 0.75, 0.5, 0.25]),
        (4, 0.0, 5, [1 / 4, 3 / 4 * 2 / 4, 2 / 4 * 3 / 4, 1 / 4, 0]),
        (1, 0.5, 1, [1]),
    ],
)
def test_the_step_size_rises_and_falls(
    monkeypatch: pytest.MonkeyPatch, warmup: int, share: float, steps: int, factors: list[float]
) -> None:
    monkeypatch.setattr(running, "adamw", lambda rate: rate)
    optimizer: Callable[..., Any] = running._optimizer.__wrapped__
    rate = optimizer(0.3, warmup, share, steps)
    rates = [rate(count) if callable(rate) else rate for count in map(np.int32, range(steps))]
    np.testing.assert_allclose(np.array(rates), [0.3 * factor for factor in factors], rtol=1e-7)


def test_equal_runs_share_their_optimizer_and_so_their_programs() -> None:
    settings = (1e-3, 4, 0.5, 9)
    assert running._optimizer(*settings) is running._optimizer(*settings)
    for place, other in enumerate((2e-3, 5, 0.25, 8)):
        changed = (*settings[:place], other, *settings[place + 1 :])
        assert running._optimizer(*changed) is not running._optimizer(*settings)
