"""Writes the tiny checkpoints of `tests/fixtures/`, each with the outputs of transformers.

    pip install torch==2.13.0 torchvision==0.28.0 transformers==5.24.0        (Python 3.11)
    python tools/make_fixtures.py [--only NAME]

Transformers 5.23.0 made the fixtures up to `qwen3-5-moe-vl` in `tools/fixtures.toml`, and 5.24.0 the others.

detjax itself needs none of them: tests read this tool's files. Only the fixture with a video needs torchvision.
`tools/fixtures.toml` is the table of fixtures. A new one needs an entry there and a folder with its `config.json`,
which this tool reads and never writes. It adds random weights, `reference.npz` and, with a tokenizer, `reference.json`:

    tokens        int32 [T]        random
    logits        float32 [T, V]   of `tokens`, in float32 from the stored weights
    prompt        int32 [t]        a prefix of `tokens`
    continuation  int32 [n]        the greedy continuation of `prompt`, without end tokens

If the model takes images, `tokens` and `prompt` contain them, and `reference.npz` has more arrays:

    image_<i>     uint8 [h, w, 3]  an image, before resizing by `preprocessor_config.json`
    patches       float32 [N, P]   the patches of all images, as transformers processed them
    grids         int32 [i, 2]     rows and columns of patches of each image
    rows          float32 [n, D]   the vision tower's output, a row for each image token; if rows of inner blocks join
                                   the first layers, they are appended to it

If it takes a video, `video` is uint8 [F, h, w, 3], and `video_patches`, `video_grid`, int32 [3], and `video_rows` are
the corresponding arrays; `fps` is the frame rate.

If the prompt states the times of a video's frames, `reference.npz` has the results of the processor and the network for
a conversation with a video and an image:

    clip               uint8 [F, h, w, 3]  the video before frames are selected
    clip_fps           float64 []          its frame rate
    clip_text          str                 the conversation, with one token for the video and one for the image
    clip_prompt        int32 [t]           its tokens, expanded by the processor
    clip_patches       str                 the SHA-256 of the video's patches, float32 [N, P]
    clip_grid          int32 [3]           frames of the tower, and rows and columns of patches of each
    clip_rows          float32 [n, D]      the vision tower's output
    clip_logits        float32 [., V]      the logits of every fourth token of the prompt, including the first
    clip_continuation  int32 [n]           the greedy continuation of the prompt

A seed is accepted if each change in the fixture's `matters` affects the logits, no greedy choice is close to a tie,
and the continuation does not repeat itself. On one kind of CPU, with the versions above,
the files come out the same byte for byte.
"""

import argparse
import copy
import hashlib
import json
import math
import os
import re
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

# Checkpoints and tokenizers are created from scratch. Nothing may come from the network or its cache.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

VERSIONS = {"torch": "2.13.0", "transformers": "5.24.0"}
INSTALL = f"pip install torch=={VERSIONS['torch']} transformers=={VERSIONS['transformers']} (Python 3.11)"

try:
    import numpy as np
    import safetensors.torch
    import tokenizers
    import torch
    import transformers
except ImportError as error:
    sys.exit(f"make_fixtures: {error.name} is not installed for {sys.executable}; install it: {INSTALL}")

import kimi_fixture  # noqa: E402 - next to this file; needs the packages above

# Some settings are odd on purpose, and transformers would warn about them on every load.
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

FIXTURES = Path(__file__).resolve().parent.parent / "tests" / "fixtures"
MAX_TOTAL_BYTES = 15_000_000

# 128 positions are one block of detjax's attention; the sequence and the continuation must both cross its end.
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

# Other implementations differ in the last bits, and do not support float64.
IMPLEMENTATIONS = {"attn_implementation": "eager", "experts_implementation": "eager"}

# Tensors of published checkpoints that are not the text model's; loaders skip them, so their shapes do not matter.
NOT_OF_THE_TEXT_MODEL = ("model.visual.patch_embed.proj.weight", "mtp.fc.weight", "mtp.layers.0.mlp.gate.weight")
NOT_OF_GEMMA4 = ("model.vision_tower.std_bias", "model.audio_tower.output_proj.weight")

# Names of parameters of vision towers.
TOWERS = r"\.(visual|vision_tower|mm_projector)\."

# Suffixes of the names of buffers that stay float32 in every checkpoint.
CORRECTION = "e_score_correction_bias"

# The names of a network in published files and in transformers.
MODEL_TYPES = {"kimi_k2": "deepseek_v3"}

Config = transformers.PreTrainedConfig
Model = transformers.PreTrainedModel
Arrays = dict[str, np.ndarray]


class Unfit(Exception):
    """Raised if a seed's fixture would test too little; the next seed is tried."""


# --- the fixtures ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fixture:
    """A checkpoint: its storage format, and the settings that must affect its logits.

    Attributes:
        name: its folder.
        about: its special features, for the README.
        matters: changes that must each affect the logits: settings of the configuration ("none" stands for None);
            `weights`, a pattern of parameters' names, which get `value` or 0; or the name of a function in `CHANGES`.
        embedding_std: the embedding's standard deviation; a small one exposes a wrong rms_norm_eps.
        shard_size: maximum size of a weight file, in bytes.
        chat: it has a tokenizer, a chat template and a generation config.
        published_names: tensors are stored as in a published multimodal checkpoint: under other names, one tensor for
            all experts, and tensors of other parts.
        mxfp4: suffixes of the names of tensors [E, inputs, outputs] that are drawn exactly representable in MXFP4, and
            stored in it.
        transposed: suffixes of the names of tensors [E, outputs, inputs] that are stored with inputs as rows, as in
            published checkpoints.
        images: height and width of each image, and the position of its first token.
        pixels: the processor's minimum and maximum number of pixels.
        video: frames, height and width of a video, the position of its first token, and its frame rate.
        clip: frames, height and width of a video whose times the prompt states, and its frame rate.
    """

    name: str
    about: str
    matters: tuple[Mapping[str, object] | str, ...]
    embedding_std: float = 0.25
    shard_size: str = "1GB"
    chat: bool = False
    published_names: bool = False
    mxfp4: tuple[str, ...] = ()
    transposed: tuple[str, ...] = ()
    images: tuple[tuple[int, int, int], ...] = ()
    pixels: tuple[int, int] = (0, 0)
    video: tuple[int, int, int, int, float] | None = None
    clip: tuple[int, int, int, float] | None = None

    @cached_property
    def stored_config(self) -> dict[str, object]:
        """The content of its config.json."""
        return json.loads((FIXTURES / self.name / "config.json").read_text(encoding="utf-8"))

    @property
    def is_kimi(self) -> bool:
        """True for Kimi K2.5; see `kimi_fixture`."""
        return self.stored_config["model_type"] == kimi_fixture.MODEL_TYPE

    @property
    def has_transformers_4_form(self) -> bool:
        """True if `config.json` has transformers 4's form, without a generation config."""
        return "torch_dtype" in self.stored_config

    @cached_property
    def whole_config(self) -> Config:
        """The configuration as transformers reads it."""
        # transformers does not know every model_type of published files.
        kind = MODEL_TYPES.get(self.stored_config["model_type"], self.stored_config["model_type"])
        raw = {key: value for key, value in self.stored_config.items() if key != "auto_map"} | {"model_type": kind}
        if self.mxfp4:
            raw["quantization_config"] = {**raw["quantization_config"], "dequantize": True}
        if self.is_kimi:
            raw = kimi_fixture.in_own_form(raw)
        return transformers.CONFIG_MAPPING[kind].from_dict(raw)

    @cached_property
    def config(self) -> Config:
        """The configuration of the network; without images, only the text model's."""
        config = self.whole_config if self.images else self.whole_config.get_text_config()
        if self.mxfp4:
            config = copy.deepcopy(config)
            del config.quantization_config
        return config

    @property
    def stored(self) -> torch.dtype:
        """The dtype in which weights are stored."""
        raw = {**self.stored_config.get("text_config", {}), **self.stored_config}
        return getattr(torch, raw.get("dtype") or raw["torch_dtype"])


ALL = tuple(
    Fixture(name, **{key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()})
    for name, entry in tomllib.loads(Path(__file__).with_name("fixtures.toml").read_text(encoding="utf-8")).items()
)


# --- changes that show what matters ----------------------------------------------------------------------------------


def attention_half_open(model: Model) -> None:
    for name, weight in model.named_parameters():
        if "self_attn.q_proj" in name:
            weight.view(model.config.num_attention_heads, 2, model.config.head_dim, -1)[:, 1].zero_()


def the_last_tap_alone(model: Model) -> None:
    for name, weight in model.named_parameters():
        if name.endswith("conv1d.weight"):
            weight[..., :-1].zero_()


def gate_and_up_in_halves(model: Model) -> None:
    for name, weight in model.named_parameters():
        if name.endswith("gate_up_proj"):
            weight.copy_(torch.cat([weight[..., ::2], weight[..., 1::2]], dim=-1))


def attention_scale_without_mscale(model: Model) -> None:
    for layer in model.model.layers:
        layer.self_attn.scaling = model.config.qk_head_dim**-0.5


def latent_norms_with_rms_norm_eps(model: Model) -> None:
    for name, module in model.named_modules():
        if name.endswith("_a_layernorm"):
            module.variance_epsilon = model.config.rms_norm_eps


def values_without_norm(model: Model) -> None:
    for layer in model.model.layers:
        layer.self_attn.v_norm = torch.nn.Identity()


def scores_divided_by_a_root(model: Model) -> None:
    for layer in model.model.layers:
        layer.self_attn.scaling = layer.self_attn.head_dim**-0.5


def keys_of_the_first_layer(model: Model) -> None:
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.store_full_length_kv = layer.self_attn.layer_type == "full_attention" or index == 0


def values_are_normalized_keys(model: Model) -> None:
    for layer in model.model.layers:
        attention = layer.self_attn
        if attention.v_proj is None:
            attention.v_norm = torch.nn.Sequential(attention.k_norm, attention.v_norm)


def router_without_norm(model: Model) -> None:
    for layer in model.model.layers:
        layer.router.norm = torch.nn.Identity()


CHANGES: dict[str, Callable[[Model], None]] = {
    change.__name__: change
    for change in (
        attention_half_open,
        the_last_tap_alone,
        gate_and_up_in_halves,
        attention_scale_without_mscale,
        latent_norms_with_rms_norm_eps,
        values_without_norm,
        scores_divided_by_a_root,
        keys_of_the_first_layer,
        values_are_normalized_keys,
        router_without_norm,
    )
}


def change_settings(target: Config | dict, settings: Mapping[str, object]) -> None:
    """Changes settings of a configuration in place, including nested ones."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            change_settings(target[name] if isinstance(target, dict) else getattr(target, name), value)
        elif isinstance(target, dict):
            target[name] = value
        else:
            setattr(target, name, None if value == "none" else value)


def changed(model: Model, change: Mapping[str, object] | str) -> Model:
    """Returns a copy of a network with a change from its fixture's `matters`."""
    config, weights = copy.deepcopy(model.config), copy.deepcopy(model.state_dict())
    if isinstance(change, str):
        CHANGES[change](copied := network(config, weights))
        return copied
    if (pattern := change.get("weights")) is not None:
        for name in weights:
            if re.search(pattern, name):
                weights[name].fill_(change.get("value", 0.0))
    else:
        change_settings(config, change)
    return network(config, weights)


# --- weights and reference arrays ------------------------------------------------------------------------------------


def network(config: Config, weights: dict[str, torch.Tensor] | None = None) -> Model:
    """Returns the network of `config` in float32 with eager attention, and copies of `weights` if given."""
    config = copy.deepcopy(config)
    model = model_class(config).from_config(config, dtype=torch.float32, **IMPLEMENTATIONS)
    if weights is not None:
        model.load_state_dict(weights)
    return model.eval()


def model_class(config: Config) -> type:
    """Returns the network class of a configuration."""
    takes_images = hasattr(config, "vision_config")
    return transformers.AutoModelForImageTextToText if takes_images else transformers.AutoModelForCausalLM


def fill(model: Model, fixture: Fixture, generator: torch.Generator) -> None:
    """Draws every parameter of `model`, rounded to the dtype in which it will be stored.

    Matrices scale with 1 / sqrt(inputs), so that a sublayer's output is about as large as the residual stream; queries
    and keys are larger, so that attention is far from uniform, and so is the output head, so that logits spread.
    """
    gemma2_or_3 = fixture.config.model_type.startswith(("gemma2", "gemma3"))
    offset = 1.0 if gemma2_or_3 else 0.0  # the offset that norms add to their weights
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            value = 1.5 - offset + 0.3 * noise
        elif parameter.ndim == 1 and re.search(TOWERS, name) and name.endswith(".weight"):
            value = 1.0 + 0.25 * noise
        elif name.endswith("position_embeddings"):
            value = 0.6 * noise
        elif name.endswith("norm.weight"):
            # With a scaled and tied embedding, a token would otherwise be its own likeliest successor.
            ends = ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight", "model.norm.weight")
            gain = 3.0 if offset and name.endswith(ends) else 1.0
            value = gain - offset + 0.25 * noise
        elif name.endswith((".bias", "_proj_bias")):
            value = 0.4 * noise
        elif name.endswith("embed_tokens.weight"):
            value = fixture.embedding_std * noise
        else:
            gain = 1.8 if name.endswith(("q_proj.weight", "k_proj.weight", "lm_head.weight")) else 1.3
            value = gain / math.sqrt(parameter[0].numel() if re.search(TOWERS, name) else parameter.shape[-1]) * noise
        if fixture.config.model_type.startswith(("qwen3_next", "qwen3_5")) and ".visual." not in name:
            value = value_of_linear_attention(name, value, noise, fixture.config.get_text_config())
        if fixture.config.model_type == "gemma4_text":
            value = value_of_gemma4(name, value, noise, fixture.config)
        if name.endswith(fixture.mxfp4):
            value = from_mxfp4(*to_mxfp4(value))
        parameter.copy_(value.to(fixture.stored))
    for name, buffer in model.named_buffers():
        if name.endswith(CORRECTION):
            buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
        if name.endswith("layer_scalar"):
            buffer.copy_((0.8 + 0.2 * torch.randn(buffer.shape, generator=generator)).to(fixture.stored))


def value_of_gemma4(name: str, value: torch.Tensor, noise: torch.Tensor, config: Config) -> torch.Tensor:
    """Returns a parameter of a Gemma 4 network, given its value in other networks.

    Scores have the factor 1, so queries and keys are smaller.
    """
    ends = ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight", "model.norm.weight")
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return (1.2 + 0.3 * noise) * noise.shape[-1] ** -0.25
    if name.endswith(ends):
        return 3.0 + 0.25 * noise
    if name.endswith(("layernorm_1.weight", "layernorm_2.weight", "router.scale", "per_expert_scale")):
        return 1.0 + 0.25 * noise
    if name.endswith("embed_tokens_per_layer.weight"):
        return noise * config.hidden_size_per_layer_input**-0.5
    return value


def value_of_linear_attention(name: str, value: torch.Tensor, noise: torch.Tensor, config: Config) -> torch.Tensor:
    """Returns a parameter of a network with gated delta nets, given its value in other networks.

    Keys resemble queries. A request's first output has the sign of their product, and the norm after it scales it up,
    so a product close to 0 would amplify noise.
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


# The magnitudes of the four-bit numbers, and the count of numbers that share an exponent.
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


def store_as_multimodal(file: Path, model: Model) -> None:
    """Writes the tensors in the form of a multimodal model's published checkpoint, with some of its other parts."""
    held = model.state_dict()
    if not any(".language_model." in name for name in held):
        held = {name.replace("model.", "model.language_model.", 1): x for name, x in held.items()}
    is_gemma4 = model.config.model_type == "gemma4_text"
    if is_gemma4:
        del held["lm_head.weight"]  # the embedding
    missing = NOT_OF_GEMMA4 if is_gemma4 else NOT_OF_THE_TEXT_MODEL
    others = {name: torch.ones(2, 3, dtype=model.dtype) for name in missing if name not in held}
    safetensors.torch.save_file(held | others, file, metadata={"format": "pt"})


def store_transposed(file: Path, fixture: Fixture) -> None:
    """Swaps the last two axes of the tensors that the fixture names."""
    held = safetensors.torch.load_file(file).items()
    swapped = {name: x.mT.contiguous() if name.endswith(fixture.transposed) else x for name, x in held}
    safetensors.torch.save_file(swapped, file, metadata={"format": "pt"})


def image_processor(fixture: Fixture) -> transformers.BaseImageProcessor:
    """Returns the processor that makes patches of a fixture's images."""
    vision, (least, most) = fixture.config.vision_config, fixture.pixels
    # The mean and standard deviation of channels in published files.
    is_half = vision.model_type.startswith(("qwen3_5", "qwen3_vl"))
    scales = {name: [0.5] * 3 for name in ("image_mean", "image_std")} if is_half else {}
    return transformers.Qwen2VLImageProcessorPil(
        **scales,
        size={"shortest_edge": least, "longest_edge": most},
        patch_size=vision.patch_size,
        temporal_patch_size=vision.temporal_patch_size,
        merge_size=vision.spatial_merge_size,
    )


def draw_images(fixture: Fixture, seed: int) -> Arrays:
    """Returns the images of a fixture, their patches and their grids, by their names in `reference.npz`.

    Pixels are smooth waves and noise, since downscaled pure noise would be grey.
    """
    random, images = np.random.default_rng(seed), {}
    for index, (height, width, _) in enumerate(fixture.images):
        row, column = np.mgrid[:height, :width] / 9.0
        waves = [np.sin(a * row + b * column + c) for a, b, c in random.uniform(-1.5, 1.5, (3, 3))]
        noise = random.uniform(-0.6, 0.6, (height, width, 3))
        images[f"image_{index}"] = np.clip(127 + 90 * (np.stack(waves, axis=-1) + noise), 0, 255).astype(np.uint8)
    if not images:
        return {}
    if fixture.is_kimi:
        return images | kimi_fixture.image_arrays(images, fixture.config.vision_config)
    processed = image_processor(fixture)(list(images.values()), return_tensors="np")
    grids = processed["image_grid_thw"][:, 1:].astype(np.int32)
    return images | {"patches": processed["pixel_values"].astype(np.float32), "grids": grids}


def draw_video(fixture: Fixture, seed: int) -> Arrays:
    """Returns a fixture's video, if any, with its patches and grid, by their names in `reference.npz`."""
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
    """Returns the processor of a fixture's video whose times the prompt states."""
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
    """Returns the processor of whole conversations, with a tokenizer of characters."""
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


def clip_inputs(
    fixture: Fixture, clip: np.ndarray, fps: float, image: np.ndarray
) -> tuple[torch.Tensor, dict[str, torch.Tensor], Arrays]:
    """Returns the tokens of a conversation with a video and an image, and the other arguments of the network.

    The third result has arrays for `reference.npz`.
    """
    given = clip_processor(fixture)(
        text=[CLIP_TEXT],
        images=[image],
        videos=[torch.from_numpy(clip).permute(0, 3, 1, 2)],
        video_metadata=[{"fps": fps, "total_num_frames": len(clip)}],
        return_tensors="pt",
    )
    names = ("pixel_values", "image_grid_thw", "mm_token_type_ids", "pixel_values_videos", "video_grid_thw")
    return given["input_ids"], {name: given[name] for name in names}, {"clip_text": np.array(CLIP_TEXT)}


def clip_reference(fixture: Fixture, model: Model, image: np.ndarray) -> Arrays:
    """Returns the processor's and the network's results for a conversation with a video, for the first seed that fits.

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
        if fixture.is_kimi:
            prompt, arguments, results = kimi_fixture.clip_inputs(clip, fps, image, model)
        else:
            prompt, arguments, results = clip_inputs(fixture, clip, fps, image)
        logits = model(prompt, use_cache=False, **arguments).logits[0]
        model.generation_config = transformers.GenerationConfig(
            do_sample=False, max_new_tokens=CONTINUATION, eos_token_id=None, pad_token_id=0
        )
        output = model.generate(prompt, attention_mask=torch.ones_like(prompt), **arguments)
        continuation = output[0, prompt.shape[1] :]
        chosen = set(continuation.tolist())
        if len(chosen) < MIN_DISTINCT or not chosen.isdisjoint(range(100, 104)):
            print(f"{fixture.name}: seed {seed} of the video does not fit", file=sys.stderr)
            continue
        if "mm_token_type_ids" in arguments:
            kinds = torch.nn.functional.pad(arguments["mm_token_type_ids"], (0, len(continuation)))
            arguments["mm_token_type_ids"] = kinds
        whole = model(output, use_cache=False, **arguments).logits[0, -len(continuation) - 1 : -1]
        best = whole.topk(2, dim=-1)
        gap = (best.values[:, 0] - best.values[:, 1]).min().item()
        if gap > MIN_GREEDY_GAP and torch.equal(best.indices[:, 0], continuation):
            if not fixture.is_kimi:
                patches, grids = arguments["pixel_values_videos"], arguments["video_grid_thw"]
                results |= {
                    "clip_patches": np.array(hashlib.sha256(patches.numpy().astype(np.float32).tobytes()).hexdigest()),
                    "clip_grid": grids[0].numpy().astype(np.int32),
                    "clip_rows": tower_rows(model, patches, grids).numpy(),
                }
            return results | {
                "clip": clip,
                "clip_fps": np.float64(fps),
                "clip_prompt": prompt[0].numpy().astype(np.int32),
                "clip_logits": logits[::4].numpy(),
                "clip_continuation": continuation.numpy().astype(np.int32),
            }
        print(f"{fixture.name}: seed {seed} of the video does not fit", file=sys.stderr)
    raise RuntimeError(f"{fixture.name}: no seed of the video below {MAX_SEED} is fit; change its size")


def put_images(fixture: Fixture, tokens: torch.Tensor, images: Arrays) -> None:
    """Puts the tokens of the fixture's images into `tokens`, and removes other image tokens."""
    if not images:
        return
    config = fixture.config
    special = (config.image_token_id, config.video_token_id, config.vision_start_token_id, config.vision_end_token_id)
    tokens[torch.isin(tokens, torch.tensor(special))] = 7
    for (_, _, first), grid in zip(fixture.images, images["grids"].tolist(), strict=True):
        count = math.prod(grid) // (2 if fixture.is_kimi else config.vision_config.spatial_merge_size) ** 2
        tokens[first - 1], tokens[first + count] = config.vision_start_token_id, config.vision_end_token_id
        tokens[first : first + count] = config.image_token_id
    if fixture.video is not None:
        first, count = fixture.video[3], math.prod(images["video_grid"]) // config.vision_config.spatial_merge_size**2
        tokens[first - 1], tokens[first + count] = config.vision_start_token_id, config.vision_end_token_id
        tokens[first : first + count] = config.video_token_id


def image_arguments(model: Model, tokens: torch.Tensor, images: Arrays) -> dict[str, torch.Tensor]:
    """Returns the arguments of a network with images other than `tokens` [T]."""
    if not images:
        return {}
    if model.config.model_type == kimi_fixture.MODEL_TYPE:
        return kimi_fixture.arguments(images["patches"], images["grids"], model)
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


def tower_rows(model: Model, patches: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
    """Returns the vision tower's output, with the rows of inner blocks side by side."""
    if model.config.model_type == kimi_fixture.MODEL_TYPE:
        return kimi_fixture.tower_rows(model, patches, grids)
    output = model.model.visual(patches, grid_thw=grids)
    return torch.cat([output.pooler_output, *(getattr(output, "deepstack_features", None) or ())], dim=-1)


def compute_logits(model: Model, tokens: torch.Tensor, images: Arrays) -> torch.Tensor:
    """Returns the logits [T, V] of `tokens` [T] in one pass without a cache."""
    return model(tokens[None], use_cache=False, **image_arguments(model, tokens, images)).logits[0]


def greedy(model: Model, prompt: torch.Tensor, images: Arrays) -> torch.Tensor:
    """Returns the `CONTINUATION` tokens that greedy decoding appends to `prompt`, without stopping."""
    model.generation_config = transformers.GenerationConfig(
        do_sample=False, max_new_tokens=CONTINUATION, eos_token_id=None, pad_token_id=0
    )
    arguments = {"attention_mask": torch.ones_like(prompt)[None], **image_arguments(model, prompt, images)}
    output = model.generate(prompt[None], **arguments)
    return output[0, prompt.shape[0] :]


def draw(fixture: Fixture, seed: int, ends: set[int]) -> tuple[Model, Arrays]:
    """Returns the model of `seed` in float32 and its reference arrays.

    Raises:
        Unfit: a change in `matters` has no effect, the logits are flat, a greedy choice is close to a tie, or the
            continuation repeats itself or contains a token of `ends`.
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
    for change in fixture.matters:
        effect = (compute_logits(changed(model, change), tokens, images) - logits).abs().max().item()
        if effect < MIN_EFFECT:
            raise Unfit(f"{change} moves the logits by {effect:.1e} at most")

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
        images["rows"] = tower_rows(model, arguments["pixel_values"], arguments["image_grid_thw"]).numpy()
        if fixture.video is not None:
            patches, grids = arguments["pixel_values_videos"], arguments["video_grid_thw"]
            images["video_rows"] = tower_rows(model, patches, grids).numpy()
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
# The network has more tokens, as usual: its last ids have no text.
TOKENIZER_SIZE = 512
SPECIAL_IDS = set(range(TOKENIZER_SIZE - len(SPECIAL_TOKENS), TOKENIZER_SIZE))


def chat_tokenizer() -> transformers.PreTrainedTokenizerBase:
    """Returns a byte-level BPE tokenizer of `TOKENIZER_SIZE` tokens, the special ones last, trained on `TRAINING_TEXT`.

    Raises:
        RuntimeError: `TRAINING_TEXT` is too short for `TOKENIZER_SIZE` tokens.
    """
    # The untrained tokenizer provides the normalizer and pre-tokenizer of this family's checkpoints.
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
    """Returns conversations with their text and ids, and plain strings with their ids and decoded text."""
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


def save(fixture: Fixture, model: Model, arrays: Arrays, folder: Path) -> None:
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
    model.save_pretrained(folder, max_shard_size=fixture.shard_size)
    if fixture.is_kimi:
        contents = kimi_fixture.preprocessor_config(fixture.config.vision_config)
        write_json(folder / "preprocessor_config.json", contents)
    elif fixture.images:
        image_processor(fixture).save_pretrained(folder)
        if fixture.video is not None:
            video_processor(fixture).save_pretrained(folder)
        if fixture.clip is not None:
            clip_video_processor(fixture).save_pretrained(folder)
    if fixture.mxfp4:
        store_in_mxfp4(folder / "model.safetensors", fixture)
    if fixture.transposed:
        store_transposed(folder / "model.safetensors", fixture)
    if fixture.is_kimi:
        kimi_fixture.store_in_published_form(folder / "model.safetensors")
    if fixture.published_names:
        store_as_multimodal(folder / "model.safetensors", model)
    if fixture.has_transformers_4_form:
        (folder / "generation_config.json").unlink()
    shutil.copyfile(FIXTURES / fixture.name / "config.json", folder / "config.json")
    np.savez_compressed(folder / "reference.npz", **arrays)


def verify(fixture: Fixture, folder: Path) -> str:
    """Describes the distance of a freshly loaded checkpoint from its reference.

    Raises:
        RuntimeError: the files do not reproduce the reference, have the wrong format, or contain the machine's paths.
    """
    with np.load(folder / "reference.npz") as file:
        arrays = dict(file)
    tokens, logits = torch.from_numpy(arrays["tokens"]).long(), torch.from_numpy(arrays["logits"])
    taken = ("patches", "grids", "video", "video_patches", "video_grid", "fps")
    images = {name: arrays[name] for name in taken if name in arrays}
    differences = {}
    for dtype in (torch.float32, torch.float64):
        model = model_class(fixture.config).from_pretrained(
            folder,
            config=copy.deepcopy(fixture.whole_config),
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

    shards = len(list(folder.glob("model-*.safetensors")))
    if (shards < 3) if fixture.shard_size != Fixture.shard_size else (shards > 0):
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

Tiny checkpoints with random weights, each with the results of Hugging Face transformers on a CPU, in float32 from the
stored weights, with eager attention: `logits` of `tokens`, and the greedy `continuation` of `prompt`, in
`reference.npz`. The same networks in float64 differ from `logits` by at most {float64:.0e}; the best two logits differ
by more than {gap:.0e} at every step of a continuation, which crosses position 128 and contains no end token.
`qwen3/reference.json` has conversations and plain strings with the text and ids from its tokenizer. With a sliding
window of n, a token sees itself and the n - 1 tokens before it.

Written by `python tools/make_fixtures.py` (Python 3.11, torch {torch}, transformers {transformers}, and 5.23.0 up to
`qwen3-5-moe-vl`); do not edit.

| fixture | stored as | bytes | special features |
|---|---|---|---|
{rows}

{total:,} bytes in total, not counting this file.
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
    parser.add_argument("--only", metavar="NAME", choices=[fixture.name for fixture in ALL], help="write only this")
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
