"""Frame selection that matches Hugging Face's video processors."""

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Final

from detjax.models.configuration.json_object import JsonObject
from detjax.models.parts.vision import VisionOptions
from detjax.models.vision.clips import ClipOptions
from detjax.models.vision.images import ImageOptions

_MOST_FRAMES: Final = 1 << 20
"""The maximum number of frames for models whose processors have none."""


@dataclasses.dataclass(frozen=True)
class FrameSampling:
    """The number of frames that are selected from a video, and their spacing.

    Attributes:
        fps: selected frames per second of the video.
        min_frames: the minimum number of frames, for videos that have as many.
        max_frames: the maximum number of frames.
        group: the number is a multiple of this, and the frames are equally spaced from the first one on, as for
            Qwen2.5-VL; None: they span the video from the first to the last frame, as for Qwen3.5.
        nearest: whether the number is rounded to the nearest one, as for Kimi K2.5; otherwise it is rounded down.
    """

    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768
    group: int | None = None
    nearest: bool = False

    @classmethod
    def from_options(cls, options: ImageOptions, vision: VisionOptions) -> "FrameSampling":
        """Returns the sampling that `video_preprocessor_config.json` describes, whose keys are unread `options`.

        Raises:
            CheckpointError: a value is not a number in its range.
        """
        if isinstance(options, ClipOptions):
            return cls(options.fps, 1, _MOST_FRAMES, nearest=True)
        file = JsonObject(json.loads(options.unread), "video_preprocessor_config.json")
        if file.get("num_frames") is not None:
            raise file.error("num_frames", "null; fps determines the number of frames")
        least, most = file.integer("min_frames", cls.min_frames), file.integer("max_frames", cls.max_frames)
        if most < least:
            raise file.error("max_frames", f"at least min_frames, which is {least}")
        group = None if vision.tokens_per_second is None else vision.temporal_patch_size
        return cls(file.number("fps", cls.fps), least, most, group)

    def changed(
        self, fps: float | None = None, min_frames: int | None = None, max_frames: int | None = None
    ) -> "FrameSampling":
        """Returns the sampling for one video; None keeps a value. `max_frames` is at most the checkpoint's.

        Raises:
            ValueError: a number is out of its range.
        """
        fps = self.fps if fps is None else fps
        most = self.max_frames if max_frames is None else max_frames
        least = min(self.min_frames, most) if min_frames is None else min_frames
        if not 0 < fps < math.inf:
            raise ValueError(f"fps is {fps}; accepted: a finite number > 0, in frames per second")
        if not (self.group or 1) <= most <= self.max_frames:
            raise ValueError(
                f"max_frames is {most}; accepted: {self.group or 1} to {self.max_frames}, the checkpoint's max_frames"
            )
        if not 1 <= least <= most:
            raise ValueError(f"min_frames is {least}; accepted: 1 to {most}, which is max_frames")
        return dataclasses.replace(self, fps=float(fps), min_frames=least, max_frames=most)

    def indices(self, total: int, rate: float) -> Sequence[int]:
        """Returns the indices of the frames to select, in ascending order, of `total` frames with `rate` per second.

        They match transformers' processors, with one exception: for Qwen2.5-VL, rounding of the step between frames
        sometimes gives transformers one frame more than the computed number. Here it is always the computed number.
        """
        if self.group is None:
            wanted = round(total * min(self.fps, rate) / rate) if self.nearest else int(total / rate * self.fps)
            chosen = min(max(wanted, self.min_frames), self.max_frames, total)
            step = (total - 1) / max(chosen - 1, 1)
            # The last index is that frame itself, however the step is rounded. Halves are rounded to even numbers.
            return [round(index * step) for index in range(chosen - 1)] + [total - 1 if chosen > 1 else 0]
        most = min(self.max_frames, total) // self.group * self.group
        chosen = int(min(max(total / rate * self.fps, self.min_frames), most)) // self.group * self.group
        if not chosen:  # the video has fewer frames than a patch, or fewer than a group are wanted
            return range(min(total, self.group))
        return [index * total // chosen for index in range(chosen)]
