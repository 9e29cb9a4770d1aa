"""GLM-4-0414 (Z.ai 2025): the layer of Gemma 2 with plain norms, and half of each head rotated, in adjacent columns."""

import dataclasses
import functools
from typing import Any, Final

from detjax.models.configuration.config import DecoderConfig
from detjax.models.configuration.family import Family
from detjax.models.configuration.json_object import JsonObject
from detjax.models.configuration.keys import Key
from detjax.models.configuration.rope_config import ROTATED_SHARE, read_partial_rope, write_partial_rope
from detjax.models.configuration.windows import read_uniform_windows
from detjax.models.families import gemma2, llama
from detjax.models.parts.attention import AttentionOptions
from detjax.models.parts.mlp import MLPOptions

read_rope: Final = functools.partial(read_partial_rope, share=0.5)
"""Reads the rotary embedding of half of a head."""


def _attention_options(config: DecoderConfig, index: int) -> AttentionOptions:
    return dataclasses.replace(llama.attention_options(config, index), interleaved=True)


def _mlp_options(config: DecoderConfig) -> MLPOptions:
    return dataclasses.replace(llama.mlp_options(config), fused=True)


class Layer(gemma2.Layer):
    """Grouped-query attention and a gated MLP, each between two RMS norms and then added to the residual stream."""

    CHECKPOINT_NAMES = {  # noqa: RUF012
        **gemma2.Layer.CHECKPOINT_NAMES,
        "attention_output_norm": "post_self_attn_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "mlp_output_norm": "post_mlp_layernorm",
    }
    NORM_OFFSET = 0.0
    attention_options = staticmethod(_attention_options)
    mlp_options = staticmethod(_mlp_options)


def _read_options(file: JsonObject, layers: int) -> dict[str, Any]:
    return {"windows": read_uniform_windows(file, layers, "glm4")}


FAMILY: Final = Family(
    architecture="Glm4ForCausalLM",
    model_type="glm4",
    layer=Layer,
    max_positions=131072,
    norm_eps=1.5625e-7,
    head_dim=128,
    kv_heads=2,
    eos=[151329, 151336, 151338],
    reads=(ROTATED_SHARE,),
    read_rope=read_rope,
    keys=(Key("attention_bias", "qkv_bias", default=True),),
    read_options=_read_options,
    write_options=lambda config: write_partial_rope(config.rope),
)
