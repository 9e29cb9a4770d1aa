"""Comparison of bits on the device, and the rows that every batch of a comparison has in common."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Num


def words(x: Array) -> Array:
    """The bits of numbers as unsigned integers of their size."""
    return lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")


@jax.jit
def same_bits(a: Any, b: Any) -> Bool[Array, ""]:
    """Whether two trees of arrays have the same bits in every element. NaN equals NaN of the same bits."""
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return jnp.stack([(words(x) == words(y)).all() for x, y in leaves]).all()


def differing_tokens(a: Num[Array, "B T H K"], b: Num[Array, "B T H K"]) -> Bool[Array, "B T"]:
    """The tokens of two outputs of attention that have different bits."""
    return (words(a) != words(b)).any((2, 3))


def anchor_positions(rows: int) -> list[int]:
    """The positions of the anchor row in a batch of so many rows: first, middle and last, each once."""
    return sorted({0, rows // 2, rows - 1})
