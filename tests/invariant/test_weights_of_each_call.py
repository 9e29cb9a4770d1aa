"""Wrapped NNX modules that train: each call computes with the weights that the module has then."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import Array

import detjax
from detjax.runtime import compilation
from tests.support.bits import assert_same_bits, same_bits


class Tower(nnx.Module):
    """Layers with an activation, a norm and a switch."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(6, 6, rngs=rngs), nnx.gelu, nnx.LayerNorm(6, rngs=rngs)])
        self.dropout = nnx.Dropout(0.5, deterministic=True)

    def __call__(self, x: Array, sign: int = 1) -> Array:
        assert isinstance(sign, int)
        for layer in self.layers:
            x = layer(x)
        return sign * self.dropout(x)

    def halved(self, x: Array) -> Array:
        return 0.5 * self(x)


class Labelled(Tower):
    """A module with leaves that are not arrays."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.factor, self.label = nnx.data(3), nnx.data("kept")

    def __call__(self, x: Array, sign: int = 1) -> Array:
        assert isinstance(self.factor, int) and self.label == "kept"
        return self.factor * super().__call__(x, sign)


@detjax.batch_invariant
class Decorated(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layer = nnx.Linear(6, 6, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        return jnp.tanh(self.layer(x))


X = jnp.asarray(np.random.default_rng(0).standard_normal((3, 6)), jnp.float32)
TARGET = jnp.asarray(np.random.default_rng(1).standard_normal((3, 6)), jnp.float32)


@pytest.fixture(autouse=True)
def lenient_promotion() -> Any:
    """Flax's layers promote ranks."""
    with jax.numpy_rank_promotion("allow"):
        yield


def _optimizer(model: nnx.Module) -> nnx.Optimizer[Any]:
    return nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)


def _train(model: Any, optimizer: nnx.Optimizer[Any]) -> None:
    gradients = nnx.grad(lambda model: jnp.mean((model(X) - TARGET) ** 2))(model)
    optimizer.update(model, gradients)


COMPILED: dict[str, Callable[[Any], Callable[[Array], Array]]] = {
    "a module": lambda model: detjax.jit(detjax.batch_invariant(model)),
    "its call": lambda model: detjax.jit(detjax.batch_invariant(model.__call__)),
    "a method": lambda model: detjax.jit(detjax.batch_invariant(model.halved)),
    "not compiled": detjax.batch_invariant,
    "a method that is not compiled": lambda model: detjax.batch_invariant(model.halved),
}


@pytest.mark.parametrize("form", COMPILED)
def test_results_follow_a_module_that_trains(form: str) -> None:
    model = Labelled(nnx.Rngs(0))
    fn, optimizer = COMPILED[form](model), _optimizer(model)
    seen = []
    for _ in range(3):
        y = fn(X)
        np.testing.assert_allclose(y, model.halved(X) if "method" in form else model(X), rtol=0, atol=1e-5)
        assert_same_bits(fn(X[2:])[0], y[2])
        assert not any(same_bits(y, other) for other in seen)
        seen.append(y)
        _train(model, optimizer)


def test_results_follow_a_module_of_a_decorated_class() -> None:
    model = Decorated(nnx.Rngs(0))
    fns, optimizer = [detjax.jit(model), detjax.jit(model.__call__)], _optimizer(model)
    before = [fn(X) for fn in fns]
    _train(model, optimizer)
    for fn, old in zip(fns, before, strict=True):
        assert_same_bits(fn(X), model(X))
        assert not same_bits(fn(X), old)


def test_weights_are_no_reason_to_trace_again() -> None:
    traces = []

    class Counted(Tower):
        def __call__(self, x: Array, sign: int = 1) -> Array:
            traces.append(x.shape)
            return super().__call__(x, sign)

    model = Counted(nnx.Rngs(0))
    optimizer = _optimizer(model)
    fn = detjax.jit(detjax.batch_invariant(model))
    fn(X)
    first = len(traces)
    for _ in range(3):
        optimizer.update(model, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))
        fn(X)
    assert first and len(traces) == first
    model.dropout.rate = 0.25  # what is static is part of the program
    fn(X)
    assert len(traces) > first


@pytest.mark.parametrize("compiled", [detjax.jit, nnx.jit])
def test_a_module_may_be_an_argument(compiled: Callable[..., Any]) -> None:
    model = Decorated(nnx.Rngs(0))
    fn, optimizer = compiled(lambda model, x: detjax.batch_invariant(model)(x)), _optimizer(model)
    before = fn(model, X)
    _train(model, optimizer)
    assert not same_bits(fn(model, X), before)
    assert_same_bits(fn(model, X), detjax.batch_invariant(model)(X))


def test_a_step_that_trains_is_compiled_whole() -> None:
    model, other = Tower(nnx.Rngs(0)), Tower(nnx.Rngs(0))
    optimizers = _optimizer(model), _optimizer(other)

    @nnx.jit
    def step(model: Tower, optimizer: nnx.Optimizer[Any], x: Array, target: Array) -> None:
        gradients = nnx.grad(lambda model: jnp.sum((detjax.batch_invariant(model)(x) - target) ** 2))(model)
        optimizer.update(model, gradients)

    for _ in range(2):
        step(model, optimizers[0], X, TARGET)
        # Rows without an error add zeros to the sums over the batch.
        rest = detjax.batch_invariant(other)(X[:2])
        step(other, optimizers[1], jnp.concatenate([X, X[:2]]), jnp.concatenate([TARGET, rest]))
    assert_same_bits(nnx.state(model), nnx.state(other))


def test_nnx_jit_of_a_wrapped_module_is_refused_by_flax() -> None:
    with pytest.raises(ValueError, match="does not support bound methods"):
        nnx.jit(detjax.batch_invariant(Tower(nnx.Rngs(0))))


def test_jit_takes_its_arguments_for_a_module_too() -> None:
    model = Tower(nnx.Rngs(0))
    wrapped, x = detjax.batch_invariant(model, (0, None)), jnp.copy(X)
    expected = wrapped(X, -1)
    assert_same_bits(detjax.jit(wrapped, static_argnums=1)(X, -1), expected)
    assert_same_bits(detjax.jit(wrapped, static_argnums=-1)(X, -1), expected)
    assert_same_bits(detjax.jit(detjax.batch_invariant(model), static_argnames="sign")(X, sign=-1), expected)
    fn = detjax.batch_invariant(model)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for shardings in (sharding, (sharding,)):
        assert_same_bits(detjax.jit(fn, in_shardings=shardings)(X), fn(X))
    detjax.jit(fn, donate_argnums=0, out_shardings=sharding)(x)
    assert x.is_deleted()
    assert fn(X).shape == X.shape  # the weights are not donated


def test_a_program_that_is_compiled_beforehand_follows_too() -> None:
    model = Labelled(nnx.Rngs(0))
    program = compilation.compiled(detjax.jit(detjax.batch_invariant(model)), X)
    before = program(X)
    _train(model, _optimizer(model))
    assert not same_bits(program(X), before)
    assert_same_bits(program(X), detjax.batch_invariant(model)(X))


def test_a_compiled_module_may_be_part_of_another_program() -> None:
    model = Tower(nnx.Rngs(0))
    fn = detjax.jit(detjax.batch_invariant(model))
    assert_same_bits(detjax.jit(lambda x: fn(x))(X), fn(X))
    gradient = jax.grad(lambda x: fn(x)[0].sum())(X)
    assert_same_bits(gradient[1:], jnp.zeros_like(X[1:]))

    def loss(model: Tower) -> Array:
        return detjax.jit(detjax.batch_invariant(model))(X).sum()

    assert all(jnp.any(leaf) for leaf in jax.tree.leaves(nnx.grad(loss)(model).layers[0]))


def test_what_a_compiled_module_writes_is_refused() -> None:
    with pytest.raises(detjax.UnsafeFunction, match="writes into BatchNorm"):
        detjax.jit(detjax.batch_invariant(nnx.BatchNorm(6, rngs=nnx.Rngs(0))))(X)
