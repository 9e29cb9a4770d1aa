"""Qwen2.5-VL (Bai et al. 2025): Qwen2's layers with three-dimensional positions, and a vision tower.

The layers from `max_window_layers` on may have a sliding window.
"""

import dataclasses
from typing import Any, Final

from detjax.models.configuration.config import DecoderConfig
from detjax.models.configuration.family import Family
from detjax.models.configuration.json_object import JsonObject
from detjax.models.configuration.keys import Key
from detjax.models.configuration.rope_config import read_rope, read_sections, write_rope
from detjax.models.configuration.vision_config import read_vision, write_vision
from detjax.models.configuration.windows import read_windows_of_some_layers, write_windows_of_some_layers
from detjax.models.families.llama import Layer
from detjax.models.parts.vision import VisionOptions
from detjax.ops.rotary import RotaryEmbedding

_THETA: Final = 1_000_000.0
_SECTIONS: Final = (16, 24, 24)
_TOKENS: Final = (
    Key("image_token_id", "image_token", 151655, minimum=0),
    Key("video_token_id", "video_token", 151656, minimum=0),
)


def _read_rope(file: JsonObject, head_dim: int, max_positions: int) -> RotaryEmbedding:
    raw = dict(file.raw)
    for key in ("rope_parameters", "rope_scaling"):
        parameters = file.object(key)
        if parameters is not None:
            known = {name: value for name, value in parameters.raw.items() if name != "mrope_section"}
            types = {name: "default" for name in ("type", "rope_type") if known.get(name) == "mrope"}
            raw[key] = known | types
    rope = read_rope(JsonObject(raw, file.source, file.prefix), head_dim, max_positions, theta=_THETA)
    return dataclasses.replace(rope, sections=read_sections(file, _SECTIONS, head_dim // 2))


def _read_options(file: JsonObject, layers: int) -> dict[str, Any]:
    hidden_size, heads = file.integer("hidden_size"), file.integer("num_attention_heads")
    if file.integer("head_dim", hidden_size // heads) * heads != hidden_size:
        raise file.error("head_dim", f"{hidden_size // heads}, as hidden_size is {hidden_size} with {heads} heads")
    vision = file.object("vision_config") or JsonObject({}, file.source, "vision_config.")
    return {
        "windows": read_windows_of_some_layers(file, layers, first=80),
        "qkv_bias": True,
        "vision": _read_vision(vision, hidden_size),
    }


def _read_vision(file: JsonObject, hidden_size: int) -> VisionOptions:
    shared = read_vision(file, hidden_size, width=3584, blocks=32, patch_size=14)
    window, side = file.integer("window_size", 112), shared["patch_size"] * shared["merge_size"]
    if window < side:
        raise file.error("window_size", f"at least {side}, the pixels of a token")
    full = file.get("fullatt_block_indexes")
    full = [7, 15, 23, 31] if full is None else full
    if not isinstance(full, list) or any(type(index) is not int or not 0 <= index for index in full):
        raise file.error("fullatt_block_indexes", "a list of integers >= 0")
    file.choice("hidden_act", "silu", ("silu",))
    return VisionOptions(
        **shared,
        inner_width=file.integer("intermediate_size", 3420),
        activation="silu",
        window_size=window,
        full_blocks=tuple(sorted({index for index in full if index < shared["blocks"]})),
        tokens_per_second=file.integer("tokens_per_second", 4),
    )


def _write_options(config: DecoderConfig) -> dict[str, Any]:
    vision, sections = config.vision, config.rope.sections
    assert vision is not None and sections is not None
    written = write_rope(config.rope)
    described = written["rope_parameters"] | {"mrope_section": list(sections)}
    # transformers 4 recognizes these positions only by the type "mrope".
    scaling = {"type": "mrope", **(written["rope_scaling"] or {}), "mrope_section": list(sections)}
    return {
        **write_windows_of_some_layers(config.windows),
        "rope_parameters": described,
        "rope_scaling": scaling,
        "vision_config": {
            **write_vision(vision),
            "model_type": "qwen2_5_vl",
            "hidden_act": vision.activation,
            "in_chans": vision.channels,
            "spatial_patch_size": vision.patch_size,
            "window_size": vision.window_size,
            "fullatt_block_indexes": list(vision.full_blocks),
            "tokens_per_second": vision.tokens_per_second,
        },
    }


FAMILY: Final = Family(
    architecture="Qwen2_5_VLForConditionalGeneration",
    model_type="qwen2_5_vl",
    layer=Layer,
    norm_eps=1e-5,
    kv_heads=8,
    max_positions=32768,
    bos=151643,
    eos=151645,
    read_rope=_read_rope,
    keys=_TOKENS,
    read_options=_read_options,
    write_options=_write_options,
)
