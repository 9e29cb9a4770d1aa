"""The causal convolution before linear attention, with its per-request inputs."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from detjax.operands.accumulated_weight import Weight, fresh_and_carried, value_and_sum
from detjax.operands.kv_pages import Queries
from detjax.operands.linear_attention_state import DROPPABLE_TOKENS, RequestRows
from detjax.ops.checks import check_dtype, check_not_empty
from detjax.ops.dispatch import Operation, backend_modules, one_by_one
from detjax.ops.paged import check_requests
from detjax.runtime import compilation

_CAUSAL_CONVOLUTION = Operation("causal_convolution", backend_modules("convolution", kernels=["hopper"], mma="hopper"))


@compilation.jit
def causal_convolution(
    x: Float[Array, "*N C"], weight: Weight, inputs: Float[Array, "R rows C"], queries: Queries
) -> tuple[Float[Array, "*N C"], Float[Array, "R rows C"]]:
    """Returns `silu` of a depthwise causal convolution, and the updated last inputs.

    With n taps, the token at position `t` has `silu(sum over i of weight[c, 0, i] * x[t - n + 1 + i])`; inputs before
    position 0 are zeros.

    Tokens are `[B, T, C]`, T per request, or packed, `[N, C]`; see `Queries`. Results of padding rows are undefined.
    The last `linear_attention_state.DROPPABLE_TOKENS` tokens of a call can be dropped: the next call then begins at a
    smaller position. Gradients treat `inputs` as constants, so no gradient flows between calls.

    Args:
        x: inputs; bfloat16, float16 or float32.
        weight: `[C, 1, n]` of x's dtype, as in checkpoints. With an `AccumulatedWeight` the gradient continues a sum.
        inputs: the last inputs of each slot, of x's dtype; see `ops.empty_inputs`.
        queries: the tokens' positions in their requests; the page table is not read.

    Raises:
        TypeError: a dtype is not under contract.
        ValueError: shapes do not fit together.

    Example:
        >>> def queries(start, length):  # of one request
        ...     page_table = ops.contiguous_page_table(1, length)
        ...     return ops.Queries(page_table, start=jnp.array([start]), length=jnp.array([length]))
        ...
        >>> x, weight = jnp.array([[[1.0], [2.0], [3.0]]]), jnp.array([[[1.0, 10.0]]])
        >>> inputs = ops.empty_inputs(slots=1, taps=2, channels=1, dtype="float32")
        >>> whole, _ = ops.causal_convolution(x, weight, inputs, queries(0, 3))
        >>> whole.ravel().round(2)  # silu of 10, 1 + 20 and 2 + 30
        Array([10., 21., 32.], dtype=float32)
        >>> first, inputs = ops.causal_convolution(x[:, :2], weight, inputs, queries(0, 2))
        >>> last, inputs = ops.causal_convolution(x[:, 2:], weight, inputs, queries(2, 3))
        >>> bool((last == whole[:, 2:]).all())
        True
    """
    operation = "causal_convolution"
    value, total = value_and_sum(_CAUSAL_CONVOLUTION.taking(weight))
    check_dtype(operation, x=x)
    check_dtype(operation, like=x, weight=value, inputs=inputs)
    check_not_empty(operation, x=x, weight=value)
    if value.ndim != 3 or value.shape[:2] != (x.shape[-1], 1):
        raise ValueError(f"{operation}: weight has shape {value.shape}; accepted: ({x.shape[-1]}, 1, taps)")
    fewest = value.shape[2] - 1 + DROPPABLE_TOKENS
    if inputs.shape[1] < fewest or inputs.shape[2] != x.shape[-1]:
        raise ValueError(
            f"{operation}: inputs has shape {inputs.shape}; accepted: (slots, at least {fewest}, {x.shape[-1]}), "
            f"weight being {value.shape}. Make it with ops.empty_inputs."
        )
    check_requests(operation, "x", x, queries, axes=1)
    rows = RequestRows.from_queries(x.shape[:-1], queries)
    flat = x.reshape(-1, x.shape[-1])
    y, inputs = _CAUSAL_CONVOLUTION.call(
        lambda *operands: _causal_convolution(*operands, total), flat, value, inputs, rows
    )
    return y.reshape(x.shape), inputs


@jax.custom_vjp
def _causal_convolution(
    x: Array, weight: Array, inputs: Array, rows: RequestRows, total: Array | None
) -> tuple[Array, Array]:
    del total  # only the backward pass adds to it
    return one_by_one(_CAUSAL_CONVOLUTION.kernels().forward, (x, weight, inputs, rows))


def _forward(
    x: Array, weight: Array, inputs: Array, rows: RequestRows, total: Array | None
) -> tuple[tuple[Array, Array], tuple[Any, ...]]:
    return _causal_convolution(x, weight, inputs, rows, total), (x, weight, inputs, rows, total)


def _backward(saved: tuple[Any, ...], gradients: tuple[Array, Array]) -> tuple[Any, ...]:
    x, weight, inputs, rows, total = saved
    operands = x, weight, inputs, rows, total, gradients[0]
    dx, dweight = one_by_one(_CAUSAL_CONVOLUTION.kernels().backward, operands)
    fresh, carried = fresh_and_carried([dweight], [total])
    return dx, *fresh, jnp.zeros_like(inputs), None, *carried


_causal_convolution.defvjp(_forward, _backward)
