"""Every idiom of docs/idioms.md is accepted, with the bits of each row alone, or refused, as the page says."""

import contextlib
from collections.abc import Callable, Container, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import Array

import detjax
from tests.invariant import idioms  # noqa: F401  (fills the registry)
from tests.invariant.idioms import registry
from tests.invariant.idioms.registry import Idiom
from tests.support.bits import assert_same_bits

ACCEPTED = [name for name, idiom in registry.ALL.items() if idiom.is_accepted]
REFUSED = [name for name, idiom in registry.ALL.items() if not idiom.is_accepted]
COSTLY = frozenset(
    (
        "cholesky cumulative depthwise_convolution dot_product_attention einsum_of_four experts_by_one_hot "
        "experts_by_sorting expm float16 grad_inside graphs hessian_inside inverse_and_determinant lengths_and_mask "
        "linen_lstm linen_scan_and_remat nnx_attention nnx_ensemble nnx_layers nnx_rnn quantile statistics u_net"
    ).split()
)
"""Idioms whose parts others have: their bits are compared in nightly runs, and CI checks that they are accepted."""

pytestmark = pytest.mark.usefixtures("lenient_promotion")


def _rows(idiom: Idiom, chosen: np.ndarray) -> tuple[Array, ...]:
    return tuple(jnp.asarray(values[chosen]) for values in registry.ROWS[idiom.rows])


def _among(rows: int, position: int) -> np.ndarray:
    """The first row at this position, among others."""
    return np.insert(np.arange(1, rows), position, 0)


def _plain(fn: Any) -> Callable[..., Any]:
    """Returns a function that may be traced: a module of Flax has to be made within the trace that changes it."""
    if not isinstance(fn, nnx.Module):
        return fn
    leaves, structure = jax.tree.flatten(fn)
    return lambda *rows: jax.tree.unflatten(structure, leaves)(*rows)


def _results(idiom: Idiom, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a compiled function of rows, with the gradient of its floating-point ones if there is one."""
    if not idiom.has_gradient:
        return jax.jit(fn)

    @jax.jit
    def results(first: Array, *others: Array) -> Any:
        y, pull = jax.vjp(lambda first: fn(first, *others), first)
        # Every row has the same cotangent, which no compiler computes.
        cotangents = jax.tree.map(lambda y: jnp.asarray(np.broadcast_to(_cotangent(y), y.shape)), y)
        return y, pull(cotangents)[0]

    return results


def _cotangent(y: Array) -> np.ndarray:
    return np.random.default_rng(7).standard_normal(y.shape[1:]).astype(y.dtype)


def _check(name: str, batches: Sequence[int]) -> None:
    """Compares a row among others with the row alone, in bits, and the last batch with JAX's own results."""
    idiom = registry.ALL[name]
    with jax.enable_x64(True) if idiom.has_float64 else contextlib.nullcontext():
        fn = idiom.make()
        results = _results(idiom, idiom.around(detjax.batch_invariant(fn)))
        given = _rows(idiom, np.zeros(1, int))
        actual = results(*given)
        alone = jax.tree.map(lambda y: y[0], actual)
        for rows in batches:
            for position in (0, rows // 2, rows - 1):
                given = _rows(idiom, _among(rows, position))
                actual = results(*given)
                assert_same_bits(jax.tree.map(lambda y, at=position: y[at], actual), alone)
        for a, e in zip(*map(jax.tree.leaves, (actual, _results(idiom, _plain(fn))(*given))), strict=True):
            tolerance = {"bfloat16": 2e-2, "float16": 2e-3}.get(str(e.dtype), 1e-5)
            np.testing.assert_allclose(
                np.asarray(a, e.dtype), e, rtol=0, atol=tolerance * max(1.0, float(jnp.abs(e).max()))
            )
    jax.effects_barrier()


def _cases(*, quick: Container[str]) -> list[Any]:
    return [name if name in quick else pytest.param(name, marks=pytest.mark.nightly) for name in ACCEPTED]


@pytest.mark.parametrize("name", _cases(quick=set(ACCEPTED) - COSTLY))
def test_an_accepted_idiom_has_the_bits_and_gradients_of_each_row_alone(name: str) -> None:
    _check(name, [33])


@pytest.mark.parametrize("name", _cases(quick=("custom_vjp", "top_k")))
def test_an_accepted_idiom_has_them_in_small_batches(name: str) -> None:
    _check(name, [2, 3, 7])


@pytest.mark.parametrize("name", sorted(COSTLY))
def test_a_costly_idiom_is_accepted(name: str) -> None:
    idiom = registry.ALL[name]
    assert idiom.is_accepted
    jax.eval_shape(detjax.batch_invariant(idiom.make()), *_rows(idiom, _among(3, 0)))


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_idiom_is_refused(name: str) -> None:
    idiom = registry.ALL[name]
    fn = detjax.batch_invariant(idiom.make())
    with pytest.raises(detjax.UnsafeFunction, match=idiom.message):
        jax.eval_shape(fn, *_rows(idiom, _among(3, 0)))
