"""The suite's comparison of bits notices every difference."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.bits import assert_same_bits, same_bits


def test_the_first_difference_is_reported() -> None:
    a = np.zeros((3, 4), np.float32)
    b = a.copy()
    b[1, 2], b[2, 0] = 1e-45, 2.0
    with pytest.raises(
        AssertionError, match=r"the array: 2 of 12 elements differ, first at \(1, 2\): .*0\.0.* is not .*1e-45"
    ):
        assert_same_bits(a, b)


def test_the_leaf_that_differs_is_named() -> None:
    with pytest.raises(AssertionError, match=r"\['y'\]\[1\]: 1 of 2 elements differ, first at \(0,\)"):
        assert_same_bits(
            {"x": jnp.ones(3), "y": [1, jnp.ones(2)]}, {"x": jnp.ones(3), "y": [1, jnp.asarray([2.0, 1.0])]}
        )


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (np.float32([0.0]), np.float32([-0.0])),
        (np.float32([1.0]), np.float64([1.0])),
        (np.float32([1.0]), np.float32([[1.0]])),
        (jnp.ones(2, jnp.bfloat16), jnp.asarray([1, 1.0078125], jnp.bfloat16)),
        (np.uint32([0x7FC00000]).view(np.float32), np.uint32([0x7FC00001]).view(np.float32)),
        (np.asarray([True]), np.asarray([False])),
        ([np.ones(1)], [np.ones(1), np.ones(1)]),
        ({"a": np.ones(1)}, {"b": np.ones(1)}),
    ],
    ids=["sign of zero", "dtype", "shape", "bfloat16", "two NaNs", "booleans", "number of leaves", "names of leaves"],
)
def test_whatever_is_not_equal_in_every_bit_differs(a: object, b: object) -> None:
    assert not same_bits(a, b)
    assert same_bits(a, a)
    assert same_bits(b, b)
