"""Functions that cannot be traced for one row: the program of one row is cut out of the batch's program."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax
from jax.sharding import Mesh, PartitionSpec

import detjax
from tests.invariant import functions, models
from tests.invariant.functions import W, inputs
from tests.support.bits import assert_same_bits, same_bits

_APART = [fn for fn in functions.ALL if fn not in (functions.own_trips, functions.own_branch)]
"""Functions that do not split the batch."""


def _refusing_one(fn: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    def checked(w: Array, x: Array) -> Array:
        if x.shape[0] < 2:
            raise ValueError("one row is not a batch")
        return fn(w, x)

    return checked


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fn", _APART, ids=lambda fn: fn.__name__)
def test_a_row_has_the_bits_of_the_function_traced_for_one(fn: Callable[..., Array]) -> None:
    x = inputs(5)
    expected = detjax.batch_invariant(fn, (None, 0))(W, x)
    assert_same_bits(detjax.batch_invariant(fn, (None, 0), traced_for="batch")(W, x), expected)
    with pytest.warns(detjax.TracedForBatchWarning, match=r"one row \(ValueError: one row is not a batch\)"):
        cut = detjax.batch_invariant(_refusing_one(fn), (None, 0))(W, x[3:4])
    assert_same_bits(cut[0], expected[3])


@pytest.mark.usefixtures("lenient_promotion")
@pytest.mark.parametrize("sizes", [((3, 1),), pytest.param(((1, 0), (2, 1), (17, 3)), marks=pytest.mark.nightly)])
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "name",
    ["linen convolution", *(pytest.param(x, marks=pytest.mark.nightly) for x in ("nnx transformer", "scanned layers"))],
)
def test_models_have_the_bits_of_those_traced_for_one_row(name: str, dtype: str, sizes: Any) -> None:
    case = models.load(name, jnp.dtype(dtype))
    cut = detjax.batch_invariant(case.fn, case.axes, traced_for="batch")
    alone = detjax.batch_invariant(case.fn, case.axes)(case.weights, *case.inputs(1, 0))[0]
    for rows, position in sizes:
        assert_same_bits(cut(case.weights, *case.among(rows, position))[position], alone)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "fn", [functions.own_gradient_of_a_product, functions.attention, functions.transposed], ids=lambda fn: fn.__name__
)
def test_gradients_are_those_of_the_function_traced_for_one_row(fn: Callable[..., Array]) -> None:
    def gradients(traced_for: Any) -> Any:
        invariant = detjax.batch_invariant(fn, (None, 0), traced_for=traced_for)
        return jax.jit(jax.grad(lambda w, x: jnp.sum(jnp.sin(invariant(w, x))), argnums=(0, 1)))(W, inputs(3))

    if fn is functions.own_gradient_of_a_product:
        with pytest.raises(detjax.UnsafeFunction, match=r"custom_vjp_call .*own gradient.*functions\.py:"):
            gradients("batch")
        return
    for actual, expected in zip(gradients("batch"), gradients("row"), strict=True):
        assert_same_bits(actual, expected)


@jax.custom_jvp
def _tripled(x: Array) -> Array:
    return jnp.floor(x)


@_tripled.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return _tripled(*primals), 3 * tangents[0]


@pytest.mark.parametrize("traced_for", ["row", "batch"])
def test_a_derivative_of_its_own_is_kept(traced_for: Any) -> None:
    invariant = detjax.batch_invariant(lambda x: _tripled(x) * jnp.float32(2), traced_for=traced_for)
    assert (jax.grad(lambda x: jnp.sum(invariant(x)))(inputs(3)) == 6).all()


def _repeated(w: Array, x: Array) -> Array:
    """Positions, and what is computed from them, repeated for every row before anything meets a row."""
    rows, length, width = x.shape
    if rows % 2:
        raise ValueError("an odd number of rows")
    places = jnp.broadcast_to(jnp.arange(length, dtype=jnp.float32), (rows, length))
    angles = jnp.sin(places[:, :, None] * jnp.exp(jnp.arange(width, dtype=jnp.float32) / 7)[None, None])
    angles = jnp.einsum("btd,de->bte", angles, w) / jnp.sum(angles * angles, axis=2, keepdims=True)
    return jnp.cumsum(x * angles, axis=1) + jnp.tanh(angles)


def _flattened(w: Array, x: Array) -> Array:
    return jnp.tanh(x.reshape(-1, 24) @ w)[: x.shape[0] * 5].reshape(x.shape[0], -1) / jnp.float32(x.shape[1])


def _last(w: Array, x: Array) -> Array:
    """A loop that starts from zeros of the batch's size, and an update in place."""
    start: Any = np.zeros((x.shape[0], 24), x.dtype)
    states = lax.scan(lambda s, x: (jnp.tanh(s @ w + x), s), start, jnp.swapaxes(x, 0, 1))
    out = jnp.zeros((x.shape[0], 6, 24), x.dtype).at[:, 1:].set(jnp.swapaxes(states[1], 0, 1))
    return out.at[:, 0].set(states[0])


def _mapped(w: Array, x: Array) -> Array:
    return lax.map(lambda row: jax.nn.softmax(row @ w), x)


def _constrained(w: Array, x: Array) -> Array:
    mesh = Mesh(np.asarray(jax.devices()[:1]), ("data",))
    x = lax.with_sharding_constraint(x, jax.NamedSharding(mesh, PartitionSpec("data")))
    return jnp.sort(x @ w, axis=2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fn", [_repeated, _flattened, _last, _mapped, _constrained], ids=lambda fn: fn.__name__)
def test_rows_do_not_depend_on_the_batch(fn: Callable[..., Array]) -> None:
    cut = detjax.batch_invariant(fn, (None, 0), traced_for="batch")
    x = inputs(34)
    expected = cut(W, x)
    np.testing.assert_allclose(expected, fn(W, x), rtol=0, atol=1e-5 * np.abs(expected).max())
    for rows in (2, 18):
        assert_same_bits(cut(W, x[34 - rows :]), expected[34 - rows :])


def test_stock_xla_gives_them_other_bits() -> None:
    x = inputs(64)
    same = [
        same_bits(jax.jit(fn)(W, x[:rows]), jax.jit(fn)(W, x)[:rows])
        for fn in (_flattened, _last, _mapped)
        for rows in (2, 8, 18)
    ]
    assert not all(same)


def test_what_all_rows_share_is_computed_once_for_any_batch() -> None:
    def shapes(rows: int) -> str:
        cut = detjax.batch_invariant(_repeated, (None, 0), traced_for="batch")
        jaxpr = jax.make_jaxpr(cut)(W, inputs(rows))
        (inner,) = [eqn.params["jaxpr"] for eqn in jaxpr.eqns if eqn.primitive.name in ("jit", "pjit")]
        shared = [eqn for eqn in inner.eqns if eqn.primitive.name in ("sin", "exp", "reduce_sum", "dot_general")]
        assert {eqn.primitive.name for eqn in shared} == {"sin", "exp", "reduce_sum", "dot_general"}
        return str([eqn.outvars[0].aval for eqn in shared])

    assert shapes(6) == shapes(64)


def test_results_may_hold_several_elements_of_a_row_on_their_axis() -> None:
    fn: Callable[..., Any] = lambda x: {"all": jnp.tanh(x).reshape(-1, 24), "t": jnp.swapaxes(x, 0, 1).reshape(-1)}  # noqa: E731
    for traced_for in ("row", "batch"):
        made = detjax.batch_invariant(fn, traced_for=traced_for)(inputs(3))
        assert_same_bits(made["t"], fn(inputs(3))["t"])
        np.testing.assert_allclose(made["all"], fn(inputs(3))["all"], rtol=0, atol=1e-6)


def _in_pairs(w: Array, x: Array) -> Array:
    return (x.reshape(-1, 2, 5, 24) @ w).reshape(x.shape)


def _chosen(w: Array, x: Array) -> Array:
    return x[jnp.argsort(x[:, 0, 0])]


def _numbered_map(w: Array, x: Array) -> Array:
    scale = jnp.arange(x.shape[0], dtype=jnp.float32)
    return lax.map(lambda given: given[0] * given[1], (x, scale))


def _numbered_start(w: Array, x: Array) -> Array:
    start = jnp.broadcast_to(jnp.arange(x.shape[0], dtype=jnp.float32)[:, None], (x.shape[0], 24))
    return jnp.swapaxes(lax.scan(lambda s, x: (x, s), start, jnp.swapaxes(x, 0, 1))[1], 0, 1)


def _all_pairs(w: Array, x: Array) -> Array:
    return lax.map(lambda row: jnp.sum(row[None] * x, axis=(1, 2)), x)


def _numbered_lookup(w: Array, x: Array) -> Array:
    return jnp.take_along_axis(x, jnp.arange(x.shape[0])[:, None, None] % 5, axis=1) * jnp.float32(2)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (_in_pairs, "reshape .*splits the batch axis in two"),
        (_chosen, "sort .*orders or counts rows of the batch"),
        (_numbered_map, "scan .*position in the batch"),
        (_numbered_start, "scan .*position in the batch"),
        (_all_pairs, "scans over the batch"),
        (_numbered_lookup, "gather .*position in the batch"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_mixes_rows_stays_refused(fn: Callable[..., Array], message: str) -> None:
    with pytest.raises(detjax.UnsafeFunction, match=rf"(?s)({message}).*test_cutting\.py:"):
        detjax.batch_invariant(_refusing_one(fn), (None, 0))(W, inputs(6))


def _sorted_and_back(w: Array, x: Array) -> Array:
    order = jnp.argsort(x[:, 0, 0])
    return (x[order] @ w)[jnp.argsort(order)]


def test_rows_that_return_are_not_cut_out() -> None:
    """They are accepted as a batch; no single row's program can be cut out of one that sorts them."""
    detjax.batch_invariant(_sorted_and_back, (None, 0))(W, inputs(6))
    with pytest.raises(detjax.UnsafeFunction, match=r"(?s)mixes rows in a batch of .*sort .*test_cutting\.py:"):
        detjax.batch_invariant(_refusing_one(_sorted_and_back), (None, 0))(W, inputs(6))


def test_a_choice_is_kept() -> None:
    with pytest.raises(ValueError, match="one row is not a batch"):
        detjax.batch_invariant(_refusing_one(functions.moves), (None, 0), traced_for="row")(W, inputs(4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        detjax.batch_invariant(_refusing_one(functions.moves), (None, 0), traced_for="batch")(W, inputs(4))
