"""Images and videos of prompts: their tokens, their rows in a step, and what the prefix cache knows them by."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int32

from detjax.models import Decoder, DecoderConfig
from detjax.models.images import (
    ImageOptions,
    ImagePatches,
    Shown,
    VideoPatches,
    image_patches,
    image_runs,
    token_coordinates,
    token_grid,
)
from detjax.models.videos import Video, video_patches

type ImageSpan = tuple[int, int, bytes]
"""The position of an image's first token, that of the token after its last, and the digest of its content."""
type GivenImage = np.ndarray | ImagePatches | Video | VideoPatches
"""What requests may have as an image or a video; see `Request.images`."""


class PromptImages:
    """The images and videos of a prompt. The samples of a request share them.

    Attributes:
        patches: the patches of each.
        spans: where the tokens of each are, and what it is.
        excess: by how much the coordinates of generated tokens exceed their positions.
        rows: the rows that the vision tower made of each; empty until it has.
    """

    def __init__(self, patches: Sequence[Shown], tokens: Sequence[int], config: DecoderConfig) -> None:
        """The images and videos of a prompt whose placeholders are those of them."""
        assert config.vision is not None
        runs = image_runs(tokens, config.placeholders)
        self.patches = tuple(patches)
        self.spans: list[ImageSpan] = [(*run, image.digest) for run, image in zip(runs, patches, strict=True)]
        grids = [token_grid(image, config.vision) for image in patches]
        self._coordinates, self.excess = token_coordinates(tokens, config.placeholders, grids)
        self.rows: list[np.ndarray] = []

    def coordinates(self, start: int, count: int) -> Int32[np.ndarray, "n 3"]:
        """Returns the coordinates of consecutive tokens, generated ones included."""
        known = self._coordinates[start : start + count]
        later = np.arange(start + len(known), start + count, dtype=np.int32) + np.int32(self.excess)
        return np.concatenate([known, np.repeat(later[:, None], 3, axis=1)])

    def put_rows(self, start: int, count: int, present: np.ndarray, rows: Float[np.ndarray, "n D"]) -> None:
        """Puts the images' rows of consecutive tokens into arrays with a row for each of them."""
        for (first, stop, _), image in zip(self.spans, self.rows, strict=True):
            begin, end = max(first, start), min(stop, start + count)
            if begin < end:
                present[begin - start : end - start] = True
                rows[begin - start : end - start] = image[begin - first : end - first]


class ImageReader:
    """Makes patches of images and videos as a model takes them.

    Attributes:
        config: the model's.
    """

    def __init__(self, model: Decoder) -> None:
        """A reader for a model, which may take none."""
        self.config = model.config
        self._images = model.image_options or ImageOptions()
        # transformers reads an old checkpoint's one file for both.
        self._videos = model.video_options or self._images

    def patches(self, name: str, given: Sequence[GivenImage]) -> list[Shown]:
        """Returns the patches of a request's images and videos, those of single frames where these have own places.

        Args:
            name: what error messages call the request.
            given: see `Request.images`.

        Raises:
            ValueError: the model takes no images, or one is none that it takes.
        """
        if not len(given):
            return []
        if self.config.vision is None:
            raise ValueError(
                f"{name} has {len(given)} images, and {self.config.architecture} reads text alone; accepted: no "
                "images, or a model with a vision tower"
            )
        patches: list[Shown] = []
        for index, image in enumerate(given):
            try:
                patches += self._patches_of(image)
            except ValueError as error:
                raise ValueError(f"{name}, image {index}: {error}") from error
        return patches

    def _patches_of(self, given: GivenImage) -> Sequence[Shown]:
        vision = self.config.vision
        assert vision is not None
        if isinstance(given, ImagePatches):
            return [given]
        if isinstance(given, Video):
            given = video_patches(given, self._videos, vision)
        if not isinstance(given, VideoPatches):
            return [image_patches(np.asarray(given), self._images, vision)]
        if vision.tokens_per_second is not None:
            return [given]
        return [VideoPatches((frame,), given.seconds) for frame in given.frames]


def with_image_tokens(
    name: str, config: DecoderConfig, tokens: Sequence[int], images: Sequence[Shown]
) -> Sequence[int]:
    """Returns a prompt's tokens with as many placeholders as its images and videos have tokens.

    Args:
        name: what error messages call the prompt.
        config: the model's.
        tokens: the prompt, in which one placeholder, or as many as it has tokens, stand for each image or video.
        images: the images and videos in the order of the prompt.

    Raises:
        ValueError: the prompt's placeholders are not those of the images and videos.
    """
    vision = config.vision
    if vision is None:
        return tokens
    runs = image_runs(tokens, config.placeholders)
    if len(runs) != len(images):
        known = " or ".join(map(str, config.placeholders))
        raise ValueError(
            f"{name} has {len(runs)} places for images, which are tokens {known} with others between them, and comes "
            f"with {len(images)} images; accepted: one place for each image"
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
