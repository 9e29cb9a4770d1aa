"""The KV cache: pages of `contract.KV_BLOCK` tokens, written before attention reads them."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Int32

from detjax.contract import KV_BLOCK, KVQuantization
from detjax.models.config import DecoderConfig
from detjax.ops import QuantizedPages, contiguous_page_table
from detjax.ops.quantized_kv import check_kind

type Pages = Float[Array, "P h S K"] | QuantizedPages
"""Keys or values of a layer."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of a batch of requests, left-aligned: token `i` of a request lies in its page `i // KV_BLOCK`."""

    k: tuple[Pages, ...]
    """A pool of pages per layer."""
    v: tuple[Pages, ...]
    page_table: Int32[Array, "B p"]
    lengths: Int32[Array, "B"]
    """Tokens that each request has in the cache."""

    @classmethod
    def empty(
        cls,
        config: DecoderConfig,
        batch: int,
        capacity: int,
        dtype: DTypeLike,
        quantized: KVQuantization | None = None,
    ) -> "KVCache":
        """A cache for `batch` requests of up to `capacity` tokens each, in pages that lie one behind the other.

        Args:
            config: the decoder's.
            batch: requests.
            capacity: tokens.
            dtype: of keys and values, the decoder's.
            quantized: hold codes and scales instead of numbers, as `ops.quantize_kv` makes them.

        Raises:
            ValueError: there is no such quantization, or it does not take the decoder's head size.
        """
        page_table = contiguous_page_table(batch, capacity)
        shape = (page_table.size, config.kv_heads, KV_BLOCK, config.head_dim)
        pools: list[Pages]
        if quantized is None:
            pools = [jnp.zeros(shape, dtype) for _ in range(2 * config.layers)]
        else:
            check_kind("KVCache", quantized, config.head_dim)
            pools = [QuantizedPages.empty(shape, quantized) for _ in range(2 * config.layers)]
        return cls(tuple(pools[::2]), tuple(pools[1::2]), page_table, jnp.zeros(batch, jnp.int32))

    @property
    def capacity(self) -> int:
        """Tokens that each request may have. What would be written behind them is dropped."""
        return self.page_table.shape[1] * KV_BLOCK
