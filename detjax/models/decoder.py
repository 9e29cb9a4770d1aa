"""The decoder: one definition of the network for prefill, decode and training."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, overload

import jax
import jax.numpy as jnp
from detjax.models.config import DecoderConfig
from detjax.options import KVQuantization
from detjax.rounding import rounded
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Float32, Int, PyTree

from detjax import compilation, ops
from detjax.kv_pages import KVPages, Pages, Queries
from detjax.models.cache import KVCache, Packed, State, empty_state

if TYPE_CHECKING:
    from detjax.models.config import GenerationDefaults


class Layer(nnx.Module):
    """One block: attention and a gated MLP, each after an RMS norm and added to the residual stream.

    Weights are `[N, K]`, rows being outputs, as checkpoints hold them. Queries, keys and values are one weight; gate
    and up are stacked.
    """

    def __init__(self, config: DecoderConfig, window: int | None, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        D, F, K = config.hidden_size, config.intermediate_size, config.head_dim
        q_width, kv_width = config.heads * K, config.kv_heads * K

        def weight(*shape: int) -> nnx.Param[Array]:
            return nnx.Param(_random(rngs, shape, dtype))

        def bias(present: bool, *shape: int) -> nnx.Param[Array] | None:
            return nnx.Param(jnp.zeros(shape, dtype)) if present else None

        def norm(size: int) -> nnx.Param[Array]:
            return nnx.Param(jnp.ones(size, dtype))

        self.config = config
        self.window = window
        self.attention_norm = norm(D)
        self.qkv = weight(q_width + 2 * kv_width, D)
        self.qkv_bias = bias(config.qkv_bias, q_width + 2 * kv_width)
        self.q_norm = norm(K) if config.qk_norm else None
        self.k_norm = norm(K) if config.qk_norm else None
        self.output = weight(D, q_width)
        self.output_bias = bias(config.output_bias, D)
        self.mlp_norm = norm(D)
        self.gate_up = weight(2, F, D)
        self.gate_up_bias = bias(config.mlp_bias, 2, F)
        self.down = weight(D, F)
        self.down_bias = bias(config.mlp_bias, D)

    def __call__(self, x: Float[Array, "*N D"], queries: Queries, kv: KVPages) -> tuple[Float[Array, "*N D"], KVPages]:
        """Returns the residual stream after this layer, and the layer's pages with the new keys and values in them."""
        y = ops.rms_norm(x, self.attention_norm[...], eps=self.config.norm_eps)
        y, kv = self.attention(y, queries, kv)
        x = ops.matmul(y, self.output[...], layout="nk", bias=_optional(self.output_bias), residual=x)
        y = ops.rms_norm(x, self.mlp_norm[...], eps=self.config.norm_eps)
        y = ops.matmul(
            y,
            self.gate_up[...],
            layout="nk",
            bias=_optional(self.gate_up_bias),
            activation=self.config.activation,
            gated=True,
        )
        x = ops.matmul(y, self.down[...], layout="nk", bias=_optional(self.down_bias), residual=x)
        return x, kv

    def attention(
        self, x: Float[Array, "*N D"], queries: Queries, kv: KVPages
    ) -> tuple[Float[Array, "*N HK"], KVPages]:
        """Returns attention of the new tokens over their requests' caches, the new tokens included."""
        config = self.config
        qkv = ops.matmul(x, self.qkv[...], layout="nk", bias=_optional(self.qkv_bias))
        qkv = qkv.reshape(*x.shape[:-1], config.heads + 2 * config.kv_heads, config.head_dim)
        norms: dict[str, Any] = {"q_norm": _optional(self.q_norm), "k_norm": _optional(self.k_norm)}
        norms["norm_eps"] = config.norm_eps if config.qk_norm else None
        q, kv = ops.qk_rope_append_kv(qkv, kv, queries, config.rope, **norms)
        o = ops.attention(q, kv, queries, window=self.window)
        return o.reshape(*x.shape[:-1], config.heads * config.head_dim), kv


class Decoder(nnx.Module):
    """A decoder-only transformer of the Llama family: Qwen3, Qwen2, Llama 3, Mistral.

    Attributes:
        config: shape and options.
        generation_defaults: what the checkpoint says of generation, or None.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32) -> None:
        """A decoder with random weights of the dtype given."""
        self.config = config
        self.generation_defaults: GenerationDefaults | None = None
        self.embedding = nnx.Param(_random(rngs, (config.vocab_size, config.hidden_size), dtype))
        self.layers = nnx.List([Layer(config, window, rngs=rngs, dtype=dtype) for window in config.windows])
        self.final_norm = nnx.Param(jnp.ones(config.hidden_size, dtype))
        tied = config.tied_embeddings
        self.lm_head = None if tied else nnx.Param(_random(rngs, (config.vocab_size, config.hidden_size), dtype))

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of weights, activations and cache."""
        return self.embedding[...].dtype

    @overload
    def __call__(self, tokens: Int[Array, "B T"]) -> Float32[Array, "B T V"]: ...
    @overload
    def __call__(
        self, tokens: Int[Array, "B T"], cache: KVCache, counts: Int[Array, "B"] | None = None
    ) -> tuple[Float32[Array, "B T V"], KVCache]: ...
    def __call__(
        self, tokens: Int[Array, "B T"], cache: KVCache | None = None, counts: Int[Array, "B"] | None = None
    ) -> Float32[Array, "B T V"] | tuple[Float32[Array, "B T V"], KVCache]:
        """Logits of each token's successor; with a cache, also the cache with these tokens in it.

        Args:
            tokens: ids within the vocabulary. Each request's come behind those it has in the cache.
            cache: default: none, the tokens are whole requests from position 0 on, as in training.
            counts: how many of the tokens are each request's own, the rest being padding on the right; default: all.
        """
        hidden, written = self.hidden(tokens, cache, counts)
        return self.logits(hidden) if cache is None else (self.logits(hidden), written)

    def hidden(
        self, tokens: Int[Array, "B T"], cache: KVCache | None = None, counts: Int[Array, "B"] | None = None
    ) -> tuple[Float[Array, "B T D"], KVCache]:
        """The normalized last hidden states, and the cache with the tokens in it; arguments as in `__call__`."""
        batch, length = tokens.shape
        cache = KVCache.empty(self.config, batch, length, self.dtype) if cache is None else cache
        counts = jnp.full(batch, length, jnp.int32) if counts is None else counts.astype(jnp.int32)
        queries = cache.next_queries(counts)
        x, state = self.hidden_states(tokens, queries, cache.state)
        return x, dataclasses.replace(cache, state=state, lengths=queries.length)

    def hidden_states(
        self, tokens: Int[Array, "*N"], queries: Queries, state: State
    ) -> tuple[Float[Array, "*N D"], State]:
        """Returns the normalized last hidden states, and the layers' state with the tokens in it.

        Args:
            tokens: ids within the vocabulary, `[B, T]` or packed, `[N]`.
            queries: the requests that the tokens belong to, and where those lie in the state.
            state: what the layers keep; see `empty_state`.
        """
        x = ops.embed(tokens, self.embedding[...])
        written = []
        for layer, layer_state in zip(self.layers, state, strict=True):
            graph, weights = nnx.split(layer)
            x, layer_state = _layer(graph, weights, x, queries, layer_state)
            written.append(layer_state)
        return ops.rms_norm(x, self.final_norm[...], eps=self.config.norm_eps), tuple(written)

    def empty_state(self, num_pages: int, kv_quantization: KVQuantization | None = None) -> State:
        """Returns what the layers keep of requests that share so many pages of `contract.KV_BLOCK` tokens.

        Raises:
            ValueError: the quantization does not exist, or does not take the head size.
        """
        return empty_state(self.config, num_pages, self.dtype, kv_quantization)

    def through_layers(self, tokens: Array, where: Packed, k: tuple[Pages, ...], v: tuple[Pages, ...]):
        # The engine's old call; see the end of models/cache.py.
        x, state = self.hidden_states(tokens, where.queries(), tuple(map(KVPages, k, v)))
        return x, tuple(kv.k for kv in state), tuple(kv.v for kv in state)

    def logits(self, hidden: Float[Array, "*B D"]) -> Float32[Array, "*B V"]:
        """Logits of the hidden states given."""
        head = self.embedding if self.lm_head is None else self.lm_head
        return ops.matmul(hidden, head[...], layout="nk", out_dtype=jnp.float32)


@functools.partial(compilation.jit, static_argnums=0)
def _layer(
    graph: nnx.GraphDef[Layer],
    weights: PyTree[Array],
    x: Float[Array, "*N D"],
    queries: Queries,
    state: KVPages,
) -> tuple[Float[Array, "*N D"], KVPages]:
    """Runs a layer as a program of its own, so that layers that differ in their weights alone are traced once."""
    return nnx.merge(graph, weights)(x, queries, state)


def _random(rngs: nnx.Rngs, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Normal weights that keep the variance of what goes through them."""
    return _normal(rngs.params(), shape, jnp.dtype(dtype))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key: Array, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
    return rounded(jax.random.normal(key, shape, jnp.float32) * shape[-1] ** -0.5, dtype)


def _optional(parameter: nnx.Param[Array] | None) -> Array | None:
    return None if parameter is None else parameter[...]
