"""Small policies for the tasks: decoders with one token per character and random weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import jax.numpy as jnp
from flax import nnx
from jaxtyping import DTypeLike

from detjax.models import Decoder, DecoderConfig, GenerationDefaults, Tokenizer
from detjax.ops import RotaryEmbedding
from detjax.rl.runs.characters import character_tokenizer

HEAD_DIM = 32
"""The width of a head."""

CHECKPOINT: Final = Path(__file__).parents[1] / "checkpoint"
"""A policy of 0.4 million parameters, included in detjax and trained by `detjax.rl.runs.recipe`.

It solves about half of each task's examples at the difficulties of `DIFFICULTIES`, a good start for reinforcement
learning.
"""

DIFFICULTIES: Final[Mapping[str, int]] = {
    "addition": 2,
    "multiplication": 1,
    "sorting": 8,
    "countdown": 1,
    "brackets": 5,
}
"""The difficulty at which `CHECKPOINT` has learned each task."""


def small_policy(
    layers: int, width: int, *, seed: int = 0, dtype: DTypeLike = jnp.bfloat16, max_positions: int = 128
) -> tuple[Decoder, Tokenizer]:
    """Returns a decoder of Qwen3's architecture with random weights, and its tokenizer.

    Args:
        width: the width of the hidden states, a multiple of `HEAD_DIM`.
        max_positions: maximum length of a sequence, in tokens.

    Raises:
        ValueError: a number is out of range.
    """
    if layers < 1 or width < HEAD_DIM or width % HEAD_DIM:
        raise ValueError(
            f"small_policy: {layers} layers of width {width}; accepted: at least one layer, and a width that is a "
            f"multiple of {HEAD_DIM}"
        )
    tokenizer, heads = character_tokenizer(), width // HEAD_DIM
    config = DecoderConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=3 * width,
        layers=layers,
        heads=heads,
        kv_heads=heads // 2 if heads % 2 == 0 else heads,
        head_dim=HEAD_DIM,
        activation="silu",
        norm_eps=1e-6,
        rope=RotaryEmbedding(HEAD_DIM, theta=10_000.0),
        windows=(None,) * layers,
        qk_norm=True,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        tied_embeddings=True,
        max_positions=max_positions,
        dtype=jnp.dtype(dtype).name,
    )
    decoder = Decoder(config, rngs=nnx.Rngs(seed), dtype=dtype)
    decoder.generation_defaults = GenerationDefaults(eos_token_ids=(len(tokenizer) - 1,))
    return decoder, tokenizer
