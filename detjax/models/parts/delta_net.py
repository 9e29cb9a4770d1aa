"""Linear attention by the gated delta rule."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from detjax import ops
from detjax.models.parts.parameters import Tensors, random_weight
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
from detjax.models.parts.state import DeltaNetInSlots
from detjax.operands.kv_pages import Queries
from detjax.operands.linear_attention_state import DeltaNetState

_LENGTH_EPS = 1e-6
"""Added to the squared lengths of queries and keys, whatever epsilon the norms have."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaNetOptions(DeltaNetInSlots):
    """The shape of a decoder's linear attention layers, which also declares their state.

    Attributes:
        layers: for each layer, whether it has linear attention.
    """

    layers: tuple[bool, ...]


class DeltaNet(nnx.Module):
    """A short convolution, the gated delta rule and a gated norm of its outputs (Yang et al. 2024).

    Weights are `[N, K]`, rows being outputs, as in checkpoints. The rows of `qkvz` are all queries, then all keys, all
    values and all gates; the rows of `ba` give the rates and then the decays.
    """

    PRODUCTS: ClassVar = ("qkvz", "ba", "output")
    """The parameters that products take in codes as well."""

    def __init__(self, width: int, options: DeltaNetOptions, *, eps: float, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        keys, values = options.key_heads * options.key_dim, options.value_heads * options.value_dim
        heads = options.value_heads
        self.options = options
        self.eps = eps
        self.width = width
        self.qkvz = random_weight(rngs, (2 * keys + 2 * values, width), dtype)
        self.ba = random_weight(rngs, (2 * heads, width), dtype)
        self.convolution = random_weight(rngs, (options.channels, 1, options.taps), dtype)
        # From heads that forget slowly to heads that forget fast.
        self.log_rate = nnx.Param(jnp.linspace(-4, 0, heads).astype(dtype))
        self.time_bias = nnx.Param(jnp.ones(heads, dtype))
        self.norm = nnx.Param(jnp.ones(options.value_dim, dtype))
        self.output = random_weight(rngs, (width, values), dtype)

    def __call__(
        self, x: Float[Array, "*N D"], queries: Queries, state: DeltaNetState, *, residual: Float[Array, "*N D"]
    ) -> tuple[Float[Array, "*N D"], DeltaNetState]:
        """Returns the linear attention of the new tokens and the next state; see `Attention` for the arguments."""
        options, leading, shardings = self.options, x.shape[:-1], self.shardings(devices())
        # From here on, heads are this device's.
        key_group, _, value_group, _ = shardings["qkvz"].groups
        keys, values = key_group.length, value_group.length
        heads = keys // options.key_dim
        qkvz = sharded_matmul(x, self.qkvz[...], sharding=shardings["qkvz"])
        qkv, gate = jnp.split(qkvz, (2 * keys + values,), axis=-1)
        # The gates decide what a token leaves in the state for good, so they are not rounded, as logits are not.
        ba = sharded_matmul(x, self.ba[...], sharding=shardings["ba"], out_dtype="float32")
        b, a = jnp.split(ba, 2, axis=-1)
        g, beta = ops.decay_and_rate(a, b, self.log_rate[...], self.time_bias[...])

        qkv, inputs = ops.causal_convolution(qkv, self.convolution[...], state.inputs, queries)
        qk = ops.l2_norm(qkv[..., : 2 * keys].reshape(*leading, 2 * heads, options.key_dim), eps=_LENGTH_EPS)
        v = qkv[..., 2 * keys :].reshape(*leading, -1, options.value_dim)
        q, k = qk[..., :heads, :], qk[..., heads:, :]
        o, rule = ops.gated_delta_rule(q, k, v, g, beta, state.rule, queries)
        o = ops.gated_rms_norm(o, gate.reshape(o.shape), self.norm[...], eps=self.eps).reshape(*leading, values)
        o = gathered(o, OutputSharding((value_group,), -1))
        y = gathered_matmul(o, self.output[...], sharding=shardings["output"], residual=residual)
        return y, DeltaNetState(inputs, rule)

    def shardings(self, devices: int) -> dict[str, OutputSharding]:
        """Returns the sharding of each parameter: by value heads, and the key heads that they share."""
        options = self.options
        values, shared = head_shards(options.value_heads, options.key_heads, devices)
        key_group = ShardGroup(options.key_heads * options.key_dim, shared)
        value_group = ShardGroup(options.value_heads * options.value_dim, values)
        heads = ShardGroup(options.value_heads, values)
        return {
            "qkvz": OutputSharding((key_group, key_group, value_group, value_group)),
            "ba": OutputSharding((heads, heads)),
            "convolution": OutputSharding((key_group, key_group, value_group), -3),
            "log_rate": OutputSharding((heads,), -1),
            "time_bias": OutputSharding((heads,), -1),
            "output": outputs(self.width, devices),
        }

    @property
    def tensors(self) -> dict[str, Tensors]:
        """The checkpoint's tensors of each parameter."""
        options, heads = self.options, self.options.value_heads
        rows = options.channels, heads * options.value_dim
        return {
            "qkvz": Tensors(("in_proj_qkv.weight", "in_proj_z.weight"), rows),
            "ba": Tensors(("in_proj_b.weight", "in_proj_a.weight"), (heads, heads)),
            "convolution": Tensors(("conv1d.weight",)),
            "log_rate": Tensors(("A_log",)),
            "time_bias": Tensors(("dt_bias",)),
            "norm": Tensors(("norm.weight",)),
            "output": Tensors(("out_proj.weight",)),
        }
