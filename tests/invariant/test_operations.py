"""Functions that call operations of detjax themselves, under `batch_invariant` and in traces."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import detjax
from detjax import ops
from detjax.invariant import batched, equations, loops, segments
from tests.support.bits import assert_same_bits

WEIGHT = jax.random.normal(jax.random.key(1), (256, 256)) / 16
X = jax.random.normal(jax.random.key(0), (17, 256))
FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "matmul": lambda x: ops.matmul(x, WEIGHT),
    "between others": lambda x: ops.softmax(jnp.tanh(ops.rms_norm(x, WEIGHT[0], eps=1e-6) @ WEIGHT)),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("run", [loops.run, batched.run], ids=["one by one", "all at once, as on accelerators"])
def test_rows_of_a_function_with_operations_are_those_alone(
    monkeypatch: pytest.MonkeyPatch, name: str, run: Callable[..., Any]
) -> None:
    monkeypatch.setattr(segments, "_schedule", lambda: run)
    function = FUNCTIONS[name]
    invariant = jax.jit(detjax.batch_invariant(function))
    slopes = jax.jit(jax.grad(lambda x: jnp.sum(detjax.batch_invariant(function)(x) ** 2)))
    results, gradient = invariant(X), slopes(X)
    np.testing.assert_allclose(results, function(X), atol=1e-5)
    for start, count in ((0, 1), (9, 3)):
        rows = slice(start, start + count)
        assert_same_bits(invariant(X[rows]), results[rows])
        assert_same_bits(slopes(X[rows]), gradient[rows])


def test_an_operation_is_told_by_its_file() -> None:
    (eqn,) = jax.make_jaxpr(FUNCTIONS["matmul"])(X).eqns
    assert equations.operation(eqn) == "matmul"
    assert equations.kind(eqn) is equations.Kind.OPERATION

    @jax.jit
    def matmul(x: Array, y: Array) -> Array:
        return x @ y

    (eqn,) = jax.make_jaxpr(matmul)(X, WEIGHT).eqns
    assert equations.operation(eqn) is None
    assert equations.is_call(eqn)


def test_an_operation_on_a_whole_batch_is_not_cut_into_rows() -> None:
    def function(x: Array) -> Array:
        assert len(x) == 17
        return ops.softmax(x)

    with pytest.raises(detjax.UnsafeFunction, match=r"calls softmax of detjax.ops"):
        detjax.batch_invariant(function)(X)


def test_a_trace_has_the_results_of_operations_and_finds_what_differs_after_them() -> None:
    trace = detjax.trace_digests(FUNCTIONS["between others"], 0)
    difference = detjax.bisect(trace(X)[1], trace(X[:1])[1], rows=(0, 0)).first
    assert difference is not None
    assert difference.primitive == "dot_general"
    same = detjax.trace_digests(FUNCTIONS["matmul"], 0)
    assert detjax.bisect(same(X)[1], same(X[:1])[1], rows=(0, 0)).first is None
