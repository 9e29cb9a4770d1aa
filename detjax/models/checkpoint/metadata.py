"""What is known of a model without its weights."""

import dataclasses

from detjax.models.configuration.config import DecoderConfig
from detjax.models.configuration.generation_defaults import GenerationDefaults
from detjax.models.decoder import Decoder
from detjax.models.vision.images import ImageOptions


@dataclasses.dataclass(frozen=True)
class ModelMetadata:
    """What a checkpoint says of its model besides the weights: all that requests are read by.

    Processes that compute nothing have it, such as those that pass requests on to engines in other processes.

    Attributes:
        config: shape and options.
        generation_defaults: end tokens, and the sampling that the checkpoint recommends; None: it says nothing.
        image_options: how images become patches; None: as usual.
        video_options: how videos do; None: as images.
    """

    config: DecoderConfig
    generation_defaults: GenerationDefaults | None = None
    image_options: ImageOptions | None = None
    video_options: ImageOptions | None = None

    @classmethod
    def from_model(cls, model: Decoder) -> "ModelMetadata":
        """Returns the outline of a model."""
        return cls(model.config, model.generation_defaults, model.image_options, model.video_options)
