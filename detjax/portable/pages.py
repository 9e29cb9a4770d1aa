"""The pages of a KV cache in plain JAX: what is written, and where."""

import jax.numpy as jnp
from jaxtyping import Array

from detjax.contract import KV_BLOCK


def append(
    pools: tuple[Array, ...], new: tuple[Array, ...], page_table: Array, q_start: Array, q_length: Array
) -> tuple[Array, ...]:
    """Pools `[P, h, S, ...]`, each with its new tokens `[B, T, h, ...]` at positions `q_start[b] + t` of the requests.

    Tokens from `q_length[b]` on are dropped, as are those whose position is behind the request's row of `page_table
    [B, p]`, or whose page is not in the pool.
    """
    batch, tokens = new[0].shape[:2]
    pages = pools[0].shape[0]
    index = jnp.arange(tokens, dtype=jnp.int32)[None]
    position = q_start[:, None] + index
    page = jnp.take_along_axis(page_table, position // KV_BLOCK, axis=1, mode="clip")
    written = (index < q_length[:, None]) & (position >= 0) & (position < page_table.shape[1] * KV_BLOCK)
    written = written & (page >= 0) & (page < pages)
    # What is dropped goes to pages that do not exist, a token to each: then no two tokens have one slot, as is said
    # below, which spares the gradient to find out who was there last.
    nowhere = pages + jnp.arange(batch * tokens, dtype=jnp.int32).reshape(batch, tokens)
    page, slot = jnp.where(written, page, nowhere), position % KV_BLOCK
    return tuple(
        pool.at[page, :, slot].set(x, mode="drop", unique_indices=True) for pool, x in zip(pools, new, strict=True)
    )
