"""Mistral (Jiang et al. 2023): Llama's layer with a sliding window in every layer, and without biases."""

from typing import Any, Final

from detjax.models.configuration.config import DecoderConfig
from detjax.models.configuration.family import Family, LayerOptions
from detjax.models.configuration.json_object import JsonObject
from detjax.models.configuration.windows import first_window, read_window_of_all_layers
from detjax.models.families.llama import Layer


def _read_options(file: JsonObject, layers: int) -> LayerOptions:
    return LayerOptions(windows=read_window_of_all_layers(file, layers, "mistral"))


def _write_options(config: DecoderConfig) -> dict[str, Any]:
    return {"sliding_window": first_window(config.windows)}


FAMILY: Final = Family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    layer=Layer,
    kv_heads=8,
    max_positions=131072,
    bos=1,
    eos=2,
    read_options=_read_options,
    write_options=_write_options,
)
