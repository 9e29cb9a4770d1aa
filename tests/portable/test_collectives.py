"""The order in which devices' terms are added, for any number of devices."""

import numpy as np
import pytest

from detjax.portable.collectives import sum_as_tree
from tests.support.bits import assert_same_bits, same_bits

ORDERS = {
    1: lambda a: a,
    2: lambda a, b: a + b,
    3: lambda a, b, c: (a + b) + c,
    5: lambda a, b, c, d, e: ((a + b) + (c + d)) + e,
    6: lambda a, b, c, d, e, f: ((a + b) + (c + d)) + (e + f),
    7: lambda a, b, c, d, e, f, g: ((a + b) + (c + d)) + ((e + f) + g),
}


@pytest.mark.parametrize("count", ORDERS)
def test_a_last_term_without_a_neighbour_passes_to_the_next_round(count: int) -> None:
    terms = list(np.random.default_rng(count).standard_normal((count, 400)).astype(np.float32))
    expected = ORDERS[count](*terms)
    assert_same_bits(sum_as_tree(terms), expected)  # pyright: ignore[reportArgumentType]
    assert count < 3 or not same_bits(ORDERS[count](*terms[::-1]), expected)
