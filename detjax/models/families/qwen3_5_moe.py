"""Qwen3.5 with mixtures of experts (Qwen Team 2026): Qwen3.5's layers, each with experts in place of the MLP.

Published checkpoints hold one tensor for all experts of a layer. Saved ones have one per expert, as in transformers.
"""

import dataclasses
from typing import Any, Final

from detjax.models.configuration import experts_config
from detjax.models.configuration.json_object import JsonObject
from detjax.models.families import qwen3_5, qwen3_next


def _read_options(file: JsonObject, layers: int) -> dict[str, Any]:
    count = experts_config.read_count(file, 256)
    experts = qwen3_next.read_experts(file, (True,) * layers, count=count, chosen=8, normalized=True)
    return qwen3_5.read_layers(file, layers, experts)


FAMILY: Final = dataclasses.replace(
    qwen3_5.FAMILY,
    architecture="Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    kv_heads=2,
    # No layer has a separate MLP; this is the expert that every token goes through.
    intermediate_size=("shared_expert_intermediate_size", 512),
    reads=(qwen3_next.ROTATED_SHARE, *experts_config.COUNTS),
    read_options=_read_options,
)
WITH_TOWER: Final = qwen3_5.with_tower(FAMILY, "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe")
