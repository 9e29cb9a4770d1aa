"""Qwen3-Next (Qwen Team 2025): gated delta nets, and gated attention in every fourth layer, before mixtures of experts.

Norms store `weight - 1`, except for the norms after the delta rule.
"""

import dataclasses
import functools
from typing import Any, Final

from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from detjax.models.configuration import experts_config
from detjax.models.configuration.config import DecoderConfig
from detjax.models.configuration.family import Family
from detjax.models.configuration.json_object import JsonObject
from detjax.models.configuration.keys import ATTENTION_BIAS, Key, read_keys, write_keys
from detjax.models.configuration.rope_config import ROTATED_SHARE, read_partial_rope, write_partial_rope
from detjax.models.configuration.windows import FULL, check_layer_types
from detjax.models.families import llama
from detjax.models.parts.attention import AttentionOptions
from detjax.models.parts.delta_net import DeltaNet, DeltaNetOptions
from detjax.models.parts.gated_attention import GatedAttention
from detjax.models.parts.gated_experts import GatedExperts, GatedExpertsOptions
from detjax.models.parts.mlp import GatedMLP, MLPOptions
from detjax.models.parts.norm import RMSNorm
from detjax.models.parts.parameters import Tensors
from detjax.models.parts.state import StateDeclaration
from detjax.operands.kv_pages import Queries

_LINEAR: Final = "linear_attention"
NORM_OFFSET: Final = 1.0
"""Added to the weights of all norms except for those after the delta rule."""
_DELTA: Final = (
    Key("linear_num_key_heads", "key_heads", 16),
    Key("linear_num_value_heads", "value_heads", 32),
    Key("linear_key_head_dim", "key_dim", 128),
    Key("linear_value_head_dim", "value_dim", 128),
    Key("linear_conv_kernel_dim", "taps", 4),
)
_CHOSEN: Final = "num_experts_per_tok"
_WIDTHS: Final = (
    Key("moe_intermediate_size", "inner_width", 512),
    Key("shared_expert_intermediate_size", "shared_width", 512),
)


class _DeltaNet(DeltaNet):
    """The gated delta rule with weights grouped by key head, as in checkpoints."""

    @property
    def tensors(self) -> dict[str, Tensors]:
        """The checkpoint's tensors of each parameter."""
        names = {"qkvz": "in_proj_qkvz.weight", "ba": "in_proj_ba.weight"}
        keys, values = self.options.key_heads * self.options.key_dim, self.options.value_heads * self.options.value_dim
        rows = {"qkvz": (keys, keys, values, values), "ba": (self.options.value_heads,) * 2}
        groups = self.options.key_heads
        return super().tensors | {part: Tensors((names[part],), rows[part], groups) for part in names}


class Layer(nnx.Module):
    """A gated delta net or gated attention, then experts or an MLP, each after a norm and added to the residual."""

    DELTA_NET: type[DeltaNet] = _DeltaNet

    CHECKPOINT_NAMES: Final = {
        "attention_norm": "input_layernorm",
        "delta_net": "linear_attn",
        "attention": "self_attn",
        "mlp_norm": "post_attention_layernorm",
        "mlp": "mlp",
    }

    def __init__(self, config: DecoderConfig, index: int, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        width, eps, options, experts = config.hidden_size, config.norm_eps, config.delta, config.experts
        assert options is not None
        self.attention_norm = RMSNorm(width, eps=eps, dtype=dtype, offset=NORM_OFFSET)
        if options.layers[index]:
            self.delta_net = self.DELTA_NET(width, options, eps=eps, rngs=rngs, dtype=dtype)
        else:
            self.attention = GatedAttention(width, _attention_options(config), rngs=rngs, dtype=dtype)
        self.mlp_norm = RMSNorm(width, eps=eps, dtype=dtype, offset=NORM_OFFSET)
        if isinstance(experts, GatedExpertsOptions) and experts.layers[index]:
            self.mlp = GatedExperts(width, experts, config.activation, rngs=rngs, dtype=dtype)
        else:
            mlp = MLPOptions(inner_width=config.intermediate_size, activation=config.activation)
            self.mlp = GatedMLP(width, mlp, rngs=rngs, dtype=dtype)
        self.is_linear = options.layers[index]

    def __call__(self, x: Float[Array, "*N D"], queries: Queries, state: Any) -> tuple[Float[Array, "*N D"], Any]:
        """Returns the residual stream after this layer, and the layer's next state."""
        if self.is_linear:
            x, state = self.delta_net(self.attention_norm(x), queries, state, residual=x)
        else:
            y = self.attention_norm.for_product(x, self.attention.input_weight)
            x, state = self.attention(y, queries, state, residual=x)
        if isinstance(self.mlp, GatedExperts):
            return self.mlp(self.mlp_norm(x), queries, residual=x), state
        return self.mlp(self.mlp_norm.for_product(x, self.mlp.input_weight), residual=x), state

    @staticmethod
    def state(config: DecoderConfig, index: int) -> StateDeclaration:
        """Returns the declaration of a layer's state: the delta rule's in slots, or keys and values in pages."""
        assert config.delta is not None
        return config.delta if config.delta.layers[index] else _attention_options(config).state


def _attention_options(config: DecoderConfig) -> AttentionOptions:
    return dataclasses.replace(llama.attention_options(config, 0), qk_norm_offset=NORM_OFFSET)


read_rope: Final = functools.partial(read_partial_rope, share=0.25)
"""Reads the rotary embedding."""


def read_layers(file: JsonObject, layers: int, experts: GatedExpertsOptions | None) -> dict[str, Any]:
    """Returns the options of layers with gated delta nets or gated attention, and experts or else MLPs.

    Raises:
        CheckpointError: a value is out of range.
    """
    delta = DeltaNetOptions(**read_keys(file, _DELTA), layers=_read_layer_types(file, layers))
    if delta.value_heads % delta.key_heads:
        raise file.error("linear_num_value_heads", f"a multiple of linear_num_key_heads, which is {delta.key_heads}")
    return {"windows": (None,) * layers, "qk_norm": True, "experts": experts, "delta": delta}


def _read_layer_types(file: JsonObject, layers: int) -> tuple[bool, ...]:
    """Returns whether each layer has linear attention."""
    interval, types = file.integer("full_attention_interval", 4), file.get("layer_types")
    if types is None:
        return tuple((index + 1) % interval != 0 for index in range(layers))
    check_layer_types(file, types, layers, _LINEAR)
    return tuple(name == _LINEAR for name in types)


def read_experts(
    file: JsonObject, sparse: tuple[bool, ...], *, count: int, chosen: int, normalized: bool
) -> GatedExpertsOptions:
    """Returns the shape of `count` experts with a gated shared one, in layers that are `sparse`.

    By default a token chooses `chosen` of them.

    Raises:
        CheckpointError: a value is out of range.
    """
    return GatedExpertsOptions(
        experts=count,
        chosen=file.integer(_CHOSEN, chosen),
        normalized=normalized,
        layers=sparse,
        **read_keys(file, _WIDTHS),
    )


def write_layers(config: DecoderConfig) -> dict[str, Any]:
    """Returns the keys of `config.json` for the rotary embedding, the layers and the shape of their experts."""
    delta, experts = config.delta, config.experts
    assert delta is not None
    written = {
        "layer_types": [_LINEAR if is_linear else FULL for is_linear in delta.layers],
        **write_keys(delta, _DELTA),
        **write_partial_rope(config.rope),
    }
    if isinstance(experts, GatedExpertsOptions):
        return written | experts_config.write_experts(experts, (Key(_CHOSEN, "chosen"), *_WIDTHS))
    return written


def _read_options(file: JsonObject, layers: int) -> dict[str, Any]:
    count = experts_config.read_count(file, 512, minimum=0)
    sparse = tuple(count > 0 and is_sparse for is_sparse in experts_config.read_sparse_layers(file, layers))
    normalized = file.boolean("norm_topk_prob", True)
    experts = read_experts(file, sparse, count=count, chosen=10, normalized=normalized) if any(sparse) else None
    return read_layers(file, layers, experts)


def _write_options(config: DecoderConfig) -> dict[str, Any]:
    if config.experts is None:
        return write_layers(config) | {"num_experts": 0}
    normalized = {"norm_topk_prob": config.experts.normalized}
    return write_layers(config) | normalized | experts_config.write_sparse_layers(config.experts.layers)


FAMILY: Final = Family(
    architecture="Qwen3NextForCausalLM",
    model_type="qwen3_next",
    layer=Layer,
    max_positions=32768,
    head_dim=256,
    kv_heads=2,
    norm_offset=NORM_OFFSET,
    reads=(ROTATED_SHARE, *experts_config.COUNTS),
    skips=(r"mtp\..*",),
    read_rope=read_rope,
    keys=ATTENTION_BIAS,
    read_options=_read_options,
    write_options=_write_options,
)
