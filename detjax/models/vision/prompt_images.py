"""Images and videos of prompts: their tokens, their rows in a step, and their identity in the prefix cache."""

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int32

from detjax.models.configuration.config import DecoderConfig
from detjax.models.parts.vision import VisionOptions
from detjax.models.text.tokenizer import Tokenizer
from detjax.models.text.video_texts import VideoTexts
from detjax.models.vision.clips import clip_text, image_options_class
from detjax.models.vision.frame_sampling import FrameSampling
from detjax.models.vision.images import (
    ImageOptions,
    ImagePatches,
    VideoPatches,
    VisualInput,
    image_patches,
)
from detjax.models.vision.videos import Video, video_patches

type ImageSpan = tuple[int, int, bytes]
"""The position of an image's first token, the position after its last token, and the digest of its content."""
type GivenImage = np.ndarray | ImagePatches | Video | VideoPatches
"""Accepted types of images and videos in requests; see `Request.images`."""


class PromptImages:
    """The images and videos of a prompt. The samples of a request share them.

    Attributes:
        patches: the patches of each image and video, and of each frame that has a separate place.
        spans: the tokens of each, and its digest.
        excess: the difference between the coordinates and positions of generated tokens.
        rows: the vision tower's rows for each; empty until they are computed.
    """

    def __init__(self, patches: Sequence[VisualInput], tokens: Sequence[int], config: DecoderConfig) -> None:
        """Takes the images and videos that the prompt's placeholders stand for."""
        assert config.vision is not None
        runs = image_runs(tokens, config.placeholders)
        self.patches = tuple(places(patches))
        self.spans: list[ImageSpan] = [(*run, image.digest) for run, image in zip(runs, self.patches, strict=True)]
        grids = [token_grid(image, config.vision) for image in self.patches]
        self._coordinates, self.excess = token_coordinates(tokens, config.placeholders, grids)
        self.rows: list[np.ndarray] = []

    def coordinates(self, start: int, count: int) -> Int32[np.ndarray, "n 3"]:
        """Returns the coordinates of consecutive tokens, including generated ones."""
        known = self._coordinates[start : start + count]
        later = np.arange(start + len(known), start + count, dtype=np.int32) + np.int32(self.excess)
        return np.concatenate([known, np.repeat(later[:, None], 3, axis=1)])

    def are_among(self, start: int, count: int) -> bool:
        """Returns whether some of consecutive tokens stand for images."""
        return any(first < start + count and stop > start for first, stop, _ in self.spans)

    def put_rows(self, start: int, count: int, present: np.ndarray, rows: Float[np.ndarray, "n R"]) -> None:
        """Writes the images' rows of consecutive tokens to arrays with one row per token."""
        for (first, stop, _), image in zip(self.spans, self.rows, strict=True):
            begin, end = max(first, start), min(stop, start + count)
            if begin < end:
                present[begin - start : end - start] = True
                rows[begin - start : end - start] = image[begin - first : end - first]


class ImageReader:
    """Makes the patches of images and videos for a model.

    Attributes:
        config: the model's configuration.
        sampling: the selection of frames from video files.
    """

    def __init__(self, config: DecoderConfig, images: ImageOptions | None, videos: ImageOptions | None) -> None:
        """Makes a reader with the checkpoint's options for images (None: defaults) and videos (None: as for images).

        Raises:
            CheckpointError: the checkpoint's file for videos has an unsupported selection of frames.
        """
        self.config = config
        self._images = images or (ImageOptions if config.vision is None else image_options_class(config.vision))()
        # transformers uses an old checkpoint's only file for both.
        self._videos = videos or self._images
        vision = config.vision
        self.sampling = FrameSampling() if vision is None else FrameSampling.from_options(self._videos, vision)

    def patches(self, name: str, images: Sequence[GivenImage]) -> list[VisualInput]:
        """Returns the patches of the images and videos of a request, which errors call `name`; see `Request.images`.

        Raises:
            ValueError: the model does not support images, or one of them is invalid.
        """
        if not len(images):
            return []
        if self.config.vision is None:
            raise ValueError(
                f"{name} has {len(images)} images, and {self.config.architecture} reads only text; accepted: no "
                "images, or a model with a vision tower"
            )
        patches: list[VisualInput] = []
        for index, image in enumerate(images):
            try:
                patches.append(self._patches_of(image))
            except ValueError as error:
                raise ValueError(f"{name}, image {index}: {error}") from error
        return patches

    def _patches_of(self, image: GivenImage) -> VisualInput:
        vision = self.config.vision
        assert vision is not None
        if isinstance(image, ImagePatches | VideoPatches):
            return image
        if isinstance(image, Video):
            return video_patches(image, self._videos, vision)
        return image_patches(np.asarray(image), self._images, vision)


def video_texts(config: DecoderConfig, images: Iterable[VisualInput]) -> VideoTexts | None:
    """Returns the texts of a prompt's videos: the time and the place of each clip; None if tokens stand for videos."""
    if config.video_text is None:
        return None
    videos = [image for image in images if isinstance(image, VideoPatches) and image.times is not None]
    return VideoTexts(config.video_text, ["".join(map(clip_text, video.times or ())) for video in videos])


def with_video_texts(config: DecoderConfig, prompt: str, images: Iterable[VisualInput]) -> str:
    """Returns a prompt in which texts stand for videos, with the time and the place of each clip in their place.

    A prompt without such texts is returned as is.

    Raises:
        ValueError: there are not as many of these texts as videos.
    """
    texts = video_texts(config, images)
    return prompt if texts is None or texts.placeholder not in prompt else texts.put_into(prompt)


def with_image_tokens(
    name: str,
    config: DecoderConfig,
    tokens: Sequence[int],
    images: Sequence[VisualInput],
    tokenizer: Tokenizer | None = None,
) -> Sequence[int]:
    """Returns a prompt's tokens with as many placeholders as its images and videos have tokens.

    If prompts state the times of video frames, and one placeholder stands for the whole video, it is replaced by the
    time and the place of each frame: `<0.3 seconds>`, the token that begins an image, the frame, and the token that
    ends it. This matches transformers' processor.

    Args:
        name: the prompt's name in errors.
        config: the model's configuration.
        tokens: the prompt, in which each image or video has one placeholder, or one per token.
        images: the images and videos in the order of the prompt.
        tokenizer: encodes the times of frames. Without it, the prompt must contain them.

    Raises:
        ValueError: the prompt's placeholders do not match the images and videos.
    """
    if config.vision is None:
        return tokens
    tokens = _with_times(config, tokens, images, tokenizer)
    return _with_all_tokens(name, config, tokens, places(images))


def _with_times(
    config: DecoderConfig, tokens: Sequence[int], images: Sequence[VisualInput], tokenizer: Tokenizer | None
) -> Sequence[int]:
    """Writes a place for each frame that has a separate one, if each video has a single place so far."""
    runs = image_runs(tokens, config.placeholders)
    has_times = any(isinstance(image, VideoPatches) and image.times is not None for image in images)
    begin, video, end = config.vision_start_token, config.video_token, config.vision_end_token
    if tokenizer is None or not has_times or len(runs) != len(images) or begin is None:
        return tokens
    assert video is not None and end is not None
    written: list[int] = []
    copied = 0
    for (first, stop), image in zip(runs, images, strict=True):
        if not isinstance(image, VideoPatches) or image.times is None or tokens[first] != video:
            continue
        times = [tokenizer.encode(f"<{time:.1f} seconds>", add_special_tokens=False) for time in image.times]
        before = [*times[0], begin]
        if len(times) == 1 and list(tokens[max(first - len(before), 0) : first]) == before:
            continue  # a single place that follows its time
        written += tokens[copied:first]
        for time in times:
            written += [*time, begin, video, end]
        copied = stop
    return [*written, *tokens[copied:]]


def _with_all_tokens(
    name: str, config: DecoderConfig, tokens: Sequence[int], images: Sequence[VisualInput]
) -> Sequence[int]:
    """Expands the placeholders of images, videos and frames; each has a place in the prompt."""
    vision = config.vision
    assert vision is not None
    runs = image_runs(tokens, config.placeholders)
    if len(runs) != len(images):
        known = " or ".join(map(str, config.placeholders))
        has_frames = any(isinstance(image, VideoPatches) and image.times is not None for image in images)
        frames = ", and one for each two frames of a video; with a tokenizer, one place for the whole video is enough"
        if config.video_text is not None:
            frames = f", and one for each clip of a video; in a text, {config.video_text} for the whole video is enough"
        frames = frames if has_frames else ""
        raise ValueError(
            f"{name} has {len(runs)} places for images, which are tokens {known} with others between them, and "
            f"{len(images)} images; accepted: one place for each image{frames}"
        )
    expanded, end = [], 0
    for index, ((first, stop), image) in enumerate(zip(runs, images, strict=True)):
        expected = config.video_token if isinstance(image, VideoPatches) else config.image_token
        if tokens[first] != expected:
            kind = "a video" if isinstance(image, VideoPatches) else "an image"
            raise ValueError(
                f"{name} has token {tokens[first]} at {first}; accepted: {expected}, as image {index} is {kind}"
            )
        grid = token_grid(image, vision)
        if stop - first not in (1, grid.size):
            frames = f"{len(grid.times)} frames of " if len(grid.times) > 1 else ""
            raise ValueError(
                f"{name} has {stop - first} tokens {expected} from token {first} on; accepted: 1 or {grid.size}, as "
                f"image {index} has {frames}{grid.rows} rows of {grid.columns} tokens"
            )
        expanded += [*tokens[end:first], *[expected] * grid.size]
        end = stop
    return [*expanded, *tokens[end:]] if runs else tokens


# --- places of tokens -------------------------------------------------------------------------------------------------


def places(visuals: Iterable[VisualInput]) -> list[VisualInput]:
    """Returns the inputs with separate places in a prompt: images, videos, and frames whose times prompts state."""
    return [part for one in visuals for part in (one.places if isinstance(one, VideoPatches) else (one,))]


class TokenGrid(NamedTuple):
    """The arrangement of the tokens of an image or a video.

    Attributes:
        times: the time of each frame relative to the first one, in positions.
        rows: rows of tokens of a frame.
        columns: columns of tokens of a frame.
    """

    times: tuple[int, ...]
    rows: int
    columns: int

    @property
    def size(self) -> int:
        """The number of tokens."""
        return len(self.times) * self.rows * self.columns


def token_grid(image: VisualInput, vision: VisionOptions) -> TokenGrid:
    """Returns the arrangement of the tokens of an image or a video."""
    times = (0,)
    if isinstance(image, VideoPatches) and vision.tokens_per_second is not None:
        pace = np.float32(vision.tokens_per_second) * np.float32(image.seconds)
        times = tuple((np.arange(len(image.frames), dtype=np.float32) * pace).astype(np.int64).tolist())
    return TokenGrid(times, image.rows // vision.merge_size, image.columns // vision.merge_size)


def token_coordinates(
    tokens: Sequence[int], placeholders: Collection[int], grids: Sequence[TokenGrid]
) -> tuple[Int32[np.ndarray, "T 3"], int]:
    """Returns the coordinates of a prompt's tokens, and the difference between later tokens' coordinates and positions.

    All three coordinates of a text token are its index. A token of an image or video frame has the time, its row and
    its column; the text continues after the last row and column (Wang et al. 2024, Qwen2-VL, section 2.1), and
    generated text after all coordinates. In the prompt, each image and video has as many consecutive placeholders as
    its grid has tokens.

    Raises:
        ValueError: the prompt's placeholders do not match the images and videos.
    """
    parts, position, start = [], 0, 0
    runs = image_runs(tokens, placeholders)
    if len(runs) != len(grids):
        raise ValueError(f"token_coordinates: {len(runs)} runs of image tokens; accepted: {len(grids)}, one per image")
    for (first, stop), grid in zip(runs, grids, strict=True):
        if stop - first != grid.size:
            raise ValueError(
                f"token_coordinates: {stop - first} image tokens from token {first} on; accepted: {grid.size}, as the "
                f"image has {len(grid.times)} frames of {grid.rows} rows of {grid.columns} tokens"
            )
        parts.append(np.repeat(position + np.arange(first - start)[:, None], 3, axis=1))
        position += first - start
        place = np.meshgrid(grid.times, np.arange(grid.rows), np.arange(grid.columns), indexing="ij")
        parts.append(position + np.stack(place, axis=-1).reshape(-1, 3))
        position, start = position + max(grid.rows, grid.columns), stop
    parts.append(np.repeat(position + np.arange(len(tokens) - start)[:, None], 3, axis=1))
    coordinates = np.concatenate(parts).astype(np.int32)
    return coordinates, int(coordinates.max()) + 1 - len(tokens)


def image_runs(tokens: Sequence[int], placeholders: Collection[int]) -> list[tuple[int, int]]:
    """Returns the start and end of each run of one placeholder."""
    runs, ids = [], np.asarray(tokens)
    for placeholder in placeholders:
        edges = np.diff(np.concatenate([[0], ids == placeholder, [0]]).astype(np.int8))
        runs += zip(np.flatnonzero(edges == 1).tolist(), np.flatnonzero(edges == -1).tolist(), strict=True)
    return sorted(runs)
