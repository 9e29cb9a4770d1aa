"""The KV cache: pages of `contract.KV_BLOCK` tokens, written before attention reads them, and how tokens meet it."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Int32

from detjax import ops
from detjax.contract import KV_BLOCK
from detjax.models.config import DecoderConfig
from detjax.ops import QuantizedPages, contiguous_page_table
from detjax.ops.quantized_kv import check_kind
from detjax.options import KVQuantization

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
        k, v = (empty_pages(config, page_table.size, dtype, quantized) for _ in range(2))
        return cls(k, v, page_table, jnp.zeros(batch, jnp.int32))

    @property
    def capacity(self) -> int:
        """Tokens that each request may have. What would be written behind them is dropped."""
        return self.page_table.shape[1] * KV_BLOCK


def empty_pages(
    config: DecoderConfig, pages: int, dtype: DTypeLike, quantized: KVQuantization | None = None
) -> tuple[Pages, ...]:
    """Pools of so many pages of keys, or of values, one for each layer; arguments as in `KVCache.empty`.

    Raises:
        ValueError: there is no such quantization, or it does not take the decoder's head size.
    """
    shape = (pages, config.kv_heads, KV_BLOCK, config.head_dim)
    if quantized is None:
        return tuple(jnp.zeros(shape, dtype) for _ in range(config.layers))
    check_kind("KVCache", quantized, config.head_dim)
    return tuple(QuantizedPages.empty(shape, quantized) for _ in range(config.layers))


class Projection(NamedTuple):
    """What a layer gives to attention: projected tokens, and the weights of their norms."""

    qkv: Float[Array, "... N K"]
    """Heads of queries, of keys, and of values."""
    q_norm: Float[Array, "K"] | None
    k_norm: Float[Array, "K"] | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rectangle:
    """The same number of tokens of each request, `[B, T]`, behind those it has in a cache."""

    page_table: Int32[Array, "B p"]
    lengths: Int32[Array, "B"]
    """Tokens that each request has in the cache."""
    counts: Int32[Array, "B"]
    """The requests' own, the rest being padding on the right."""

    @property
    def new_lengths(self) -> Int32[Array, "B"]:
        """Tokens that each request has with these."""
        return jnp.minimum(self.lengths + self.counts, self.page_table.shape[1] * KV_BLOCK)

    def attend(
        self, config: DecoderConfig, window: int | None, tokens: Projection, pages: tuple[Pages, Pages]
    ) -> tuple[Float[Array, "B T H K"], tuple[Pages, Pages]]:
        """Attention of the tokens over their requests, themselves included, and a layer's pages with them in it."""
        where = self.page_table, self.lengths
        q, k, v = _append(config, tokens, *pages, *where, self.counts)
        return ops.attention(q, k, v, *where, self.new_lengths, window=window), (k, v)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed:
    """Tokens of many requests side by side, `[N]`: first one each of requests that decode, then any number each of
    requests that prefill. A token that is not present is computed and belongs nowhere."""

    page_table: Int32[Array, "R p"]
    """Of those that decode, then of those that prefill."""
    request: Int32[Array, "N"]
    """Of each token: a row of the page table."""
    position: Int32[Array, "N"]
    present: Int32[Array, "N"]
    """1, or 0."""
    q_row: Int32[Array, "prefills"]
    """Of those that prefill: the first of their tokens, of all that prefill. See `ops.ragged_attention`."""
    q_length: Int32[Array, "prefills"]
    q_start: Int32[Array, "prefills"]

    def attend(
        self, config: DecoderConfig, window: int | None, tokens: Projection, pages: tuple[Pages, Pages]
    ) -> tuple[Float[Array, "N H K"], tuple[Pages, Pages]]:
        """As `Rectangle.attend`."""
        one_each = tokens._replace(qkv=tokens.qkv[:, None])
        where = self.page_table[self.request], self.position, self.present
        q, k, v = _append(config, one_each, *pages, *where)
        decodes = self.page_table.shape[0] - self.q_row.shape[0]
        outputs = []
        if decodes:
            length = (self.position[:decodes] + 1) * self.present[:decodes]
            where = self.page_table[:decodes], self.position[:decodes], length
            outputs.append(ops.attention(q[:decodes], k, v, *where, window=window)[:, 0])
        if self.q_row.size:
            of_requests = self.q_row, self.q_length, self.q_start, self.q_start + self.q_length
            where = self.page_table[decodes:], *of_requests
            outputs.append(ops.ragged_attention(q[decodes:, 0], k, v, *where, window=window))
        return jnp.concatenate(outputs), (k, v)


def _append(
    config: DecoderConfig,
    tokens: Projection,
    k_pages: Pages,
    v_pages: Pages,
    page_table: Int32[Array, "B p"],
    start: Int32[Array, "B"],
    count: Int32[Array, "B"],
) -> tuple[Array, Pages, Pages]:
    norms = {"q_norm": tokens.q_norm, "k_norm": tokens.k_norm, "norm_eps": config.norm_eps if config.qk_norm else None}
    return ops.qk_rope_append_kv(tokens.qkv, k_pages, v_pages, page_table, start, count, config.rope, **norms)
