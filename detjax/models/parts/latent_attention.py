"""Multi-head latent attention over a paged cache of latents, in one form for all phases."""

import dataclasses
import functools
import math
from typing import Any, ClassVar, Final

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from detjax import ops
from detjax.models.parts.parameters import Tensors, optional, random_weight, zero_bias
from detjax.models.parts.sharding import (
    OutputSharding,
    ShardGroup,
    devices,
    gathered,
    gathered_matmul,
    head_shards,
    outputs,
    sharded_matmul,
)
from detjax.models.parts.state import PagedLatents
from detjax.operands.accumulated_weight import Weight
from detjax.operands.kv_pages import KVPages, Queries, positions_of_tokens
from detjax.operands.products import NormalizedRows
from detjax.ops.rotary import RotaryEmbedding

LATENT_NORM_EPS: Final = 1e-6
"""Epsilon of the norms of latents: transformers' DeepSeek does not use `rms_norm_eps` for them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentOptions:
    """The shape of latent attention, as `config.json` gives it.

    Attributes:
        q_rank: columns of the latent that queries are made from (`q_lora_rank`); None: the hidden state is used.
        kv_rank: columns of the latent that keys and values are made from (`kv_lora_rank`).
        nope_dim: columns of a head's queries and keys that are not rotated (`qk_nope_head_dim`).
        value_dim: columns of a head's values (`v_head_dim`).
        interleaved: whether adjacent columns are rotated together, and not column `i` with column `i + rope_dim / 2`.
    """

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    value_dim: int
    interleaved: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentAttentionOptions:
    """The shape and options of a latent attention part.

    Attributes:
        heads: heads of queries.
        latent: ranks and widths.
        rope: the frequencies of the rotary embedding. Its head_dim is the number of rotated columns of a head.
        bias: whether the projections to latents and the output projection have biases.
    """

    heads: int
    latent: LatentOptions
    rope: RotaryEmbedding
    bias: bool = False

    @property
    def key_width(self) -> int:
        """The width of a token's single key: its latent, and the rotated columns that all heads share."""
        return self.latent.kv_rank + self.rope.head_dim

    @property
    def scale(self) -> float:
        """The factor of scores."""
        return self.rope.score_scale / math.sqrt(self.latent.nope_dim + self.rope.head_dim)

    @property
    def state(self) -> PagedLatents:
        """The state declaration: one key per token, whose first columns are the latent."""
        return PagedLatents(self.key_width, self.latent.kv_rank)


class LatentAttention(nnx.Module):
    """Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2, section 2.1) in its absorbed form.

    The cache holds one key per token that all heads share: the normalized latent, then the rotated columns. The latent
    is also the value. Each head's key rows of `kv_up` are applied to the queries, and its value rows to the attended
    latents. Mathematically that is attention over the keys and values of each head, but bits differ, so this form
    serves prefill, decode and training.

    Weights are `[N, K]`, rows being outputs, as in checkpoints. `latents` makes the query latent, the key and value
    latent, and the shared columns; `q_up` makes the queries of all heads. `kv_up` has each head's rows for keys, then
    its rows for values.
    """

    PRODUCTS: ClassVar = ("latents", "q_up", "output")
    """The parameters that products take in codes as well."""
    WIDENED: ClassVar = ("kv_up",)
    """The parameters that the contract reads as plain numbers."""

    def __init__(self, width: int, options: LatentAttentionOptions, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        latent, heads = options.latent, options.heads
        rows = (latent.q_rank or 0) + options.key_width
        self.options = options
        self.width = width
        self.latents = random_weight(rngs, (rows, width), dtype)
        self.latents_bias = zero_bias(options.bias, (rows,), dtype)
        self.q_norm = None if latent.q_rank is None else nnx.Param(jnp.ones(latent.q_rank, dtype))
        self.q_up = random_weight(
            rngs, (heads * (latent.nope_dim + options.rope.head_dim), latent.q_rank or width), dtype
        )
        self.kv_norm = nnx.Param(jnp.ones(latent.kv_rank, dtype))
        self.kv_up = random_weight(rngs, (heads * (latent.nope_dim + latent.value_dim), latent.kv_rank), dtype)
        self.output = random_weight(rngs, (width, heads * latent.value_dim), dtype)
        self.output_bias = zero_bias(options.bias, (width,), dtype)

    def __call__(
        self,
        x: Float[Array, "*N D"] | NormalizedRows,
        queries: Queries,
        kv: KVPages,
        *,
        residual: Float[Array, "*N D"],
    ) -> tuple[Float[Array, "*N D"], KVPages]:
        """Returns the attention of the new tokens and the pages with their keys; see `Attention` for the arguments."""
        options, latent, shardings = self.options, self.options.latent, self.shardings(devices())
        latents = ops.matmul(x, self.latents[...], layout="nk", bias=optional(self.latents_bias))
        widths = (latent.q_rank or 0, latent.kv_rank, options.rope.head_dim)
        q_latent, kv_latent, k_rope = jnp.split(latents, (widths[0], widths[0] + widths[1]), axis=-1)
        if self.q_norm is None:
            q_latent = x
        else:
            q_latent = ops.rms_norm(q_latent, self.q_norm[...], eps=LATENT_NORM_EPS)
        kv_latent = ops.rms_norm(kv_latent, self.kv_norm[...], eps=LATENT_NORM_EPS)

        q = sharded_matmul(q_latent, self.q_up[...], sharding=shardings["q_up"])
        q = q.reshape(*x.shape[:-1], -1, latent.nope_dim + options.rope.head_dim)
        q_nope, q_rope = q[..., : latent.nope_dim], q[..., latent.nope_dim :]
        q_rope, k_rope = self._rotated(q_rope, k_rope, queries)
        keys_up, values_up = self._up_projections()
        q = jnp.concatenate([_by_head(q_nope, keys_up, layout="kn"), q_rope], axis=-1)
        kv = ops.append_keys(jnp.concatenate([kv_latent[..., None, :], k_rope], axis=-1), kv, queries)

        o = _by_head(ops.attention(q, kv, queries, scale=options.scale), values_up, layout="nk")
        values = OutputSharding((ShardGroup(options.heads * latent.value_dim, shardings["q_up"].groups[0].shards),), -1)
        o = gathered(o.reshape(*x.shape[:-1], -1), values)
        weight, bias = self.output[...], optional(self.output_bias)
        return gathered_matmul(o, weight, sharding=shardings["output"], bias=bias, residual=residual), kv

    @property
    def input_weight(self) -> Any:
        """The weight by which all inputs are multiplied, if only one is; see `RMSNorm.for_product`."""
        return None if self.q_norm is None else self.latents[...]

    def _rotated(
        self, q: Float[Array, "*N H R"], k: Float[Array, "*N R"], queries: Queries
    ) -> tuple[Float[Array, "*N H R"], Float[Array, "*N 1 R"]]:
        """Rotates columns of queries and of the shared key; in the result, half a row separates pairs."""
        qk = jnp.concatenate([q, k[..., None, :]], axis=-2)
        if self.options.latent.interleaved:
            qk = jnp.concatenate([qk[..., 0::2], qk[..., 1::2]], axis=-1)
        positions, heads = positions_of_tokens(queries, q.shape[-3]), q.shape[-2]
        q, k = ops.qk_rope(qk, positions, self.options.rope, heads=heads, kv_heads=1)
        return q, k

    def _up_projections(self) -> tuple[Weight, Weight]:
        """Each head's rows of `kv_up` for keys, `[H, nope_dim, kv_rank]`, and for values, `[H, value_dim, kv_rank]`."""
        latent = self.options.latent
        width = latent.nope_dim + latent.value_dim

        def rows(part: slice) -> Any:
            # An accumulated weight is sliced together with its sum, whose gradient adds exact zeros for other rows.
            return jax.tree.map(lambda x: x.reshape(-1, width, latent.kv_rank)[:, part], self.kv_up[...])

        return rows(slice(latent.nope_dim)), rows(slice(latent.nope_dim, None))

    def shardings(self, devices: int) -> dict[str, OutputSharding]:
        """Returns the sharding of each parameter: heads are sharded, and every device has all latents."""
        options, latent, output = self.options, self.options.latent, outputs(self.width, devices)
        shards, _ = head_shards(options.heads, options.heads, devices)
        widths = {"q_up": latent.nope_dim + options.rope.head_dim, "kv_up": latent.nope_dim + latent.value_dim}
        by_head = {name: OutputSharding((ShardGroup(options.heads * width, shards),)) for name, width in widths.items()}
        return by_head | {"output": output, "output_bias": output.at(-1)}

    @property
    def tensors(self) -> dict[str, Tensors]:
        """The checkpoint's tensors of each parameter."""
        q_rank, q_up = self.options.latent.q_rank, "q_proj.weight"
        names, rows = ("kv_a_proj_with_mqa",), (self.options.key_width,)
        if q_rank is not None:
            names, rows, q_up = ("q_a_proj", *names), (q_rank, *rows), "q_b_proj.weight"
        return {
            "latents": Tensors(tuple(f"{name}.weight" for name in names), rows),
            "latents_bias": Tensors(tuple(f"{name}.bias" for name in names), rows),
            "q_norm": Tensors(("q_a_layernorm.weight",)),
            "q_up": Tensors((q_up,)),
            "kv_norm": Tensors(("kv_a_layernorm.weight",)),
            "kv_up": Tensors(("kv_b_proj.weight",)),
            "output": Tensors(("o_proj.weight",)),
            "output_bias": Tensors(("o_proj.bias",)),
        }


def _by_head(x: Float[Array, "*N H K"], w: Weight, *, layout: Any) -> Float[Array, "*N H L"]:
    """Multiplies each head's rows by its weight, with the bits of a separate matrix product per head."""
    return jax.vmap(functools.partial(ops.matmul, layout=layout), in_axes=(-2, 0), out_axes=-2)(x, w)
