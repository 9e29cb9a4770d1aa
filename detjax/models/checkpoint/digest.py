"""A digest of a model: every number and setting that its results depend on."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from detjax.models.configuration.config import DecoderConfig
from detjax.models.decoder import Decoder
from detjax.models.mesh import whole_weights
from detjax.models.network import name_of, parameters
from detjax.models.text.tokenizer import Tokenizer
from detjax.operands.quantized_weight import is_quantized, widened
from detjax.runtime.threads import in_threads


def digest(model: Decoder, tokenizer: Tokenizer | None = None) -> str:
    """Returns the SHA-256 of the model's weights, its configuration and its tokenizer's files, in hexadecimal digits.

    Models with equal digests compute the same function of a request, whichever files they were read from. The weights
    are copied to the host, a few at a time: a model of 16 GB takes some seconds. If the devices of several processes
    share the model, each process must call this.
    """
    return ModelDigest.from_model(model, tokenizer).value


@dataclasses.dataclass(frozen=True)
class ModelDigest:
    """The parts of a model's digest, so that the digest of a model with some other weights can be computed.

    Attributes:
        options: descriptions of the configuration and other options.
        names: the weights' names, in the order of `network.split`.
        weights: the weights' digests.
        files: descriptions of the tokenizer's files.
    """

    options: tuple[str, ...]
    names: tuple[str, ...]
    weights: tuple[str, ...]
    files: tuple[str, ...]

    @classmethod
    def from_model(cls, model: Decoder, tokenizer: Tokenizer | None) -> "ModelDigest":
        """Returns the parts of `digest`, with the same cost."""
        given = (options for options in (model.image_options, model.video_options) if options is not None)
        files = {} if tokenizer is None else tokenizer.files
        return cls(
            (_description(model.config), repr(model.generation_defaults), *map(repr, given)),
            tuple(f"{name_of(path)}.value" for path in parameters(model)),
            tuple(in_threads(weight_digest, whole_weights(model))),
            tuple(f"{name} {hashlib.sha256(files[name]).hexdigest()}" for name in sorted(files)),
        )

    @property
    def value(self) -> str:
        """The model's digest."""
        weights = [f"{name} {digest}" for name, digest in zip(self.names, self.weights, strict=True)]
        return hashlib.sha256(json.dumps([*self.options, *weights, *self.files]).encode()).hexdigest()

    def with_weights(self, new: Mapping[int, str]) -> "ModelDigest":
        """Returns the parts for the model with some whole weights replaced, given their `array_digest` by number."""
        return dataclasses.replace(self, weights=tuple((dict(enumerate(self.weights)) | dict(new)).values()))


def _description(config: DecoderConfig) -> str:
    """Returns the printed configuration without fields that have their default value.

    Fields with a default came with later families; models that do not need them keep their older digests.
    """
    stated = [
        f"{field.name}={getattr(config, field.name)!r}"
        for field in dataclasses.fields(config)
        if getattr(config, field.name) != field.default
    ]
    return f"{type(config).__name__}({', '.join(stated)})"


def weight_digest(weight: Any) -> str:
    """Returns the digest of a weight. One in codes with plain activations has the digest of its plain numbers."""
    if not is_quantized(weight):
        return array_digest(weight)
    if not weight.is_computed:
        return array_digest(widened(jax.tree.map(jnp.asarray, weight)))
    arrays = " ".join(map(array_digest, jax.tree.leaves(weight)))
    return hashlib.sha256(f"{weight.format} {jax.tree.structure(weight)} {arrays}".encode()).hexdigest()


def array_digest(array: Array | np.ndarray) -> str:
    """Returns the digest of a weight, with its dtype and shape."""
    x = np.ascontiguousarray(jax.device_get(array))
    return f"{x.dtype} {x.shape} {hashlib.sha256(x.view(np.uint8).data).hexdigest()}"
