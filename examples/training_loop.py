"""A custom training loop: GRPO on verifiable tasks by pure functions, with the bits of `detjax train`.

    python examples/training_loop.py CHECKPOINT OUT

`detjax train OUT --kind reinforcement --model CHECKPOINT --task addition:2 --task brackets:5 --prompts 8 --samples 4
--max-tokens 16 --steps 3` ends with the same weights, byte for byte, on any number of devices.
"""

import sys
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from detjax import models
from detjax.engine import Engine
from detjax.rl import functional
from detjax.rl.policy_gradients import advantages
from detjax.rl.rollouts import seed_of
from detjax.rl.tasks import TASKS
from detjax.rl.trainer.losses import LogLikelihood
from detjax.rl.trainer.microbatches import Packed, Sample
from detjax.rl.trainer.optimizers import adamw

STEPS, PROMPTS, SAMPLES = 3, 8, 4
DIFFICULTIES = (("addition", 2), ("brackets", 5))


def main(checkpoint: Path, out: Path) -> None:
    """Trains a checkpoint and writes it to another folder."""
    model, tokenizer = models.load(checkpoint, dtype="bfloat16", progress=False)
    assert tokenizer is not None
    training = functional.Training(model, adamw(1e-3), LogLikelihood())
    mesh = jax.make_mesh((jax.device_count(),), ("anything",))
    with Engine(model, tokenizer, max_samples=16, max_length=64) as engine:
        rollout = training.rollout_function(engine, max_tokens=16, samples=SAMPLES)
        state = training.init(nnx.state(model))
        for step in range(STEPS):
            # The prompts of a step, each with its task.
            chosen = [(number, *DIFFICULTIES[number % 2]) for number in range(step * PROMPTS, (step + 1) * PROMPTS)]
            examples = [(TASKS[name], TASKS[name].example(0, number, level)) for number, name, level in chosen]
            prompts = [example.prompt for _, example in examples]

            tokens, logprobs = rollout(state.params, prompts, seed_of(0, step))
            answers = [[tokenizer.decode(completion.tolist()) for completion in group] for group in tokens]
            pairs = zip(examples, answers, strict=True)
            rewards = np.array([[task.reward(example, text) for text in group] for (task, example), group in pairs])
            weights = advantages.grpo(rewards) / sum(len(one) for group in tokens for one in group)

            batch = []
            for prompt, completions, old, row in zip(prompts, tokens, logprobs, weights, strict=True):
                for completion, old_logprobs, weight in zip(completions, old, row, strict=True):
                    ids = np.array([*tokenizer.encode(prompt), *completion], np.int32)
                    batch.append(Sample(ids, np.full(len(completion), weight, np.float32), old_logprobs))
            _, gradients, trained = training.loss_and_gradients(
                state.params, batch, microbatch=Packed(tokens=256), mesh=mesh
            )
            # Sampler and trainer computed the same bits, so no correction is needed.
            sampled = [one for group in logprobs for one in group]
            assert all(a.tobytes() == b.tobytes() for a, b in zip(trained, sampled, strict=True))
            state, norm = training.update(state, gradients)
            print(f"step {step}: reward {rewards.mean():.3f}, norm of the gradients {norm:.3f}")
    models.save(training.network.with_weights(training.network.weights(state.params)), out, tokenizer=tokenizer)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
