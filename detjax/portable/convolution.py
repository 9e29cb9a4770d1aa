"""The causal convolution in plain JAX, with its gradients, as a row function of each token's gathered inputs."""

import jax.numpy as jnp
from jaxtyping import Array

from detjax.operands.linear_attention_state import RequestRows, with_last_inputs
from detjax.portable import row_functions

_FUNCTION = "causal_convolution"


def forward(x: Array, weight: Array, inputs: Array, rows: RequestRows) -> tuple[Array, Array]:
    """Returns the activated convolution `[N, C]` and the next inputs; see `detjax.ops.causal_convolution`.

    Inputs `x` are `[N, C]`, the weight is `[C, 1, n]`, and the last inputs of each slot are `[R, rows, C]`.
    """
    taps = _taps(x, inputs, rows, weight.shape[2])
    y = row_functions.forward((taps,), (weight,), function=_FUNCTION)
    return y, with_last_inputs(inputs, x, rows)


def backward(
    x: Array, weight: Array, inputs: Array, rows: RequestRows, weight_sum: Array | None, dy: Array
) -> tuple[Array, Array]:
    """Returns the gradients of this call's inputs and of the weight, or the weight's next float32 sum if it has one."""
    taps = _taps(x, inputs, rows, weight.shape[2])
    (dtaps,), (dweight,) = row_functions.backward((taps,), (weight,), (weight_sum,), dy, function=_FUNCTION)
    return _gradient_of_inputs(dtaps, rows), dweight


def _taps(x: Array, inputs: Array, rows: RequestRows, taps: int) -> Array:
    """Gathers the inputs of each row's convolution, `[N, taps, C]`."""
    request, offset, _ = rows.by_row(x.shape[0])
    row = jnp.arange(x.shape[0], dtype=jnp.int32)

    def tap(back: int) -> Array:
        position = rows.start[request] + offset - back
        earlier = inputs[rows.slot[request], position % inputs.shape[1]]
        earlier = jnp.where((position >= 0)[:, None], earlier, jnp.zeros_like(earlier))
        return jnp.where((offset >= back)[:, None], x[jnp.maximum(row - back, 0)], earlier)

    return jnp.stack([tap(back) for back in reversed(range(taps))], axis=1)


def _gradient_of_inputs(gradient: Array, rows: RequestRows) -> Array:
    """Adds up an input's gradients from the following tokens, the nearest first, in an order fixed for each element."""
    count, taps = gradient.shape[:2]
    request, offset, present = rows.by_row(count)
    row = jnp.arange(count, dtype=jnp.int32)
    total = jnp.zeros((count, gradient.shape[2]), jnp.float32)
    for ahead in range(taps):
        inside = (present > 0) & (offset + ahead < rows.tokens[request])
        part = gradient[jnp.minimum(row + ahead, count - 1), taps - 1 - ahead].astype(jnp.float32)
        total = total + jnp.where(inside[:, None], part, jnp.zeros_like(part))
    return total.astype(gradient.dtype)
