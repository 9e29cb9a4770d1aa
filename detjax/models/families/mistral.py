"""Mistral (Jiang et al. 2023): Llama's layer with a sliding window in every layer, and without biases."""

from typing import Final

from detjax.models.configuration.family import Family
from detjax.models.configuration.windows import first_window, read_uniform_windows
from detjax.models.families.llama import Layer

FAMILY: Final = Family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    layer=Layer,
    kv_heads=8,
    max_positions=131072,
    bos=1,
    eos=2,
    read_options=lambda file, layers: {"windows": read_uniform_windows(file, layers, "mistral", has_window=True)},
    write_options=lambda config: {"sliding_window": first_window(config.windows)},
)
