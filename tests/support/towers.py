"""Vision towers: the shapes of published ones, and the fixtures that have one, with their images."""

import dataclasses
import functools
from pathlib import Path
from typing import Final

import numpy as np
import tokenizers

from detjax.models import Decoder, Tokenizer, Video, load
from detjax.models.parts.moonvit import MoonViTOptions
from detjax.models.parts.vision import VisionOptions
from detjax.models.vision.frame_sampling import FrameSampling
from detjax.models.vision.images import ImagePatches, image_patches

FIXTURES: Final = Path(__file__).parents[1] / "fixtures"
NAMES: Final = ("qwen2_5_vl-tiny", "qwen3-5-vl", "qwen3-5-moe-vl", "qwen3-vl", "qwen3-vl-moe", "kimi-k2-5")
"""The fixtures with a tower."""
VIDEO_NAME: Final = "qwen2_5_vl-video"
"""The fixture with a video after an image."""
IMAGE, VIDEO_TOKEN = 100, 101
"""The tokens of images and of videos of these."""
CHARACTERS: Final = (*map(chr, range(32, 127)), "\n", "\t", "é", "ü", "<unk>")
"""The texts of the first tokens of the fixtures with a tower."""
_TEMPLATE: Final = (
    "{% for message in messages %}{{ message.role }}:{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'image' %}<vs><img><ve>"
    "{% elif part.type == 'video' %}<vs><video><ve>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %};{% endfor %}"
)
QWEN2_5_VL: Final = VisionOptions(
    width=1280,
    inner_width=3420,
    blocks=32,
    heads=16,
    activation="silu",
    channels=3,
    patch_size=14,
    temporal_patch_size=2,
    merge_size=2,
    window_size=112,
    full_blocks=(7, 15, 23, 31),
    output_width=3584,
    theta=10000.0,
    tokens_per_second=4,
)
QWEN3_5: Final = VisionOptions(
    width=1152,
    inner_width=4304,
    blocks=27,
    heads=16,
    activation="gelu_tanh",
    channels=3,
    patch_size=16,
    temporal_patch_size=2,
    merge_size=2,
    window_size=None,
    full_blocks=tuple(range(27)),
    output_width=3584,
    theta=10000.0,
    tokens_per_second=None,
    positions=2304,
)


QWEN3_VL: Final = dataclasses.replace(QWEN3_5, deepstack_blocks=(8, 16, 24))
KIMI_K2_5: Final = MoonViTOptions(
    width=1152,
    inner_width=4304,
    blocks=27,
    heads=16,
    activation="gelu_tanh",
    channels=3,
    patch_size=14,
    temporal_patch_size=1,
    merge_size=2,
    window_size=None,
    full_blocks=tuple(range(27)),
    output_width=7168,
    theta=10000.0,
    tokens_per_second=None,
    positions=4096,
    most_frames=4,
    projector_eps=1e-5,
)


@functools.cache
def model(name: str, dtype: str = "float32") -> Decoder:
    """A fixture's model."""
    return load(FIXTURES / name, dtype=dtype, progress=False)[0]


@functools.cache
def reference(name: str) -> dict[str, np.ndarray]:
    """The results of transformers."""
    return dict(np.load(FIXTURES / name / "reference.npz"))


def images(name: str) -> list[np.ndarray]:
    """The images of the fixture's prompt."""
    return [reference(name)["image_0"], reference(name)["image_1"]]


def patches_of(name: str, image: np.ndarray) -> ImagePatches:
    """The patches of an image, as the fixture's model takes them."""
    options, vision = model(name).image_options, model(name).config.vision
    assert options is not None and vision is not None
    return image_patches(image, options, vision)


@functools.cache
def reference_patches(name: str) -> tuple[ImagePatches, ...]:
    """The patches of the fixture's images."""
    return tuple(patches_of(name, image) for image in images(name))


def video() -> Video:
    """The video of the fixture with one."""
    return Video(reference(VIDEO_NAME)["video"], float(reference(VIDEO_NAME)["fps"]))


def clip(name: str = "qwen3-5-vl") -> Video:
    """The video of a fixture whose prompt says the times, as its processor chooses frames of it."""
    given = reference(name)
    fps = float(given["clip_fps"])
    indices = FrameSampling().indices(len(given["clip"]), fps)
    times = [index / fps for index in indices]
    return Video(given["clip"][list(indices)], len(indices) / len(given["clip"]) * fps, times)


def random_patches(name: str, height: int, width: int, seed: int = 0) -> ImagePatches:
    """The patches of an image of noise."""
    return patches_of(name, np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8))


def with_one_token_each(tokens: list[int]) -> list[int]:
    """A prompt in which one token stands for each image and each video."""
    before = [None, *tokens]
    placeholders = IMAGE, VIDEO_TOKEN
    return [token for token, last in zip(tokens, before, strict=False) if token not in placeholders or last != token]


def character_tokenizer() -> Tokenizer:
    """A token for each character, and image tokens."""
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({token: index for index, token in enumerate(CHARACTERS)}, unk_token="<unk>")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    made.decoder = tokenizers.decoders.Fuse()
    made.add_special_tokens(["<img>", "<video>", "<vs>", "<ve>"])
    files = {"tokenizer.json": made.to_str(), "tokenizer_config.json": "{}", "chat_template.jinja": _TEMPLATE}
    return Tokenizer({name: content.encode() for name, content in files.items()}, "the test")
