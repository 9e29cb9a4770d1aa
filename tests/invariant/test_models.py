"""Models that know nothing of detjax: a row has the same bits in every batch, close to the original's numbers."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import detjax
from tests.invariant import models
from tests.support.bits import assert_same_bits, same_bits

pytestmark = pytest.mark.usefixtures("lenient_promotion")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("batches", [(17,), pytest.param((2, 3), marks=pytest.mark.nightly)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", models.NAMES)
def test_a_row_has_the_bits_that_it_has_alone(name: str, dtype: str, batches: tuple[int, ...]) -> None:
    case = models.load(name, jnp.dtype(dtype))
    fn = detjax.batch_invariant(case.fn, case.axes)
    alone = fn(case.weights, *case.inputs(1, 0))[0]
    for rows in batches:
        for position in (0, rows - 1):
            assert_same_bits(fn(case.weights, *case.among(rows, position))[position], alone)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["nnx transformer", "linen convolution", "scanned layers"])
def test_stock_xla_gives_it_other_bits(name: str) -> None:
    case = models.load(name)
    fn = jax.jit(case.fn)
    alone = fn(case.weights, *case.inputs(1, 0))[0]
    assert not all(same_bits(fn(case.weights, *case.among(rows, 0))[0], alone) for rows in (2, 3, 8, 17, 64))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", models.NAMES)
def test_numbers_are_close_to_the_original(name: str) -> None:
    case = models.load(name)
    fn = detjax.batch_invariant(case.fn, case.axes)
    expected = np.asarray(case.fn(case.weights, *case.inputs(3, 0)))
    actual = np.asarray(fn(case.weights, *case.inputs(3, 0)))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def _gradients(case: models.Case, fn: Any) -> Any:
    """The gradients of weights, and of the first input if it has any, by the cotangent of each row."""

    @jax.jit
    def gradients(cotangents: Array, *inputs: Array) -> Any:
        def loss(weights: Any, *floats: Array) -> Array:
            return jnp.sum(fn(weights, *(floats or inputs)).astype(jnp.float32) * cotangents)

        floats = inputs if jnp.issubdtype(inputs[0].dtype, jnp.floating) else ()
        return jax.grad(loss, argnums=(0, 1) if floats else (0,))(case.weights, *floats)

    return gradients


NAMES = ["linen convolution", *(pytest.param(x, marks=pytest.mark.nightly) for x in models.NAMES if "linen" not in x)]
ROWS = 3


@functools.cache
def _both(name: str) -> tuple[models.Case, Any, Any, tuple[int, ...]]:
    """A model with its gradients and the original's, and the shape of a row's cotangent."""
    case = models.load(name)
    shape = jax.eval_shape(case.fn, case.weights, *case.inputs(1, 0)).shape[1:]
    return case, _gradients(case, detjax.batch_invariant(case.fn, case.axes)), _gradients(case, case.fn), shape


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_close_to_the_original(name: str) -> None:
    case, gradients, original, shape = _both(name)
    inputs, cotangents = case.among(ROWS, 2), jax.random.normal(jax.random.key(1), (ROWS, *shape))
    pairs = zip(*(jax.tree.leaves(fn(cotangents, *inputs)) for fn in (gradients, original)), strict=True)
    for a, e in pairs:
        np.testing.assert_allclose(a, e, rtol=0, atol=2e-5 * max(1.0, float(jnp.abs(e).max())))


@pytest.mark.parametrize("name", NAMES)
def test_a_rows_gradient_has_the_bits_that_it_has_alone_and_weights_get_zeros_from_others(name: str) -> None:
    """All other rows have zeros as cotangents, so that they add nothing to the gradients of weights."""
    case, gradients, _, shape = _both(name)
    cotangents = jax.random.normal(jax.random.key(1), (ROWS, *shape)).at[:2].set(0)
    weights_alone, *alone = gradients(cotangents[2:], *case.inputs(1, 0))
    weights, *among = gradients(cotangents, *case.among(ROWS, 2))
    for rows, row in zip(among, alone, strict=True):
        assert_same_bits(rows[2], row[0])
        assert not jnp.any(rows[:2])
    # Zeros of either sign are one number, which sums of nothing end as.
    assert_same_bits(*(jax.tree.map(lambda x: x + 0, tree) for tree in (weights, weights_alone)))
