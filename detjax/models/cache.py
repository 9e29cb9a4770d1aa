"""The KV cache of a batch of requests: pages of `contract.KV_BLOCK` tokens in every layer, and how full they are."""

import dataclasses

import jax
import jax.numpy as jnp
from detjax.contract import KV_BLOCK
from detjax.models.config import DecoderConfig
from detjax.options import KVQuantization
from jaxtyping import Array, DTypeLike, Int, Int32

from detjax import ops
from detjax.kv_pages import KVPages, PackedRows, Pages, Queries
from detjax.ops.quantized_kv import check_kind

type State = tuple[KVPages, ...]
"""What the layers keep of the tokens that they have seen: for each layer, what its parts declare."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of a batch of requests, left-aligned: token `i` of a request lies in its page `i // KV_BLOCK`.

    Attributes:
        state: for each layer, a pool of pages.
        page_table: the page of each request's block of tokens.
        lengths: how many tokens each request has in the cache.
    """

    state: State
    page_table: Int32[Array, "B p"]
    lengths: Int32[Array, "B"]

    @classmethod
    def empty(
        cls,
        config: DecoderConfig,
        batch: int,
        capacity: int,
        dtype: DTypeLike,
        quantized: KVQuantization | None = None,
    ) -> "KVCache":
        """Returns a cache for `batch` requests of up to `capacity` tokens each, whose pages follow one another.

        Args:
            config: the decoder's configuration.
            batch: the number of requests.
            capacity: tokens of a request.
            dtype: the dtype of keys and values, which is the decoder's.
            quantized: hold codes and scales instead of numbers, as `ops.quantize_kv` makes them.

        Raises:
            ValueError: the quantization does not exist, or does not take the decoder's head size.
        """
        page_table = ops.contiguous_page_table(batch, capacity)
        state = empty_state(config, page_table.size, dtype, quantized)
        return cls(state, page_table, jnp.zeros(batch, jnp.int32))

    @property
    def capacity(self) -> int:
        """How many tokens each request may have. Tokens after these are dropped."""
        return self.page_table.shape[1] * KV_BLOCK

    def next_queries(self, counts: Int[Array, "B"]) -> Queries:
        """Returns where the next tokens stand, so many of each request, the rest being padding on the right."""
        length = jnp.minimum(self.lengths + counts, self.capacity)
        return Queries(self.page_table, self.lengths, length, counts)


def empty_state(
    config: DecoderConfig, num_pages: int, dtype: DTypeLike, quantized: KVQuantization | None = None
) -> State:
    """Returns the state of all layers with pools of so many pages; arguments as in `KVCache.empty`.

    Raises:
        ValueError: the quantization does not exist, or does not take the decoder's head size.
    """
    if quantized is not None:
        check_kind("KVCache", quantized, config.head_dim)
    sizes = num_pages, config.kv_heads, config.head_dim, dtype, quantized
    return tuple(KVPages.empty(*sizes) for _ in range(config.layers))


# --- names that the engine uses until it calls Decoder.hidden_states and Decoder.empty_state ---


def empty_pages(
    config: DecoderConfig, pages: int, dtype: DTypeLike, quantized: KVQuantization | None = None
) -> tuple[Pages, ...]:
    return tuple(kv.k for kv in empty_state(config, pages, dtype, quantized))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed:
    page_table: Int32[Array, "R p"]
    request: Int32[Array, "N"]
    position: Int32[Array, "N"]
    present: Int32[Array, "N"]
    q_row: Int32[Array, "prefills"]
    q_length: Int32[Array, "prefills"]
    q_start: Int32[Array, "prefills"]

    def queries(self) -> Queries:
        decodes = self.page_table.shape[0] - self.q_row.shape[0]
        rows = PackedRows(self.request, self.position, self.present)
        start = jnp.concatenate([self.position[:decodes], self.q_start])
        count = jnp.concatenate([self.present[:decodes], self.q_length])
        length = jnp.concatenate([(self.position[:decodes] + 1) * self.present[:decodes], self.q_start + self.q_length])
        return Queries(self.page_table, start, length, count, self.q_row, rows)
