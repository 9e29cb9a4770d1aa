"""GLM-4.5 and 4.6 (Z.ai 2025): heads that are rotated in part, and DeepSeek-V3's experts after the first layers."""

from typing import Any, Final

from detjax.models.configuration.config import DecoderConfig
from detjax.models.configuration.family import Family
from detjax.models.configuration.json_object import JsonObject
from detjax.models.configuration.keys import Key
from detjax.models.configuration.rope_config import ROTATED_SHARE, write_partial_rope
from detjax.models.configuration.windows import read_uniform_windows
from detjax.models.families import deepseek_v3, glm4, mixture
from detjax.models.parts.grouped_experts import GroupedExperts


class Layer(mixture.Layer):
    """The layer of decoders with experts, with experts in groups."""

    EXPERTS = GroupedExperts


_DEFAULTS: Final = {"groups": 1, "kept_groups": 1, "inner_width": 1408}
"""Transformers' defaults of the shape of experts."""


def _read_options(file: JsonObject, layers: int) -> dict[str, Any]:
    experts = deepseek_v3.read_experts(file, layers, 128, 1, _DEFAULTS)
    return {"windows": read_uniform_windows(file, layers, "glm4_moe"), "experts": experts}


def _write_options(config: DecoderConfig) -> dict[str, Any]:
    return deepseek_v3.write_experts(config) | write_partial_rope(config.rope)


FAMILY: Final = Family(
    architecture="Glm4MoeForCausalLM",
    model_type="glm4_moe",
    layer=Layer,
    max_positions=131072,
    norm_eps=1e-5,
    kv_heads=8,
    reads=(ROTATED_SHARE, *deepseek_v3.COUNTS),
    skips=deepseek_v3.FAMILY.skips,
    read_rope=glm4.read_rope,
    keys=(Key("attention_bias", "qkv_bias", default=False), Key("use_qk_norm", "qk_norm", default=False)),
    read_options=_read_options,
    write_options=_write_options,
)
