"""Qwen3.5 with mixtures of experts (Qwen Team 2026): Qwen3.5's layers, each with experts in place of the MLP.

Published checkpoints hold one tensor for all experts of a layer. Saved ones have one per expert, as in transformers.
"""

from typing import Any, Final

from detjax.models.configuration import experts_config
from detjax.models.configuration.family import Family
from detjax.models.configuration.json_object import JsonObject
from detjax.models.configuration.keys import ATTENTION_BIAS
from detjax.models.families import qwen3_5, qwen3_next

_SHARED_WIDTH: Final = "shared_expert_intermediate_size"


def _read_options(file: JsonObject, layers: int) -> dict[str, Any]:
    count = experts_config.read_count(file, 256)
    experts = qwen3_next.read_experts(file, (True,) * layers, count=count, chosen=8, normalized=True)
    return qwen3_5.read_layers(file, layers, experts)


FAMILY: Final = Family(
    architecture="Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    layer=qwen3_5.Layer,
    max_positions=32768,
    head_dim=256,
    kv_heads=2,
    # No layer has a separate MLP; this is the expert that every token goes through.
    intermediate_size=(_SHARED_WIDTH, 512),
    norm_offset=qwen3_next.NORM_OFFSET,
    reads=(qwen3_next.TURNING, *experts_config.COUNTS),
    skips=qwen3_5.SKIPS,
    prefixes=qwen3_5.PREFIXES,
    read_rope=qwen3_5.read_rope,
    keys=ATTENTION_BIAS,
    read_options=_read_options,
    write_options=qwen3_next.write_layers,
)
WITH_TOWER: Final = qwen3_5.with_tower(FAMILY, "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe")
