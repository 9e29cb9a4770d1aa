"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama's layer with biases of queries, keys and values.

The layers from `max_window_layers` on may have a sliding window.
"""

from typing import Final

from detjax.models.configuration.family import Family
from detjax.models.configuration.windows import read_windows_of_some_layers, write_windows_of_some_layers
from detjax.models.families.llama import Layer

FAMILY: Final = Family(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    layer=Layer,
    kv_heads=32,
    max_positions=32768,
    read_options=lambda file, layers: {"windows": read_windows_of_some_layers(file, layers), "qkv_bias": True},
    write_options=lambda config: write_windows_of_some_layers(config.windows),
)
