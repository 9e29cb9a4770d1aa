"""Qwen3-Next (Qwen Team 2025): gated delta nets, and gated attention in every fourth layer, before mixtures of experts.

Norms store `weight - 1`, but for those behind the delta rule.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from detjax.kv_pages import Queries
from detjax.models.config import DecoderConfig
from detjax.models.family import Family, LayerOptions
from detjax.models.json_object import JsonObject
from detjax.models.parts.attention import AttentionOptions
from detjax.models.parts.delta_net import DeltaNet, DeltaNetOptions
from detjax.models.parts.gated_attention import GatedAttention
from detjax.models.parts.gated_experts import GatedExperts, GatedExpertsOptions
from detjax.models.parts.mlp import GatedMLP, MLPOptions
from detjax.models.parts.norm import RMSNorm
from detjax.models.parts.state import StateDeclaration
from detjax.models.rope_config import read_rope, write_rope
from detjax.ops.rotary import RotaryEmbedding

_LINEAR: Final = "linear_attention"
_FULL: Final = "full_attention"
_NORM_OFFSET: Final = 1.0
_TURNING: Final = "partial_rotary_factor"
_TURNING_SHARE: Final = 0.25
# Releases of transformers have written the number of experts under either name.
_EXPERTS: Final = "num_experts", "num_local_experts"


class Layer(nnx.Module):
    """A gated delta net or gated attention, then experts or an MLP, each after a norm and added to the residual."""

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
        self.attention_norm = RMSNorm(width, eps=eps, dtype=dtype, offset=_NORM_OFFSET)
        if options.layers[index]:
            self.delta_net = DeltaNet(width, options, eps=eps, rngs=rngs, dtype=dtype)
        else:
            self.attention = GatedAttention(width, _attention_options(config), rngs=rngs, dtype=dtype)
        self.mlp_norm = RMSNorm(width, eps=eps, dtype=dtype, offset=_NORM_OFFSET)
        if isinstance(experts, GatedExpertsOptions) and experts.layers[index]:
            self.mlp = GatedExperts(width, experts, config.activation, rngs=rngs, dtype=dtype)
        else:
            mlp = MLPOptions(inner_width=config.intermediate_size, activation=config.activation)
            self.mlp = GatedMLP(width, mlp, rngs=rngs, dtype=dtype)
        self.is_linear = options.layers[index]

    def __call__(self, x: Float[Array, "*N D"], queries: Queries, state: Any) -> tuple[Float[Array, "*N D"], Any]:
        """Returns the residual stream after this layer, and the layer's next state."""
        mixer = self.delta_net if self.is_linear else self.attention
        x, state = mixer(self.attention_norm(x), queries, state, residual=x)
        y = self.mlp_norm(x)
        if isinstance(self.mlp, GatedExperts):
            return self.mlp(y, queries, residual=x), state
        return self.mlp(y, residual=x), state

    @staticmethod
    def state(config: DecoderConfig, index: int) -> StateDeclaration:
        """Returns the declaration of a layer's state: that of the delta rule in slots, or keys and values in pages."""
        assert config.delta is not None
        return config.delta.state if config.delta.layers[index] else _attention_options(config).state


def _attention_options(config: DecoderConfig) -> AttentionOptions:
    return AttentionOptions(
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        rope=config.rope,
        qkv_bias=config.qkv_bias,
        output_bias=config.output_bias,
        qk_norm_eps=config.norm_eps,
        qk_norm_offset=_NORM_OFFSET,
    )


def _read_rope(file: JsonObject, head_dim: int, max_positions: int) -> RotaryEmbedding:
    """The frequencies of the columns that turn: a share of each head that `config.json` says in one of three places."""
    accepted = "a number above 0 and at most 1"
    share = file.optional_number(_TURNING, minimum=0.0, maximum=1.0, accepted=accepted)
    raw = dict(file.raw)
    for key in ("rope_parameters", "rope_scaling"):
        parameters = file.object(key)
        if parameters is not None:
            inner = parameters.optional_number(_TURNING, minimum=0.0, maximum=1.0, accepted=accepted)
            share = share if inner is None else inner
            raw[key] = {name: value for name, value in parameters.raw.items() if name != _TURNING}
    turning = int(head_dim * (_TURNING_SHARE if share is None else share))
    if turning < 2 or turning % 2:
        raise file.error(_TURNING, f"a share of head_dim, which is {head_dim}, that is an even number of columns")
    rope = read_rope(JsonObject(raw, file.source), turning, max_positions)
    return dataclasses.replace(rope, head_dim=head_dim, rotary_dim=turning if turning < head_dim else None)


def _read_options(file: JsonObject, layers: int) -> LayerOptions:
    attention_bias = file.boolean("attention_bias", False)
    delta = DeltaNetOptions(
        key_heads=file.integer("linear_num_key_heads", 16),
        value_heads=file.integer("linear_num_value_heads", 32),
        key_dim=file.integer("linear_key_head_dim", 128),
        value_dim=file.integer("linear_value_head_dim", 128),
        taps=file.integer("linear_conv_kernel_dim", 4),
        layers=_read_layer_types(file, layers),
    )
    if delta.value_heads % delta.key_heads:
        raise file.error("linear_num_value_heads", f"a multiple of linear_num_key_heads, which is {delta.key_heads}")
    return LayerOptions(
        windows=(None,) * layers,
        qk_norm=True,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        experts=_read_experts(file, layers),
        delta=delta,
    )


def _read_layer_types(file: JsonObject, layers: int) -> tuple[bool, ...]:
    """Whether each layer has linear attention."""
    interval, types = file.integer("full_attention_interval", 4), file.get("layer_types")
    if types is None:
        return tuple((index + 1) % interval != 0 for index in range(layers))
    if not isinstance(types, list) or len(types) != layers or any(name not in (_LINEAR, _FULL) for name in types):
        raise file.error("layer_types", f"a list with {_LINEAR} or {_FULL} for each of {layers} layers")
    return tuple(name == _LINEAR for name in types)


def _read_experts(file: JsonObject, layers: int) -> GatedExpertsOptions | None:
    count = file.integer(next((name for name in _EXPERTS if file.get(name) is not None), _EXPERTS[0]), 512, minimum=0)
    dense, step = file.get("mlp_only_layers") or [], file.integer("decoder_sparse_step", 1)
    if not isinstance(dense, list) or not all(isinstance(index, int) for index in dense):
        raise file.error("mlp_only_layers", "a list of integers")
    sparse = tuple(count > 0 and index not in dense and (index + 1) % step == 0 for index in range(layers))
    if not any(sparse):
        return None
    return GatedExpertsOptions(
        experts=count,
        chosen=file.integer("num_experts_per_tok", 10),
        inner_width=file.integer("moe_intermediate_size", 512),
        normalized=file.boolean("norm_topk_prob", True),
        layers=sparse,
        shared_width=file.integer("shared_expert_intermediate_size", 512),
    )


def _write_options(config: DecoderConfig) -> dict[str, Any]:
    delta, experts = config.delta, config.experts
    assert delta is not None
    share = config.rope.turning / config.head_dim
    rope = write_rope(dataclasses.replace(config.rope, rotary_dim=None))
    rope["rope_parameters"] |= {_TURNING: share}
    return {
        "attention_bias": config.qkv_bias,
        "layer_types": [_LINEAR if is_linear else _FULL for is_linear in delta.layers],
        "linear_num_key_heads": delta.key_heads,
        "linear_num_value_heads": delta.value_heads,
        "linear_key_head_dim": delta.key_dim,
        "linear_value_head_dim": delta.value_dim,
        "linear_conv_kernel_dim": delta.taps,
        **rope,
        _TURNING: share,
        **_write_experts(experts if isinstance(experts, GatedExpertsOptions) else None, config.layers),
    }


def _write_experts(experts: GatedExpertsOptions | None, layers: int) -> Mapping[str, Any]:
    if experts is None:
        return {"num_experts": 0, "decoder_sparse_step": 1, "mlp_only_layers": list(range(layers))}
    return {
        "num_experts": experts.experts,
        "num_experts_per_tok": experts.chosen,
        "moe_intermediate_size": experts.inner_width,
        "shared_expert_intermediate_size": experts.shared_width,
        "norm_topk_prob": experts.normalized,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [index for index, is_sparse in enumerate(experts.layers) if not is_sparse],
        "output_router_logits": False,
    }


FAMILY: Final = Family(
    architecture="Qwen3NextForCausalLM",
    model_type="qwen3_next",
    layer=Layer,
    max_positions=32768,
    head_dim=256,
    kv_heads=2,
    norm_offset=_NORM_OFFSET,
    reads=(_TURNING, *_EXPERTS),
    skips=(r"mtp\..*",),
    read_rope=_read_rope,
    read_options=_read_options,
    write_options=_write_options,
)
