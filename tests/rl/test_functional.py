"""Pure functions of training: a loop of one's own reaches the weights of `detjax train`, on any number of devices."""

from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from detjax.engine import Engine, SamplingParams
from detjax.operands.options import Distribution
from detjax.rl import functional
from detjax.rl.rollouts import prompt_seeds
from detjax.rl.trainer.losses import ClippedRatio, LogLikelihood
from detjax.rl.trainer.microbatches import Packed, Rows
from tests.rl import policies
from tests.rl.training_cases import samples
from tests.support.bits import assert_same_bits, same_bits

ROOT = Path(__file__).parents[2]
BATCHES = samples(9, longest=30, seed=0), samples(9, longest=30, seed=1)


def for_policy(batch: list[Any]) -> list[Any]:
    return [type(one)(one.tokens % 25, one.weights, one.old_logprobs) for one in batch]


def training(loss: Any = LogLikelihood()) -> functional.Training:  # noqa: B008
    return functional.Training(policies.policy(), policies.ADAMW, loss)


def test_steps_are_those_of_the_trainer_whatever_the_microbatches_are() -> None:
    functions, trainer = training(), policies.trainer(Rows(4, 32))
    state = functions.init(nnx.state(policies.policy()))
    for batch, microbatch in zip(map(for_policy, BATCHES), (Packed(64), Rows(4, 32)), strict=True):
        loss, gradients, logprobs = functions.loss_and_gradients(state.params, batch, microbatch=microbatch)
        report = trainer.step(batch)
        assert [x.tobytes() for x in logprobs] == [x.tobytes() for x in report.logprobs]
        pairs = zip(batch, logprobs, strict=True)
        expected = -sum((sample.weights.astype(np.float64) * values).sum() for sample, values in pairs)
        np.testing.assert_allclose(loss, expected, rtol=1e-12)
        state, norm = functions.update(state, gradients)
        assert float(norm) == report.gradient_norm
        assert_same_bits(state.params, trainer.params)
    assert_same_bits(state.training, trainer.state)


def test_no_function_changes_what_it_is_given() -> None:
    functions, batch = training(), for_policy(BATCHES[0])
    state = functions.init(nnx.state(policies.policy()))
    _, gradients, _ = functions.loss_and_gradients(state.params, batch, microbatch=Packed(64))
    assert jax.tree.structure(gradients) == jax.tree.structure(state.params)
    shapes = [(x.shape, x.dtype) for x in jax.tree.leaves(gradients)]
    assert shapes == [(x.shape, jnp.float32) for x in jax.tree.leaves(state.params)]
    before = jax.tree.map(np.array, (state, gradients))
    first, _ = functions.update(state, gradients)
    assert_same_bits((state, gradients), before)
    assert not same_bits(first.params, state.params)
    again, _ = functions.update(state, gradients, donated=True)
    assert_same_bits(again, first)
    assert all(master.is_deleted() for master in state.training.masters)


def test_the_value_of_a_clipped_ratio_is_the_one_whose_gradient_is_computed() -> None:
    batch, loss = for_policy(BATCHES[0]), ClippedRatio(0.3, 0.5)
    functions = training(loss)
    params = nnx.state(policies.policy())
    value, _, logprobs = functions.loss_and_gradients(params, batch, microbatch=Packed(64))
    total = 0.0
    for one, values in zip(batch, logprobs, strict=True):
        for weight, old, new in zip(one.weights, one.old_logprobs, values, strict=True):
            ratio = np.exp(np.float64(new) - np.float64(old))
            total -= min(ratio * float(weight), min(max(ratio, 0.7), 1.5) * float(weight))
    np.testing.assert_allclose(value, total, rtol=1e-9)


def test_rollouts_are_functions_of_params_prompts_and_seed(engine: Engine) -> None:
    rollout = training().rollout_function(engine, max_tokens=8, samples=2)
    params, prompts = nnx.state(policies.policy()), ["1+2=", "34="]
    other = jax.tree.map(lambda x: 2 * x, params)
    first = rollout(params, prompts, 7)
    changed = rollout(other, prompts, 7), rollout(params, prompts, 8), rollout(params, ["1+2=", "35="], 7)
    again = rollout(params, prompts, 7)
    assert [len(group) for group in first.tokens] == [2, 2]
    assert all(len(one) <= 8 for group in first.tokens for one in group)
    assert_same_bits(again, first)
    assert not any(same_bits(one, first) for one in changed)
    # A prompt's completions depend on its place and on the seed, not on the other prompts.
    assert_same_bits(changed[2].tokens[0], first.tokens[0])


def test_rollouts_are_drawn_from_the_distribution_with_its_logprobs(engine: Engine) -> None:
    drawn = Distribution(0.7, top_k=5, top_p=0.9, min_p=0.01)
    functions = functional.Training(policies.policy(), policies.ADAMW, LogLikelihood(), distribution=drawn)
    asked: list[Any] = []
    with mock.patch.object(functional.rollouts, "rollouts", lambda *given, **_: asked.append(given) or []):
        functions.rollout_function(engine, max_tokens=8, samples=3)(nnx.state(policies.policy()), ["1+2=", "3="], 7)
    ((_, prompts, sampling, seeds),) = asked
    assert (prompts, seeds) == (["1+2=", "3="], prompt_seeds(7, 2))
    wanted = {"n": 3, "sampling_logprobs": True, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.01}
    assert sampling == SamplingParams(8, **wanted)


def test_seeds_of_prompts_differ() -> None:
    seeds = [*prompt_seeds(7, 50), *prompt_seeds(8, 50)]
    assert len(set(seeds)) == 100 and prompt_seeds(7, 3) == seeds[:3]


def test_gradients_of_other_shapes_or_dtypes_are_refused() -> None:
    functions, params = training(), nnx.state(policies.policy())
    state = functions.init(params)
    with pytest.raises(ValueError, match=r"the gradient of .* is bfloat16\[.*\]; accepted: float32\["):
        functions.update(state, params)
    wide = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
    leaves, structure = jax.tree.flatten(wide)
    leaves[-1] = leaves[-1][None]
    with pytest.raises(ValueError, match=r"the gradient of .* is float32\[1, .*\]; accepted: float32\["):
        functions.update(state, jax.tree.unflatten(structure, leaves))


def test_the_guide_shows_the_example() -> None:
    code = (ROOT / "examples" / "training_loop.py").read_text()
    assert code.partition("def main(")[2].partition("\n\n\nif __name__")[0] in (ROOT / "docs" / "train.md").read_text()
