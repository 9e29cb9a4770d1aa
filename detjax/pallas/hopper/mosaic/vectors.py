"""Primitives on arrays of any layout: parts of small vectors, log1p, and the upper half of a product."""

from collections.abc import Sequence
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jaxlib.mlir.dialects import arith, math

from detjax.contract import LANE_GROUP
from detjax.pallas.hopper.mosaic import primitive
from detjax.pallas.hopper.mosaic.registers import array, element, empty_registers, int32, packed


def _plain_split_vectors(x: Array, *, layout: Any, rows_layout: Any, parts: int) -> Sequence[Array]:
    vectors = x.reshape(x.shape[0], -1, parts)
    return tuple(vectors[:, :, part] for part in range(parts))


def _parts(x: Any, *, layout: Any, rows_layout: Any, parts: int) -> Any:
    shape = x.shape[0], x.shape[1] // parts
    return (plgpu.ShapeDtypeStruct(shape, x.dtype, layout=rows_layout),) * parts


@primitive(twin=_plain_split_vectors, args=lambda x, *, layout, rows_layout, parts: (layout,), out=_parts)
def split_vectors(x: Any, *, layout: Any, rows_layout: Any, parts: int) -> Any:
    """Returns the parts of vectors of `parts` numbers, `[rows, columns * parts]`, as arrays `[rows, columns]`.

    Args:
        x: the vectors; a thread has the vectors of `LANE_GROUP` neighbouring columns.
        layout: the layout of `x`.
        rows_layout: the layout of the parts.
        parts: numbers of a vector.
    """
    results = []
    registers = x.registers.ravel()
    for part in range(parts):
        out = empty_registers(rows_layout, (x.shape[0], x.shape[1] // parts))
        out.flat[:] = [
            packed([element(register, column * parts + part) for column in range(LANE_GROUP)]) for register in registers
        ]
        results.append(array(out, rows_layout))
    return tuple(results)


def _plain_log1p(x: Array, *, layout: Any) -> Array:
    return lax.log1p(x)


@primitive(
    twin=_plain_log1p,
    args=lambda x, *, layout: (layout,),
    out=lambda x, *, layout: plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=layout),
)
def log1p(x: Any, *, layout: Any) -> Any:
    """Returns `log(1 + x)` by CUDA's function, which XLA uses as well; Pallas has none."""
    return x._pointwise(math.log1p)


def _plain_multiply_high(x: Array, *, factor: int, layout: Any) -> Array:
    return lax.mulhi(x, jnp.full_like(x, factor))


@primitive(
    twin=_plain_multiply_high,
    args=lambda x, *, factor, layout: (layout,),
    out=lambda x, *, factor, layout: plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=layout),
)
def multiply_high(x: Any, *, factor: int, layout: Any) -> Any:
    """Returns the upper 32 bits of products of uint32 numbers with a constant; Pallas has no such operation."""
    return x._pointwise(lambda a, b: arith.MulUIExtendedOp(a, b).results[1], int32(factor))
