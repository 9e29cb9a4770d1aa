"""What a function may do: loops, branches, derivatives of its own, random numbers, and transformations around it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax

import detjax
from detjax import backends
from detjax.invariant import batched, loops
from detjax.invariant.equations import Program
from tests.support.bits import assert_same_bits, same_bits

W = jnp.asarray(np.random.default_rng(1).standard_normal((24, 24)) / 5, jnp.float32)


def _x(rows: int) -> Array:
    return jnp.asarray(np.random.default_rng(2).standard_normal((rows, 5, 24)), jnp.float32)


def _own_trips(w: Array, x: Array) -> Array:
    """Each row has its own number of trips, and a product with a weight in each trip."""

    def row(x: Array) -> Array:
        goes_on = lambda state: (state[0] < 9) & (jnp.max(jnp.abs(state[1])) > 0.5)  # noqa: E731
        return lax.while_loop(goes_on, lambda s: (s[0] + 1, jnp.tanh(s[1] @ w) * jnp.float32(0.8)), (0, x))[1]

    return jnp.stack([row(x[k]) for k in range(x.shape[0])])


def _shared_trips(w: Array, x: Array) -> Array:
    body = lambda state: (state[0] + 1, jnp.tanh(state[1] @ w))  # noqa: E731
    return lax.while_loop(lambda state: state[0] < 3, body, (0, x))[1]


def _layers_by_number(w: Array, x: Array) -> Array:
    """A loop that takes its weight by the loop's counter, which no row may change."""
    stack = jnp.stack([w, w * 2])
    return lax.fori_loop(0, 2, lambda k, x: jnp.tanh(x @ lax.dynamic_index_in_dim(stack, k, keepdims=False)), x)


def _shared_branch(w: Array, x: Array) -> Array:
    return lax.cond(w[0, 0] > 0, lambda x: x @ w, lambda x: x - jnp.float32(1), x)


def _own_branch(w: Array, x: Array) -> Array:
    rows = [lax.cond(x[k, 0, 0] > 0, lambda y: y @ w, lambda y: jnp.sin(y), x[k]) for k in range(x.shape[0])]
    return jnp.stack(rows)


@jax.custom_vjp
def _straight_through(x: Array) -> Array:
    return jnp.round(x)


_straight_through.defvjp(lambda x: (jnp.round(x), None), lambda _, g: (g * 3,))


def _own_gradient(w: Array, x: Array) -> Array:
    return _straight_through(x @ w)


@jax.custom_vjp
def _product_and_gradient(x: Array, w: Array) -> Array:
    return jnp.exp(x @ w)


_product_and_gradient.defvjp(
    lambda x, w: ((y := jnp.exp(x @ w)), (x, w, y)),
    lambda saved, g: ((g * saved[2]) @ saved[1].T, jnp.einsum("...ti,...to->io", saved[0], g * saved[2])),
)


def _own_gradient_of_a_product(w: Array, x: Array) -> Array:
    return _product_and_gradient(x, w)


def _transposed(w: Array, x: Array) -> Array:
    """Weights on the left, with several contracted axes, and with paired ones."""
    heads = w.reshape(24, 6, 4)
    y = jnp.einsum("io,bti->obt", w, x)
    z = jnp.einsum("obt,ohk->bthk", y, heads)
    z = jnp.einsum("bthk,hkj->bthj", z, w.reshape(6, 4, 24))
    return jnp.einsum("bthj,jhk->btk", z, heads)


def _attention(w: Array, x: Array) -> Array:
    scores = jax.nn.softmax(jnp.einsum("bti,bsi->bts", x @ w, x) / 5)
    return jnp.einsum("bts,bsi->bti", scores, x)


def _moves(w: Array, x: Array) -> Array:
    top, places = lax.top_k(x @ w, 6)
    taken = jnp.take_along_axis(x, places, axis=2)
    return jnp.concatenate([jnp.sort(taken), top, jnp.flip(jnp.cumsum(top, axis=1), 1)], axis=2)


FUNCTIONS: tuple[Callable[[Array, Array], Array], ...] = (
    _own_trips,
    _shared_trips,
    _layers_by_number,
    _shared_branch,
    _own_branch,
    _own_gradient,
    _own_gradient_of_a_product,
    _transposed,
    _attention,
    _moves,
)
_NAMES = [fn.__name__[1:] for fn in FUNCTIONS]
_DIFFERENTIABLE = [fn for fn in FUNCTIONS if fn not in (_own_trips, _shared_trips)]


@pytest.mark.parametrize("fn", FUNCTIONS, ids=_NAMES)
def test_a_row_has_the_bits_that_it_has_alone(fn: Callable[..., Array]) -> None:
    invariant = detjax.batch_invariant(fn, (None, 0))
    x = _x(5)
    y = invariant(W, x)
    np.testing.assert_allclose(y, fn(W, x), rtol=0, atol=2e-5)
    assert_same_bits(invariant(W, x[3:4])[0], y[3])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("fn", _DIFFERENTIABLE, ids=[fn.__name__[1:] for fn in _DIFFERENTIABLE])
def test_gradients_are_the_functions(fn: Callable[..., Array]) -> None:
    x = _x(3)

    def gradients(fn: Callable[..., Array], x: Array) -> Any:
        return jax.jit(jax.grad(lambda w, x: jnp.sum(jnp.sin(fn(w, x))), argnums=(0, 1)))(W, x)

    invariant = detjax.batch_invariant(fn, (None, 0))
    actual = gradients(invariant, x)
    for a, e in zip(actual, gradients(fn, x), strict=True):
        np.testing.assert_allclose(a, e, rtol=0, atol=3e-5 * max(1.0, float(jnp.abs(e).max())))
    assert_same_bits(gradients(invariant, x[2:])[1][0], actual[1][2])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("fn", FUNCTIONS, ids=_NAMES)
def test_accelerators_get_the_functions_numbers(fn: Callable[..., Array]) -> None:
    x = _x(3)
    with backends.tracing_for("gpu"):
        y = detjax.batch_invariant(fn, (None, 0))(W, x)
        np.testing.assert_allclose(y, fn(W, x), rtol=0, atol=2e-5)
        alone = detjax.batch_invariant(fn, (None, 0))(W, x[:1])
    np.testing.assert_allclose(alone[0], y[0], rtol=0, atol=2e-5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fn", [_own_gradient, _transposed, _attention, _moves])
def test_accelerators_get_the_functions_gradients(fn: Callable[..., Array]) -> None:
    def gradients(fn: Callable[..., Array]) -> Any:
        return detjax.jit(jax.grad(lambda w, x: jnp.sum(jnp.sin(fn(w, x))), argnums=(0, 1)))(W, _x(3))

    with backends.tracing_for("gpu"):
        actual = gradients(detjax.batch_invariant(fn, (None, 0)))
    for a, e in zip(actual, gradients(fn), strict=True):
        np.testing.assert_allclose(a, e, rtol=0, atol=3e-5 * max(1.0, float(jnp.abs(e).max())))


def _equations(jaxpr: Any) -> list[Any]:
    inner = [part for eqn in jaxpr.eqns for part in eqn.params.values() if hasattr(part, "eqns")]
    return [*jaxpr.eqns, *(eqn for part in inner for eqn in _equations(part))]


def test_on_accelerators_no_compiler_chooses_the_order_of_a_sum_or_fuses_a_product() -> None:
    def fn(x: Array, scale: Array) -> Array:
        return jnp.sum(x * scale + jnp.square(x), axis=1) + jnp.exp(x[:, 0]) / jnp.float32(3)

    program = Program.from_jaxpr(jax.make_jaxpr(fn)(jnp.ones((4, 24)), jnp.ones(())))
    jaxpr = jax.make_jaxpr(lambda x, scale: batched.run(program, [x], [scale]))(jnp.ones((3, 4, 24)), jnp.ones(()))
    eqns = _equations(jaxpr)
    assert not [eqn for eqn in eqns if eqn.primitive.name.startswith(("reduce", "dot", "cumsum"))]
    unsafe = [eqn for eqn in eqns if eqn.primitive.name in ("mul", "square", "integer_pow", "exp", "div")]
    assert len(unsafe) == 4
    for eqn in unsafe:
        (use,) = [other for other in eqns if any(v is eqn.outvars[0] for v in other.invars)]
        assert use.primitive.name == "add" and use.outvars[0].aval == eqn.outvars[0].aval


def test_on_accelerators_a_product_is_rounded_before_it_is_added() -> None:
    x, y, z = (jax.random.normal(jax.random.key(k), (64, 256)) for k in range(3))
    fn = lambda x, y, z: x * y + z  # noqa: E731
    program = Program.from_jaxpr(jax.make_jaxpr(fn)(x[0], y[0], z[0]))
    expected = np.asarray(x) * np.asarray(y) + np.asarray(z)
    assert not same_bits(jax.jit(fn)(x, y, z), expected), "the compiler fuses nothing here: the test says nothing"
    assert_same_bits(jax.jit(lambda *rows: batched.run(program, rows, []))(x, y, z)[0], expected)


def test_the_loop_over_one_example_is_that_over_two() -> None:
    def loop(rows: int) -> str:
        fn = lambda x: loops.run(lambda x: [jnp.sum(jnp.exp(x))], [x], [])  # noqa: E731
        (eqn,) = [eqn for eqn in jax.make_jaxpr(fn)(jnp.ones((rows, 8))).eqns if eqn.primitive.name == "while"]
        return str(eqn)

    assert loop(1) == loop(2)


def test_random_numbers_come_from_the_key_of_a_row() -> None:
    def fn(key: Array, x: Array) -> Array:
        noise = jax.vmap(lambda key: jax.random.normal(key, x.shape[1:]))(key)
        return x @ W + noise

    keys = jax.random.split(jax.random.key(3), 4)
    invariant = detjax.batch_invariant(fn)
    y = invariant(keys, _x(4))
    assert_same_bits(invariant(keys[2:3], _x(4)[2:3])[0], y[2])
    np.testing.assert_allclose(y, fn(keys, _x(4)), rtol=0, atol=1e-5)


def test_it_works_under_jit_vmap_and_scan() -> None:
    invariant = detjax.batch_invariant(_attention, (None, 0))
    x = _x(6)
    expected = invariant(W, x)
    assert_same_bits(jax.jit(invariant)(W, x), expected)
    assert_same_bits(jax.jit(jax.vmap(invariant, (None, 0)))(W, x.reshape(2, 3, 5, 24)).reshape(x.shape), expected)
    scanned = lax.scan(lambda _, x: (None, invariant(W, x)), None, x.reshape(3, 2, 5, 24))[1]
    assert_same_bits(scanned.reshape(x.shape), expected)


def test_weights_get_the_rows_gradients_in_ascending_order() -> None:
    def gradient(fn: Callable[..., Array], x: Array) -> Array:
        return jax.jit(jax.grad(lambda w: jnp.sum(fn(w, x))))(W[0])

    invariant = detjax.batch_invariant(lambda w, x: jnp.sin(x * w[None, None]), (None, 0))
    x = _x(4)
    parts = [gradient(invariant, x[k : k + 1]) for k in range(4)]
    assert_same_bits(gradient(invariant, x), parts[0] + parts[1] + parts[2] + parts[3])


def test_rows_may_lie_on_other_axes_and_results_in_trees() -> None:
    def fn(tree: dict[str, Array], scale: float) -> dict[str, Array]:
        return {"y": (tree["x"].swapaxes(0, 1) @ tree["w"]).swapaxes(0, 1) * scale, "w": tree["w"][None] * 2}

    x = _x(3).swapaxes(0, 1)
    axes = {"x": 1, "w": None}
    invariant = detjax.batch_invariant(fn, (axes, None), {"y": 1, "w": None})
    made, expected = invariant({"x": x, "w": W}, 2.0), fn({"x": x, "w": W}, 2.0)
    assert made["w"].shape == (1, 24, 24)
    np.testing.assert_allclose(made["y"], expected["y"], rtol=0, atol=1e-5)
    assert_same_bits(invariant({"x": x[:, 1:2], "w": W}, 2.0)["y"][:, 0], made["y"][:, 1])


def test_stock_numerics_serve_where_they_are_chosen() -> None:
    with detjax.use_backend("stock"):
        assert_same_bits(detjax.batch_invariant(_attention, (None, 0))(W, _x(3)), jax.jit(_attention)(W, _x(3)))
