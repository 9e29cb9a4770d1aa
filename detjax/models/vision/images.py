"""Images: conversion of pixels to patches, and of patches to rows that take the place of tokens of a prompt.

The arithmetic matches the image processors that checkpoints were trained with: bicubic resampling by Pillow, whose
integer arithmetic is the same on all processors, then float32.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import PIL.Image
from jaxtyping import Array, Float, Float32, Int32, UInt8

from detjax.contract import KV_BLOCK
from detjax.models.configuration.json_object import JsonObject
from detjax.models.network import Network, Weights, split
from detjax.models.parts.vision import Keys, Patches, Taps, VisionOptions, VisionTower
from detjax.models.vision.learned_positions import position_taps
from detjax.runtime import compilation

_MAX_RATIO: Final = 200
"""The maximum ratio of an image's long side to its short side."""
_PACK_PATCHES: Final = 16384
"""Patches in one call of the tower for several images, including padding of their windows."""


def refuse_other_options(file: JsonObject, **sizes: int) -> None:
    """Refuses options of an image processor other than the tower's sizes and the only arithmetic that is supported.

    Raises:
        CheckpointError: an option has another value.
    """
    fixed = sizes | {
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "resample": int(PIL.Image.Resampling.BICUBIC),
        "rescale_factor": 1 / 255,
    }
    for key, value in fixed.items():
        if file.get(key) not in (None, value):
            raise file.error(key, f"{json.dumps(value)}; anything else is not supported")


@dataclasses.dataclass(frozen=True)
class ImageOptions:
    """The options for converting images, or video frames, to patches, from `preprocessor_config.json`.

    Attributes:
        min_pixels: the minimum; smaller images are enlarged.
        max_pixels: the maximum; larger images are reduced.
        mean: subtracted from each channel, whose numbers are from 0 to 1.
        std: each channel is then divided by it.
        unread: the file's other keys, as JSON, which have no effect here.
    """

    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)
    std: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)
    unread: str = "{}"

    @classmethod
    def from_hugging_face(
        cls, raw: Mapping[str, Any], source: str, vision: VisionOptions, *, is_for_videos: bool = False
    ) -> "ImageOptions":
        """Returns the options that a `preprocessor_config.json` describes.

        Args:
            raw: the contents; empty without such a file.
            source: the file's name in errors.
            vision: the tower, which the file must match.
            is_for_videos: whether it is a `video_preprocessor_config.json`, which has other default bounds.

        Raises:
            CheckpointError: a value is out of range, does not match the tower, or is an unsupported option that would
                change the result.
        """
        file = JsonObject(raw, source)
        refuse_other_options(
            file,
            patch_size=vision.patch_size,
            temporal_patch_size=vision.temporal_patch_size,
            merge_size=vision.merge_size,
        )
        if file.get("cap_pixels_per_frame"):
            raise file.error("cap_pixels_per_frame", "false, null; frames are resized by their own bounds")
        size = file.object("size") or JsonObject({}, source, "size.")
        side = (vision.patch_size * vision.merge_size) ** 2
        least, most = (128 * side, 768 * side) if is_for_videos else (cls.min_pixels, cls.max_pixels)
        least, most = size.integer("shortest_edge", least), size.integer("longest_edge", most)
        least, most = file.integer("min_pixels", least), file.integer("max_pixels", most)
        if most < max(least, side):
            raise file.error("max_pixels", f"at least min_pixels, which is {least}, and the pixels of one token")
        channels = {
            key: read_channels(file, key, default, vision.channels)
            for key, default in (("image_mean", cls.mean), ("image_std", cls.std))
        }
        if not all(channels["image_std"]):
            raise file.error("image_std", "numbers other than 0")
        unread = json.dumps({key: value for key, value in file.unread().items() if key != "size"}, sort_keys=True)
        return cls(least, most, channels["image_mean"], channels["image_std"], unread)

    def to_hugging_face(self, vision: VisionOptions) -> dict[str, Any]:
        """Returns the contents of an equivalent `preprocessor_config.json`."""
        unread = json.loads(self.unread)
        kind = {} if "video_processor_type" in unread else {"image_processor_type": "Qwen2VLImageProcessor"}
        return {
            **kind,
            **unread,
            "size": {"shortest_edge": self.min_pixels, "longest_edge": self.max_pixels},
            "min_pixels": self.min_pixels,
            "max_pixels": self.max_pixels,
            "image_mean": list(self.mean),
            "image_std": list(self.std),
            "patch_size": vision.patch_size,
            "temporal_patch_size": vision.temporal_patch_size,
            "merge_size": vision.merge_size,
        }

    def patches_of_image(self, image: UInt8[np.ndarray, "h w 3"], vision: VisionOptions) -> "ImagePatches":
        """Returns the patches of an image."""
        unit = vision.patch_size * vision.merge_size
        height, width = resized(image.shape[0], image.shape[1], unit, self)
        bicubic = PIL.Image.Resampling.BICUBIC
        pixels = np.asarray(PIL.Image.fromarray(np.ascontiguousarray(image)).resize((width, height), bicubic))
        pixels = (pixels.astype(np.float64) * (1 / 255)).astype(np.float32)
        pixels = (pixels - np.array(self.mean, np.float32)) / np.array(self.std, np.float32)
        return patches_of_frames(np.repeat(pixels[None], vision.temporal_patch_size, axis=0), vision)


def read_channels(file: JsonObject, key: str, default: tuple[float, ...], channels: int) -> tuple[float, ...]:
    """Returns a number for each channel.

    Raises:
        CheckpointError: the value is not a list of as many numbers.
    """
    raw_numbers = file.get(key)
    numbers = list(default) if raw_numbers is None else raw_numbers
    is_list = isinstance(numbers, list) and len(numbers) == channels
    if not is_list or any(isinstance(x, bool) or not isinstance(x, int | float) for x in numbers):
        raise file.error(key, f"a list of {channels} numbers")
    return tuple(map(float, numbers))


@dataclasses.dataclass(frozen=True, eq=False)
class ImagePatches:
    """The patches of one image: the patches of one token in sequence, the tokens row by row.

    Attributes:
        pixels: the numbers of each patch: by channel, frame, row and column.
        rows: rows of patches.
        columns: columns of patches.
        frames: for a tower that sees several frames together, their number; the patches of one follow another's.
    """

    pixels: Float32[np.ndarray, "N P"]
    rows: int
    columns: int
    frames: int = 1

    @functools.cached_property
    def digest(self) -> bytes:
        """A cryptographic digest of the patches and their arrangement."""
        shape = np.array([self.rows, self.columns, *self.pixels.shape], np.int64)
        hashed = hashlib.blake2b(shape.tobytes(), digest_size=32, person=b"image")
        hashed.update(np.ascontiguousarray(self.pixels).data)
        return hashed.digest()


@dataclasses.dataclass(frozen=True, eq=False)
class VideoPatches:
    """The patches of a video.

    Attributes:
        frames: the patches of consecutive groups of frames, each as long as a patch.
        seconds: the time from one group to the next.
        times: the time of each group in seconds, if prompts state it; None if the positions of tokens do.
    """

    frames: tuple[ImagePatches, ...]
    seconds: float
    times: tuple[float, ...] | None = None

    @property
    def rows(self) -> int:
        """Rows of patches of a frame."""
        return self.frames[0].rows

    @property
    def columns(self) -> int:
        """Columns of patches of a frame."""
        return self.frames[0].columns

    @functools.cached_property
    def digest(self) -> bytes:
        """A cryptographic digest of the patches, their arrangement and their times."""
        contents = b"".join(frame.digest for frame in self.frames)
        # Times that the prompt states are part of its tokens.
        seconds = np.float64(self.seconds if self.times is None else 0).tobytes()
        return hashlib.blake2b(seconds + contents, digest_size=32, person=b"video").digest()

    @property
    def places(self) -> "tuple[VideoPatches, ...]":
        """The parts of the video that have separate places in a prompt."""
        if self.times is None:
            return (self,)
        pairs = zip(self.frames, self.times, strict=True)
        return tuple(VideoPatches((frame,), self.seconds, (time,)) for frame, time in pairs)


type VisualInput = ImagePatches | VideoPatches
"""An image or video that tokens of a prompt stand for."""


def image_patches(image: UInt8[np.ndarray, "h w C"], options: ImageOptions, vision: VisionOptions) -> ImagePatches:
    """Returns the patches of an image: red, green and blue of each pixel, from 0 to 255.

    Raises:
        ValueError: the image is empty, has other axes, or is too long or too wide.
    """
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or 0 in image.shape:
        raise ValueError(
            f"image_patches: the image is {image.dtype}{image.shape}; accepted: uint8 (height, width, 3), red, green "
            'and blue of each pixel, such as np.asarray(PIL.Image.open(file).convert("RGB"))'
        )
    return options.patches_of_image(image, vision)


def patches_of_frames(pixels: Float32[np.ndarray, "t h w C"], vision: VisionOptions) -> ImagePatches:
    """Returns the patches of one group of normalized frames, whose sides are multiples of a token's."""
    _, height, width, _ = pixels.shape
    size, merge = vision.patch_size, vision.merge_size
    rows, columns = height // size, width // size
    grid = pixels.reshape(-1, rows // merge, merge, size, columns // merge, merge, size, pixels.shape[-1])
    # Rows and columns of tokens, of their patches; channels, frames, pixels.
    grid = grid.transpose(1, 4, 2, 5, 7, 0, 3, 6)
    return ImagePatches(grid.reshape(rows * columns, -1), rows, columns)


def resized(
    height: int, width: int, unit: int, options: ImageOptions, *, frames: int = 1, padded_frames: int = 1
) -> tuple[int, int]:
    """Returns the height and width to resize an image to: multiples of `unit`, close to its shape, within the bounds.

    The bounds apply to `frames` images together, or `padded_frames` after padding.

    Raises:
        ValueError: one side is more than 200 times as long as the other.
    """
    if max(height, width) > _MAX_RATIO * min(height, width):
        raise ValueError(
            f"image_patches: the image has {height} rows and {width} columns; accepted: a side at most {_MAX_RATIO} "
            "times as long as the other"
        )
    sides, pixels = (height, width), frames * height * width
    # Halves are rounded to even numbers, as in the image processors.
    rounded = [round(side / unit) * unit for side in sides]
    if padded_frames * math.prod(rounded) > options.max_pixels:
        factor = math.sqrt(pixels / options.max_pixels)
        rounded = [max(unit, math.floor(side / factor / unit) * unit) for side in sides]
    elif padded_frames * math.prod(rounded) < options.min_pixels:
        factor = math.sqrt(options.min_pixels / pixels)
        rounded = [math.ceil(side * factor / unit) * unit for side in sides]
    return rounded[0], rounded[1]


# --- the tower --------------------------------------------------------------------------------------------------------


def image_rows(tower: VisionTower, visuals: Sequence[VisualInput]) -> list[Float[np.ndarray, "tokens R"]]:
    """Returns the rows for the tokens of each image and video, in row-major order of the image, on the host.

    If the tower has several rows for a token, they are side by side. It treats video frames as images. No bit of an
    image's rows depends on the other images.
    """
    network, weights = split(tower)
    return rows_by(functools.partial(_window_rows, network, weights), tower.options, visuals)


def rows_by(
    run: Callable[[Patches], Array],
    options: VisionOptions,
    visuals: Sequence[VisualInput],
    *,
    windows: Callable[[int], int] | None = None,
    most_windows: int | None = None,
) -> list[Float[np.ndarray, "tokens R"]]:
    """Returns the result of `image_rows`, computed by the caller's program.

    Args:
        run: returns the rows of each token of each window.
        options: the tower's.
        visuals: the patches of the images and videos.
        windows: pads the number of windows of a call. Default: to the next power of two.
        most_windows: the maximum number of windows of several images in a call. Default: a fixed number of patches.
    """
    counts = [len(one.frames) if isinstance(one, VideoPatches) else 1 for one in visuals]
    images = [frame for one in visuals for frame in (one.frames if isinstance(one, VideoPatches) else (one,))]
    rows: list[np.ndarray] = []
    for pack in _packs(images, options, most_windows or _PACK_PATCHES // options.window_patches):
        needed = sum(len(_windows(image, options)) for image in pack)
        patches, tokens = packed(pack, options, (windows or _power_of_two)(needed))
        # Indexed on the host: on the device, each number of tokens would need another program.
        pack_rows = np.asarray(run(patches)).reshape(-1, options.row_width)
        rows += [pack_rows[index] for index in tokens]
    ends = np.cumsum([0, *counts]).tolist()
    return [np.concatenate(rows[first:stop]) for first, stop in itertools.pairwise(ends)]


@functools.partial(compilation.jit, static_argnums=0)
def _window_rows(network: Network[VisionTower], weights: Weights, patches: Patches) -> Float[Array, "W U R"]:
    return network.with_weights(weights)(patches)


def _packs(images: Iterable[ImagePatches], options: VisionOptions, most: int) -> Iterator[list[ImagePatches]]:
    """Groups the images in order, with up to `most` windows per group."""
    pack: list[ImagePatches] = []
    total = 0
    for image in images:
        needed = len(_windows(image, options))
        if pack and total + needed > most:
            yield pack
            pack, total = [], 0
        pack.append(image)
        total += needed
    if pack:
        yield pack


def window_counts(options: VisionOptions, tokens: int) -> list[int]:
    """Returns the numbers of windows in calls of the tower for images of up to `tokens` tokens."""
    side = options.window_side
    most = -(-tokens * options.merged // options.window_patches)
    if side is not None:
        shapes = ((rows, tokens // rows) for rows in range(1, math.isqrt(tokens) + 1))
        fitting = [(rows, columns) for rows, columns in shapes if columns <= 2 * _MAX_RATIO * rows]
        most = max(-(-rows // side) * -(-columns // side) for rows, columns in fitting or [(1, tokens)])
    return [1 << power for power in range(most.bit_length() + (most & (most - 1) > 0))]


def empty_pack(options: VisionOptions, windows: int) -> Patches:
    """Returns an empty patch batch with capacity for `windows` windows."""
    return packed((), options, windows)[0]


def packed(
    images: Sequence[ImagePatches], options: VisionOptions, count: int
) -> tuple[Patches, list[Int32[np.ndarray, "n"]]]:
    """Returns the patches of some images by window, and for each image the output rows of its tokens.

    All sizes depend only on the number of windows, `count`, so batches with the same number share a program.
    """
    merged, room = options.merged, options.window_patches
    pixels = np.zeros((count, room, math.prod(options.patch_shape)), np.float32)
    coordinates = np.zeros((count, room, 2), np.int32)
    sizes = np.ones((count, 2), np.int32)
    window_lengths, image_lengths = np.zeros(count, np.int32), np.zeros(count, np.int32)
    frame = np.full((count, room), -1, np.int32)
    in_frames = Taps(*(np.zeros((count * room, options.clip_frames), dtype) for dtype in (np.int32, np.float32)))
    places, tokens, first = [], [], 0
    for image in images:
        index, place = _windows(image, options), np.zeros(len(image.pixels), np.int32)
        by_patch = _coordinates(image, options)
        for window, patches in enumerate(index, first):
            pixels[window, : len(patches)] = image.pixels[patches]
            coordinates[window, : len(patches)] = by_patch[patches % len(by_patch)]
            sizes[window] = image.rows, image.columns
            window_lengths[window], image_lengths[window] = len(patches), len(image.pixels)
            if image.frames > 1:
                frame[window, : len(patches)] = patches // (image.rows * image.columns)
            place[patches] = window * room + np.arange(len(patches))
        # A token's row is at the position of its first patch, in the first frame.
        in_frame = place.reshape(image.frames, -1)
        tokens.append(in_frame[0, ::merged] // merged)
        in_frames.index[in_frame[0], : image.frames] = in_frame.T
        in_frames.weight[in_frame[0], : image.frames] = np.float32(1) / np.float32(image.frames)
        places.append(([place[patches] for patches in index], range(first, first + len(index))))
        first += len(index)
    single = [(patches, [window]) for group, numbers in places for patches, window in zip(group, numbers, strict=True)]
    whole = [(np.concatenate(group), numbers) for group, numbers in places]
    pages = count * -(-room // KV_BLOCK)
    window_keys, image_keys = _keys(single, window_lengths, pages), _keys(whole, image_lengths, pages)
    taps = position_taps(options, coordinates, sizes[:, None], frame)
    shared = [x.reshape(count, room, -1) for x in in_frames] if options.clip_frames > 1 else None
    frames = None if shared is None else Taps(*shared)
    return Patches(pixels, coordinates, taps, window_keys, image_keys, frames), tokens


def _windows(image: ImagePatches, options: VisionOptions) -> list[Int32[np.ndarray, "n"]]:
    """Returns the patches of each window, starting at the image's corner; windows at the edges are smaller.

    Without windows, these are chunks of the image; the last one is smaller.
    """
    side, merge, merged = options.window_side, options.merge_size, options.merged
    patches = np.arange(len(image.pixels), dtype=np.int32)
    if side is None:
        return np.split(patches, range(options.window_patches, len(patches), options.window_patches))
    grid = patches.reshape(image.rows // merge, image.columns // merge, merged)
    corners = [(row, column) for row in range(0, len(grid), side) for column in range(0, grid.shape[1], side)]
    return [grid[row : row + side, column : column + side].reshape(-1) for row, column in corners]


def _coordinates(image: ImagePatches, options: VisionOptions) -> Int32[np.ndarray, "N 2"]:
    """Returns the row and the column of each patch of a frame."""
    merge = options.merge_size
    rows, columns = np.meshgrid(np.arange(image.rows), np.arange(image.columns), indexing="ij")
    grid = np.stack([rows, columns], axis=-1).astype(np.int32)
    grid = grid.reshape(image.rows // merge, merge, image.columns // merge, merge, 2)
    return grid.swapaxes(1, 2).reshape(-1, 2)


def _keys(groups: Sequence[tuple[np.ndarray, Iterable[int]]], lengths: Int32[np.ndarray, "W"], most_pages: int) -> Keys:
    """Makes pages of the patches of each group, for the windows that see them."""
    pages = [-(-len(patches) // KV_BLOCK) for patches, _ in groups]
    patch = np.zeros((most_pages, KV_BLOCK), np.int32)
    table = np.zeros((len(lengths), most_pages), np.int32)
    first = 0
    for (patches, windows), count in zip(groups, pages, strict=True):
        patch[first : first + count].reshape(-1)[: len(patches)] = patches
        table[list(windows), :count] = np.arange(first, first + count)
        first += count
    return Keys(patch, table, lengths)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
