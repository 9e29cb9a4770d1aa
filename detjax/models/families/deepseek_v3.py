"""DeepSeek-V3 (DeepSeek-AI 2024) and Kimi K2 (Moonshot AI 2025): latent attention, and experts after the first layers.

Kimi K2's files name the same class with a different `model_type`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from detjax.models.configuration import experts_config
from detjax.models.configuration.config import DecoderConfig
from detjax.models.configuration.family import Family
from detjax.models.configuration.json_object import MAX_EXPERTS, JsonObject
from detjax.models.configuration.keys import ATTENTION_BIAS, Key, read_keys, write_keys
from detjax.models.configuration.windows import read_uniform_windows
from detjax.models.families import mixture
from detjax.models.parts.grouped_experts import GroupedExperts, GroupedExpertsOptions
from detjax.models.parts.latent_attention import LatentAttention, LatentAttentionOptions, LatentOptions

_KV_HEADS: Final = 128
"""Transformers' default of `num_key_value_heads`."""

COUNTS: Final = "n_routed_experts", "num_local_experts"
"""The keys of the number of experts; see `experts_config.COUNTS`."""


def _attention_options(config: DecoderConfig, index: int) -> LatentAttentionOptions:
    del index
    assert config.latent is not None
    return LatentAttentionOptions(heads=config.heads, latent=config.latent, rope=config.rope, bias=config.output_bias)


class Layer(mixture.Layer):
    """The layer of decoders with experts, with latent attention."""

    ATTENTION = LatentAttention
    EXPERTS = GroupedExperts
    attention_options = staticmethod(_attention_options)


_LATENT: Final = (
    Key("kv_lora_rank", "kv_rank", 512),
    Key("qk_nope_head_dim", "nope_dim", 128),
    Key("v_head_dim", "value_dim", 128),
)
_SHAPE: Final = (
    Key("n_group", "groups"),
    Key("num_experts_per_tok", "chosen", 8),
    Key("topk_group", "kept_groups"),
    Key("moe_intermediate_size", "inner_width"),
    Key("norm_topk_prob", "normalized", default=True),
    Key("routed_scaling_factor", "factor", 1.0),
    Key("n_shared_experts", "shared", 1),
)
_DEFAULTS: Final = {"groups": 8, "kept_groups": 4, "inner_width": 2048, "factor": 2.5}
"""Transformers' defaults of keys whose default differs in other families."""


def _read_options(file: JsonObject, layers: int) -> dict[str, Any]:
    heads = file.integer("num_attention_heads")
    # A missing key has transformers' default; null means as many as query heads.
    if file.integer("num_key_value_heads", heads if "num_key_value_heads" in file.raw else _KV_HEADS) != heads:
        raise file.error("num_key_value_heads", f"{heads}, which is num_attention_heads, as latents serve all heads")
    for key, accepted in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        file.choice(key, accepted, (accepted,))
    if file.integer("moe_layer_freq", 1) != 1:
        raise file.error("moe_layer_freq", "1")
    latent = LatentOptions(
        # null means that queries have no latent.
        q_rank=file.optional_integer("q_lora_rank", minimum=1) if "q_lora_rank" in file.raw else 1536,
        **read_keys(file, _LATENT),
        # null counts as false in transformers.
        interleaved=file.boolean("rope_interleave", "rope_interleave" not in file.raw),
    )
    windows = read_uniform_windows(file, layers, "deepseek_v3")
    return {"windows": windows, "experts": read_experts(file, layers, 256, 3, _DEFAULTS), "latent": latent}


def read_experts(
    file: JsonObject, layers: int, experts: int, dense: int, defaults: Mapping[str, Any]
) -> GroupedExpertsOptions | None:
    """Returns the shape of experts in groups; None if no layer has experts.

    By default there are `experts` of them, and the first `dense` layers have none. `defaults` has the
    defaults of other options.

    Raises:
        CheckpointError: a value is out of range.
    """
    dense = file.integer("first_k_dense_replace", dense, minimum=0)
    if dense >= layers:
        return None
    key = experts_config.count_key(file, COUNTS)
    keys = (dataclasses.replace(key, default=defaults.get(key.field, key.default)) for key in _SHAPE)
    experts, shape = file.integer(key, experts, maximum=MAX_EXPERTS), read_keys(file, keys)
    groups, kept = shape["groups"], shape["kept_groups"]
    if experts % groups or experts // groups < 2:
        raise file.error("n_group", f"a divisor of {key}, which is {experts}, that leaves 2 experts in each group")
    if kept > groups:
        raise file.error("topk_group", f"1 to {groups}, which is n_group")
    if shape["chosen"] > kept * (experts // groups):
        raise file.error("num_experts_per_tok", f"1 to {kept * (experts // groups)}, the experts of {kept} groups")
    return GroupedExpertsOptions(experts=experts, layers=tuple(index >= dense for index in range(layers)), **shape)


def _write_options(config: DecoderConfig) -> dict[str, Any]:
    latent = config.latent
    assert latent is not None
    return {
        "q_lora_rank": latent.q_rank,
        "qk_rope_head_dim": config.head_dim,
        "rope_interleave": latent.interleaved,
        **write_keys(latent, _LATENT),
        **write_experts(config),
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
    }


def write_experts(config: DecoderConfig) -> dict[str, Any]:
    """Returns the keys of `config.json` that `read_experts` reads."""
    experts = config.experts
    if experts is None:
        return {"first_k_dense_replace": config.layers}
    assert isinstance(experts, GroupedExpertsOptions)
    return {
        "first_k_dense_replace": sum(not is_sparse for is_sparse in experts.layers),
        **experts_config.write_experts(experts, _SHAPE, COUNTS[0]),
    }


FAMILY: Final = Family(
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    other_model_types=("kimi_k2",),
    layer=Layer,
    max_positions=4096,
    head_dim=64,
    head_dim_key="qk_rope_head_dim",
    kv_heads=_KV_HEADS,
    bos=0,
    eos=1,
    reads=COUNTS,
    # Layers that predict further tokens come last.
    skips=(r"model\.layers\.{layers}\..*",),
    keys=ATTENTION_BIAS,
    read_options=_read_options,
    write_options=_write_options,
)
