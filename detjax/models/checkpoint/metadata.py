"""A model's metadata: everything that is known without its weights."""

import dataclasses

from detjax.models.configuration.config import DecoderConfig
from detjax.models.configuration.generation_defaults import GenerationDefaults
from detjax.models.decoder import Decoder
from detjax.models.vision.images import ImageOptions


@dataclasses.dataclass(frozen=True)
class ModelMetadata:
    """The options of a checkpoint that validating and tokenizing requests depend on, without the weights.

    Processes that compute nothing hold it, such as those that pass requests on to engines in other processes.

    Attributes:
        config: shape and options.
        generation_defaults: end tokens, and the sampling that the checkpoint recommends; None: no recommendation.
        image_options: how images become patches; None: the default.
        video_options: how videos become patches; None: as images do.
    """

    config: DecoderConfig
    generation_defaults: GenerationDefaults | None = None
    image_options: ImageOptions | None = None
    video_options: ImageOptions | None = None

    @classmethod
    def from_model(cls, model: Decoder) -> "ModelMetadata":
        """Returns the metadata of a model."""
        return cls(model.config, model.generation_defaults, model.image_options, model.video_options)
