"""The measured functions of queries, keys, values and further arguments."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from detjax import ops
from detjax.operands.kv_pages import KVPages, Queries


def paged_attention(q: jax.Array, k_pages: Any, v_pages: Any, queries: Queries, **options: Any) -> jax.Array:
    """Calls `ops.attention` with keys and values as two arguments, as the rivals take them."""
    return ops.attention(q, KVPages(k_pages, v_pages), queries, **options)


def layered(attend: Callable[..., jax.Array], layers: int) -> Callable[..., jax.Array]:
    """Returns a program of many calls, which can be replayed as a step.

    Each call takes the next keys and values of a rotation, and the previous output as its queries, so that no call can
    be removed or reordered.
    """
    attend = jax.jit(attend)  # traced once

    def program(q: jax.Array, pairs: Sequence[tuple[jax.Array, jax.Array]], *rest: Any) -> jax.Array:
        for layer in range(layers):
            q = attend(q, *pairs[layer % len(pairs)], *rest)
        return q

    return program


def gradients(attend: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Returns the function that computes gradients of queries, keys and values from the output's."""

    def weighted(q: jax.Array, k: jax.Array, v: jax.Array, do: jax.Array, *rest: Any) -> jax.Array:
        return (attend(q, k, v, *rest) * do).sum()

    return jax.grad(weighted, argnums=(0, 1, 2))
