"""The order of additions in portable matrix products."""

import jax.numpy as jnp
import numpy as np
import pytest

from detjax import ops


@pytest.mark.parametrize(
    ("places", "expected"), [((1, 2, 3), 1.0), ((3, 2, 1), 0.0), ((0, 200, 299), 1.0), ((299, 99, 0), 0.0)]
)
@pytest.mark.parametrize("layout", ["kn", "nk"])
def test_products_are_added_with_k_ascending(places: tuple[int, int, int], expected: float, layout: str) -> None:
    x = np.zeros((3, 300), np.float32)
    x[:, places] = 1e8, -1e8, 1.0
    # Of weights with few columns, a CPU adds four elements of K in one step; the contract leaves such a step open.
    w = jnp.ones((300, 64) if layout == "kn" else (64, 300))
    # The 1 is lost where it is added to a sum of 1e8, and kept where it is added to 0.
    np.testing.assert_array_equal(ops.matmul(jnp.asarray(x), w, layout=layout), np.full((3, 64), expected, np.float32))
