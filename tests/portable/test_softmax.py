"""Softmax in blocks: their order, the exponential, and the gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detjax.contract import LOG2_E, SOFTMAX_BLOCK
from detjax.portable import softmax

SMALL = float(np.log(0.6 * 2.0**-24))
"""The logarithm of a weight that is lost when it is added to 1, though the sum of two such weights is not."""


def row_of_blocks(*logits: float) -> jax.Array:
    """A row whose blocks have one finite element each."""
    x = np.full((1, len(logits) * SOFTMAX_BLOCK), -np.inf, np.float32)
    x[0, ::SOFTMAX_BLOCK] = logits
    return jnp.asarray(x)


@pytest.mark.parametrize(
    ("logits", "small_ones_meet_first"),
    [
        ((0.0, SMALL, SMALL), False),
        ((SMALL, SMALL, 0.0), True),
        ((0.0, *[SMALL] * 20), False),  # more blocks than a sum within a row adds from left to right
    ],
)
def test_blocks_are_added_left_to_right(logits: tuple[float, ...], small_ones_meet_first: bool) -> None:
    assert (softmax.logsumexp(row_of_blocks(*logits)).item() > 0) == small_ones_meet_first
    total = softmax.sum_of_blocks(jnp.exp(row_of_blocks(*logits))).item()
    assert (total > 1) == small_ones_meet_first


def test_the_exponential_is_a_power_of_two() -> None:
    # XLA's CPU compiler folds LOG2_E and its own factor ln(2) into 1, so only the program it is given shows the power.
    x = jnp.ones(3)
    text = jax.jit(softmax.exp_difference).lower(x, x).as_text()
    assert f"dense<{LOG2_E:.8f}>" in text
    np.testing.assert_allclose(softmax.exp_difference(x, 3 * x), np.exp(-2.0), rtol=1e-6)


def test_gradients_are_those_of_the_formulas() -> None:
    random = np.random.default_rng(0)
    x, dy = random.standard_normal((2, 3, 70))
    p = np.exp(x) / np.exp(x).sum(axis=-1, keepdims=True)
    single = [jnp.asarray(value, jnp.float32) for value in (x, p, np.log(p), dy)]
    expected = p * (dy - (p * dy).sum(axis=-1, keepdims=True))
    np.testing.assert_allclose(softmax.softmax_backward(single[1], single[3]), expected, atol=1e-6)
    expected = dy - p * dy.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(softmax.log_softmax_backward(single[2], single[3]), expected, atol=2e-6)
    total, dtotal = np.log(np.exp(x).sum(axis=-1)), dy[:, 0]
    dx = softmax.logsumexp_backward(single[0], jnp.asarray(total, jnp.float32), jnp.asarray(dtotal, jnp.float32))
    np.testing.assert_allclose(dx, p * dtotal[:, None], atol=1e-6)
