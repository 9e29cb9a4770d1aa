"""The fixtures' models cut to a few of their layers, whose programs compile fast."""

import dataclasses
import functools

import numpy as np
from flax import nnx

from detjax.models import Decoder, DecoderConfig, load
from tests.models.hugging_face import FIXTURES


def cut(config: DecoderConfig, layers: slice) -> DecoderConfig:
    """The configuration of some of the layers."""
    windows, experts, delta = config.windows[layers], config.experts, config.delta
    rotated = config.rotated and config.rotated[layers]
    if experts is not None:
        experts = dataclasses.replace(experts, layers=experts.layers[layers])
    if delta is not None:
        delta = dataclasses.replace(delta, layers=delta.layers[layers])
    shared_keys = config.shared_keys
    if shared_keys is not None:
        first = max(layers.start, config.layers - shared_keys.readers)
        shared_keys = dataclasses.replace(shared_keys, readers=max(0, layers.stop - first))
    options = {"experts": experts, "delta": delta, "rotated": rotated, "shared_keys": shared_keys}
    return dataclasses.replace(config, layers=len(windows), windows=windows, **options)


@functools.cache
def shallow(name: str, first: int, stop: int, dtype: str = "float32") -> Decoder:
    """A fixture's model with its layers from `first` to `stop` alone. Tests do not change it."""
    model = load(FIXTURES / name, dtype=dtype, progress=False)[0]
    model.layers = nnx.List(list(model.layers)[first:stop])
    model.config = cut(model.config, slice(first, stop))
    return model


@functools.cache
def reference(name: str) -> dict[str, np.ndarray]:
    """The results of transformers."""
    return dict(np.load(FIXTURES / name / "reference.npz"))
