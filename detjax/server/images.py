"""Images of messages: data URLs, and files of one directory. Nothing is fetched."""

import base64
import binascii
import urllib.parse
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from detjax.engine import Engine
from detjax.models.image_files import read_pixels
from detjax.models.images import Shown
from detjax.server.errors import ApiError

MOST_IMAGES: Final = 256
"""The most images of a conversation."""
_MOST_BYTES: Final = 64 << 20
"""The most bytes of a file."""
_QUOTED: Final = 60
"""Characters of a URL that an error quotes."""


class _Refused(Exception):
    """Why an image is not read; no library raises it."""


def read_images(urls: Sequence[str], engine: Engine, directory: Path | None, field: str) -> list[Shown]:
    """Returns the patches of the images that URLs name, which takes a while.

    Args:
        urls: of the images of a conversation.
        engine: makes the patches.
        directory: where files may lie; None: nowhere.
        field: the field of the body that holds the conversation.

    Raises:
        ApiError: a URL is of another kind, what it names is no image, or there are more images than fit.
    """
    try:
        return _read(urls, engine, directory, field)
    except (ValueError, _Refused) as error:
        raise ApiError(400, str(error), param=field) from error


def _read(urls: Sequence[str], engine: Engine, directory: Path | None, field: str) -> list[Shown]:
    if len(urls) > MOST_IMAGES:
        raise _Refused(f"{field}: {len(urls)} images; accepted: up to {MOST_IMAGES}")
    patches: list[Shown] = []
    for number, url in enumerate(urls):
        name = f"image {number} of the {field}"
        patches += engine.image_patches(name, read_pixels(name, _contents(name, url, directory)))
        tokens = engine.image_tokens(patches)
        if tokens >= engine.max_length:  # before the next one takes time and memory
            raise _Refused(
                f"the first {number + 1} images of the {field} have {tokens} tokens; accepted: fewer than "
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
    """The contents of a file, whose path may be absolute or begin in the directory."""
    given = urllib.parse.unquote(rest.removeprefix("//"))
    # The error is the same for files that are not there and files elsewhere, so that it tells nothing of those.
    refusal = _Refused(f"{name} is {_quoted(f'file:{rest}')}; accepted: a file in the server's directory of images")
    try:
        path, root = (directory / given).resolve(), directory.resolve()
        if not path.is_relative_to(root) or not path.is_file():
            raise refusal
        if path.stat().st_size > _MOST_BYTES:
            raise _Refused(f"{name} has {path.stat().st_size} bytes; accepted: up to {_MOST_BYTES}")
        return path.read_bytes()
    except (OSError, ValueError) as error:  # such as a path with a zero byte
        raise refusal from error


def _quoted(url: str) -> str:
    return repr(url if len(url) <= _QUOTED else f"{url[:_QUOTED]}...")
