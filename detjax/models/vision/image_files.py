"""Pixels of image files, in the orientation that the file states."""

import io
from typing import Final

import numpy as np
import PIL.Image
import PIL.ImageOps
from jaxtyping import UInt8

FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""The accepted formats, by Pillow's names. Of an animation, only the first frame is read."""
_MAX_PIXELS: Final = 1 << 26
"""The maximum number of pixels of an image: a few bytes can encode very many."""


def read_pixels(name: str, contents: bytes) -> UInt8[np.ndarray, "h w 3"]:
    """Returns red, green and blue of each pixel of a file, which errors call `name`; transparency is dropped.

    Raises:
        ValueError: the file has another format or is damaged, or the image has too many pixels.
    """
    try:
        with PIL.Image.open(io.BytesIO(contents), formats=FORMATS) as image:
            width, height = image.size
            if width * height <= _MAX_PIXELS:
                return np.asarray(PIL.ImageOps.exif_transpose(image).convert("RGB"))
    except Exception as error:  # decoding a damaged file can fail in any way
        raise ValueError(f"{name} cannot be read as an image; accepted: {', '.join(FORMATS)}") from error
    raise ValueError(f"{name} has {width} x {height} pixels; accepted: up to {_MAX_PIXELS}")
