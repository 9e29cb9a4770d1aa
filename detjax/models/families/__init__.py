"""Families of decoders, one file each, composed of `detjax.models.parts`.

Read `llama` first; most others contain only the differences from it.
"""

from detjax.models.configuration.family import register
from detjax.models.families import (
    deepseek_v3,
    gemma2,
    gemma3,
    glm4,
    glm4_moe,
    gpt_oss,
    granite,
    llama,
    mistral,
    mixtral,
    olmoe,
    phi3,
    qwen2,
    qwen2_5_vl,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
    qwen3_vl,
    qwen3_vl_moe,
    smollm3,
)

register(
    deepseek_v3.FAMILY,
    gemma2.FAMILY,
    gemma3.FAMILY,
    glm4.FAMILY,
    glm4_moe.FAMILY,
    gpt_oss.FAMILY,
    granite.FAMILY,
    llama.FAMILY,
    mistral.FAMILY,
    mixtral.FAMILY,
    olmoe.FAMILY,
    phi3.FAMILY,
    qwen2.FAMILY,
    qwen2_5_vl.FAMILY,
    qwen3.FAMILY,
    qwen3_5.FAMILY,
    qwen3_5.WITH_TOWER,
    qwen3_5_moe.FAMILY,
    qwen3_5_moe.WITH_TOWER,
    qwen3_moe.FAMILY,
    qwen3_next.FAMILY,
    qwen3_vl.FAMILY,
    qwen3_vl_moe.FAMILY,
    smollm3.FAMILY,
)
