"""Files of videos: the frames and the times of animations, lists of frames, and what is refused."""

import io
import struct
import zlib
from typing import Any

import numpy as np
import PIL.Image
import pytest

from detjax.models.vision import video_files
from detjax.models.vision.frame_sampling import FrameSampling
from detjax.models.vision.video_files import read_frames, read_video
from tests.support.bits import assert_same_bits

ALL = FrameSampling(fps=1000.0, min_frames=1)
"""Every frame, and more often those that are longer than others."""


def frames(count: int = 6, height: int = 8, width: int = 12) -> np.ndarray:
    """Frames of one colour each, which every format keeps."""
    shades = np.arange(count, dtype=np.uint8)[:, None, None, None] * np.uint8(40)
    return np.broadcast_to(shades, (count, height, width, 3)).copy()


def animation(kind: str, shown: np.ndarray, duration: int | list[int], **options: Any) -> bytes:
    images = [PIL.Image.fromarray(frame) for frame in shown]
    file = io.BytesIO()
    if kind == "WEBP":
        options |= {"lossless": True}
    images[0].save(file, kind, save_all=True, append_images=images[1:], duration=duration, **options)
    return file.getvalue()


def png(frame: np.ndarray) -> bytes:
    file = io.BytesIO()
    PIL.Image.fromarray(frame).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_the_frames_of_an_animation_have_their_times(kind: str) -> None:
    video = read_video("it", animation(kind, frames(), 250), ALL)
    assert_same_bits(np.stack(video.frames), frames())  # pyright: ignore[reportCallIssue]
    assert video.fps == 4.0 and video.times == [0, 0.25, 0.5, 0.75, 1.0, 1.25]


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_a_frame_that_is_longer_counts_as_several(kind: str) -> None:
    video = read_video("it", animation(kind, frames(4), [200, 600, 200, 400]), ALL)
    assert_same_bits(np.stack(video.frames), frames(4)[[0, 1, 1, 1, 2, 3, 3]])  # pyright: ignore[reportCallIssue]
    assert video.fps == 5.0 and video.times == [index / 5 for index in range(7)]


def test_frames_are_chosen_by_their_times() -> None:
    contents = animation("WEBP", frames(4), [200, 600, 200, 400])
    spread = read_video("it", contents, FrameSampling(min_frames=3))
    assert_same_bits(np.stack(spread.frames), frames(4)[[0, 1, 3]])  # pyright: ignore[reportCallIssue]
    assert spread.times == [0, 3 / 5, 6 / 5] and spread.fps == 3 / 7 * 5
    in_groups = read_video("it", contents, FrameSampling(group=2))
    assert_same_bits(np.stack(in_groups.frames), frames(4)[[0, 1, 1, 3]])  # pyright: ignore[reportCallIssue]
    assert in_groups.fps == 4 / 7 * 5


def test_times_of_parts_of_a_millisecond_are_exact() -> None:
    contents = animation("PNG", frames(3), 100)
    # The delay of each frame as a quotient in seconds: 1 / 30. Its checksum is recomputed.
    parts = []
    for piece in contents.split(b"fcTL")[1:]:
        body = piece[:20] + struct.pack(">HH", 1, 30) + piece[24:26]
        parts.append(body + struct.pack(">I", zlib.crc32(b"fcTL" + body)) + piece[30:])
    video = read_video("it", b"fcTL".join([contents.split(b"fcTL")[0], *parts]), ALL)
    assert video.fps == 30.0 and video.times == [0, 1 / 30, 2 / 30]


def test_an_image_and_frames_without_times_are_videos() -> None:
    still = read_video("it", png(frames()[3]), FrameSampling(group=2))
    assert_same_bits(np.stack(still.frames), frames()[3:4])  # pyright: ignore[reportCallIssue]
    assert (still.fps, still.times) == (10.0, [0])
    assert read_video("it", animation("GIF", frames(2), 0), ALL).fps == 10.0


def test_transparency_is_dropped_as_in_images() -> None:
    shown = np.concatenate([frames(2), np.full((2, 8, 12, 1), 255, np.uint8)], axis=-1)
    shown[1, ..., 3] = 128
    video = read_video("it", animation("PNG", shown, 100, blend=0), ALL)
    assert_same_bits(np.stack(video.frames), shown[..., :3])  # pyright: ignore[reportCallIssue]


def test_a_list_of_frames_is_taken_whole() -> None:
    video = read_frames("it", [png(frame) for frame in frames()], FrameSampling(fps=1.5, min_frames=1))
    assert_same_bits(np.stack(video.frames), frames())  # pyright: ignore[reportCallIssue]
    assert (video.fps, video.times) == (1.5, None)


@pytest.mark.parametrize(
    ("contents", "words"),
    [
        (
            b"\0\0\0\x18ftypmp42",
            "it is an MP4, QuickTime or AVIF file, which is not decoded; accepted: animations in",
        ),
        (
            b"\x1aE\xdf\xa3" + b"\0" * 40,
            "it is a Matroska or WebM file, which is not decoded.*Decode it where it",
        ),
        (b"RIFF\0\0\0\0AVI LIST", "it is an AVI file"),
        (b"OggS\0", "it is an Ogg file"),
        (b"no video", "it cannot be read as a video; accepted: animations in GIF.*send an animated WEBP"),
        (animation("WEBP", frames(), 100)[:150], "it cannot be read as a video"),
    ],
)
def test_other_containers_are_refused_by_name(contents: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_video("it", contents, ALL)


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        ("_MAX_FRAME_PIXELS", "it has 12 x 8 pixels; accepted: up to 95"),
        ("_MAX_DECODED", "it has 6 frames of 12 x 8 pixels; accepted: up to 95 pixels in all"),
        ("_MAX_PIXELS", "it has 12 x 8 pixels in 6 frames; accepted: up to 95 pixels in all"),
    ],
)
def test_videos_that_are_too_large_are_refused(limit: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video_files, limit, 95)
    with pytest.raises(ValueError, match=words):
        read_video("it", animation("WEBP", frames(), 100), ALL)
    if limit == "_MAX_PIXELS":
        with pytest.raises(ValueError, match="the first 1 frames of it have 96 pixels; accepted: up to 95"):
            read_frames("it", [png(frame) for frame in frames()], ALL)


def test_lists_that_are_no_video_are_refused() -> None:
    with pytest.raises(ValueError, match="it has 6 frames; accepted: up to 5, which is max_frames"):
        read_frames("it", [b""] * 6, FrameSampling(max_frames=5))
    with pytest.raises(ValueError, match="it has frames of 12 x 8, 13 x 8 pixels; accepted: frames of one size"):
        read_frames("it", [png(frames()[0]), png(frames(1, 8, 13)[0])], ALL)
    with pytest.raises(ValueError, match="frame 1 of it cannot be read as an image"):
        read_frames("it", [png(frames()[0]), b"none"], ALL)
