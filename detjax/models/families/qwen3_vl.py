"""Qwen3-VL (Bai et al. 2025): Qwen3's layers with three-dimensional positions, and a tower whose inner blocks add rows.

The rows of inner blocks ("DeepStack") join the outputs of the first layers at the tokens of images.
"""

from typing import Any, Final

from detjax.models.configuration.config import DecoderConfig
from detjax.models.configuration.family import Family
from detjax.models.configuration.json_object import JsonObject
from detjax.models.configuration.keys import ATTENTION_BIAS, Key
from detjax.models.configuration.rope_config import read_rope, write_rope
from detjax.models.configuration.windows import read_uniform_windows
from detjax.models.families import qwen_tower
from detjax.models.families.llama import Layer
from detjax.ops.rotary import RotaryEmbedding

TOWER: Final = qwen_tower.Tower(
    sections=(24, 20, 20),
    tokens=(
        Key("image_token_id", "image_token", 151655, minimum=0),
        Key("video_token_id", "video_token", 151656, minimum=0),
        Key("vision_start_token_id", "vision_start_token", 151652, minimum=0),
        Key("vision_end_token_id", "vision_end_token", 151653, minimum=0),
    ),
    deepstack=(8, 16, 24),
)
"""The tower, and the places of images."""
_THETA: Final = 500_000.0


def read_text_rope(file: JsonObject, head_dim: int, max_positions: int) -> RotaryEmbedding:
    """Returns the rotary embedding without the sections that matter to images.

    Raises:
        CheckpointError: see `rope_config.read_rope`.
    """
    raw = dict(file.raw)
    for key in ("rope_parameters", "rope_scaling"):
        parameters = file.object(key)
        if parameters is not None:
            raw[key] = {name: x for name, x in parameters.raw.items() if name not in qwen_tower.ROPE_KEYS}
    return read_rope(JsonObject(raw, file.source, file.prefix), head_dim, max_positions, theta=_THETA)


def _read_options(file: JsonObject, layers: int) -> dict[str, Any]:
    return {"windows": read_uniform_windows(file, layers, "qwen3_vl"), "qk_norm": True}


def _write_options(config: DecoderConfig) -> dict[str, Any]:
    return write_rope(config.rope)


_TEXT: Final = Family(
    architecture="Qwen3VLTextModel",
    model_type="qwen3_vl_text",
    layer=Layer,
    ties_at_top=True,
    max_positions=128000,
    head_dim=128,
    kv_heads=32,
    read_rope=read_text_rope,
    keys=ATTENTION_BIAS,
    read_options=_read_options,
    write_options=_write_options,
)
FAMILY: Final = qwen_tower.with_tower(_TEXT, TOWER, "Qwen3VLForConditionalGeneration", "qwen3_vl")
