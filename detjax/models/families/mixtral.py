"""Mixtral (Jiang et al. 2024): Mistral's attention, and experts in place of every layer's MLP."""

import functools
from typing import Any, Final

from detjax.models.configuration.config import DecoderConfig
from detjax.models.configuration.family import Family
from detjax.models.configuration.json_object import MAX_EXPERTS, JsonObject
from detjax.models.configuration.keys import Key, read_keys, write_keys
from detjax.models.configuration.rope_config import read_rope
from detjax.models.configuration.windows import first_window, read_uniform_windows
from detjax.models.families import llama, mixture
from detjax.models.parts.experts import Experts, ExpertsOptions


class _Experts(Experts):
    PROJECTIONS = "w1", "w3", "w2"


class Layer(mixture.Layer):
    """The layer of decoders with experts, with the names in Mixtral's checkpoints."""

    CHECKPOINT_NAMES = llama.Layer.CHECKPOINT_NAMES | {"mlp": "block_sparse_moe"}
    EXPERTS = _Experts


_EXPERTS: Final = (
    Key("num_local_experts", "experts", 8, maximum=MAX_EXPERTS),
    Key("num_experts_per_tok", "chosen", 2),
    Key("intermediate_size", "inner_width"),
)


def _read_options(file: JsonObject, layers: int) -> dict[str, Any]:
    experts = ExpertsOptions(**read_keys(file, _EXPERTS), normalized=True, layers=(True,) * layers)
    return {"windows": read_uniform_windows(file, layers, "mixtral", has_window=True), "experts": experts}


def _write_options(config: DecoderConfig) -> dict[str, Any]:
    window = {"sliding_window": first_window(config.windows), "output_router_logits": False}
    return window | write_keys(config.experts, _EXPERTS)


FAMILY: Final = Family(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    layer=Layer,
    kv_heads=8,
    max_positions=131072,
    norm_eps=1e-5,
    bos=1,
    eos=2,
    reads=("num_local_experts",),
    read_rope=functools.partial(read_rope, theta=1_000_000.0),
    read_options=_read_options,
    write_options=_write_options,
)
