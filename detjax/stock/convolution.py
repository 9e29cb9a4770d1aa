"""The causal convolution by XLA."""

from typing import Any, Final

import jax
import jax.numpy as jnp
from jaxtyping import Array

from detjax.contract import ACCUMULATOR
from detjax.operands.linear_attention_state import RequestRows, with_last_inputs

DIFFERENTIATED_BY_JAX: Final = True


def causal_convolution(x: Array, weight: Array, inputs: Array, rows: RequestRows) -> tuple[Array, Array]:
    """See `detjax.ops.causal_convolution`."""
    inputs = jax.lax.stop_gradient(inputs)
    request, offset, _ = rows.by_row(x.shape[0])
    row: Any = jnp.arange(x.shape[0], dtype=jnp.int32)
    total = jnp.zeros(x.shape, ACCUMULATOR)
    for tap in range(weight.shape[2]):
        back = weight.shape[2] - 1 - tap
        position = rows.start[request] + offset - back
        earlier = inputs[rows.slot[request], position % inputs.shape[1]]
        earlier = jnp.where((position >= 0)[:, None], earlier, jnp.zeros_like(earlier))
        inputs_of_tap = jnp.where((offset >= back)[:, None], x[jnp.maximum(row - back, 0)], earlier)
        total = total + inputs_of_tap.astype(ACCUMULATOR) * weight[:, 0, tap].astype(ACCUMULATOR)[None]
    y = jax.nn.silu(total).astype(x.dtype)
    return y, with_last_inputs(inputs, jax.lax.stop_gradient(x), rows)
