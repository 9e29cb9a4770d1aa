"""Images and videos in messages: data URLs and files in one directory. Nothing is fetched."""

import base64
import binascii
import dataclasses
import urllib.parse
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from detjax.engine.request_reader import RequestReader
from detjax.models import Video
from detjax.models.vision.image_files import read_pixels
from detjax.models.vision.images import VisualInput
from detjax.models.vision.video_files import read_frames, read_video
from detjax.server.http.errors import ApiError

MAX_IMAGES: Final = 256
"""Maximum number of images and videos in a conversation."""
_MAX_BYTES: Final = 64 << 20
"""Maximum size of a file in bytes."""
_QUOTED: Final = 60
"""Characters of a URL to quote in an error."""
_FRAMES: Final = ("video/jpeg", "video/png")
"""Media types of data URLs with the frames of a video, separated by commas."""


@dataclasses.dataclass(frozen=True)
class ShownImage:
    """An image in a message."""

    url: str


@dataclasses.dataclass(frozen=True)
class ShownVideo:
    """A video in a message. None stands for the checkpoint's value of an option.

    Attributes:
        url: the URL of the video.
        fps: frames per second to sample; for a list of frames, its frame rate.
        min_frames: minimum number of frames to sample from a file.
        max_frames: maximum number of frames.
    """

    url: str
    fps: float | None = None
    min_frames: int | None = None
    max_frames: int | None = None


type ShownPart = ShownImage | ShownVideo


class _Refused(Exception):
    """An image is rejected; the message has the reason. Distinct from the errors of libraries."""


def read_images(
    parts: Sequence[ShownPart], engine: RequestReader, directory: Path | None, field: str
) -> list[VisualInput]:
    """Returns the patches of images and videos. Slow: call it in a thread.

    URLs may name files in `directory`. `field` is the body's field with the conversation, for errors.
    """
    try:
        return _read(parts, engine, directory, field)
    except (ValueError, _Refused) as error:
        raise ApiError(400, str(error), param=field) from error


def _read(parts: Sequence[ShownPart], engine: RequestReader, directory: Path | None, field: str) -> list[VisualInput]:
    if len(parts) > MAX_IMAGES:
        raise _Refused(f"{field}: {len(parts)} images; accepted: up to {MAX_IMAGES}")
    patches: list[VisualInput] = []
    for number, part in enumerate(parts):
        if isinstance(part, ShownVideo):
            name = f"video {sum(isinstance(one, ShownVideo) for one in parts[:number])} of the {field}"
            visual = _video(name, part, engine, directory)
        else:
            name = f"image {sum(isinstance(one, ShownImage) for one in parts[:number])} of the {field}"
            visual = read_pixels(name, _contents(name, part.url, directory, "image/png"))
        patches += engine.image_patches(name, visual)
        tokens = engine.image_tokens(patches)
        if tokens >= engine.max_length:  # before the next one takes time and memory
            has_videos = any(isinstance(one, ShownVideo) for one in parts[: number + 1])
            raise _Refused(
                f"the first {number + 1} images{' and videos' if has_videos else ''} of the {field} have {tokens} "
                f"tokens; accepted: fewer than {engine.max_length} in total. Send fewer or smaller images"
                f"{', or fewer frames' if has_videos else ''}."
            )
    return patches


def _video(name: str, part: ShownVideo, engine: RequestReader, directory: Path | None) -> Video:
    """Returns the sampled frames of a video."""
    try:
        sampling = engine.frame_sampling.changed(part.fps, part.min_frames, part.max_frames)
    except ValueError as error:
        raise _Refused(f"{name}: {error}") from error
    scheme, _, rest = part.url.partition(":")
    header, _, data = rest.partition(",")
    if scheme.lower() == "data" and header.partition(";")[0].lower() in _FRAMES:
        pieces = data.split(",")
        if len(pieces) > sampling.max_frames:  # before they take time and memory
            raise _Refused(
                f"{name} has {len(pieces)} frames; accepted: up to {sampling.max_frames}, which is max_frames"
            )
        kinds = f"data:{_FRAMES[0]};base64, and frames separated by commas"
        named = ((f"frame {number} of {name}", f"{header},{piece}") for number, piece in enumerate(pieces))
        files = [_data(frame, rest, kinds) for frame, rest in named]
        return read_frames(name, files, sampling)
    return read_video(name, _contents(name, part.url, directory, "image/webp"), sampling)


def _contents(name: str, url: str, directory: Path | None, example: str) -> bytes:
    """Returns the bytes that a URL names; `example` is an accepted media type, for errors."""
    kinds = f"a data URL with base64, such as data:{example};base64,..."
    if directory is not None:
        kinds += ", or file: and the path of a file in the server's image directory"
    scheme, _, rest = url.partition(":")
    if scheme.lower() == "data":
        return _data(name, rest, kinds)
    if scheme.lower() == "file" and directory is not None:
        return _file_contents(name, rest, directory)
    raise _Refused(f"{name} is {_quoted(url)}; accepted: {kinds}. The server fetches nothing.")


def _data(name: str, rest: str, kinds: str) -> bytes:
    header, comma, data = rest.partition(",")
    if not comma or not header.lower().endswith(";base64"):
        raise _Refused(f"{name} is {_quoted(f'data:{rest}')}; accepted: {kinds}")
    try:
        return base64.b64decode(urllib.parse.unquote_to_bytes(data), validate=True)
    except binascii.Error as error:
        raise _Refused(f"{name}: its base64 is not valid: {error}") from error


def _file_contents(name: str, rest: str, directory: Path) -> bytes:
    """Returns the contents of a file, whose path is absolute or relative to the directory."""
    name_in_url = urllib.parse.unquote(rest.removeprefix("//"))
    # Missing files and files elsewhere give the same error, so that clients cannot probe for files.
    refusal = _Refused(f"{name} is {_quoted(f'file:{rest}')}; accepted: a file in the server's image directory")
    try:
        path, root = (directory / name_in_url).resolve(), directory.resolve()
        if not path.is_relative_to(root) or not path.is_file():
            raise refusal
        if path.stat().st_size > _MAX_BYTES:
            raise _Refused(f"{name} has {path.stat().st_size} bytes; accepted: up to {_MAX_BYTES}")
        return path.read_bytes()
    except (OSError, ValueError) as error:  # such as a path with a zero byte
        raise refusal from error


def _quoted(url: str) -> str:
    return repr(url if len(url) <= _QUOTED else f"{url[:_QUOTED]}...")
