"""Comparison of bits on the device."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool


def words(x: Array) -> Array:
    """The bits of numbers as unsigned integers of their size."""
    return lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")


@jax.jit
def same_bits(a: Any, b: Any) -> Bool[Array, ""]:
    """Returns whether two trees of arrays have the same bits in every element. NaN equals NaN of the same bits."""
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return jnp.stack([(words(x) == words(y)).all() for x, y in leaves]).all()
