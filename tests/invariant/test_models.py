"""Models that know nothing of detjax: a row has the same bits in every batch, close to the original's numbers."""

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
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", models.NAMES)
def test_a_row_has_the_bits_that_it_has_alone(name: str, dtype: str) -> None:
    case = models.load(name, jnp.dtype(dtype))
    fn = detjax.batch_invariant(case.fn, case.axes)
    alone = fn(case.weights, *case.inputs(1, 0))[0]
    for rows in (2, 17):
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
        return jax.grad(loss, argnums=(0, 1) if floats else 0)(case.weights, *floats)

    return gradients


@pytest.mark.sampled(0)
@pytest.mark.parametrize("name", models.NAMES)
def test_gradients_are_close_to_the_original(name: str) -> None:
    case = models.load(name)
    inputs = case.inputs(3, 0)
    shape = jax.eval_shape(case.fn, case.weights, *inputs).shape
    cotangents = jax.random.normal(jax.random.key(1), shape)
    actual = _gradients(case, detjax.batch_invariant(case.fn, case.axes))(cotangents, *inputs)
    expected = _gradients(case, case.fn)(cotangents, *inputs)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=0, atol=2e-5 * max(1.0, float(jnp.abs(e).max())))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["linen convolution", "scanned layers", "mixture"])
def test_a_rows_gradient_has_the_bits_that_it_has_alone(name: str) -> None:
    case = models.load(name)
    gradients = _gradients(case, detjax.batch_invariant(case.fn, case.axes))
    shape = jax.eval_shape(case.fn, case.weights, *case.inputs(1, 0)).shape[1:]
    cotangents = jax.random.normal(jax.random.key(1), (3, *shape))
    _, alone = gradients(cotangents[2:], *case.inputs(1, 0))
    _, among = gradients(cotangents, *case.among(3, 2))
    assert_same_bits(among[2], alone[0])


@pytest.mark.sampled(0)
def test_rows_without_a_gradient_add_nothing_to_those_of_weights() -> None:
    case = models.load("nnx transformer")
    gradients = _gradients(case, detjax.batch_invariant(case.fn, case.axes))
    inputs = case.among(4, 0)
    cotangents = jax.random.normal(jax.random.key(1), (4, models.LENGTH, models.VOCABULARY)).at[2:].set(0)
    assert_same_bits(gradients(cotangents, *inputs), gradients(cotangents[:2], *(x[:2] for x in inputs)))
