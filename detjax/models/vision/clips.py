"""Images and clips for Kimi K2.5: they are never enlarged, and padded with black to multiples of a token's side.

A video is cut into clips of a few frames. Images and frames are resized by Pillow, whose integer arithmetic is the same
on all processors; the rest is the arithmetic of the image processor that published checkpoints contain.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import PIL.Image
from jaxtyping import Float32, UInt8

from detjax.models.configuration.json_object import JsonObject
from detjax.models.parts.moonvit import MoonViTOptions
from detjax.models.parts.vision import VisionOptions
from detjax.models.vision.images import (
    ImageOptions,
    ImagePatches,
    VideoPatches,
    patches_of_frames,
    read_channels,
    refuse_other_options,
)

_PUBLISHED: Final = "media_proc_cfg"
"""The key of published files for the object that has all others."""
_MEAN: Final = (0.5, 0.5, 0.5)
_TIMES: Final = "hh:mm:ss.fff"
"""The only form of times in prompts."""


@dataclasses.dataclass(frozen=True)
class ClipOptions(ImageOptions):
    """The options for converting images, and clips of video frames, to patches.

    `max_pixels` counts the pixels of the largest image or clip.

    Attributes:
        max_patches: the maximum number of patches of an image.
        max_frame_patches: the maximum number of patches of a frame of a clip.
        max_side: the maximum rows, and the maximum columns, of patches.
        frames: frames of a clip.
        fps: frames per second that are selected from a video.
    """

    min_pixels: int = 1
    max_pixels: int = 16384 * 14 * 14
    mean: tuple[float, ...] = _MEAN
    std: tuple[float, ...] = _MEAN
    max_patches: int = 16384
    max_frame_patches: int = 4096
    max_side: int = 512
    frames: int = 4
    fps: float = 2.0

    @classmethod
    def from_hugging_face(
        cls, raw: Mapping[str, Any], source: str, vision: VisionOptions, *, is_for_videos: bool = False
    ) -> "ClipOptions":
        """Returns the options in the form of published files or in transformers' form; see `ImageOptions`.

        Raises:
            CheckpointError: a value is out of range, does not match the tower, or is an unsupported option that would
                change the result; or the two forms disagree.
        """
        file = JsonObject(raw, source)
        published = file.object(_PUBLISHED)
        if published is not None:
            others = {key: value for key, value in raw.items() if key != _PUBLISHED}
            file = JsonObject(published.raw, source, published.prefix, others)
        refuse_other_options(
            file, patch_size=vision.patch_size, merge_size=vision.merge_size, merge_kernel_size=vision.merge_size
        )
        for key in ("fixed_output_tokens", "in_patch_limit_video", "max_num_frames_each_video"):
            if file.get(key) is not None:
                raise file.error(key, "null; anything else is not supported")
        file.choice("timestamp_mode", _TIMES, (_TIMES,))
        size = file.object("size") or JsonObject({}, source, "size.")
        side = _one(file, size.optional_integer("max_height", minimum=1), "patch_limit_on_one_side", cls.max_side)
        if size.integer("max_width", side) != side:
            raise size.error("max_width", f"{side}, which is max_height")
        least = vision.merge_size
        if side < least:
            raise file.error("patch_limit_on_one_side", f"an integer >= {least}, the patches of a token's side")
        limit = file.optional_integer("max_patches", minimum=1)
        patches = _one(file, None if is_for_videos else limit, "in_patch_limit", cls.max_patches)
        # In published files without a limit for frames, the limit for images holds for frames too.
        most_of_frame = cls.max_frame_patches if file.get("in_patch_limit") is None else patches
        most_of_frame = _one(file, limit if is_for_videos else None, "in_patch_limit_each_frame", most_of_frame)
        frames = _one(
            file,
            file.optional_integer("temporal_patch_size", minimum=1),
            "temporal_merge_kernel_size",
            min(cls.frames, vision.clip_frames),
        )
        if frames > vision.clip_frames:
            raise file.error("temporal_merge_kernel_size", f"1 to {vision.clip_frames}, the positions of frames")
        fps = file.number("sample_fps", file.number("fps", cls.fps))
        channels = {key: read_channels(file, key, _MEAN, vision.channels) for key in ("image_mean", "image_std")}
        if not all(channels["image_std"]):
            raise file.error("image_std", "numbers other than 0")
        most = max(patches, most_of_frame * frames) * vision.patch_size**2
        for key in ("image_processor_type", "auto_map"):  # the class is written below, and code is not copied
            file.get(key)
        kind = {"video_processor_type": "Kimi_K25VideoProcessor"} if is_for_videos else {}
        unread = json.dumps(kind | file.unread(), sort_keys=True)
        return cls(
            *(1, most, channels["image_mean"], channels["image_std"], unread),
            **{
                "max_patches": patches,
                "max_frame_patches": most_of_frame,
                "max_side": side,
                "frames": frames,
                "fps": fps,
            },
        )

    def to_hugging_face(self, vision: VisionOptions) -> dict[str, Any]:
        """Returns the contents of an equivalent file, in both forms."""
        scales = {"image_mean": list(self.mean), "image_std": list(self.std), "patch_size": vision.patch_size}
        unread = json.loads(self.unread)
        for_videos = "video_processor_type" in unread
        kind = {} if for_videos else {"image_processor_type": "Kimi_K25ImageProcessor"}
        published = {
            **scales,
            "merge_kernel_size": vision.merge_size,
            "in_patch_limit": self.max_patches,
            "in_patch_limit_each_frame": self.max_frame_patches,
            "patch_limit_on_one_side": self.max_side,
            "temporal_merge_kernel_size": self.frames,
            "sample_fps": self.fps,
            "timestamp_mode": _TIMES,
        }
        return {
            **kind,
            **unread,
            **scales,
            "size": {"max_height": self.max_side, "max_width": self.max_side},
            "max_patches": self.max_frame_patches if for_videos else self.max_patches,
            "merge_size": vision.merge_size,
            **({"temporal_patch_size": self.frames, "fps": self.fps} if for_videos else {}),
            _PUBLISHED: published,
        }

    def patches_of_image(self, image: UInt8[np.ndarray, "h w 3"], vision: VisionOptions) -> ImagePatches:
        """Returns the patches of an image."""
        return self._patches(image[None], vision, self.max_patches)

    def clips(
        self, frames: UInt8[np.ndarray, "F h w 3"], times: Sequence[float], seconds: float, vision: VisionOptions
    ) -> VideoPatches:
        """Returns the patches of a video, given the time of each frame and the time between two of them."""
        begins = range(0, len(frames), self.frames)
        parts = (frames[begin : begin + self.frames] for begin in begins)
        clips = tuple(self._patches(part, vision, self.max_frame_patches) for part in parts)
        return VideoPatches(clips, self.frames * seconds, tuple(times[begin] for begin in begins))

    def _patches(self, frames: UInt8[np.ndarray, "F h w 3"], vision: VisionOptions, most: int) -> ImagePatches:
        size = self._size(frames.shape[1], frames.shape[2], vision.patch_size, most)
        unit = vision.patch_size * vision.merge_size
        padding = [(0, 0), *((0, -side % unit) for side in size), (0, 0)]
        pixels = _normalized(np.pad(np.stack([_resized(frame, *size) for frame in frames]), padding), self)
        parts = [patches_of_frames(frame[None], vision) for frame in pixels]
        return ImagePatches(
            np.concatenate([part.pixels for part in parts]), parts[0].rows, parts[0].columns, len(parts)
        )

    def _size(self, height: int, width: int, patch: int, most: int) -> tuple[int, int]:
        """Returns the height and width to resize an image to, before it is padded."""
        counted = math.prod(max(1.0, side // patch) for side in (width, height))
        longest = self.max_side * patch
        scale = min(1.0, math.sqrt(most / counted), longest / width, longest / height)
        new_height, new_width = (min(max(1, int(side * scale)), longest) for side in (height, width))
        return new_height, new_width


def _one(file: JsonObject, other: int | None, key: str, default: int) -> int:
    """Returns a number that a file may have under two keys, given the value of the other key.

    Raises:
        CheckpointError: the two differ.
    """
    value = file.optional_integer(key, minimum=1)
    if other is not None and value not in (None, other):
        raise file.error(key, f"{other}, as the file says in transformers' form")
    return next(number for number in (value, other, default) if number is not None)


def _resized(image: UInt8[np.ndarray, "h w 3"], height: int, width: int) -> UInt8[np.ndarray, "H W 3"]:
    bicubic = PIL.Image.Resampling.BICUBIC
    return np.asarray(PIL.Image.fromarray(np.ascontiguousarray(image)).resize((width, height), bicubic))


def _normalized(pixels: UInt8[np.ndarray, "F h w 3"], options: ClipOptions) -> Float32[np.ndarray, "F h w 3"]:
    """Returns pixels from 0 to 1 minus the mean, times the inverse of the deviation: each step is rounded to float32.

    The mean and the inverse are float64 numbers, as in the published code.
    """
    numbers = (pixels / 255.0).astype(np.float32)
    numbers = (numbers - np.array(options.mean)).astype(np.float32)
    return (numbers * (1.0 / np.array(options.std))).astype(np.float32)


def clip_text(seconds: float) -> str:
    """Returns the text of a clip in a prompt: the time of its first frame, cut to milliseconds, and its place."""
    whole = int(seconds)
    time = f"{whole // 3600 % 24:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}.{int(seconds % 1 * 1000):03d}"
    return f"{time}<|media_begin|>video<|media_content|><|media_pad|><|media_end|>"


def image_options_class(vision: VisionOptions) -> type[ImageOptions]:
    """Returns the class of the options of a tower's images."""
    return ClipOptions if isinstance(vision, MoonViTOptions) else ImageOptions
