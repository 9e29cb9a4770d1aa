"""The comparison of bits that all tests use."""

from typing import Any

import jax
import numpy as np


def assert_same_bits(actual: Any, expected: Any) -> None:
    """Asserts that two pytrees of arrays have the same shapes, dtypes and bytes, or says where they first differ."""
    actual_leaves, expected_leaves = jax.tree.leaves_with_path(actual), jax.tree.leaves_with_path(expected)
    assert [path for path, _ in actual_leaves] == [path for path, _ in expected_leaves]
    for (path, a), (_, e) in zip(actual_leaves, expected_leaves, strict=True):
        a, e = np.asarray(a), np.asarray(e)
        name = jax.tree_util.keystr(path) or "the array"
        assert (a.shape, a.dtype) == (e.shape, e.dtype), f"{name}: {a.dtype}{a.shape} is not {e.dtype}{e.shape}"
        differs = _bits(a) != _bits(e)
        if differs.any():
            first = tuple(int(i) for i in np.argwhere(differs)[0])
            count = f"{differs.sum()} of {differs.size} elements differ"
            raise AssertionError(f"{name}: {count}, first at {first}: {a[first]!r} is not {e[first]!r}")


def same_bits(a: Any, b: Any) -> bool:
    """Returns whether `assert_same_bits` would pass. Negative controls, which must differ, use it."""
    try:
        assert_same_bits(a, b)
    except AssertionError:
        return False
    return True


def _bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}") if x.dtype != bool else x
