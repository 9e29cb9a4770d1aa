"""Constants of TPUs that several kernels share, and the check of dtypes."""

from typing import Any, Final

from detjax.runtime import backends

DTYPES: Final = ("bfloat16", "float32")
"""Dtypes that kernels load and store. Mosaic has no float16 for TPUs."""

LANES: Final = 128
"""Columns of a vector register, and of a tile of memory."""

SUBLANES: Final = 8
"""Rows of a vector register of 32-bit numbers, and of a tile of memory. Narrower numbers are packed into these rows."""

VMEM_LIMIT: Final = 56 * 2**20
"""Bytes of vector memory (VMEM) that a kernel may use. The TPU7x has the least, 64 MiB; the other chips have 128 MiB.
Unless a kernel asks for more, the compiler's limit is 16 MiB."""

SMEM_LIMIT: Final = 240_000
"""32-bit words of scalar memory (SMEM) for a kernel's prefetched scalars. A chip has 2**18 words, and the compiler uses
some of them itself."""


def check_dtypes(operation: str, *arrays: Any) -> None:
    """Checks that kernels load and store the dtype of every argument that is not None.

    Args:
        operation: the operation's name, for the error.
        arrays: arrays, or other objects with a dtype.

    Raises:
        NotImplementedError: a dtype is not one of `DTYPES`.
    """
    for array in arrays:
        if array is not None and str(array.dtype) not in DTYPES:
            raise NotImplementedError(
                f"{operation}: an argument or the result has dtype {array.dtype} on {backends.device_name()}; accepted "
                f"by the backend 'tpu': {', '.join(DTYPES)}. Cast it, or choose the backend 'portable', which takes it."
            )
