"""Small functions and numbers that the portable backend and the kernels share."""

from typing import Final

import numpy as np

LOWEST: Final = float(np.finfo(np.float32).min)
"""The lowest finite float32."""


def ceil_div(size: int, divisor: int) -> int:
    """`size / divisor`, rounded up."""
    return -(-size // divisor)


def round_up(size: int, multiple: int) -> int:
    """The least multiple of `multiple` that is at least `size`."""
    return ceil_div(size, multiple) * multiple
