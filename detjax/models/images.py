"""Images: how their pixels become patches, and the patches rows that stand for tokens of a prompt.

The arithmetic is that of the image processors that checkpoints were trained with: bicubic resampling by Pillow, whose
integer arithmetic is the same on all processors, and float32 for what follows.
"""

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import PIL.Image
from jaxtyping import Array, Float, Float32, Int32, UInt8

from detjax import compilation
from detjax.contract import KV_BLOCK
from detjax.models.json_object import JsonObject
from detjax.models.network import Network, Weights, split
from detjax.models.parts.vision import Keys, Patches, VisionOptions, VisionTower

_MOST_RATIO: Final = 200
"""How many times as long as the short side the long side of an image may be."""
_PACK_PATCHES: Final = 16384
"""Patches of the images that one call of the tower takes, if these are several."""


@dataclasses.dataclass(frozen=True)
class ImageOptions:
    """How images become patches, as `preprocessor_config.json` says it.

    Attributes:
        min_pixels: a smaller image is enlarged to at least so many pixels.
        max_pixels: a larger image is made smaller, to so many pixels at most.
        mean: what is subtracted from each channel, whose numbers are from 0 to 1.
        std: what each channel is then divided by.
        unread: the file's other keys, as JSON, which change nothing here.
    """

    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)
    std: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)
    unread: str = "{}"

    @classmethod
    def from_hugging_face(cls, raw: Mapping[str, Any], source: str, vision: VisionOptions) -> "ImageOptions":
        """Returns the options that a `preprocessor_config.json` with the contents `raw` describes.

        Args:
            raw: the contents; empty if there is no such file.
            source: the file's name in errors.
            vision: the tower, which the file must fit.

        Raises:
            CheckpointError: a value is out of range, does not fit the tower, or would change the result and is not
                served.
        """
        file = JsonObject(raw, source)
        fixed = {
            "patch_size": vision.patch_size,
            "temporal_patch_size": vision.temporal_patch_size,
            "merge_size": vision.merge_size,
            "do_resize": True,
            "do_rescale": True,
            "do_normalize": True,
            "resample": int(PIL.Image.Resampling.BICUBIC),
            "rescale_factor": 1 / 255,
        }
        for key, value in fixed.items():
            if file.get(key) not in (None, value):
                raise file.error(key, f"{json.dumps(value)}; anything else is not supported")
        size = file.object("size") or JsonObject({}, source, "size.")
        least, most = size.integer("shortest_edge", cls.min_pixels), size.integer("longest_edge", cls.max_pixels)
        least, most = file.integer("min_pixels", least), file.integer("max_pixels", most)
        if most < max(least, (vision.patch_size * vision.merge_size) ** 2):
            raise file.error("max_pixels", f"at least min_pixels, which is {least}, and the pixels of one token")
        channels = {
            key: _channels(file, key, default, vision.channels)
            for key, default in (("image_mean", cls.mean), ("image_std", cls.std))
        }
        if not all(channels["image_std"]):
            raise file.error("image_std", "numbers other than 0")
        unread = json.dumps({key: value for key, value in file.unread().items() if key != "size"}, sort_keys=True)
        return cls(least, most, channels["image_mean"], channels["image_std"], unread)

    def to_hugging_face(self, vision: VisionOptions) -> dict[str, Any]:
        """Returns the contents of a `preprocessor_config.json` that says this."""
        return {
            "image_processor_type": "Qwen2VLImageProcessor",
            **json.loads(self.unread),
            "size": {"shortest_edge": self.min_pixels, "longest_edge": self.max_pixels},
            "min_pixels": self.min_pixels,
            "max_pixels": self.max_pixels,
            "image_mean": list(self.mean),
            "image_std": list(self.std),
            "patch_size": vision.patch_size,
            "temporal_patch_size": vision.temporal_patch_size,
            "merge_size": vision.merge_size,
        }


def _channels(file: JsonObject, key: str, default: tuple[float, ...], channels: int) -> tuple[float, ...]:
    given = file.get(key)
    numbers = list(default) if given is None else given
    is_list = isinstance(numbers, list) and len(numbers) == channels
    if not is_list or any(isinstance(x, bool) or not isinstance(x, int | float) for x in numbers):
        raise file.error(key, f"a list of {channels} numbers")
    return tuple(map(float, numbers))


@dataclasses.dataclass(frozen=True, eq=False)
class ImagePatches:
    """The patches of one image, those that make one token one after another, the tokens row by row.

    Attributes:
        pixels: the numbers of each patch: of each channel, frame, row and column.
        rows: rows of patches.
        columns: columns of patches.
    """

    pixels: Float32[np.ndarray, "N P"]
    rows: int
    columns: int

    @functools.cached_property
    def digest(self) -> bytes:
        """A cryptographic digest of the patches and of their arrangement."""
        shape = np.array([self.rows, self.columns, *self.pixels.shape], np.int64)
        hashed = hashlib.blake2b(shape.tobytes(), digest_size=32, person=b"image")
        hashed.update(np.ascontiguousarray(self.pixels).data)
        return hashed.digest()


def image_patches(image: UInt8[np.ndarray, "h w C"], options: ImageOptions, vision: VisionOptions) -> ImagePatches:
    """Returns the patches of an image.

    Args:
        image: red, green and blue of each pixel, from 0 to 255.
        options: how the image is resized and normalized.
        vision: the tower.

    Raises:
        ValueError: the image is empty, has other axes, or is too long for its width.
    """
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or 0 in image.shape:
        raise ValueError(
            f"image_patches: the image is {image.dtype}{image.shape}; accepted: uint8 (height, width, 3), red, green "
            'and blue of each pixel, such as np.asarray(PIL.Image.open(file).convert("RGB"))'
        )
    unit = vision.patch_size * vision.merge_size
    height, width = resized(image.shape[0], image.shape[1], unit, options.min_pixels, options.max_pixels)
    bicubic = PIL.Image.Resampling.BICUBIC
    pixels = np.asarray(PIL.Image.fromarray(np.ascontiguousarray(image)).resize((width, height), bicubic))
    pixels = (pixels.astype(np.float64) * (1 / 255)).astype(np.float32)
    pixels = (pixels - np.array(options.mean, np.float32)) / np.array(options.std, np.float32)
    rows, columns = height // vision.patch_size, width // vision.patch_size
    size, merge = vision.patch_size, vision.merge_size
    grid = pixels.reshape(rows // merge, merge, size, columns // merge, merge, size, -1)
    grid = grid.transpose(0, 3, 1, 4, 6, 2, 5)  # rows and columns of tokens, of their patches; channels; pixels
    frames = np.repeat(grid[:, :, :, :, :, None], vision.temporal_patch_size, axis=5)
    return ImagePatches(frames.reshape(rows * columns, -1), rows, columns)


def resized(height: int, width: int, unit: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Returns the height and the width that an image gets: multiples of `unit`, close to its shape, within the bounds.

    Raises:
        ValueError: one side is more than 200 times as long as the other.
    """
    if max(height, width) > _MOST_RATIO * min(height, width):
        raise ValueError(
            f"image_patches: the image has {height} rows and {width} columns; accepted: a side at most {_MOST_RATIO} "
            "times as long as the other"
        )
    sides = height, width
    # Halves are rounded to even numbers, as the image processors do it.
    rounded = [round(side / unit) * unit for side in sides]
    if math.prod(rounded) > max_pixels:
        factor = math.sqrt(height * width / max_pixels)
        rounded = [max(unit, math.floor(side / factor / unit) * unit) for side in sides]
    elif math.prod(rounded) < min_pixels:
        factor = math.sqrt(min_pixels / (height * width))
        rounded = [math.ceil(side * factor / unit) * unit for side in sides]
    return rounded[0], rounded[1]


# --- the tower --------------------------------------------------------------------------------------------------------


def image_rows(tower: VisionTower, images: Sequence[ImagePatches]) -> list[Float[np.ndarray, "tokens D"]]:
    """Returns the rows that stand for the tokens of each image, row by row of the image, on the host.

    No bit of an image's rows depends on the other images.

    Args:
        tower: the vision tower.
        images: their patches.
    """
    network, weights = split(tower)
    rows = []
    for pack in _packs(images):
        patches, tokens = packed(pack, tower.options)
        # Indexed on the host: each number of tokens would be another program of the device.
        pack_rows = np.asarray(_window_rows(network, weights, patches)).reshape(-1, tower.options.output_width)
        rows += [pack_rows[index] for index in tokens]
    return rows


@functools.partial(compilation.jit, static_argnums=0)
def _window_rows(network: Network[VisionTower], weights: Weights, patches: Patches) -> Float[Array, "W U D"]:
    return network.with_weights(weights)(patches)


def _packs(images: Iterable[ImagePatches]) -> Iterator[list[ImagePatches]]:
    """The images in their order, some at a time."""
    pack: list[ImagePatches] = []
    for image in images:
        if pack and sum(len(other.pixels) for other in (*pack, image)) > _PACK_PATCHES:
            yield pack
            pack = []
        pack.append(image)
    if pack:
        yield pack


def packed(images: Sequence[ImagePatches], options: VisionOptions) -> tuple[Patches, list[Int32[np.ndarray, "n"]]]:
    """Returns the patches of some images window by window, and for each image where the rows of its tokens come out.

    Sizes are powers of two, so that packs of about one size share their program.
    """
    merged, room = options.merged, options.window_patches
    windows = [window for image in images for window in _windows(image, options)]
    count = _power_of_two(len(windows))
    pixels = np.zeros((count, room, images[0].pixels.shape[1]), np.float32)
    coordinates = np.zeros((count, room, 2), np.int32)
    window_lengths, image_lengths = np.zeros(count, np.int32), np.zeros(count, np.int32)
    places, tokens, first = [], [], 0
    for image in images:
        index, place = _windows(image, options), np.zeros(len(image.pixels), np.int32)
        for window, patches in enumerate(index, first):
            pixels[window, : len(patches)] = image.pixels[patches]
            coordinates[window, : len(patches)] = _coordinates(image, options)[patches]
            window_lengths[window], image_lengths[window] = len(patches), len(image.pixels)
            place[patches] = window * room + np.arange(len(patches))
        # A token's row comes out where its first patch went in.
        tokens.append(place[::merged] // merged)
        places.append(([place[patches] for patches in index], range(first, first + len(index))))
        first += len(index)
    single = [(patches, [window]) for group, numbers in places for patches, window in zip(group, numbers, strict=True)]
    whole = [(np.concatenate(group), numbers) for group, numbers in places]
    window_keys, image_keys = _keys(single, window_lengths), _keys(whole, image_lengths)
    return Patches(pixels, coordinates, window_keys, image_keys), tokens


def _windows(image: ImagePatches, options: VisionOptions) -> list[Int32[np.ndarray, "n"]]:
    """The patches of each window, from the image's corner on; those at the edges are smaller."""
    side, merge, merged = options.window_side, options.merge_size, options.merged
    patches = np.arange(len(image.pixels), dtype=np.int32)
    grid = patches.reshape(image.rows // merge, image.columns // merge, merged)
    corners = [(row, column) for row in range(0, len(grid), side) for column in range(0, grid.shape[1], side)]
    return [grid[row : row + side, column : column + side].reshape(-1) for row, column in corners]


def _coordinates(image: ImagePatches, options: VisionOptions) -> Int32[np.ndarray, "N 2"]:
    """The row and the column of each patch."""
    merge = options.merge_size
    rows, columns = np.meshgrid(np.arange(image.rows), np.arange(image.columns), indexing="ij")
    grid = np.stack([rows, columns], axis=-1).astype(np.int32)
    grid = grid.reshape(image.rows // merge, merge, image.columns // merge, merge, 2)
    return grid.swapaxes(1, 2).reshape(-1, 2)


def _keys(groups: Sequence[tuple[np.ndarray, Iterable[int]]], lengths: Int32[np.ndarray, "W"]) -> Keys:
    """Pages with the patches of each group, for the windows that see them."""
    pages = [-(-len(patches) // KV_BLOCK) for patches, _ in groups]
    patch = np.zeros((_power_of_two(sum(pages)), KV_BLOCK), np.int32)
    table = np.zeros((len(lengths), _power_of_two(max(pages))), np.int32)
    first = 0
    for (patches, windows), count in zip(groups, pages, strict=True):
        patch[first : first + count].reshape(-1)[: len(patches)] = patches
        table[list(windows), :count] = np.arange(first, first + count)
        first += count
    return Keys(patch, table, lengths)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


# --- positions of tokens ----------------------------------------------------------------------------------------------


def token_coordinates(
    tokens: Sequence[int], image_token: int, grids: Sequence[tuple[int, int]]
) -> tuple[Int32[np.ndarray, "T 3"], int]:
    """Returns the coordinates of a prompt's tokens, and by how much those of later tokens exceed their positions.

    A text's token has its number in all three. An image's tokens have one time, and their rows and columns; the text
    goes on behind the largest of them (Wang et al. 2024, Qwen2-VL, section 2.1).

    Args:
        tokens: the prompt, in which each image has as many `image_token`s one after another as it has tokens.
        image_token: the token that stands for a part of an image.
        grids: rows and columns of tokens of each image.

    Raises:
        ValueError: the prompt's image tokens are not those of the images.
    """
    ids = np.asarray(tokens)
    parts, position, start = [], 0, 0
    runs = image_runs(tokens, image_token)
    if len(runs) != len(grids):
        raise ValueError(f"token_coordinates: {len(runs)} runs of image tokens; accepted: {len(grids)}, one per image")
    for (first, stop), (rows, columns) in zip(runs, grids, strict=True):
        if stop - first != rows * columns:
            raise ValueError(
                f"token_coordinates: {stop - first} image tokens from token {first} on; accepted: {rows * columns}, as "
                f"the image has {rows} rows of {columns} tokens"
            )
        parts.append(np.repeat(position + np.arange(first - start)[:, None], 3, axis=1))
        position += first - start
        row, column = np.divmod(np.arange(rows * columns), columns)
        parts.append(position + np.stack([np.zeros_like(row), row, column], axis=1))
        position, start = position + max(rows, columns), stop
    parts.append(np.repeat(position + np.arange(len(ids) - start)[:, None], 3, axis=1))
    return np.concatenate(parts).astype(np.int32), position - start


def image_runs(tokens: Sequence[int], image_token: int) -> list[tuple[int, int]]:
    """Returns the first of each run of image tokens, and what follows its last."""
    edges = np.diff(np.concatenate([[0], np.asarray(tokens) == image_token, [0]]).astype(np.int8))
    return list(zip(np.flatnonzero(edges == 1).tolist(), np.flatnonzero(edges == -1).tolist(), strict=True))
