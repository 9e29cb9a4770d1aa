"""Qwen3 (Yang et al. 2025): Llama's layer with RMS norms of every head of queries and keys before the rotation.

The layers from `max_window_layers` on may have a sliding window.
"""

from typing import Final

from detjax.models.configuration.family import Family
from detjax.models.configuration.keys import ATTENTION_BIAS
from detjax.models.configuration.windows import read_windows_of_some_layers, write_windows_of_some_layers
from detjax.models.families.llama import Layer

FAMILY: Final = Family(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    layer=Layer,
    head_dim=128,
    kv_heads=32,
    max_positions=32768,
    keys=ATTENTION_BIAS,
    read_options=lambda file, layers: {"windows": read_windows_of_some_layers(file, layers), "qk_norm": True},
    write_options=lambda config: write_windows_of_some_layers(config.windows),
)
