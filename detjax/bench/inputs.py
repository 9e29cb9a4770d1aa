"""Inputs with the same bits on every device, and normal inputs drawn on the device.

`hashed` numbers are integer hashes of their own indices, scaled by powers of two. `normal` numbers are JAX's: they
differ between devices, but are cheap where only time and equality are measured.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike

from detjax.operands.rounding import rounded


def hashed(seed: int | Array, shape: tuple[int, ...], dtype: DTypeLike, exponent: int = 0) -> Array:
    """Returns numbers of mean 0 and standard deviation `1.15 * 2**exponent`, with the same bits on every device.

    Args:
        seed: below 2^31; different seeds give different numbers.
        shape: the shape of the result, at most 2^32 numbers.
        dtype: a floating-point dtype.
        exponent: the exponent of the scale.
    """
    return _hashed_numbers(jnp.uint32(seed), shape, jnp.dtype(dtype), exponent)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _hashed_numbers(seed: Array, shape: tuple[int, ...], dtype: jnp.dtype, exponent: int) -> Array:
    # The sum of four uniform variables is nearly normal. Eight bits each would suffice for that, but the sums of such
    # short numbers would be exact and hide the order of addition.
    words = _hash(2 * seed, shape), _hash(2 * seed + np.uint32(1), shape)
    halves = [half for x in words for half in (x >> np.uint32(16), x & np.uint32(0xFFFF))]
    total = sum(half.astype(jnp.int32) for half in halves) - np.int32(2 * 0xFFFF)
    return rounded(total.astype(jnp.float32) * np.float32(2.0 ** (exponent - 15)), dtype)


@functools.partial(jax.jit, static_argnums=(1, 2))
def hashed_integers(seed: Array, shape: tuple[int, ...], below: int) -> Array:
    """Returns integers from 0 to `below - 1`, the same on every device."""
    return (_hash(seed, shape) % np.uint32(below)).astype(jnp.int32)


def _hash(seed: Array, shape: tuple[int, ...]) -> Array:
    """Applies the finalizer of MurmurHash3 (Appleby) to indices shifted by the seed."""
    x = jax.lax.iota(jnp.uint32, math.prod(shape)).reshape(shape) + (seed + np.uint32(1)) * np.uint32(0x9E3779B9)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return x ^ (x >> np.uint32(16))


@jax.jit
def checksum(tree: Any) -> Array:
    """Returns a uint32 checksum of the arguments. Sums of wrapping integers do not depend on the order."""
    total = jnp.uint32(0)
    for leaf in jax.tree.leaves(tree):
        words = jax.lax.bitcast_convert_type(leaf, f"uint{8 * leaf.dtype.itemsize}").astype(jnp.uint32).reshape(-1)
        odd = 2 * jax.lax.iota(jnp.uint32, words.size) + np.uint32(1)
        total = total * np.uint32(31) + jnp.sum(words * odd, dtype=jnp.uint32)
    return total
