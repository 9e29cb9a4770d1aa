"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama's layer with biases of queries, keys and values.

The layers from `max_window_layers` on may have a sliding window.
"""

from typing import Any, Final

from detjax.models.configuration.config import DecoderConfig
from detjax.models.configuration.family import Family, LayerOptions
from detjax.models.configuration.json_object import JsonObject
from detjax.models.configuration.windows import read_windows_of_some_layers, write_windows_of_some_layers
from detjax.models.families.llama import Layer


def _read_options(file: JsonObject, layers: int) -> LayerOptions:
    return LayerOptions(windows=read_windows_of_some_layers(file, layers), qkv_bias=True)


def _write_options(config: DecoderConfig) -> dict[str, Any]:
    return write_windows_of_some_layers(config.windows)


FAMILY: Final = Family(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    layer=Layer,
    kv_heads=32,
    max_positions=32768,
    read_options=_read_options,
    write_options=_write_options,
)
