"""Checkpoints cut to their first layer, which compile fast."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
from flax import nnx

from detjax import models
from detjax.models import Decoder, Tokenizer


def one_layer(directory: Path, seed: int) -> tuple[Decoder, Tokenizer]:
    """A decoder of one layer with random bfloat16 weights, and the checkpoint's tokenizer and defaults."""
    model, tokenizer = models.load(directory, dtype="bfloat16", progress=False)
    assert tokenizer is not None and model.generation_defaults is not None
    config = dataclasses.replace(model.config, layers=1, windows=(None,))
    small = Decoder(config, rngs=nnx.Rngs(seed), dtype=jnp.bfloat16)
    small.generation_defaults = model.generation_defaults
    return small, tokenizer
