"""Images of messages: data URLs, and files of one directory. Nothing is fetched."""

import base64
import binascii
import io
import urllib.parse
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import PIL.Image
import PIL.ImageOps
from jaxtyping import UInt8

from detjax.engine import Engine
from detjax.models.images import ImagePatches
from detjax.server.errors import ApiError

FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""The formats that are read, as Pillow calls them. Of an animation, the first frame is read."""
MOST_IMAGES: Final = 256
"""The most images of a conversation."""
_MOST_PIXELS: Final = 1 << 26
"""The most pixels of an image, which a few bytes may stand for."""
_MOST_BYTES: Final = 64 << 20
"""The most bytes of a file."""
_QUOTED: Final = 60
"""Characters of a URL that an error quotes."""


def read_images(urls: Sequence[str], engine: Engine, directory: Path | None) -> list[ImagePatches]:
    """Returns the patches of the images that URLs name, which takes a while.

    Args:
        urls: of the images of a conversation.
        engine: makes the patches.
        directory: where files may lie; None: nowhere.

    Raises:
        ApiError: a URL is of another kind, what it names is no image, or there are more images than fit.
    """
    if len(urls) > MOST_IMAGES:
        raise _error(f"messages have {len(urls)} images; accepted: up to {MOST_IMAGES}")
    patches, tokens = [], 0
    for number, url in enumerate(urls):
        name = f"image {number} of the messages"
        try:
            patches.append(engine.image_patches(name, _pixels(name, _contents(name, url, directory))))
        except ValueError as error:
            raise _error(str(error)) from error
        tokens += engine.image_tokens(patches[-1])
        if tokens >= engine.max_length:  # before the next one takes time and memory
            raise _error(
                f"the first {number + 1} images of the messages have {tokens} tokens; accepted: fewer than "
                f"{engine.max_length} in all. Send fewer or smaller images."
            )
    return patches


def _contents(name: str, url: str, directory: Path | None) -> bytes:
    """The bytes of an image's file."""
    kinds = "a data URL with base64, such as data:image/png;base64,..."
    if directory is not None:
        kinds += ", or file: and the path of a file in the server's directory of images"
    scheme, _, rest = url.partition(":")
    if scheme.lower() == "data":
        return _data(name, rest, kinds)
    if scheme.lower() == "file" and directory is not None:
        return _file_contents(name, rest, directory)
    raise _error(f"{name} is {_quoted(url)}; accepted: {kinds}. The server fetches nothing.")


def _data(name: str, rest: str, kinds: str) -> bytes:
    header, comma, data = rest.partition(",")
    if not comma or not header.lower().endswith(";base64"):
        raise _error(f"{name} is {_quoted(f'data:{rest}')}; accepted: {kinds}")
    try:
        return base64.b64decode(urllib.parse.unquote_to_bytes(data), validate=True)
    except binascii.Error as error:
        raise _error(f"{name}: its base64 is not valid: {error}") from error


def _file_contents(name: str, rest: str, directory: Path) -> bytes:
    """The contents of a file, whose path may be absolute or begin in the directory."""
    given = urllib.parse.unquote(rest.removeprefix("//"))
    # The error is the same for files that are not there and files elsewhere, so that it tells nothing of those.
    refusal = _error(f"{name} is {_quoted(f'file:{rest}')}; accepted: a file in the server's directory of images")
    try:
        path, root = (directory / given).resolve(), directory.resolve()
        if not path.is_relative_to(root) or not path.is_file():
            raise refusal
        if path.stat().st_size > _MOST_BYTES:
            raise _error(f"{name} has {path.stat().st_size} bytes; accepted: up to {_MOST_BYTES}")
        return path.read_bytes()
    except (OSError, ValueError) as error:  # such as a path with a zero byte
        raise refusal from error


def _pixels(name: str, contents: bytes) -> UInt8[np.ndarray, "h w 3"]:
    """Red, green and blue of each pixel, turned as the file says."""
    try:
        with PIL.Image.open(io.BytesIO(contents), formats=FORMATS) as image:
            width, height = image.size
            if width * height > _MOST_PIXELS:
                raise _error(f"{name} has {width} x {height} pixels; accepted: up to {_MOST_PIXELS}")
            return np.asarray(PIL.ImageOps.exif_transpose(image).convert("RGB"))
    except ApiError:
        raise
    except Exception as error:  # a decoder of a damaged file may fail in any way
        raise _error(f"{name} is no image that can be read; accepted: {', '.join(FORMATS)}") from error


def _quoted(url: str) -> str:
    return repr(url if len(url) <= _QUOTED else f"{url[:_QUOTED]}...")


def _error(message: str) -> ApiError:
    return ApiError(400, message, param="messages")
