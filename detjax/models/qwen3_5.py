"""Qwen3.5 (Qwen Team 2026): the layers of Qwen3-Next with an MLP in each, and weights that are not grouped by key head.

Published checkpoints are those of a multimodal model. Its positions of text are the same along all axes, so the text
model's rotary embedding is an ordinary one.
"""

import functools
from typing import Final

from detjax.models import qwen3_next
from detjax.models.family import Family, LayerOptions, Multimodal
from detjax.models.json_object import JsonObject
from detjax.models.parts.delta_net import DeltaNet
from detjax.models.parts.gated_experts import GatedExpertsOptions

SKIPS: Final = (r"mtp\..*", r"model\.visual\..*")
"""The tensors that predict further tokens, and those that encode images."""


class Layer(qwen3_next.Layer):
    """The layer of Qwen3-Next, with all queries, keys and values in one tensor and all gates in another."""

    DELTA_NET = DeltaNet


read_rope = functools.partial(qwen3_next.read_rope, passed_over=("mrope_section", "mrope_interleaved"))
"""Reads the rotary embedding, without what is said of the positions of images."""


def read_layers(file: JsonObject, layers: int, experts: GatedExpertsOptions | None = None) -> LayerOptions:
    """Returns the options of the layers.

    Raises:
        CheckpointError: a value is out of range, or one that no published checkpoint has.
    """
    file.choice("mamba_ssm_dtype", "float32", ("float32",))
    file.choice("output_gate_type", "swish", ("swish", "silu"))
    if not file.boolean("attn_output_gate", True):
        raise file.error("attn_output_gate", "true")
    return qwen3_next.read_layers(file, layers, experts)


FAMILY: Final = Family(
    architecture="Qwen3_5ForCausalLM",
    model_type="qwen3_5_text",
    multimodal=Multimodal(architecture="Qwen3_5ForConditionalGeneration", model_type="qwen3_5"),
    layer=Layer,
    max_positions=32768,
    head_dim=256,
    kv_heads=4,
    norm_offset=qwen3_next.NORM_OFFSET,
    reads=(qwen3_next.TURNING,),
    skips=SKIPS,
    read_rope=read_rope,
    read_options=read_layers,
    write_options=qwen3_next.write_layers,
)
