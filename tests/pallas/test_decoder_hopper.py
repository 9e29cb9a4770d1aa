"""The decoder on the Hopper backend: which kernels serve it, and that its bits do not follow the batch."""

import collections
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.pallas import mosaic_gpu as plgpu

import detjax
from detjax.models import Decoder
from detjax.models.config import DecoderConfig
from tests.bits import assert_same_bits

LAYERS = 2


@pytest.fixture(scope="module")
def model() -> Decoder:
    config = DecoderConfig.from_hugging_face(
        {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "vocab_size": 128,
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "hidden_act": "silu",
            "max_position_embeddings": 512,
        },
        "test",
    )
    return Decoder(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)


def kernel_counts(jaxpr: Any) -> collections.Counter[str]:
    """By name, the kernels of a program; "dot" stands for XLA's own."""
    counts: collections.Counter[str] = collections.Counter()
    for equation in jaxpr.eqns:
        meshes = equation.params.get("meshes")
        if meshes:
            counts[meshes[0].kernel_name] += 1
            continue
        if equation.primitive.name == "dot_general":
            counts["dot"] += 1
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                counts += kernel_counts(inner)
    return counts


def test_kernels_serve_every_linear_layer_and_norm(model: Decoder) -> None:
    tokens = jnp.zeros((2, 3), jnp.int32)
    with detjax.use_backend("hopper"):
        counts = kernel_counts(jax.make_jaxpr(lambda tokens: model(tokens))(tokens).jaxpr)
    # Of each layer qkv, output, gate and up, and down; at last the logits.
    assert counts["matmul"] == 4 * LAYERS + 1
    assert counts["rms_norm"] == 2 * LAYERS + 1
    assert counts["norm_rope"] == LAYERS
    # Attention's, of queries with keys and of probabilities with values.
    assert counts["dot"] == 2 * LAYERS


def test_a_request_is_the_same_alone_and_in_a_batch(model: Decoder) -> None:
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 128, (3, 4)))

    def logits(tokens: jax.Array) -> jax.Array:
        return detjax.jit(lambda tokens: model(tokens))(tokens)

    with detjax.use_backend("hopper"), plgpu.force_gpu_interpret_mode():
        together, alone = logits(tokens), logits(tokens[1:2])
    assert_same_bits(together[1:2], alone)
    with detjax.use_backend("portable"):
        np.testing.assert_allclose(together, logits(tokens), atol=0.05)
