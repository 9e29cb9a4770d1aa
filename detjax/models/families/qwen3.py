"""Qwen3 (Yang et al. 2025): Llama's layer with RMS norms of every head of queries and keys before the rotation.

The layers from `max_window_layers` on may have a sliding window.
"""

from typing import Any, Final

from detjax.models.configuration.config import DecoderConfig
from detjax.models.configuration.family import Family, LayerOptions
from detjax.models.configuration.json_object import JsonObject
from detjax.models.configuration.windows import read_windows_of_some_layers, write_windows_of_some_layers
from detjax.models.families.llama import Layer


def _read_options(file: JsonObject, layers: int) -> LayerOptions:
    attention_bias = file.boolean("attention_bias", False)
    windows = read_windows_of_some_layers(file, layers)
    return LayerOptions(windows=windows, qk_norm=True, qkv_bias=attention_bias, output_bias=attention_bias)


def _write_options(config: DecoderConfig) -> dict[str, Any]:
    return {"attention_bias": config.qkv_bias} | write_windows_of_some_layers(config.windows)


FAMILY: Final = Family(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    layer=Layer,
    head_dim=128,
    kv_heads=32,
    max_positions=32768,
    read_options=_read_options,
    write_options=_write_options,
)
