"""Losses: derivatives at the borders of clipping, and values that are summed exactly."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detjax.rl.trainer.losses import ClippedRatio, LogLikelihood
from detjax.rl.trainer.microbatches import Microbatch, Sample

LOG2 = np.float32(math.log(2))


def derivatives(loss: Any, *rows: tuple[float, float, float]) -> list[float]:
    """The derivatives for rows of a logprob, an old logprob and a weight."""
    logprobs, old, weights = np.array(rows, np.float32).T
    zeros = np.zeros(len(rows), np.int32)
    queries: Any = None
    microbatch = Microbatch(zeros, zeros, jnp.asarray(weights), jnp.asarray(old), queries)
    return np.asarray(jax.jit(lambda x: loss(x, microbatch))(jnp.asarray(logprobs))).tolist()


def test_the_derivative_of_a_likelihood_is_the_negated_weight() -> None:
    assert derivatives(LogLikelihood(), (-3, 0, 0.5), (-1, -9, -2), (-1, 0, 0)) == [-0.5, 2, 0]


def test_ratios_are_clipped_above_for_positive_weights_and_below_for_negative_ones() -> None:
    loss = ClippedRatio(low=0.5, high=1.0)
    # Ratios of 2 and of 1/2, the borders, and beyond.
    assert derivatives(loss, (-1, -1, 3), (-1, -1, -3)) == [-3, 3]
    inside = derivatives(loss, (-1, -1 - LOG2 * 0.99, 1), (-1 - LOG2 * 0.99, -1, -1))
    assert inside[0] == pytest.approx(-(2**0.99), rel=1e-5) and inside[1] == pytest.approx(0.5**0.99, rel=1e-5)
    assert derivatives(loss, (-1, -1 - LOG2 * 1.01, 1), (-1 - LOG2 * 1.01, -1, -1)) == [0, 0]
    # On the other side a weight is not clipped, however far the ratio is.
    far = derivatives(loss, (-5, -1, 2), (-1, -5, -2))
    np.testing.assert_allclose(far, [-2 * math.exp(-4), 2 * math.exp(4)], rtol=1e-5)


def test_a_ratio_on_the_border_is_not_clipped() -> None:
    # exp(0) is exactly 1, and so is the border without a range.
    assert derivatives(ClippedRatio(0.0, 0.0), (-1, -1, 3), (-1, -1, -3)) == [-3, 3]


def test_a_weight_of_zero_has_no_gradient_whatever_the_ratio_is() -> None:
    rows = (0, -200, 0), (-200, 0, 0), (-1, -1, 0), (-math.inf, -1, 0)
    assert derivatives(ClippedRatio(), *rows) == [0, 0, 0, 0]


def test_the_range_is_a_fifth_by_default() -> None:
    assert ClippedRatio() == ClippedRatio(low=0.2, high=0.2)
    log = math.log
    rows = (log(1.19), 0, 1), (log(1.21), 0, 1), (log(0.81), 0, -1), (log(0.79), 0, -1)
    assert [value != 0 for value in derivatives(ClippedRatio(), *rows)] == [True, False, True, False]


def samples(*parts: tuple[list[float], list[float]]) -> list[Sample]:
    arrays = [(np.array(weights, np.float32), np.array(old, np.float32)) for weights, old in parts]
    return [Sample(np.zeros(1 + len(weights), np.int32), weights, old) for weights, old in arrays]


def test_values_are_sums_over_all_tokens_rounded_once() -> None:
    big = 2.0**53
    batch = samples(([big, 1.0], [0, 0]), ([-big], [0]))
    logprobs = [np.array([-1, -1], np.float32), np.array([-1], np.float32)]
    assert LogLikelihood().value(batch, logprobs) == 1.0
    assert ClippedRatio().value(batch, [np.zeros(2, np.float32), np.zeros(1, np.float32)]) == -1.0


@pytest.mark.parametrize(
    ("weight", "ratio", "value"),
    [(3, 0.25, -0.75), (3, 2, -6), (3, 3, -6), (-3, 0.25, 1.5), (-3, 0.5, 1.5), (-3, 4, 12)],
)
def test_the_value_of_a_clipped_ratio_is_the_lesser_surrogate(weight: float, ratio: float, value: float) -> None:
    batch = samples(([weight], [-2.0]))
    given = ClippedRatio(low=0.5, high=1.0).value(batch, [np.array([-2 + math.log(ratio)], np.float32)])
    assert given == pytest.approx(value, rel=1e-6)
