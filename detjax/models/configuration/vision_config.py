"""The keys of `vision_config` that all families with a vision tower share."""

from typing import Any, Final

from detjax.models.configuration.json_object import MAX_LAYERS, JsonObject
from detjax.models.configuration.keys import Key, read_keys, write_keys
from detjax.models.parts.vision import VisionOptions

_PATCHES: Final = (Key("temporal_patch_size", "temporal_patch_size", 2), Key("spatial_merge_size", "merge_size", 2))


def read_vision(file: JsonObject, hidden_size: int, *, width: int, blocks: int, patch_size: int) -> dict[str, Any]:
    """Returns the fields of `VisionOptions` that all families read in the same way.

    `width`, `blocks` and `patch_size` are transformers' defaults; `hidden_size` is the decoder's.

    Raises:
        CheckpointError: a value is out of range, or occurs in no published checkpoint.
    """
    width, heads = file.integer("hidden_size", width), file.integer("num_heads", 16)
    if width % heads or width // heads % 4:
        raise file.error("hidden_size", f"a multiple of {4 * heads}, 4 times num_heads")
    if file.integer("in_channels", file.integer("in_chans", 3)) != 3:
        raise file.error("in_channels", "3")
    if file.integer("out_hidden_size", 3584) != hidden_size:
        raise file.error("out_hidden_size", f"{hidden_size}, the hidden_size of the decoder")
    rope = file.object("rope_parameters") or JsonObject({}, file.source, "vision_config.rope_parameters.")
    rope.choice("rope_type", "axial", ("axial", "default"))
    return {
        "width": width,
        "heads": heads,
        "blocks": file.integer("depth", blocks, maximum=MAX_LAYERS),
        "channels": 3,
        "patch_size": file.integer("patch_size", patch_size),
        **read_keys(file, _PATCHES),
        "output_width": hidden_size,
        "theta": rope.number("rope_theta", 10000.0),
    }


def write_vision(vision: VisionOptions) -> dict[str, Any]:
    """Returns the corresponding keys of a `vision_config`."""
    return {
        "depth": vision.blocks,
        "hidden_size": vision.width,
        "intermediate_size": vision.inner_width,
        "num_heads": vision.heads,
        "in_channels": vision.channels,
        "patch_size": vision.patch_size,
        **write_keys(vision, _PATCHES),
        "out_hidden_size": vision.output_width,
        "rope_parameters": {"rope_type": "axial", "rope_theta": vision.theta},
    }
