"""The linear layers of popular models, which are tuned and measured."""

from collections.abc import Iterator
from typing import Final

import jax.numpy as jnp

from detjax.bench import presets
from detjax.contract import SOFTMAX_BLOCK
from detjax.models import DecoderConfig
from detjax.operands.numerics import ceil_div
from detjax.ops.token_logprobs import HOPPER_CHUNK
from detjax.pallas.hopper.matmul.plan import Problem

MODELS: Final = {name: presets.config(name) for name in ("Qwen3-8B", "Qwen3-32B", "Llama-3.1-8B", "Qwen3-30B-A3B")}

TOKENS: Final = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)
"""Tokens per call, from the decode step of one request to a training batch."""


def linears(config: DecoderConfig) -> dict[str, tuple[int, int]]:
    """Returns outputs N and inputs K of each linear layer; gate and up form one layer with the outputs of both.

    A model of experts has a router in place of an MLP. The schedules of experts are not tuned.
    """
    hidden, queries = config.hidden_size, config.heads * config.head_dim
    mlp = {"gate+up": (2 * config.intermediate_size, hidden), "down": (hidden, config.intermediate_size)}
    return {
        "qkv": (queries + 2 * config.kv_heads * config.head_dim, hidden),
        "o": (hidden, queries),
        **(mlp if config.experts is None else {"router": (config.experts.experts, hidden)}),
        "lm_head": (config.vocab_size, hidden),
    }


def products(config: DecoderConfig, m: int, devices: int = 1) -> Iterator[Problem]:
    """Yields what each of the devices that share a model computes of the products of m tokens with the linear layers.

    The products are plain and with a decoder's epilogues: a residual is added to the results of attention and MLP.
    """
    float32 = jnp.dtype("float32")
    for name, (n, k) in linears(config).items():
        if name == "router":  # all devices compute all logits
            yield Problem(m, n, k, out_dtype=float32)
            continue
        # The head's shares end with whole blocks of the softmax.
        n = ceil_div(n, devices * SOFTMAX_BLOCK) * SOFTMAX_BLOCK if name == "lm_head" and devices > 1 else n // devices
        yield Problem(m, n, k, residual_dtype=Problem.dtype if name in ("o", "down") else None)
        if name == "gate+up":
            yield Problem(m, n // 2, k, parts=2)
        if name == "lm_head":
            yield Problem(m, n, k, out_dtype=float32)


def gradient_products(config: DecoderConfig, m: int) -> Iterator[Problem]:
    """Yields the products of the linear layers' backward pass for m tokens: gradients of inputs, and sums of weights.

    The head's tokens come in chunks, as in `detjax.ops.token_logprobs`.
    """
    for name, (n, k) in linears(config).items():
        tokens = min(m, HOPPER_CHUNK) if name == "lm_head" else m
        yield Problem(tokens, k, n, layout="kn")
        sums = jnp.dtype("float32")
        yield Problem(n, k, tokens, out_dtype=sums, token_layout="km", layout="kn", continues=True)
