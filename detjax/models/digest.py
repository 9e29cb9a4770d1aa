"""What a model is, in one digest: every number and setting that its answers follow from."""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array

from detjax.models.decoder import Decoder
from detjax.models.tokenizer import Tokenizer


def digest(model: Decoder, tokenizer: Tokenizer | None = None) -> str:
    """SHA-256 of the model's weights, its configuration and its tokenizer's files, in hexadecimal digits.

    Models of one digest are one function of a request, whichever files they were read from. Weights come to the host
    for it, a few at a time: a model of 16 GB takes some seconds.
    """
    weights = jax.tree.leaves_with_path(nnx.state(model))
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # hashlib and transfers let other threads run
        of_weights = list(pool.map(_of_array, [leaf for _, leaf in weights]))
    parts = [repr(model.config), repr(model.generation_defaults)]
    parts += [f"{jax.tree_util.keystr(path)} {own}" for (path, _), own in zip(weights, of_weights, strict=True)]
    files = {} if tokenizer is None else tokenizer.files
    parts += [f"{name} {hashlib.sha256(files[name]).hexdigest()}" for name in sorted(files)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _of_array(array: Array) -> str:
    found = np.ascontiguousarray(jax.device_get(array))
    return f"{found.dtype} {found.shape} {hashlib.sha256(found.view(np.uint8).data).hexdigest()}"
