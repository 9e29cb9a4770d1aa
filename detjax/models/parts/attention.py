"""Grouped-query attention with rotary embeddings over a paged cache."""

import dataclasses
from typing import Any, ClassVar

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
    local_columns,
    outputs,
    sharded_matmul,
)
from detjax.models.parts.state import PagedKeysAndValues, StateDeclaration
from detjax.operands.kv_pages import KVPages, Queries
from detjax.operands.products import NormalizedRows
from detjax.ops.rotary import RotaryEmbedding


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """The shape and options of an attention part.

    Attributes:
        heads: heads of queries, a multiple of `kv_heads`.
        kv_heads: heads of keys and of values.
        head_dim: the width of a head.
        rope: the frequencies of the rotary embedding.
        window: the number of most recent keys that a query sees, including its own; None: all of them.
        qkv_bias: whether the projections of queries, keys and values have biases.
        output_bias: whether the output projection has a bias.
        qk_norm_eps: epsilon of the RMS norms of each head of queries and keys; None: no such norms.
        qk_norm_offset: what these norms add to their weights.
        wide_qk_norm: whether one norm covers all query heads together, and another one all key heads.
        qkv_bound: the largest absolute value of queries, keys and values before the rotation; None: no bound.
        scale: the factor of scores; None: `1 / sqrt(head_dim)`.
        soft_cap: the bound of scores, which become `cap * tanh(score / cap)`; None: no bound.
        sinks: whether each head has a sink: a logit that takes part in the softmax but has no value.
        interleaved: whether columns that rotate together are adjacent in checkpoints.
        fused: whether checkpoints have the projections of queries, keys and values as one tensor.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rope: RotaryEmbedding
    window: int | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm_eps: float | None = None
    qk_norm_offset: float = 0.0
    wide_qk_norm: bool = False
    qkv_bound: float | None = None
    scale: float | None = None
    soft_cap: float | None = None
    sinks: bool = False
    interleaved: bool = False
    fused: bool = False

    @property
    def q_width(self) -> int:
        """The width of all heads of queries together."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """The width of all heads of keys together, and of all heads of values."""
        return self.kv_heads * self.head_dim

    def shards(self, devices: int) -> tuple[int, int]:
        """Returns the number of shards of the query heads, and of the key and value heads."""
        return head_shards(self.heads, self.kv_heads, devices)

    def attended(self, devices: int) -> OutputSharding:
        """Returns the sharding of the attention outputs of all heads."""
        return OutputSharding((ShardGroup(self.q_width, self.shards(devices)[0]),), -1)

    @property
    def state(self) -> StateDeclaration:
        """The state declaration: keys and values of every token."""
        return PagedKeysAndValues(self.kv_heads, self.head_dim, self.heads)


class Attention(nnx.Module):
    """Grouped-query attention (Ainslie et al. 2023) with rotary positions (Su et al. 2021).

    Weights are `[N, K]`, rows being outputs, as in checkpoints. Queries, keys and values are one weight. Of partly
    rotated heads, the columns of queries and keys have the order of `RotaryEmbedding`, in which scores add them; in
    checkpoints all rotated columns come first.
    """

    PRODUCTS: ClassVar = ("qkv", "output")
    """The parameters that products take in codes as well."""
    QUERY_PARTS: ClassVar = 1
    """Outputs of the query projection per column of a query."""

    def __init__(self, width: int, options: AttentionOptions, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        self.options = options
        rows, has_norms = sum(self._rows), options.qk_norm_eps is not None
        widths = (options.q_width, options.kv_width) if options.wide_qk_norm else (options.head_dim,) * 2
        q_norm, k_norm = (jnp.full(width, 1 - options.qk_norm_offset, dtype) for width in widths)
        self.width = width
        self.qkv = random_weight(rngs, (rows, width), dtype)
        self.qkv_bias = zero_bias(options.qkv_bias, (rows,), dtype)
        self.q_norm = nnx.Param(q_norm) if has_norms else None
        self.k_norm = nnx.Param(k_norm) if has_norms else None
        self.output = random_weight(rngs, (width, options.q_width), dtype)
        self.output_bias = zero_bias(options.output_bias, (width,), dtype)
        self.sinks = zero_bias(options.sinks, (options.heads,), dtype)

    def __call__(
        self,
        x: Float[Array, "*N _"] | NormalizedRows,
        queries: Queries,
        kv: KVPages,
        *,
        residual: Float[Array, "*N D"] | None = None,
    ) -> tuple[Float[Array, "*N D"], KVPages]:
        """Returns the attention of the new tokens and the pages with their keys and values.

        Args:
            x: the normalized hidden states of the new tokens.
            queries: the positions of the new tokens in their requests.
            kv: the layer's pages.
            residual: added to the attention; None: nothing is.
        """
        options, shardings = self.options, self.shardings(devices())
        qkv = sharded_matmul(x, self.qkv[...], sharding=shardings["qkv"], bias=optional(self.qkv_bias))
        norms: dict[str, Any] = {}
        if options.wide_qk_norm:
            qkv = local_columns(self._normalized(gathered(qkv, shardings["qkv"])), shardings["qkv"])
        elif options.qk_norm_eps is not None:
            norms = {"q_norm": optional(self.q_norm), "k_norm": optional(self.k_norm)}
            norms |= {"norm_eps": options.qk_norm_eps, "norm_offset": options.qk_norm_offset}
        if options.qkv_bound is not None:
            qkv = jnp.clip(qkv, -options.qkv_bound, options.qkv_bound)
        qkv = qkv.reshape(*x.shape[:-1], -1, options.head_dim)
        q, kv = ops.qk_rope_append_kv(qkv, kv, queries, options.rope, **norms)
        masking: dict[str, Any] = {"scale": options.scale, "window": options.window, "soft_cap": options.soft_cap}
        o = ops.attention(q, kv, queries, sinks=optional(self.sinks), **masking)
        o = gathered(o.reshape(*x.shape[:-1], -1), options.attended(devices()))
        weight, bias = self.output[...], optional(self.output_bias)
        return gathered_matmul(o, weight, sharding=shardings["output"], bias=bias, residual=residual), kv

    @property
    def input_weight(self) -> Any:
        """The weight by which all inputs are multiplied; see `RMSNorm.for_product`."""
        return self.qkv[...]

    def _normalized(self, qkv: Float[Array, "*N R"]) -> Float[Array, "*N R"]:
        """Normalizes all queries of a token together, and all its keys."""
        options, (q_norm, k_norm) = self.options, (optional(self.q_norm), optional(self.k_norm))
        assert q_norm is not None and k_norm is not None and options.qk_norm_eps is not None
        q, k, v = jnp.split(qkv, (options.q_width, options.q_width + options.kv_width), axis=-1)
        pairs = (q, q_norm), (k, k_norm)
        q, k = (ops.rms_norm(x, w, eps=options.qk_norm_eps, weight_offset=options.qk_norm_offset) for x, w in pairs)
        return jnp.concatenate([q, k, v], axis=-1)

    @property
    def _rows(self) -> tuple[int, ...]:
        """The outputs of the projections of queries, keys and values."""
        return self.QUERY_PARTS * self.options.q_width, self.options.kv_width, self.options.kv_width

    def shardings(self, devices: int) -> dict[str, OutputSharding]:
        """Returns the sharding of each parameter: queries, keys and values by heads."""
        options, output = self.options, outputs(self.width, devices)
        queries, shared = options.shards(devices)
        qkv = OutputSharding(tuple(map(ShardGroup, self._rows, (queries, shared, shared))))
        return {
            "qkv": qkv,
            "qkv_bias": qkv.at(-1),
            "output": output,
            "output_bias": output.at(-1),
            "sinks": OutputSharding((ShardGroup(options.heads, queries),), -1),
        }

    @property
    def tensors(self) -> dict[str, Tensors]:
        """The checkpoint's tensors of each parameter."""
        names, rows = ("qkv_proj",) if self.options.fused else ("q_proj", "k_proj", "v_proj"), self._rows
        order: dict[str, Any] = {"head_order": self._head_order}
        qkv = {"rows": None if self.options.fused else rows, "ordered": sum(rows[:2]), **order}
        return {
            "qkv": Tensors(tuple(f"{name}.weight" for name in names), **qkv),
            "qkv_bias": Tensors(tuple(f"{name}.bias" for name in names), **qkv),
            "q_norm": Tensors(("q_norm.weight",), **order),
            "k_norm": Tensors(("k_norm.weight",), **order),
            "output": Tensors(("o_proj.weight",)),
            "output_bias": Tensors(("o_proj.bias",)),
            "sinks": Tensors(("sinks",)),
        }

    @property
    def _head_order(self) -> tuple[int, ...] | None:
        """The order of a head's columns, by their indices in checkpoints; None: as there."""
        columns, turning = range(self.options.head_dim), self.options.rope.turning
        half, middle = turning // 2, (turning + self.options.head_dim) // 2
        pairs = columns[0:turning:2], columns[1:turning:2]
        first, second = pairs if self.options.interleaved else (columns[:half], columns[half:turning])
        order = (*first, *columns[turning:middle], *second, *columns[middle:])
        return None if order == tuple(columns) else order
