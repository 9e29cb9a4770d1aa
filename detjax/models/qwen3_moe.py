"""Qwen3-MoE (Yang et al. 2025): Qwen3's attention, and experts in place of MLPs in all layers or in some.

A sliding window, if there is one, is that of all layers.
"""

from typing import Any, Final

from detjax.models.config import DecoderConfig
from detjax.models.family import Family, LayerOptions
from detjax.models.json_object import JsonObject
from detjax.models.mixture import Layer
from detjax.models.parts.experts import ExpertsOptions
from detjax.models.windows import first_window, read_full_attention, read_window_of_all_layers

# Releases of transformers have written the number of experts under either name.
_EXPERTS: Final = "num_experts", "num_local_experts"


def _read_options(file: JsonObject, layers: int) -> LayerOptions:
    attention_bias = file.boolean("attention_bias", False)
    has_window = file.boolean("use_sliding_window", False)
    read_windows = read_window_of_all_layers if has_window else read_full_attention
    dense, step = file.get("mlp_only_layers") or [], file.integer("decoder_sparse_step", 1)
    if not isinstance(dense, list) or not all(isinstance(index, int) for index in dense):
        raise file.error("mlp_only_layers", "a list of integers")
    experts = ExpertsOptions(
        experts=file.integer(next((name for name in _EXPERTS if file.get(name) is not None), _EXPERTS[0]), 128),
        chosen=file.integer("num_experts_per_tok", 8),
        inner_width=file.integer("moe_intermediate_size", 768),
        normalized=file.boolean("norm_topk_prob", False),
        layers=tuple(index not in dense and (index + 1) % step == 0 for index in range(layers)),
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
        "num_experts": experts.experts,
        "num_experts_per_tok": experts.chosen,
        "moe_intermediate_size": experts.inner_width,
        "norm_topk_prob": experts.normalized,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [index for index, is_sparse in enumerate(experts.layers) if not is_sparse],
        "output_router_logits": False,
    }


FAMILY: Final = Family(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    layer=Layer,
    kv_heads=4,
    max_positions=32768,
    reads=_EXPERTS,
    read_options=_read_options,
    write_options=_write_options,
)
