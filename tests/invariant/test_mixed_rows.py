"""Functions that mix rows are refused with their line; those in which every row returns to itself are not."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax

import detjax
from detjax.audit import Role
from tests.support.bits import assert_same_bits

EXPERTS, WIDTH = 4, 8


pytestmark = pytest.mark.usefixtures("lenient_promotion")


def _inputs(rows: int = 5) -> Array:
    return jnp.asarray(np.random.default_rng(3).standard_normal((rows, 6, WIDTH)), jnp.float32)


ROUTER = jnp.asarray(np.random.default_rng(4).standard_normal((WIDTH, EXPERTS)), jnp.float32)
WEIGHTS = jnp.asarray(np.random.default_rng(5).standard_normal((EXPERTS, WIDTH, WIDTH)) / 3, jnp.float32)


def _accepts(fn: Callable[..., Any]) -> None:
    """Checks that a function is taken, keeps its numbers, and gives a row the bits that it has alone."""
    x, invariant = _inputs(), detjax.batch_invariant(fn)
    y = invariant(x)
    np.testing.assert_allclose(y, fn(x), rtol=0, atol=2e-5)
    assert_same_bits(invariant(x[3:4])[0], y[3])


def _is_accepted(fn: Callable[..., Any]) -> None:
    jax.eval_shape(detjax.batch_invariant(fn), _inputs())


def _is_refused(fn: Callable[..., Any], message: str = "") -> None:
    line = "an unknown line" if message.startswith("constant") else r"test_mixed_rows\.py:\d+"
    with pytest.raises(detjax.UnsafeFunction, match=rf"(?s)mixes rows of the batch\..*{message}.*{line}"):
        jax.eval_shape(detjax.batch_invariant(fn), _inputs())


def _refuses(fn: Callable[..., Any], message: str = "") -> None:
    """Checks that a function is refused, and computed for each row alone where a warning is asked for instead."""
    _is_refused(fn, message)
    with pytest.warns(detjax.UnsafeFunctionWarning):
        alone = detjax.batch_invariant(fn, on_unsafe="warn")(_inputs())
    expected = jnp.concatenate([fn(_inputs()[k : k + 1]) for k in range(5)])
    np.testing.assert_allclose(alone, expected, rtol=0, atol=2e-5)


# What mixes rows -----------------------------------------------------------------------------------------------------

MIXING: dict[str, tuple[Callable[[Array], Array], str]] = {
    "one int8 scale": (lambda x: jnp.round(x / jnp.abs(x).max() * 127).astype("int8"), "reduce_max .*over the batch"),
    "largest": (lambda x: x - x.max(0), "reduce_max .*over the batch"),
    "smallest": (lambda x: x - x.min(0), "reduce_min .*over the batch"),
    "first row": (lambda x: x - x[:1], "with another one"),
    "rolled": (lambda x: jnp.roll(x, 1, 0), "another order than the batch's"),
    "flipped": (lambda x: x[::-1], "out of their positions"),
    "neighbours": (lambda x: x * jnp.concatenate([x[1:], x[:1]]), "another order than the batch's"),
    "two halves": (lambda x: jnp.concatenate([x[3:], x[:3]]) if len(x) > 3 else x, "another order"),
    "ranks": (lambda x: jnp.argsort(x.sum((1, 2))), "sort .*do not return"),
    "ranks of ranks": (lambda x: jnp.argsort(jnp.argsort(x.sum((1, 2)))), "do not return"),
    "number of rows": (lambda x: x.sum(-1) / x.shape[0], "div .*number of rows"),
    "number of rows by ones": (lambda x: x.sum(-1) / jnp.ones(len(x)).sum(), "number of rows"),
    "number of rows in a power": (lambda x: x ** len(x), "number of rows"),
    "number of rows as a result": (lambda x: jnp.full(x.shape, len(x)), "number of rows"),
    "number of rows in a loop": (lambda x: lax.fori_loop(0, len(x), lambda _, y: y * 2, x), "scan .*number of rows"),
    "number of rows in a loop of what all share": (
        lambda x: x * lax.fori_loop(0, len(x), lambda _, y: y * 2, 1.0),
        "mul .*number of rows",
    ),
    "number of rows in a loop's test": (
        lambda x: lax.while_loop(lambda s: s[0] < len(x), lambda s: (s[0] + 1, s[1] * 2), (0, x))[1],
        "while .*number of rows",
    ),
    "number of rows by copies": (
        lambda x: jnp.broadcast_to(x[:, None], (len(x), *x.shape)).sum(1),
        "reduce_sum .*number of rows",
    ),
    "number of rows by a product with ones": (
        lambda x: jnp.einsum("bctd,c->btd", jnp.broadcast_to(x[:, None], (len(x), *x.shape)), jnp.ones(len(x))),
        "number of rows",
    ),
    "numbers of rows as they are written": (
        lambda x: lax.fori_loop(0, len(x), lambda k, s: (s[0].at[k].set(x[k]), s[1] + s[0]), (jnp.zeros_like(x), x))[1],
        "scan .*number of rows",
    ),
    "rows that are written before they are read": (
        lambda x: lax.fori_loop(0, len(x), lambda k, y: jnp.sin(y).at[k].set(x[k]), x),
        "scan .*number of rows",
    ),
    "places as a constant": (lambda x: jnp.asarray(np.arange(len(x))), "constant .*position in the batch"),
    "places as a result": (lambda x: jnp.arange(len(x)), "position in the batch"),
    "places as integers": (lambda x: jnp.arange(len(x))[:, None] + jnp.argmax(x, -1), "position in the batch"),
    "mask": (lambda x: jnp.where(x > x.max(0), x, 0), "reduce_max"),
    "integer mask": (lambda x: jnp.where((x > 0).sum(0) > 2, x, 0), "reduce_sum .*over the batch"),
    "branch": (lambda x: lax.cond(jnp.any(x > 2), jnp.sin, jnp.cos, x), "reduce_or .*over the batch"),
    "loop": (lambda x: lax.while_loop(lambda x: jnp.any(jnp.abs(x) > 0.1), lambda x: x / 2, x), "reduce_or"),
    "a loop that stops rows by another rule": (
        lambda x: lax.while_loop(
            lambda x: jnp.any(x.sum((1, 2)) > 1),
            lambda x: jnp.where((x.sum((1, 2)) > 0)[:, None, None], x / 2, x),
            x,
        ),
        "reduce_or",
    ),
    "argmax over the batch": (lambda x: x - x[jnp.argmax(x[:, 0, 0])], "argmax .*over the batch"),
    "cumulative count": (lambda x: jnp.cumsum((x > 0).astype("int32"), 0), "cumsum .*over the batch"),
    "largest rows": (lambda x: lax.top_k(x[:, 0, 0], len(x))[0], "top_k .*over the batch"),
    "sorted": (lambda x: jnp.sort(x[:, 0, 0]), "sort .*do not return"),
    "sorted and not put back": (lambda x: x[jnp.argsort(x[:, 0, 0])], "do not return"),
    "sorted twice": (lambda x: (lambda p: x[p][p])(jnp.argsort(x[:, 0, 0])), "do not return"),
    "another row": (lambda x: jnp.stack([x[k] + x[k - 1] for k in range(len(x))]), "with another one"),
    "places of a loop": (lambda x: jnp.stack([row * k for k, row in enumerate(x)]), "number of rows"),
    "a row where another one belongs": (
        lambda x: lax.fori_loop(0, len(x), lambda k, y: y.at[len(x) - 1 - k].set(x[k]), jnp.zeros_like(x)),
        "number of rows|another one belongs",
    ),
}


@pytest.mark.parametrize("name", MIXING)
def test_a_function_that_mixes_rows_is_refused_with_its_line(name: str) -> None:
    _is_refused(*MIXING[name])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [name for name in MIXING if name != "two halves"])
def test_a_function_that_mixes_rows_may_be_computed_for_each_alone(name: str) -> None:
    _refuses(*MIXING[name])


def test_the_reason_and_what_to_do_are_said() -> None:
    with pytest.raises(detjax.UnsafeFunction, match=r"Use a size of the row's own axes"):
        detjax.batch_invariant(lambda x: x / x.shape[0])(_inputs())
    with pytest.raises(detjax.UnsafeFunction, match=r"inverse of the same permutation"):
        detjax.batch_invariant(lambda x: x[::-1])(_inputs())


# What every row returns from -----------------------------------------------------------------------------------------

RETURNING: dict[str, Callable[[Array], Array]] = {
    "its own position": lambda x: x[jnp.arange(len(x)), jnp.argmax(x[:, :, 0], 1)],
    "positions of its own": lambda x: x[jnp.arange(len(x))[:, None], jnp.argsort(x[:, :, 0], 1)],
    "written at its own position": lambda x: x.at[jnp.arange(len(x)), jnp.argmax(x[:, :, 0], 1)].set(0.0),
    "one by one": lambda x: jnp.stack([jnp.sin(row) for row in x]),
    "joined as they were": lambda x: jnp.concatenate([x[k : k + 1] * 2 for k in range(len(x))]),
    "cut and joined": lambda x: jnp.concatenate([x[:1], x[1:]]),
    "written by a loop": lambda x: lax.fori_loop(0, len(x), lambda k, y: y.at[k].set(jnp.sin(x[k])), jnp.zeros_like(x)),
    "loops of its own": lambda x: jax.vmap(
        lambda row: lax.while_loop(lambda row: row.sum() > 1, lambda row: row / 2, row)
    )(x),
    "number of its own axes": lambda x: x.sum(1) / x.shape[1],
    "repeated tokens": lambda x: jnp.repeat(x.reshape(-1, WIDTH), 2, axis=0).reshape(*x.shape[:2], 2, WIDTH).sum(2),
    "matrices of its own": lambda x: jnp.linalg.svd(x)[1] + jnp.linalg.eigvalsh(x @ x.mT),
}


@pytest.mark.parametrize("name", RETURNING)
def test_a_function_in_which_rows_return_is_accepted(name: str) -> None:
    _is_accepted(RETURNING[name])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", RETURNING)
def test_where_rows_return_each_has_the_bits_that_it_has_alone(name: str) -> None:
    _accepts(RETURNING[name])


# Mixtures of experts -------------------------------------------------------------------------------------------------


def _routed(x: Array, copies: int = 1) -> tuple[Array, Array, Array]:
    """The tokens of all rows, their experts, and the shares that each expert's result has."""
    tokens = x.reshape(-1, WIDTH)
    shares, experts = lax.top_k(jax.nn.softmax(tokens @ ROUTER), copies)
    return tokens, experts, shares


def _by_scatter(x: Array) -> Array:
    tokens, experts, shares = _routed(x)
    order = jnp.argsort(experts[:, 0])
    made = lax.ragged_dot(tokens[order], WEIGHTS, jnp.bincount(experts[:, 0], length=EXPERTS))
    return (jnp.zeros_like(made).at[order].set(made) * shares).reshape(x.shape)


def _by_inverse(x: Array) -> Array:
    """Two experts a token: its copies are sorted, and the inverse is the argsort of the argsort."""
    tokens, experts, shares = _routed(x, 2)
    order = jnp.argsort(experts.reshape(-1))
    back = jnp.argsort(order)
    given = jnp.repeat(tokens, 2, axis=0)[order]
    sizes = jnp.bincount(experts.reshape(-1)[order], length=EXPERTS)
    made = lax.ragged_dot(given, WEIGHTS, sizes)[back].reshape(-1, 2, WIDTH)
    return jnp.einsum("nkd,nk->nd", made, shares).reshape(x.shape)


def _by_token_numbers(x: Array) -> Array:
    """Tokens are looked up by the numbers of sorted copies, and results are added at them."""
    tokens, experts, shares = _routed(x, 2)
    order = jnp.argsort(experts.ravel())
    token = order // 2
    sizes = jax.nn.one_hot(experts, EXPERTS, dtype="int32").sum((0, 1))
    made = lax.ragged_dot(tokens[token], WEIGHTS, sizes) * shares.ravel()[order][:, None]
    return jnp.zeros_like(tokens).at[token].add(made).reshape(x.shape)


def _by_scales(x: Array) -> Array:
    """A number of each expert for its sorted tokens, from how many there are; the inverse is a scatter of places."""
    tokens, experts, shares = _routed(x)
    keys = experts[:, 0]
    order = jnp.argsort(keys)
    sizes = jax.ops.segment_sum(jnp.ones_like(keys), keys, EXPERTS)
    expert = jnp.repeat(jnp.arange(EXPERTS), sizes, total_repeat_length=len(keys))
    back = jnp.zeros_like(order).at[order].set(jnp.arange(len(order)))
    made = lax.ragged_dot(tokens[order], WEIGHTS, sizes) * ROUTER[0][expert][:, None]
    return (made[back] * shares).reshape(x.shape)


RESTORED = [_by_scatter, _by_inverse, _by_token_numbers, _by_scales]


@pytest.mark.parametrize("fn", RESTORED, ids=lambda fn: fn.__name__)
def test_tokens_that_are_sorted_by_expert_and_put_back_are_accepted(fn: Callable[[Array], Array]) -> None:
    _is_accepted(fn)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fn", RESTORED, ids=lambda fn: fn.__name__)
def test_sorted_tokens_have_the_bits_that_they_have_alone(fn: Callable[[Array], Array]) -> None:
    _accepts(fn)


def _without_return(x: Array) -> Array:
    tokens, experts, _ = _routed(x)
    order = jnp.argsort(experts[:, 0])
    sizes = jnp.bincount(experts[:, 0], length=EXPERTS)
    return lax.ragged_dot(tokens[order], WEIGHTS, sizes).reshape(x.shape)


def _back_by_other_keys(x: Array) -> Array:
    tokens, experts, _ = _routed(x)
    order, other = jnp.argsort(experts[:, 0]), jnp.argsort(tokens[:, 0])
    made = lax.ragged_dot(tokens[order], WEIGHTS, jnp.bincount(experts[:, 0], length=EXPERTS))
    return jnp.zeros_like(made).at[other].set(made).reshape(x.shape)


def _sizes_of_other_keys(x: Array) -> Array:
    tokens, experts, _ = _routed(x)
    order = jnp.argsort(experts[:, 0])
    made = lax.ragged_dot(tokens[order], WEIGHTS, jnp.bincount(jnp.argmin(tokens, 1) % EXPERTS, length=EXPERTS))
    return jnp.zeros_like(made).at[order].set(made).reshape(x.shape)


def _sizes_twice(x: Array) -> Array:
    tokens, experts, _ = _routed(x)
    order = jnp.argsort(experts[:, 0])
    made = lax.ragged_dot(tokens[order], WEIGHTS, jnp.zeros(EXPERTS, int).at[experts[:, 0]].add(2))
    return jnp.zeros_like(made).at[order].set(made).reshape(x.shape)


def _sorted_by_other_keys(x: Array) -> Array:
    """A permutation and its inverse, but tokens of an expert do not stand together."""
    tokens, experts, _ = _routed(x)
    order = jnp.argsort(tokens[:, 1])
    made = lax.ragged_dot(tokens[order], WEIGHTS, jnp.bincount(experts[:, 0], length=EXPERTS))
    return jnp.zeros_like(made).at[order].set(made).reshape(x.shape)


def _keys_by_sign(x: Array) -> Array:
    """Negative keys are counted from the end, which is not how a sort orders them."""
    tokens, experts, _ = _routed(x)
    keys = experts[:, 0] - 1
    order = jnp.argsort(keys)
    made = lax.ragged_dot(tokens[order], WEIGHTS, jnp.zeros(EXPERTS, int).at[keys].add(1))
    return jnp.zeros_like(made).at[order].set(made).reshape(x.shape)


def _added_at_other_tokens(x: Array) -> Array:
    tokens, experts, _ = _routed(x, 2)
    order = jnp.argsort(experts.ravel())
    made = tokens[order // 2]
    return jnp.zeros_like(tokens).at[order % len(tokens)].add(made).reshape(x.shape)


def _with_capacity(x: Array, capacity: int = 4) -> Array:
    """Tokens beyond an expert's capacity, of the whole batch, are dropped."""
    tokens, experts, shares = _routed(x)
    chosen = jax.nn.one_hot(experts[:, 0], EXPERTS, dtype="int32")
    kept = (jnp.cumsum(chosen, 0) * chosen <= capacity).all(1)
    made = jnp.einsum("nd,ndo->no", tokens, WEIGHTS[experts[:, 0]]) * shares
    return jnp.where(kept[:, None], made, 0).reshape(x.shape)


def _sizes_from_one(x: Array) -> Array:
    tokens, experts, _ = _routed(x)
    order = jnp.argsort(experts[:, 0])
    made = lax.ragged_dot(tokens[order], WEIGHTS, jnp.ones(EXPERTS, int).at[experts[:, 0]].add(1))
    return jnp.zeros_like(made).at[order].set(made).reshape(x.shape)


def _sorted_by_the_larger_of_two_keys(x: Array) -> Array:
    tokens, experts, _ = _routed(x)
    order = jnp.argsort(jnp.maximum(experts[:, 0], jnp.argmin(tokens, 1) % EXPERTS))
    made = lax.ragged_dot(tokens[order], WEIGHTS, jnp.bincount(experts[:, 0], length=EXPERTS))
    return jnp.zeros_like(made).at[order].set(made).reshape(x.shape)


def _with_groups(
    x: Array,
    *,
    shift: int = 1,
    first: int = 0,
    at: int = 0,
    blank: int = 0,
    mark: int = 1,
    minus: int = 1,
    reverse: tuple[bool, bool] = (False, False),
    other_keys: bool = False,
) -> Array:
    """Each token's expert, counted from where the experts' tokens start among the sorted ones, as `jnp.repeat` does."""
    tokens, experts, _ = _routed(x)
    keys = experts[:, 0]
    order = jnp.argsort(keys)
    counts = jnp.zeros(EXPERTS, int).at[(keys + 1) % EXPERTS if other_keys else keys].add(1)
    before = jnp.concatenate([counts[-shift:], counts[:-shift]]).at[at].set(first)
    starts = lax.cumsum(before, reverse=reverse[0])
    marks = jnp.full(len(keys), blank).at[starts].add(mark)
    group = lax.cumsum(marks, reverse=reverse[1]) - minus
    made = tokens[order] * ROUTER[0][group][:, None]
    return jnp.zeros_like(made).at[order].set(made).reshape(x.shape)


def test_groups_that_are_counted_from_the_keys_are_those_of_the_tokens() -> None:
    _is_accepted(_with_groups)


@pytest.mark.parametrize(
    "change",
    [
        {"shift": 2},
        {"first": 1},
        {"at": 1},
        {"blank": 1},
        {"mark": 2},
        {"minus": 2},
        {"reverse": (True, False)},
        {"reverse": (False, True)},
        {"other_keys": True},
    ],
    ids=str,
)
def test_groups_that_are_counted_otherwise_are_refused(change: dict[str, Any]) -> None:
    _is_refused(lambda x: _with_groups(x, **change))


MISSORTED = [
    _sizes_from_one,
    _sorted_by_the_larger_of_two_keys,
    _without_return,
    _back_by_other_keys,
    _sizes_of_other_keys,
    _sizes_twice,
    _sorted_by_other_keys,
    _keys_by_sign,
    _added_at_other_tokens,
]


@pytest.mark.parametrize("fn", MISSORTED, ids=lambda fn: fn.__name__)
def test_tokens_that_do_not_return_are_refused(fn: Callable[[Array], Array]) -> None:
    with pytest.raises(detjax.UnsafeFunction, match=r"(?s)mixes rows of the batch\..*test_mixed_rows\.py:\d+"):
        jax.eval_shape(detjax.batch_invariant(fn), _inputs())


def test_a_capacity_for_all_rows_is_refused_and_a_row_alone_has_its_own() -> None:
    _refuses(_with_capacity, "cumsum .*over the batch")
    with pytest.warns(detjax.UnsafeFunctionWarning):
        alone = detjax.batch_invariant(_with_capacity, on_unsafe="warn")(_inputs(64))
    assert not np.allclose(alone, _with_capacity(_inputs(64))), "the capacity drops nothing: the test says nothing"


# Certificates --------------------------------------------------------------------------------------------------------


def test_a_certificate_of_a_function_that_mixes_rows_names_its_line() -> None:
    fn: Callable[[Array], Array] = lambda x: x - x.max(0)  # noqa: E731
    line = fn.__code__.co_firstlineno
    with pytest.raises(ValueError, match=rf"certify: .*reduce_max.*test_mixed_rows\.py:{line}"):
        detjax.certify(detjax.batch_invariant(fn), (_inputs(),), batch_sizes=(1, 2))


@pytest.mark.filterwarnings("ignore::detjax.UnsafeFunctionWarning")
def test_rows_that_are_computed_alone_instead_prove_nothing_of_the_function() -> None:
    fn: Callable[[Array], Array] = lambda x: x - x.max(0)  # noqa: E731
    line = fn.__code__.co_firstlineno
    alone = detjax.certify(detjax.batch_invariant(fn, on_unsafe="warn"), (_inputs(),), batch_sizes=(1, 2))
    assert alone.outcome.value == "observed"
    (risk,) = alone.risks
    assert (
        risk.role is Role.MIXES and risk.primitive == "reduce_max" and risk.line.endswith(f"test_mixed_rows.py:{line}")
    )
    apart = detjax.certify(
        detjax.batch_invariant(lambda x: x - x.max(1, keepdims=True)), (_inputs(),), batch_sizes=(1, 2)
    )
    assert apart.outcome.value == "proven", apart.risks
