"""Small models and batches for tests of training, and two whole steps as a pytree of all that they give."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from detjax.bench import presets
from detjax.models import Decoder, DecoderConfig
from detjax.models.configuration.config import Multipliers
from detjax.models.network import Network, Weights, split
from detjax.models.parts.grouped_experts import GroupedExpertsOptions
from detjax.models.parts.latent_attention import LatentOptions
from detjax.ops import RotaryEmbedding
from detjax.rl.trainer.gradients import Loss
from detjax.rl.trainer.losses import ClippedRatio
from detjax.rl.trainer.microbatches import Sample
from detjax.rl.trainer.optimizers import adamw
from detjax.rl.trainer.placement import Placement, on_host
from detjax.rl.trainer.step import Plan, batch_gradients
from detjax.rl.trainer.train_state import initial_state, update, weights_of

VOCABULARY = 64
ADAMW = adamw(1e-2, weight_decay=0.1)
LOSS = ClippedRatio(0.3, 0.5)
"""The loss of most tests, which share its programs."""


def _config(**options: Any) -> DecoderConfig:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "heads": 2, "kv_heads": 1}
    small = dataclasses.replace(presets.config("tiny", 1), **sizes, head_dim=16, rope=RotaryEmbedding(16, 10_000.0))
    return dataclasses.replace(small, **options)


CONFIGS = {
    "qwen3, tied": _config(),
    "qwen2": _config(architecture="Qwen2ForCausalLM", qk_norm=False, qkv_bias=True, tied_embeddings=False),
    "gemma3": _config(
        architecture="Gemma3ForCausalLM",
        windows=(11,),
        activation="gelu_tanh",
        window_rope=RotaryEmbedding(16, 100.0),
        query_pre_attn_scalar=20,
        logit_soft_cap=2.0,
    ),
    "granite": _config(
        architecture="GraniteForCausalLM",
        qk_norm=False,
        multipliers=Multipliers(embedding=1.7, scores=0.3, residual=0.6, logits_divisor=1.3),
    ),
    "deepseek-v3": _config(
        architecture="DeepseekV3ForCausalLM",
        qk_norm=False,
        latent=LatentOptions(q_rank=20, kv_rank=12, nope_dim=10, value_dim=14),
        rope=RotaryEmbedding(8, 10_000.0),
        experts=GroupedExpertsOptions(
            experts=8,
            chosen=3,
            inner_width=16,
            normalized=True,
            layers=(True,),
            groups=4,
            kept_groups=2,
            factor=2.5,
            shared=1,
        ),
    ),
}


@functools.cache
def network(name: str, dtype: str) -> tuple[Network[Decoder], Weights]:
    """The network of one of `CONFIGS`, and random weights; biases and norms are random, too."""
    net, weights = split(Decoder(CONFIGS[name], rngs=nnx.Rngs(0), dtype=dtype))
    random = np.random.default_rng(1)
    weights = tuple(x + jnp.asarray(random.standard_normal(x.shape) / 8, x.dtype) for x in weights)
    # Where a trainer has them, so that all tests share the programs of its second step.
    return net, Placement().everywhere(weights)


def samples(count: int, longest: int = 60, seed: int = 0) -> list[Sample]:
    """Sequences of 2 to `longest` tokens; the first has a prompt of one token, the second is the longest."""
    random = np.random.default_rng(seed)

    def one(tokens: int, completion: int) -> Sample:
        ids = random.integers(0, VOCABULARY, tokens).astype(np.int32)
        weights, old = random.standard_normal((2, completion)).astype(np.float32)
        return Sample(ids, weights, -4 + old)

    lengths = [17, longest, *random.integers(2, longest, count - 2).tolist()][:count]
    completions = [16, *(max(1, length // 2) for length in lengths[1:])]
    return [one(*pair) for pair in zip(lengths, completions, strict=True)]


def two_steps(
    model: tuple[Network[Decoder], Weights],
    batches: Sequence[Sequence[Sample]],
    plan: Plan,
    *,
    loss: Loss = LOSS,
    update_plan: Plan | None = None,
) -> dict[str, Any]:
    """All results of two training steps: gradients, logprobs, norms, masters, moments and weights.

    Updates use `update_plan`, so that plans with equal updates share its program.
    """
    (net, weights), given = model, []
    placement = (plan if update_plan is None else update_plan).placement
    state = initial_state(weights, ADAMW, placement, trained=net.trained)
    weights = weights_of(state, weights, placement)
    for batch in batches:
        gradients = batch_gradients(net, weights, batch, loss, plan)
        host = jax.tree.map(on_host, gradients.leaves)
        state, weights, norm = update(state, gradients.leaves, weights, ADAMW, placement, max_norm=1.0)
        given.append({"gradients": host, "logprobs": gradients.logprobs, "norm": norm})
    return jax.tree.map(on_host, {"steps": given, "state": state, "weights": weights})
