"""What all kernels for TPUs have to know of the chip."""

from typing import Any, Final

from detjax import backends

DTYPES: Final = ("bfloat16", "float32")
"""That kernels load and store; Mosaic has no float16 for TPUs."""

LANES: Final = 128
"""Columns of a vector register, and of a tile of memory."""

SUBLANES: Final = 8
"""Rows of a register of 32-bit numbers, and lines of a tile of memory; rows of narrower ones are packed into them."""


def check_dtypes(operation: str, *arrays: Any) -> None:
    """Returns if kernels load and store every array, or what has an array's dtype, that is not None.

    Raises:
        NotImplementedError: a dtype is none of `DTYPES`.
    """
    for array in arrays:
        if array is not None and str(array.dtype) not in DTYPES:
            raise NotImplementedError(
                f"{operation}: an argument or the result has dtype {array.dtype} on {backends.device_name()}; accepted "
                f"by the backend 'tpu': {', '.join(DTYPES)}. Cast it, or choose the backend 'portable', which takes it."
            )
