"""A digest of a model: every number and setting that its results depend on."""

import dataclasses
import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
from jaxtyping import Array

from detjax.models.configuration.config import DecoderConfig
from detjax.models.decoder import Decoder
from detjax.models.mesh import whole_weights
from detjax.models.network import name_of, parameters
from detjax.models.text.tokenizer import Tokenizer


def digest(model: Decoder, tokenizer: Tokenizer | None = None) -> str:
    """Returns the SHA-256 of the model's weights, its configuration and its tokenizer's files, in hexadecimal digits.

    Models with equal digests compute the same function of a request, whichever files they were read from. The weights
    are copied to the host, a few at a time: a model of 16 GB takes some seconds. If the devices of several processes
    share the model, each process must call this.
    """
    weights = parameters(model)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # hashlib and transfers let other threads run
        digests = list(pool.map(_array_digest, whole_weights(model)))
    parts = [_description(model.config), repr(model.generation_defaults)]
    parts += [repr(options) for options in (model.image_options, model.video_options) if options is not None]
    parts += [f"{name_of(path)}.value {digest}" for path, digest in zip(weights, digests, strict=True)]
    files = {} if tokenizer is None else tokenizer.files
    parts += [f"{name} {hashlib.sha256(files[name]).hexdigest()}" for name in sorted(files)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


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


def _array_digest(array: Array) -> str:
    x = np.ascontiguousarray(jax.device_get(array))
    return f"{x.dtype} {x.shape} {hashlib.sha256(x.view(np.uint8).data).hexdigest()}"
