"""Products of quantized activations by XLA: one scale for the whole batch, as for tensors with dynamic scales."""

from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike

from detjax.contract import ACCUMULATOR, FP8_LARGEST
from detjax.operands.options import Epilogue
from detjax.operands.products import GroupedOperands, MatmulOperands
from detjax.operands.quantized_weight import widened
from detjax.stock import grouped_matmul as grouped
from detjax.stock import matmul as plain

DIFFERENTIATED_BY_JAX: Final = True


def quantized_matmul(operands: MatmulOperands, *, epilogue: Epilogue, out_dtype: DTypeLike) -> Array:
    """See `detjax.ops.matmul`."""
    dense = operands._replace(x=_quantized(operands.x), w=widened(operands.w))
    return plain.matmul(dense, layout="nk", epilogue=epilogue, out_dtype=out_dtype)


def quantized_grouped_matmul(
    operands: GroupedOperands, *, epilogue: Epilogue, out_dtype: DTypeLike, unit: int
) -> Array:
    """See `detjax.ops.grouped_matmul`."""
    dense = operands._replace(x=_quantized(operands.x), w=widened(operands.w))
    return grouped.grouped_matmul(dense, layout="nk", epilogue=epilogue, out_dtype=out_dtype, unit=unit)


def _quantized(x: Array) -> Array:
    """Rounds activations to e4m3 numbers times the batch's scale; the gradient is the identity."""
    scale = jnp.max(jnp.abs(x)).astype(ACCUMULATOR) / FP8_LARGEST
    codes = jnp.clip(x.astype(ACCUMULATOR) / scale, -FP8_LARGEST, FP8_LARGEST).astype(jnp.float8_e4m3fn)
    return x + jax.lax.stop_gradient((codes.astype(ACCUMULATOR) * scale).astype(x.dtype) - x)
