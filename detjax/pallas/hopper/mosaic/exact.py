"""Arithmetic whose twins have its bits: the interpreter rounds as the hardware does."""

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import Array
from jaxlib.mlir.dialects import math as math_dialect

from detjax.contract import ACCUMULATOR
from detjax.pallas.hopper.mosaic import primitive
from detjax.portable.adapters import fma


def _plain_fused_multiply_add(x: Array, y: Array, z: Array, *, layout: Any) -> Array:
    del layout
    return fma(x, y, z)


@primitive(
    twin=_plain_fused_multiply_add,
    args=lambda x, y, z, *, layout: (layout,) * 3,
    out=lambda x, y, z, *, layout: plgpu.ShapeDtypeStruct(x.shape, ACCUMULATOR, layout=layout),
)
def fused_multiply_add(x: Any, y: Any, z: Any, *, layout: Any) -> Any:
    """Returns `x * y + z` in float32, rounded once, for arrays of a layout."""
    # Whether the compiler fuses a multiplication with an addition depends on the code around them. This is one
    # instruction, whose bits do not.
    return x._pointwise(math_dialect.fma, y, z)
