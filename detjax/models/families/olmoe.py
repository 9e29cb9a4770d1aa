"""OLMoE (Muennighoff et al. 2024): experts in every layer, and RMS norms of all queries and of all keys of a token."""

import sys
from typing import Any, Final

from detjax.models.configuration.config import DecoderConfig
from detjax.models.configuration.family import Family
from detjax.models.configuration.json_object import MAX_EXPERTS, JsonObject
from detjax.models.configuration.keys import ATTENTION_BIAS, Key, read_keys, write_keys
from detjax.models.configuration.windows import read_uniform_windows
from detjax.models.families.mixture import Layer
from detjax.models.parts.experts import ExpertsOptions

_EXPERTS: Final = (
    Key("num_experts", "experts", 64, maximum=MAX_EXPERTS),
    Key("num_experts_per_tok", "chosen", 8),
    Key("intermediate_size", "inner_width"),
    Key("norm_topk_prob", "normalized", default=False),
)


def _read_options(file: JsonObject, layers: int) -> dict[str, Any]:
    bound = file.optional_number("clip_qkv", minimum=sys.float_info.min, accepted="a finite number > 0, null")
    return {
        "windows": read_uniform_windows(file, layers, "olmoe"),
        "experts": ExpertsOptions(**read_keys(file, _EXPERTS), layers=(True,) * layers),
        "wide_qk_norm": True,
        "qkv_bound": bound,
    }


def _write_options(config: DecoderConfig) -> dict[str, Any]:
    return {"clip_qkv": config.qkv_bound, "output_router_logits": False} | write_keys(config.experts, _EXPERTS)


FAMILY: Final = Family(
    architecture="OlmoeForCausalLM",
    model_type="olmoe",
    layer=Layer,
    max_positions=4096,
    norm_eps=1e-5,
    eos=50279,
    reads=("num_experts",),
    keys=ATTENTION_BIAS,
    read_options=_read_options,
    write_options=_write_options,
)
