"""OLMoE (Muennighoff et al. 2024): experts in every layer, and RMS norms of all queries and of all keys of a token."""

import sys
from typing import Any, Final

from detjax.models.configuration.config import DecoderConfig
from detjax.models.configuration.family import Family, LayerOptions
from detjax.models.configuration.json_object import MOST_EXPERTS, JsonObject
from detjax.models.configuration.windows import read_full_attention
from detjax.models.families.mixture import Layer
from detjax.models.parts.experts import ExpertsOptions


def _read_options(file: JsonObject, layers: int) -> LayerOptions:
    attention_bias = file.boolean("attention_bias", False)
    experts = ExpertsOptions(
        experts=file.integer("num_experts", 64, maximum=MOST_EXPERTS),
        chosen=file.integer("num_experts_per_tok", 8),
        inner_width=file.integer("intermediate_size"),
        normalized=file.boolean("norm_topk_prob", False),
        layers=(True,) * layers,
    )
    return LayerOptions(
        windows=read_full_attention(file, layers, "olmoe"),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        experts=experts,
        wide_qk_norm=True,
        qkv_bound=file.optional_number("clip_qkv", minimum=sys.float_info.min, accepted="a finite number > 0, null"),
    )


def _write_options(config: DecoderConfig) -> dict[str, Any]:
    experts = config.experts
    assert experts is not None
    return {
        "attention_bias": config.qkv_bias,
        "clip_qkv": config.qkv_bound,
        "num_experts": experts.experts,
        "num_experts_per_tok": experts.chosen,
        "norm_topk_prob": experts.normalized,
        "output_router_logits": False,
    }


FAMILY: Final = Family(
    architecture="OlmoeForCausalLM",
    model_type="olmoe",
    layer=Layer,
    max_positions=4096,
    norm_eps=1e-5,
    eos=50279,
    reads=("num_experts",),
    read_options=_read_options,
    write_options=_write_options,
)
