"""Sigmoid scores and groups of experts: what NumPy says, rows alone and among others, ties, and refusals."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax import ops
from tests.support.bits import assert_same_bits
from tests.support.unchecked import unchecked


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


# --- sigmoid ----------------------------------------------------------------------------------------------------------


def test_a_sigmoid_and_its_gradient_are_those_of_float64() -> None:
    x, dy = 4 * drawn(37, 21), drawn(37, 21, seed=1)
    y, pullback = jax.vjp(ops.sigmoid, jnp.asarray(x))
    exact = 1 / (1 + np.exp(-x.astype(np.float64)))
    np.testing.assert_allclose(y, exact, rtol=4e-7, atol=0)
    np.testing.assert_allclose(pullback(jnp.asarray(dy))[0], dy * exact * (1 - exact), rtol=2e-5, atol=3e-7)


def test_a_sigmoid_has_its_bits_in_every_place_and_program() -> None:
    x = jnp.asarray(drawn(1000))
    expected = ops.sigmoid(x)
    for first, size in ((0, 1), (3, 17), (511, 2), (999, 1)):
        assert_same_bits(ops.sigmoid(x[first : first + size]), expected[first : first + size])
    assert_same_bits(detjax.jit(lambda x: ops.sigmoid(x * 2) + 1)(x / 2), expected + 1)
    assert_same_bits(jax.vmap(ops.sigmoid)(x.reshape(10, 100)), expected.reshape(10, 100))


def test_a_sigmoid_of_what_is_not_finite() -> None:
    x = jnp.asarray([np.inf, -np.inf, np.nan, 200.0, -200.0, 0.0], jnp.float32)
    np.testing.assert_array_equal(ops.sigmoid(x), np.float32([1, 0, np.nan, 1, 0, 0.5]))


# --- groups -----------------------------------------------------------------------------------------------------------


def reference(scores: np.ndarray, correction: np.ndarray, groups: int, kept: int) -> np.ndarray:
    """One token after another, as the paper says it."""
    ranks = scores + correction
    for row in ranks:
        by_group = row.reshape(groups, -1)
        counts = [np.sort(group)[-1] + np.sort(group)[-2] for group in by_group]
        best = sorted(range(groups), key=lambda group: (-counts[group], group))[:kept]
        by_group[[group for group in range(groups) if group not in best]] = -np.inf
    return ranks


@pytest.mark.parametrize(("experts", "groups", "kept"), [(8, 4, 2), (6, 1, 1), (32, 8, 3), (12, 3, 3), (12, 6, 1)])
def test_ranks_are_those_of_numpy(experts: int, groups: int, kept: int) -> None:
    scores, correction = 1 / (1 + np.exp(-drawn(50, experts))), drawn(experts, seed=1) / 4
    ranks = ops.group_limited_ranks(jnp.asarray(scores), jnp.asarray(correction), groups=groups, kept=kept)
    assert_same_bits(ranks, reference(scores, correction, groups, kept))
    assert (np.isfinite(np.asarray(ranks)).sum(axis=1) == experts // groups * kept).all()


def test_of_equal_groups_the_lower_ones_are_kept() -> None:
    zeros = jnp.zeros((1, 8), jnp.float32)
    ranks = ops.group_limited_ranks(zeros, zeros[0], groups=4, kept=2)
    assert_same_bits(ranks[0], np.float32([0, 0, 0, 0, *[-np.inf] * 4]))


def test_a_group_counts_by_its_two_best_experts() -> None:
    # The first group has the best expert, the second the best sum of all, the third the best sum of two.
    scores = jnp.asarray([[0.9, 0.0, 0.0, 0.5, 0.5, 0.5, 0.6, 0.6, 0.0]], jnp.float32)
    ranks = ops.group_limited_ranks(scores, jnp.zeros(9, jnp.float32), groups=3, kept=1)
    assert np.isfinite(np.asarray(ranks))[0].tolist() == [False] * 6 + [True] * 3


def test_a_row_has_its_ranks_alone_and_among_others_and_no_gradient() -> None:
    scores, correction = jnp.asarray(drawn(70, 16)), jnp.asarray(drawn(16, seed=1))

    def ranks(scores: jax.Array, correction: jax.Array) -> jax.Array:
        return ops.group_limited_ranks(scores, correction, groups=4, kept=2)

    expected = ranks(scores, correction)
    for row in (0, 33, 69):
        assert_same_bits(ranks(scores[row : row + 1], correction), expected[row : row + 1])

    def loss(scores: jax.Array, correction: jax.Array) -> jax.Array:
        chosen = ops.choose_experts(scores, 3, ranks=ranks(scores, correction), normalized=True, eps=1e-20)[1]
        return jnp.sum(chosen * jnp.arange(3, dtype=jnp.float32)[None])

    dscores, dcorrection = detjax.jit(jax.grad(loss, argnums=(0, 1)))(scores, correction)
    assert_same_bits(dcorrection, jnp.zeros(16))
    ids, _ = ops.choose_experts(scores, 3, ranks=expected)
    assert all(set(np.flatnonzero(row)) <= set(chosen) for row, chosen in zip(dscores, ids.tolist(), strict=True))
    assert (np.asarray(dscores) != 0).any()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"groups": 3}, ValueError, "groups is 3; accepted: divisors of 8 that leave 2 experts each"),
        ({"groups": 8}, ValueError, "groups is 8; accepted: divisors of 8"),
        ({"groups": 0}, ValueError, "groups is 0; accepted: divisors of 8"),
        ({"kept": 5}, ValueError, "kept is 5; accepted: 1 to 4"),
        ({"kept": 0}, ValueError, "kept is 0; accepted: 1 to 4"),
        ({"correction": jnp.zeros(7)}, ValueError, r"correction has shape \(7,\); accepted: \(8,\)"),
        ({"correction": jnp.zeros(8, jnp.bfloat16)}, TypeError, "correction has dtype bfloat16; accepted: float32"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    given = {"scores": jnp.zeros((2, 8)), "correction": jnp.zeros(8), "groups": 4, "kept": 2} | changes
    with pytest.raises(error, match=f"group_limited_ranks: {message}"):
        unchecked(ops.group_limited_ranks)(**given)
