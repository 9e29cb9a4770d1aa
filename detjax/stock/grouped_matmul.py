"""Matrix products of rows sorted by expert, by XLA's ragged dot."""

from typing import Final

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike

from detjax.contract import ACCUMULATOR
from detjax.operands.options import Epilogue, WeightLayout
from detjax.operands.products import GroupedOperands
from detjax.stock.dot import dot_operands
from detjax.stock.matmul import activation, gated

DIFFERENTIATED_BY_JAX: Final = True


def group_unit(rows: int, experts: int) -> int:
    """Returns 1: groups may begin at any row."""
    del rows, experts
    return 1


def grouped_matmul(
    operands: GroupedOperands, *, layout: WeightLayout, epilogue: Epilogue, out_dtype: DTypeLike, unit: int
) -> Array:
    """See `detjax.ops.grouped_matmul`."""
    del unit
    x, w, bias, group_sizes, _ = operands
    transposed = w if layout == "kn" else jnp.swapaxes(w, -1, -2)
    rows = jnp.arange(len(x), dtype=jnp.int32)
    expert = jnp.searchsorted(jnp.cumsum(group_sizes, dtype=jnp.int32), rows, side="right")
    has_expert = (expert < len(w))[:, None]

    def linear(index: int | None) -> Array:
        part = transposed if index is None else transposed[:, index]
        z = lax.ragged_dot(
            *dot_operands(x, part), group_sizes, precision=lax.Precision.HIGHEST, preferred_element_type=ACCUMULATOR
        )
        if bias is None:
            return z
        part_bias = bias if index is None else bias[:, index]
        return z + part_bias.astype(ACCUMULATOR)[jnp.minimum(expert, len(w) - 1)]

    if epilogue.gated:
        y = gated(linear(0), linear(1), epilogue)
    else:
        z = linear(None)
        y = z if epilogue.activation is None else activation(epilogue.activation)(z)
    return jnp.where(jnp.broadcast_to(has_expert, y.shape), y, jax.numpy.zeros_like(y)).astype(out_dtype)
