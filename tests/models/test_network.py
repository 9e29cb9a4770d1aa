"""Weights without their network: the order that programs and seeds depend on."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from detjax.bench import presets
from detjax.models import Decoder, network
from detjax.models.parts.parameters import random_weight
from tests.support.bits import assert_same_bits


@pytest.fixture(scope="module")
def model() -> Decoder:
    return Decoder(presets.config("tiny"), rngs=nnx.Rngs(3), dtype=jnp.bfloat16)


def test_weights_lie_in_the_order_of_names_without_their_parts(model: Decoder) -> None:
    names = [network.name_of(path) for path in network.parameters(model)]
    layer = ["attention_norm", "down", "gate_up", "k_norm", "mlp_norm", "output", "q_norm", "qkv"]
    layers = [f"['layers'][{index}]['{name}']" for index in range(2) for name in layer]
    assert names == ["['embedding']", "['final_norm']", *layers]


def test_a_network_with_its_weights_is_the_model(model: Decoder) -> None:
    graph, weights = network.split(model)
    assert_same_bits(nnx.state(graph.with_weights(weights)), nnx.state(model))
    assert_same_bits(graph.state(weights), nnx.state(model))
    assert_same_bits(graph.weights(nnx.state(model)), weights)


def test_models_that_differ_in_their_weights_alone_have_one_network(model: Decoder) -> None:
    other = Decoder(model.config, rngs=nnx.Rngs(4), dtype=jnp.bfloat16)
    assert network.split(other)[0] is network.split(model)[0]
    assert network.split(model.layers[1])[0] is network.split(model.layers[0])[0]


def test_weights_of_an_abstract_model_are_shapes(model: Decoder) -> None:
    graph, shapes = network.split(network.abstract(lambda: Decoder(model.config, rngs=nnx.Rngs(0))))
    assert [(x.shape, x.dtype.name) for x in shapes] == [(x.shape, "float32") for x in network.split(model)[1]]
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in shapes)
    assert isinstance(graph.with_weights(network.split(model)[1]), Decoder)


@pytest.mark.parametrize("tied", [True, False])
def test_a_seed_draws_the_embedding_then_each_layer_then_the_head(tied: bool) -> None:
    config: Any = presets.config("tiny")
    raw = config.to_hugging_face() | {"tie_word_embeddings": tied}
    model = Decoder(type(config).from_hugging_face(raw, "config.json"), rngs=nnx.Rngs(5), dtype=jnp.float16)
    rngs = nnx.Rngs(5)
    drawn = [model.embedding.weight]
    for layer in model.layers:
        drawn += [layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down]
    drawn += [] if model.lm_head is None else [model.lm_head.weight]
    assert len(drawn) == 9 + (not tied)
    for weight in drawn:
        assert_same_bits(weight[...], random_weight(rngs, weight.shape, jnp.float16)[...])
