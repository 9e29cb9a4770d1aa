"""Gemma 3 (Gemma Team 2025), its text model: Gemma 2's layer with RMS norms of every head of queries and keys.

Layers with a window have separate rotary frequencies. By default, five of six layers have a window. Scores have no
bound: transformers reads `attn_logit_softcapping` but does not apply it here.
"""

from typing import Any, Final

from detjax.models.configuration.config import DecoderConfig
from detjax.models.configuration.family import Family
from detjax.models.configuration.json_object import JsonObject
from detjax.models.configuration.rope_config import (
    read_max_positions,
    read_rope_of_layer_types,
    write_rope_of_layer_types,
)
from detjax.models.configuration.windows import pattern_of
from detjax.models.families.gemma2 import KEYS, NORM_OFFSET, Layer, read_common_options, write_common_options
from detjax.ops.rotary import RotaryEmbedding

_PATTERN: Final = "sliding_window_pattern"
_HEAD_DIM: Final = 256
_THETA: Final = 1_000_000.0
_WINDOW_THETA: Final = 10_000.0
_MAX_POSITIONS: Final = 131072


def _read_ropes(file: JsonObject, head_dim: int, max_positions: int) -> tuple[RotaryEmbedding, RotaryEmbedding]:
    return read_rope_of_layer_types(file, head_dim, max_positions, theta=_THETA, window_theta=_WINDOW_THETA)


def _read_rope(file: JsonObject, head_dim: int, max_positions: int) -> RotaryEmbedding:
    return _read_ropes(file, head_dim, max_positions)[0]


def _read_options(file: JsonObject, layers: int) -> dict[str, Any]:
    pattern = file.integer(_PATTERN, 6)
    common = read_common_options(file, layers, pattern, logit_soft_cap=None)
    head_dim = file.integer("head_dim", _HEAD_DIM)
    max_positions = read_max_positions(file, _MAX_POSITIONS)
    return common | {"qk_norm": True, "window_rope": _read_ropes(file, head_dim, max_positions)[1]}


def _write_options(config: DecoderConfig) -> dict[str, Any]:
    ropes = {} if config.window_rope is None else write_rope_of_layer_types(config.rope, config.window_rope)
    pattern = pattern_of(config.windows)
    return write_common_options(config) | ropes | ({} if pattern is None else {_PATTERN: pattern})


FAMILY: Final = Family(
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    layer=Layer,
    max_positions=_MAX_POSITIONS,
    head_dim=_HEAD_DIM,
    kv_heads=4,
    bos=2,
    eos=1,
    tied_embeddings=True,
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    norm_offset=NORM_OFFSET,
    scales_embedding=True,
    read_rope=_read_rope,
    keys=KEYS,
    read_options=_read_options,
    write_options=_write_options,
)
