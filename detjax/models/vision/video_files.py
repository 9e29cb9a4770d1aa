"""Video files: animated images, and lists of images as frames. Other containers are not decoded."""

import io
import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Final

import numpy as np
import PIL.Image
from jaxtyping import UInt8

from detjax.models.vision.frame_sampling import FrameSampling
from detjax.models.vision.image_files import read_pixels
from detjax.models.vision.videos import Video

FORMATS: Final = ("GIF", "PNG", "WEBP")
"""The accepted animation formats, by Pillow's names."""
_MAX_FRAME_PIXELS: Final = 1 << 24
"""The maximum number of pixels of a frame."""
_MAX_PIXELS: Final = 1 << 27
"""The maximum number of pixels of all frames that a model sees."""
_MAX_DECODED: Final = 1 << 30
"""The maximum number of pixels of all frames of a file: each is decoded."""
_LIKE_BROWSERS: Final = 100
"""Milliseconds of a frame without a duration, as in browsers."""
_ADVICE: Final = (
    "Decode it where it comes from, for example with ffmpeg, and send an animated WEBP, or its frames as "
    "data:video/jpeg;base64, with a comma between two of them."
)


def read_video(name: str, contents: bytes, sampling: FrameSampling) -> Video:
    """Returns the frames of an animation that a model sees, with their times; transparency is dropped.

    The animation is treated as a video whose frames all have the same duration: the longest one that divides the
    durations of the animation's frames. If those are equal, the video has the same frames. Errors call it `name`.

    Raises:
        ValueError: the file is not an animation in one of these formats, or it has too many frames or pixels.
    """
    if (container := _container(contents)) is not None:
        raise ValueError(f"{name} is {container}, which is not decoded; accepted: {_accepted()}. {_ADVICE}")
    try:
        with PIL.Image.open(io.BytesIO(contents), formats=FORMATS) as image:
            count = getattr(image, "n_frames", 1)
            _check_sizes(name, *image.size, count)
            lengths = _lengths(image, count)
            common = math.lcm(*(length.denominator for length in lengths))
            unit = Fraction(math.gcd(*(int(length * common) for length in lengths)), common)
            starts = list(itertools.accumulate(lengths, initial=Fraction(0)))
            total, rate = int(starts[-1] / unit), float(1000 / unit)
            indices = sampling.indices(total, rate)
            selected = [bisect_right(starts, index * unit) - 1 for index in indices]
            if len(selected) * math.prod(image.size) > _MAX_PIXELS:
                raise _TooLarge(
                    f"{name} has {image.size[0]} x {image.size[1]} pixels in {len(selected)} frames; accepted: up to "
                    f"{_MAX_PIXELS} pixels in all. Send smaller or fewer frames."
                )
            pixels = dict(_frames(image, sorted(set(selected))))
    except _TooLarge as error:
        raise ValueError(str(error)) from error
    except Exception as error:  # decoding a damaged file can fail in any way
        raise ValueError(f"{name} cannot be read as a video; accepted: {_accepted()}. {_ADVICE}") from error
    times = [index / rate for index in indices]
    return Video([pixels[index] for index in selected], len(indices) / total * rate, times)


def read_frames(name: str, files: Sequence[bytes], sampling: FrameSampling) -> Video:
    """Returns the video with these image files as frames, `sampling.fps` per second; a model sees all of them.

    Errors call it `name`.

    Raises:
        ValueError: a file is not an image, or the video has too many frames or pixels.
    """
    if len(files) > sampling.max_frames:
        raise ValueError(f"{name} has {len(files)} frames; accepted: up to {sampling.max_frames}, which is max_frames")
    frames: list[np.ndarray] = []
    for number, contents in enumerate(files):
        frames.append(read_pixels(f"frame {number} of {name}", contents))
        if (pixels := sum(frame.shape[0] * frame.shape[1] for frame in frames)) > _MAX_PIXELS:
            raise ValueError(
                f"the first {len(frames)} frames of {name} have {pixels} pixels; accepted: up to {_MAX_PIXELS} in "
                "all. Send smaller or fewer frames."
            )
    if len({frame.shape for frame in frames}) > 1:
        sizes = ", ".join(sorted({f"{frame.shape[1]} x {frame.shape[0]}" for frame in frames}))
        raise ValueError(f"{name} has frames of {sizes} pixels; accepted: frames of one size")
    return Video(frames, sampling.fps)


class _TooLarge(Exception):
    """A video is refused. No library raises this exception, so it is distinct from decoding errors."""


def _accepted() -> str:
    return "animations in GIF, PNG (APNG) and WEBP, or a list of frames that are images"


def _container(contents: bytes) -> str | None:
    """Returns the name of a known video container that no installed library decodes; None: not a known container."""
    if contents[4:8] in (b"ftyp", b"moov", b"mdat", b"wide"):
        return "an MP4, QuickTime or AVIF file"
    if contents[:4] == b"RIFF" and contents[8:12] == b"AVI ":
        return "an AVI file"
    known = {
        b"\x1aE\xdf\xa3": "a Matroska or WebM file",
        b"OggS": "an Ogg file",
        b"FLV": "a Flash video",
        b"\x00\x00\x01\xba": "an MPEG file",
        b"\x00\x00\x01\xb3": "an MPEG file",
        b"0&\xb2u": "a Windows Media file",
    }
    return next((kind for start, kind in known.items() if contents.startswith(start)), None)


def _check_sizes(name: str, width: int, height: int, count: int) -> None:
    if width * height > _MAX_FRAME_PIXELS:
        raise _TooLarge(f"{name} has {width} x {height} pixels; accepted: up to {_MAX_FRAME_PIXELS}")
    if width * height * count > _MAX_DECODED:
        raise _TooLarge(
            f"{name} has {count} frames of {width} x {height} pixels; accepted: up to {_MAX_DECODED} pixels in all"
        )


def _lengths(image: PIL.Image.Image, count: int) -> list[Fraction]:
    """Returns the duration of each frame in milliseconds."""
    lengths = []
    for index in range(count):
        image.seek(index)
        image.load()  # WEBP's durations are known only after loading
        # APNG's durations are quotients of 16-bit numbers, in seconds.
        duration = Fraction(image.info.get("duration") or 0).limit_denominator(1 << 16)
        lengths.append(duration if duration > 0 else Fraction(_LIKE_BROWSERS))
    return lengths


def _frames(image: PIL.Image.Image, indices: Sequence[int]) -> Iterator[tuple[int, UInt8[np.ndarray, "h w 3"]]]:
    for index in indices:
        image.seek(index)
        yield index, np.asarray(image.convert("RGB"))
