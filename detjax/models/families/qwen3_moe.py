"""Qwen3-MoE (Yang et al. 2025): Qwen3's attention, and experts in place of MLPs in all layers or in some.

A sliding window, if any, applies to all layers.
"""

from typing import Any, Final

from detjax.models.configuration import experts_config
from detjax.models.configuration.config import DecoderConfig
from detjax.models.configuration.family import Family
from detjax.models.configuration.json_object import JsonObject
from detjax.models.configuration.keys import ATTENTION_BIAS, Key, read_keys
from detjax.models.configuration.windows import first_window, read_uniform_windows
from detjax.models.families.mixture import Layer
from detjax.models.parts.experts import ExpertsOptions

_EXPERTS: Final = (
    Key("num_experts_per_tok", "chosen", 8),
    Key("moe_intermediate_size", "inner_width", 768),
    Key("norm_topk_prob", "normalized", default=False),
)


def _read_options(file: JsonObject, layers: int) -> dict[str, Any]:
    has_window = file.boolean("use_sliding_window", False)
    windows = read_uniform_windows(file, layers, "qwen3_moe", has_window=has_window)
    experts = ExpertsOptions(
        experts=experts_config.read_count(file, 128),
        **read_keys(file, _EXPERTS),
        layers=experts_config.read_sparse_layers(file, layers),
    )
    return {"windows": windows, "qk_norm": True, "experts": experts}


def _write_options(config: DecoderConfig) -> dict[str, Any]:
    experts, window = config.experts, first_window(config.windows)
    assert experts is not None
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        **experts_config.write_experts(experts, _EXPERTS),
        **experts_config.write_sparse_layers(experts.layers),
    }


FAMILY: Final = Family(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    layer=Layer,
    kv_heads=4,
    max_positions=32768,
    reads=experts_config.COUNTS,
    keys=ATTENTION_BIAS,
    read_options=_read_options,
    write_options=_write_options,
)
