"""Gumbel noise and the comparison of candidates, for the sampling kernels of all chips."""

from typing import Final

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from detjax.contract import ACCUMULATOR

NO_ID: Final = np.int32(np.iinfo(np.int32).max)
"""A number above all token ids."""


def beats(value: Array, best: Array) -> Array:
    """Returns True where a later value replaces the best so far. A NaN counts as the largest value, as in argmax."""
    return (value > best) | ((value != value) & (best == best))


def gumbel(key: tuple[Array, Array], token: Array) -> Array:
    """Returns the float32 Gumbel variables of uint32 token ids, the same as `jax.random.gumbel`'s with this key."""
    bits = threefry(key, token)
    uniform = lax.bitcast_convert_type((bits >> np.uint32(9)) | np.uint32(0x3F800000), ACCUMULATOR) - 1.0
    return -jnp.log(-jnp.log(jnp.maximum(uniform, np.finfo(np.float32).tiny)))


def threefry(key: tuple[Array, Array], counter: Array) -> Array:
    """Returns 32 random bits for each uint32 counter: the XOR of Threefry-2x32's words (20 rounds; Salmon et al.
    2011)."""
    rotations = (13, 15, 26, 6), (17, 29, 16, 24)
    keys = (*key, key[0] ^ key[1] ^ np.uint32(0x1BD11BDA))
    x, y = keys[0], counter + keys[1]
    for group in range(5):
        for rotation in rotations[group % 2]:
            x = x + y
            y = ((y << np.uint32(rotation)) | (y >> np.uint32(32 - rotation))) ^ x
        x = x + keys[(group + 1) % 3]
        y = y + (keys[(group + 2) % 3] + np.uint32(group + 1))
    return x ^ y
