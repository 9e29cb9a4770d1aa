"""Distributions: which remove tokens, and which are the model's own."""

import pytest

from detjax.operands.options import Distribution


@pytest.mark.parametrize(
    ("distribution", "filtered", "is_model"),
    [
        (Distribution(), False, True),
        (Distribution(0.7), False, False),
        (Distribution(0.0), False, False),
        (Distribution(top_k=1), True, False),
        (Distribution(top_p=0.999), True, False),
        (Distribution(min_p=1e-6), True, False),
        (Distribution(0.0, top_k=3, top_p=0.5, min_p=0.1), False, False),  # the likeliest token stays
    ],
    ids=str,
)
def test_filters_count_unless_the_likeliest_token_is_taken(
    distribution: Distribution, filtered: bool, is_model: bool
) -> None:
    assert (distribution.filtered, distribution.is_model) == (filtered, is_model)
