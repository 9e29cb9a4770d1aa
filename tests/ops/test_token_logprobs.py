"""Logprobs of tokens under the distribution that they were drawn from: bits of single steps, and their gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax import ops
from detjax.operands.accumulated_weight import AccumulatedWeight
from detjax.operands.options import Distribution
from tests.ops.test_sampling import kept
from tests.support.bits import assert_same_bits

TOKENS, D, VOCABULARY = 21, 12, 37
DISTRIBUTIONS = {
    "temperature": Distribution(0.7),
    "top-k": Distribution(0.7, top_k=5),
    "top-p and min-p": Distribution(1.0, top_p=0.9, min_p=0.03),
}


def drawn() -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Hidden states, a head, tokens (every third is the least likely one), and factors of logprobs."""
    random = np.random.default_rng(0)
    hidden, head = (random.standard_normal(shape).astype(np.float32) for shape in ((TOKENS, D), (VOCABULARY, D)))
    logits = hidden @ head.T
    tokens = np.where(np.arange(TOKENS) % 3, logits.argmax(axis=1), logits.argmin(axis=1)).astype(np.int32)
    tokens[1] = np.argsort(logits[1])[-2]
    factors = random.standard_normal(TOKENS).astype(np.float32)
    return tuple(map(jnp.asarray, (hidden, head, tokens, factors)))  # pyright: ignore[reportReturnType]


def derivative(logprobs: Any, factors: Any) -> Any:
    return factors * jnp.maximum(logprobs, -9.0)


def in_one_pass_and_by_vjp(distribution: Distribution, **others: Any) -> tuple[Any, Any]:
    """Logprobs, gradients of hidden states, and the next sum of the head, of a loss with `derivative`."""
    hidden, head, tokens, factors = drawn()
    options: dict[str, Any] = {"distribution": distribution, "chunk": 16, **others}

    def both(hidden: jax.Array, head: jax.Array, factors: jax.Array, total: jax.Array) -> tuple[Any, Any]:
        def logprobs(hidden: jax.Array, total: jax.Array) -> jax.Array:
            return ops.token_logprobs(hidden, AccumulatedWeight(head, total), tokens, **options)

        y, pullback = jax.vjp(logprobs, hidden, total)
        weight = AccumulatedWeight(head, total)
        one_pass = ops.token_logprobs_and_gradients(hidden, weight, tokens, derivative, factors, **options)
        return one_pass, (y, *pullback(derivative(y, factors)))

    return detjax.jit(both)(hidden, head, factors, jnp.full_like(head, 3))


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_they_are_those_of_sampling_and_their_gradients_those_of_float64(name: str) -> None:
    """A token that the filters exclude has no gradient, and none flows to excluded tokens."""
    distribution = DISTRIBUTIONS[name]
    hidden, head, tokens, factors = drawn()
    one_pass, (logprobs, dhidden, dhead) = in_one_pass_and_by_vjp(distribution)
    logits = ops.matmul(hidden, head, layout="nk", out_dtype=jnp.float32)
    arrays = ops.SamplingArrays.uniform(TOKENS, distribution)
    assert_same_bits(logprobs, ops.sampling_logprobs(logits, tokens, arrays, filtered=distribution.filtered))

    temperature, *filters = (getattr(distribution, field) for field in ("temperature", "top_k", "top_p", "min_p"))
    left = np.stack([kept(row, temperature, *filters) for row in np.asarray(logits)])
    p = np.where(left, np.exp(np.asarray(logits, np.float64) / temperature), 0)
    p /= p.sum(axis=1, keepdims=True)
    is_token = np.arange(VOCABULARY) == np.asarray(tokens)[:, None]
    is_possible = left[is_token]
    assert np.isfinite(np.asarray(logprobs)).tolist() == is_possible.tolist()
    assert is_possible.any() and (is_possible.all() == (not distribution.filtered))
    dlogits = (is_token - p) * (np.asarray(derivative(logprobs, factors)) * is_possible / temperature)[:, None]
    np.testing.assert_allclose(dhidden, dlogits @ np.asarray(head, np.float64), atol=1e-4)
    np.testing.assert_allclose(np.asarray(dhead) - 3, dlogits.T @ np.asarray(hidden, np.float64), atol=1e-4)
    assert not np.asarray(dhidden)[~is_possible].any()
    assert_same_bits(one_pass, (logprobs, dhidden, dhead))


def test_a_factor_multiplies_the_logits_and_their_gradients() -> None:
    hidden, head, tokens, factors = drawn()
    one_pass, (logprobs, dhidden, dhead) = in_one_pass_and_by_vjp(Distribution(), logit_factor=0.3)
    logits = ops.scale(ops.matmul(hidden, head, layout="nk", out_dtype=jnp.float32), 0.3)
    assert_same_bits(logprobs, jnp.take_along_axis(ops.log_softmax(logits), tokens[:, None], axis=1)[:, 0])
    p = np.exp(0.3 * (np.asarray(hidden, np.float64) @ np.asarray(head, np.float64).T))
    p /= p.sum(axis=1, keepdims=True)
    is_token = np.arange(VOCABULARY) == np.asarray(tokens)[:, None]
    dlogits = 0.3 * (is_token - p) * np.asarray(derivative(logprobs, factors))[:, None]
    np.testing.assert_allclose(dhidden, dlogits @ np.asarray(head, np.float64), atol=1e-4)
    np.testing.assert_allclose(np.asarray(dhead) - 3, dlogits.T @ np.asarray(hidden, np.float64), atol=1e-4)
    assert_same_bits(one_pass, (logprobs, dhidden, dhead))


def test_at_temperature_0_they_are_constants() -> None:
    hidden, head, tokens, factors = drawn()

    def logprobs(hidden: jax.Array, head: jax.Array) -> jax.Array:
        return ops.token_logprobs(hidden, head, tokens, distribution=Distribution(0.0))

    y, pullback = jax.vjp(logprobs, hidden, head)
    greedy = np.asarray(hidden @ head.T).argmax(axis=1) == np.asarray(tokens)
    assert_same_bits(y, np.where(greedy, 0.0, -np.inf).astype(np.float32))
    assert 0 < greedy.sum() < TOKENS
    assert_same_bits(pullback(factors), (jnp.zeros_like(hidden), jnp.zeros_like(head)))


@pytest.mark.parametrize("fused", [True, False])
def test_a_head_that_is_not_trained_has_no_sum_and_changes_no_other_bit(fused: bool) -> None:
    hidden, head, tokens, factors = drawn()

    @detjax.jit
    def both(hidden: jax.Array, head: jax.Array, factors: jax.Array) -> Any:
        heads = head, AccumulatedWeight(head, jnp.zeros_like(head))
        return [ops.token_logprobs_and_gradients(hidden, one, tokens, derivative, factors, chunk=16) for one in heads]

    with detjax.without_fusions(*([] if fused else ["token_logprobs"])):
        (*plain, none), (*trained, total) = both(hidden, head, factors)
    assert none is None and np.any(total)
    assert_same_bits(plain, trained)


def test_rows_of_another_number_are_refused() -> None:
    hidden, head, tokens, factors = drawn()
    name = "token_logprobs_and_gradients"
    with pytest.raises(ValueError, match=rf"{name}: rows\[0\] has shape \(20,\); accepted: \(21,\), tokens being"):
        ops.token_logprobs_and_gradients(hidden, head, tokens, lambda logprobs, rows: rows, factors[1:])
