"""The frames of a video that a model sees."""

import re

import pytest

from detjax.models import CheckpointError
from detjax.models.vision.frame_sampling import FrameSampling
from detjax.models.vision.images import ImageOptions
from tests.support import towers
from tests.support.towers import QWEN2_5_VL, QWEN3_5, reference


def test_a_checkpoint_says_how_frames_are_chosen() -> None:
    read = ImageOptions.from_hugging_face({"fps": 1.5, "min_frames": 2, "max_frames": 9}, "file", QWEN2_5_VL)
    assert FrameSampling.from_options(read, QWEN2_5_VL) == FrameSampling(1.5, 2, 9, 2)
    assert FrameSampling.from_options(ImageOptions(), QWEN3_5) == FrameSampling(2.0, 4, 768, None)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"fps": 0}, "fps is 0; accepted: a finite number > 0"),
        ({"num_frames": 8}, "num_frames is 8; accepted: null"),
        ({"max_frames": 3}, "max_frames is 3; accepted: at least min_frames, which is 4"),
    ],
)
def test_what_a_checkpoint_may_not_say_is_refused(raw: dict[str, int], words: str) -> None:
    read = ImageOptions.from_hugging_face(raw, "file", QWEN2_5_VL)
    with pytest.raises(CheckpointError, match=re.escape(words)):
        FrameSampling.from_options(read, QWEN2_5_VL)


@pytest.mark.parametrize(
    ("sampling", "total", "rate", "indices"),
    [
        # What transformers' processors chose.
        (FrameSampling(group=2), 30, 10.0, [0, 5, 10, 15, 20, 25]),
        (FrameSampling(group=2), 31, 10.0, [0, 5, 10, 15, 20, 25]),
        (FrameSampling(group=2), 10, 10.0, [0, 2, 5, 7]),
        (FrameSampling(group=2, max_frames=5), 100, 10.0, [0, 25, 50, 75]),
        (FrameSampling(group=2), 3, 24.0, [0, 1]),
        (FrameSampling(group=2), 7, 2.0, [0, 1, 2, 3, 4, 5]),
        (FrameSampling(), 8, 3.0, [0, 2, 4, 5, 7]),
        (FrameSampling(), 30, 10.0, [0, 6, 12, 17, 23, 29]),
        (FrameSampling(), 3, 24.0, [0, 1, 2]),
        (FrameSampling(max_frames=5), 100, 10.0, [0, 25, 50, 74, 99]),
        # One frame: transformers asks for two at least.
        (FrameSampling(group=2), 1, 24.0, [0]),
        (FrameSampling(), 1, 24.0, [0]),
        (FrameSampling(fps=3.0, group=2), 100, 10.0, [index * 100 // 30 for index in range(30)]),
        # transformers' steps of 179 / 178 fit 179 times into 179, so that it has an odd number here.
        (FrameSampling(group=2), 179, 1.0, [*range(178)]),
    ],
)
def test_frames_are_chosen_as_by_transformers(
    sampling: FrameSampling, total: int, rate: float, indices: list[int]
) -> None:
    assert list(sampling.indices(total, rate)) == indices


def test_the_frames_of_the_reference_have_its_times() -> None:
    prompt = "".join(towers.CHARACTERS[token] for token in reference("qwen3-5-vl")["clip_prompt"] if token < 100)
    times = re.findall(r"<(\d+\.\d) seconds>", prompt)
    frames = towers.clip()
    assert frames.times is not None
    pairs = [(frames.times[0], frames.times[1]), (frames.times[2], frames.times[3]), (frames.times[4],) * 2]
    assert times == [f"{(first + last) / 2:.1f}" for first, last in pairs]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fps": 0.0}, "fps is 0.0; accepted: a finite number > 0"),
        ({"fps": float("nan")}, "fps is nan"),
        ({"max_frames": 1}, "max_frames is 1; accepted: 2 to 768"),
        ({"max_frames": 769}, "max_frames is 769; accepted: 2 to 768, the checkpoint's max_frames"),
        ({"min_frames": 9, "max_frames": 8}, "min_frames is 9; accepted: 1 to 8, which is max_frames"),
    ],
)
def test_what_a_video_may_not_ask_for_is_refused(changes: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        FrameSampling(group=2).changed(**changes)


def test_a_video_may_ask_for_less_frames_than_the_checkpoint_has_at_least() -> None:
    assert FrameSampling().changed(max_frames=2) == FrameSampling(min_frames=2, max_frames=2)
