"""Drop-in layers: the variables and numbers of Flax' own, with rows that have the bits that they have alone."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax import Array

import detjax.models.linen
import detjax.models.nnx
from tests.invariant.models import Transformer
from tests.support.bits import assert_same_bits

pytestmark = pytest.mark.usefixtures("lenient_promotion")


def _x(*shape: int) -> Array:
    return jnp.asarray(np.random.default_rng(5).standard_normal(shape), jnp.float32)


CASES: dict[str, tuple[tuple[Any, ...], dict[str, Any], Array]] = {
    "Linear": ((24, 40), {}, _x(3, 7, 24)),
    "LinearGeneral": ((24, (4, 10)), {}, _x(3, 7, 24)),
    "Embed": ((30, 24), {}, jnp.asarray([[1, 2], [4, 29], [0, 7]])),
    "LayerNorm": ((24,), {}, _x(3, 7, 24)),
    "RMSNorm": ((24,), {}, _x(3, 7, 24)),
    "Conv": ((3, 8, (3, 3)), {}, _x(3, 9, 9, 3)),
    "MultiHeadAttention": ((4, 24), {"decode": False}, _x(3, 7, 24)),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_a_layer_is_flax_layer_with_rows_of_their_own(name: str) -> None:
    arguments, options, x = CASES[name]
    layer = getattr(detjax.models.nnx, name)(*arguments, **options, rngs=nnx.Rngs(0))
    original = getattr(nnx, name)(*arguments, **options, rngs=nnx.Rngs(0))
    y = layer(x)
    np.testing.assert_allclose(y, original(x), rtol=0, atol=2e-5)
    assert_same_bits(layer(x[1:2])[0], y[1])


def test_attention_takes_a_mask_of_each_row_or_of_all() -> None:
    layer = detjax.models.nnx.MultiHeadAttention(4, 24, decode=False, rngs=nnx.Rngs(0))
    original = nnx.MultiHeadAttention(4, 24, decode=False, rngs=nnx.Rngs(0))
    x = _x(3, 7, 24)
    for mask in (nnx.make_causal_mask(jnp.ones((3, 7))), nnx.make_causal_mask(jnp.ones((1, 7)))):
        np.testing.assert_allclose(layer(x, mask=mask), original(x, mask=mask), rtol=0, atol=2e-5)


def test_layers_are_replaced_in_place() -> None:
    model, original = (Transformer(jnp.float32, nnx.Rngs(0)) for _ in range(2))
    assert detjax.models.nnx.replace_layers(model) == 11
    assert type(model.block.up) is detjax.models.nnx.Linear and type(model.block.norm) is detjax.models.nnx.LayerNorm
    assert_same_bits(nnx.state(model), nnx.state(original))
    tokens = jnp.asarray([[1, 2, 3], [4, 5, 6]])
    np.testing.assert_allclose(model(tokens), original(tokens), rtol=0, atol=2e-5)
    with pytest.raises(ValueError, match="BatchNorm has no layer to replace"):
        detjax.models.nnx.replace_layers(nnx.BatchNorm(3, rngs=nnx.Rngs(0)))


LINEN: dict[str, tuple[tuple[Any, ...], Array]] = {
    "Dense": ((40,), _x(3, 7, 24)),
    "DenseGeneral": (((4, 10),), _x(3, 7, 24)),
    "Embed": ((30, 24), jnp.asarray([[1, 2], [4, 29], [0, 7]])),
    "LayerNorm": ((), _x(3, 7, 24)),
    "RMSNorm": ((), _x(3, 7, 24)),
    "Conv": ((8, (3, 3)), _x(3, 9, 9, 3)),
    "MultiHeadDotProductAttention": ((4,), _x(3, 7, 24)),
}


@pytest.mark.parametrize("name", LINEN)
def test_a_linen_layer_is_flax_layer_with_rows_of_their_own(name: str) -> None:
    arguments, x = LINEN[name]
    layer, original = (getattr(module, name)(*arguments) for module in (detjax.models.linen, nn))
    variables = layer.init(jax.random.key(0), x)
    assert_same_bits(variables, original.init(jax.random.key(0), x))
    y = layer.apply(variables, x)
    np.testing.assert_allclose(y, original.apply(variables, x), rtol=0, atol=2e-5)
    assert_same_bits(layer.apply(variables, x[1:2])[0], y[1])


def test_linen_layers_work_within_a_model_that_trains() -> None:
    class Model(nn.Module):
        layers: Any

        @nn.compact
        def __call__(self, x: Array) -> Array:
            mask = nn.make_causal_mask(jnp.ones(x.shape[:2]))
            x = self.layers.MultiHeadDotProductAttention(4)(self.layers.LayerNorm()(x), mask=mask)
            return self.layers.Dense(8)(x)

    model, x = Model(detjax.models.linen), _x(3, 7, 24)
    variables = model.init(jax.random.key(0), x)
    # Layers are named after their classes, as Flax' own are.
    actual = jax.grad(lambda v: jnp.sum(jnp.sin(model.apply(v, x))))(variables)
    expected = jax.grad(lambda v: jnp.sum(jnp.sin(Model(nn).apply(v, x))))(variables)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=0, atol=1e-4)
