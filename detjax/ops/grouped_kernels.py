"""The backends' kernels of grouped products, which several operations call."""

from typing import Final

from detjax.ops.dispatch import Operation, backend_modules

GROUPED_MATMUL: Final = Operation("grouped_matmul", backend_modules("grouped_matmul", mma="mma"))
"""The operation of `ops.grouped_matmul`."""


def group_unit(rows: int, experts: int) -> int:
    """Returns the backend's preferred multiple of group sizes for a number of rows and experts."""
    return GROUPED_MATMUL.module().group_unit(rows, experts)
