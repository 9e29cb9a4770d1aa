"""Writes the tiny checkpoints of `tests/fixtures/`, each with the outputs that transformers computed from it.

    pip install torch==2.13.0 torchvision==0.28.0 transformers==5.23.0        (Python 3.11)
    python tools/make_fixtures.py [--only NAME]

detjax itself needs none of them, and only the fixture with a video needs torchvision: tests read the files that this
tool left behind. A fixture is a Hugging Face checkpoint with random weights, `reference.npz` and, where it has a
tokenizer, `reference.json`:

    tokens        int32 [T]        random
    logits        float32 [T, V]   of `tokens`, in float32 from the stored weights
    prompt        int32 [t]        a prefix of `tokens`
    continuation  int32 [n]        the greedy one of `prompt`; no token of it ends a sequence

Where the model takes images, `tokens` and `prompt` hold them, and `reference.npz` has further arrays:

    image_<i>     uint8 [h, w, 3]  an image, as `preprocessor_config.json` lets it be resized
    patches       float32 [N, P]   of all images, as transformers processed them
    grids         int32 [i, 2]     rows and columns of patches of each image
    rows          float32 [n, D]   what the vision tower made of them, a row for each image token

Where it takes a video, `video` is uint8 [F, h, w, 3], and `video_patches`, `video_grid`, int32 [3], and `video_rows`
are what these are for images; `fps` is the number of frames of a second.

Where the prompt says the times of a video's frames, `reference.npz` has what the processor and the network make of a
conversation with a video and an image:

    clip               uint8 [F, h, w, 3]  the video before frames of it are chosen
    clip_fps           float64 []          frames of a second of it
    clip_text          str                 the conversation, with one token for the video and one for the image
    clip_prompt        int32 [t]           its tokens, as the processor writes them
    clip_patches       str                 the SHA-256 of the video's patches, float32 [N, P]
    clip_grid          int32 [3]           frames of the tower, and rows and columns of patches of each
    clip_rows          float32 [n, D]      what the vision tower made of them
    clip_logits        float32 [., V]      of every fourth token of the prompt, from the first one on
    clip_continuation  int32 [n]           the greedy one of the prompt

A seed is accepted if every setting in the fixture's `matters` changes the logits, no greedy choice is close to a tie,
and the continuation does not repeat itself. On one kind of CPU, with the versions above,
the files come out the same byte for byte.
"""

import argparse
import copy
import hashlib
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# Checkpoints and tokenizers are made from nothing here. Nothing may come from the network or from its cache.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

VERSIONS = {"torch": "2.13.0", "transformers": "5.23.0"}
INSTALL = f"pip install torch=={VERSIONS['torch']} transformers=={VERSIONS['transformers']} (Python 3.11)"

try:
    import numpy as np
    import safetensors.torch
    import tokenizers
    import torch
    import transformers
except ImportError as error:
    sys.exit(f"make_fixtures: {error.name} is not installed for {sys.executable}; install it: {INSTALL}")

# Some settings are odd on purpose, and transformers would warn of them on every load.
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

FIXTURES = Path(__file__).resolve().parent.parent / "tests" / "fixtures"
MAX_TOTAL_BYTES = 10_000_000

# 128 positions are one block of detjax's attention: the sequence and the continuation both have to cross its end.
TOKENS = 163
PROMPT = 109
CONTINUATION = 40

MIN_GREEDY_GAP = 2e-3
MIN_EFFECT = 1e-2
MIN_LOGITS_STD = 1.0
MIN_DISTINCT = 20
MAX_FLOAT64_DIFFERENCE = 1e-4
MAX_RELOAD_DIFFERENCE = 2e-5
MAX_SEED = 2000

# The others differ in their last places, and do not take float64.
IMPLEMENTATIONS = {"attn_implementation": "eager", "experts_implementation": "eager"}

# What published checkpoints hold beside the text model; their shapes do not matter to who passes them over.
NOT_OF_THE_TEXT_MODEL = ("model.visual.patch_embed.proj.weight", "mtp.fc.weight", "mtp.layers.0.mlp.gate.weight")

# The end of the names of buffers that stay float32 in every checkpoint.
CORRECTION = "e_score_correction_bias"

Config = transformers.PreTrainedConfig
Weights = dict[str, torch.Tensor]
# Removes one setting from a copy of a model, in place. What neither the configuration nor weights say is removed from
# the network itself, by a function that is returned.
Removal = Callable[[Config, Weights], Callable[[transformers.PreTrainedModel], None] | None]


class Unfit(Exception):
    """A seed gives a fixture that would test too little, so the next seed is tried."""


# --- settings that are removed to show that they matter --------------------------------------------------------------


def no_rope_scaling(config: Config, weights: Weights) -> None:
    config.rope_parameters = {"rope_type": "default", "rope_theta": config.rope_parameters["rope_theta"]}


def no_yarn_attention_factor(config: Config, weights: Weights) -> None:
    config.rope_parameters = {**config.rope_parameters, "attention_factor": 1.0}


def yarn_factor_from_max_position(config: Config, weights: Weights) -> None:
    ratio = config.max_position_embeddings / config.rope_parameters["original_max_position_embeddings"]
    config.rope_parameters = {**config.rope_parameters, "factor": ratio}


def rope_theta_10000(config: Config, weights: Weights) -> None:
    config.rope_parameters = {**config.rope_parameters, "rope_theta": 10000.0}


def rope_theta_of(layer_type: str, theta: float) -> Removal:
    def change(config: Config, weights: Weights) -> None:
        changed = {**config.rope_parameters[layer_type], "rope_theta": theta}
        config.rope_parameters = {**config.rope_parameters, layer_type: changed}

    change.__name__ = f"rope_theta_of_{layer_type}_{theta:.0f}"
    return change


def no_rope_scaling_of_full_layers(config: Config, weights: Weights) -> None:
    unscaled = {"rope_type": "default", "rope_theta": config.rope_parameters["full_attention"]["rope_theta"]}
    config.rope_parameters = {**config.rope_parameters, "full_attention": unscaled}


def rope_scaling_of_sliding_layers(config: Config, weights: Weights) -> None:
    full, sliding = (config.rope_parameters[name] for name in ("full_attention", "sliding_attention"))
    scaled = {**full, "rope_theta": sliding["rope_theta"]}
    config.rope_parameters = {**config.rope_parameters, "sliding_attention": scaled}


def layer_types_of_pattern(pattern: int) -> Removal:
    def change(config: Config, weights: Weights) -> None:
        layers = range(config.num_hidden_layers)
        config.layer_types = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in layers]

    change.__name__ = f"layer_types_of_pattern_{pattern}"
    return change


def scores_scaled_by_head_dim(config: Config, weights: Weights) -> None:
    config.query_pre_attn_scalar = config.head_dim


def no_attention_soft_cap(config: Config, weights: Weights) -> None:
    config.attn_logit_softcapping = None


def no_logit_soft_cap(config: Config, weights: Weights) -> None:
    config.final_logit_softcapping = None


def silu_in_the_gate(config: Config, weights: Weights) -> None:
    config.hidden_activation = "silu"


def norms_around_zero(*names: str) -> Removal:
    """Norms of these names get the weight 0, under which they multiply by 1."""

    def change(config: Config, weights: Weights) -> None:
        for name, weight in weights.items():
            if name.endswith(tuple(f"{ending}.weight" for ending in names)):
                weight.zero_()

    change.__name__ = f"{'_and_'.join(names)}_around_zero"
    return change


def no_sliding_window(config: Config, weights: Weights) -> None:
    config.sliding_window = None
    if hasattr(config, "layer_types"):
        config.layer_types = ["full_attention"] * config.num_hidden_layers


def sliding_window_one_longer(config: Config, weights: Weights) -> None:
    config.sliding_window += 1


def sliding_window_everywhere(config: Config, weights: Weights) -> None:
    config.layer_types = ["sliding_attention"] * config.num_hidden_layers


def rms_norm_eps_1e6(config: Config, weights: Weights) -> None:
    config.rms_norm_eps = 1e-6


def no_attention_biases(config: Config, weights: Weights) -> None:
    for name, weight in weights.items():
        if "self_attn" in name and name.endswith(".bias"):
            weight.zero_()


def no_mlp_biases(config: Config, weights: Weights) -> None:
    for name, weight in weights.items():
        if "mlp" in name and name.endswith(".bias"):
            weight.zero_()


def unit_qk_norms(config: Config, weights: Weights) -> None:
    for name, weight in weights.items():
        if "q_norm" in name or "k_norm" in name:
            weight.fill_(1.0)


def other_weights_of_experts(config: Config, weights: Weights) -> None:
    config.norm_topk_prob = not config.norm_topk_prob


def one_expert_fewer(config: Config, weights: Weights) -> None:
    config.num_experts_per_tok -= 1


def unbounded_qkv(config: Config, weights: Weights) -> None:
    config.clip_qkv = None


def no_correction_of_scores(config: Config, weights: Weights) -> None:
    for name, weight in weights.items():
        if name.endswith(CORRECTION):
            weight.zero_()


def no_groups_of_experts(config: Config, weights: Weights) -> None:
    config.n_group = config.topk_group = 1


def unscaled_weights_of_experts(config: Config, weights: Weights) -> None:
    config.routed_scaling_factor = 1.0


def no_shared_experts(config: Config, weights: Weights) -> None:
    for name, weight in weights.items():
        if "shared_experts.down_proj" in name:
            weight.zero_()


def all_columns_turn(config: Config, weights: Weights) -> None:
    config.rope_parameters = {**config.rope_parameters, "partial_rotary_factor": 1.0}


def no_shared_expert(config: Config, weights: Weights) -> None:
    for name, weight in weights.items():
        if "shared_expert.down_proj" in name:
            weight.zero_()


def shared_expert_half_open(config: Config, weights: Weights) -> None:
    for name, weight in weights.items():
        if "shared_expert_gate" in name:
            weight.zero_()


def attention_half_open(config: Config, weights: Weights) -> None:
    for name, weight in weights.items():
        if "self_attn.q_proj" in name:
            weight.view(config.num_attention_heads, 2, config.head_dim, -1)[:, 1].zero_()


def no_forgetting(config: Config, weights: Weights) -> None:
    for name, weight in weights.items():
        if name.endswith("A_log"):
            weight.fill_(-30.0)


def no_time_biases(config: Config, weights: Weights) -> None:
    for name, weight in weights.items():
        if name.endswith("dt_bias"):
            weight.zero_()


def the_last_tap_alone(config: Config, weights: Weights) -> None:
    for name, weight in weights.items():
        if name.endswith("conv1d.weight"):
            weight[..., :-1].zero_()


def no_sinks(config: Config, weights: Weights) -> None:
    for name, weight in weights.items():
        if name.endswith("sinks"):
            weight.fill_(-100.0)


def no_bounds_of_experts(config: Config, weights: Weights) -> None:
    config.swiglu_limit = 1e6


def default_bounds_of_experts(config: Config, weights: Weights) -> None:
    config.swiglu_limit = 7.0


def default_slope_of_experts(config: Config, weights: Weights) -> None:
    config.swiglu_alpha = 1.702


def no_router_biases(config: Config, weights: Weights) -> None:
    for name, weight in weights.items():
        if name.endswith("router.bias"):
            weight.zero_()


def no_biases_of(projection: str) -> Removal:
    def change(config: Config, weights: Weights) -> None:
        for name, weight in weights.items():
            if name.endswith(f"{projection}_bias"):
                weight.zero_()

    change.__name__ = f"no_biases_of_{projection}"
    return change


def gate_and_up_in_halves(config: Config, weights: Weights) -> None:
    for name, weight in weights.items():
        if name.endswith("gate_up_proj"):
            weight.copy_(torch.cat([weight[..., ::2], weight[..., 1::2]], dim=-1))


def yarn_with_whole_ends(config: Config, weights: Weights) -> None:
    config.rope_parameters = {**config.rope_parameters, "truncate": True}


def pairs_half_a_row_apart(config: Config, weights: Weights) -> None:
    config.rope_interleave = False


def attention_scale_without_mscale(config: Config, weights: Weights) -> Callable[[transformers.PreTrainedModel], None]:
    def change(model: transformers.PreTrainedModel) -> None:
        for layer in model.model.layers:
            layer.self_attn.scaling = config.qk_head_dim**-0.5

    return change


def other_sections(config: Config, weights: Weights) -> None:
    parameters = config.text_config.rope_parameters
    config.text_config.rope_parameters = {**parameters, "mrope_section": parameters["mrope_section"][::-1]}


def sections_of_time_alone(config: Config, weights: Weights) -> None:
    parameters = config.text_config.rope_parameters
    config.text_config.rope_parameters = {**parameters, "mrope_section": [sum(parameters["mrope_section"]), 0, 0]}


def windows_in_all_blocks(config: Config, weights: Weights) -> None:
    config.vision_config.fullatt_block_indexes = []


def whole_images_in_all_blocks(config: Config, weights: Weights) -> None:
    config.vision_config.fullatt_block_indexes = list(range(config.vision_config.depth))


def smaller_windows(config: Config, weights: Weights) -> None:
    config.vision_config.window_size -= config.vision_config.patch_size * config.vision_config.spatial_merge_size


def no_biases_of_the_tower(config: Config, weights: Weights) -> None:
    for name, weight in weights.items():
        if ".visual." in name and name.endswith(".bias"):
            weight.zero_()


def no_learned_positions(config: Config, weights: Weights) -> None:
    for name, weight in weights.items():
        if name.endswith("visual.pos_embed.weight"):
            weight.zero_()


def times_as_slow(config: Config, weights: Weights) -> None:
    config.vision_config.tokens_per_second = 1


def tower_turned_by(theta: float) -> Removal:
    def change(config: Config, weights: Weights) -> None:
        config.vision_config.rope_parameters = {**config.vision_config.rope_parameters, "rope_theta": theta}

    change.__name__ = f"tower_turned_by_{theta:.0f}"
    return change


def latent_norms_with_rms_norm_eps(config: Config, weights: Weights) -> Callable[[transformers.PreTrainedModel], None]:
    def change(model: transformers.PreTrainedModel) -> None:
        for name, module in model.named_modules():
            if name.endswith("_a_layernorm"):
                module.variance_epsilon = config.rms_norm_eps

    return change


# --- the fixtures ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fixture:
    """One checkpoint: its configuration, how it is stored, and what has to matter in it."""

    name: str
    about: str
    config: Config
    stored: torch.dtype
    matters: tuple[Removal, ...]
    embedding_std: float
    shard_size: str | None = None
    chat: bool = False
    transformers_4_config: bool = False
    # Keys of the published config.json that transformers does not write.
    published_keys: tuple[tuple[str, object], ...] = ()
    # The class of the multimodal model in whose published form it is stored: its text model nested in config.json,
    # under other names, one tensor for all experts, and tensors of other parts. Without images, it has no tower.
    multimodal: type[Config] | None = None
    # The ends of the names of tensors [E, inputs, outputs] that are drawn so that MXFP4 holds them, and stored in it.
    mxfp4: tuple[str, ...] = ()
    # Height and width of each image, and where its tokens begin; the processor's least and most pixels.
    images: tuple[tuple[int, int, int], ...] = ()
    pixels: tuple[int, int] = (0, 0)
    # Frames, height and width of a video, where its tokens begin, and its frames per second.
    video: tuple[int, int, int, int, float] | None = None
    # Frames, height and width of a video whose times the prompt says, and its frames per second.
    clip: tuple[int, int, int, float] | None = None


ALL = (
    Fixture(
        name="qwen3",
        about="GQA 7:1 with 2 KV heads, head_dim 80 (not hidden_size / heads), hidden_size 72, q/k norms, tied "
        "embeddings, vocabulary 515 of which the tokenizer names 512; tokenizer, chat template and generation config",
        config=transformers.Qwen3Config(
            vocab_size=515,
            hidden_size=72,
            intermediate_size=104,
            num_hidden_layers=2,
            num_attention_heads=14,
            num_key_value_heads=2,
            head_dim=80,
            max_position_embeddings=512,
            rms_norm_eps=1e-6,
            rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
            tie_word_embeddings=True,
        ),
        stored=torch.bfloat16,
        matters=(unit_qk_norms, rope_theta_10000),
        embedding_std=0.25,
        chat=True,
    ),
    Fixture(
        name="qwen3-yarn",
        about="YaRN: factor 4 (max_position_embeddings / original_max_position_embeddings is 8 and must not be taken "
        "for it), no attention_factor given; untied; in shards with an index",
        config=transformers.Qwen3Config(
            vocab_size=521,
            hidden_size=64,
            intermediate_size=120,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=256,
            rms_norm_eps=1e-6,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
            tie_word_embeddings=False,
            bos_token_id=0,
            eos_token_id=1,
        ),
        stored=torch.bfloat16,
        matters=(no_rope_scaling, no_yarn_attention_factor, yarn_factor_from_max_position, unit_qk_norms),
        embedding_std=0.25,
        shard_size="150KB",
    ),
    Fixture(
        name="qwen2",
        about="biases on q, k and v; GQA 7:1 with 1 KV head of head_dim 8; sliding window 48 on the last 2 of 3 "
        "layers; tied embeddings",
        config=transformers.Qwen2Config(
            vocab_size=512,
            hidden_size=56,
            intermediate_size=136,
            num_hidden_layers=3,
            num_attention_heads=7,
            num_key_value_heads=1,
            max_position_embeddings=512,
            rms_norm_eps=1e-6,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            use_sliding_window=True,
            sliding_window=48,
            max_window_layers=1,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=1,
        ),
        stored=torch.bfloat16,
        matters=(no_attention_biases, no_sliding_window, sliding_window_one_longer, sliding_window_everywhere),
        embedding_std=0.25,
    ),
    Fixture(
        name="llama3",
        about="llama3 rope scaling with original_max_position_embeddings 32, rope_theta 500000, head_dim 96, GQA 3:1, "
        "hidden_size 72, vocabulary 509, rms_norm_eps 1e-5, untied",
        config=transformers.LlamaConfig(
            vocab_size=509,
            hidden_size=72,
            intermediate_size=112,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=96,
            max_position_embeddings=256,
            rms_norm_eps=1e-5,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
            tie_word_embeddings=False,
            bos_token_id=0,
            eos_token_id=[1, 2],
        ),
        stored=torch.bfloat16,
        matters=(no_rope_scaling, rope_theta_10000, rms_norm_eps_1e6),
        # Small, so that a wrong rms_norm_eps shows: the first norm sees a mean square of 1e-3.
        embedding_std=0.03,
    ),
    Fixture(
        name="llama-linear",
        about="linear rope scaling, as many KV heads as heads, biases in attention and MLP; config.json in the form of "
        'transformers 4 (rope_theta, rope_scaling with "type", torch_dtype; head_dim absent); no generation config',
        config=transformers.LlamaConfig(
            vocab_size=500,
            hidden_size=96,
            intermediate_size=88,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=256,
            rms_norm_eps=1e-6,
            rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=False,
            bos_token_id=1,
            eos_token_id=2,
        ),
        stored=torch.float16,
        matters=(no_rope_scaling, no_attention_biases, no_mlp_biases),
        embedding_std=0.25,
        transformers_4_config=True,
    ),
    Fixture(
        name="mistral",
        about="sliding window 40 on every layer, 6 heads on 1 KV head, head_dim 56 (not hidden_size / heads), "
        "vocabulary 211, rms_norm_eps 1e-5, untied",
        config=transformers.MistralConfig(
            vocab_size=211,
            hidden_size=88,
            intermediate_size=72,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=1,
            head_dim=56,
            max_position_embeddings=512,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            sliding_window=40,
            tie_word_embeddings=False,
            bos_token_id=1,
            eos_token_id=2,
        ),
        stored=torch.float32,
        matters=(no_sliding_window, sliding_window_one_longer, rms_norm_eps_1e6),
        embedding_std=0.03,
    ),
    Fixture(
        name="gemma2",
        about="norms of what attention and MLP give, weights of norms less 1; bounds of scores (2) and of logits (6) "
        "that bite; query_pre_attn_scalar 40 with head_dim 24; window 37 on layers 2 and 3 of 3 (not the default "
        "pattern); gelu-tanh; embeddings times sqrt(44); vocabulary 139, untied",
        config=transformers.Gemma2Config(
            vocab_size=139,
            hidden_size=44,
            intermediate_size=52,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=24,
            max_position_embeddings=512,
            rms_norm_eps=1e-6,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            query_pre_attn_scalar=40,
            sliding_window=37,
            layer_types=["full_attention", "sliding_attention", "sliding_attention"],
            attn_logit_softcapping=2.0,
            final_logit_softcapping=6.0,
            tie_word_embeddings=False,
        ),
        stored=torch.bfloat16,
        matters=(
            no_attention_soft_cap,
            no_logit_soft_cap,
            scores_scaled_by_head_dim,
            silu_in_the_gate,
            layer_types_of_pattern(2),
            sliding_window_one_longer,
            sliding_window_everywhere,
            norms_around_zero("input_layernorm"),
            norms_around_zero("post_attention_layernorm"),
            norms_around_zero("pre_feedforward_layernorm"),
            norms_around_zero("post_feedforward_layernorm"),
        ),
        embedding_std=0.25,
    ),
    Fixture(
        name="gemma3",
        about="Gemma 2's layers with q/k norms, tied embeddings; window 29 with rope_local_base_freq 100 on layers 1 "
        "and 3 of 3, the other layer with rope_theta 1000000 and linear scaling by 4; query_pre_attn_scalar 50 with "
        "head_dim 32; a bound of logits (9), and one of scores that transformers does not apply; config.json in the "
        "form of transformers 4 (rope_theta, rope_local_base_freq, rope_scaling, sliding_window_pattern 2); no "
        "generation config",
        config=transformers.Gemma3TextConfig(
            vocab_size=149,
            hidden_size=42,
            intermediate_size=56,
            num_hidden_layers=3,
            num_attention_heads=3,
            num_key_value_heads=1,
            head_dim=32,
            max_position_embeddings=512,
            rms_norm_eps=1e-6,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
            query_pre_attn_scalar=50,
            sliding_window=29,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            attn_logit_softcapping=1.0,
            final_logit_softcapping=9.0,
        ),
        stored=torch.bfloat16,
        matters=(
            no_rope_scaling_of_full_layers,
            rope_scaling_of_sliding_layers,
            rope_theta_of("full_attention", 100.0),
            rope_theta_of("full_attention", 10000.0),
            rope_theta_of("sliding_attention", 10000.0),
            rope_theta_of("sliding_attention", 1000000.0),
            no_logit_soft_cap,
            scores_scaled_by_head_dim,
            silu_in_the_gate,
            layer_types_of_pattern(6),
            sliding_window_one_longer,
            norms_around_zero("q_norm", "k_norm"),
            norms_around_zero("post_attention_layernorm"),
            norms_around_zero("post_feedforward_layernorm"),
        ),
        embedding_std=0.08,
        transformers_4_config=True,
    ),
    Fixture(
        name="deepseek-v3",
        about="latent attention: q_lora_rank 40, kv_lora_rank 32, heads of 24 + 16 columns with values of 20; YaRN "
        "with mscale 0.7 and mscale_all_dim 1.3, rms_norm_eps 0.05, which the norms of latents do not have; 3 of 8 "
        "experts from 2 of 4 groups and a shared one in layer 1, an MLP in layer 0; a float32 correction of scores",
        config=transformers.DeepseekV3Config(
            vocab_size=144,
            hidden_size=48,
            intermediate_size=72,
            moe_intermediate_size=20,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            n_routed_experts=8,
            num_experts_per_tok=3,
            n_group=4,
            topk_group=2,
            first_k_dense_replace=1,
            q_lora_rank=40,
            kv_lora_rank=32,
            qk_nope_head_dim=24,
            qk_rope_head_dim=16,
            v_head_dim=20,
            max_position_embeddings=256,
            rms_norm_eps=0.05,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 32,
                "mscale": 0.7,
                "mscale_all_dim": 1.3,
            },
            tie_word_embeddings=False,
            bos_token_id=0,
            eos_token_id=1,
        ),
        stored=torch.bfloat16,
        matters=(
            no_rope_scaling,
            no_yarn_attention_factor,
            attention_scale_without_mscale,
            latent_norms_with_rms_norm_eps,
            pairs_half_a_row_apart,
            no_correction_of_scores,
            no_groups_of_experts,
            unscaled_weights_of_experts,
            other_weights_of_experts,
            one_expert_fewer,
            no_shared_experts,
        ),
        embedding_std=0.25,
    ),
    Fixture(
        name="kimi-k2",
        about="latent attention without a latent of queries, with attention biases; rope_theta 50000, YaRN with "
        "beta_fast and beta_slow 1; 2 of 6 experts and 2 shared ones in layer 1; config.json in the published form "
        "(model_type kimi_k2, auto_map, rope_scaling)",
        config=transformers.DeepseekV3Config(
            vocab_size=160,
            hidden_size=40,
            intermediate_size=56,
            moe_intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=6,
            n_routed_experts=6,
            num_experts_per_tok=2,
            n_shared_experts=2,
            n_group=1,
            topk_group=1,
            routed_scaling_factor=2.827,
            first_k_dense_replace=1,
            q_lora_rank=None,
            kv_lora_rank=24,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=16,
            max_position_embeddings=256,
            rms_norm_eps=1e-5,
            attention_bias=True,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 50000.0,
                "factor": 32.0,
                "original_max_position_embeddings": 16,
                "beta_fast": 1.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
            tie_word_embeddings=False,
            bos_token_id=0,
            eos_token_id=1,
        ),
        stored=torch.bfloat16,
        matters=(
            no_rope_scaling,
            rope_theta_10000,
            rms_norm_eps_1e6,
            attention_scale_without_mscale,
            pairs_half_a_row_apart,
            no_attention_biases,
            no_correction_of_scores,
            unscaled_weights_of_experts,
            other_weights_of_experts,
            one_expert_fewer,
            no_shared_experts,
        ),
        # Small, so that a wrong rms_norm_eps shows.
        embedding_std=0.03,
        transformers_4_config=True,
        published_keys=(
            ("model_type", "kimi_k2"),
            ("auto_map", {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}),
            ("scoring_func", "sigmoid"),
            ("topk_method", "noaux_tc"),
            ("moe_layer_freq", 1),
            ("num_nextn_predict_layers", 0),
            ("seq_aux", True),
        ),
    ),
    Fixture(
        name="qwen3-moe",
        about="3 of 7 experts in layers 0 and 2, whose weights are normalized, and an MLP in layer 1; q/k norms, "
        "head_dim 24 (not hidden_size / heads), vocabulary 157, untied; experts written one by one",
        config=transformers.Qwen3MoeConfig(
            vocab_size=157,
            hidden_size=56,
            intermediate_size=72,
            moe_intermediate_size=40,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=24,
            num_experts=7,
            num_experts_per_tok=3,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[1],
            max_position_embeddings=512,
            rms_norm_eps=1e-6,
            rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
            tie_word_embeddings=False,
            bos_token_id=0,
            eos_token_id=1,
        ),
        stored=torch.bfloat16,
        matters=(other_weights_of_experts, one_expert_fewer, unit_qk_norms, rope_theta_10000),
        embedding_std=0.25,
    ),
    Fixture(
        name="mixtral",
        about="2 of 5 experts in every layer, under the names w1, w2 and w3; sliding window 40; config.json in the "
        "form of transformers 4",
        config=transformers.MixtralConfig(
            vocab_size=163,
            hidden_size=64,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            num_local_experts=5,
            num_experts_per_tok=2,
            max_position_embeddings=512,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
            sliding_window=40,
            tie_word_embeddings=False,
            bos_token_id=1,
            eos_token_id=2,
        ),
        stored=torch.bfloat16,
        matters=(one_expert_fewer, no_sliding_window, sliding_window_one_longer, rope_theta_10000),
        embedding_std=0.25,
        transformers_4_config=True,
    ),
    Fixture(
        name="olmoe",
        about="3 of 6 experts in every layer, whose weights are not normalized; norms of all queries and of all keys "
        "of a token, queries, keys and values within 1.25, rms_norm_eps 1e-5",
        config=transformers.OlmoeConfig(
            vocab_size=149,
            hidden_size=64,
            intermediate_size=44,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_experts=6,
            num_experts_per_tok=3,
            norm_topk_prob=False,
            clip_qkv=1.25,
            max_position_embeddings=512,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            tie_word_embeddings=False,
            pad_token_id=None,
            bos_token_id=0,
            eos_token_id=1,
        ),
        stored=torch.bfloat16,
        matters=(other_weights_of_experts, one_expert_fewer, unit_qk_norms, unbounded_qkv),
        embedding_std=0.25,
    ),
    Fixture(
        name="gpt-oss",
        about="sinks, a window of 37 on the second layer of 2 (not the default pattern), biases everywhere; YaRN whose "
        "ramp does not end at whole numbers, attention_factor 1.2; 2 of 6 experts with gate and up by turns, bounds of "
        "1.1 and a slope of 1.3; widths that are no multiples of 32",
        config=transformers.GptOssConfig(
            vocab_size=137,
            hidden_size=44,
            intermediate_size=28,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=24,
            num_local_experts=6,
            num_experts_per_tok=2,
            max_position_embeddings=512,
            rms_norm_eps=1e-5,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 8.0,
                "beta_fast": 4.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
                "attention_factor": 1.2,
            },
            sliding_window=37,
            layer_types=["full_attention", "sliding_attention"],
            swiglu_alpha=1.3,
            swiglu_limit=1.1,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=1,
        ),
        stored=torch.bfloat16,
        matters=(
            no_sinks,
            sliding_window_one_longer,
            sliding_window_everywhere,
            layer_types_of_pattern(2),
            no_rope_scaling,
            no_yarn_attention_factor,
            yarn_with_whole_ends,
            no_attention_biases,
            no_router_biases,
            no_biases_of("gate_up_proj"),
            no_biases_of("down_proj"),
            gate_and_up_in_halves,
            no_bounds_of_experts,
            default_bounds_of_experts,
            default_slope_of_experts,
            one_expert_fewer,
        ),
        embedding_std=0.25,
    ),
    Fixture(
        name="gpt-oss-mxfp4",
        about="experts in MXFP4; sinks, a window of 21 on layer 1 of 2, bounds of 2; YaRN by 32 with rope_theta "
        "150000; 3 of 5 experts; config.json in the published form (quantization_config, rope_scaling, rope_theta)",
        config=transformers.GptOssConfig(
            vocab_size=141,
            hidden_size=64,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=32,
            num_local_experts=5,
            num_experts_per_tok=3,
            max_position_embeddings=4096,
            rms_norm_eps=1e-5,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 128,
            },
            sliding_window=21,
            swiglu_limit=2.0,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=1,
        ),
        stored=torch.bfloat16,
        matters=(
            no_sinks,
            sliding_window_one_longer,
            sliding_window_everywhere,
            no_rope_scaling,
            no_yarn_attention_factor,
            yarn_with_whole_ends,
            no_attention_biases,
            no_router_biases,
            no_biases_of("gate_up_proj"),
            no_biases_of("down_proj"),
            gate_and_up_in_halves,
            default_bounds_of_experts,
            one_expert_fewer,
        ),
        embedding_std=0.25,
        published_keys=(
            ("quantization_config", {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"}),
            ("rope_theta", 150000),
            (
                "rope_scaling",
                {
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "factor": 32.0,
                    "original_max_position_embeddings": 128,
                    "rope_type": "yarn",
                    "truncate": False,
                },
            ),
            ("experts_per_token", 3),
            ("initial_context_length", 128),
        ),
        mxfp4=("experts.gate_up_proj", "experts.down_proj"),
    ),
    Fixture(
        name="qwen3-next",
        about="gated delta nets in layers 0, 1 and 3 (not every fourth layer has attention), 4 value heads of 12 on 2 "
        "key heads of 16, keys that resemble queries; gated attention with head_dim 24 of which 12 columns turn, norms "
        "less 1; 2 of 5 experts and a gated shared one, but an MLP in layer 1",
        config=transformers.Qwen3NextConfig(
            vocab_size=113,
            hidden_size=40,
            intermediate_size=48,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=28,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=24,
            num_experts=5,
            num_experts_per_tok=2,
            mlp_only_layers=[1],
            layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=12,
            max_position_embeddings=512,
            rms_norm_eps=1e-6,
            rope_parameters={"rope_type": "default", "rope_theta": 1000000.0, "partial_rotary_factor": 0.5},
            tie_word_embeddings=False,
            bos_token_id=0,
            eos_token_id=1,
        ),
        stored=torch.bfloat16,
        matters=(
            all_columns_turn,
            rope_theta_10000,
            other_weights_of_experts,
            one_expert_fewer,
            no_shared_expert,
            shared_expert_half_open,
            attention_half_open,
            no_forgetting,
            no_time_biases,
            the_last_tap_alone,
            norms_around_zero("q_norm", "k_norm"),
            norms_around_zero("input_layernorm"),
        ),
        embedding_std=0.25,
    ),
    Fixture(
        name="qwen3-5",
        about="gated delta nets in layers 1 and 2 of 3 (the first has attention), 6 value heads of 12 on 2 key heads "
        "of 8, all queries, keys and values in one tensor, a convolution of 3 inputs; gated attention with biases, "
        "head_dim 32 of which 8 columns turn; rms_norm_eps 0.02, tied embeddings, a section of the embedding for each "
        "axis of an image, which text does not see",
        config=transformers.Qwen3_5TextConfig(
            vocab_size=97,
            hidden_size=36,
            intermediate_size=44,
            num_hidden_layers=3,
            num_attention_heads=3,
            num_key_value_heads=1,
            head_dim=32,
            attention_bias=True,
            layer_types=["full_attention", "linear_attention", "linear_attention"],
            linear_num_key_heads=2,
            linear_num_value_heads=6,
            linear_key_head_dim=8,
            linear_value_head_dim=12,
            linear_conv_kernel_dim=3,
            max_position_embeddings=512,
            rms_norm_eps=0.02,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1000.0,
                "partial_rotary_factor": 0.25,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            },
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=1,
        ),
        stored=torch.bfloat16,
        matters=(
            all_columns_turn,
            rope_theta_10000,
            rms_norm_eps_1e6,
            no_attention_biases,
            attention_half_open,
            no_forgetting,
            no_time_biases,
            the_last_tap_alone,
            norms_around_zero("q_norm", "k_norm"),
            norms_around_zero("input_layernorm"),
        ),
        embedding_std=0.25,
    ),
    Fixture(
        name="qwen3-5-moe",
        about="2 of 5 experts, whose weights are normalized, and a gated shared one in both layers, the first with a "
        "gated delta net of 2 value heads of 16 on as many key heads of 12; gated attention with head_dim 16 of which "
        "8 columns turn; in the published form of the multimodal model: text_config, names with language_model, one "
        "tensor for all experts, tensors of the vision tower and of the prediction of further tokens",
        config=transformers.Qwen3_5MoeTextConfig(
            vocab_size=101,
            hidden_size=36,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=20,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            num_experts=5,
            num_experts_per_tok=2,
            layer_types=["linear_attention", "full_attention"],
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=12,
            linear_value_head_dim=16,
            max_position_embeddings=512,
            rms_norm_eps=1e-6,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1000000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            },
            tie_word_embeddings=False,
            bos_token_id=0,
            eos_token_id=1,
        ),
        stored=torch.bfloat16,
        matters=(
            all_columns_turn,
            rope_theta_10000,
            one_expert_fewer,
            no_shared_expert,
            shared_expert_half_open,
            attention_half_open,
            no_forgetting,
            no_time_biases,
            the_last_tap_alone,
            norms_around_zero("q_norm", "k_norm"),
            norms_around_zero("input_layernorm"),
        ),
        embedding_std=0.25,
        published_keys=(
            ("attn_output_gate", True),
            ("full_attention_interval", 4),
            ("mamba_ssm_dtype", "float32"),
            ("mtp_num_hidden_layers", 1),
            ("mtp_use_dedicated_embeddings", False),
            ("output_gate_type", "swish"),
            ("partial_rotary_factor", 0.5),
        ),
        multimodal=transformers.Qwen3_5MoeConfig,
    ),
    Fixture(
        name="qwen2_5_vl-tiny",
        about="two images in the prompt, one made smaller and one larger; 3 blocks of a tower with windows of 3 x 3 "
        "tokens, cut at the images' edges, and whole images of 140 patches (a block of keys and part of one) in block "
        "1; positions of three coordinates in sections of 2, 1 and 5; config.json in the nested form of transformers 5",
        config=transformers.Qwen2_5_VLConfig(
            text_config={
                "vocab_size": 113,
                "hidden_size": 48,
                "intermediate_size": 72,
                "num_hidden_layers": 2,
                "num_attention_heads": 3,
                "num_key_value_heads": 1,
                "max_position_embeddings": 512,
                "rms_norm_eps": 1e-6,
                "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [2, 1, 5]},
                "bos_token_id": 0,
                "eos_token_id": 1,
            },
            vision_config={
                "depth": 3,
                "hidden_size": 24,
                "intermediate_size": 36,
                "num_heads": 2,
                "patch_size": 4,
                "window_size": 24,
                "out_hidden_size": 48,
                "fullatt_block_indexes": [1],
                "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0},
            },
            image_token_id=100,
            video_token_id=101,
            vision_start_token_id=102,
            vision_end_token_id=103,
            bos_token_id=0,
            eos_token_id=1,
            tie_word_embeddings=False,
        ),
        stored=torch.bfloat16,
        matters=(
            other_sections,
            windows_in_all_blocks,
            whole_images_in_all_blocks,
            smaller_windows,
            no_biases_of_the_tower,
            no_attention_biases,
            tower_turned_by(100.0),
        ),
        embedding_std=0.25,
        images=((75, 112, 9), (9, 13, 52)),
        pixels=(256, 2400),
    ),
    Fixture(
        name="qwen2_5_vl-video",
        about="an image and a video in the prompt: 5 frames, the last of which stands twice, made smaller; positions "
        "of time are 4.7 apart, and the text behind begins at an earlier one",
        config=transformers.Qwen2_5_VLConfig(
            text_config={
                "vocab_size": 113,
                "hidden_size": 48,
                "intermediate_size": 72,
                "num_hidden_layers": 1,
                "num_attention_heads": 3,
                "num_key_value_heads": 1,
                "max_position_embeddings": 512,
                "rms_norm_eps": 1e-6,
                "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [2, 1, 5]},
                "bos_token_id": 0,
                "eos_token_id": 1,
            },
            vision_config={
                "depth": 2,
                "hidden_size": 24,
                "intermediate_size": 36,
                "num_heads": 2,
                "patch_size": 4,
                "window_size": 24,
                "out_hidden_size": 48,
                "fullatt_block_indexes": [1],
                "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0},
            },
            image_token_id=100,
            video_token_id=101,
            vision_start_token_id=102,
            vision_end_token_id=103,
            bos_token_id=0,
            eos_token_id=1,
            tie_word_embeddings=False,
        ),
        stored=torch.bfloat16,
        matters=(other_sections, times_as_slow, windows_in_all_blocks),
        embedding_std=0.25,
        images=((9, 13, 5),),
        pixels=(256, 2400),
        video=(5, 37, 53, 20, 1.7),
    ),
    Fixture(
        name="qwen3-5-vl",
        about="two images in the prompt of a model with gated delta nets and gated attention; 2 blocks of a tower with "
        "layer norms and 7 x 7 learned positions, whole images of 140 patches (a block of keys and part of one); "
        "positions of three coordinates that take turns among 8 of 16 pairs of columns; beside it, a conversation with "
        "a video, of whose 8 frames 5 are chosen at unequal distances, and whose times the prompt says",
        config=transformers.Qwen3_5Config(
            text_config={
                "vocab_size": 113,
                "hidden_size": 36,
                "intermediate_size": 44,
                "num_hidden_layers": 2,
                "num_attention_heads": 3,
                "num_key_value_heads": 1,
                "head_dim": 32,
                "layer_types": ["linear_attention", "full_attention"],
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "linear_key_head_dim": 8,
                "linear_value_head_dim": 12,
                "max_position_embeddings": 512,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 500.0,
                    "partial_rotary_factor": 0.5,
                    "mrope_section": [3, 3, 2],
                    "mrope_interleaved": True,
                },
                "bos_token_id": 0,
                "eos_token_id": 1,
            },
            vision_config={
                "depth": 2,
                "hidden_size": 24,
                "intermediate_size": 36,
                "num_heads": 2,
                "patch_size": 4,
                "out_hidden_size": 36,
                "num_position_embeddings": 49,
            },
            image_token_id=100,
            video_token_id=101,
            vision_start_token_id=102,
            vision_end_token_id=103,
            tie_word_embeddings=False,
        ),
        stored=torch.bfloat16,
        matters=(
            sections_of_time_alone,
            no_learned_positions,
            no_biases_of_the_tower,
            tower_turned_by(100.0),
        ),
        embedding_std=0.25,
        images=((75, 112, 9), (9, 13, 52)),
        pixels=(256, 2400),
        clip=(8, 20, 28, 3.0),
    ),
    Fixture(
        name="qwen3-5-moe-vl",
        about="the same with experts and 5 x 5 learned positions; in the published form: one tensor for all experts, "
        "tensors of the prediction of further tokens",
        config=transformers.Qwen3_5MoeConfig(
            text_config={
                "vocab_size": 113,
                "hidden_size": 36,
                "moe_intermediate_size": 16,
                "shared_expert_intermediate_size": 20,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "num_experts": 5,
                "num_experts_per_tok": 2,
                "layer_types": ["linear_attention", "full_attention"],
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 2,
                "linear_key_head_dim": 12,
                "linear_value_head_dim": 16,
                "max_position_embeddings": 512,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1000.0,
                    "partial_rotary_factor": 0.5,
                    "mrope_section": [2, 1, 1],
                    "mrope_interleaved": True,
                },
                "bos_token_id": 0,
                "eos_token_id": 1,
            },
            vision_config={
                "depth": 2,
                "hidden_size": 24,
                "intermediate_size": 36,
                "num_heads": 2,
                "patch_size": 4,
                "out_hidden_size": 36,
                "num_position_embeddings": 25,
            },
            image_token_id=100,
            video_token_id=101,
            vision_start_token_id=102,
            vision_end_token_id=103,
            tie_word_embeddings=False,
        ),
        stored=torch.bfloat16,
        matters=(
            sections_of_time_alone,
            no_learned_positions,
            no_biases_of_the_tower,
            tower_turned_by(100.0),
        ),
        embedding_std=0.25,
        multimodal=transformers.Qwen3_5MoeConfig,
        images=((75, 112, 9), (9, 13, 52)),
        pixels=(256, 2400),
    ),
)


# --- weights and reference arrays ------------------------------------------------------------------------------------


def network(config: Config, weights: Weights | None = None) -> transformers.PreTrainedModel:
    """Returns the network of `config` in float32 with eager attention, holding copies of `weights` where given."""
    config = copy.deepcopy(config)
    model = model_class(config).from_config(config, dtype=torch.float32, **IMPLEMENTATIONS)
    if weights is not None:
        model.load_state_dict(weights)
    return model.eval()


def model_class(config: Config) -> type:
    """Returns the class that makes networks of a configuration."""
    takes_images = hasattr(config, "vision_config")
    return transformers.AutoModelForImageTextToText if takes_images else transformers.AutoModelForCausalLM


def fill(model: transformers.PreTrainedModel, fixture: Fixture, generator: torch.Generator) -> None:
    """Draws every parameter of `model`, rounded to the dtype in which it will be stored.

    Matrices scale with 1 / sqrt(inputs), so that a sublayer adds about as much as the residual stream holds; queries
    and keys get more, so that attention is far from uniform, and so does the output head, so that logits spread.
    """
    offset = 1.0 if fixture.config.model_type.startswith("gemma") else 0.0  # what norms add to their weights
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            value = 1.5 - offset + 0.3 * noise
        elif parameter.ndim == 1 and ".visual." in name and name.endswith(".weight"):
            value = 1.0 + 0.25 * noise
        elif name.endswith("norm.weight"):
            # Where the embedding is scaled and is the head, too, a token would else be its own likeliest successor.
            ends = ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight", "model.norm.weight")
            gain = 3.0 if offset and name.endswith(ends) else 1.0
            value = gain - offset + 0.25 * noise
        elif name.endswith((".bias", "_proj_bias")):
            value = 0.4 * noise
        elif name.endswith("embed_tokens.weight"):
            value = fixture.embedding_std * noise
        else:
            gain = 1.8 if name.endswith(("q_proj.weight", "k_proj.weight", "lm_head.weight")) else 1.3
            value = gain / math.sqrt(parameter[0].numel() if ".visual." in name else parameter.shape[-1]) * noise
        if fixture.config.model_type.startswith(("qwen3_next", "qwen3_5")) and ".visual." not in name:
            value = value_of_linear_attention(name, value, noise, fixture.config.get_text_config())
        if name.endswith(fixture.mxfp4):
            value = from_mxfp4(*to_mxfp4(value))
        parameter.copy_(value.to(fixture.stored))
    for name, buffer in model.named_buffers():
        if name.endswith(CORRECTION):
            buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))


def value_of_linear_attention(name: str, value: torch.Tensor, noise: torch.Tensor, config: Config) -> torch.Tensor:
    """Returns a parameter of a network with gated delta nets, given what it would be elsewhere.

    Keys resemble queries: a request's first output has the sign of their product, which the norm behind it makes as
    large as any, so noise would be as large where the product is close to 0.
    """
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    if name.endswith(("in_proj_qkvz.weight", "in_proj_qkv.weight")):
        groups = config.linear_num_key_heads if name.endswith("qkvz.weight") else 1
        rows, width = value.view(groups, -1, value.shape[-1]), keys // groups
        query, key = rows[:, :width], rows[:, width : 2 * width]
        key.copy_(0.9 * query + 0.4 * key)
    elif name.endswith("conv1d.weight"):
        value[:keys] = value[:keys].abs()
        value[keys : 2 * keys] = value[:keys] + 0.1 * noise[keys : 2 * keys]
    elif name.endswith("A_log"):
        value = -1.5 + noise
    elif name.endswith("dt_bias"):
        value = 0.5 * noise
    elif name.endswith("norm.weight") and "linear_attn" not in name:
        value = value - 1
    return value


# The sizes of the four-bit numbers, and how many numbers share an exponent.
MXFP4_SIZES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
MXFP4_GROUP = 32


def to_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns blocks [E, outputs, inputs / 32, 16] and scales of the nearest numbers to [E, inputs, outputs]."""
    groups = weight.float().transpose(1, 2).unflatten(-1, (-1, MXFP4_GROUP))
    exponents = groups.abs().amax(-1, keepdim=True).log2().floor() - 2
    nearest = ((groups.abs() * 2.0**-exponents)[..., None] - MXFP4_SIZES).abs().argmin(-1)
    nibbles = (nearest + 8 * groups.signbit()).to(torch.uint8)
    return nibbles[..., 0::2] | nibbles[..., 1::2] << 4, (exponents[..., 0] + 127).to(torch.uint8)


def from_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Returns the numbers [E, inputs, outputs] of blocks and scales."""
    nibbles = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2).long()
    sizes = torch.cat([MXFP4_SIZES, -MXFP4_SIZES])[nibbles]
    return (sizes * 2.0 ** (scales[..., None].float() - 127)).flatten(-2).transpose(1, 2).contiguous()


def store_in_mxfp4(file: Path, fixture: Fixture) -> None:
    """Replaces the tensors that the fixture names by their blocks and scales."""
    packed = {}
    for name, tensor in safetensors.torch.load_file(file).items():
        if name.endswith(fixture.mxfp4):
            packed[f"{name}_blocks"], packed[f"{name}_scales"] = to_mxfp4(tensor)
        else:
            packed[name] = tensor
    safetensors.torch.save_file(packed, file, metadata={"format": "pt"})


def store_as_multimodal(file: Path, model: transformers.PreTrainedModel) -> None:
    """Writes the tensors as a multimodal model's published checkpoint holds them, with some of its other parts."""
    held = model.state_dict()
    if not any(".language_model." in name for name in held):
        held = {name.replace("model.", "model.language_model.", 1): x for name, x in held.items()}
    others = {name: torch.ones(2, 3, dtype=model.dtype) for name in NOT_OF_THE_TEXT_MODEL if name not in held}
    safetensors.torch.save_file(held | others, file, metadata={"format": "pt"})


def image_processor(fixture: Fixture) -> transformers.BaseImageProcessor:
    """Returns the processor that makes patches of a fixture's images."""
    vision, (least, most) = fixture.config.vision_config, fixture.pixels
    # What is subtracted from the channels and what they are divided by, in published files.
    scales = {name: [0.5] * 3 for name in ("image_mean", "image_std")} if "qwen3_5" in vision.model_type else {}
    return transformers.Qwen2VLImageProcessorPil(
        **scales,
        size={"shortest_edge": least, "longest_edge": most},
        patch_size=vision.patch_size,
        temporal_patch_size=vision.temporal_patch_size,
        merge_size=vision.spatial_merge_size,
    )


def draw_images(fixture: Fixture, seed: int) -> dict[str, np.ndarray]:
    """Returns the images of a fixture, their patches and their grids, by their names in `reference.npz`.

    Pixels are smooth waves and noise: of noise alone, an image made smaller would be grey.
    """
    random, images = np.random.default_rng(seed), {}
    for index, (height, width, _) in enumerate(fixture.images):
        row, column = np.mgrid[:height, :width] / 9.0
        waves = [np.sin(a * row + b * column + c) for a, b, c in random.uniform(-1.5, 1.5, (3, 3))]
        noise = random.uniform(-0.6, 0.6, (height, width, 3))
        images[f"image_{index}"] = np.clip(127 + 90 * (np.stack(waves, axis=-1) + noise), 0, 255).astype(np.uint8)
    if not images:
        return {}
    processed = image_processor(fixture)(list(images.values()), return_tensors="np")
    grids = processed["image_grid_thw"][:, 1:].astype(np.int32)
    return images | {"patches": processed["pixel_values"].astype(np.float32), "grids": grids}


def draw_video(fixture: Fixture, seed: int) -> dict[str, np.ndarray]:
    """Returns the video of a fixture, if it has one, its patches and its grid, by their names in `reference.npz`."""
    if fixture.video is None:
        return {}
    (frames, height, width, _, fps), random = fixture.video, np.random.default_rng(seed + 1)
    row, column = np.mgrid[:height, :width] / 9.0
    waves = [np.sin(row + column * phase + time)[..., None] for time, phase in enumerate(random.uniform(0, 2, frames))]
    noise = random.uniform(-0.6, 0.6, (frames, height, width, 3))
    video = np.clip(127 + 90 * (np.stack(waves) + noise), 0, 255).astype(np.uint8)
    processed = video_processor(fixture)([torch.from_numpy(video).permute(0, 3, 1, 2)], return_tensors="np")
    return {
        "video": video,
        "video_patches": processed["pixel_values_videos"].astype(np.float32),
        "video_grid": processed["video_grid_thw"][0].astype(np.int32),
        "fps": np.float64(fps),
    }


def video_processor(fixture: Fixture) -> transformers.BaseVideoProcessor:
    """Returns the processor that makes patches of a fixture's video."""
    vision, (least, most) = fixture.config.vision_config, fixture.pixels
    return transformers.Qwen2VLVideoProcessor(
        size={"shortest_edge": least, "longest_edge": most // 2},
        patch_size=vision.patch_size,
        temporal_patch_size=vision.temporal_patch_size,
        merge_size=vision.spatial_merge_size,
        do_sample_frames=False,
        cap_pixels_per_frame=False,
    )


CLIP_TEXT = "user:See this. <vs><video><ve>And <vs><img><ve>?;"


def clip_video_processor(fixture: Fixture) -> transformers.BaseVideoProcessor:
    """Returns the processor of a fixture's video whose times the prompt says."""
    vision = fixture.config.vision_config
    return transformers.Qwen3VLVideoProcessor(
        size={"shortest_edge": 2600, "longest_edge": 3000},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
        patch_size=vision.patch_size,
        temporal_patch_size=vision.temporal_patch_size,
        merge_size=vision.spatial_merge_size,
        cap_pixels_per_frame=False,
    )


def clip_processor(fixture: Fixture) -> transformers.Qwen3VLProcessor:
    """Returns the processor of whole conversations, whose tokenizer has a token for each character."""
    characters = [*map(chr, range(32, 127)), "\n", "\t", "é", "ü", "<unk>"]
    words = {character: index for index, character in enumerate(characters)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    made.add_special_tokens(["<img>", "<video>", "<vs>", "<ve>"])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made)
    for name, text in (("image", "<img>"), ("video", "<video>"), ("vision_start", "<vs>"), ("vision_end", "<ve>")):
        setattr(tokenizer, f"{name}_token", text)
        setattr(tokenizer, f"{name}_token_id", tokenizer.convert_tokens_to_ids(text))
    return transformers.Qwen3VLProcessor(image_processor(fixture), tokenizer, clip_video_processor(fixture))


def clip_reference(fixture: Fixture, model: transformers.PreTrainedModel, image: np.ndarray) -> dict[str, np.ndarray]:
    """Returns what the processor and the network make of a conversation with a video, of the first seed that fits.

    Raises:
        RuntimeError: none of the seeds fits.
    """
    assert fixture.clip is not None
    frames, height, width, fps = fixture.clip
    for seed in range(MAX_SEED):
        random = np.random.default_rng(seed)
        row, column = np.mgrid[:height, :width] / 9.0
        waves = [
            np.sin(row + column * phase + time)[..., None] for time, phase in enumerate(random.uniform(0, 2, frames))
        ]
        clip = np.clip(127 + 90 * (np.stack(waves) + random.uniform(-0.6, 0.6, (frames, height, width, 3))), 0, 255)
        clip = clip.astype(np.uint8)
        given = clip_processor(fixture)(
            text=[CLIP_TEXT],
            images=[image],
            videos=[torch.from_numpy(clip).permute(0, 3, 1, 2)],
            video_metadata=[{"fps": fps, "total_num_frames": frames}],
            return_tensors="pt",
        )
        prompt = given.pop("input_ids")
        arguments = {name: given[name] for name in ("pixel_values", "image_grid_thw", "mm_token_type_ids")}
        arguments |= {name: given[name] for name in ("pixel_values_videos", "video_grid_thw")}
        logits = model(prompt, use_cache=False, **arguments).logits[0]
        model.generation_config = transformers.GenerationConfig(
            do_sample=False, max_new_tokens=CONTINUATION, eos_token_id=None, pad_token_id=0
        )
        output = model.generate(prompt, attention_mask=torch.ones_like(prompt), **arguments)
        continuation = output[0, prompt.shape[1] :]
        kinds = torch.nn.functional.pad(arguments.pop("mm_token_type_ids"), (0, len(continuation)))
        whole = model(output, use_cache=False, mm_token_type_ids=kinds, **arguments).logits[
            0, -len(continuation) - 1 : -1
        ]
        best = whole.topk(2, dim=-1)
        gap = (best.values[:, 0] - best.values[:, 1]).min().item()
        fits = len(set(continuation.tolist())) >= MIN_DISTINCT and set(continuation.tolist()).isdisjoint(
            range(100, 104)
        )
        if fits and gap > MIN_GREEDY_GAP and torch.equal(best.indices[:, 0], continuation):
            patches = arguments["pixel_values_videos"]
            rows = model.model.visual(patches, grid_thw=arguments["video_grid_thw"]).pooler_output
            return {
                "clip": clip,
                "clip_fps": np.float64(fps),
                "clip_text": np.array(CLIP_TEXT),
                "clip_prompt": prompt[0].numpy().astype(np.int32),
                "clip_patches": np.array(hashlib.sha256(patches.numpy().astype(np.float32).tobytes()).hexdigest()),
                "clip_grid": arguments["video_grid_thw"][0].numpy().astype(np.int32),
                "clip_rows": rows.numpy(),
                "clip_logits": logits[::4].numpy(),
                "clip_continuation": continuation.numpy().astype(np.int32),
            }
        print(f"{fixture.name}: seed {seed} of the video does not fit", file=sys.stderr)
    raise RuntimeError(f"{fixture.name}: no seed of the video below {MAX_SEED} is fit; change its size")


def put_images(fixture: Fixture, tokens: torch.Tensor, images: dict[str, np.ndarray]) -> None:
    """Puts the tokens of the fixture's images into `tokens`, and no others of the kind."""
    if not images:
        return
    config = fixture.config
    special = (config.image_token_id, config.video_token_id, config.vision_start_token_id, config.vision_end_token_id)
    tokens[torch.isin(tokens, torch.tensor(special))] = 7
    for (_, _, first), grid in zip(fixture.images, images["grids"].tolist(), strict=True):
        count = math.prod(grid) // config.vision_config.spatial_merge_size**2
        tokens[first - 1], tokens[first + count] = config.vision_start_token_id, config.vision_end_token_id
        tokens[first : first + count] = config.image_token_id
    if fixture.video is not None:
        first, count = fixture.video[3], math.prod(images["video_grid"]) // config.vision_config.spatial_merge_size**2
        tokens[first - 1], tokens[first + count] = config.vision_start_token_id, config.vision_end_token_id
        tokens[first : first + count] = config.video_token_id


def image_arguments(
    model: transformers.PreTrainedModel, tokens: torch.Tensor, images: dict[str, np.ndarray]
) -> dict[str, torch.Tensor]:
    """Returns what a network of images takes beside `tokens` [T]."""
    if not images:
        return {}
    grids = torch.from_numpy(images["grids"]).long()
    is_image, is_video = (tokens == token for token in (model.config.image_token_id, model.config.video_token_id))
    video = {}
    if "video" in images:
        video = {
            "pixel_values_videos": torch.from_numpy(images["video_patches"]).to(model.dtype),
            "video_grid_thw": torch.from_numpy(images["video_grid"]).long()[None],
            "second_per_grid_ts": torch.tensor([model.config.vision_config.temporal_patch_size / float(images["fps"])]),
        }
    return video | {
        "pixel_values": torch.from_numpy(images["patches"]).to(model.dtype),
        "image_grid_thw": torch.cat([torch.ones_like(grids[:, :1]), grids], dim=1),
        "mm_token_type_ids": (is_image.int() + 2 * is_video.int())[None],
    }


def compute_logits(
    model: transformers.PreTrainedModel, tokens: torch.Tensor, images: dict[str, np.ndarray]
) -> torch.Tensor:
    """Returns the logits [T, V] of `tokens` [T] in one pass without a cache."""
    return model(tokens[None], use_cache=False, **image_arguments(model, tokens, images)).logits[0]


def greedy(model: transformers.PreTrainedModel, prompt: torch.Tensor, images: dict[str, np.ndarray]) -> torch.Tensor:
    """Returns the `CONTINUATION` tokens that greedy decoding appends to `prompt`; none of them stops it."""
    model.generation_config = transformers.GenerationConfig(
        do_sample=False, max_new_tokens=CONTINUATION, eos_token_id=None, pad_token_id=0
    )
    arguments = {"attention_mask": torch.ones_like(prompt)[None], **image_arguments(model, prompt, images)}
    output = model.generate(prompt[None], **arguments)
    return output[0, prompt.shape[0] :]


def draw(fixture: Fixture, seed: int, ends: set[int]) -> tuple[transformers.PreTrainedModel, dict[str, np.ndarray]]:
    """Returns the model of `seed` in float32 and its reference arrays.

    Raises:
        Unfit: a setting that has to matter does not, the logits are flat, a greedy choice is close to a tie, or the
            continuation repeats itself or holds a token of `ends`.
    """
    generator = torch.Generator().manual_seed(seed)
    model = network(fixture.config)
    fill(model, fixture, generator)
    vocab_size = fixture.config.get_text_config().vocab_size
    tokens = torch.randint(0, vocab_size, (TOKENS,), generator=generator)
    images = draw_images(fixture, seed) | draw_video(fixture, seed)
    put_images(fixture, tokens, images)
    prompt = tokens[:PROMPT]

    logits = compute_logits(model, tokens, images)
    if (spread := logits.std(dim=-1).min().item()) < MIN_LOGITS_STD:
        raise Unfit(f"the logits of one position have a standard deviation of {spread:.2f}")
    for remove in fixture.matters:
        config, weights = copy.deepcopy(model.config), copy.deepcopy(model.state_dict())
        change, changed = remove(config, weights), network(config, weights)
        if change is not None:
            change(changed)
        effect = (compute_logits(changed, tokens, images) - logits).abs().max().item()
        if effect < MIN_EFFECT:
            raise Unfit(f"{remove.__name__} moves the logits by {effect:.1e} at most")

    continuation = greedy(model, prompt, images)
    if (distinct := len(set(continuation.tolist()))) < MIN_DISTINCT:
        raise Unfit(f"the continuation has {distinct} distinct tokens")
    if ends & set(continuation.tolist()):
        raise Unfit("the continuation holds a token that ends a sequence")
    if images and not set(continuation.tolist()).isdisjoint(range(100, 104)):
        raise Unfit("the continuation holds a token of images")
    best = compute_logits(model, torch.cat([prompt, continuation]), images)[PROMPT - 1 : -1].topk(2, dim=-1)
    if (gap := (best.values[:, 0] - best.values[:, 1]).min().item()) <= MIN_GREEDY_GAP:
        raise Unfit(f"the best two logits of one step are {gap:.1e} apart")
    if not torch.equal(best.indices[:, 0], continuation):
        raise Unfit("decoding with a cache and one pass over the whole sequence choose different tokens")

    if images:
        arguments = image_arguments(model, tokens, images)
        rows = model.model.visual(arguments["pixel_values"], grid_thw=arguments["image_grid_thw"]).pooler_output
        images["rows"] = rows.numpy()
        if fixture.video is not None:
            patches, grids = arguments["pixel_values_videos"], arguments["video_grid_thw"]
            images["video_rows"] = model.model.visual(patches, grid_thw=grids).pooler_output.numpy()
    if fixture.clip is not None:
        images |= clip_reference(fixture, model, images["image_1"])
    return model, images | {
        "tokens": tokens.numpy().astype(np.int32),
        "logits": logits.numpy(),
        "prompt": prompt.numpy().astype(np.int32),
        "continuation": continuation.numpy().astype(np.int32),
    }


# --- the tokenizer of the chat fixture -------------------------------------------------------------------------------

TRAINING_TEXT = """\
Adding three numbers in another order may give another sum. A computer that adds many numbers at once has to choose an \
order, and it often chooses by looking at how many rows there are. Then the answer to one question depends on who else \
was asking. It need not be so: fix the order of every sum, and let the work be shared out as it likes. The same \
question, asked alone or among a thousand others, today or next year, gets the same answer, bit for bit.
Don't take it on trust; we've measured it, and you'll see 0.1 + 0.2 == 0.30000000000000004 whichever way you look. \
There are 128 tokens in a block, 16 rows in a tile, 2 rounds, 1 result.

def total(values):
    result = 0.0
    for value in values:
        result = result + value
    return result

Die Reihenfolge der Summanden ändert das Ergebnis. L'ordre des opérations change le résultat. El orden de los sumandos \
sí importa. Порядок сложения меняет сумму. 足し算の順序で答えが変わる。 顺序不同结果不同。 🙂🚀
"""

CHAT_TEMPLATE = """\
{% if messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nYou answer the same way every time.<|im_end|>\\n' }}
{%- endif %}
{% for message in messages %}
    {% if message.role not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('unknown role: ' + message.role) }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>' + '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

CHATS = (
    [
        {"role": "system", "content": "You add numbers, and you say in which order."},
        {"role": "user", "content": "  What is 0.1 + 0.2?\n"},
        {"role": "assistant", "content": "0.30000000000000004.\n\nIt isn't 0.3, naïve as that may sound 🙂"},
        {"role": "user", "content": "Und in anderer Reihenfolge?\n\n  def f(x):\n\treturn x"},
    ],
    [{"role": "user", "content": "The same question?"}],
)

PLAIN_TEXTS = (
    "",
    " ",
    "    ",
    "\n\n\n",
    " leading and trailing ",
    "two  spaces,   three\tand a tab\r\n",
    "Don't, we've, YOU'LL, it's",
    "1234567890 3.14159 1e-05",
    "naïve café, composed; nai\u0308ve cafe\u0301, not",
    "Порядок, 順序が違う, 결과, نتيجة",
    "🙂🚀👩‍👩‍👧‍👦🇺🇳",
    "x\u00a0y\u200bz\ufeff",
    "def total(values):\n    return sum(values)  # 0.0",
    "<|im_start|>user\nhello<|im_end|>\n",
    "a<|im_end|>b <|endoftext|> <|im_start| >",
)

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# The network has more, as is usual: its last ids have no text.
TOKENIZER_SIZE = 512
SPECIAL_IDS = set(range(TOKENIZER_SIZE - len(SPECIAL_TOKENS), TOKENIZER_SIZE))


def chat_tokenizer() -> transformers.PreTrainedTokenizerBase:
    """Returns a byte-level BPE tokenizer of `TOKENIZER_SIZE` tokens, the special ones last, trained on `TRAINING_TEXT`.

    Raises:
        RuntimeError: `TRAINING_TEXT` is too short for so many tokens.
    """
    # The untrained tokenizer has the normalizer and the pre-tokenizer of this family's checkpoints.
    blank = transformers.Qwen2Tokenizer().backend_tokenizer
    blank.train_from_iterator(
        [TRAINING_TEXT],
        tokenizers.trainers.BpeTrainer(
            vocab_size=TOKENIZER_SIZE - len(SPECIAL_TOKENS),
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    model = json.loads(blank.to_str())["model"]
    tokenizer = transformers.Qwen2Tokenizer(
        vocab=model["vocab"],
        merges=[tuple(merge) for merge in model["merges"]],
        unk_token=None,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        extra_special_tokens=list(SPECIAL_TOKENS),
        model_max_length=512,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    if len(tokenizer) != TOKENIZER_SIZE or set(tokenizer.convert_tokens_to_ids(SPECIAL_TOKENS)) != SPECIAL_IDS:
        raise RuntimeError(f"the tokenizer has {len(tokenizer)} tokens, not {TOKENIZER_SIZE}: lengthen TRAINING_TEXT")
    return tokenizer


def chat_reference(tokenizer: transformers.PreTrainedTokenizerBase) -> dict[str, object]:
    """Returns conversations with their text and ids, and plain strings with their ids and what these decode to."""
    chats = []
    for messages in CHATS:
        arguments = {"conversation": messages, "add_generation_prompt": True}
        text = tokenizer.apply_chat_template(**arguments, tokenize=False)
        ids = tokenizer.apply_chat_template(**arguments, tokenize=True, return_dict=False)
        chats.append({"messages": messages, "add_generation_prompt": True, "text": text, "ids": ids})
    plain = []
    for text in PLAIN_TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        plain.append({"text": text, "ids": ids, "decoded": tokenizer.decode(ids)})
    return {"chats": chats, "plain": plain}


# --- files -----------------------------------------------------------------------------------------------------------


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")


def rewrite_config(path: Path, fixture: Fixture) -> None:
    """Removes from config.json how it was made, and gives it the form of transformers 4 if the fixture asks for it."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config.pop("_name_or_path", None)
    if fixture.transformers_4_config:
        rope = config.pop("rope_parameters")
        if "full_attention" in rope:
            config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
            config["sliding_window_pattern"] = config.pop("layer_types").index("full_attention") + 1
            rope = rope["full_attention"]
            config["rope_scaling"] = {"rope_type": rope.pop("rope_type")}
        else:
            config["rope_scaling"] = {"type": rope.pop("rope_type")}
            del config["head_dim"]
        config["rope_theta"] = rope.pop("rope_theta")
        config["rope_scaling"] |= rope
        config["torch_dtype"] = config.pop("dtype")
        del config["transformers_version"]
    config |= dict(fixture.published_keys)
    if fixture.multimodal is not None and not fixture.images:
        whole = {"architectures": [config.pop("architectures")[0].replace("ForCausalLM", "ForConditionalGeneration")]}
        whole |= {key: config[key] for key in ("tie_word_embeddings", "transformers_version")}
        whole |= {"image_token_id": 98, "model_type": fixture.multimodal.model_type}
        config = whole | {"text_config": config}
    write_json(path, config)


def save(fixture: Fixture, model: transformers.PreTrainedModel, arrays: dict[str, np.ndarray], folder: Path) -> None:
    """Writes the checkpoint and its reference files into `folder`."""
    if fixture.chat:
        tokenizer = chat_tokenizer()
        tokenizer.save_pretrained(folder)
        write_json(folder / "reference.json", chat_reference(tokenizer))
        end, im_end = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
        model.config.eos_token_id = im_end
        model.generation_config = transformers.GenerationConfig(
            do_sample=True,
            temperature=0.6,
            top_p=0.95,
            top_k=20,
            pad_token_id=end,
            eos_token_id=[im_end, end],
        )
    else:
        model.generation_config = transformers.GenerationConfig.from_model_config(model.config)
    corrections = {name: buffer.clone() for name, buffer in model.named_buffers() if name.endswith(CORRECTION)}
    model.to(fixture.stored)
    for name, buffer in corrections.items():
        model.get_submodule(name.rpartition(".")[0])._buffers[CORRECTION] = buffer
    model.save_pretrained(folder, max_shard_size=fixture.shard_size or "1GB")
    if fixture.images:
        image_processor(fixture).save_pretrained(folder)
        if fixture.video is not None:
            video_processor(fixture).save_pretrained(folder)
        if fixture.clip is not None:
            clip_video_processor(fixture).save_pretrained(folder)
    if fixture.mxfp4:
        store_in_mxfp4(folder / "model.safetensors", fixture)
    if fixture.multimodal is not None:
        store_as_multimodal(folder / "model.safetensors", model)
    if fixture.transformers_4_config:
        (folder / "generation_config.json").unlink()
    rewrite_config(folder / "config.json", fixture)
    np.savez_compressed(folder / "reference.npz", **arrays)


def verify(fixture: Fixture, folder: Path) -> str:
    """Returns a description of how far a freshly loaded checkpoint is from its reference.

    Raises:
        RuntimeError: the files do not give the reference, are not stored as they should be, or name the machine's
            folders.
    """
    with np.load(folder / "reference.npz") as file:
        arrays = dict(file)
    tokens, logits = torch.from_numpy(arrays["tokens"]).long(), torch.from_numpy(arrays["logits"])
    taken = ("patches", "grids", "video", "video_patches", "video_grid", "fps")
    images = {name: arrays[name] for name in taken if name in arrays}
    differences = {}
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kind = fixture.multimodal or type(fixture.config)
    # transformers does not read every model_type that published files have.
    raw = {key: value for key, value in raw.items() if key != "auto_map"} | {"model_type": kind.model_type}
    if fixture.mxfp4:
        raw["quantization_config"] |= {"dequantize": True}
    for dtype in (torch.float32, torch.float64):
        model = model_class(fixture.config).from_pretrained(
            folder,
            config=kind.from_dict(raw),
            dtype=dtype,
            **IMPLEMENTATIONS,
            local_files_only=True,
        )
        differences[dtype] = (compute_logits(model, tokens, images) - logits).abs().max().item()
        if dtype == torch.float32:
            continuation = greedy(model, torch.from_numpy(arrays["prompt"]).long(), images)
            if continuation.tolist() != arrays["continuation"].tolist():
                raise RuntimeError(f"{fixture.name}: the stored checkpoint continues the prompt differently")
    reloaded, exact = differences[torch.float32], differences[torch.float64]
    if reloaded > MAX_RELOAD_DIFFERENCE:
        raise RuntimeError(f"{fixture.name}: the stored checkpoint's logits are off by {reloaded:.1e}")
    if exact > MAX_FLOAT64_DIFFERENCE:
        raise RuntimeError(f"{fixture.name}: float64 moves the logits by {exact:.1e}")

    stored = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    stored = stored.get("text_config", {}) | stored
    if stored.get("dtype", stored.get("torch_dtype")) != stored_name(fixture):
        raise RuntimeError(f"{fixture.name}: config.json does not say that weights are stored as {fixture.stored}")
    shards = len(list(folder.glob("model-*.safetensors")))
    if (shards < 3) if fixture.shard_size else (shards > 0):
        raise RuntimeError(f"{fixture.name}: {shards} shards; expected: at least 3 with a shard_size, none without")
    for path in folder.iterdir():
        text = path.read_text(encoding="utf-8") if path.suffix in (".json", ".jinja") else ""
        for place in (str(Path.home()), tempfile.gettempdir(), str(FIXTURES)):
            if len(place) > 1 and place in text:
                raise RuntimeError(f"{fixture.name}: {path.name} holds the machine's path {place}")
    return f"reloaded: {reloaded:.1e} off, float64: {exact:.1e} off"


def make(fixture: Fixture) -> None:
    """Makes and verifies one fixture, and then replaces its folder."""
    ends = fixture.config.get_text_config().eos_token_id
    ends = SPECIAL_IDS if fixture.chat else set(ends if isinstance(ends, list) else [ends])
    for seed in range(MAX_SEED):
        try:
            model, arrays = draw(fixture, seed, ends)
            break
        except Unfit as why:
            print(f"{fixture.name}: seed {seed}: {why}", file=sys.stderr)
    else:
        raise RuntimeError(f"{fixture.name}: no seed below {MAX_SEED} is fit; loosen the configuration or the scales")

    target = FIXTURES / fixture.name
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / fixture.name
        folder.mkdir()
        save(fixture, model, arrays, folder)
        result = verify(fixture, folder)
        shutil.rmtree(target, ignore_errors=True)
        # The copy leaves out file modes: safetensors writes files that only their owner may read.
        shutil.copytree(folder, target, copy_function=shutil.copyfile)
    print(f"{fixture.name}: seed {seed}, {result}, {size_of(target):,} bytes")


def stored_name(fixture: Fixture) -> str:
    return str(fixture.stored).removeprefix("torch.")


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


README = """\
# Fixtures

Tiny checkpoints with random weights, each with what Hugging Face transformers computed from it on a CPU, in float32
from the stored weights, with eager attention: `logits` of `tokens`, and the greedy `continuation` of `prompt`, in
`reference.npz`. The same networks in float64 differ from `logits` by {float64:.0e} at most; the best two logits are
more than {gap:.0e} apart at every step of a continuation, which crosses position 128 and holds no token that ends a
sequence. `qwen3/reference.json` holds conversations and plain strings with the text and the ids that its tokenizer
gave. A sliding window of n means that a token sees itself and the n - 1 tokens before it.

Made by `python tools/make_fixtures.py` (Python 3.11, torch {torch}, transformers {transformers}); do not edit by hand.

| fixture | stored as | bytes | what is awkward about it |
|---|---|---|---|
{rows}

{total:,} bytes in all, this file not counted.
"""


def write_readme() -> None:
    made = [fixture for fixture in ALL if (FIXTURES / fixture.name).is_dir()]
    sizes = {fixture.name: size_of(FIXTURES / fixture.name) for fixture in made}
    rows = [
        f"| `{fixture.name}` | {stored_name(fixture)} | {sizes[fixture.name]:,} | {fixture.about} |" for fixture in made
    ]
    text = README.format(
        float64=MAX_FLOAT64_DIFFERENCE,
        gap=MIN_GREEDY_GAP,
        rows="\n".join(rows),
        total=sum(sizes.values()),
        **VERSIONS,
    )
    (FIXTURES / "README.md").write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes the tiny checkpoints of tests/fixtures/.")
    parser.add_argument("--only", metavar="NAME", choices=[fixture.name for fixture in ALL], help="make this one alone")
    only = parser.parse_args().only

    for package, wanted in VERSIONS.items():
        installed = sys.modules[package].__version__.split("+")[0]
        if installed != wanted:
            sys.exit(f"make_fixtures: {package} is {installed}; expected: {wanted}. Install it: {INSTALL}")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.set_grad_enabled(False)

    FIXTURES.mkdir(parents=True, exist_ok=True)
    for fixture in ALL:
        if only in (None, fixture.name):
            make(fixture)
    write_readme()
    if (total := size_of(FIXTURES)) > MAX_TOTAL_BYTES:
        sys.exit(f"make_fixtures: tests/fixtures/ has {total:,} bytes; allowed: {MAX_TOTAL_BYTES:,}; shrink a fixture")


if __name__ == "__main__":
    main()
