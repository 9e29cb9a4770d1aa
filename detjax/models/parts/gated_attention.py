"""Grouped-query attention with gated outputs and heads that are partly rotated."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from detjax import ops
from detjax.models.parts.attention import AttentionOptions
from detjax.models.parts.parameters import Tensors, optional, random_weight, zero_bias
from detjax.models.parts.sharding import (
    OutputSharding,
    ShardGroup,
    devices,
    gathered,
    gathered_matmul,
    outputs,
    sharded_matmul,
)
from detjax.operands.kv_pages import KVPages, Queries


class GatedAttention(nnx.Module):
    """Attention with a sigmoid gate for each column of its output (Qiu et al. 2025), and norms of queries and keys.

    Weights are `[N, K]`, rows being outputs, as in checkpoints. Queries, gates, keys and values are one weight; each
    head's gate follows its query.
    """

    def __init__(self, width: int, options: AttentionOptions, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        rows = 2 * options.q_width + 2 * options.kv_width
        ones = jnp.full(options.head_dim, 1 - options.qk_norm_offset, dtype)
        self.options = options
        self.width = width
        self.qkv = random_weight(rngs, (rows, width), dtype)
        self.qkv_bias = zero_bias(options.qkv_bias, (rows,), dtype)
        self.q_norm = nnx.Param(ones)
        self.k_norm = nnx.Param(ones)
        self.output = random_weight(rngs, (width, options.q_width), dtype)
        self.output_bias = zero_bias(options.output_bias, (width,), dtype)

    def __call__(
        self, x: Float[Array, "*N D"], queries: Queries, kv: KVPages, *, residual: Float[Array, "*N D"]
    ) -> tuple[Float[Array, "*N D"], KVPages]:
        """Returns the attention of the new tokens, added to the residual, and the pages with their keys and values.

        Args:
            x: the normalized hidden states of the new tokens.
            queries: the positions of the new tokens in their requests.
            kv: the layer's pages.
            residual: added to the attention.
        """
        options, leading, shardings = self.options, x.shape[:-1], self.shardings(devices())
        qkv = sharded_matmul(x, self.qkv[...], sharding=shardings["qkv"], bias=optional(self.qkv_bias))
        q, kv_rows = jnp.split(qkv, (shardings["qkv"].groups[0].length,), axis=-1)
        q, gate = jnp.split(q.reshape(*leading, -1, 2 * options.head_dim), 2, axis=-1)
        k, v = jnp.split(kv_rows.reshape(*leading, -1, options.head_dim), 2, axis=-2)
        assert options.qk_norm_eps is not None
        pairs = (q, self.q_norm[...]), (k, self.k_norm[...])
        q, k = (ops.rms_norm(y, w, eps=options.qk_norm_eps, weight_offset=options.qk_norm_offset) for y, w in pairs)
        turning = [self._turning_first(y) for y in (q, k)]
        q, kv = ops.qk_rope_append_kv(jnp.concatenate([*turning, v], axis=-2), kv, queries, options.rope)
        o = ops.sigmoid_gated(ops.attention(q, kv, queries), gate)
        o = gathered(o.reshape(*leading, -1), options.attended(devices()))
        weight, bias = self.output[...], optional(self.output_bias)
        return gathered_matmul(o, weight, sharding=shardings["output"], bias=bias, residual=residual), kv

    def _turning_first(self, x: Float[Array, "*N H K"]) -> Float[Array, "*N H K"]:
        """Reorders the columns of heads as `RotaryEmbedding` wants them: each half begins with its rotated columns.

        In checkpoints all rotated columns come first. Scores add the columns in the order returned here.
        """
        turning, width = self.options.rope.turning, x.shape[-1]
        if turning == width:
            return x
        first, second, rest = jnp.split(x, (turning // 2, turning), axis=-1)
        front, back = jnp.split(rest, 2, axis=-1)
        return jnp.concatenate([first, front, second, back], axis=-1)

    def shardings(self, devices: int) -> dict[str, OutputSharding]:
        """Returns the sharding of each parameter: queries with their gates, keys and values by heads."""
        options, output = self.options, outputs(self.width, devices)
        queries, shared = options.shards(devices)
        keys = ShardGroup(options.kv_width, shared)
        qkv = OutputSharding((ShardGroup(2 * options.q_width, queries), keys, keys))
        return {"qkv": qkv, "qkv_bias": qkv.at(-1), "output": output, "output_bias": output.at(-1)}

    @property
    def tensors(self) -> dict[str, Tensors]:
        """The checkpoint's tensors of each parameter."""
        rows = (2 * self.options.q_width, self.options.kv_width, self.options.kv_width)
        return {
            "qkv": Tensors(("q_proj.weight", "k_proj.weight", "v_proj.weight"), rows),
            "qkv_bias": Tensors(("q_proj.bias", "k_proj.bias", "v_proj.bias"), rows),
            "q_norm": Tensors(("q_norm.weight",)),
            "k_norm": Tensors(("k_norm.weight",)),
            "output": Tensors(("o_proj.weight",)),
            "output_bias": Tensors(("o_proj.bias",)),
        }
