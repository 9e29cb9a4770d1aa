"""Qwen3.5 (Qwen Team 2026): the layers of Qwen3-Next, each with an MLP, and weights that are not grouped by key head.

Published checkpoints contain a model with a vision tower: the decoder's keys in `config.json` are in `text_config`, and
positions have three coordinates, which are equal in text.
"""

import dataclasses
import functools
import math
from typing import Any, Final

from detjax.models.configuration.config import DecoderConfig
from detjax.models.configuration.family import Family
from detjax.models.configuration.json_object import JsonObject
from detjax.models.configuration.keys import ATTENTION_BIAS, Key
from detjax.models.configuration.rope_config import read_sections
from detjax.models.configuration.vision_config import read_vision, write_vision
from detjax.models.families import qwen3_next
from detjax.models.parts.delta_net import DeltaNet
from detjax.models.parts.gated_experts import GatedExpertsOptions
from detjax.models.parts.vision import VisionOptions
from detjax.ops.rotary import RotaryEmbedding

PREFIXES: Final = (("model.", "model.language_model."), ("visual.", "model.visual."))
"""Prefixes of tensor names in the decoder, and in checkpoints of the whole model."""
SKIPS: Final = (r"mtp\..*", r"visual\..*")
"""Tensors that predict further tokens or encode images."""
_SECTIONS: Final = (11, 11, 10)
_TOKENS: Final = (
    Key("image_token_id", "image_token", 248056, minimum=0),
    Key("video_token_id", "video_token", 248057, minimum=0),
    Key("vision_start_token_id", "vision_start_token", 248053, minimum=0),
    Key("vision_end_token_id", "vision_end_token", 248054, minimum=0),
)
_TEXT_CONFIG: Final = "text_config"
_MODEL_LEVEL_KEYS: Final = (
    "architectures",
    "model_type",
    "dtype",
    "vision_config",
    *(key.name for key in _TOKENS),
)
"""Keys of the whole model's configuration that its text model's lacks or has with another value."""


class Layer(qwen3_next.Layer):
    """The layer of Qwen3-Next, with queries, keys and values in one tensor and gates in another."""

    DELTA_NET = DeltaNet


read_rope = functools.partial(qwen3_next.read_rope, ignored=("mrope_section", "mrope_interleaved"))
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


# --- the tower --------------------------------------------------------------------------------------------------------


def with_tower(text: Family, architecture: str, model_type: str) -> Family:
    """Returns the family of models that add a vision tower to the text models of the family `text`."""

    def read_options(file: JsonObject, layers: int) -> dict[str, Any]:
        vision = file.object("vision_config") or JsonObject({}, file.source, "vision_config.")
        tower = {"vision": _read_vision(vision, file.integer("hidden_size"))}
        return {**text.read_options(file, layers), **tower}

    def write_options(config: DecoderConfig) -> dict[str, Any]:
        assert config.vision is not None and config.rope.sections is not None
        plain = dataclasses.replace(config.rope, sections=None, interleaved=False)
        written = dict(text.write_options(dataclasses.replace(config, rope=plain)))
        sections = {"mrope_section": list(config.rope.sections), "mrope_interleaved": True}
        vision = _write_vision(config.vision, model_type)
        return written | {
            "rope_parameters": written["rope_parameters"] | sections,
            "vision_config": vision,
        }

    def nested(raw: dict[str, Any]) -> dict[str, Any]:
        whole = {key: raw[key] for key in (*_MODEL_LEVEL_KEYS, "tie_word_embeddings")}
        inner = {key: value for key, value in raw.items() if key not in _MODEL_LEVEL_KEYS}
        return whole | {_TEXT_CONFIG: inner | {"model_type": text.model_type, "dtype": raw["dtype"]}}

    return dataclasses.replace(
        text,
        architecture=architecture,
        model_type=model_type,
        text_family=text,
        skips=SKIPS[:1],
        nested=nested,
        read_rope=_read_rope_of_images,
        keys=(*text.keys, *_TOKENS),
        read_options=read_options,
        write_options=write_options,
    )


def _read_rope_of_images(file: JsonObject, head_dim: int, max_positions: int) -> RotaryEmbedding:
    rope = read_rope(file, head_dim, max_positions)
    for key in ("rope_parameters", "rope_scaling"):
        parameters = file.object(key)
        if parameters is not None and not parameters.boolean("mrope_interleaved", True):
            raise parameters.error("mrope_interleaved", "true")
    return dataclasses.replace(rope, sections=read_sections(file, _SECTIONS, rope.turning // 2), interleaved=True)


def _read_vision(file: JsonObject, hidden_size: int) -> VisionOptions:
    if file.get("deepstack_visual_indexes") not in (None, []):
        raise file.error("deepstack_visual_indexes", "an empty list: rows of inner blocks are not supported")
    file.choice("hidden_act", "gelu_pytorch_tanh", ("gelu_pytorch_tanh",))
    positions = file.integer("num_position_embeddings", 2304)
    if math.isqrt(positions) ** 2 != positions:
        raise file.error("num_position_embeddings", "a square number")
    shared = read_vision(file, hidden_size, width=1152, blocks=27, patch_size=16)
    return VisionOptions(
        **shared,
        inner_width=file.integer("intermediate_size", 4304),
        activation="gelu_tanh",
        window_size=None,
        full_blocks=tuple(range(shared["blocks"])),
        tokens_per_second=None,
        positions=positions,
    )


def _write_vision(vision: VisionOptions, model_type: str) -> dict[str, Any]:
    return {
        **write_vision(vision),
        "model_type": f"{model_type}_vision",
        "hidden_act": "gelu_pytorch_tanh",
        "num_position_embeddings": vision.positions,
    }


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
    prefixes=PREFIXES,
    read_rope=read_rope,
    keys=ATTENTION_BIAS,
    read_options=read_layers,
    write_options=qwen3_next.write_layers,
)
WITH_TOWER: Final = with_tower(FAMILY, "Qwen3_5ForConditionalGeneration", "qwen3_5")
