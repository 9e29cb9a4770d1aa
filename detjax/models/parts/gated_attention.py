"""Grouped-query attention with gated outputs and heads that are partly rotated."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from detjax import ops
from detjax.models.parts.attention import Attention
from detjax.models.parts.parameters import optional
from detjax.models.parts.sharding import devices, gathered, gathered_matmul, sharded_matmul
from detjax.operands.kv_pages import KVPages, Queries
from detjax.operands.products import NormalizedRows


class GatedAttention(Attention):
    """Attention with a sigmoid gate for each column of its output (Qiu et al. 2025), and norms of queries and keys.

    Weights are `[N, K]`, rows being outputs, as in checkpoints. Queries, gates, keys and values are one weight; each
    head's gate follows its query.
    """

    QUERY_PARTS = 2

    def __call__(
        self,
        x: Float[Array, "*N D"] | NormalizedRows,
        queries: Queries,
        kv: KVPages,
        *,
        residual: Float[Array, "*N D"] | None = None,
    ) -> tuple[Float[Array, "*N D"], KVPages]:
        """Returns the gated attention of the new tokens and the pages with their keys; see `Attention`."""
        options, leading, shardings = self.options, x.shape[:-1], self.shardings(devices())
        qkv = sharded_matmul(x, self.qkv[...], sharding=shardings["qkv"], bias=optional(self.qkv_bias))
        q, kv_rows = jnp.split(qkv, (shardings["qkv"].groups[0].length,), axis=-1)
        q, gate = jnp.split(q.reshape(*leading, -1, 2 * options.head_dim), 2, axis=-1)
        k, v = jnp.split(kv_rows.reshape(*leading, -1, options.head_dim), 2, axis=-2)
        assert options.qk_norm_eps is not None and self.q_norm is not None and self.k_norm is not None
        pairs = (q, self.q_norm[...]), (k, self.k_norm[...])
        q, k = (ops.rms_norm(y, w, eps=options.qk_norm_eps, weight_offset=options.qk_norm_offset) for y, w in pairs)
        rotated_first = [self._rotated_first(y) for y in (q, k)]
        q, kv = ops.qk_rope_append_kv(jnp.concatenate([*rotated_first, v], axis=-2), kv, queries, options.rope)
        o = ops.sigmoid_gated(ops.attention(q, kv, queries), gate)
        o = gathered(o.reshape(*leading, -1), options.attended(devices()))
        weight, bias = self.output[...], optional(self.output_bias)
        return gathered_matmul(o, weight, sharding=shardings["output"], bias=bias, residual=residual), kv

    @property
    def _head_order(self) -> None:
        """None: heads have the columns of checkpoints until they have been normalized."""

    def _rotated_first(self, x: Float[Array, "*N H K"]) -> Float[Array, "*N H K"]:
        """Reorders the columns of heads as `RotaryEmbedding` wants them: each half begins with its rotated columns.

        In checkpoints all rotated columns come first. Scores add the columns in the order returned here.
        """
        turning, width = self.options.rope.turning, x.shape[-1]
        if turning == width:
            return x
        first, second, rest = jnp.split(x, (turning // 2, turning), axis=-1)
        front, back = jnp.split(rest, 2, axis=-1)
        return jnp.concatenate([first, front, second, back], axis=-1)
