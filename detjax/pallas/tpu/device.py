"""Facts about TPUs that more than one kernel needs, and the check of dtypes."""

from typing import Any, Final

from detjax.runtime import backends

DTYPES: Final = ("bfloat16", "float32")
"""The dtypes that kernels load and store. Mosaic has no float16 for TPUs."""

LANES: Final = 128
"""Columns of a vector register, and of a tile of memory."""

SUBLANES: Final = 8
"""Rows of a vector register of 32-bit numbers, and of a tile of memory. Narrower numbers are packed into these rows."""

VMEM_LIMIT: Final = 56 * 2**20
"""Bytes of vector memory (VMEM) that a kernel may use. A TPU7x has the least of all chips, 64 MiB; the other chips have
128 MiB, of which the compiler's default limit is 16 MiB."""

SMEM_LIMIT: Final = 240_000
"""32-bit words of scalar memory (SMEM) that a kernel's prefetched scalars may take. A chip has 2**18 words, and the
compiler uses some of them itself."""


def check_dtypes(operation: str, *arrays: Any) -> None:
    """Returns if kernels load and store the dtype of every argument that is not None.

    Args:
        operation: the operation's name, which the error repeats.
        arrays: arrays, or anything else that has a dtype.

    Raises:
        NotImplementedError: a dtype is not one of `DTYPES`.
    """
    for array in arrays:
        if array is not None and str(array.dtype) not in DTYPES:
            raise NotImplementedError(
                f"{operation}: an argument or the result has dtype {array.dtype} on {backends.device_name()}; accepted "
                f"by the backend 'tpu': {', '.join(DTYPES)}. Cast it, or choose the backend 'portable', which takes it."
            )
