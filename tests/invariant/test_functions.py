"""Functions with loops, branches, their own derivatives, random numbers, and transformations around them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax

import detjax
from detjax.invariant import batched, loops, products
from detjax.invariant.equations import Program
from detjax.runtime import backends
from tests.invariant import functions
from tests.invariant.functions import W, inputs
from tests.support.bits import assert_same_bits, same_bits

_FEW = [functions.own_gradient, functions.transposed, functions.attention, functions.moves]


@pytest.mark.parametrize("fn", functions.ALL, ids=lambda fn: fn.__name__)
def test_a_row_has_the_bits_that_it_has_alone(fn: Callable[..., Array]) -> None:
    invariant = detjax.batch_invariant(fn, (None, 0))
    x = inputs(5)
    y = invariant(W, x)
    np.testing.assert_allclose(y, jax.jit(fn)(W, x), rtol=0, atol=2e-5)
    assert_same_bits(invariant(W, x[3:4])[0], y[3])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fn", functions.DIFFERENTIABLE, ids=lambda fn: fn.__name__)
def test_gradients_are_the_functions(fn: Callable[..., Array]) -> None:
    x = inputs(3)

    def gradients(fn: Callable[..., Array], x: Array) -> Any:
        return jax.jit(jax.grad(lambda w, x: jnp.sum(jnp.sin(fn(w, x))), argnums=(0, 1)))(W, x)

    invariant = detjax.batch_invariant(fn, (None, 0))
    actual = gradients(invariant, x)
    for a, e in zip(actual, gradients(fn, x), strict=True):
        np.testing.assert_allclose(a, e, rtol=0, atol=3e-5 * max(1.0, float(jnp.abs(e).max())))
    assert_same_bits(gradients(invariant, x[2:])[1][0], actual[1][2])


@pytest.mark.parametrize("fn", functions.ALL, ids=lambda fn: fn.__name__)
def test_accelerators_get_the_functions_numbers(fn: Callable[..., Array]) -> None:
    x = inputs(3)
    with backends.tracing_for("gpu"):
        y = detjax.batch_invariant(fn, (None, 0))(W, x)
        np.testing.assert_allclose(y, fn(W, x), rtol=0, atol=2e-5)
        alone = detjax.batch_invariant(fn, (None, 0))(W, x[:1])
    np.testing.assert_allclose(alone[0], y[0], rtol=0, atol=2e-5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fn", _FEW, ids=lambda fn: fn.__name__)
def test_accelerators_get_the_functions_gradients(fn: Callable[..., Array]) -> None:
    def gradients(fn: Callable[..., Array]) -> Any:
        return detjax.jit(jax.grad(lambda w, x: jnp.sum(jnp.sin(fn(w, x))), argnums=(0, 1)))(W, inputs(3))

    with backends.tracing_for("gpu"):
        actual = gradients(detjax.batch_invariant(fn, (None, 0)))
    for a, e in zip(actual, gradients(fn), strict=True):
        np.testing.assert_allclose(a, e, rtol=0, atol=3e-5 * max(1.0, float(jnp.abs(e).max())))


def test_a_transposed_weight_is_read_as_it_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    def recorded(x: Array, w: Array, **options: Any) -> Array:
        given.append((w.shape, options["layout"]))
        return original(x, w, **options)

    original = products.ops.matmul
    monkeypatch.setattr(products.ops, "matmul", recorded)
    table = jnp.asarray(np.random.default_rng(3).standard_normal((7, 24)), jnp.float32)
    logits = detjax.batch_invariant(lambda table, x: x @ table.T, (None, 0))(table, inputs(3))
    assert given == [((7, 24), "nk")]
    np.testing.assert_allclose(logits, inputs(3) @ table.T, rtol=0, atol=2e-5)


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


def test_on_accelerators_no_compiler_chooses_among_zeros_of_both_signs() -> None:
    zeros = np.random.default_rng(0).choice(np.float32([0.0, -0.0]), (300, 128))
    extremes = lambda x: (x.max(-1), (-x).max(-1), x.reshape(4, 32).min(0), lax.cummax(x))  # noqa: E731
    program = Program.from_jaxpr(jax.make_jaxpr(extremes)(zeros[0]))
    stock = jax.jit(jax.vmap(extremes))
    pairs = zip(stock(zeros[:1]), stock(zeros), strict=True)
    assert not all(same_bits(alone[:1], among[:1]) for alone, among in pairs), "nothing moves: the test says nothing"
    run = jax.jit(lambda x: batched.run(program, [x], []))
    made = run(zeros)
    for rows in (1, 2, 33, 257):
        assert_same_bits(run(zeros[:rows]), [x[:rows] for x in made])
    # Limits of dtypes without infinities, and axes whose size is not a power of two:
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn):
        x = jnp.asarray(np.random.default_rng(1).standard_normal((3, 2, 13)), dtype)
        for fn in (
            lambda x: x.max(-1),
            lambda x: x.min((0, 1)),
            lambda x: (x - x).max(-1),
            lambda x: (-abs(x)).max(-1),
            lambda x: abs(x).min(-1),
        ):
            one = Program.from_jaxpr(jax.make_jaxpr(fn)(x[0]))
            (largest,) = jax.jit(lambda x, one=one: batched.run(one, [x], []))(x)
            np.testing.assert_array_equal(largest, jax.vmap(fn)(x))


ALONG_A_ROW: dict[str, Callable[[Array], Array]] = {
    "a sum": lambda x: x.sum(1),
    "a sum over all": lambda x: x.sum(),
    "a running sum": lambda x: lax.cumsum(x, 1),
    "a running sum backwards": lambda x: lax.cumsum(x, 0, reverse=True),
    "so far largest": lambda x: lax.cummax(x, 1),
    "so far largest backwards": lambda x: lax.cummax(x, 0, reverse=True),
    "so far smallest backwards": lambda x: lax.cummin(x, 1, reverse=True),
    "a largest negative number": lambda x: (-abs(x)).max(0),
    "a product": lambda x: x.prod(1),
    "a largest of windows": lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2), (1, 2), "SAME"),
}


def test_on_accelerators_what_works_along_a_row_has_the_functions_numbers() -> None:
    x = jnp.asarray(np.random.default_rng(4).standard_normal((3, 2, 13)), jnp.float32)
    with jax.numpy_dtype_promotion("standard"):
        whole = lambda x: {name: fn(x) for name, fn in ALONG_A_ROW.items()}  # noqa: E731
        program = Program.from_jaxpr(jax.make_jaxpr(whole)(x[0]))
        made = jax.jit(lambda x: batched.run(program, [x], []))(x)
        expected = jax.tree.leaves(jax.vmap(whole)(x))
    for name, a, e in zip(sorted(ALONG_A_ROW), made, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=0, atol=1e-5, err_msg=name)


def test_on_accelerators_narrow_numbers_are_added_in_float32() -> None:
    x = jnp.full((2, 300), 1, jnp.bfloat16)
    program = Program.from_jaxpr(jax.make_jaxpr(lambda x: lax.reduce_sum_p.bind(x, axes=(0,), out_sharding=None))(x[0]))
    (made,) = batched.run(program, [x], [])
    assert made.dtype == jnp.bfloat16 and made.tolist() == [300.0, 300.0]


def test_on_accelerators_a_product_is_rounded_before_it_is_added() -> None:
    x, y, z = (jax.random.normal(jax.random.key(k), (64, 256)) for k in range(3))
    fn = lambda x, y, z: x * y + z  # noqa: E731
    program = Program.from_jaxpr(jax.make_jaxpr(fn)(x[0], y[0], z[0]))
    expected = np.asarray(x) * np.asarray(y) + np.asarray(z)
    assert not same_bits(jax.jit(fn)(x, y, z), expected), "the compiler fuses nothing here: the test says nothing"
    assert_same_bits(jax.jit(lambda *rows: batched.run(program, rows, []))(x, y, z)[0], expected)


@pytest.mark.parametrize(
    "options",
    [{"mode": "clip"}, {"mode": "fill"}, {"mode": "fill", "fill_value": 5.0}, {"mode": "promise_in_bounds"}],
    ids=str,
)
def test_rows_of_a_table_are_those_of_the_function_in_every_mode(options: dict[str, Any]) -> None:
    table = W[:7, :3]
    tokens = (
        jnp.asarray([[0, 6], [3, 2], [6, 0]]) if "promise" in str(options) else jnp.asarray([[0, 6], [7, 2], [99, 0]])
    )

    def fn(table: Array, tokens: Array) -> Array:
        return table.at[tokens].get(**options)

    made = detjax.batch_invariant(fn, (None, 0))(table, tokens)
    assert_same_bits(made, fn(table, tokens))


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
    y = invariant(keys, inputs(4))
    assert_same_bits(invariant(keys[2:3], inputs(4)[2:3])[0], y[2])
    np.testing.assert_allclose(y, fn(keys, inputs(4)), rtol=0, atol=1e-5)


def test_it_works_under_jit_vmap_and_scan() -> None:
    invariant = detjax.batch_invariant(functions.attention, (None, 0))
    x = inputs(6)
    expected = invariant(W, x)
    assert_same_bits(jax.jit(invariant)(W, x), expected)
    assert_same_bits(jax.jit(jax.vmap(invariant, (None, 0)))(W, x.reshape(2, 3, 5, 24)).reshape(x.shape), expected)
    scanned = lax.scan(lambda _, x: (None, invariant(W, x)), None, x.reshape(3, 2, 5, 24))[1]
    assert_same_bits(scanned.reshape(x.shape), expected)


@pytest.mark.parametrize(
    "derivative",
    [
        lambda fn, x: jax.jvp(fn, (x,), (x,)),
        lambda fn, x: jax.jit(lambda x: jax.jvp(fn, (x,), (x,)))(x),
        lambda fn, x: jax.jacfwd(fn)(x),
        lambda fn, x: jax.linearize(fn, x)[1](x),
        lambda fn, x: jax.hessian(lambda x: jnp.sum(fn(x)))(x),
        lambda fn, x: jax.grad(lambda x: jnp.sum(jax.grad(lambda x: jnp.sum(fn(x)))(x)))(x),
    ],
)
@pytest.mark.parametrize("fn", [jnp.tanh, lambda x: jnp.tanh(x @ W)])
def test_derivatives_that_there_are_not_are_refused_by_name(derivative: Any, fn: Callable[[Array], Array]) -> None:
    with pytest.raises(
        TypeError, match=r"detjax\.batch_invariant: .*accepted: jax\.grad, jax\.vjp or jax\.jacrev, once"
    ):
        derivative(detjax.batch_invariant(fn), inputs(2)[:, :1])


def test_jacobians_in_reverse_mode_are_the_functions() -> None:
    x = inputs(2)[:, :1]
    made = jax.jacrev(detjax.batch_invariant(lambda x: jnp.tanh(x @ W)))(x)
    np.testing.assert_allclose(made, jax.jacrev(lambda x: jnp.tanh(x @ W))(x), rtol=0, atol=1e-5)


def test_weights_get_the_rows_gradients_in_ascending_order() -> None:
    def gradient(fn: Callable[..., Array], x: Array) -> Array:
        return jax.jit(jax.grad(lambda w: jnp.sum(fn(w, x))))(W[0])

    invariant = detjax.batch_invariant(lambda w, x: jnp.sin(x * w[None, None]), (None, 0))
    x = inputs(4)
    parts = [gradient(invariant, x[k : k + 1]) for k in range(4)]
    assert_same_bits(gradient(invariant, x), parts[0] + parts[1] + parts[2] + parts[3])


@pytest.mark.parametrize("target", ["cpu", "gpu"])
def test_gradients_of_narrow_weights_are_added_in_float32_and_rounded_once(target: Any) -> None:
    x = jnp.broadcast_to(jnp.asarray([256, 1, 1, 1], jnp.bfloat16)[:, None], (4, 3))
    with backends.tracing_for(target):
        invariant = detjax.batch_invariant(lambda w, x: x * w[None], (None, 0))
        gradients = detjax.jit(jax.grad(lambda w: jnp.sum(invariant(w, x).astype(jnp.float32))))
        gradient = gradients(jnp.ones(3, jnp.bfloat16))
    assert gradient.dtype == jnp.bfloat16 and gradient.tolist() == [260.0] * 3


def test_rows_may_lie_on_other_axes_and_results_in_trees() -> None:
    def fn(tree: dict[str, Array], scale: float) -> dict[str, Array]:
        return {"y": (tree["x"].swapaxes(0, 1) @ tree["w"]).swapaxes(0, 1) * scale, "w": tree["w"][None] * 2}

    x = inputs(3).swapaxes(0, 1)
    axes = {"x": 1, "w": None}
    invariant = detjax.batch_invariant(fn, (axes, None), {"y": 1, "w": None})
    made, expected = invariant({"x": x, "w": W}, 2.0), fn({"x": x, "w": W}, 2.0)
    assert made["w"].shape == (1, 24, 24)
    np.testing.assert_allclose(made["y"], expected["y"], rtol=0, atol=1e-5)
    assert_same_bits(invariant({"x": x[:, 1:2], "w": W}, 2.0)["y"][:, 0], made["y"][:, 1])


def test_stock_numerics_serve_where_they_are_chosen() -> None:
    x = inputs(3)
    with detjax.use_backend("stock"):
        made = detjax.batch_invariant(functions.attention, (None, 0))(W, x)
        assert_same_bits(made, jax.jit(functions.attention)(W, x))
