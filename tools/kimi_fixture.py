"""The part of `make_fixtures.py` for Kimi K2.5, whose published files are not in transformers' form.

transformers ignores the keys of a published `vision_config`, and its image processor resizes with torch instead of
Pillow. Patches are therefore made as published checkpoints' own processor makes them, and compared with transformers'.
Clips and images have the same placeholder, so clips go into the network as images of several frames.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import PIL.Image
import safetensors.torch
import tokenizers
import torch
import transformers

Arrays = dict[str, np.ndarray]

MODEL_TYPE = "kimi_k25"
MOST_DIFFERENCE = 0.05
"""The largest difference of a number of a patch from transformers', which resizes with fewer bits."""

MEDIA = {
    "image_mean": [0.5, 0.45, 0.4],
    "image_std": [0.5, 0.55, 0.6],
    "in_patch_limit": 150,
    "in_patch_limit_each_frame": 28,
    "patch_limit_on_one_side": 16,
    "temporal_merge_kernel_size": 3,
    "sample_fps": 2.0,
    "timestamp_mode": "hh:mm:ss.fff",
    **dict.fromkeys(("fixed_output_tokens", "in_patch_limit_video", "max_num_frames_each_video")),
}

SPECIAL = ("<|media_pad|>", "<|media_begin|>", "<|media_content|>", "<|media_end|>")
VIDEO = "<|kimi_k25_video_placeholder|>"
CLIP_TEXT = f"user:See this. {VIDEO}\nAnd <|media_begin|>image<|media_content|><|media_pad|><|media_end|>\n?;"


def in_own_form(raw: Mapping[str, object]) -> dict[str, object]:
    """Returns a published configuration in the form that transformers reads."""
    vision = raw["vision_config"]
    names = {f"vt_{name}": name for name in ("hidden_size", "num_attention_heads", "num_hidden_layers")}
    names |= {"vt_intermediate_size": "intermediate_size", "patch_size": "patch_size"}
    names |= {f"init_pos_emb_{axis}": f"pos_emb_{axis}" for axis in ("height", "width", "time")}
    renamed = {new: vision[old] for old, new in names.items()} | {"merge_kernel_size": vision["merge_kernel_size"]}
    pad = raw["media_placeholder_token_id"]
    return {
        **{key: value for key, value in raw.items() if key != "auto_map"},
        "vision_config": renamed,
        "projection_hidden_size": vision["mm_hidden_size"],
        "projection_layer_norm_eps": vision["projector_ln_eps"],
        "image_token_id": pad,
        "vision_start_token_id": pad + 1,
        "vision_end_token_id": pad + 3,
        "video_token_id": raw["text_config"]["vocab_size"],  # as in transformers, no such token exists
    }


def preprocessor_config(vision: transformers.PreTrainedConfig) -> dict[str, object]:
    """Returns the contents of a published `preprocessor_config.json`."""
    media = {**MEDIA, "patch_size": vision.patch_size, "merge_kernel_size": 2}
    return {"auto_map": {"AutoImageProcessor": "kimi_k25_vision_processing.Processor"}, "media_proc_cfg": media}


def store_in_published_form(file: Path) -> None:
    """Renames the tensors that transformers saves under other names than published files have."""
    names = {
        "language_model.model.blocks.": "language_model.model.layers.",
        "model.mm_projector.": "mm_projector.",
        "vision_tower.encoder.patch_embed.": "vision_tower.patch_embed.",
    }
    renamed = {}
    for name, tensor in safetensors.torch.load_file(file).items():
        old = next((old for old in names if name.startswith(old)), "")
        renamed[names.get(old, "") + name.removeprefix(old)] = tensor
    safetensors.torch.save_file(renamed, file, metadata={"format": "pt"})


# --- patches ---------------------------------------------------------------------------------------------------------


def patches(frames: Sequence[np.ndarray], limit: int, vision: transformers.PreTrainedConfig) -> tuple[Arrays, tuple]:
    """Returns the patches of an image or clip, row by row, and frames, rows and columns; see `MEDIA`."""
    size, (height, width) = vision.patch_size, frames[0].shape[:2]
    longest = MEDIA["patch_limit_on_one_side"] * size
    counted = max(1.0, width // size) * max(1.0, height // size)
    scale = min(1.0, math.sqrt(limit / counted), longest / width, longest / height)
    new_width, new_height = (min(max(1, int(side * scale)), longest) for side in (width, height))
    resized = []
    for frame in frames:
        image = PIL.Image.fromarray(frame).resize((new_width, new_height), PIL.Image.Resampling.BICUBIC)
        padding = (-new_height % (2 * size), -new_width % (2 * size))
        resized.append(np.pad(np.asarray(image), [(0, padding[0]), (0, padding[1]), (0, 0)]))
    x = (np.stack(resized) / 255.0).astype(np.float32)
    x -= np.array(MEDIA["image_mean"])
    x *= 1.0 / np.array(MEDIA["image_std"])
    grid = (len(x), x.shape[1] // size, x.shape[2] // size)
    x = x.reshape(grid[0], grid[1], size, grid[2], size, 3).transpose(0, 1, 3, 5, 2, 4)
    return x.reshape(math.prod(grid), -1), grid


def by_token(numbers: np.ndarray, grid: Sequence[int], *, inverse: bool = False) -> np.ndarray:
    """Returns row-by-row patches in the order of tokens, or the other way round."""
    frames, rows, columns = grid
    order = np.arange(math.prod(grid)).reshape(frames, rows // 2, 2, columns // 2, 2).swapaxes(2, 3).reshape(-1)
    return numbers[np.argsort(order) if inverse else order]


def image_arrays(images: Mapping[str, np.ndarray], vision: transformers.PreTrainedConfig) -> Arrays:
    """Returns the patches and grids of a fixture's images, by their names in `reference.npz`.

    Raises:
        RuntimeError: they differ from transformers' by more than its coarser resizing.
    """
    limit = MEDIA["in_patch_limit"]
    made = [patches([image], limit, vision) for image in images.values()]
    processor = transformers.Kimi_K25ImageProcessor(
        image_mean=MEDIA["image_mean"],
        image_std=MEDIA["image_std"],
        max_patches=limit,
        size=dict.fromkeys(("max_height", "max_width"), MEDIA["patch_limit_on_one_side"]),
        patch_size=vision.patch_size,
    )
    theirs = processor(list(images.values()), return_tensors="np")
    ours = np.concatenate([numbers for numbers, _ in made])
    far = np.abs(theirs["pixel_values"].reshape(ours.shape) - ours)
    print(f"kimi: patches differ from transformers' in {(far > 0.001).mean():.1%} of numbers, by up to {far.max():.3f}")
    if theirs["image_grid_thw"].tolist() != [list(grid) for _, grid in made] or far.max() > MOST_DIFFERENCE:
        raise RuntimeError("kimi: patches are unlike transformers' patches")
    return {
        "patches": np.concatenate([by_token(*one) for one in made]),
        "grids": np.array([grid[1:] for _, grid in made], np.int32),
    }


def arguments(numbers: np.ndarray, grids: np.ndarray, model: transformers.PreTrainedModel) -> dict[str, torch.Tensor]:
    """Returns the arguments of a network with images or clips other than its tokens; patches are in tokens' order."""
    grids = grids if grids.shape[1] == 3 else np.pad(grids, [(0, 0), (1, 0)], constant_values=1)
    ends = np.cumsum([math.prod(grid) for grid in grids.tolist()])
    parts = np.split(numbers, ends[:-1])
    rows = np.concatenate([by_token(*pair, inverse=True) for pair in zip(parts, grids.tolist(), strict=True)])
    size = model.config.vision_config.patch_size
    return {
        "pixel_values": torch.from_numpy(rows.reshape(-1, 3, size, size)).to(model.dtype),
        "image_grid_thw": torch.from_numpy(grids).long(),
    }


def tower_rows(model: transformers.PreTrainedModel, pixels: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
    """Returns the projector's output."""
    return torch.cat(tuple(model.model.get_image_features(pixels, grids, return_dict=True).pooler_output))


# --- a conversation with a video -------------------------------------------------------------------------------------


def processor() -> transformers.Kimi_K25Processor:
    """Returns transformers' processor of whole conversations, with a tokenizer of characters."""
    characters = [*map(chr, range(32, 127)), "\n", "\t", "é", "ü", "<unk>"]
    words = {character: index for index, character in enumerate(characters)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    made.add_special_tokens([*SPECIAL, VIDEO])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made)
    media = {name: MEDIA[name] for name in ("image_mean", "image_std")}
    media["size"] = dict.fromkeys(("max_height", "max_width"), MEDIA["patch_limit_on_one_side"])
    media["patch_size"] = 6
    return transformers.Kimi_K25Processor(
        transformers.Kimi_K25ImageProcessor(**media, max_patches=MEDIA["in_patch_limit"]),
        tokenizer,
        transformers.Kimi_K25VideoProcessor(
            **media,
            max_patches=MEDIA["in_patch_limit_each_frame"],
            temporal_patch_size=MEDIA["temporal_merge_kernel_size"],
            do_sample_frames=False,
        ),
    )


def clip_inputs(
    clip: np.ndarray, fps: float, image: np.ndarray, model: transformers.PreTrainedModel
) -> tuple[torch.Tensor, dict[str, torch.Tensor], Arrays]:
    """Returns the tokens of a conversation with a video and an image, and the other arguments of the network.

    The third result has arrays for `reference.npz`. Frames are selected as the published processor selects them.

    Raises:
        RuntimeError: patches differ from transformers' by more than its coarser resizing.
    """
    vision, count = model.config.vision_config, max(round(len(clip) * min(MEDIA["sample_fps"], fps) / fps), 1)
    chosen = np.linspace(0, len(clip) - 1, count).round().astype(int)
    frames, step = clip[chosen], MEDIA["temporal_merge_kernel_size"]
    given = processor()(
        text=[CLIP_TEXT],
        images=[image],
        videos=[torch.from_numpy(frames).permute(0, 3, 1, 2)],
        video_metadata=[{"fps": fps, "total_num_frames": len(clip), "frames_indices": chosen.tolist()}],
        return_tensors="pt",
    )
    pad = model.config.image_token_id
    prompt = torch.where(given["input_ids"] == pad + len(SPECIAL), pad, given["input_ids"])
    limit = MEDIA["in_patch_limit_each_frame"]
    made = [patches(frames[begin : begin + step], limit, vision) for begin in range(0, count, step)]
    theirs = given["pixel_values_videos"].numpy()
    ours = np.concatenate([numbers for numbers, _ in made])
    if np.abs(theirs.reshape(ours.shape) - ours).max() > MOST_DIFFERENCE:
        raise RuntimeError("kimi: the video's patches are unlike transformers' patches")
    made.append(patches([image], MEDIA["in_patch_limit"], vision))
    numbers, grids = np.concatenate([by_token(*one) for one in made]), np.array([grid for _, grid in made], np.int32)
    videos = np.concatenate([by_token(*one) for one in made[:-1]])
    inputs = arguments(numbers, grids, model)
    rows = tower_rows(model, **dict(zip(("pixels", "grids"), inputs.values(), strict=True)))
    tokens = sum(math.prod(grid[1:]) // 4 for _, grid in made[:-1])
    return (
        prompt,
        inputs,
        {
            "clip_text": np.array(CLIP_TEXT),
            "clip_patches": np.array(hashlib.sha256(videos.astype(np.float32).tobytes()).hexdigest()),
            "clip_grid": grids[:-1],
            "clip_rows": rows[:tokens].numpy(),
        },
    )
