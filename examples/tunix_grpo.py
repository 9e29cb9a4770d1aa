"""GRPO by Tunix' own learner, with detjax's decoder and engine: no bit differs between rollout and trainer.

    python examples/tunix_grpo.py --steps 100

Needs `pip install 'detjax[tunix]'`, and a minute on a CPU. `--tunix-formula` keeps Tunix' own formula for logprobs,
with which rollouts and trainer differ. The exit code is 1 if a bit differs.
"""

import argparse
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType
from tunix.rl import common, rl_cluster  # pyright: ignore[reportMissingImports]
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner  # pyright: ignore[reportMissingImports]
from tunix.rl.rollout.base_rollout import RolloutConfig  # pyright: ignore[reportMissingImports]

from detjax import models
from detjax.models.network import split
from detjax.rl.runs.policy import CHECKPOINT, DIFFICULTIES
from detjax.rl.tasks import TASKS
from detjax.rl.tunix import TunixModel, TunixRollout, TunixTokenizer

PROMPTS, SAMPLES, PROMPT_LENGTH, MAX_TOKENS = 2, 4, 16, 16


class CheckedRollout(TunixRollout):
    """Rollouts whose logprobs are compared with Tunix' trainer's for the same weights."""

    tokens = unequal = 0

    def generate(self, prompts: Any, rollout_config: Any, **options: Any) -> Any:
        output = super().generate(prompts, rollout_config, **options)
        padded = np.full((len(prompts), MAX_TOKENS), self.pad_id(), np.int32)
        for row, completion in zip(padded, output.tokens, strict=True):
            row[: len(completion)] = completion
        trained = np.asarray(self.get_per_token_logps(output.left_padded_prompt_tokens, jnp.asarray(padded)))
        for row, logprobs in zip(trained, output.logprobs or [], strict=True):
            CheckedRollout.tokens += len(logprobs)
            CheckedRollout.unequal += int((row[: len(logprobs)].view("u4") != logprobs.view("u4")).sum())
        return output


def batches(steps: int) -> Iterator[dict[str, Any]]:
    """Yields the prompts of each step with the arguments of the reward."""
    for step in range(steps):
        names = [list(DIFFICULTIES)[(PROMPTS * step + index) % len(DIFFICULTIES)] for index in range(PROMPTS)]
        examples = [TASKS[name].example(0, step, DIFFICULTIES[name]) for name in names]
        prompts = [example.prompt for example in examples]
        yield {"prompts": np.array(prompts), "task": np.array(names), "number": np.full(PROMPTS, step)}


def reward(prompts: Any, completions: Any, task: Any, number: Any, **_: Any) -> list[float]:
    """Returns 1 for correct answers, and 0 for wrong ones."""
    del prompts
    answers = zip(completions, task, number, strict=True)
    return [
        TASKS[name].reward(TASKS[name].example(0, int(step), DIFFICULTIES[name]), text) for text, name, step in answers
    ]


def main() -> int:
    """Trains, and prints the number of tokens with unequal logprobs."""
    parser = argparse.ArgumentParser(description="GRPO by Tunix with detjax as model and rollout.")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--tunix-formula", action="store_true", help="keep Tunix' formula for logprobs")
    arguments = parser.parse_args()
    decoder, tokenizer = models.load(CHECKPOINT, progress=False)
    assert tokenizer is not None
    # JAX's default, explicit axes, would be part of array types, which detjax's operations do not support.
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
    formula = common.selective_log_softmax
    roles = rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT
    before = [np.asarray(x) for x in jax.tree.leaves(split(decoder)[1])]
    cluster = rl_cluster.RLCluster(
        actor=TunixModel(decoder),
        tokenizer=TunixTokenizer(tokenizer, decoder),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys(roles, mesh),
            rollout_engine=CheckedRollout,
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.adamw(1e-4), max_steps=arguments.steps, eval_every_n_steps=10**9
            ),
            rollout_config=RolloutConfig(
                max_tokens_to_generate=MAX_TOKENS, max_prompt_length=PROMPT_LENGTH, temperature=1.0
            ),
        ),
    )
    if arguments.tunix_formula:
        # For the padding id, which is outside of the vocabulary, it would compute NaN.
        last = decoder.config.vocab_size - 1
        common.selective_log_softmax = lambda logits, ids: formula(logits, jnp.minimum(ids, last))
    learner = GRPOLearner(cluster, GRPOConfig(num_generations=SAMPLES, beta=0.0), [reward])
    learner.train(batches(arguments.steps))
    after = jax.tree.leaves(split(cluster.actor_trainer.model.decoder)[1])
    moved = sum(not np.array_equal(x, np.asarray(y)) for x, y in zip(before, after, strict=True))
    print(f"{arguments.steps} steps, {moved} of {len(before)} weights moved")
    print(f"{CheckedRollout.unequal} of {CheckedRollout.tokens} tokens have unequal logprobs")
    return int(CheckedRollout.unequal > 0 or not CheckedRollout.tokens)


if __name__ == "__main__":
    sys.exit(main())
