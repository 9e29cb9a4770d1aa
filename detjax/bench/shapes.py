"""The linear layers of popular models, which are tuned and measured."""

import dataclasses
from collections.abc import Iterator
from typing import Final

import jax.numpy as jnp

from detjax.bench import presets
from detjax.models import DecoderConfig
from detjax.ops.token_logprobs import HOPPER_CHUNK
from detjax.pallas.hopper.matmul.plan import Problem


@dataclasses.dataclass(frozen=True)
class Widths:
    """The widths of a decoder, which determine the shapes of its linear layers.

    Attributes:
        hidden: the width of hidden states.
        queries: the total width of the query heads.
        keys: the total width of the key heads, and of the value heads.
        mlp: the inner width of the MLP.
        vocabulary: the number of tokens.
    """

    hidden: int
    queries: int
    keys: int
    mlp: int
    vocabulary: int

    @classmethod
    def from_config(cls, config: DecoderConfig) -> "Widths":
        """Returns the widths of a decoder."""
        return cls(
            hidden=config.hidden_size,
            queries=config.heads * config.head_dim,
            keys=config.kv_heads * config.head_dim,
            mlp=config.intermediate_size,
            vocabulary=config.vocab_size,
        )

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Outputs N and inputs K of each linear layer; gate and up form one layer with the outputs of both."""
        return {
            "qkv": (self.queries + 2 * self.keys, self.hidden),
            "o": (self.hidden, self.queries),
            "gate+up": (2 * self.mlp, self.hidden),
            "down": (self.hidden, self.mlp),
            "lm_head": (self.vocabulary, self.hidden),
        }


MODELS: Final = {name: Widths.from_config(presets.config(name)) for name in ("Qwen3-8B", "Qwen3-32B", "Llama-3.1-8B")}

TOKENS: Final = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)
"""Tokens per call, from the decode step of one request to a training batch."""


def products(widths: Widths, m: int) -> Iterator[Problem]:
    """Yields the products of m tokens with the linear layers, plain and with a decoder's epilogues."""
    for name, (n, k) in widths.linears.items():
        yield Problem(m, n, k)
        if name == "gate+up":
            yield Problem(m, widths.mlp, k, parts=2)
        if name == "lm_head":
            yield Problem(m, n, k, out_dtype=jnp.dtype("float32"))


def gradient_products(widths: Widths, m: int) -> Iterator[Problem]:
    """Yields the products of the linear layers' backward pass for m tokens: gradients of inputs, and sums of weights.

    The head's tokens come in chunks, as in `detjax.ops.token_logprobs`.
    """
    for name, (n, k) in widths.linears.items():
        tokens = min(m, HOPPER_CHUNK) if name == "lm_head" else m
        yield Problem(tokens, k, n, layout="kn")
        sums = jnp.dtype("float32")
        yield Problem(n, k, tokens, out_dtype=sums, token_layout="km", layout="kn", continues=True)
