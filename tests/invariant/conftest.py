"""Fixtures of the tests of `batch_invariant`."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture
def lenient_promotion() -> Iterator[None]:
    """JAX's own settings, under which other people's models are written."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield
