"""Comparison of bits on the device."""

import numpy as np

from detjax.bench.bits import same_bits


def test_one_bit_of_one_element_is_a_difference() -> None:
    a = np.ones((3, 5), np.float32)
    b = a.copy()
    b[2, 4] = np.nextafter(np.float32(1), np.float32(2))
    assert bool(same_bits((a, a), (a, a))) and not bool(same_bits((a, a), (a, b)))
    nan = np.full(2, np.nan, np.float32)
    assert bool(same_bits(nan, nan)) and not bool(same_bits(np.float32([0.0]), np.float32([-0.0])))
