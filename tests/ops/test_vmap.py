"""Operations under `jax.vmap` give each example the bits that it has alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detjax import ops
from tests.support.bits import assert_same_bits

RANDOM = np.random.default_rng(0)
X, WEIGHTS = (jnp.asarray(RANDOM.standard_normal(shape), jnp.float32) for shape in ((3, 4, 8), (3, 8)))


def norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    return ops.rms_norm(x, weight, eps=1e-6)


@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0)], ids=["both", "rows", "weights"])
def test_a_norms_rows_and_weights_may_be_batched(axes: tuple[int | None, int | None]) -> None:
    operands = [value if axis == 0 else value[0] for value, axis in zip((X, WEIGHTS), axes, strict=True)]
    batched = jax.vmap(norm, in_axes=axes)(*operands)
    for example in range(3):
        x, weight = (value[example] if axis == 0 else value for value, axis in zip(operands, axes, strict=True))
        assert_same_bits(batched[example], norm(x, weight))


def test_rows_that_are_not_batched_serve_every_example() -> None:
    residual = X[0] * 2

    def norm_of_sum(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return ops.rms_norm(x, WEIGHTS[0], eps=1e-6, residual=residual)

    batched = jax.vmap(norm_of_sum)(X)
    for example in range(3):
        assert_same_bits(jax.tree.map(lambda y, i=example: y[i], batched), norm_of_sum(X[example]))
