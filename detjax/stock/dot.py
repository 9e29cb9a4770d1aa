"""Operands of products with a float32 result."""

from jaxtyping import Array

from detjax.contract import ACCUMULATOR
from detjax.runtime import backends


def dot_operands(x: Array, y: Array) -> tuple[Array, Array]:
    """Returns `x` and `y` in a dtype whose product the device can write as float32.

    XLA's CPU runtime (jaxlib 0.11.2) has no product of one bfloat16 row with a float32 result, so both are converted
    to float32 there.
    """
    if backends.target() == "cpu":
        return x.astype(ACCUMULATOR), y.astype(ACCUMULATOR)
    return x, y
