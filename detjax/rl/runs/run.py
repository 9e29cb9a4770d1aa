"""Whole runs: supervised training and reinforcement learning on verifiable tasks, reproducible to the byte.

The examples and seeds of a step are functions of the run's seed and the step. A run is therefore a function of its
configuration and its initial model, and a run that was killed and resumed ends with the same weights.
"""

import dataclasses
import functools
import json
import time
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
import optax

from detjax.audit.comparison.divergence import divergence
from detjax.contract import GRADIENT_SHARDS
from detjax.engine import Engine, SamplingParams
from detjax.models import Decoder, Tokenizer
from detjax.operands.options import Distribution, KVQuantization
from detjax.rl.policy_gradients.policy_gradient import PolicyGradient, supervised_samples
from detjax.rl.rollouts import give_policy, prompt_seeds, rollouts, seed_of
from detjax.rl.runs.run_state import RunState
from detjax.rl.tasks import Example, Task, task_named
from detjax.rl.tasks.pairs import Pairs
from detjax.rl.trainer.optimizers import adamw
from detjax.rl.trainer.step import Plan
from detjax.rl.trainer.trainer import Trainer

Kind = Literal["supervised", "reinforcement"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All settings that affect the bits of a run. The model and the environment affect them too.

    Attributes:
        kind: "supervised" trains on correct answers; "reinforcement" trains on the policy's own rollouts.
        tasks: names of tasks with their difficulties. Examples cycle through them.
        steps: number of steps.
        seed: the seed of examples and of sampling.
        prompts: examples per step.
        samples: rollouts per prompt.
        max_tokens: maximum number of tokens of a rollout.
        distribution: the distribution that rollouts are drawn from. The loss takes logprobs under it.
        kv_cache_dtype: the sampler's KV cache quantization; see `EngineConfig`. The trainer does not quantize, so its
            bits then differ from the sampler's.
        policy_gradient: the policy gradient's settings.
        learning_rate: the peak step size of AdamW.
        warmup: number of steps of linear warm-up.
        final_share: the share of `learning_rate` that remains at the last step, after linear decay.
        max_norm: gradients with a larger norm are scaled down to it.
        shards: see `detjax.rl.trainer.step.Plan`.
        data: the digest of the prompts and completions that a supervised run trains on; None: it trains on tasks.
    """

    kind: Kind
    tasks: tuple[tuple[str, int], ...]
    steps: int
    seed: int = 0
    prompts: int = 64
    samples: int = 8
    max_tokens: int = 32
    distribution: Distribution = dataclasses.field(default_factory=Distribution)
    kv_cache_dtype: KVQuantization | None = None
    policy_gradient: PolicyGradient = dataclasses.field(default_factory=PolicyGradient)
    learning_rate: float = 1e-3
    warmup: int = 0
    final_share: float = 1.0
    max_norm: float = 1.0
    shards: int = GRADIENT_SHARDS
    data: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Returns the configuration as JSON values, with the loss as its `repr`."""
        fields = dataclasses.asdict(self)
        fields["policy_gradient"]["loss"] = repr(self.policy_gradient.loss)
        if self.data is None:  # as in runs before there was such a field
            del fields["data"]
        return json.loads(json.dumps(fields))


def trainer_for(config: RunConfig, model: Decoder, plan: Plan) -> Trainer:
    """Returns the trainer of a run.

    Args:
        model: the initial decoder, which is not modified.
        plan: the training plan, with the run's number of shards.
    """
    optimizer = _optimizer(config.learning_rate, config.warmup, config.final_share, config.steps)
    loss, distribution = config.policy_gradient.loss, config.distribution
    return Trainer(model, optimizer, loss, plan, max_norm=config.max_norm, distribution=distribution)


@functools.cache
def _optimizer(learning_rate: float, warmup: int, final_share: float, steps: int) -> optax.GradientTransformation:
    """Returns the same object for equal runs, so that they share programs."""
    if not warmup and final_share == 1:
        return adamw(learning_rate)
    # A table, since different programs may round a formula differently.
    step = np.arange(steps, dtype=np.float64)
    falling = 1 - (1 - final_share) * step / max(1, steps - 1)
    rates = (learning_rate * falling * np.minimum(1, (step + 1) / max(1, warmup))).astype(np.float32)
    return adamw(lambda count: jnp.asarray(rates)[count])


class Run:
    """A run, step by step."""

    def __init__(
        self,
        config: RunConfig,
        trainer: Trainer,
        tokenizer: Tokenizer,
        end_token: int,
        engine: Engine | None = None,
        pairs: Pairs | None = None,
    ) -> None:
        """Prepares a run that starts from the trainer's weights.

        Args:
            end_token: the token that ends an answer.
            engine: computes rollouts; required for reinforcement learning. Its model has the trainer's shapes.
            pairs: the prompts and completions whose digest is `config.data`.

        Raises:
            ValueError: a task is unknown, a required engine is missing, or the trainer's or engine's configuration does
                not match.
        """
        if config.kind == "reinforcement" and engine is None:
            raise ValueError("Run: engine is None; accepted: an engine, since the run trains on rollouts")
        if config.data != (None if pairs is None else pairs.digest):
            raise ValueError("Run: pairs are other data than config.data; accepted: the pairs with this digest")
        if config.shards != trainer.plan.shards:
            raise ValueError(f"Run: the trainer's plan has {trainer.plan.shards} shards; accepted: {config.shards}")
        if config.distribution != trainer.distribution:
            raise ValueError(
                f"Run: the trainer's distribution is {trainer.distribution}; accepted: {config.distribution}"
            )
        if engine is not None and engine.config.kv_cache_dtype != config.kv_cache_dtype:
            raise ValueError(
                f"Run: the engine's kv_cache_dtype is {engine.config.kv_cache_dtype}; accepted: {config.kv_cache_dtype}"
            )
        self.config, self.trainer, self.tokenizer, self.engine = config, trainer, tokenizer, engine
        self._end_token, self._pairs = end_token, pairs
        self._tasks = [(task_named(name), difficulty) for name, difficulty in config.tasks]

    def steps(self, state: RunState | None = None, *, save_every: int = 50) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Yields each step's number and metrics, starting from the latest saved step.

        Args:
            state: saves and restores states; None: nothing is saved.
            save_every: steps between two saves. The last step is always saved.

        Raises:
            ValueError: the saved state belongs to another run; see `RunState.newest`.
        """
        saved = None if state is None else state.newest(self.trainer.state)
        first = 0
        if saved is not None:
            first, self.trainer.state = saved
        for step in range(first, self.config.steps):
            start = time.perf_counter()
            metrics = self._supervised(step) if self.config.kind == "supervised" else self._reinforced(step)
            yield step, metrics | {"seconds": time.perf_counter() - start}
            done = step + 1
            if state is not None and (done % save_every == 0 or done == self.config.steps):
                state.save(done, self.trainer.state)

    def examples(self, step: int) -> list[tuple[Task, Example]]:
        """Returns the examples of a step, each with its task."""
        pairs = [(self._tasks[number % len(self._tasks)], number) for number in self._numbers(step)]
        return [(task, task.example(self.config.seed, number, difficulty)) for (task, difficulty), number in pairs]

    def _numbers(self, step: int) -> range:
        """Returns the numbers of a step's examples in the run."""
        return range(step * self.config.prompts, (step + 1) * self.config.prompts)

    def _supervised(self, step: int) -> dict[str, Any]:
        if self._pairs is None:
            texts = [(example.prompt, task.solution(example)) for task, example in self.examples(step)]
        else:
            texts = self._pairs.chosen(self.config.seed, self._numbers(step))
        encode = self.tokenizer.encode
        pairs = [(encode(prompt), [*encode(completion), self._end_token]) for prompt, completion in texts]
        report = self.trainer.step(supervised_samples(pairs))
        return {
            "loss": -_mean(report.logprobs),
            "gradient_norm": report.gradient_norm,
            "tokens": sum(map(len, report.logprobs)),
        }

    def _reinforced(self, step: int) -> dict[str, Any]:
        config, engine, examples = self.config, self.engine, self.examples(step)
        assert engine is not None
        adapter = give_policy(engine, self.trainer.network, self.trainer.weights)
        distribution = dataclasses.asdict(config.distribution)
        sampling = SamplingParams(config.max_tokens, n=config.samples, sampling_logprobs=True, **distribution)
        seeds = prompt_seeds(seed_of(config.seed, step), len(examples))
        groups = rollouts(engine, [example.prompt for _, example in examples], sampling, seeds, adapter=adapter)
        pairs = zip(examples, groups, strict=True)
        rewards = np.array([[task.reward(example, one.text) for one in group] for (task, example), group in pairs])
        flat = [one for group in groups for one in group]
        sampler, scores = (
            [one.sampling_logprobs for one in flat],
            self.trainer.scores([one.sample(np.zeros(len(one.completion), np.float32)) for one in flat]),
        )
        report = self.trainer.step(config.policy_gradient.samples(groups, rewards, scores.logprobs))
        return {
            "reward": float(rewards.mean()),
            **divergence(sampler, scores.logprobs).as_dict(),
            "entropy": _mean(scores.entropies),
            "gradient_norm": report.gradient_norm,
        }


def _mean(arrays: list[np.ndarray]) -> float:
    return float(np.concatenate(arrays).astype(np.float64).mean())
