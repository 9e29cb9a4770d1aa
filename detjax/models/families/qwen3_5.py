"""Qwen3.5 (Qwen Team 2026): the layers of Qwen3-Next, each with an MLP, and weights that are not grouped by key head.

Published checkpoints contain a model with a vision tower: the decoder's keys in `config.json` are in `text_config`, and
positions have three coordinates, which are equal in text.
"""

import dataclasses
import functools
from typing import Any, Final

from detjax.models.configuration.family import Family
from detjax.models.configuration.json_object import JsonObject
from detjax.models.configuration.keys import ATTENTION_BIAS, Key
from detjax.models.families import qwen3_next, qwen_tower
from detjax.models.parts.delta_net import DeltaNet
from detjax.models.parts.gated_experts import GatedExpertsOptions

SKIPS: Final = (r"mtp\..*", r"visual\..*")
"""Tensors that predict further tokens or encode images."""
_TOWER: Final = qwen_tower.Tower(
    sections=(11, 11, 10),
    tokens=(
        Key("image_token_id", "image_token", 248056, minimum=0),
        Key("video_token_id", "video_token", 248057, minimum=0),
        Key("vision_start_token_id", "vision_start_token", 248053, minimum=0),
        Key("vision_end_token_id", "vision_end_token", 248054, minimum=0),
    ),
    deepstack=None,
)
"""The tower, and the places of images."""


class Layer(qwen3_next.Layer):
    """The layer of Qwen3-Next, with queries, keys and values in one tensor and gates in another."""

    DELTA_NET = DeltaNet


read_rope = functools.partial(qwen3_next.read_rope, ignored=qwen_tower.ROPE_KEYS)
"""Reads the rotary embedding, except for the positions of images."""


def read_layers(file: JsonObject, layers: int, experts: GatedExpertsOptions | None = None) -> dict[str, Any]:
    """Returns the options of the layers.

    Raises:
        CheckpointError: a value is out of range, or occurs in no published checkpoint.
    """
    file.choice("mamba_ssm_dtype", "float32", ("float32",))
    file.choice("output_gate_type", "swish", ("swish", "silu"))
    if not file.boolean("attn_output_gate", True):
        raise file.error("attn_output_gate", "true")
    return qwen3_next.read_layers(file, layers, experts)


FAMILY: Final = Family(
    architecture="Qwen3_5ForCausalLM",
    model_type="qwen3_5_text",
    layer=Layer,
    max_positions=32768,
    head_dim=256,
    kv_heads=4,
    norm_offset=qwen3_next.NORM_OFFSET,
    reads=(qwen3_next.ROTATED_SHARE,),
    skips=SKIPS,
    prefixes=qwen_tower.PREFIXES,
    read_rope=read_rope,
    keys=ATTENTION_BIAS,
    read_options=read_layers,
    write_options=qwen3_next.write_layers,
)


def with_tower(text: Family, architecture: str, model_type: str) -> Family:
    """Returns the family of models that add a vision tower to the text models of the family `text`."""
    return dataclasses.replace(
        qwen_tower.with_tower(text, _TOWER, architecture, model_type), text_family=text, skips=SKIPS[:1]
    )


WITH_TOWER: Final = with_tower(FAMILY, "Qwen3_5ForConditionalGeneration", "qwen3_5")
