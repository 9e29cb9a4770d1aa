"""Small functions that the portable backend and the kernels share."""


def ceil_div(size: int, divisor: int) -> int:
    """`size / divisor`, rounded up."""
    return -(-size // divisor)


def round_up(size: int, multiple: int) -> int:
    """The least multiple of `multiple` that is at least `size`."""
    return ceil_div(size, multiple) * multiple
