"""SmolLM3 (Hugging Face 2025): Llama's layer, without rotation in every fourth layer (Yang et al. 2025).

Layers may have a sliding window, by default those without rotation.
"""

import functools
from typing import Any, Final

from detjax.models.configuration.config import DecoderConfig
from detjax.models.configuration.family import Family
from detjax.models.configuration.json_object import JsonObject
from detjax.models.configuration.rope_config import read_rope
from detjax.models.configuration.windows import (
    FULL,
    SLIDING,
    read_named_windows,
    write_windows_of_some_layers,
)
from detjax.models.families import llama

_ROTATED: Final = "no_rope_layers"


def _read_options(file: JsonObject, layers: int) -> dict[str, Any]:
    interval, rotated = file.integer("no_rope_layer_interval", 4), file.get(_ROTATED)
    if rotated is None:
        rotated = [int((index + 1) % interval != 0) for index in range(layers)]
    if not isinstance(rotated, list | tuple) or len(rotated) < layers or not all(x in (0, 1) for x in rotated):
        raise file.error(_ROTATED, f"a list with 1 for each of {layers} layers that rotates, and 0 for any other one")
    has_window = file.boolean("use_sliding_window", False)
    window = file.optional_integer("sliding_window", minimum=1) if has_window else None
    types = [SLIDING if window is not None and not rotates else FULL for rotates in rotated[:layers]]
    return {"windows": read_named_windows(file, window, types), "rotated": tuple(map(bool, rotated[:layers]))}


def _write_options(config: DecoderConfig) -> dict[str, Any]:
    windows = write_windows_of_some_layers(config.windows)
    del windows["max_window_layers"]
    rotated = config.rotated or (True,) * config.layers
    return {**windows, _ROTATED: [int(rotates) for rotates in rotated]}


FAMILY: Final = Family(
    architecture="SmolLM3ForCausalLM",
    model_type="smollm3",
    layer=llama.Layer,
    max_positions=32768,
    kv_heads=4,
    bos=128000,
    eos=128001,
    tied_embeddings=True,
    # The published file has 2, which transformers' class does not read.
    reads=("pretraining_tp",),
    read_rope=functools.partial(read_rope, theta=2_000_000.0),
    keys=llama.FAMILY.keys,
    read_options=_read_options,
    write_options=_write_options,
)
