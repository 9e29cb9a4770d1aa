"""Grouped-query attention whose values are normalized, and whose keys and values may be another layer's."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from detjax import ops
from detjax.models.parts.attention import Attention, AttentionOptions
from detjax.models.parts.parameters import Tensors, optional
from detjax.models.parts.sharding import devices, gathered, gathered_matmul, sharded_matmul
from detjax.models.parts.state import PagesOfLayer, StateDeclaration
from detjax.operands.kv_pages import KVPages, Queries, positions_of_tokens
from detjax.operands.products import NormalizedRows


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedKeysOptions:
    """The heads of a decoder's layers without a window, and the layers that have no keys.

    Attributes:
        full_kv_heads: heads of keys and of values in layers without a window.
        full_head_dim: the width of a head in these layers.
        values_from_keys: whether the values of these layers are their projected keys, which are neither normalized as
            keys nor rotated.
        readers: the number of last layers without keys. Each reads the pages of the last layer of its kind, with or
            without a window, before them.
        wide_mlp: whether the MLPs of these last layers have twice the inner width.
    """

    full_kv_heads: int
    full_head_dim: int
    values_from_keys: bool
    readers: int
    wide_mlp: bool

    def source(self, windows: tuple[int | None, ...], index: int) -> int | None:
        """Returns the layer whose pages a layer reads, given the window of each layer; None: its own."""
        first = len(windows) - self.readers
        if index < first:
            return None
        kind = windows[index] is None
        return max(layer for layer in range(first) if (windows[layer] is None) == kind)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedKeysAttentionOptions(AttentionOptions):
    """The shape and options of an attention part with normalized values.

    Attributes:
        values_from_keys: whether the values are the projected keys.
        source: the layer whose pages are read; None: the layer has its own.
    """

    values_from_keys: bool = False
    source: int | None = None

    @property
    def state(self) -> StateDeclaration:
        """The state declaration: keys and values of every token, or the name of the layer that keeps them."""
        return super().state if self.source is None else PagesOfLayer(self.source)


class SharedKeysAttention(Attention):
    """Attention with RMS norms of each head of queries, keys and values; the norm of values has no weight.

    A layer that reads another one's pages has no projections of keys and values.
    """

    options: SharedKeysAttentionOptions

    def __init__(self, width: int, options: SharedKeysAttentionOptions, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        self.options = options
        super().__init__(width, options, rngs=rngs, dtype=dtype)
        if options.source is not None:
            self.k_norm = None

    def __call__(
        self,
        x: Float[Array, "*N D"] | NormalizedRows,
        queries: Queries,
        kv: KVPages,
        *,
        residual: Float[Array, "*N D"] | None = None,
    ) -> tuple[Float[Array, "*N D"], KVPages]:
        """Returns the attention of the new tokens, and the pages; see `Attention`.

        If another layer's pages are read, they must have the new tokens already, and are not changed.
        """
        options, shardings = self.options, self.shardings(devices())
        rows = sharded_matmul(x, self.qkv[...], sharding=shardings["qkv"], bias=optional(self.qkv_bias))
        rows = rows.reshape(*x.shape[:-1], -1, options.head_dim)
        if options.source is None:
            q, kv = self._appended(rows, kv, queries)
        else:
            q = self._queries(rows, queries)
        masking: dict[str, Any] = {"scale": options.scale, "window": options.window, "soft_cap": options.soft_cap}
        o = ops.attention(q, kv, queries, sinks=optional(self.sinks), **masking)
        o = gathered(o.reshape(*x.shape[:-1], -1), options.attended(devices()))
        weight, bias = self.output[...], optional(self.output_bias)
        return gathered_matmul(o, weight, sharding=shardings["output"], bias=bias, residual=residual), kv

    def _appended(
        self, rows: Float[Array, "*N G K"], kv: KVPages, queries: Queries
    ) -> tuple[Float[Array, "*N H K"], KVPages]:
        """Returns the rotated queries, and the pages with the new tokens' keys and values."""
        options = self.options
        assert self.q_norm is not None and self.k_norm is not None and options.qk_norm_eps is not None
        v = rows[..., -kv.kv_heads :, :]
        v = ops.rms_norm(v, jnp.ones(options.head_dim, v.dtype), eps=options.qk_norm_eps)
        qk = rows if options.values_from_keys else rows[..., : -kv.kv_heads, :]
        norms = {"q_norm": self.q_norm[...], "k_norm": self.k_norm[...], "norm_eps": options.qk_norm_eps}
        return ops.qk_rope_append_kv(jnp.concatenate([qk, v], axis=-2), kv, queries, options.rope, **norms)

    def _queries(self, q: Float[Array, "*N H K"], queries: Queries) -> Float[Array, "*N H K"]:
        """Returns the normalized and rotated queries, with the bits that they have next to keys."""
        options = self.options
        assert self.q_norm is not None and options.qk_norm_eps is not None
        q = ops.rms_norm(q, self.q_norm[...], eps=options.qk_norm_eps)
        return ops.rope(q, positions_of_tokens(queries, q.shape[-3]), options.rope)

    @property
    def _rows(self) -> tuple[int, ...]:
        options = self.options
        if options.source is not None:
            return (options.q_width,)
        return options.q_width, options.kv_width, *(() if options.values_from_keys else (options.kv_width,))

    @property
    def _head_order(self) -> None:
        """None: heads have the columns of checkpoints, also if they are partly rotated."""

    @property
    def tensors(self) -> dict[str, Tensors]:
        """The checkpoint's tensors of each parameter."""
        rows = self._rows
        names = ("q_proj", "k_proj", "v_proj")[: len(rows)]
        by_kind = {"qkv": "weight", "qkv_bias": "bias"}
        projections = {name: Tensors(tuple(f"{one}.{kind}" for one in names), rows) for name, kind in by_kind.items()}
        return super().tensors | projections
