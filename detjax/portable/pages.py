"""The pages of a KV cache in plain JAX: what is written, and where."""

import jax.numpy as jnp
from jaxtyping import Array

from detjax.contract import KV_BLOCK


def places(pages: int, tokens: int, page_table: Array, q_start: Array, q_length: Array) -> tuple[Array, Array]:
    """Page and slot `[B, T]` of new tokens at positions `q_start[b] + t` of the requests, of a pool of so many pages.

    Tokens from `q_length[b]` on are to be dropped, as are those whose position is behind the request's row of
    `page_table [B, p]`, or whose page is not in the pool: their pages do not exist, and are different ones. So no two
    tokens have one slot, which spares a scatter's gradient to find out who was there last.
    """
    batch = page_table.shape[0]
    index = jnp.arange(tokens, dtype=jnp.int32)[None]
    position = q_start[:, None] + index
    page = jnp.take_along_axis(page_table, position // KV_BLOCK, axis=1, mode="clip")
    written = (index < q_length[:, None]) & (position >= 0) & (position < page_table.shape[1] * KV_BLOCK)
    written = written & (page >= 0) & (page < pages)
    nowhere = pages + jnp.arange(batch * tokens, dtype=jnp.int32).reshape(batch, tokens)
    return jnp.where(written, page, nowhere), position % KV_BLOCK


def append(
    pools: tuple[Array, ...], new: tuple[Array, ...], page_table: Array, q_start: Array, q_length: Array
) -> tuple[Array, ...]:
    """Pools `[P, h, S, K]`, each with its new tokens `[B, T, h, K]` in their `places`."""
    page, slot = places(pools[0].shape[0], new[0].shape[1], page_table, q_start, q_length)
    return tuple(
        pool.at[page, :, slot].set(x, mode="drop", unique_indices=True) for pool, x in zip(pools, new, strict=True)
    )
