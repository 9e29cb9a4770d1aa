"""The vision tower of Qwen3-VL and Qwen3.5, next to the text models of several families.

The decoder's keys in `config.json` are in `text_config`, and positions have three coordinates, which are equal in text.
"""

import dataclasses
import math
from typing import Any, Final

from detjax.models.configuration.config import DecoderConfig
from detjax.models.configuration.family import Family
from detjax.models.configuration.json_object import JsonObject
from detjax.models.configuration.keys import Key
from detjax.models.configuration.rope_config import read_sections
from detjax.models.configuration.vision_config import read_vision, write_vision
from detjax.models.parts.vision import VisionOptions
from detjax.ops.rotary import RotaryEmbedding

PREFIXES: Final = (("model.", "model.language_model."), ("visual.", "model.visual."))
"""Prefixes of tensor names in the decoder, and in checkpoints of the whole model."""
ROPE_KEYS: Final = ("mrope_section", "mrope_interleaved")
"""Keys of the rotary embedding that matter only to images."""
_TEXT_CONFIG: Final = "text_config"
_MODEL_LEVEL_KEYS: Final = ("architectures", "model_type", "dtype", "vision_config")
"""Keys of the whole model's configuration that its text model's lacks or has with another value."""
_BLOCKS: Final = 27
"""The default number of blocks."""
_DEEPSTACK: Final = "deepstack_visual_indexes"


@dataclasses.dataclass(frozen=True)
class Tower:
    """The facts about a tower that differ between families.

    Attributes:
        sections: the default numbers of column pairs that are rotated by a token's time, row and column.
        tokens: the keys for the tokens of images and videos.
        deepstack: the default blocks whose rows join the decoder's first layers; None: no block's do.
    """

    sections: tuple[int, int, int]
    tokens: tuple[Key, ...]
    deepstack: tuple[int, ...] | None


def with_tower(text: Family, tower: Tower, architecture: str, model_type: str) -> Family:
    """Returns the family of models that add a vision tower to the text models of the family `text`."""

    def read_rope(file: JsonObject, head_dim: int, max_positions: int) -> RotaryEmbedding:
        rope = text.read_rope(file, head_dim, max_positions)
        for key in ("rope_parameters", "rope_scaling"):
            parameters = file.object(key)
            if parameters is not None and not parameters.boolean("mrope_interleaved", True):
                raise parameters.error("mrope_interleaved", "true")
        sections = read_sections(file, tower.sections, rope.turning // 2)
        return dataclasses.replace(rope, sections=sections, interleaved=True)

    def read_options(file: JsonObject, layers: int) -> dict[str, Any]:
        vision = file.object("vision_config") or JsonObject({}, file.source, "vision_config.")
        deepstack = _read_deepstack(vision, tower, layers)
        return {**text.read_options(file, layers), "vision": _read_vision(vision, file, deepstack)}

    def write_options(config: DecoderConfig) -> dict[str, Any]:
        assert config.vision is not None and config.rope.sections is not None
        plain = dataclasses.replace(config.rope, sections=None, interleaved=False)
        written = dict(text.write_options(dataclasses.replace(config, rope=plain)))
        sections = {"mrope_section": list(config.rope.sections), "mrope_interleaved": True}
        # transformers 4 reads only `rope_scaling`.
        scaling = {"rope_scaling": {"rope_type": "default", **(written["rope_scaling"] or {}), **sections}}
        return written | {
            "rope_parameters": written["rope_parameters"] | sections,
            **({} if tower.deepstack is None else scaling),
            "vision_config": _write_vision(config.vision, tower, model_type),
        }

    def nested(raw: dict[str, Any]) -> dict[str, Any]:
        model_level = (*_MODEL_LEVEL_KEYS, *(key.name for key in tower.tokens))
        whole = {key: raw[key] for key in (*model_level, "tie_word_embeddings")}
        inner = {key: value for key, value in raw.items() if key not in model_level}
        return whole | {_TEXT_CONFIG: inner | {"model_type": text.model_type, "dtype": raw["dtype"]}}

    return dataclasses.replace(
        text,
        architecture=architecture,
        model_type=model_type,
        prefixes=PREFIXES,
        nested=nested,
        read_rope=read_rope,
        keys=(*text.keys, *tower.tokens),
        read_options=read_options,
        write_options=write_options,
    )


def _read_deepstack(vision: JsonObject, tower: Tower, layers: int) -> tuple[int, ...]:
    """Returns the blocks whose rows join the decoder's first layers."""
    given = vision.get(_DEEPSTACK)
    if tower.deepstack is None:
        if given not in (None, []):
            raise vision.error(_DEEPSTACK, "an empty list: the rows of inner blocks have no place in this family")
        return ()
    blocks = vision.integer("depth", _BLOCKS)
    given = list(tower.deepstack) if given is None else given
    is_list = isinstance(given, list) and all(type(index) is int for index in given)
    if not is_list or given != sorted(set(given)) or not all(0 <= index < blocks for index in given):
        raise vision.error(_DEEPSTACK, f"a list of blocks from 0 to {blocks - 1} in ascending order")
    if len(given) > layers:
        raise vision.error(_DEEPSTACK, f"at most {layers} blocks, because the rows of each join a layer of the decoder")
    return tuple(given)


def _read_vision(vision: JsonObject, file: JsonObject, deepstack: tuple[int, ...]) -> VisionOptions:
    vision.choice("hidden_act", "gelu_pytorch_tanh", ("gelu_pytorch_tanh",))
    positions = vision.integer("num_position_embeddings", 2304)
    if math.isqrt(positions) ** 2 != positions:
        raise vision.error("num_position_embeddings", "a square number")
    shared = read_vision(vision, file.integer("hidden_size"), width=1152, blocks=_BLOCKS, patch_size=16)
    return VisionOptions(
        **shared,
        inner_width=vision.integer("intermediate_size", 4304),
        activation="gelu_tanh",
        window_size=None,
        full_blocks=tuple(range(shared["blocks"])),
        tokens_per_second=None,
        positions=positions,
        deepstack_blocks=deepstack,
    )


def _write_vision(vision: VisionOptions, tower: Tower, model_type: str) -> dict[str, Any]:
    return {
        **write_vision(vision),
        "model_type": f"{model_type}_vision",
        "hidden_act": "gelu_pytorch_tanh",
        "num_position_embeddings": vision.positions,
        **({} if tower.deepstack is None else {_DEEPSTACK: list(vision.deepstack_blocks)}),
    }
