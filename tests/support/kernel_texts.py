"""The text of a program's Mosaic TPU kernels."""

import re
from collections.abc import Callable
from typing import Any, Final

import jax

from detjax.runtime import backends

_GRID_SIZES: Final = re.compile(r"iteration_bounds = array<i64[^>]*>|(?<=memref<)\d+(?=xi32, #tpu.memory_space<smem>>)")
"""The parts of a kernel's text that depend on the grid: its bounds, and the lengths of per-step lists."""


def kernel_texts(fn: Callable[..., Any], *args: Any) -> list[str]:
    """Returns the text of each Mosaic TPU kernel in `fn`, in order, without the size of its grid. Needs no libtpu.

    Kernels with the same text differ at most in the number of their grids' steps.

    Args:
        fn: a function of arrays.
        args: trees of `jax.ShapeDtypeStruct`.
    """
    from jax._src import tpu_custom_call  # JAX has no public API for a kernel's text.

    texts: list[str] = []
    original = tpu_custom_call._lower_to_custom_call_config  # pyright: ignore[reportAttributeAccessIssue]

    def recorded(module: Any, *rest: Any, **options: Any) -> Any:
        texts.append(_GRID_SIZES.sub("", str(module)))
        return original(module, *rest, **options)

    tpu_custom_call._lower_to_custom_call_config = recorded  # pyright: ignore[reportAttributeAccessIssue]
    try:
        with backends.tracing_for("tpu"):
            jax.jit(fn).trace(*args).lower(lowering_platforms=("tpu",))
    finally:
        tpu_custom_call._lower_to_custom_call_config = original  # pyright: ignore[reportAttributeAccessIssue]
    return texts
