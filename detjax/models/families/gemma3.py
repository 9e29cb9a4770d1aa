"""Gemma 3 (Gemma Team 2025), its text model: Gemma 2's layer with RMS norms of every head of queries and keys.

Layers with a window have separate rotary frequencies. By default, five of six layers have a window. Scores have no
bound: transformers reads `attn_logit_softcapping` but does not apply it here.
"""

import dataclasses
import functools
from typing import Any, Final

from detjax.models.configuration.config import DecoderConfig
from detjax.models.configuration.json_object import JsonObject
from detjax.models.configuration.rope_config import (
    read_max_positions,
    read_rope_of_layer_types,
    write_rope_of_layer_types,
)
from detjax.models.configuration.windows import pattern_of
from detjax.models.families import gemma2

_PATTERN: Final = "sliding_window_pattern"
_MAX_POSITIONS: Final = 131072
_read_ropes: Final = functools.partial(read_rope_of_layer_types, theta=1_000_000.0, window_theta=10_000.0)


def _read_options(file: JsonObject, layers: int) -> dict[str, Any]:
    pattern = file.integer(_PATTERN, 6)
    common = gemma2.read_common_options(file, layers, pattern, logit_soft_cap=None)
    head_dim = file.integer("head_dim", gemma2.FAMILY.head_dim)
    max_positions = read_max_positions(file, _MAX_POSITIONS)
    return common | {"qk_norm": True, "window_rope": _read_ropes(file, head_dim, max_positions)[1]}


def _write_options(config: DecoderConfig) -> dict[str, Any]:
    ropes = {} if config.window_rope is None else write_rope_of_layer_types(config.rope, config.window_rope)
    pattern = pattern_of(config.windows)
    return gemma2.write_common_options(config) | ropes | ({} if pattern is None else {_PATTERN: pattern})


FAMILY: Final = dataclasses.replace(
    gemma2.FAMILY,
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    max_positions=_MAX_POSITIONS,
    read_rope=lambda *arguments: _read_ropes(*arguments)[0],
    read_options=_read_options,
    write_options=_write_options,
)
