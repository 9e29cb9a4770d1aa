"""The KV cache: pages of `contract.KV_BLOCK` tokens, written before attention reads them."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Int, Int32

from detjax.contract import KV_BLOCK
from detjax.models.config import DecoderConfig
from detjax.ops import contiguous_page_table


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of a batch of requests, left-aligned: token `i` of a request lies in its page `i // KV_BLOCK`."""

    k: tuple[Float[Array, "P h S K"], ...]
    """A pool of pages per layer."""
    v: tuple[Float[Array, "P h S K"], ...]
    page_table: Int32[Array, "B p"]
    lengths: Int32[Array, "B"]
    """Tokens that each request has in the cache."""

    @classmethod
    def empty(cls, config: DecoderConfig, batch: int, capacity: int, dtype: DTypeLike) -> "KVCache":
        """A cache for `batch` requests of up to `capacity` tokens each, in pages that lie one behind the other."""
        page_table = contiguous_page_table(batch, capacity)
        shape = (page_table.size, config.kv_heads, KV_BLOCK, config.head_dim)
        pools = [jnp.zeros(shape, dtype) for _ in range(2 * config.layers)]
        return cls(tuple(pools[::2]), tuple(pools[1::2]), page_table, jnp.zeros(batch, jnp.int32))

    @property
    def capacity(self) -> int:
        """Tokens that each request may have. What would be written behind them is dropped."""
        return self.page_table.shape[1] * KV_BLOCK

    def positions(self, tokens: int) -> Int32[Array, "B T"]:
        """Absolute positions of the next `tokens` tokens of each request."""
        return self.lengths[:, None] + jnp.arange(tokens, dtype=jnp.int32)[None]

    def written(
        self, layer: int, k: Float[Array, "B T h K"], v: Float[Array, "B T h K"], counts: Int[Array, "B"]
    ) -> tuple[Float[Array, "P h S K"], Float[Array, "P h S K"]]:
        """The layer's pages with the first `counts[b]` of the new tokens of each request behind those it has."""
        positions = self.positions(k.shape[1])
        new = (jnp.arange(k.shape[1])[None] < counts[:, None]) & (positions < self.capacity)
        page = jnp.take_along_axis(self.page_table, positions // KV_BLOCK, axis=1, mode="clip")
        page = jnp.where(new, page, self.k[layer].shape[0])  # a page that does not exist: dropped
        slot = positions % KV_BLOCK
        return (
            self.k[layer].at[page, :, slot].set(k, mode="drop"),
            self.v[layer].at[page, :, slot].set(v, mode="drop"),
        )
