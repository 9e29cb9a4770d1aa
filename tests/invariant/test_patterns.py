"""Equations that are an operation of `detjax.ops` on accelerators, and those that look like one."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import Array, lax

import detjax
from benchmarks.studies import invariant
from detjax import ops
from detjax.invariant import batched, patterns
from detjax.invariant.equations import Program
from detjax.runtime import backends, compilation
from tests.support.bits import assert_same_bits

X = jnp.asarray(np.random.default_rng(5).standard_normal((3, 4, 21)) * 6, jnp.float32)


def _program(fn: Callable[..., object], x: Array) -> Program:
    return Program.from_jaxpr(jax.make_jaxpr(fn)(x))


def _softmax(x: Array) -> Array:
    return jax.nn.softmax(x * jnp.float32(2)) + jnp.float32(1)


def _exponentials(x: Array) -> Array:
    return jnp.exp(x - lax.stop_gradient(jnp.max(x, axis=-1, keepdims=True)))


def _differentiable_maximum(x: Array) -> Array:
    e = jnp.exp(x - jnp.max(x, axis=-1, keepdims=True))
    return e / jnp.sum(e, axis=-1, keepdims=True)


def _exponentials_kept(x: Array) -> tuple[Array, Array]:
    e = _exponentials(x)
    return e / jnp.sum(e, axis=-1, keepdims=True), e


def _sum_kept(x: Array) -> tuple[Array, Array]:
    total = jnp.sum(e := _exponentials(x), axis=-1, keepdims=True)
    return e / total, total


def _sum_of_squares(x: Array) -> Array:
    e = _exponentials(x)
    return e / jnp.sum(e * e, axis=-1, keepdims=True)


def _sum_of_roots(x: Array) -> Array:
    e = _exponentials(x)
    return e / jnp.sum(jnp.sqrt(e), axis=-1, keepdims=True)


def _sum_over_another_axis(x: Array) -> Array:
    e = _exponentials(x)
    return e / jnp.sum(e, axis=0, keepdims=True)


def _maximum_of_another(x: Array) -> Array:
    e = jnp.exp(x - lax.stop_gradient(jnp.max(jnp.abs(x), axis=-1, keepdims=True)))
    return e / jnp.sum(e, axis=-1, keepdims=True)


def _maximum_with_zero(x: Array) -> Array:
    e = jnp.exp(x - lax.stop_gradient(jnp.maximum(jnp.max(x, axis=-1, keepdims=True), jnp.float32(0))))
    return e / jnp.sum(e, axis=-1, keepdims=True)


def _powers_of_two(x: Array) -> Array:
    e = jnp.exp2(x - lax.stop_gradient(jnp.max(x, axis=-1, keepdims=True)))
    return e / jnp.sum(e, axis=-1, keepdims=True)


def _upside_down(x: Array) -> Array:
    e = _exponentials(x)
    return jnp.sum(e, axis=-1, keepdims=True) / e


def test_softmax_is_that_of_ops_on_accelerators() -> None:
    program = _program(_softmax, X[0])
    (pattern,) = patterns.softmaxes(patterns.Uses.from_program(program))
    assert [program.eqns[k].primitive.name for k in pattern.equations] == [
        "reduce_max",
        "max",
        "broadcast_in_dim",
        "stop_gradient",
        "sub",
        "exp",
        "reduce_sum",
        "broadcast_in_dim",
        "div",
    ]
    (made,) = batched.run(program, [X], [])
    assert_same_bits(made, ops.softmax(X * 2) + 1)
    np.testing.assert_allclose(made, _softmax(X), rtol=0, atol=1e-6)


def test_masked_rows_have_the_functions_numbers() -> None:
    x = X.at[0, 1].set(-jnp.inf).at[1, 2, 3:].set(-jnp.inf).at[2, 0, 0].set(jnp.nan)
    (made,) = batched.run(_program(jax.nn.softmax, x[0]), [x], [])
    np.testing.assert_allclose(made, jax.nn.softmax(x), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: jax.nn.softmax(x, axis=0),
        lambda x: jax.nn.softmax(x, axis=(0, 1)),
        lambda x: jax.nn.softmax(x.astype(jnp.bfloat16)),
        lambda x: jax.nn.softmax(x, where=x > 0),
        jax.nn.log_softmax,
        _differentiable_maximum,
        _exponentials_kept,
        _sum_kept,
        _sum_of_squares,
        _sum_of_roots,
        _sum_over_another_axis,
        _maximum_of_another,
        _maximum_with_zero,
        _powers_of_two,
        _upside_down,
    ],
)
def test_what_is_not_exactly_softmax_is_none(fn: Callable[..., object]) -> None:
    assert not patterns.softmaxes(patterns.Uses.from_program(_program(fn, X[0])))


def test_gradients_are_those_of_softmax() -> None:
    def gradient(fn: Callable[..., Array]) -> Array:
        return detjax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(fn(x)))))(X)

    with backends.tracing_for("gpu"):
        actual = gradient(detjax.batch_invariant(_softmax))
    np.testing.assert_allclose(actual, gradient(_softmax), rtol=0, atol=1e-5)


def test_a_row_has_the_bits_that_it_has_alone() -> None:
    program = _program(_softmax, X[0])
    (alone,) = batched.run(program, [X[1:2]], [])
    for rows in (2, 8, 17, 64):
        assert_same_bits(batched.run(program, [jnp.tile(X, (22, 1, 1))[1 : 1 + rows]], [])[0][0], alone[0])


@pytest.mark.parametrize(
    "gated", [pytest.param(False, marks=pytest.mark.nightly, id="like GPT-2"), pytest.param(True, id="like Qwen3")]
)
def test_no_part_of_a_transformer_runs_in_a_loop_over_rows(gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    in_loops: list[str] = []
    known: list[int] = []
    search = patterns.softmaxes
    one_by_one = batched._one_by_one

    def counted(program: Program) -> list[patterns.Softmax]:
        known.append(len(search(program)))
        return search(program)

    def looped(eqn: Any, *arguments: Any) -> Any:
        in_loops.append(eqn.primitive.name)
        return one_by_one(eqn, *arguments)

    monkeypatch.setattr(patterns, "softmaxes", counted)
    monkeypatch.setattr(batched, "_one_by_one", looped)
    model = invariant.Transformer(dataclasses.replace(invariant.TINY, layers=2, gated=gated), 8, nnx.Rngs(0))
    with (
        backends.tracing_for("gpu"),
        compilation.under_contract(),
        jax.numpy_rank_promotion("allow"),
        jax.numpy_dtype_promotion("standard"),
    ):
        jax.eval_shape(detjax.batch_invariant(model), jnp.ones((3, 8), jnp.int32))
    assert not in_loops
    assert sum(known) == 2, "softmax of each layer"
