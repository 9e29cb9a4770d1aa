"""Images of prompts: the tokens that stand for them, their rows in a step, and what the prefix cache knows them by."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int32

from detjax.models import DecoderConfig
from detjax.models.images import ImageOptions, ImagePatches, image_patches, image_runs, token_coordinates

type ImageSpan = tuple[int, int, bytes]
"""The position of an image's first token, that of the token after its last, and the digest of its content."""


class PromptImages:
    """The images of a prompt. The samples of a request share them.

    Attributes:
        patches: the patches of each image.
        spans: where each image's tokens are, and what the image is.
        excess: by how much the coordinates of generated tokens exceed their positions; it is 0 or less.
        rows: the rows that the vision tower made of each image; empty until it has.
    """

    def __init__(self, patches: Sequence[ImagePatches], tokens: Sequence[int], config: DecoderConfig) -> None:
        """The images of a prompt whose image tokens are those of the images."""
        assert config.image_token is not None
        runs = image_runs(tokens, config.image_token)
        self.patches = tuple(patches)
        self.spans: list[ImageSpan] = [(*run, image.digest) for run, image in zip(runs, patches, strict=True)]
        grids = [token_grid(image, config) for image in patches]
        self._coordinates, self.excess = token_coordinates(tokens, config.image_token, grids)
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


def image_patches_of(
    name: str, config: DecoderConfig, options: ImageOptions | None, images: Sequence[np.ndarray | ImagePatches]
) -> list[ImagePatches]:
    """Returns the patches of a request's images.

    Args:
        name: what error messages call the request.
        config: the model's.
        options: how images become patches; None: as usual.
        images: uint8 `[height, width, 3]`, or the patches.

    Raises:
        ValueError: the model takes no images, or one is none that it takes.
    """
    if not len(images):
        return []
    vision = config.vision
    if vision is None:
        raise ValueError(
            f"{name} has {len(images)} images, and {config.architecture} reads text alone; accepted: no images, "
            "or a model with a vision tower"
        )
    patches = []
    for index, image in enumerate(images):
        if isinstance(image, ImagePatches):
            patches.append(image)
            continue
        try:
            patches.append(image_patches(np.asarray(image), options or ImageOptions(), vision))
        except ValueError as error:
            raise ValueError(f"{name}, image {index}: {error}") from error
    return patches


def token_grid(image: ImagePatches, config: DecoderConfig) -> tuple[int, int]:
    """Returns how many rows and columns of tokens stand for an image."""
    assert config.vision is not None
    return image.rows // config.vision.merge_size, image.columns // config.vision.merge_size


def with_image_tokens(
    name: str, config: DecoderConfig, tokens: Sequence[int], images: Sequence[ImagePatches]
) -> Sequence[int]:
    """Returns a prompt's tokens with as many image tokens as its images have.

    Args:
        name: what error messages call the prompt.
        config: the model's.
        tokens: the prompt, in which one image token, or as many as the image has, stand for each image.
        images: the images in the order of the prompt.

    Raises:
        ValueError: the prompt's image tokens are not those of the images.
    """
    if config.image_token is None:
        return tokens
    runs = image_runs(tokens, config.image_token)
    if len(runs) != len(images):
        raise ValueError(
            f"{name} has {len(runs)} places for images, which are tokens {config.image_token} with others between "
            f"them, and comes with {len(images)} images; accepted: one place for each image"
        )
    expanded, end = [], 0
    for index, ((first, stop), image) in enumerate(zip(runs, images, strict=True)):
        rows, columns = token_grid(image, config)
        if stop - first not in (1, rows * columns):
            raise ValueError(
                f"{name} has {stop - first} tokens {config.image_token} from token {first} on; accepted: 1 or "
                f"{rows * columns}, as image {index} has {rows} rows of {columns} tokens"
            )
        expanded += [*tokens[end:first], *[config.image_token] * (rows * columns)]
        end = stop
    return [*expanded, *tokens[end:]] if runs else tokens
