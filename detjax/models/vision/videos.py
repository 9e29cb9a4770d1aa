"""Videos: conversion of frames to patches that matches Hugging Face's video processors.

Frames are resized like PyTorch does on processors with AVX2: in integers, with 16-bit weights. Pillow, which resizes
images, uses more bits, so about 1 % of the numbers differ by 1.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from jaxtyping import Float64, Int32, UInt8

from detjax.models.parts.vision import VisionOptions
from detjax.models.vision.clips import ClipOptions
from detjax.models.vision.images import ImageOptions, VideoPatches, patches_of_frames, resized

_MAX_PRECISION: Final = 22
"""The maximum number of fractional bits of resampling weights."""


@dataclasses.dataclass(frozen=True, eq=False)
class Video:
    """Frames of a video that a model sees.

    Attributes:
        frames: red, green and blue of each pixel, uint8 `[frames, height, width, 3]`, or a list of such frames.
        fps: these frames per second.
        times: the time of each frame in seconds from the video's beginning, for models whose prompts state it, such as
            Qwen3.5's. Qwen2.5-VL uses only `fps`. Default: frames are equally spaced, the first one at 0.
    """

    frames: np.ndarray | Sequence[np.ndarray]
    fps: float
    times: Sequence[float] | None = None


def video_patches(video: Video, options: ImageOptions, vision: VisionOptions) -> VideoPatches:
    """Returns the patches of a video from all its frames; selecting frames is up to the caller.

    Raises:
        ValueError: the video has no frames; frames are empty, differ in size, have other axes, or are too long or too
            wide; `fps` is not positive; or the number of times differs from the number of frames.
    """
    if not 0 < video.fps < math.inf:
        raise ValueError(f"video_patches: fps is {video.fps}; accepted: a finite number > 0, in frames per second")
    shapes = {(np.asarray(frame).dtype.name, np.asarray(frame).shape) for frame in video.frames}
    if len(shapes) != 1:
        raise ValueError(
            f"video_patches: the video has {len(video.frames)} frames of {len(shapes)} shapes or dtypes; accepted: at "
            "least one frame, and all of one shape"
        )
    ((dtype, shape),) = shapes
    if dtype != "uint8" or len(shape) != 3 or shape[2] != 3 or 0 in shape:
        raise ValueError(
            f"video_patches: a frame is {dtype}{shape}; accepted: uint8 (height, width, 3), red, green and blue of "
            "each pixel"
        )
    times = [index / video.fps for index in range(len(video.frames))] if video.times is None else list(video.times)
    if len(times) != len(video.frames) or not all(0 <= time < math.inf for time in times) or sorted(times) != times:
        raise ValueError(
            f"video_patches: the video has {len(video.frames)} frames and the times {_quoted(times)}; accepted: a time "
            ">= 0 for each frame, in seconds and in ascending order"
        )
    frames = np.stack([np.asarray(frame) for frame in video.frames])
    if isinstance(options, ClipOptions):
        return options.clips(frames, times, 1 / video.fps, vision)
    unit = vision.patch_size * vision.merge_size
    if vision.tokens_per_second is None:  # the bounds apply to all frames together
        height, width = _resized_together(frames.shape, unit, vision.temporal_patch_size, options)
    else:
        height, width = resized(shape[0], shape[1], unit, options)
    pixels = _resampled(frames, height, width).astype(np.float32)
    # Images take two steps where this is one.
    mean, std = (np.array(numbers, np.float32) * np.float32(255) for numbers in (options.mean, options.std))
    pixels = (pixels - mean) / std
    missing = -len(pixels) % vision.temporal_patch_size
    pixels = np.concatenate([pixels, np.repeat(pixels[-1:], missing, axis=0)])
    groups = np.split(pixels, len(pixels) // vision.temporal_patch_size)
    return VideoPatches(
        tuple(patches_of_frames(group, vision) for group in groups),
        vision.temporal_patch_size / video.fps,
        None if vision.tokens_per_second is not None else _times_of_groups(times, vision.temporal_patch_size),
    )


def _times_of_groups(times: Sequence[float], size: int) -> tuple[float, ...]:
    """Returns the middle between the first and last time of each group; the last group may be incomplete."""
    lasts = [times[min(first + size, len(times)) - 1] for first in range(0, len(times), size)]
    return tuple((first + last) / 2 for first, last in zip(times[::size], lasts, strict=True))


def _quoted(times: Sequence[float]) -> str:
    return f"[{', '.join(map(str, times[:4]))}{', ...' if len(times) > 4 else ''}]"


def _resized_together(shape: tuple[int, ...], unit: int, temporal: int, options: ImageOptions) -> tuple[int, int]:
    """Returns the height and width to resize frames to if the bounds apply to the pixels of all frames together."""
    frames, height, width = shape[:3]
    if min(height, width) < unit:
        scale = max(unit / height, unit / width)
        height, width = int(height * scale), int(width * scale)
    # The number of frames in the patches; if one is missing, the last frame is repeated.
    padded_frames = max(round(frames / temporal) * temporal, 1)
    return resized(height, width, unit, options, frames=frames, padded_frames=padded_frames)


def _resampled(frames: UInt8[np.ndarray, "F h w C"], height: int, width: int) -> UInt8[np.ndarray, "F H W C"]:
    """Resizes frames by bicubic resampling with antialiasing: first the columns, then the rows."""
    for axis, size in ((2, width), (1, height)):
        if frames.shape[axis] == size:
            continue
        weights, precision = _integer_weights(_weights(frames.shape[axis], size))
        sums = np.tensordot(np.moveaxis(frames, axis, -1).astype(np.int32), weights, axes=(-1, 1))
        rounded = (sums + (1 << (precision - 1))) >> precision
        frames = np.moveaxis(np.clip(rounded, 0, 255).astype(np.uint8), -1, axis)
    return frames


def _weights(size: int, target: int) -> Float64[np.ndarray, "H h"]:
    """Returns the weight of each pixel of the source for each pixel of the target."""
    scale = size / target
    stretch = max(scale, 1.0)
    weights = np.zeros((target, size))
    for index in range(target):
        center = scale * (index + 0.5)
        first = max(int(center - 2 * stretch + 0.5), 0)
        stop = min(int(center + 2 * stretch + 0.5), size)
        row = [_cubic((pixel - center + 0.5) / stretch) for pixel in range(first, stop)]
        weights[index, first:stop] = np.array(row) / sum(row)
    return weights


def _cubic(x: float) -> float:
    """Keys' kernel with a = -0.5."""
    x = abs(x)
    if x < 1:
        return (1.5 * x - 2.5) * x * x + 1
    return ((-0.5 * x + 2.5) * x - 4) * x + 2 if x < 2 else 0.0


def _integer_weights(weights: Float64[np.ndarray, "H h"]) -> tuple[Int32[np.ndarray, "H h"], int]:
    """Returns 16-bit integer weights and their number of fractional bits: as many as the largest weight allows."""
    largest = float(weights.max())
    precision = next(
        bits
        for bits in range(_MAX_PRECISION + 1)
        if bits == _MAX_PRECISION or int(0.5 + largest * (1 << (bits + 1))) >= 1 << 15
    )
    scaled = weights * (1 << precision)
    return np.trunc(scaled + np.copysign(0.5, scaled)).astype(np.int32), precision
