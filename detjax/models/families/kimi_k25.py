"""Kimi K2.5 (Kimi Team 2026): Kimi K2's layers, and a vision tower that sees clips of a few frames.

Published files, vLLM's class and transformers' class have different keys for the same numbers. All are read, and all
are written. In a prompt, one token stands for parts of images and of clips.
"""

import dataclasses
import math
from typing import Any, Final

from detjax.models.configuration.config import DecoderConfig
from detjax.models.configuration.json_object import MAX_LAYERS, JsonObject
from detjax.models.families import deepseek_v3
from detjax.models.parts.moonvit import MoonViTOptions

_SIZES: Final = (
    (("vt_hidden_size", "hidden_size"), "width", 1152),
    (("vt_num_attention_heads", "num_attention_heads"), "heads", 16),
    (("vt_num_hidden_layers", "num_hidden_layers"), "blocks", 27),
    (("vt_intermediate_size", "intermediate_size"), "inner_width", 4304),
    (("patch_size",), "patch_size", 14),
    (("init_pos_emb_time", "pos_emb_time"), "most_frames", 4),
)
"""Keys of `vision_config` in published files and in other classes, the field of the options, and the default."""
_SIDES: Final = (("init_pos_emb_height", "pos_emb_height"), ("init_pos_emb_width", "pos_emb_width"))
"""Keys for the rows and the columns of the table of positions."""
_CHOICES: Final = {
    "merge_type": "sd2_tpool",
    "pos_emb_type": "divided_fixed",
    "video_attn_type": "spatial_temporal",
    "mm_projector_type": "patchmerger",
    "projector_hidden_act": "gelu",
    "hidden_act": "gelu_pytorch_tanh",
}
"""Keys of `vision_config` that have one value in all published files."""
_TOKENS: Final = ("media_placeholder_token_id", "image_token_id")
_VIDEO: Final = "<|kimi_k25_video_placeholder|>"
_MODEL_LEVEL_KEYS: Final = (
    *("architectures", "model_type", "dtype", "vision_config", *_TOKENS),
    *("video_placeholder", "projection_hidden_size", "projection_layer_norm_eps"),
)
"""Keys of the whole model's configuration that its text model's lacks or has with another value."""


def _read_options(file: JsonObject, layers: int) -> dict[str, Any]:
    vision = file.object("vision_config") or JsonObject({}, file.source, "vision_config.")
    token = _one(file, _TOKENS, 163605, minimum=0)
    placeholder = file.get("video_placeholder")
    if placeholder is not None and (not isinstance(placeholder, str) or not placeholder):
        raise file.error("video_placeholder", "a text")
    return {
        **deepseek_v3.FAMILY.read_options(file, layers),
        "vision": _read_vision(file, vision),
        "image_token": token,
        "video_token": token,
        "video_text": _VIDEO if placeholder is None else placeholder,
    }


def _read_vision(file: JsonObject, vision: JsonObject) -> MoonViTOptions:
    sizes: dict[str, Any] = {field: _one(vision, keys, default) for keys, field, default in _SIZES}
    width, heads = sizes["width"], sizes["heads"]
    if width % heads or width // heads % 4:
        raise vision.error(_stated(vision, _SIZES[0][0]), f"a multiple of {4 * heads}, 4 times the attention heads")
    if sizes["blocks"] > MAX_LAYERS:
        raise vision.error(_stated(vision, _SIZES[2][0]), f"an integer from 1 to {MAX_LAYERS}")
    side, columns = (_one(vision, keys, 64) for keys in _SIDES)
    if columns != side:
        raise vision.error(_stated(vision, _SIDES[1]), f"{side}, which is {_stated(vision, _SIDES[0])}")
    for key, only in _CHOICES.items():
        vision.choice(key, only, (only,))
    if vision.get("merge_kernel_size") not in (None, [2, 2], (2, 2), 2):
        raise vision.error("merge_kernel_size", "[2, 2]")
    rope = vision.object("rope_parameters") or JsonObject({}, file.source, "vision_config.rope_parameters.")
    rope.choice("rope_type", "axial", ("axial", "default"))
    hidden_size = file.integer("hidden_size")
    for part, key, wanted, meaning in (
        (vision, "mm_hidden_size", width, "the tower's width"),
        (file, "projection_hidden_size", width, "the tower's width"),
        (vision, "text_hidden_size", hidden_size, "the hidden_size of the decoder"),
    ):
        if part.integer(key, wanted) != wanted:
            raise part.error(key, f"{wanted}, {meaning}")
    eps = file.number("projection_layer_norm_eps", 1e-5)
    if vision.number("projector_ln_eps", eps) != eps and file.get("projection_layer_norm_eps") is not None:
        raise vision.error("projector_ln_eps", f"{eps:g}, which is projection_layer_norm_eps")
    return MoonViTOptions(
        **sizes,
        activation="gelu_tanh",
        channels=3,
        temporal_patch_size=1,
        merge_size=2,
        window_size=None,
        full_blocks=tuple(range(sizes["blocks"])),
        output_width=hidden_size,
        theta=rope.number("rope_theta", 10000.0),
        tokens_per_second=None,
        positions=side**2,
        projector_eps=vision.number("projector_ln_eps", eps),
    )


def _one(file: JsonObject, keys: tuple[str, ...], default: int, *, minimum: int = 1) -> int:
    """Returns the integer that a file has under one or several keys.

    Raises:
        CheckpointError: it is out of range, or two keys disagree.
    """
    values = {key: file.integer(key, minimum=minimum) for key in keys if file.get(key) is not None}
    for key, value in values.items():
        first = next(iter(values))
        if value != values[first]:
            raise file.error(key, f"{values[first]}, which is {first}")
    return next(iter(values.values()), default)


def _stated(file: JsonObject, keys: tuple[str, ...]) -> str:
    """Returns the key that a file has, for its errors."""
    return next((key for key in keys if file.get(key) is not None), keys[0])


def _write_options(config: DecoderConfig) -> dict[str, Any]:
    vision = config.vision
    assert isinstance(vision, MoonViTOptions) and vision.positions is not None
    side = math.isqrt(vision.positions)
    return {
        **deepseek_v3.FAMILY.write_options(config),
        **dict.fromkeys(_TOKENS, config.image_token),
        "video_placeholder": config.video_text,
        "projection_hidden_size": vision.width,
        "projection_layer_norm_eps": vision.projector_eps,
        "vision_config": {
            **{key: getattr(vision, field) for keys, field, _ in _SIZES for key in keys},
            **{key: side for keys in _SIDES for key in keys},
            **_CHOICES,
            "model_type": "kimi_k25_vision",
            "merge_kernel_size": [2, 2],
            "mm_hidden_size": vision.width,
            "projector_ln_eps": vision.projector_eps,
            "rope_parameters": {"rope_type": "axial", "rope_theta": vision.theta},
            "text_hidden_size": config.hidden_size,
        },
    }


def _nested(raw: dict[str, Any]) -> dict[str, Any]:
    whole = {key: raw[key] for key in (*_MODEL_LEVEL_KEYS, "tie_word_embeddings")}
    inner = {key: value for key, value in raw.items() if key not in _MODEL_LEVEL_KEYS}
    return whole | {"text_config": inner | {"model_type": "kimi_k2", "dtype": raw["dtype"]}}


_BLOCK: Final = r"model\.vision_tower\.layers\.(\d+)"
FAMILY: Final = dataclasses.replace(
    deepseek_v3.FAMILY,
    architecture="KimiK25ForConditionalGeneration",
    other_architectures=("Kimi_K25ForConditionalGeneration",),
    model_type="kimi_k25",
    other_model_types=(),
    text_types=("kimi_k2", "deepseek_v3"),
    prefixes=(
        ("visual.blocks.", "vision_tower.encoder.blocks."),
        ("visual.final_norm.", "vision_tower.encoder.final_layernorm."),
        ("visual.merger.", "mm_projector."),
        ("visual.", "vision_tower."),
        ("model.", "language_model.model."),
        ("lm_head.", "language_model.lm_head."),
    ),
    renames=(
        (r"model\.language_model\.", "language_model.model."),
        (rf"{_BLOCK}\.norm1\.", r"vision_tower.encoder.blocks.\1.norm0."),
        (rf"{_BLOCK}\.norm2\.", r"vision_tower.encoder.blocks.\1.norm1."),
        (rf"{_BLOCK}\.mlp\.fc1\.", r"vision_tower.encoder.blocks.\1.mlp.fc0."),
        (rf"{_BLOCK}\.mlp\.fc2\.", r"vision_tower.encoder.blocks.\1.mlp.fc1."),
        (rf"{_BLOCK}\.attn\.proj\.", r"vision_tower.encoder.blocks.\1.wo."),
        (rf"{_BLOCK}\.", r"vision_tower.encoder.blocks.\1."),
        (r"model\.vision_tower\.final_layernorm\.", "vision_tower.encoder.final_layernorm."),
        (r"model\.vision_tower\.patch_embed\.pos_emb\.position_embeddings", "vision_tower.patch_embed.pos_emb.weight"),
        (r"model\.vision_tower\.", "vision_tower."),
        (r"model\.mm_projector\.in_proj\.", "mm_projector.proj.0."),
        (r"model\.mm_projector\.out_proj\.", "mm_projector.proj.2."),
        (r"model\.mm_projector\.", "mm_projector."),
        # transformers 5.24 saves these under mixed names.
        (r"language_model\.model\.blocks\.", "language_model.model.layers."),
        (r"vision_tower\.encoder\.patch_embed\.", "vision_tower.patch_embed."),
    ),
    nested=_nested,
    read_options=_read_options,
    write_options=_write_options,
)
