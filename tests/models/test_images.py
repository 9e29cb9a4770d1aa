"""Images: files and their pixels, options of a checkpoint one by one, digests, and calls of the tower."""

import dataclasses
import io
import json
from typing import Any

import numpy as np
import PIL.Image
import pytest

from detjax.models import CheckpointError, ModelMetadata
from detjax.models.vision import image_files, images
from detjax.models.vision.image_files import read_pixels
from detjax.models.vision.images import ImageOptions, ImagePatches, VideoPatches, resized
from tests.support import towers
from tests.support.bits import assert_same_bits
from tests.support.towers import QWEN2_5_VL, QWEN3_5

DEFAULTS = ImageOptions()


def noise(height: int = 8, width: int = 12, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, channels)).astype(np.uint8)


def written(pixels: np.ndarray, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    PIL.Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "options"), [("PNG", {}), ("WEBP", {"lossless": True}), ("BMP", {})])
def test_formats_that_keep_every_pixel_are_read(kind: str, options: dict[str, Any]) -> None:
    assert_same_bits(read_pixels("it", written(noise(), kind, **options)), noise())


def test_lossy_formats_are_read_and_others_are_not() -> None:
    flat = np.full((8, 12, 3), 77, np.uint8)
    for kind in ("JPEG", "GIF"):
        assert np.abs(read_pixels("it", written(flat, kind)).astype(int) - 77).max() <= 2
    for contents in (written(flat, "TIFF"), written(flat)[:40], b""):
        with pytest.raises(ValueError, match="it cannot be read as an image; accepted: PNG, JPEG, WEBP, GIF, BMP"):
            read_pixels("it", contents)


def test_transparency_is_dropped_and_grey_is_repeated() -> None:
    transparent = noise(channels=4)
    assert_same_bits(read_pixels("it", written(transparent)), transparent[..., :3])
    grey = noise()[..., 0]
    assert_same_bits(read_pixels("it", written(grey)), np.repeat(grey[..., None], 3, axis=-1))


def test_an_image_lies_as_its_file_says() -> None:
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    assert_same_bits(read_pixels("it", written(noise(), exif=exif)), np.rot90(noise(), -1))


def test_an_image_may_have_as_many_pixels_as_the_limit_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_files, "_MAX_PIXELS", 96)
    assert read_pixels("it", written(noise(8, 12))).shape == (8, 12, 3)
    with pytest.raises(ValueError, match="it has 97 x 1 pixels; accepted: up to 96"):
        read_pixels("it", written(noise(1, 97)))


def test_of_an_animation_the_first_frame_is_read() -> None:
    frames = [PIL.Image.fromarray(np.full((8, 12, 3), shade, np.uint8)) for shade in (10, 200)]
    file = io.BytesIO()
    frames[0].save(file, "WEBP", save_all=True, append_images=frames[1:], lossless=True)
    assert_same_bits(read_pixels("it", file.getvalue()), np.asarray(frames[0]))


# --- options ----------------------------------------------------------------------------------------------------------


def read(raw: dict[str, Any], **options: Any) -> ImageOptions:
    return ImageOptions.from_hugging_face(raw, "a.json", QWEN2_5_VL, **options)


@pytest.mark.parametrize(
    ("raw", "changes"),
    [
        ({}, {}),
        ({"min_pixels": 5000}, {"min_pixels": 5000}),
        ({"max_pixels": 5000}, {"max_pixels": 5000}),
        ({"size": {"shortest_edge": 5000}}, {"min_pixels": 5000}),
        ({"size": {"longest_edge": 5000}}, {"max_pixels": 5000}),
        ({"size": {"shortest_edge": 5000}, "min_pixels": 6000}, {"min_pixels": 6000}),
        ({"size": {"longest_edge": 5000}, "max_pixels": 6000}, {"max_pixels": 6000}),
        ({"image_mean": [0.5, 0, 1]}, {"mean": (0.5, 0.0, 1.0)}),
        ({"image_std": [0.5, 2, 1]}, {"std": (0.5, 2.0, 1.0)}),
        ({"do_convert_rgb": True, "size": {"longest_edge": 5000}}, {"max_pixels": 5000, "unread": "do_convert_rgb"}),
        ({"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, "resample": 3, "rescale_factor": 1 / 255}, {}),
        ({"do_resize": True, "do_rescale": True, "do_normalize": None, "cap_pixels_per_frame": False}, {}),
        ({"min_pixels": 784, "max_pixels": 784}, {"min_pixels": 784, "max_pixels": 784}),
    ],
)
def test_a_key_of_the_options_alone_changes_its_field_alone_and_is_written(raw: Any, changes: dict[str, Any]) -> None:
    if "unread" in changes:
        changes = changes | {"unread": json.dumps({changes["unread"]: True})}
    options = read(raw)
    assert options == dataclasses.replace(DEFAULTS, **changes)
    assert read(options.to_hugging_face(QWEN2_5_VL) | {"image_processor_type": None}) == options


def test_options_are_written_with_the_kind_of_their_processor() -> None:
    assert DEFAULTS.to_hugging_face(QWEN2_5_VL)["image_processor_type"] == "Qwen2VLImageProcessor"
    for key in ("video_processor_type", "image_processor_type"):
        raw = dataclasses.replace(DEFAULTS, unread=json.dumps({key: "Other"})).to_hugging_face(QWEN2_5_VL)
        assert {name: raw[name] for name in raw if name.endswith("_type")} == {key: "Other"}


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        *((({key: 7}), f"{key} is 7; accepted: ") for key in ("patch_size", "temporal_patch_size", "merge_size")),
        *((({key: False}), f"{key} is False; accepted: true") for key in ("do_resize", "do_rescale", "do_normalize")),
        ({"rescale_factor": 1 / 256}, "rescale_factor is 0.00390625; accepted: 0.0039"),
        ({"resample": 2}, "resample is 2; accepted: 3"),
        ({"cap_pixels_per_frame": True}, "cap_pixels_per_frame is True"),
        ({"min_pixels": 1, "max_pixels": 783}, "max_pixels is 783; accepted: at least min_pixels, which is 1, and the"),
        ({"max_pixels": 3135}, "max_pixels is 3135; accepted: at least min_pixels, which is 3136"),
        ({"min_pixels": 0}, "min_pixels is 0"),
        ({"size": {"shortest_edge": 0}}, "size.shortest_edge is 0"),
        ({"image_mean": [True, 0, 1]}, "image_mean is [True, 0, 1]; accepted: a list of 3 numbers"),
        ({"image_std": [1.0, 1.0]}, "image_std is [1.0, 1.0]; accepted: a list of 3 numbers"),
        ({"image_std": [1.0, 1.0, 0]}, "image_std is [1.0, 1.0, 0]; accepted: numbers other than 0"),
    ],
)
def test_options_that_would_change_the_patches_are_refused(raw: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError) as error:
        read(raw)
    assert f"a.json: {words}" in str(error.value)


def test_bounds_of_videos_follow_from_the_tower() -> None:
    read_for = ImageOptions.from_hugging_face
    bounds = [read_for({}, "a.json", vision, is_for_videos=True) for vision in (QWEN2_5_VL, QWEN3_5)]
    assert [(one.min_pixels, one.max_pixels) for one in bounds] == [
        (128 * 28 * 28, 768 * 28 * 28),
        (128 * 32 * 32, 768 * 32 * 32),
    ]


def test_a_side_may_be_200_times_as_long_as_the_other() -> None:
    assert resized(3, 600, 28, DEFAULTS)[0] == resized(600, 3, 28, DEFAULTS)[1] == 28
    for height, width in ((3, 601), (601, 3)):
        with pytest.raises(ValueError, match="a side at most 200 times as long as the other"):
            resized(height, width, 28, DEFAULTS)


def test_bounds_belong_to_the_sizes_that_they_allow() -> None:
    options = dataclasses.replace(DEFAULTS, min_pixels=56 * 84, max_pixels=84 * 112)
    assert resized(56, 84, 28, options) == resized(60, 80, 28, options) == (56, 84)
    assert resized(84, 112, 28, options) == resized(90, 110, 28, options) == (84, 112)
    assert resized(56, 56, 28, options) == (84, 84)
    assert resized(112, 112, 28, options) == (84, 84)


# --- patches ----------------------------------------------------------------------------------------------------------


def patches(rows: int, columns: int, shade: float = 0.0) -> ImagePatches:
    return ImagePatches(np.full((rows * columns, 1176), shade, np.float32), rows, columns)


def test_every_part_of_an_image_or_video_is_in_its_digest() -> None:
    one = patches(4, 6)
    last = patches(4, 6)
    last.pixels[-1, -1] = 1
    shaped = ImagePatches(one.pixels.reshape(48, 588), 4, 6)
    assert patches(4, 6).digest == one.digest
    assert len({x.digest for x in (one, patches(6, 4), patches(2, 12), last, shaped)}) == 5
    videos = [
        VideoPatches((one,), 1.0),
        VideoPatches((one,), 2.0),
        VideoPatches((one, last), 1.0),
        VideoPatches((last, one), 1.0),
        VideoPatches((one,), 1.0, (0.5,)),
    ]
    assert len({x.digest for x in (one, *videos)}) == 6
    # A prompt has these times in its tokens.
    assert VideoPatches((one,), 2.0, (1.5,)).digest == videos[-1].digest


def test_a_call_of_the_tower_has_as_many_windows_as_fit() -> None:
    sizes = [patches(8, 8), patches(8, 16), patches(16, 16), patches(8, 8)]  # 1, 2, 4 and 1 windows
    packs = {most: [len(pack) for pack in images._packs(sizes, QWEN2_5_VL, most)] for most in (1, 3, 4, 7, 8)}
    assert packs == {1: [1, 1, 1, 1], 3: [2, 1, 1], 4: [2, 1, 1], 7: [3, 1], 8: [4]}
    assert list(images._packs([], QWEN2_5_VL, 4)) == []


def test_metadata_has_each_part_of_the_model() -> None:
    model = towers.model("qwen3-5-vl")
    metadata = ModelMetadata.from_model(model)
    assert (metadata.config, metadata.generation_defaults) == (model.config, model.generation_defaults)
    assert (metadata.image_options, metadata.video_options) == (model.image_options, model.video_options)
    assert model.image_options != model.video_options
