"""The filters and the noise of the portable sampler."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from detjax.operands.sampling_arrays import SamplingArrays
from detjax.portable import sampling


def kept(logits: list[float], *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> list[int]:
    """The token ids of one row that pass the filters."""
    filters = jnp.asarray([top_k], jnp.int32), jnp.asarray([top_p], jnp.float32), jnp.asarray([min_p], jnp.float32)
    ids = jnp.zeros(1, jnp.int32)
    arrays = SamplingArrays(jnp.zeros((1, 4), jnp.uint32), ids, jnp.ones(1), *filters)
    masked = sampling.masked(jnp.asarray([logits], jnp.float32), arrays)
    return np.flatnonzero(np.isfinite(masked[0])).tolist()


EQUAL = [0.0] * 4
"""Logits of four tokens whose probabilities are exactly a quarter."""


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("filters", "ids"),
    [
        ({}, [0, 1, 2, 3]),
        ({"top_k": 1}, [0]),
        ({"top_k": 3}, [0, 1, 2]),
        ({"top_k": 9}, [0, 1, 2, 3]),
        ({"top_p": 0.0}, [0]),
        ({"top_p": 0.25}, [0]),
        ({"top_p": 0.5}, [0, 1]),  # These two reach the sum exactly, so a third one is not needed.
        ({"top_p": 0.51}, [0, 1, 2]),
        ({"top_k": 2, "top_p": 0.5}, [0]),  # Top-p sees the probabilities of the two that top-k keeps.
        ({"min_p": 1.0}, [0, 1, 2, 3]),
    ],
)
def test_filters_keep_the_lowest_ids_of_equal_tokens(filters: dict[str, Any], ids: list[int]) -> None:
    assert kept(EQUAL, **filters) == ids


def test_min_p_is_a_share_of_the_largest_probability() -> None:
    logits = [0.0, 3.0, 2.0, 1.0]
    assert kept(logits, min_p=0.3) == [1, 2]
    assert kept(logits, top_k=3, min_p=0.1) == [1, 2, 3]


def test_likeliest_tokens_come_with_ties_by_the_lowest_id() -> None:
    tokens, logprobs = sampling.likeliest(jnp.asarray([[-2.0, -1.0, -1.0, -3.0]]), count=3)
    assert tokens.tolist() == [[1, 2, 0]]
    assert logprobs.tolist() == [[-1.0, -1.0, -2.0]]
