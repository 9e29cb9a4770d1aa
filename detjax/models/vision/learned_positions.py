"""The rows of a tower's table of learned positions that each patch takes a weighted sum of, in float32."""

import math

import numpy as np
from jaxtyping import Float32, Int32

from detjax.models.parts.moonvit import MoonViTOptions
from detjax.models.parts.vision import Taps, VisionOptions

_SHARPNESS = np.float32(-0.75)
"""The parameter of Keys' cubic kernel."""


def position_taps(
    options: VisionOptions,
    coordinates: Int32[np.ndarray, "W T 2"],
    sizes: Int32[np.ndarray, "W 1 2"],
    frame: Int32[np.ndarray, "W T"],
) -> Taps | None:
    """Returns the rows around each patch and their weights; None for a tower without a table.

    Args:
        options: the tower's.
        coordinates: the row and the column of each patch.
        sizes: rows and columns of patches of its image.
        frame: the number of its frame in a clip of several; -1 in an image.
    """
    if options.positions is None:
        return None
    side = math.isqrt(options.positions)
    if not isinstance(options, MoonViTOptions):
        return _outer(*_bilinear(coordinates, sizes, side), side)
    index, weight = _outer(*_bicubic(coordinates, sizes, side), side)
    # Rows of frames follow the table's.
    index = np.concatenate([index, options.positions + np.maximum(frame, 0)[..., None]], axis=-1)
    weight = np.concatenate([weight, (frame >= 0).astype(np.float32)[..., None]], axis=-1)
    return Taps(index, weight)


type _Axes = tuple[Int32[np.ndarray, "W T 2 n"], Float32[np.ndarray, "W T 2 n"]]
"""Entries around each patch on the two axes of the table, and their weights."""


def _outer(entries: Int32[np.ndarray, "W T 2 n"], weights: Float32[np.ndarray, "W T 2 n"], side: int) -> Taps:
    """Returns the rows of the table at all pairs of entries of the two axes."""
    index = entries[..., 0, :, None] * side + entries[..., 1, None, :]
    weight = weights[..., 0, :, None] * weights[..., 1, None, :]
    return Taps(index.reshape(*entries.shape[:2], -1), weight.reshape(*entries.shape[:2], -1))


def _bilinear(coordinates: Int32[np.ndarray, "W T 2"], sizes: Int32[np.ndarray, "W 1 2"], side: int) -> _Axes:
    """Returns two entries on each axis. The first patch of a row is at the first column, the last one at the last."""
    place = coordinates.astype(np.float32) * np.float32(side - 1) / np.maximum(sizes - 1, 1).astype(np.float32)
    first, steps = np.floor(place)[..., None], np.arange(2, dtype=np.float32)
    corners = np.minimum(first + steps, side - 1).astype(np.int32)
    return corners, np.float32(1) - np.abs(place[..., None] - first - steps)


def _bicubic(coordinates: Int32[np.ndarray, "W T 2"], sizes: Int32[np.ndarray, "W 1 2"], side: int) -> _Axes:
    """Returns four entries on each axis. Patches and entries are squares that cover the same area (Keys 1981)."""
    half = np.float32(0.5)
    place = (coordinates.astype(np.float32) + half) * np.float32(side) / sizes.astype(np.float32) - half
    first, steps = np.floor(place)[..., None], np.arange(-1, 3, dtype=np.float32)
    entries = np.clip(first + steps, 0, side - 1).astype(np.int32)
    a, d = _SHARPNESS, np.abs(place[..., None] - first - steps)
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return entries, np.where(d <= 1, near, far)
