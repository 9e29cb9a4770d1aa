"""Families, key by key: what each key of `config.json` changes alone, what it is if left out, and what is written."""

import dataclasses
from typing import Any

import pytest

from detjax.models import CheckpointError, DecoderConfig, GenerationDefaults
from detjax.models.configuration.family import description, families
from detjax.models.parts.experts import ExpertsOptions
from detjax.ops.rotary import LinearScaling, Llama3Scaling, LongRopeScaling, YarnScaling

SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 32,
}
OF_FAMILY: dict[str, dict[str, Any]] = {
    "DeepseekV3": {"num_attention_heads": 128, "first_k_dense_replace": 1},
    "KimiK25+": {"num_attention_heads": 128, "first_k_dense_replace": 1},
    "Gemma2": {"num_attention_heads": 16},
    "Gemma3": {"num_attention_heads": 16},
    "Gemma4": {"num_attention_heads": 16},
    "Gemma4+": {"num_attention_heads": 16, "vision_config": {}},
    "Glm4Moe": {"num_attention_heads": 8},
    "Qwen2_5_VL": {"hidden_size": 3584, "num_attention_heads": 56},
    "Qwen3_5+": {"hidden_size": 3584, "vision_config": {"depth": 2}},
    "Qwen3_5Moe+": {"hidden_size": 3584, "vision_config": {"depth": 2}},
    "Qwen3VL+": {"hidden_size": 3584, "vision_config": {"depth": 25}},
    "Qwen3VLMoe+": {"hidden_size": 3584, "vision_config": {"depth": 25}},
}
"""Keys that some families need beyond `SIZES`; "+" stands for a tower."""


def architecture(family: str) -> str:
    has_tower = family.endswith("+") or family == "Qwen2_5_VL"
    return family.rstrip("+") + ("ForConditionalGeneration" if has_tower else "ForCausalLM")


def raw(family: str, **changes: Any) -> dict[str, Any]:
    return {"architectures": [architecture(family)], **SIZES, **OF_FAMILY.get(family, {}), **changes}


def read(family: str, **changes: Any) -> DecoderConfig:
    return DecoderConfig.from_hugging_face(raw(family, **changes), "some/config.json")


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    """The fields of nested dataclasses by their paths."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return {path: value}
    result: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        result |= leaves(getattr(value, field.name), f"{path}.{field.name}" if path else field.name)
    return result


FAMILIES = (
    # max_positions, norm_eps, head_dim, kv_heads, theta, (bos, eos), tied, activation
    ("DeepseekV3", 4096, 1e-6, 64, 128, 1e4, (0, (1,)), False, "silu"),
    ("KimiK25+", 4096, 1e-6, 64, 128, 1e4, (0, (1,)), False, "silu"),
    ("Gemma2", 8192, 1e-6, 256, 4, 1e4, (2, (1,)), True, "gelu_tanh"),
    ("Gemma3", 131072, 1e-6, 256, 4, 1e6, (2, (1,)), True, "gelu_tanh"),
    ("Gemma4", 131072, 1e-6, 256, 4, 1e6, (2, (1,)), True, "gelu_tanh"),
    ("Gemma4+", 131072, 1e-6, 256, 4, 1e6, (2, (1,)), True, "gelu_tanh"),
    ("Glm4", 131072, 1.5625e-7, 128, 2, 1e4, (None, (151329, 151336, 151338)), False, "silu"),
    ("Glm4Moe", 131072, 1e-5, 8, 8, 1e4, (None, ()), False, "silu"),
    ("GptOss", 131072, 1e-5, 64, 8, 1.5e5, (None, ()), False, "silu"),
    ("Granite", 2048, 1e-6, 2, 32, 1e4, (1, (2,)), False, "silu"),
    ("Llama", 2048, 1e-6, 2, 32, 1e4, (1, (2,)), False, "silu"),
    ("Mistral", 131072, 1e-6, 2, 8, 1e4, (1, (2,)), False, "silu"),
    ("Mixtral", 131072, 1e-5, 2, 8, 1e6, (1, (2,)), False, "silu"),
    ("Olmoe", 4096, 1e-5, 2, 32, 1e4, (None, (50279,)), False, "silu"),
    ("Phi3", 4096, 1e-5, 2, 32, 1e4, (1, (32000,)), False, "silu"),
    ("Qwen2", 32768, 1e-6, 2, 32, 1e4, (None, ()), False, "silu"),
    ("Qwen2_5_VL", 32768, 1e-5, 64, 8, 1e6, (151643, (151645,)), False, "silu"),
    ("Qwen3", 32768, 1e-6, 128, 32, 1e4, (None, ()), False, "silu"),
    ("Qwen3_5", 32768, 1e-6, 256, 4, 1e4, (None, ()), False, "silu"),
    ("Qwen3_5+", 32768, 1e-6, 256, 4, 1e4, (None, ()), False, "silu"),
    ("Qwen3_5Moe", 32768, 1e-6, 256, 2, 1e4, (None, ()), False, "silu"),
    ("Qwen3_5Moe+", 32768, 1e-6, 256, 2, 1e4, (None, ()), False, "silu"),
    ("Qwen3Moe", 32768, 1e-6, 2, 4, 1e4, (None, ()), False, "silu"),
    ("Qwen3VL+", 128000, 1e-6, 128, 32, 5e5, (None, ()), False, "silu"),
    ("Qwen3VLMoe+", 128000, 1e-6, 112, 16, 5e5, (None, ()), False, "silu"),
    ("Qwen3Next", 32768, 1e-6, 256, 2, 1e4, (None, ()), False, "silu"),
    ("SmolLM3", 32768, 1e-6, 2, 4, 2e6, (128000, (128001,)), True, "silu"),
)
"""Values of transformers' configurations where a file says nothing."""


def some_config(family: str) -> dict[str, Any]:
    """A configuration whose head size can be divided into the sections of images."""
    sections = {"Qwen2_5_VL": [8, 12, 12], "Qwen3VLMoe+": [24, 16, 16]}
    return {"rope_scaling": {"mrope_section": sections[family]}} if family in sections else {}


def test_every_family_is_listed() -> None:
    assert sorted(architecture(row[0]) for row in FAMILIES) == sorted(families())


@pytest.mark.parametrize(
    ("family", "positions", "eps", "head_dim", "kv_heads", "theta", "ends", "tied", "activation"), FAMILIES
)
def test_keys_that_are_left_out_have_the_values_of_the_family(
    family: str,
    positions: int,
    eps: float,
    head_dim: int,
    kv_heads: int,
    theta: float,
    ends: tuple[int | None, tuple[int, ...]],
    tied: bool,
    activation: str,
) -> None:
    config = read(family, **some_config(family))
    assert (config.max_positions, config.norm_eps, config.head_dim, config.kv_heads) == (
        positions, eps, head_dim, kv_heads,
    )  # fmt: skip
    assert (config.rope.theta, config.tied_embeddings, config.activation) == (theta, tied, activation)
    assert (config.dtype, config.mlp_bias, config.qkv_bound) == ("float32", False, None)
    has_biases = family == "GptOss"
    assert (config.qkv_bias, config.output_bias) == (
        has_biases or family == "Glm4" or family.startswith("Qwen2"), has_biases,
    )  # fmt: skip
    assert config.qk_norm == family.startswith(("Gemma3", "Gemma4", "Qwen3"))
    assert config.wide_qk_norm == (family == "Olmoe")
    defaults = GenerationDefaults.from_hugging_face({}, "generation_config.json", description(raw(family), "config"))
    assert (defaults.bos_token_id, defaults.eos_token_ids) == ends


def test_experts_that_are_left_out_are_those_of_the_family() -> None:
    all_three = (True, True, True)
    for family, expected in {
        "Mixtral": ExpertsOptions(experts=8, chosen=2, inner_width=48, normalized=True, layers=all_three),
        "Olmoe": ExpertsOptions(experts=64, chosen=8, inner_width=48, normalized=False, layers=all_three),
        "Qwen3Moe": ExpertsOptions(experts=128, chosen=8, inner_width=768, normalized=False, layers=all_three),
        "Qwen3VLMoe+": ExpertsOptions(experts=60, chosen=4, inner_width=1408, normalized=True, layers=all_three),
    }.items():
        assert read(family, **some_config(family)).experts == expected
    assert read("Mixtral").windows == (4096,) * 3
    assert read("Olmoe").windows == read("Qwen3Moe").windows == (None,) * 3


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONG_ROPE = {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
WITH_TIMES = ("Qwen3_5+", "Qwen3_5Moe+", "Qwen3VL+", "Qwen3VLMoe+")
TOWER = ("Qwen2_5_VL", *WITH_TIMES)
MOE = ("Qwen3Moe", "Qwen3Next", "Qwen3VLMoe+")
GEMMA4 = ("Gemma4", "Gemma4+")
LINEAR = ("Qwen3Next", "Qwen3_5", "Qwen3_5Moe", "Qwen3_5+")
ALONE: list[tuple[str | tuple[str, ...], dict[str, Any], dict[str, Any]]] = [
    # Keys of every family
    ("Llama", {"vocab_size": 101}, {"vocab_size": 101}),
    ("Llama", {"hidden_size": 128}, {"hidden_size": 128, "head_dim": 4, "rope.head_dim": 4}),
    ("Llama", {"intermediate_size": 49}, {"intermediate_size": 49}),
    ("Llama", {"num_hidden_layers": 2}, {"layers": 2, "windows": (None, None)}),
    (
        "Llama",
        {"num_attention_heads": 16},
        {"heads": 16, "kv_heads": 16, "head_dim": 4, "rope.head_dim": 4},
    ),
    ("Llama", {"num_key_value_heads": 8}, {"kv_heads": 8}),
    ("Llama", {"head_dim": 6}, {"head_dim": 6, "rope.head_dim": 6}),
    ("Llama", {"hidden_act": "relu"}, {"activation": "relu"}),
    ("Llama", {"hidden_act": "swish"}, {}),
    ("Llama", {"rms_norm_eps": 1e-5}, {"norm_eps": 1e-5}),
    ("Llama", {"tie_word_embeddings": True}, {"tied_embeddings": True}),
    ("Llama", {"max_position_embeddings": 99}, {"max_positions": 99}),
    ("Llama", {"dtype": "float16"}, {"dtype": "float16"}),
    ("Llama", {"torch_dtype": "bfloat16"}, {"dtype": "bfloat16"}),
    ("Llama", {"rope_theta": 7.0}, {"rope.theta": 7.0}),
    ("Llama", {"mlp_bias": True}, {"mlp_bias": True}),
    # A key that transformers' class does not read either
    (("Qwen3", "Mistral", "Mixtral"), {"mlp_bias": True}, {}),
    (("Qwen2", "Mistral", "Mixtral"), {"attention_bias": True}, {}),
    (
        (
            *("Llama", "Qwen3", "Olmoe", "Qwen3Moe", "Gemma2", "Gemma3", "DeepseekV3", "Granite", "SmolLM3"),
            *("Qwen3VL+", "Qwen3VLMoe+", *LINEAR),
        ),
        {"attention_bias": True},
        {"qkv_bias": True, "output_bias": True},
    ),
    ("GptOss", {"attention_bias": False}, {"qkv_bias": False, "output_bias": False}),
    ("Glm4", {"attention_bias": False}, {"qkv_bias": False}),
    ("Glm4Moe", {"attention_bias": True}, {"qkv_bias": True}),
    ("Phi3", {"attention_bias": True}, {}),
    (("Granite", "SmolLM3"), {"mlp_bias": True}, {"mlp_bias": True}),
    # Kinds of rotations
    ("Llama", {"rope_scaling": {"type": "linear", "factor": 3.0}}, {"rope.scaling": LinearScaling(3.0)}),
    ("Llama", {"rope_scaling": YARN}, {"rope.scaling": YarnScaling(4.0, 64)}),
    ("Llama", {"rope_scaling": YARN | {"beta_fast": 9.0}}, {"rope.scaling": YarnScaling(4.0, 64, beta_fast=9.0)}),
    ("Llama", {"rope_scaling": YARN | {"beta_slow": 2.0}}, {"rope.scaling": YarnScaling(4.0, 64, beta_slow=2.0)}),
    ("Llama", {"rope_scaling": YARN | {"mscale": 0.5}}, {"rope.scaling": YarnScaling(4.0, 64, mscale=0.5)}),
    (
        "Llama",
        {"rope_scaling": YARN | {"mscale_all_dim": 0.5}},
        {"rope.scaling": YarnScaling(4.0, 64, mscale_all_dim=0.5)},
    ),
    (
        "Llama",
        {"rope_scaling": YARN | {"attention_factor": 0.5}},
        {"rope.scaling": YarnScaling(4.0, 64, attention_factor=0.5)},
    ),
    ("Llama", {"rope_scaling": YARN | {"truncate": False}}, {"rope.scaling": YarnScaling(4.0, 64, truncate=False)}),
    ("Llama", {"rope_parameters": LLAMA3}, {"rope.scaling": Llama3Scaling(8.0, 1.0, 4.0, 2048)}),
    (
        "Llama",
        {"rope_parameters": LLAMA3, "original_max_position_embeddings": 7},
        {"rope.scaling": Llama3Scaling(8.0, 1.0, 4.0, 7)},
    ),
    ("Phi3", {"rope_scaling": LONG_ROPE}, {"rope.scaling": LongRopeScaling((1.0,), (2.0,), 4096, 4096)}),
    (
        "Phi3",
        {"rope_scaling": LONG_ROPE, "original_max_position_embeddings": 64},
        {"rope.scaling": LongRopeScaling((1.0,), (2.0,), 64, 4096)},
    ),
    ("Phi3", {"original_max_position_embeddings": 64}, {}),
    ("Phi3", {"partial_rotary_factor": 0.5, "head_dim": 8}, {"head_dim": 8, "rope.head_dim": 8, "rope.rotary_dim": 4}),
    ("Glm4", {"partial_rotary_factor": 0.25}, {"rope.rotary_dim": 32}),
    ("Glm4Moe", {"partial_rotary_factor": 0.25}, {"rope.rotary_dim": 2}),
    (("Glm4", "Glm4Moe"), {"rope_parameters": {"partial_rotary_factor": 1.0}}, {"rope.rotary_dim": None}),
    ("SmolLM3", {"no_rope_layers": [0, 1, 1]}, {"rotated": (False, True, True)}),
    ("SmolLM3", {"no_rope_layer_interval": 2}, {"rotated": (True, False, True)}),
    ("SmolLM3", {"no_rope_layers": [1, 1, 1], "no_rope_layer_interval": 2}, {}),
    # Factors
    ("Granite", {"embedding_multiplier": 3}, {"multipliers.embedding": 3.0}),
    ("Granite", {"attention_multiplier": 0.5}, {"multipliers.scores": 0.5}),
    ("Granite", {"residual_multiplier": 0.5}, {"multipliers.residual": 0.5}),
    ("Granite", {"logits_scaling": 3.0}, {"multipliers.logits_divisor": 3.0}),
    # Experts
    (("Mixtral", "GptOss"), {"num_local_experts": 11}, {"experts.experts": 11}),
    ("Olmoe", {"num_experts": 11}, {"experts.experts": 11}),
    ((*MOE, "Qwen3_5Moe"), {"num_experts": 11}, {"experts.experts": 11}),
    ((*MOE, "Qwen3_5Moe"), {"num_local_experts": 11}, {"experts.experts": 11}),
    ("Qwen3Moe", {"num_local_experts": 12, "num_experts": 11}, {"experts.experts": 11}),
    (
        ("Mixtral", "Olmoe", "GptOss", *MOE, "Qwen3_5Moe", "DeepseekV3"),
        {"num_experts_per_tok": 3},
        {"experts.chosen": 3},
    ),
    (("Mixtral", "Olmoe", "GptOss"), {"intermediate_size": 40}, {"intermediate_size": 40, "experts.inner_width": 40}),
    ((*MOE, "DeepseekV3"), {"intermediate_size": 40}, {"intermediate_size": 40}),
    (
        (*MOE, "Qwen3_5Moe", "DeepseekV3"),
        {"moe_intermediate_size": 40},
        {"experts.inner_width": 40},
    ),
    (("Olmoe", "Qwen3Moe"), {"norm_topk_prob": True}, {"experts.normalized": True}),
    (("Qwen3Next", "DeepseekV3"), {"norm_topk_prob": False}, {"experts.normalized": False}),
    (MOE, {"decoder_sparse_step": 2}, {"experts.layers": (False, True, False)}),
    (MOE, {"mlp_only_layers": [1]}, {"experts.layers": (True, False, True)}),
    # transformers always normalizes these weights.
    ("Qwen3VLMoe+", {"norm_topk_prob": False}, {}),
    ("Qwen3Next", {"shared_expert_intermediate_size": 40}, {"experts.shared_width": 40}),
    (
        "Qwen3_5Moe",
        {"shared_expert_intermediate_size": 40},
        {"intermediate_size": 40, "experts.shared_width": 40},
    ),
    ("Olmoe", {"clip_qkv": 2.5}, {"qkv_bound": 2.5}),
    ("GptOss", {"swiglu_limit": 2.5}, {"experts.clamp.limit": 2.5}),
    ("GptOss", {"swiglu_alpha": 2.5}, {"experts.clamp.slope": 2.5}),
    ("DeepseekV3", {"n_routed_experts": 64}, {"experts.experts": 64}),
    ("DeepseekV3", {"num_local_experts": 64}, {"experts.experts": 64}),
    ("DeepseekV3", {"n_group": 16}, {"experts.groups": 16}),
    ("DeepseekV3", {"topk_group": 8}, {"experts.kept_groups": 8}),
    ("DeepseekV3", {"routed_scaling_factor": 1.5}, {"experts.factor": 1.5}),
    ("DeepseekV3", {"n_shared_experts": 3}, {"experts.shared": 3}),
    ("DeepseekV3", {"first_k_dense_replace": 2}, {"experts.layers": (False, False, True)}),
    ("DeepseekV3", {"first_k_dense_replace": 0}, {"experts.layers": (True, True, True)}),
    ("Glm4Moe", {"n_routed_experts": 64}, {"experts.experts": 64}),
    ("Glm4Moe", {"num_local_experts": 64}, {"experts.experts": 64}),
    ("Glm4Moe", {"n_group": 4, "topk_group": 3}, {"experts.groups": 4, "experts.kept_groups": 3}),
    ("Glm4Moe", {"num_experts_per_tok": 3}, {"experts.chosen": 3}),
    ("Glm4Moe", {"moe_intermediate_size": 40}, {"experts.inner_width": 40}),
    ("Glm4Moe", {"norm_topk_prob": False}, {"experts.normalized": False}),
    ("Glm4Moe", {"routed_scaling_factor": 1.5}, {"experts.factor": 1.5}),
    ("Glm4Moe", {"n_shared_experts": 3}, {"experts.shared": 3}),
    ("Glm4Moe", {"first_k_dense_replace": 2}, {"experts.layers": (False, False, True)}),
    ("Glm4Moe", {"first_k_dense_replace": 3}, {"experts": None}),
    # Windows
    ("Phi3", {"sliding_window": 9}, {"windows": (9, 9, 9)}),
    ("SmolLM3", {"sliding_window": 9}, {}),
    (
        "SmolLM3",
        {"use_sliding_window": True, "sliding_window": 9, "no_rope_layers": [0, 1, 0]},
        {"rotated": (False, True, False), "windows": (9, None, 9)},
    ),
    (
        "SmolLM3",
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        },
        {"windows": (9, None, None)},
    ),
    ("Mixtral", {"sliding_window": 9}, {"windows": (9, 9, 9)}),
    ("Mixtral", {"sliding_window": None}, {"windows": (None, None, None)}),
    ("Qwen3Moe", {"use_sliding_window": True}, {"windows": (4096, 4096, 4096)}),
    ("Qwen3Moe", {"sliding_window": 9}, {}),
    ("Qwen3Moe", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}, {"windows": (9, 9, 9)}),
    ("Qwen2_5_VL", {"use_sliding_window": True}, {}),
    ("Qwen2_5_VL", {"use_sliding_window": True, "max_window_layers": 2}, {"windows": (None, None, 4096)}),
    ("GptOss", {"sliding_window": 9}, {"windows": (9, None, 9)}),
    (
        "GptOss",
        {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        {"windows": (None, 128, None)},
    ),
    ("Gemma2", {"sliding_window": 9}, {"windows": (9, None, 9)}),
    ("Gemma3", {"sliding_window_pattern": 3}, {"windows": (4096, 4096, None)}),
    ("Gemma2", {"sliding_window_pattern": 3}, {}),
    # Attention
    ("Glm4Moe", {"use_qk_norm": True}, {"qk_norm": True}),
    (("Gemma2", "Gemma3"), {"query_pre_attn_scalar": 9}, {"query_pre_attn_scalar": 9}),
    ("Gemma2", {"attn_logit_softcapping": 9.0}, {"attention_soft_cap": 9.0}),
    ("Gemma2", {"final_logit_softcapping": 9.0}, {"logit_soft_cap": 9.0}),
    (("Gemma2", "Gemma3", *GEMMA4), {"hidden_activation": "silu"}, {"activation": "silu"}),
    (GEMMA4, {"attention_bias": True}, {"qkv_bias": True, "output_bias": True}),
    (GEMMA4, {"final_logit_softcapping": 9.0}, {"logit_soft_cap": 9.0}),
    (GEMMA4, {"sliding_window": 9}, {"windows": (9, 9, None)}),
    (GEMMA4, {"layer_types": ["full_attention", *["sliding_attention"] * 2]}, {"windows": (None, 512, None)}),
    (GEMMA4, {"head_dim": 10}, {"head_dim": 10, "window_rope.head_dim": 10}),
    (
        GEMMA4,
        {"global_head_dim": 16},
        {"shared_keys.full_head_dim": 16, "rope.head_dim": 16, "rope.rotary_dim": 4},
    ),
    (GEMMA4, {"num_global_key_value_heads": 2}, {}),
    (
        GEMMA4,
        {"attention_k_eq_v": True, "num_global_key_value_heads": 2},
        {"shared_keys.values_from_keys": True, "shared_keys.full_kv_heads": 2},
    ),
    (GEMMA4, {"num_key_value_heads": 8}, {"kv_heads": 8, "shared_keys.full_kv_heads": 8}),
    (
        GEMMA4,
        {"per_layer_config": {"2": {"num_key_value_heads": 2, "head_dim": 512}}},
        {"shared_keys.full_kv_heads": 2},
    ),
    (
        GEMMA4,
        {"num_kv_shared_layers": 1, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        {"shared_keys.readers": 1, "windows": (None, 512, None)},
    ),
    (GEMMA4, {"use_double_wide_mlp": True}, {"shared_keys.wide_mlp": True}),
    (GEMMA4, {"hidden_size_per_layer_input": 8}, {"per_layer.width": 8}),
    (GEMMA4, {"vocab_size_per_layer_input": 105}, {"per_layer.vocab_size": 105}),
    (GEMMA4, {"num_experts": 8}, {}),
    (("Gemma2", "Gemma3"), {"hidden_act": "silu"}, {}),
    ("Gemma3", {"rope_theta": 7.0}, {"rope.theta": 7.0}),
    ("Gemma3", {"rope_local_base_freq": 7.0}, {"window_rope.theta": 7.0}),
    ("Gemma3", {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}, {"rope.scaling": LinearScaling(3.0)}),
    (
        "Gemma3",
        {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 3.0}}},
        {"window_rope.scaling": LinearScaling(3.0)},
    ),
    ("GptOss", {"rope_theta": 7.0}, {"rope.theta": 7.0}),
    (
        "GptOss",
        {"rope_scaling": YARN},
        {
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_max_position_embeddings": 64,
            "rope.scaling.truncate": True,
        },
    ),
    ("DeepseekV3", {"q_lora_rank": 9}, {"latent.q_rank": 9}),
    ("DeepseekV3", {"q_lora_rank": None}, {"latent.q_rank": None}),
    ("DeepseekV3", {"kv_lora_rank": 9}, {"latent.kv_rank": 9}),
    ("DeepseekV3", {"qk_nope_head_dim": 9}, {"latent.nope_dim": 9}),
    ("DeepseekV3", {"v_head_dim": 9}, {"latent.value_dim": 9}),
    ("DeepseekV3", {"qk_rope_head_dim": 10}, {"head_dim": 10, "rope.head_dim": 10}),
    ("DeepseekV3", {"rope_interleave": False}, {"latent.interleaved": False}),
    (LINEAR, {"linear_num_key_heads": 8}, {"delta.key_heads": 8}),
    (LINEAR, {"linear_num_value_heads": 48}, {"delta.value_heads": 48}),
    (LINEAR, {"linear_key_head_dim": 9}, {"delta.key_dim": 9}),
    (LINEAR, {"linear_value_head_dim": 9}, {"delta.value_dim": 9}),
    (LINEAR, {"linear_conv_kernel_dim": 3}, {"delta.taps": 3}),
    (LINEAR, {"full_attention_interval": 2}, {"delta.layers": (True, False, True)}),
    (("Qwen3Next", "Qwen3_5"), {"partial_rotary_factor": 0.5}, {"rope.rotary_dim": 128}),
    (
        "KimiK25+",
        {"qk_rope_head_dim": 10, "kv_lora_rank": 9},
        {"head_dim": 10, "rope.head_dim": 10, "latent.kv_rank": 9},
    ),
    # Images
    ("KimiK25+", {"media_placeholder_token_id": 0}, {"image_token": 0, "video_token": 0}),
    ("KimiK25+", {"image_token_id": 0}, {"image_token": 0, "video_token": 0}),
    ("KimiK25+", {"video_placeholder": "<video>"}, {"video_text": "<video>"}),
    ("KimiK25+", {"video_token_id": 0}, {}),
    ("KimiK25+", {"projection_layer_norm_eps": 0.5}, {"vision.projector_eps": 0.5}),
    (TOWER, {"image_token_id": 0}, {"image_token": 0}),
    (TOWER, {"video_token_id": 0}, {"video_token": 0}),
    (WITH_TIMES, {"vision_start_token_id": 0}, {"vision_start_token": 0}),
    (WITH_TIMES, {"vision_end_token_id": 0}, {"vision_end_token": 0}),
    ("Qwen3_5", {"image_token_id": 0}, {}),
]
VISION: list[tuple[str | tuple[str, ...], dict[str, Any], dict[str, Any]]] = [
    (TOWER, {"patch_size": 7}, {"patch_size": 7}),
    (TOWER, {"temporal_patch_size": 3}, {"temporal_patch_size": 3}),
    (TOWER, {"spatial_merge_size": 3}, {"merge_size": 3}),
    (TOWER, {"intermediate_size": 99}, {"inner_width": 99}),
    (TOWER, {"num_heads": 8}, {"heads": 8}),
    (TOWER, {"hidden_size": 64}, {"width": 64}),
    (TOWER, {"rope_parameters": {"rope_type": "axial", "rope_theta": 7.0}}, {"theta": 7.0}),
    ("Qwen2_5_VL", {"depth": 16}, {"blocks": 16, "full_blocks": (7, 15)}),
    ("Qwen2_5_VL", {"depth": 15}, {"blocks": 15, "full_blocks": (7,)}),
    (("Qwen3_5+", "Qwen3_5Moe+"), {"depth": 3}, {"blocks": 3, "full_blocks": (0, 1, 2)}),
    (("Qwen3VL+", "Qwen3VLMoe+"), {"depth": 26}, {"blocks": 26, "full_blocks": tuple(range(26))}),
    (("Qwen3VL+", "Qwen3VLMoe+"), {"deepstack_visual_indexes": [0, 24]}, {"deepstack_blocks": (0, 24)}),
    ("Qwen3VL+", {"deepstack_visual_indexes": []}, {"deepstack_blocks": ()}),
    ("Qwen2_5_VL", {"window_size": 56}, {"window_size": 56}),
    ("Qwen2_5_VL", {"fullatt_block_indexes": [3, 1, 3]}, {"full_blocks": (1, 3)}),
    ("Qwen2_5_VL", {"tokens_per_second": 2}, {"tokens_per_second": 2}),
    ("Qwen3_5+", {"num_position_embeddings": 9}, {"positions": 9}),
    ("KimiK25+", {"vt_hidden_size": 64}, {"width": 64}),
    ("KimiK25+", {"num_attention_heads": 8}, {"heads": 8}),
    ("KimiK25+", {"vt_num_hidden_layers": 2}, {"blocks": 2, "full_blocks": (0, 1)}),
    ("KimiK25+", {"intermediate_size": 99}, {"inner_width": 99}),
    ("KimiK25+", {"patch_size": 7}, {"patch_size": 7}),
    ("KimiK25+", {"init_pos_emb_height": 3, "pos_emb_width": 3}, {"positions": 9}),
    ("KimiK25+", {"init_pos_emb_time": 9}, {"most_frames": 9}),
    ("KimiK25+", {"projector_ln_eps": 0.5}, {"projector_eps": 0.5}),
    ("KimiK25+", {"rope_parameters": {"rope_type": "axial", "rope_theta": 7.0}}, {"theta": 7.0}),
]


def cases(table: list[tuple[str | tuple[str, ...], dict[str, Any], dict[str, Any]]]) -> list[Any]:
    return [
        pytest.param(family, changes, expected, id=f"{family} {' '.join(changes)}")
        for names, changes, expected in table
        for family in ((names,) if isinstance(names, str) else names)
    ]


def check_alone(family: str, changes: dict[str, Any], expected: dict[str, Any]) -> None:
    before, changed = leaves(read(family, **some_config(family))), read(family, **some_config(family), **changes)
    after = leaves(changed)
    assert {path: value for path, value in after.items() if before.get(path, ...) != value} == leaves_of(expected)
    assert DecoderConfig.from_hugging_face(changed.to_hugging_face(), "config.json") == changed


def leaves_of(expected: dict[str, Any]) -> dict[str, Any]:
    return {name: leaf for path, value in expected.items() for name, leaf in leaves(value, path).items()}


@pytest.mark.parametrize(("family", "changes", "expected"), cases(ALONE))
def test_a_key_alone_changes_its_field_alone_and_is_written(
    family: str, changes: dict[str, Any], expected: dict[str, Any]
) -> None:
    check_alone(family, changes, expected)


@pytest.mark.parametrize(("family", "changes", "expected"), cases(VISION))
def test_a_key_of_a_tower_alone_changes_its_field_alone_and_is_written(
    family: str, changes: dict[str, Any], expected: dict[str, Any]
) -> None:
    tower = OF_FAMILY[family].get("vision_config", {}) | changes
    check_alone(family, {"vision_config": tower}, {f"vision.{name}": value for name, value in expected.items()})


@pytest.mark.parametrize(
    ("key", "refused", "neutral"),
    [
        ("partial_rotary_factor", 0.5, 1.0),
        ("pretraining_tp", 2, 1),
        ("num_experts", 8, 0),
        ("num_local_experts", 8, 0),
        ("n_routed_experts", 8, 0),
        ("per_layer_config", {"0": {}}, {}),
        ("is_causal", False, True),
        ("is_encoder_decoder", True, False),
        ("add_cross_attention", True, False),
    ],
)
def test_what_would_change_the_result_is_refused_and_what_would_not_is_read(
    key: str, refused: Any, neutral: Any
) -> None:
    with pytest.raises(CheckpointError, match=f"^some/config.json: {key} is .*; accepted: "):
        read("Llama", **{key: refused})
    assert read("Llama", **{key: neutral}) == read("Llama", **{key: None}) == read("Llama")


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("Olmoe", {"num_local_experts": 8}, "num_local_experts is 8; accepted: 0, null"),
        ("Mixtral", {"num_experts": 8}, "num_experts is 8; accepted: 0, null"),
        ("Olmoe", {"clip_qkv": 0}, "clip_qkv is 0; accepted: a finite number > 0, null"),
        ("Olmoe", {"clip_qkv": -1.0}, "clip_qkv is -1.0"),
        ("Olmoe", {"num_experts": 65537}, "num_experts is 65537; accepted: an integer from 1 to 65536"),
        ("Mixtral", {"num_local_experts": 65537}, "num_local_experts is 65537"),
        ("Qwen3Moe", {"num_local_experts": 65537}, "num_local_experts is 65537"),
        ("Qwen3Moe", {"num_experts": 0}, "num_experts is 0; accepted: an integer >= 1"),
        ("Qwen3Moe", {"mlp_only_layers": ["1"]}, "mlp_only_layers is ['1']; accepted: a list of integers"),
        ("Qwen3Moe", {"mlp_only_layers": 1}, "mlp_only_layers is 1; accepted: a list of integers"),
        ("Qwen3Moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ("Qwen3Moe", {"layer_types": ["sliding_attention"] * 3}, "full_attention for every layer, as qwen3_moe"),
        ("Mixtral", {"layer_types": ["full_attention"] * 3}, "sliding_attention for every layer, as mixtral"),
        ("Mixtral", {"num_experts_per_tok": 0}, "num_experts_per_tok is 0"),
    ],
)
def test_mixtures_that_are_not_served_are_refused_by_key(family: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError) as error:
        read(family, **changes)
    assert str(error.value).startswith("some/config.json: ") and words in str(error.value)


def test_the_most_experts_and_layers_are_taken() -> None:
    experts = read("Olmoe", num_experts=65536).experts
    assert experts is not None and experts.experts == 65536
    assert read("Llama", num_hidden_layers=4096).layers == 4096
