"""Functions that mix rows are refused by name, with the line that mixes them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx
from jax import Array

import detjax
from tests.support.unchecked import unchecked

X = jnp.ones((4, 6, 8))


def _whitened(x: Array) -> Array:
    return x - jnp.mean(x, axis=0, keepdims=True)


def _numbered(x: Array) -> Array:
    return x + jnp.arange(x.shape[0], dtype=x.dtype)[:, None, None]


def _dropped(x: Array) -> Array:
    return jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, x.shape), x, 0)


def _similar(x: Array) -> Array:
    return jnp.einsum("btd,ctd->td", x, x)[None] + x


def _running(x: Array) -> Array:
    return jnp.cumsum(x.reshape(-1, 8), axis=0).reshape(x.shape)


def _in_a_loop(x: Array) -> Array:
    return jax.lax.fori_loop(0, 2, lambda _, x: x / jnp.max(jnp.sum(x, axis=0)), x)


@pytest.mark.parametrize(
    ("fn", "primitive", "what"),
    [
        (_whitened, "reduce_sum", "reduces over the batch"),
        (_numbered, "add", "depend on its position in the batch"),
        (_dropped, "select_n", "depend on its position in the batch"),
        (_similar, "reduce_sum", "reduces over the batch"),
        (_running, "cumsum", "accumulates over the batch"),
        (_in_a_loop, "reduce_sum", "reduces over the batch"),
    ],
)
def test_a_function_that_mixes_rows_is_refused_with_its_line(fn: Callable[..., Any], primitive: str, what: str) -> None:
    line = fn.__code__.co_firstlineno + 1
    with pytest.raises(detjax.UnsafeFunction, match=rf"{primitive} of .*{what}.*test_refusals\.py:{line}"):
        detjax.batch_invariant(fn)(X)


@pytest.mark.parametrize("traced_for", ["row", "batch"])
def test_a_batch_of_one_shows_what_depends_on_the_position(traced_for: Any) -> None:
    with pytest.raises(detjax.UnsafeFunction, match="depend on its position in the batch"):
        jax.eval_shape(detjax.batch_invariant(_numbered, traced_for=traced_for), X[:1])


def test_it_may_warn_instead() -> None:
    with pytest.warns(detjax.UnsafeFunctionWarning, match=r"reduce_sum .*reduces over the batch"):
        y = detjax.batch_invariant(_whitened, on_unsafe="warn")(X)
    assert not y.any()


def test_batch_norm_in_training_is_refused() -> None:
    model = nn.BatchNorm(use_running_average=False)
    variables = model.init(jax.random.key(0), X)
    with pytest.raises(detjax.UnsafeFunction, match="running averages"):
        detjax.batch_invariant(model)(variables, X, mutable=["batch_stats"])


def test_what_a_call_writes_into_a_module_is_refused() -> None:
    class Counter(nnx.Module):
        def __init__(self) -> None:
            self.calls = nnx.Variable(jnp.zeros(()))

        def __call__(self, x: Array) -> Array:
            self.calls[...] = self.calls[...] + 1
            return x

    with pytest.raises(detjax.UnsafeFunction, match=r"writes into Counter: .*calls"):
        detjax.batch_invariant(Counter())(X)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda x: jnp.float32(1), "shape \\(\\) for a batch of 1"),
        (lambda x: {"loss": jnp.sum(x, axis=(1, 2)), "all": jnp.zeros((6, 2))}, r"result\['all'\]"),
        (lambda x: x.swapaxes(0, 1), "out_axes is 0"),
    ],
)
def test_results_without_rows_are_refused(fn: Callable[..., Any], message: str) -> None:
    with pytest.raises(detjax.UnsafeFunction, match=message):
        detjax.batch_invariant(fn)(X)


def test_rows_that_return_to_their_places_are_not_refused() -> None:
    def sorted_together(x: Array) -> Array:
        flat = x.reshape(-1, 8)
        order = jnp.argsort(flat[:, 0])
        return jnp.zeros_like(flat).at[order].set(flat[order], unique_indices=True).reshape(x.shape)

    assert (detjax.batch_invariant(sorted_together)(X) == X).all()


def _padded(x: Array) -> Array:
    return x + jnp.pad(jnp.zeros((len(x), 5, 8)), ((0, 0), (1, 0), (0, 0)), constant_values=1.0)


def _tabulated(x: Array) -> Array:
    table, places = (jnp.tile(jnp.arange(6, dtype=dtype), (len(x), 1)) for dtype in ("float32", "int32"))
    return x + jnp.take_along_axis(table, places, 1)[:, :, None]


@pytest.mark.parametrize("traced_for", ["row", "batch"])
@pytest.mark.parametrize("fn", [_padded, _tabulated])
def test_what_is_the_same_for_every_row_is_not_refused(fn: Callable[..., Any], traced_for: Any) -> None:
    with jax.numpy_rank_promotion("allow"):
        assert (detjax.batch_invariant(fn, traced_for=traced_for)(X) == fn(X)).all()


@pytest.mark.parametrize(("traced_for", "expected"), [("row", [96.0] * 4), ("batch", [])])
def test_what_a_print_alone_reads_is_not_refused(traced_for: Any, expected: list[float]) -> None:
    seen: list[float] = []

    def printed(x: Array) -> Array:
        y = 2 * x
        jax.debug.callback(lambda total: seen.append(float(total)), jnp.sum(y))

        def step(x: Array, _: None) -> tuple[Array, None]:
            jax.debug.print("{}", jnp.max(x))
            return x + 1, None

        return jax.lax.scan(step, y, None, 2)[0]

    assert (detjax.batch_invariant(printed, traced_for=traced_for)(X) == 4).all()
    jax.effects_barrier()
    assert seen == expected


def test_what_is_printed_and_used_is_refused() -> None:
    def printed(x: Array) -> Array:
        total = jnp.sum(x, axis=0, keepdims=True)
        jax.debug.print("{}", total)
        return x - total

    with pytest.raises(detjax.UnsafeFunction, match="reduces over the batch"):
        detjax.batch_invariant(printed)(X)


def test_bad_arguments_are_refused() -> None:
    identity: Callable[..., Any] = lambda x: x  # noqa: E731
    with pytest.raises(ValueError, match="on_unsafe is 'ignore'"):
        unchecked(detjax.batch_invariant)(identity, on_unsafe="ignore")
    with pytest.raises(ValueError, match="traced_for is 'two'"):
        unchecked(detjax.batch_invariant)(identity, traced_for="two")
    with pytest.raises(ValueError, match="batches have 2, 4 rows"):
        detjax.batch_invariant(lambda x, y: x)(X, X[:2])
    with pytest.raises(ValueError, match="no argument has rows"):
        detjax.batch_invariant(identity, None)(X)
    with pytest.raises(ValueError, match="0 rows"):
        detjax.batch_invariant(identity)(X[:0])
    with pytest.raises(ValueError, match="batch_axes does not fit"):
        detjax.batch_invariant(identity, (0, 0))(X)
    with pytest.raises(TypeError, match="an argument with rows is float"):
        detjax.batch_invariant(identity)(1.0)
    with pytest.raises(TypeError, match="the class Dense"):
        detjax.batch_invariant(nn.Dense)


def test_a_class_of_modules_can_be_decorated() -> None:
    @detjax.batch_invariant
    class Scaled(nnx.Module):
        def __init__(self) -> None:
            self.scale = nnx.Param(jnp.full(8, 2.0))

        def __call__(self, x: Array) -> Array:
            return x * self.scale[...][None, None]

    assert (Scaled()(X) == 2).all()
