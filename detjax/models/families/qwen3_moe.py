"""Qwen3-MoE (Yang et al. 2025): Qwen3's attention, and experts in place of MLPs in all layers or in some.

A sliding window, if there is one, is that of all layers.
"""

from typing import Any, Final

from detjax.models.configuration import experts_config
from detjax.models.configuration.config import DecoderConfig
from detjax.models.configuration.family import Family, LayerOptions
from detjax.models.configuration.json_object import JsonObject
from detjax.models.configuration.windows import first_window, read_full_attention, read_window_of_all_layers
from detjax.models.families.mixture import Layer
from detjax.models.parts.experts import ExpertsOptions


def _read_options(file: JsonObject, layers: int) -> LayerOptions:
    attention_bias = file.boolean("attention_bias", False)
    has_window = file.boolean("use_sliding_window", False)
    read_windows = read_window_of_all_layers if has_window else read_full_attention
    experts = ExpertsOptions(
        experts=experts_config.read_count(file, 128),
        chosen=file.integer("num_experts_per_tok", 8),
        inner_width=file.integer("moe_intermediate_size", 768),
        normalized=file.boolean("norm_topk_prob", False),
        layers=experts_config.read_sparse_layers(file, layers),
    )
    return LayerOptions(
        windows=read_windows(file, layers, "qwen3_moe"),
        qk_norm=True,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        experts=experts,
    )


def _write_options(config: DecoderConfig) -> dict[str, Any]:
    experts, window = config.experts, first_window(config.windows)
    assert experts is not None
    return {
        "attention_bias": config.qkv_bias,
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "norm_topk_prob": experts.normalized,
        **experts_config.write_experts(experts),
        **experts_config.write_sparse_layers(experts.layers),
    }


FAMILY: Final = Family(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    layer=Layer,
    kv_heads=4,
    max_positions=32768,
    reads=experts_config.COUNTS,
    read_options=_read_options,
    write_options=_write_options,
)
