"""Images of samples: the rows that a model's frozen vision tower computes from them."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from detjax.models import Decoder
from detjax.models.decoder import ImageRows
from detjax.models.network import Network, Weights
from detjax.models.vision.images import image_rows
from detjax.models.vision.prompt_images import PromptImages, with_image_tokens
from detjax.rl.trainer.microbatches import Sample, SampleImages


def with_rows(network: Network[Decoder], weights: Weights, samples: Sequence[Sample]) -> list[Sample]:
    """Returns samples with the image rows that an engine would compute, bit for bit.

    Raises:
        ValueError: the model takes no images, or a sample's images do not match its prompt's tokens.
    """
    if not any(len(sample.images) for sample in samples):
        return list(samples)
    model = network.with_weights(weights)
    if model.vision is None:
        raise ValueError(
            f"samples have images, and {model.config.architecture} reads only text; accepted: no images, or a model "
            "with a vision tower"
        )
    prompts = [_prompt_images(number, model, sample) for number, sample in enumerate(samples)]
    rows = iter(image_rows(model.vision, [image for prompt in prompts for image in prompt.patches]))
    for prompt in prompts:
        prompt.rows = [next(rows) for _ in prompt.patches]
    pairs = zip(samples, prompts, strict=True)
    return [dataclasses.replace(sample, shown=_shown(model, len(sample.tokens), prompt)) for sample, prompt in pairs]


def _prompt_images(number: int, model: Decoder, sample: Sample) -> PromptImages:
    tokens = sample.tokens[: sample.prompt_tokens].tolist()
    if len(with_image_tokens(f"sample {number}", model.config, tokens, sample.images)) != len(tokens):
        raise ValueError(
            f"sample {number} has one token for an image; accepted: all tokens of the image, as in "
            "`Generation.prompt_tokens` or as `Engine.with_image_tokens` returns them"
        )
    return PromptImages(sample.images, tokens, model.config)


def _shown(model: Decoder, tokens: int, prompt: PromptImages) -> SampleImages:
    """The model's rows for a sample's images."""
    assert model.config.vision is not None
    images = ImageRows(np.zeros(tokens, bool), np.zeros((tokens, model.config.vision.row_width), model.dtype))
    prompt.put_rows(0, tokens, *images)
    return SampleImages(prompt.coordinates(0, tokens), images)
