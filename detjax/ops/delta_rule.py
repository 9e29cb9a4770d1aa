"""The gated delta rule, the recurrence of linear attention: one function for prefill, decode and training."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from detjax.operands.kv_pages import Queries
from detjax.operands.linear_attention_state import DELTA_ROWS, DeltaState, DeltaTokens, RequestRows
from detjax.ops.checks import check_dtype, check_not_empty, check_shape
from detjax.ops.dispatch import Operation, backend_modules, one_by_one
from detjax.ops.paged import check_requests
from detjax.runtime import compilation

_GATED_DELTA_RULE = Operation("gated_delta_rule", backend_modules("delta_rule"))


@compilation.jit
def gated_delta_rule(
    q: Float[Array, "*N h K"],
    k: Float[Array, "*N h K"],
    v: Float[Array, "*N H V"],
    g: Float32[Array, "*N H"],
    beta: Float32[Array, "*N H"],
    state: DeltaState,
    queries: Queries,
) -> tuple[Float[Array, "*N H V"], DeltaState]:
    """Returns the outputs of the gated delta rule (Yang et al. 2024), and the updated state.

    For each value head, with S initially zero, a token computes

        S = exp(g) * S
        u = beta * (v - k . S)
        S = S + k u^T
        o = K^(-1/2) * q . S

    in the form of `detjax.contract`, whose bits do not depend on how a request is divided into calls.

    Tokens are `[B, T, ...]`, T per request, or packed, `[N, ...]`; see `Queries`. Results of padding rows are
    undefined. The last `linear_attention_state.DROPPABLE_TOKENS` tokens of a call can be dropped: the next call then
    begins at a smaller position.

    Gradients treat the state as a constant, so no gradient flows between calls: if a request does not begin at position
    0, they are the gradients of its tokens in this call, given the earlier ones.

    Args:
        q: queries, normalized; bfloat16, float16 or float32.
        k: keys, normalized, of q's dtype. H is a multiple of h: consecutive value heads share a key head.
        v: values of q's dtype.
        g: the logarithm of each token's decay, at most 0.
        beta: the learning rate of each token's value.
        state: the layer's state of each request.
        queries: the tokens' positions in their requests; the page table is not read.

    Raises:
        TypeError: a dtype is not under contract.
        ValueError: shapes do not fit together.

    Example:
        >>> def queries(start, length):  # of one request
        ...     page_table = ops.contiguous_page_table(1, length)
        ...     return ops.Queries(page_table, start=jnp.array([start]), length=jnp.array([length]))
        ...
        >>> q = k = ops.l2_norm(jax.random.normal(jax.random.key(0), (1, 3, 1, 16)), eps=1e-6)
        >>> v = jax.random.normal(jax.random.key(1), (1, 3, 2, 8))
        >>> tokens = q, k, v, jnp.full((1, 3, 2), -0.1), jnp.full((1, 3, 2), 0.5)
        >>> empty = ops.DeltaState.empty(
        ...     slots=1, key_heads=1, value_heads=2, key_dim=16, value_dim=8, dtype="float32"
        ... )
        >>> prefill, _ = ops.gated_delta_rule(*tokens, empty, queries(0, 3))
        >>> prefill.shape
        (1, 3, 2, 8)
        >>> state = empty
        >>> for t in range(3):
        ...     token = [x[:, t : t + 1] for x in tokens]
        ...     decode, state = ops.gated_delta_rule(*token, state, queries(t, t + 1))
        ...
        >>> bool((decode == prefill[:, 2:]).all())
        True
    """
    operation = "gated_delta_rule"
    check_dtype(operation, q=q)
    check_dtype(operation, like=q, k=k, v=v)
    check_not_empty(operation, q=q, v=v)
    check_shape(operation, "k", k, q.shape, "q's shape")
    if v.shape[-2] % q.shape[-2]:
        raise ValueError(
            f"{operation}: v has {v.shape[-2]} heads and q {q.shape[-2]}; accepted: a multiple of {q.shape[-2]}"
        )
    check_shape(operation, "v", v, (*q.shape[:-2], *v.shape[-2:]), f"q being {q.shape}")
    for name, gate in {"g": g, "beta": beta}.items():
        check_shape(operation, name, gate, v.shape[:-1], f"v being {v.shape}")
    check_requests(operation, "q", q, queries, axes=2)
    _check_state(q, v, state)
    rows = RequestRows.from_queries(q.shape[:-2], queries)
    leading = q.shape[:-2]
    flat = DeltaTokens(*(x.reshape(-1, *x.shape[len(leading) :]) for x in (q, k, v, g, beta)))
    o, state = _GATED_DELTA_RULE.call(_gated_delta_rule, flat, state, rows)
    return o.reshape(v.shape), state


def _check_state(q: Array, v: Array, state: DeltaState) -> None:
    operation = "gated_delta_rule"
    check_dtype(operation, like=q, **{"state.keys": state.keys, "state.updates": state.updates})
    slots, (key_heads, width), (heads, value_width) = state.s.shape[0], q.shape[-2:], v.shape[-2:]
    accepted = {
        "s": (slots, heads, width, value_width),
        "keys": (slots, DELTA_ROWS, key_heads, width),
        "updates": (slots, DELTA_ROWS, heads, value_width),
        "decays": (slots, DELTA_ROWS, heads),
        "chunk": (slots,),
    }
    for name, shape in accepted.items():
        check_shape(operation, f"state.{name}", getattr(state, name), shape, f"q being {q.shape} and v {v.shape}")


@jax.custom_vjp
def _gated_delta_rule(tokens: DeltaTokens, state: DeltaState, rows: RequestRows) -> tuple[Array, DeltaState]:
    return one_by_one(_GATED_DELTA_RULE.kernels().forward, (tokens, state, rows))


def _forward(tokens: DeltaTokens, state: DeltaState, rows: RequestRows) -> tuple[Any, tuple[Any, ...]]:
    return _gated_delta_rule(tokens, state, rows), (tokens, state, rows)


def _backward(saved: tuple[Any, ...], gradients: tuple[Array, Any]) -> tuple[Any, ...]:
    tokens, state, rows = saved
    gradients_of_tokens = one_by_one(_GATED_DELTA_RULE.kernels().backward, (tokens, state, rows, gradients[0]))
    return gradients_of_tokens, jax.tree.map(_no_gradient, state), None


def _no_gradient(x: Array) -> Array | None:
    return jnp.zeros_like(x) if jnp.issubdtype(x.dtype, jnp.floating) else None


_gated_delta_rule.defvjp(_forward, _backward)
