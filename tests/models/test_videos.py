"""Videos: their patches, their rows in every pack, and positions of time."""

import dataclasses
import hashlib
from typing import Any

import numpy as np
import pytest

from detjax.models import CheckpointError, Video
from detjax.models.vision.images import ImageOptions, image_rows
from detjax.models.vision.prompt_images import TokenGrid, places, token_coordinates, token_grid
from detjax.models.vision.videos import video_patches
from tests.support import towers
from tests.support.bits import assert_same_bits
from tests.support.towers import QWEN2_5_VL, QWEN3_5, VIDEO_NAME, model, random_patches, reference, video

TOLERANCE = 2e-4


def options() -> dict[str, Any]:
    decoder = model(VIDEO_NAME)
    assert decoder.video_options is not None and decoder.config.vision is not None
    return {"options": decoder.video_options, "vision": decoder.config.vision}


def test_patches_are_those_of_transformers() -> None:
    patches = video_patches(video(), **options())
    assert [len(patches.frames), patches.rows, patches.columns] == reference(VIDEO_NAME)["video_grid"].tolist()
    assert_same_bits(np.concatenate([frame.pixels for frame in patches.frames]), reference(VIDEO_NAME)["video_patches"])
    frames = list(reference(VIDEO_NAME)["video"])
    assert video_patches(Video(frames, video().fps), **options()).digest == patches.digest
    changed = [*frames[:-1], 255 - frames[-1]]
    for other in (Video(frames, 3.0), Video(changed, video().fps)):
        assert video_patches(other, **options()).digest != patches.digest


def test_rows_are_those_of_transformers_alone_and_in_a_pack() -> None:
    tower = model(VIDEO_NAME).vision
    assert tower is not None
    patches = video_patches(video(), **options())
    (alone,) = image_rows(tower, [patches])
    np.testing.assert_allclose(alone, reference(VIDEO_NAME)["video_rows"], rtol=0, atol=TOLERANCE)
    together = image_rows(tower, [random_patches(VIDEO_NAME, 40, 70), patches, random_patches(VIDEO_NAME, 20, 20)])
    assert_same_bits(together[1], alone)


@pytest.mark.parametrize("name", ["qwen3-5-vl", "qwen3-vl"])
def test_a_video_whose_times_the_prompt_says_has_the_rows_of_transformers(name: str) -> None:
    given, decoder = reference(name), model(name)
    assert decoder.video_options is not None and decoder.config.vision is not None and decoder.vision is not None
    patches = video_patches(towers.clip(name), decoder.video_options, decoder.config.vision)
    pixels = np.concatenate([frame.pixels for frame in patches.frames])
    assert [len(patches.frames), patches.rows, patches.columns] == given["clip_grid"].tolist()
    assert hashlib.sha256(pixels.tobytes()).hexdigest() == str(given["clip_patches"])
    together, alone = image_rows(decoder.vision, [patches]), image_rows(decoder.vision, places([patches]))
    np.testing.assert_allclose(together[0], given["clip_rows"], rtol=0, atol=TOLERANCE)
    assert_same_bits(np.concatenate(alone), together[0])
    assert patches.times == (1 / 3, 1.5, 7 / 3)


def test_the_times_of_frames_are_positions_that_text_does_not_wait_for() -> None:
    vision = dataclasses.replace(QWEN2_5_VL, tokens_per_second=4)
    patches = video_patches(Video(np.zeros((5, 56, 84, 3), np.uint8), 1.7), ImageOptions(), vision)
    grid = token_grid(patches, vision)
    assert grid == TokenGrid((0, 4, 9), 2, 3)
    coordinates, excess = token_coordinates([5, *[8] * 18, 6], (9, 8), [grid])
    assert coordinates[1:8].tolist() == [[1, 1 + r, 1 + c] for r in range(2) for c in range(3)] + [[5, 1, 1]]
    assert coordinates[-1].tolist() == [4, 4, 4]
    # Generated tokens come after the last frame.
    assert excess == 10 + 1 - 20


def test_bounds_of_pixels_hold_for_all_frames_where_each_has_its_own_place() -> None:
    frames = np.zeros((4, 100, 200, 3), np.uint8)
    bounded = ImageOptions(min_pixels=32 * 32, max_pixels=40_000)
    assert [(one.rows, one.columns) for one in video_patches(Video(frames, 2.0), bounded, QWEN3_5).frames] == [
        (4, 8)
    ] * 2
    small = ImageOptions(min_pixels=4 * 160 * 256, max_pixels=1 << 20)
    assert video_patches(Video(frames, 2.0), small, QWEN3_5).rows == 10
    assert token_grid(video_patches(Video(frames, 2.0), small, QWEN3_5), QWEN3_5).times == (0,)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (Video(np.zeros((0, 4, 4, 3), np.uint8), 2.0), "0 frames of 0 shapes or dtypes; accepted: at least one frame"),
        (Video([np.zeros((4, 4, 3), np.uint8), np.zeros((4, 5, 3), np.uint8)], 2.0), "2 frames of 2 shapes"),
        (Video(np.zeros((2, 4, 4, 3)), 2.0), r"a frame is float64\(4, 4, 3\); accepted: uint8"),
        (Video(np.zeros((2, 4, 4, 3), np.uint8), 0.0), "fps is 0.0; accepted: a finite number > 0"),
        (Video(np.zeros((2, 4, 4, 3), np.uint8), 1.0, [0.0]), r"2 frames and the times \[0.0\]; accepted: a time >= 0"),
        (Video(np.zeros((2, 4, 4, 3), np.uint8), 1.0, [1.0, 0.0]), "in ascending order"),
        (Video(np.zeros((2, 4, 4, 3), np.uint8), 1.0, [0.0, np.nan]), "2 frames and the times"),
        (Video(np.zeros((2, 3, 700, 3), np.uint8), 1.0), "3 rows and 700 columns; accepted: a side at most 200 times"),
    ],
)
def test_what_is_no_video_is_refused(given: Video, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        video_patches(given, ImageOptions(), QWEN2_5_VL)


def test_frames_whose_bounds_depend_on_their_number_are_refused() -> None:
    with pytest.raises(CheckpointError, match="cap_pixels_per_frame is True; accepted: false, null"):
        ImageOptions.from_hugging_face({"cap_pixels_per_frame": True}, "file", QWEN2_5_VL, is_for_videos=True)


def test_a_file_for_videos_without_bounds_has_those_of_its_class() -> None:
    read = ImageOptions.from_hugging_face({}, "file", QWEN2_5_VL, is_for_videos=True)
    assert (read.min_pixels, read.max_pixels) == (128 * 28 * 28, 768 * 28 * 28)
