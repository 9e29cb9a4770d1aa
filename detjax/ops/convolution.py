"""The causal convolution before linear attention, with the inputs that it keeps of each request."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from detjax import compilation
from detjax.accumulated_weight import Weight, value_and_sum
from detjax.kv_pages import Queries
from detjax.ops.checks import check_dtype, check_not_empty
from detjax.ops.dispatch import Operation
from detjax.ops.paged import check_requests
from detjax.ops.row_functions import rows_by_kernel
from detjax.request_state import DROPPABLE_TOKENS, RequestRows

_CAUSAL_CONVOLUTION = Operation(
    "causal_convolution",
    {
        "portable": "detjax.portable.row_functions",
        "hopper": "detjax.portable.row_functions",  # until there is a kernel
        "tpu": "detjax.portable.row_functions",
        "stock": "detjax.stock.convolution",
    },
)


@compilation.jit
def causal_convolution(
    x: Float[Array, "*N C"], weight: Weight, inputs: Float[Array, "R rows C"], queries: Queries
) -> tuple[Float[Array, "*N C"], Float[Array, "R rows C"]]:
    """Returns `silu` of a depthwise causal convolution, and the last inputs with these ones in them.

    With n taps, the token at position `t` has `silu(sum over i of weight[c, 0, i] * x[t - n + 1 + i])`, and inputs
    before position 0 are zeros.

    Tokens are `[B, T, C]` with T of each request, or packed, `[N, C]`; see `Queries`. The result of a row that belongs
    to no request may be anything. A call's last `request_state.DROPPABLE_TOKENS` tokens can be dropped: the next call
    then begins at a smaller position. In gradients `inputs` are constants: none goes to an earlier call or from a later
    one.

    Args:
        x: inputs; bfloat16, float16 or float32.
        weight: `[C, 1, n]` of x's dtype, as checkpoints hold it. With an `AccumulatedWeight` the gradient continues
            a sum.
        inputs: the last inputs of each slot, of x's dtype; see `request_state.empty_inputs`.
        queries: where the tokens stand in their requests; the page table is not read.

    Raises:
        TypeError: a dtype is not under contract.
        ValueError: shapes do not fit together.
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
            f"weight being {value.shape}. Make it with request_state.empty_inputs."
        )
    check_requests(operation, "x", x, queries, axes=1)
    rows = RequestRows.from_queries(x.shape[:-1], queries)
    flat = x.reshape(-1, x.shape[-1])
    under_contract = functools.partial(_causal_convolution, total=total)
    y = _CAUSAL_CONVOLUTION.call(under_contract, flat, value, inputs, rows)
    return y.reshape(x.shape), _with_inputs(jax.lax.stop_gradient(flat), inputs, rows)


def _causal_convolution(x: Array, weight: Array, inputs: Array, rows: RequestRows, *, total: Array | None) -> Array:
    taps = _taps(x, jax.lax.stop_gradient(inputs), rows, weight.shape[2])
    return rows_by_kernel((taps,), (weight,), (total,), _CAUSAL_CONVOLUTION, (("function", "causal_convolution"),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _taps(x: Array, inputs: Array, rows: RequestRows, taps: int) -> Array:
    """For each flat row the inputs that its convolution meets, `[N, taps, C]`."""
    request, offset, _ = rows.by_row(x.shape[0])
    row = jnp.arange(x.shape[0], dtype=jnp.int32)

    def tap(back: int) -> Array:
        position = rows.start[request] + offset - back
        earlier = inputs[rows.slot[request], position % inputs.shape[1]]
        earlier = jnp.where((position >= 0)[:, None], earlier, jnp.zeros_like(earlier))
        return jnp.where((offset >= back)[:, None], x[jnp.maximum(row - back, 0)], earlier)

    return jnp.stack([tap(back) for back in reversed(range(taps))], axis=1)


def _taps_forward(x: Array, inputs: Array, rows: RequestRows, taps: int) -> tuple[Array, tuple[Array, RequestRows]]:
    return _taps(x, inputs, rows, taps), (inputs, rows)


def _taps_backward(taps: int, saved: tuple[Array, RequestRows], gradient: Array) -> tuple[Array, Array, None]:
    """Adds what an input gives to the tokens after it, the nearest first: each addition of a row is one number's."""
    inputs, rows = saved
    count = gradient.shape[0]
    request, offset, present = rows.by_row(count)
    row = jnp.arange(count, dtype=jnp.int32)
    total = jnp.zeros((count, gradient.shape[2]), jnp.float32)
    for ahead in range(taps):
        inside = (present > 0) & (offset + ahead < rows.tokens[request])
        part = gradient[jnp.minimum(row + ahead, count - 1), taps - 1 - ahead].astype(jnp.float32)
        total = total + jnp.where(inside[:, None], part, jnp.zeros_like(part))
    return total.astype(gradient.dtype), jnp.zeros_like(inputs), None


_taps.defvjp(_taps_forward, _taps_backward)


def _with_inputs(x: Array, inputs: Array, rows: RequestRows) -> Array:
    """The last inputs with those of a call in them: the last of each request, as many as there is room for."""
    slots, room = inputs.shape[:2]
    request, offset, present = rows.by_row(x.shape[0])
    kept = (present > 0) & (offset >= rows.tokens[request] - room)
    place = rows.slot[request] * room + (rows.start[request] + offset) % room
    # Rows that are not kept have places that do not exist, and all differ.
    nowhere = slots * room + jnp.arange(x.shape[0], dtype=jnp.int32)
    flat = inputs.reshape(slots * room, -1)
    flat = flat.at[jnp.where(kept, place, nowhere)].set(x, mode="drop", unique_indices=True)
    return flat.reshape(inputs.shape)
