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
