"""GRPO on conversations of several turns with a tool, in one process.

    python examples/multi_turn.py

The policy adds two numbers. The tool, a calculator, checks each answer: after a wrong one it writes `?` and the
question again, until there were three answers. The tool's tokens are in the conversation, but have no weight.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

import detjax
from detjax import models
from detjax.models import Tokenizer
from detjax.rl import functional
from detjax.rl.policy_gradients import advantages
from detjax.rl.rollouts import seed_of
from detjax.rl.runs.policy import CHECKPOINT
from detjax.rl.tasks import TASKS
from detjax.rl.tasks.task import Example
from detjax.rl.trainer.losses import ClippedRatio
from detjax.rl.trainer.microbatches import Layout, Packed, PlacedMicrobatch, Sample
from detjax.rl.trainer.optimizers import adamw

TASK, DIFFICULTY, STEPS, QUESTIONS, EPISODES, TURNS, MAX_TOKENS = TASKS["addition"], 2, 2, 2, 4, 3, 6
SAMPLING = detjax.SamplingParams(MAX_TOKENS, temperature=1.0, sampling_logprobs=True)


@dataclasses.dataclass
class Episode:
    """A conversation of the policy and the tool.

    Attributes:
        example: the question and its answer.
        tokens: the conversation so far.
        is_sampled: of each token after the first question, whether the policy wrote it.
        logprobs: the sampler's logprob of each of these tokens; 0 for the tool's.
        reward: 1 for a right answer, less for each turn before it, 0 without one.
    """

    example: Example
    tokens: list[int]
    is_sampled: list[bool] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    reward: float = 0.0

    def sample(self, weight: float) -> Sample:
        """Returns the conversation as one sequence of a training step, in which the policy's tokens have a weight."""
        weights = np.where(self.is_sampled, weight, 0).astype(np.float32)
        tokens, logprobs = np.array(self.tokens, np.int32), np.array(self.logprobs, np.float32)
        return Sample(tokens, weights, logprobs, sampling=SAMPLING)


def play(engine: detjax.Engine, tokenizer: Tokenizer, episodes: Sequence[Episode], seed: int) -> None:
    """Plays all episodes to their ends, turn by turn."""
    playing = dict(enumerate(episodes))
    for turn in range(TURNS):
        # The next prompt is the conversation's tokens: no text is tokenized twice.
        requests = [
            # A seed for each conversation and turn, since equal prompts have equal answers with one seed.
            detjax.Request(tuple(one.tokens), dataclasses.replace(SAMPLING, seed=seed_of(seed, number, turn)))
            for number, one in playing.items()
        ]
        for (number, one), generation in zip(list(playing.items()), engine.generate(requests), strict=True):
            (answer,) = generation.completions
            one.tokens += answer.tokens
            one.is_sampled += [True] * len(answer.tokens)
            one.logprobs += answer.sampling_logprobs
            if TASK.reward(one.example, answer.text or ""):
                one.reward = 1 - turn / TURNS
                del playing[number]
            elif turn < TURNS - 1:
                reply = tokenizer.encode(f"?{one.example.prompt}")
                one.tokens += reply
                one.is_sampled += [False] * len(reply)
                one.logprobs += [0.0] * len(reply)


@dataclasses.dataclass(frozen=True)
class OtherTargets:
    """A layout in which all tokens without a weight are other tokens, as targets of the loss."""

    layout: Layout
    token: int

    def microbatches(self, samples: Sequence[Sample], first: int = 0) -> Iterator[PlacedMicrobatch]:
        """Yields microbatches with all sequences; see `Layout`."""
        for one in self.layout.microbatches(samples, first):
            targets = np.where(one.arrays.weights == 0, np.int32(self.token), one.arrays.targets)
            yield dataclasses.replace(one, arrays=one.arrays._replace(targets=targets))


def bits(tree: Any) -> list[bytes]:
    """Returns the bytes of all arrays."""
    return [np.asarray(array).tobytes() for array in jax.tree.leaves(tree)]


def main() -> None:
    """Trains the policy, and checks every step."""
    model, tokenizer = models.load(CHECKPOINT, dtype="bfloat16", progress=False)
    assert tokenizer is not None
    training = functional.Training(model, adamw(1e-4), ClippedRatio())
    state = training.init(nnx.state(model))
    layout = Packed(tokens=256)
    with detjax.Engine(model, tokenizer, max_samples=8, token_budget=64, max_length=96) as engine:
        for step in range(STEPS):
            engine.update_weights(state.params)
            examples = [TASK.example(0, step * QUESTIONS + number, DIFFICULTY) for number in range(QUESTIONS)]
            groups = [[Episode(one, tokenizer.encode(one.prompt)) for _ in range(EPISODES)] for one in examples]
            episodes = [one for group in groups for one in group]
            play(engine, tokenizer, episodes, seed_of(1, step))

            rewards = np.array([[one.reward for one in group] for group in groups])
            count = sum(sum(one.is_sampled) for one in episodes)
            weights = (advantages.grpo(rewards) / count).reshape(-1).tolist()
            batch = [one.sample(weight) for one, weight in zip(episodes, weights, strict=True)]
            _, gradients, logprobs = training.loss_and_gradients(state.params, batch, microbatch=layout)

            # The trainer's logprobs of all turns are the sampler's, bit for bit, though each turn was a request.
            for sample, one, trained in zip(batch, episodes, logprobs, strict=True):
                assert sample.old_logprobs is not None
                assert trained[one.is_sampled].tobytes() == sample.old_logprobs[one.is_sampled].tobytes()
            # The tool's tokens are not trained: with any others in their place, the gradients have the same bits.
            for token in (0, 17):
                _, others, _ = training.loss_and_gradients(state.params, batch, microbatch=OtherTargets(layout, token))
                assert bits(others) == bits(gradients)
            state, norm = training.update(state, gradients)
            read = sum(len(one.is_sampled) for one in episodes) - count
            print(f"step {step}: reward {rewards.mean():.3f}, {count} tokens sampled, {read} read, norm {norm:.3f}")


if __name__ == "__main__":
    main()
