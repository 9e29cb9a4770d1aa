"""Small policies for the tests of training."""

import dataclasses
import functools
from typing import Final

import jax.numpy as jnp
from flax import nnx
from jaxtyping import DTypeLike

from detjax.bench import presets
from detjax.models import Decoder, GenerationDefaults, Tokenizer
from detjax.operands.options import Distribution
from detjax.rl.runs.characters import character_tokenizer
from detjax.rl.runs.run import RunConfig
from detjax.rl.trainer.losses import LogLikelihood
from detjax.rl.trainer.microbatches import Layout
from detjax.rl.trainer.optimizers import adamw
from detjax.rl.trainer.step import Plan
from detjax.rl.trainer.trainer import Trainer

LEARNING_RATE = 3e-3
ADAMW = adamw(LEARNING_RATE)
ENGINE: Final = {"max_samples": 4, "token_budget": 24, "max_length": 64}
"""The sizes of the engine that tests share."""


@functools.cache
def tokenizer() -> Tokenizer:
    return character_tokenizer()


def end_token() -> int:
    return len(tokenizer()) - 1


def policy(dtype: DTypeLike = jnp.bfloat16) -> Decoder:
    """A decoder of one layer for the characters of the tasks, whose distributions have some entropy."""
    config = dataclasses.replace(presets.config("tiny", 1), vocab_size=32, qk_norm=True, max_positions=128)
    decoder = Decoder(config, rngs=nnx.Rngs(0), dtype=dtype)
    # Rows of the table of unit variance, as they come, would make one token of every distribution certain.
    decoder.embedding.weight[...] = decoder.embedding.weight[...] / jnp.asarray(4, dtype)
    decoder.generation_defaults = GenerationDefaults(eos_token_ids=(end_token(),))
    return decoder


def trainer(
    layout: Layout,
    dtype: DTypeLike = jnp.bfloat16,
    distribution: Distribution = Distribution(),  # noqa: B008
) -> Trainer:
    return Trainer(policy(dtype), ADAMW, LogLikelihood(), Plan(layout), distribution=distribution)


def config(kind: str, steps: int) -> RunConfig:
    return RunConfig(
        kind=kind,  # pyright: ignore[reportArgumentType]
        tasks=(("addition", 1), ("sorting", 2)),
        steps=steps,
        prompts=8,
        samples=4,
        max_tokens=8,
        learning_rate=LEARNING_RATE,
    )
