"""The recipe of the small policy included in detjax: supervised training from random weights on all tasks.

It takes a few minutes on two CPU cores. The result is a function of the recipe and of the environment's fingerprint, so
`DIGESTS` records a digest for each fingerprint.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from detjax import models
from detjax.engine import Engine, SamplingParams
from detjax.models import Decoder, Tokenizer
from detjax.rl.rollouts import prompt_seeds, rollouts
from detjax.rl.runs.policy import DIFFICULTIES, small_policy
from detjax.rl.runs.run import Run, RunConfig, trainer_for
from detjax.rl.tasks import TASKS
from detjax.rl.trainer.step import Plan

# Easy tasks need fewer examples until half of them are solved.
_ROUND: Final = (
    *("addition", "addition", "sorting", "addition", "countdown", "addition", "brackets"),
    *("addition", "countdown", "brackets", "addition", "addition", "addition"),
)

RECIPE: Final = RunConfig(
    kind="supervised",
    tasks=tuple((name, DIFFICULTIES[name]) for name in (*(_ROUND * 4), "multiplication")),
    steps=350,
    prompts=128,
    learning_rate=2e-3,
    warmup=50,
    final_share=0.05,
)
"""The recipe. The policy has two layers of width 128, and random weights of seed 0."""

DIGESTS: Final[Mapping[str, str]] = {
    "28000fcae1830f57": "3323426ad685c0c639d5db284ddd0f290d4b70da62d8aad01c4dba2ec7001bef",
}
"""The SHA-256 of the trained `model.safetensors` by fingerprint."""

HELD_OUT_SEED: Final = 1
"""The seed of the examples that evaluate the policy."""


def train(
    plan: Plan, *, steps: int | None = None, layers: int = 2, width: int = 128, report: Callable[..., Any] = print
) -> tuple[Decoder, Tokenizer]:
    """Trains by the recipe, and returns the policy and its tokenizer.

    Args:
        plan: the training plan. Only its number of shards affects bits.
        steps: the number of steps, to run fewer than the recipe in tests.
        report: called with a line of text every 25 steps.
    """
    config = RECIPE if steps is None else dataclasses.replace(RECIPE, steps=steps)
    policy, tokenizer = small_policy(layers, width)
    trainer = trainer_for(config, policy, plan)
    for step, metrics in Run(config, trainer, tokenizer, len(tokenizer) - 1).steps():
        if step % 25 == 24:
            report(f"step {step + 1} of {config.steps}: loss {metrics['loss']:.3f}, {metrics['seconds']:.2f} s a step")
    return trainer.model, tokenizer


def solved_shares(
    model: Decoder, tokenizer: Tokenizer, *, prompts: int = 128, samples: int = 4, temperature: float = 1.0
) -> dict[str, float]:
    """Returns the share of correct answers to held-out examples of each task.

    Args:
        prompts: examples of each task.
        samples: answers per example.
        temperature: the sampling temperature; 0: greedy.
    """
    with Engine(model, tokenizer, max_samples=64, token_budget=256, max_length=64) as engine:
        return {
            name: solved_share(engine, name, difficulty, prompts, SamplingParams(32, temperature, n=samples))
            for name, difficulty in DIFFICULTIES.items()
        }


def solved_share(engine: Engine, name: str, difficulty: int, prompts: int, sampling: SamplingParams) -> float:
    """Returns the share of correct answers to held-out examples of a task."""
    task = TASKS[name]
    examples = [task.example(HELD_OUT_SEED, number, difficulty) for number in range(prompts)]
    texts = [example.prompt for example in examples]
    groups = rollouts(engine, texts, sampling, prompt_seeds(HELD_OUT_SEED, prompts))
    pairs = zip(examples, groups, strict=True)
    return float(np.mean([[task.reward(example, one.text) for one in group] for example, group in pairs]))


def save(model: Decoder, tokenizer: Tokenizer, folder: Path) -> str:
    """Saves a policy to a folder and returns the SHA-256 of its weight file."""
    models.save(model, folder, tokenizer=tokenizer)
    return digest(folder)


def digest(folder: Path) -> str:
    """Returns the SHA-256 of a policy's weight file."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
