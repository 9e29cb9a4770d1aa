"""Qwen2.5-VL (Bai et al. 2025): Qwen2's layers under positions of three coordinates, and a vision tower.

The layers from `max_window_layers` on may have a sliding window.
"""

import dataclasses
from typing import Any, Final

from detjax.models.config import DecoderConfig
from detjax.models.family import Family, LayerOptions
from detjax.models.json_object import JsonObject
from detjax.models.llama import Layer
from detjax.models.parts.vision import VisionOptions
from detjax.models.rope_config import read_rope, write_rope
from detjax.models.windows import read_windows_of_some_layers, write_windows_of_some_layers
from detjax.ops.rotary import RotaryEmbedding

_THETA: Final = 1_000_000.0
_SECTIONS: Final = (16, 24, 24)
_IMAGE_TOKEN: Final = 151655
_TEXT: Final = "text_config"


def _decoder_of(file: JsonObject) -> JsonObject:
    """The keys of the decoder, which published files have beside the tower's and transformers 5 in an object."""
    text = file.object(_TEXT)
    if text is None:
        return file
    raw = {key: value for key, value in file.raw.items() if key != _TEXT}
    # The object has a model_type and a dtype of its own, and transformers 4 wrote tie_word_embeddings there alone.
    tied = raw.get("tie_word_embeddings") or text.raw.get("tie_word_embeddings")
    kept = {key: raw[key] for key in ("architectures", "model_type", "dtype", "torch_dtype") if key in raw}
    return JsonObject({**raw, **text.raw, **kept, "tie_word_embeddings": tied}, file.source)


def _read_rope(file: JsonObject, head_dim: int, max_positions: int) -> RotaryEmbedding:
    raw, sections = dict(file.raw), None
    for key in ("rope_parameters", "rope_scaling"):
        parameters = file.object(key)
        if parameters is None:
            continue
        given = parameters.get("mrope_section")
        if given is not None:
            _check_sections(parameters, given, head_dim)
            if sections not in (None, tuple(given)):
                raise file.error("rope_scaling", "the mrope_section that rope_parameters has; remove the wrong one")
            sections = tuple(given)
        known = {name: value for name, value in parameters.raw.items() if name != "mrope_section"}
        types = {name: "default" for name in ("type", "rope_type") if known.get(name) == "mrope"}
        raw[key] = known | types
    if sections is None:
        sections = _SECTIONS
        _check_sections(JsonObject({"mrope_section": list(sections)}, file.source, "rope_scaling."), sections, head_dim)
    rope = read_rope(JsonObject(raw, file.source, file.prefix), head_dim, max_positions, theta=_THETA)
    return dataclasses.replace(rope, sections=sections)


def _check_sections(parameters: JsonObject, sections: Any, head_dim: int) -> None:
    is_list = isinstance(sections, list | tuple) and all(type(size) is int and size > 0 for size in sections)
    if not is_list or len(sections) != 3 or 2 * sum(sections) != head_dim:
        raise parameters.error("mrope_section", f"3 numbers that add up to {head_dim // 2}, half of a head's width")


def _read_options(file: JsonObject, layers: int) -> LayerOptions:
    hidden_size, heads = file.integer("hidden_size"), file.integer("num_attention_heads")
    if file.integer("head_dim", hidden_size // heads) * heads != hidden_size:
        raise file.error("head_dim", f"{hidden_size // heads}, as hidden_size is {hidden_size} with {heads} heads")
    return LayerOptions(
        windows=read_windows_of_some_layers(file, layers, first=80),
        qkv_bias=True,
        vision=_read_vision(file.object("vision_config") or JsonObject({}, file.source, "vision_config."), hidden_size),
        image_token=file.integer("image_token_id", _IMAGE_TOKEN, minimum=0),
    )


def _read_vision(file: JsonObject, hidden_size: int) -> VisionOptions:
    blocks, width, heads = file.integer("depth", 32), file.integer("hidden_size", 3584), file.integer("num_heads", 16)
    if width % heads or width // heads % 4:
        raise file.error("hidden_size", f"a multiple of {4 * heads}, 4 times num_heads")
    patch, merge = file.integer("patch_size", 14), file.integer("spatial_merge_size", 2)
    window = file.integer("window_size", 112)
    if window < patch * merge:
        raise file.error("window_size", f"at least {patch * merge}, the pixels of a token")
    if file.integer("in_channels", file.integer("in_chans", 3)) != 3:
        raise file.error("in_channels", "3")
    if file.integer("out_hidden_size", 3584) != hidden_size:
        raise file.error("out_hidden_size", f"{hidden_size}, the hidden_size of the decoder")
    full = file.get("fullatt_block_indexes")
    full = [7, 15, 23, 31] if full is None else full
    if not isinstance(full, list) or any(type(index) is not int or not 0 <= index for index in full):
        raise file.error("fullatt_block_indexes", "a list of integers >= 0")
    file.choice("hidden_act", "silu", ("silu",))
    rope = file.object("rope_parameters") or JsonObject({}, file.source, "vision_config.rope_parameters.")
    rope.choice("rope_type", "axial", ("axial", "default"))
    return VisionOptions(
        width=width,
        inner_width=file.integer("intermediate_size", 3420),
        blocks=blocks,
        heads=heads,
        activation="silu",
        channels=3,
        patch_size=patch,
        temporal_patch_size=file.integer("temporal_patch_size", 2),
        merge_size=merge,
        window_size=window,
        full_blocks=tuple(sorted({index for index in full if index < blocks})),
        output_width=hidden_size,
        theta=rope.number("rope_theta", 10000.0),
        tokens_per_second=file.integer("tokens_per_second", 4),
    )


def _write_options(config: DecoderConfig) -> dict[str, Any]:
    vision, sections = config.vision, config.rope.sections
    assert vision is not None and sections is not None
    written = write_rope(config.rope)
    described = written["rope_parameters"] | {"mrope_section": list(sections)}
    # transformers 4 knows these positions by the type "mrope" alone.
    scaling = {"type": "mrope", **(written["rope_scaling"] or {}), "mrope_section": list(sections)}
    return {
        **write_windows_of_some_layers(config.windows),
        "rope_parameters": described,
        "rope_scaling": scaling,
        "image_token_id": config.image_token,
        "vision_config": {
            "model_type": "qwen2_5_vl",
            "depth": vision.blocks,
            "hidden_size": vision.width,
            "intermediate_size": vision.inner_width,
            "num_heads": vision.heads,
            "hidden_act": vision.activation,
            "in_channels": vision.channels,
            "in_chans": vision.channels,
            "patch_size": vision.patch_size,
            "spatial_patch_size": vision.patch_size,
            "temporal_patch_size": vision.temporal_patch_size,
            "spatial_merge_size": vision.merge_size,
            "window_size": vision.window_size,
            "fullatt_block_indexes": list(vision.full_blocks),
            "out_hidden_size": vision.output_width,
            "rope_parameters": {"rope_type": "axial", "rope_theta": vision.theta},
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
    decoder_of=_decoder_of,
    read_rope=_read_rope,
    read_options=_read_options,
    write_options=_write_options,
)
