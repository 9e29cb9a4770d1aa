"""Gumbel noise and the comparison of candidates, for the sampling kernels of all chips."""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from jax import Array

from detjax.operands import noise

NO_ID: Final = np.int32(np.iinfo(np.int32).max)
"""A number above all token ids."""


def beats(value: Array, best: Array) -> Array:
    """Returns True where a later value replaces the best so far. A NaN counts as the largest value, as in argmax."""
    return (value > best) | ((value != value) & (best == best))


def lane_noise(
    groups: Array,
    row: Sequence[Array],
    position: Array,
    multiply_high: Callable[[Array, np.uint32], Array] = noise.multiply_high,
) -> list[Array]:
    """Returns the noise of the tokens of lanes: `NOISE_WORDS` consecutive tokens of each lane, in ascending order.

    Args:
        groups: the first words of the lanes' counters, uint32; see `operands.noise.group`.
        row: the four words of the row's key, see `operands.noise.noise_key`. The third one has the shape of `groups`.
        position: the position of the row's token, uint32.
        multiply_high: returns the upper 32 bits of a word's product with a constant.
    """
    first, second, third, fourth = row
    words = noise.philox((groups, position, third, fourth), (first, second), multiply_high)
    return [noise.gumbel(bits) for bits in words]
