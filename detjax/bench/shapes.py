"""The linear layers of models that people serve: what is tuned and measured."""

import dataclasses
from collections.abc import Iterator
from typing import Final

import jax.numpy as jnp

from detjax.bench import presets
from detjax.models import DecoderConfig
from detjax.pallas.hopper.matmul.plan import Problem


@dataclasses.dataclass(frozen=True)
class Widths:
    """What the shapes of a decoder's linear layers follow from."""

    hidden: int
    queries: int
    keys: int
    mlp: int
    vocabulary: int

    @classmethod
    def of(cls, config: DecoderConfig) -> "Widths":
        """Those of a decoder."""
        return cls(
            hidden=config.hidden_size,
            queries=config.heads * config.head_dim,
            keys=config.kv_heads * config.head_dim,
            mlp=config.intermediate_size,
            vocabulary=config.vocab_size,
        )

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Outputs N and inputs K of each linear layer; gate and up are one of both's outputs."""
        return {
            "qkv": (self.queries + 2 * self.keys, self.hidden),
            "o": (self.hidden, self.queries),
            "gate+up": (2 * self.mlp, self.hidden),
            "down": (self.hidden, self.mlp),
            "lm_head": (self.vocabulary, self.hidden),
        }


MODELS: Final = {name: Widths.of(presets.config(name)) for name in ("Qwen3-8B", "Qwen3-32B", "Llama-3.1-8B")}

TOKENS: Final = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)
"""Tokens in a call, from the decode step of one request to the training batch."""


def products(widths: Widths, m: int) -> Iterator[Problem]:
    """The products of m tokens with the linear layers, bare and with the epilogues that a decoder gives them."""
    for name, (n, k) in widths.linears.items():
        yield Problem(m, n, k)
        if name == "gate+up":
            yield Problem(m, widths.mlp, k, parts=2)
        if name == "lm_head":
            yield Problem(m, n, k, out_dtype=jnp.dtype("float32"))
