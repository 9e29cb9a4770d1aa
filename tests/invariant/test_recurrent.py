"""Recurrent networks of NNX, whose calls raise counters of random streams, and attention with a cache."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import Array

import detjax
from tests.support.bits import assert_same_bits

WIDTH = 8


pytestmark = pytest.mark.usefixtures("lenient_promotion")


def _inputs(rows: int = 5) -> Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal((rows, 7, WIDTH)), jnp.float32)


def _recurrent(name: str) -> Any:
    rngs = nnx.Rngs(0)
    if name == "Bidirectional":
        return nnx.Bidirectional(*(nnx.RNN(nnx.GRUCell(WIDTH, 16, rngs=rngs)) for _ in range(2)), rngs=rngs)
    return nnx.RNN(getattr(nnx, name)(WIDTH, 16, rngs=rngs), rngs=rngs)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["LSTMCell", "OptimizedLSTMCell", "GRUCell", "SimpleCell", "Bidirectional"])
def test_a_recurrent_networks_rows_have_the_bits_that_they_have_alone(name: str) -> None:
    model, x = _recurrent(name), _inputs()
    invariant = detjax.batch_invariant(model)
    y = invariant(x)
    np.testing.assert_allclose(y, model(x), rtol=0, atol=1e-6)
    assert_same_bits(invariant(x[3:4])[0], y[3])


def test_the_last_state_of_a_sequence_with_a_length_is_its_own() -> None:
    model: Any = nnx.RNN(nnx.LSTMCell(WIDTH, 16, rngs=nnx.Rngs(0)), return_carry=True)
    invariant = detjax.batch_invariant(lambda model, x, lengths: model(x, seq_lengths=lengths), (None, 0, 0))
    x, lengths = _inputs(), jnp.array([3, 7, 1, 2, 5])
    (state, _), _ = invariant(model, x, lengths)
    np.testing.assert_allclose(state, model(x, seq_lengths=lengths)[0][0], rtol=0, atol=1e-6)
    (alone, _), _ = invariant(model, x[2:3], lengths[2:3])
    assert_same_bits(alone[0], state[2])


class _Encoder(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.recurrent = nnx.RNN(nnx.GRUCell(WIDTH, WIDTH, rngs=rngs))
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        made: Any = self.recurrent(x)
        return self.dropout(made)


def test_dropout_beside_it_is_refused_in_training_with_its_line() -> None:
    model = _Encoder()
    line = _Encoder.__call__.__code__.co_firstlineno + 2
    with pytest.raises(detjax.UnsafeFunction, match=rf"dropout.*count.*random numbers.*test_recurrent\.py:{line}"):
        detjax.batch_invariant(model)(_inputs())
    model.eval()
    assert detjax.batch_invariant(model)(_inputs()).shape == (5, 7, WIDTH)


@pytest.mark.filterwarnings("ignore:carry_init is provided")
@pytest.mark.parametrize("backend", [None, "stock"])
def test_a_first_state_of_random_numbers_is_refused(backend: Any) -> None:
    model = nnx.RNN(nnx.GRUCell(WIDTH, 16, rngs=nnx.Rngs(0), carry_init=nnx.initializers.normal()))
    with detjax.use_backend(backend), pytest.raises(detjax.UnsafeFunction, match=r"rngs\.count.*draws, at .*\.py:\d+"):
        detjax.batch_invariant(model)(_inputs())


def test_attention_decodes_with_a_cache_that_is_an_argument_with_rows() -> None:
    x = _inputs()
    model = nnx.MultiHeadAttention(4, WIDTH, 16, decode=True, rngs=nnx.Rngs(0))
    model.init_cache(x.shape)
    graph, cache, weights = nnx.split(model, nnx.Cache, ...)

    def step(cache: Any, weights: Any, x: Array) -> Any:
        model = nnx.merge(graph, cache, weights)
        return model(x), nnx.state(model, nnx.Cache)

    axes = jax.tree.map(lambda x: 0 if x.ndim else None, cache)
    invariant = detjax.batch_invariant(step, (axes, None, 0), (0, axes))
    one = lambda cache: jax.tree.map(lambda x: x[2:3] if x.ndim else x, cache)  # noqa: E731
    alone, expected = one(cache), jax.tree.map(jnp.copy, cache)
    for time in range(3):
        y, cache = invariant(cache, weights, x[:, time : time + 1])
        original, expected = step(expected, weights, x[:, time : time + 1])
        np.testing.assert_allclose(y, original, rtol=0, atol=1e-6)
        y_alone, alone = invariant(alone, weights, x[2:3, time : time + 1])
        assert_same_bits(y_alone[0], y[2])
        jax.tree.map(assert_same_bits, one(cache), alone)
