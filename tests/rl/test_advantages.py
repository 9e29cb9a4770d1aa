"""Advantages follow their papers' formulas, and neither order nor rounding of equal rewards shows in them."""

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from detjax.rl.policy_gradients.advantages import grpo, normalization, reinforce, rloo
from tests.support.bits import assert_same_bits
from tests.support.unchecked import unchecked

REWARDS = np.random.default_rng(0).normal(size=(7, 5))

every_function = pytest.mark.parametrize(
    "function",
    [grpo, rloo, reinforce, lambda r: reinforce(r, "mean"), lambda r: reinforce(r, "group")],
    ids=["grpo", "rloo", "none", "mean", "group"],
)
type Advantages = Callable[[np.ndarray], np.ndarray]


def exact(rewards: np.ndarray) -> list[list[Fraction]]:
    return [[Fraction(reward) for reward in group] for group in rewards.tolist()]


def test_grpo_centres_and_scales_the_rewards_of_a_prompt() -> None:
    expected = []
    for group in exact(REWARDS):
        mean = sum(group) / len(group)
        deviation = math.sqrt(sum((reward - mean) ** 2 for reward in group) / len(group))
        expected.append([float(reward - mean) / (deviation + 0.25) for reward in group])
    np.testing.assert_allclose(grpo(REWARDS, 0.25), expected, rtol=1e-14)
    scaled = grpo(np.array([[1.0, 0.0, 0.0, 1.0]]))
    np.testing.assert_allclose(scaled, [[1, -1, -1, 1]], rtol=3e-6)
    assert scaled[0, 0] < 1


def test_rloo_subtracts_the_mean_of_the_other_samples() -> None:
    expected = [[float(r - (sum(group) - r) / (len(group) - 1)) for r in group] for group in exact(REWARDS)]
    np.testing.assert_allclose(rloo(REWARDS), expected, rtol=1e-13)
    assert rloo(np.array([[1.0, 0.0, 0.0]])).tolist() == [[1.0, -0.5, -0.5]]


def test_reinforce_subtracts_its_baseline() -> None:
    rewards = np.array([[1.0, 0.0], [1.0, 1.0]])
    assert reinforce(rewards).tolist() == rewards.tolist()
    assert reinforce(rewards, "mean").tolist() == [[0.25, -0.75], [0.25, 0.25]]
    assert reinforce(rewards, "group").tolist() == [[0.5, -0.5], [0.0, 0.0]]
    assert reinforce(np.array([[2.0]])).tolist() == [[2.0]]
    assert reinforce(np.array([[2.0], [3.0]]), "mean").tolist() == [[-0.5], [0.5]]


@every_function
def test_advantages_do_not_change_the_rewards(function: Advantages) -> None:
    rewards = REWARDS.copy()
    advantages = function(rewards)
    advantages += 1
    assert_same_bits(rewards, REWARDS)


@every_function
def test_the_order_of_samples_and_prompts_does_not_change_a_bit(function: Advantages) -> None:
    # Magnitudes that differ, so that sums in another order would be rounded otherwise.
    rewards = REWARDS * 10.0 ** np.random.default_rng(1).integers(-8, 8, REWARDS.shape)
    expected = function(rewards)
    for seed in range(20):
        order = np.random.default_rng(seed)
        samples, prompts = order.permutation(rewards.shape[1]), order.permutation(rewards.shape[0])
        assert_same_bits(function(np.asfortranarray(rewards[prompts][:, samples])), expected[prompts][:, samples])


@pytest.mark.parametrize("function", [grpo, rloo, lambda r: reinforce(r, "mean"), lambda r: reinforce(r, "group")])
def test_equal_rewards_have_no_advantage_whatever_their_number(function: Advantages) -> None:
    for samples in range(2, 60):
        for reward in (0.1, 0.7, 1 / 3, -1e-300, 1e100):
            advantages = function(np.full((1, samples), reward))
            assert not advantages.any(), (samples, reward)


@pytest.mark.parametrize("function", [grpo, rloo, lambda r: reinforce(r, "group")])
def test_advantages_of_a_prompt_do_not_depend_on_other_prompts(function: Advantages) -> None:
    expected = function(REWARDS)
    for prompt in range(len(REWARDS)):
        assert_same_bits(function(REWARDS[prompt : prompt + 1]), expected[prompt : prompt + 1])


@pytest.mark.parametrize(
    ("function", "rewards"),
    [
        (grpo, np.zeros((3, 1))),
        (rloo, np.zeros((3, 1))),
        (reinforce, np.zeros((0, 4))),
        (grpo, np.zeros((4, 0))),
        (grpo, np.zeros(4)),
        (rloo, np.zeros((2, 2), np.float32)),
        (reinforce, np.zeros((2, 2), np.int64)),
        (lambda rewards: unchecked(reinforce)(rewards, "group"), np.zeros((3, 1))),
    ],
)
def test_rewards_of_other_shapes_and_dtypes_are_refused(function: Advantages, rewards: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"rewards is \w+\[.*\]; accepted: float64\[P, G\] with at least 1 prompt and"):
        unchecked(function)(rewards)


@every_function
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rewards_that_are_not_finite_are_refused_with_their_place(function: Advantages, bad: float) -> None:
    rewards = REWARDS.copy()
    rewards[3, 2] = bad
    with pytest.raises(ValueError, match=rf"the reward at \[3, 2\] is {bad}; accepted: finite"):
        function(rewards)


def test_an_epsilon_or_a_baseline_that_there_is_not_is_refused() -> None:
    for epsilon in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="grpo: epsilon is"):
            grpo(REWARDS, epsilon)
    with pytest.raises(ValueError, match="reinforce: baseline is 'median'; accepted: 'none', 'mean', 'group'"):
        unchecked(reinforce)(REWARDS, "median")


def test_tokens_weigh_by_the_batch_by_their_sequence_or_by_a_constant() -> None:
    lengths = [3, 0, 1]
    token, sequence, constant = (
        normalization(lengths, "token"),
        normalization(lengths, "sequence"),
        normalization(lengths, "constant", 8),
    )
    assert [weights.tolist() for weights in token] == [[0.25] * 3, [], [0.25]]
    assert [weights.tolist() for weights in sequence] == [[1 / 9] * 3, [], [1 / 3]]
    assert [weights.tolist() for weights in constant] == [[1 / 24] * 3, [], [1 / 24]]
    assert {weights.dtype for weights in token + sequence + constant} == {np.dtype(np.float64)}
    assert [weights.tolist() for weights in normalization(lengths)] == [weights.tolist() for weights in token]


def test_batches_without_tokens_have_weights_without_elements() -> None:
    assert normalization([], "token") == []
    for weights in (normalization([0, 0], "token"), normalization([0, 0], "sequence")):
        assert [array.shape for array in weights] == [(0,), (0,)]


def test_normalizations_that_there_are_not_are_refused() -> None:
    with pytest.raises(ValueError, match="a length is -1; accepted: at least 0"):
        normalization([2, -1])
    with pytest.raises(ValueError, match="constant is None with kind 'constant'"):
        normalization([2], "constant")
    with pytest.raises(ValueError, match="constant is 3 with kind 'token'"):
        normalization([2], "token", 3)
    with pytest.raises(ValueError, match="constant is 0; accepted: at least 1"):
        normalization([2], "constant", 0)
    with pytest.raises(ValueError, match="kind is 'prompt'; accepted: 'token', 'sequence', 'constant'"):
        unchecked(normalization)([2], "prompt")
