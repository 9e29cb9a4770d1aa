"""Files of images: their pixels, turned as the file says."""

import io
from typing import Final

import numpy as np
import PIL.Image
import PIL.ImageOps
from jaxtyping import UInt8

FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""The formats that are read, as Pillow calls them. Of an animation, the first frame is read."""
_MAX_PIXELS: Final = 1 << 26
"""The most pixels of an image, which a few bytes may stand for."""


def read_pixels(name: str, contents: bytes) -> UInt8[np.ndarray, "h w 3"]:
    """Returns red, green and blue of each pixel of a file; transparency is dropped.

    Args:
        name: what error messages call the image.
        contents: the file's.

    Raises:
        ValueError: the file is of another format or damaged, or the image has too many pixels.
    """
    try:
        with PIL.Image.open(io.BytesIO(contents), formats=FORMATS) as image:
            width, height = image.size
            if width * height <= _MAX_PIXELS:
                return np.asarray(PIL.ImageOps.exif_transpose(image).convert("RGB"))
    except Exception as error:  # a decoder of a damaged file may fail in any way
        raise ValueError(f"{name} is no image that can be read; accepted: {', '.join(FORMATS)}") from error
    raise ValueError(f"{name} has {width} x {height} pixels; accepted: up to {_MAX_PIXELS}")
