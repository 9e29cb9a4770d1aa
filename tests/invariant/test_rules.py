"""Each rule of the trace of rows, with programs that it accepts and programs that it must refuse.

What the trace says of an accepted program is compared with what the program does: where a row of the arguments changes,
only the elements that the trace gives to this row change.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax
from jax.interpreters import partial_eval
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from detjax import ops
from detjax.invariant.batch_axis import follow
from detjax.invariant.findings import Finding, Mixing
from detjax.invariant.places import Place, Rows, Shared

pytestmark = pytest.mark.usefixtures("lenient_promotion")

B = 5
"""The number of rows: no other axis is a multiple of it."""


@dataclasses.dataclass(frozen=True)
class Given:
    """An argument: its shape, the axis of its rows, and the limit of its integers if it has integers."""

    shape: tuple[int, ...]
    axis: int | None
    most: int = 0

    def value(self, seed: int) -> np.ndarray:
        draw = np.random.default_rng((seed, *self.shape))
        if self.most:
            return draw.integers(0, self.most, self.shape).astype(np.int32)
        return draw.standard_normal(self.shape).astype(np.float32)


def rows(*shape: int, axis: int = 0, most: int = 0) -> Given:
    assert shape[axis] == B
    return Given(shape, axis, most)


def shared(*shape: int, most: int = 0) -> Given:
    return Given(shape, None, most)


X, T = rows(B, 4), rows(4, B, axis=1)
CUBE, MIDDLE = rows(B, 3, 4), rows(3, B, 4, axis=1)
WHOLE = Rows(0)


def traced(
    fn: Callable[..., Any], given: tuple[Given, ...], *, may_return: bool = True, sharded: Any = frozenset()
) -> tuple[list[Place], list[Finding]]:
    jaxpr = jax.make_jaxpr(fn, axis_env=[("d", 2), ("m", 3)])(*(one.value(0) for one in given))
    jaxpr = partial_eval.dce_jaxpr_consts(jaxpr, [True] * len(jaxpr.outvars), True)[0]
    places = [None if one.axis is None else Rows(one.axis) for one in given]
    return follow(jaxpr, B, places, sharded, rows_may_return=may_return)


def elements(place: Place, shape: tuple[int, ...], row: int) -> np.ndarray:
    """The elements of an array that belong to a row, as booleans."""
    if isinstance(place, Shared):
        return np.zeros(shape, bool)
    assert isinstance(place, Rows) and not place.order
    assert shape[place.axis] == place.outer * B * place.inner
    index = np.arange(shape[place.axis]) // place.inner % B
    return np.broadcast_to(np.expand_dims(index == row, [k for k in range(len(shape)) if k != place.axis]), shape)  # pyright: ignore[reportCallIssue]


def numbers(x: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


def check_accepted(fn: Callable[..., Any], given: tuple[Given, ...], expected: Any, **options: Any) -> None:
    places, findings = traced(fn, given, **options)
    assert findings == []
    wanted = expected if isinstance(expected, list) else [expected]
    assert [place.plain if isinstance(place, Shared) else place for place in places] == wanted
    run, before = jax.jit(fn), [one.value(0) for one in given]
    results = jax.tree.leaves(run(*before))
    for row in (0, 2, B - 1):
        after = [x.copy() for x in before]
        for one, x in zip(given, after, strict=True):
            if one.axis is not None:
                at = (slice(None),) * one.axis + (row,)
                x[at] = one.value(1 + row)[at]
        for x, y, place in zip(results, jax.tree.leaves(run(*after)), places, strict=True):
            belong = elements(place, x.shape, row)
            changed = (numbers(x) != numbers(y)).reshape(*x.shape, -1).any(axis=-1)
            assert not (changed & ~belong).any(), (row, place)
            assert changed.any() or not belong.any(), "the row has no part in the result: the case says nothing"


def check_refused(
    fn: Callable[..., Any], given: tuple[Given, ...], message: str, mixing: Mixing, **options: Any
) -> None:
    _, findings = traced(fn, given, **options)
    assert findings, "accepted"
    assert message in findings[0].what and findings[0].mixing is mixing, findings[0]
    # Operations are called from the checks of their types.
    assert "test_rules.py:" in findings[0].line or findings[0].primitive == "jit"


SUM, MOVE, SLOT, SIZE, OTHER = Mixing.SUM, Mixing.MOVE, Mixing.SLOT, Mixing.SIZE, Mixing.OTHER
POSITION, SOME = "depend on its position in the batch", "takes some rows of the batch"
OUT, ANOTHER = "takes rows of the batch out of their positions", "joins rows in another order than the batch's"
SLOTS = np.arange(B, dtype=np.float32)


def spread(x: Array, axis: int = 0) -> Array:
    """Zeros that differ in nothing but could: an array of x's shape that counts along its axis of rows."""
    shape = [B if k == axis else 1 for k in range(x.ndim)]
    return jnp.broadcast_to(jnp.arange(B, dtype=x.dtype).reshape(shape), x.shape)


# Single elements, reductions, and what works along an axis ----------------------------------------------------------

type Accepted = tuple[Callable[..., Any], tuple[Given, ...], Any]
type Refused = tuple[Callable[..., Any], tuple[Given, ...], str, Mixing]

REDUCTIONS: dict[str, tuple[Callable[..., Array], Mixing]] = {
    "sum": (jnp.sum, SUM),
    "max": (jnp.max, MOVE),
    "min": (jnp.min, MOVE),
    "prod": (jnp.prod, SUM),
    "argmax": (jnp.argmax, MOVE),
    "argmin": (jnp.argmin, MOVE),
    "and": (lambda x, axis: lax.reduce_and_p.bind(lax.bitcast_convert_type(x, "int32"), axes=(axis,)), MOVE),
    "or": (lambda x, axis: lax.reduce_or_p.bind(lax.bitcast_convert_type(x, "int32"), axes=(axis,)), MOVE),
    "xor": (lambda x, axis: lax.reduce_xor_p.bind(lax.bitcast_convert_type(x, "int32"), axes=(axis,)), MOVE),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_reduction_keeps_rows_apart_unless_it_is_over_them(name: str) -> None:
    fn, mixing = REDUCTIONS[name]
    wide = rows(7, B, 6, axis=1)
    check_accepted(lambda x: (fn(x, axis=0), fn(x, axis=2)), (wide,), [Rows(0), Rows(1)])
    check_refused(lambda x: fn(x, axis=1), (wide,), "reduces over the batch", mixing)


ALONG: dict[str, tuple[Callable[..., Any], Mixing]] = {
    "cumsum": (lax.cumsum, SUM),
    "cumprod": (lax.cumprod, SUM),
    "cumlogsumexp": (lax.cumlogsumexp, SUM),
    "cummax": (lax.cummax, MOVE),
    "cummin": (lax.cummin, MOVE),
    "sort": (lambda x, axis: lax.sort(x, dimension=axis), MOVE),
    "sort of two": (lambda x, axis: lax.sort((x, -x), dimension=axis)[1], MOVE),
    "top_k": (lambda x, axis: lax.top_k(x, 2, axis=axis)[0], MOVE),
    "fft": (lambda x, axis: jnp.abs(jnp.fft.fft(x, axis=axis)), MOVE),
}


@pytest.mark.parametrize("name", ALONG)
def test_what_works_along_an_axis_keeps_rows_apart_unless_it_is_theirs(name: str) -> None:
    fn, mixing = ALONG[name]
    if name == "fft":
        check_accepted(lambda x: fn(x, 2), (MIDDLE,), Rows(1))
        check_refused(lambda x: lax.fft(x, "FFT", (B, 4)), (MIDDLE,), "is not known to keep rows", OTHER)
        check_refused(lambda x: lax.fft(x, "FFT", (B,)), (T,), "is not known to keep rows", OTHER)
        return
    check_accepted(lambda x: (fn(x, 0), fn(x, 2)), (MIDDLE,), [Rows(1), Rows(1)])
    check_refused(lambda x: fn(x, 1), (MIDDLE,), "orders or accumulates over the batch", mixing)


def _written_in_order(x: Array, order: Sequence[int] = range(B), *, factor: float = 2) -> Array:
    y = jnp.ones_like(x)
    for k in order:
        y = y.at[k].set(jnp.sin(x[k]) * (factor if k == 3 else 2))
    return y


ACCEPTED: dict[str, Accepted] = {
    "elements": (lambda x, y: jnp.maximum(x, y) * 2, (X, X), WHOLE),
    "elements with what all rows share": (lambda x, w: jnp.maximum(x, w[None]), (X, shared(4)), WHOLE),
    "elements with a constant that is equal along rows": (
        lambda x: x + np.float32([[0, 1, 2, 3]] * B),
        (X,),
        WHOLE,
    ),
    "several axes reduced": (lambda x: x.sum((0, 2)), (MIDDLE,), Rows(0)),
    "reversed columns": (lambda x: lax.rev(x, (0, 2)), (MIDDLE,), Rows(1)),
    "sorted with columns' numbers": (
        lambda x: lax.sort((x, lax.broadcasted_iota(jnp.int32, x.shape, 1)), dimension=1)[1],
        (X,),
        WHOLE,
    ),
    # Moves.
    "broadcast": (lambda x: jnp.broadcast_to(x[None, :, None], (2, B, 3, 4)), (X,), Rows(1)),
    "transposed": (lambda x: x.transpose(2, 0, 1), (CUBE,), Rows(1)),
    "flattened": (lambda x: x.reshape(-1, 4), (CUBE,), Rows(0, 1, 3)),
    "flattened with what stands before": (lambda x: x.reshape(-1, 4), (MIDDLE,), Rows(0, 3, 1)),
    "flattened whole": (lambda x: x.reshape(-1), (MIDDLE,), Rows(0, 3, 4)),
    "split again": (lambda x: x.reshape(-1).reshape(3, -1), (MIDDLE,), Rows(1, 1, 4)),
    "split apart": (lambda x: x.reshape(-1).reshape(3, 2 * B, 2), (MIDDLE,), Rows(1, 1, 2)),
    "split of an outer axis": (lambda x: x.reshape(-1).reshape(2, 2 * B, 3), (rows(4, B, 3, axis=1),), Rows(1, 2, 1)),
    "squeezed": (lambda x: lax.squeeze(x, (0, 2)), (rows(1, B, 1, 4, axis=1),), Rows(0)),
    "sliced elsewhere": (lambda x: lax.slice(x, (0, 1), (B, 4), (1, 2)), (X,), WHOLE),
    "sliced at a place that all rows share": (
        lambda x, k: lax.dynamic_slice(x, (0, k[0]), (B, 2)),
        (X, shared(2, most=2)),
        WHOLE,
    ),
    "one row after another": (lambda x: jnp.concatenate([x[k : k + 1] for k in range(B)]), (X,), WHOLE),
    "one row after another, by a number": (
        lambda x: jnp.concatenate([lax.dynamic_slice_in_dim(x, jnp.int32(k), 1) for k in range(B)]),
        (X,),
        WHOLE,
    ),
    "one function for each row": (lambda x: jnp.stack([jnp.sin(row) * 2 for row in x]), (X,), WHOLE),
    "one function for parts of the batch": (
        lambda x, w: jnp.concatenate([jnp.sin(x[:2]) * w[None], jnp.sin(x[2:]) * w[None]]),
        (X, shared(4)),
        WHOLE,
    ),
    "one compiled function for each row": (
        lambda x: jnp.stack([jax.jit(lambda row: jnp.sort(row) + 1)(row) for row in x]),
        (X,),
        WHOLE,
    ),
    "one loop for each row": (
        lambda x: jnp.stack([lax.while_loop(lambda s: s.sum() < 9, lambda s: s * s + 1, row) for row in x]),
        (X,),
        WHOLE,
    ),
    "rows of a table whose rows are equal": (
        lambda x, w: jnp.stack([x[k] * jnp.broadcast_to(w, (B, 4))[k] for k in range(B)]),
        (X, shared(4)),
        WHOLE,
    ),
    "rows written one by one": (_written_in_order, (X,), WHOLE),
    "rows written by a loop": (
        lambda x: lax.fori_loop(0, B, lambda k, y: y.at[k].set(jnp.sin(x[k]) + y[k]), jnp.ones_like(x)),
        (X,),
        WHOLE,
    ),
    "rows written by a loop within a loop": (
        lambda x: lax.fori_loop(
            0, 3, lambda j, y: lax.fori_loop(0, B, lambda k, y: y.at[k].set(x[k] * (j + 1)), y), jnp.ones_like(x)
        ),
        (X,),
        WHOLE,
    ),
    "a loop over rows' numbers": (lambda x: lax.map(lambda k: jnp.sin(x[k]), jnp.arange(B)), (X,), WHOLE),
    "cut and joined": (lambda x: jnp.concatenate([x[:2], x[2:4], x[4:]]), (X,), WHOLE),
    "copies of each row": (
        lambda x: jnp.concatenate([jnp.broadcast_to(x[k : k + 1], (3, 4)) for k in range(B)]),
        (X,),
        Rows(0, 1, 3),
    ),
    "rows joined as columns": (lambda x: jnp.concatenate([x[k : k + 1] for k in range(B)], 1), (X,), Rows(1, 1, 4)),
    "stacked rows": (lambda x: jnp.stack([x[k] for k in range(B)], 1), (X,), Rows(1)),
    "unstacked rows": (lambda x: jnp.stack(jnp.unstack(x, axis=1), 0), (T,), Rows(0)),
    "stacked in front": (lambda x: jnp.stack([x, -x], 0), (X,), Rows(1)),
    "stacked behind": (lambda x: jnp.stack([x, -x], 1), (X,), Rows(0)),
    "unstacked columns": (
        lambda x: (jnp.unstack(x, axis=0)[1], jnp.unstack(x, axis=2)[1]),
        (MIDDLE,),
        [Rows(0), Rows(1)],
    ),
    "split and joined": (lambda x: jnp.concatenate(lax.split(x, (2, 3), 0), 0), (X,), WHOLE),
    "split columns": (lambda x: lax.split(x, (1, 3), 1)[1], (X,), WHOLE),
    "joined columns": (lambda x, w: jnp.concatenate([x, jnp.broadcast_to(w, (B, 2))], 1), (X, shared(2)), WHOLE),
    "padded columns": (lambda x: lax.pad(x, np.float32(0), ((0, 0, 0), (2, 1, 1))), (X,), WHOLE),
    "repeated columns": (lambda x: lax.tile(x, (1, 3)), (X,), WHOLE),
    "about the largest": (lambda x: lax.approx_max_k(x, 2, reduction_dimension=1)[0], (X,), WHOLE),
    # Lookups.
    "looked up in a table": (lambda i, w: w[i], (rows(B, 2, most=7), shared(7, 3)), WHOLE),
    "looked up in a table, rows second": (lambda i, w: w[i], (rows(2, B, axis=1, most=7), shared(7, 3)), Rows(1)),
    "looked up in each row": (
        lambda x, i: jnp.take_along_axis(x, i, 1),
        (X, rows(B, 2, most=4)),
        WHOLE,
    ),
    "looked up at places that all rows share": (lambda x, i: x[:, i], (X, shared(3, most=4)), WHOLE),
    "looked up at places that are the same for all rows": (
        lambda x, i: jnp.take_along_axis(x, jnp.broadcast_to(i, (B, 3)), 1),
        (X, shared(3, most=4)),
        WHOLE,
    ),
    "windows at places that all rows share": (
        lambda x, i: lax.gather(
            x,
            i[:, None],
            lax.GatherDimensionNumbers(offset_dims=(0, 1), collapsed_slice_dims=(), start_index_map=(1,)),
            (B, 2),
        ),
        (X, shared(3, most=3)),
        Rows(0),
    ),
    "looked up by its own number": (lambda x, i: x[jnp.arange(B), i], (X, rows(B, most=4)), WHOLE),
    # Writes.
    "updated columns": (
        lambda x, w: lax.dynamic_update_slice(x, jnp.broadcast_to(w, (B, 2)), (0, 1)),
        (X, shared(2)),
        WHOLE,
    ),
    "columns written at places that all rows share": (
        lambda x, y, i: x.at[:, i].set(y),
        (X, rows(B, 1), shared(1, most=4)),
        WHOLE,
    ),
    "columns added at places that all rows share": (
        lambda x, y, i: x.at[:, i].add(y),
        (X, rows(B, 1), shared(1, most=4)),
        WHOLE,
    ),
    "written into zeros of each row": (
        lambda y, i: jax.vmap(lambda y, i: jnp.zeros(4).at[i].add(y))(y, i),
        (rows(B, 2), rows(B, 2, most=4)),
        WHOLE,
    ),
    "ones written into each row": (
        lambda x, i: jax.vmap(lambda x, i: x.at[i].set(1.0))(x, i),
        (X, rows(B, 2, most=4)),
        WHOLE,
    ),
    "written by its own number": (lambda x, i: x.at[jnp.arange(B), i].set(7.0), (X, rows(B, most=4)), WHOLE),
    "a row written where it was read": (
        lambda x: lax.fori_loop(
            0, B, lambda k, y: lax.dynamic_update_slice(y, 2 * lax.dynamic_slice(x, (k, 0), (1, 4)), (k, 0)), x
        ),
        (X,),
        WHOLE,
    ),
    # Products.
    "product with a weight": (lambda x, w: jnp.einsum("tbi,io->tbo", x, w), (MIDDLE, shared(4, 6)), Rows(1)),
    "a weight before rows": (lambda x, w: jnp.einsum("oi,bti->obt", w, x), (CUBE, shared(6, 4)), Rows(1)),
    "products within rows": (lambda x, y: jnp.einsum("tbi,sbi->bts", x, y), (MIDDLE, rows(6, B, 4, axis=1)), WHOLE),
    "products with the same for each row": (
        lambda x, w: lax.dot_general(x, jnp.broadcast_to(w, (B, 4, 6)), (((2,), (1,)), ((0,), (0,)))),
        (CUBE, shared(4, 6)),
        WHOLE,
    ),
    "convolution": (
        lambda x, w: lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "WNC")),
        (rows(B, 6, 2), shared(3, 2, 4)),
        Rows(1),
    ),
    "a kernel for each row": (
        lambda x, w: jax.vmap(lambda x, w: lax.conv(x[None], w, (1,), "SAME")[0])(x, w),
        (rows(B, 2, 6), rows(B, 3, 2, 3)),
        WHOLE,
    ),
    "windows": (
        lambda x: lax.reduce_window(x, -np.inf, lax.max, (1, 2), (1, 2), ((0, 0), (1, 1)), base_dilation=(1, 2)),
        (X,),
        WHOLE,
    ),
    "gradients of windows": (
        lambda x: jax.grad(lambda x: jnp.sum(jnp.sin(lax.reduce_window(x, -np.inf, lax.max, (1, 2), (1, 2), "VALID"))))(
            x
        ),
        (X,),
        WHOLE,
    ),
    # Linear algebra, which works along the last axes.
    "matrices": (
        lambda x: jnp.linalg.cholesky(jnp.einsum("tbik,tbjk->tbij", x, x) + np.eye(3, dtype=np.float32)),
        (rows(2, B, 3, 3, axis=1),),
        Rows(1),
    ),
    "diagonals": (
        lambda x, y: lax.linalg.tridiagonal_solve(0 * x, 2 + x * x, 0 * x, y),
        (X, rows(B, 4, 2)),
        WHOLE,
    ),
    # Loops and branches.
    "scan over columns": (
        lambda x: lax.scan(lambda s, x: (s + x, s * x), jnp.ones((B, 4)), x),
        (rows(3, B, 4, axis=1),),
        [Rows(0), Rows(1)],
    ),
    "scan over rows": (lambda x, w: lax.scan(lambda _, x: (None, x * w), None, x)[1], (X, shared(4)), WHOLE),
    "scan over rows with the same for each": (
        lambda x, w: lax.scan(lambda _, s: (None, s[0] * s[1]), None, (x, jnp.broadcast_to(w, (B, 4))))[1],
        (X, shared(4)),
        WHOLE,
    ),
    "loop of a number of trips": (lambda x: lax.fori_loop(0, 3, lambda _, x: x * x + 1, x), (X,), WHOLE),
    "trips of each row": (
        lambda x: jax.vmap(lambda x: lax.while_loop(lambda x: x.sum() < 9, lambda x: x * x + 1, x))(x),
        (X,),
        WHOLE,
    ),
    "a branch that all rows share": (
        lambda x, w: lax.cond(w[0] > 0, lambda x: x * 2, lambda x: jnp.ones_like(x) + x, x),
        (X, shared(1)),
        WHOLE,
    ),
    "a branch with the same for all rows": (
        lambda x, w: lax.cond(w[0] > -9, lambda x: x * 2, lambda x: jnp.ones_like(x), x),
        (X, shared(1)),
        WHOLE,
    ),
    "random numbers of each row's key": (
        lambda seeds: jax.vmap(lambda s: jax.random.bits(jax.random.fold_in(jax.random.key(s), 3), (2,)))(seeds),
        (rows(B, most=99),),
        WHOLE,
    ),
    "a callback": (
        lambda x: jax.pure_callback(lambda x: 2 * np.asarray(x), jax.ShapeDtypeStruct((B, 4), np.float32), x),
        (X,),
        WHOLE,
    ),
    "an operation": (lambda x, w: ops.softmax(x) + ops.matmul(x, w), (X, shared(4, 4)), WHOLE),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_rows_are_where_the_trace_says(name: str) -> None:
    fn, given, expected = ACCEPTED[name]
    check_accepted(fn, given, expected)


def _later(x: Array) -> Array:
    """Nine carries: what the first has after one iteration, the last one gets in the tenth."""

    def step(carry: tuple[Array, ...], _: None) -> tuple[tuple[Array, ...], None]:
        return (spread(x), *carry[:-1]), None

    return x + lax.scan(step, (jnp.zeros_like(x),) * 9, None, length=10)[0][-1]


def _later_rows(x: Array) -> Array:
    """The same for a carry that becomes a sum over rows' columns only late."""

    def step(carry: tuple[Array, ...], _: None) -> tuple[tuple[Array, ...], None]:
        return (x, *carry[:-1]), None

    return lax.scan(step, (jnp.zeros_like(x),) * 9, None, length=10)[0][-1].sum(0)


_BATCHED = lax.GatherDimensionNumbers(
    offset_dims=(),
    collapsed_slice_dims=(1,),
    start_index_map=(1,),
    operand_batching_dims=(0,),
    start_indices_batching_dims=(0,),
)

SAME, SOME_WRITTEN = "that were not computed in the same way", "writes some rows of the batch"


def _loop_of_rows(x: Array, first: int, last: int, row: Callable[[Any], Array]) -> Array:
    return lax.fori_loop(first, last, lambda k, y: y.at[k].set(row(k)), jnp.zeros_like(x))


REFUSED: dict[str, Refused] = {
    "another function for odd rows": (
        lambda x: jnp.stack([jnp.sin(x[k]) if k % 2 else jnp.cos(x[k]) for k in range(B)]),
        (X,),
        SAME,
        SLOT,
    ),
    "another function for the first row": (lambda x: jnp.concatenate([x[:1] * 0, x[1:]]), (X,), SAME, SLOT),
    "another loop for the first row": (
        lambda x: jnp.stack(
            [lax.while_loop(lambda s: s.sum() < 9, lambda s, k=k: s * s + (1 if k else 2), x[k]) for k in range(B)]
        ),
        (X,),
        SAME,
        SLOT,
    ),
    "another branch for the first row": (
        lambda x: jnp.stack([lax.cond(x[k, 0] > 0, jnp.sin, jnp.cos if k else jnp.tan, x[k]) for k in range(B)]),
        (X,),
        SAME,
        SLOT,
    ),
    "another compiled function for the first row": (
        lambda x: jnp.stack([jax.jit(lambda row, k=k: row * (3 if k else 2))(x[k]) for k in range(B)]),
        (X,),
        SAME,
        SLOT,
    ),
    "another column of the first row": (
        lambda x: jnp.concatenate([x[:1, 1:3], x[1:, :2]]),
        (X,),
        SAME,
        SLOT,
    ),
    "another array's first row": (lambda x, y: jnp.concatenate([y[:1], x[1:]]), (X, X), SAME, SLOT),
    "rows of a table whose rows differ": (
        lambda x, w: jnp.stack([x[k] * w[k] for k in range(B)]),
        (X, shared(B, 4)),
        SAME,
        SLOT,
    ),
    "rows times numbers of theirs": (
        lambda x: jnp.stack([x[k] * jnp.arange(float(B))[k] for k in range(B)]),
        (X,),
        SAME,
        SLOT,
    ),
    "rows times numbers that are cut out by a number": (
        lambda x: jnp.stack([x[k] * lax.dynamic_slice(jnp.arange(float(B)), (k,), (1,)) for k in range(B)]),
        (X,),
        SAME,
        SLOT,
    ),
    "rows times numbers of a loop": (lambda x: _loop_of_rows(x, 0, B, lambda k: x[k] * k), (X,), SOME_WRITTEN, SLOT),
    "rows times a table's numbers in a loop": (
        lambda x: _loop_of_rows(x, 0, B, lambda k: x[k] * jnp.arange(float(B))[k]),
        (X,),
        SOME_WRITTEN,
        SLOT,
    ),
    "a loop over all rows but the last": (
        lambda x: _loop_of_rows(x, 0, B - 1, lambda k: x[k]),
        (X,),
        SOME_WRITTEN,
        SLOT,
    ),
    "a loop over all rows but the first": (lambda x: _loop_of_rows(x, 1, B, lambda k: x[k]), (X,), SOME_WRITTEN, SLOT),
    "a loop from another number": (
        lambda x: lax.fori_loop(1, B + 1, lambda k, y: y.at[k].set(x[k]), jnp.zeros_like(x)),
        (X,),
        SOME_WRITTEN,
        SLOT,
    ),
    "a loop in steps of two": (
        lambda x: lax.scan(lambda s, _: ((s[0] + 2, s[1].at[s[0]].set(x[s[0]])), None), (0, x * 0), length=B)[0][1],
        (X,),
        SOME_WRITTEN,
        SLOT,
    ),
    "two writes in a loop, and the first depends on its number": (
        lambda x: lax.fori_loop(
            0, B, lambda k, s: (s[0].at[k].set(x[k] * k), s[1].at[k].set(x[k])), (jnp.zeros_like(x),) * 2
        )[0],
        (X,),
        SOME_WRITTEN,
        SLOT,
    ),
    "a sum that runs over rows": (
        lambda x: lax.fori_loop(
            0, B, lambda k, s: (s[0].at[k].set(s[1] + x[k]), s[1] + x[k]), (jnp.zeros_like(x), jnp.zeros(4))
        )[0],
        (X,),
        "combines a row with another one",
        SLOT,
    ),
    "only the first row written": (lambda x: x.at[0].set(0 * x[0]), (X,), SOME_WRITTEN, SLOT),
    "all rows written but one": (lambda x: _written_in_order(x, range(B - 1)), (X,), SOME_WRITTEN, SLOT),
    "one row written in another way": (lambda x: _written_in_order(x, factor=3), (X,), SAME, SLOT),
    "rows of numbers that run backwards": (
        lambda x: lax.map(lambda k: x[k], jnp.arange(B)[::-1]),
        (X,),
        "what belongs to one row",
        MOVE,
    ),
    "rows of numbers times the numbers": (
        lambda x: lax.map(lambda k: x[k] * k, jnp.arange(B)),
        (X,),
        "what belongs to one row",
        MOVE,
    ),
    "the last row of a loop": (
        lambda x: x + lax.fori_loop(0, B, lambda k, y: x[k], jnp.zeros(4))[None],
        (X,),
        "combines a row with another one",
        SLOT,
    ),
    "elements on two axes": (lambda x: jnp.maximum(x[:, None], x[None]), (X,), "on two axes", SLOT),
    "elements with numbers of slots": (lambda x: jnp.maximum(x, spread(x)), (X,), POSITION, SLOT),
    "elements with a constant for each slot": (lambda x: x + SLOTS[:, None], (X,), POSITION, SLOT),
    "elements with a constant that is not quite equal": (
        lambda x: jnp.maximum(x, np.float32([[0] * 4] * (B - 1) + [[0, 0, 0, 1]])),
        (X,),
        POSITION,
        SLOT,
    ),
    "elements with a constant that is equal but for a sign of zero": (
        lambda x: x / np.float32([[0.0], [0.0], [0.0], [0.0], [-0.0]]),
        (X,),
        POSITION,
        SLOT,
    ),
    "elements in two orders": (
        lambda x, y: x[jnp.argsort(x)] + y[jnp.argsort(y)],
        (rows(B), rows(B)),
        "in different orders",
        MOVE,
    ),
    "several axes reduced with rows": (lambda x: x.sum((0, 1)), (MIDDLE,), "reduces over the batch", SUM),
    "reversed rows": (lambda x: lax.rev(x, (0, 1)), (MIDDLE,), OUT, MOVE),
    "reversed rows, again reversed": (lambda x: x[::-1][::-1], (X,), "orders or accumulates over the batch", MOVE),
    "rows on an axis with several of each reversed": (
        lambda x: x.reshape(-1)[::-1],
        (X,),
        "orders or accumulates over the batch",
        MOVE,
    ),
    "sorted with slots' numbers": (
        lambda x: lax.sort((x, lax.broadcasted_iota(jnp.int32, x.shape, 0)), dimension=1)[1],
        (X,),
        POSITION,
        SLOT,
    ),
    # Moves.
    "split in two": (lambda x: x.reshape(2, -1), (rows(B, 6),), "splits the batch axis in two", MOVE),
    "split at another stride": (
        lambda x: x.reshape(2, 15),
        (rows(3, B, 2, axis=1),),
        "splits the batch axis in two",
        MOVE,
    ),
    "split within a row's elements": (
        lambda x: x.reshape(15, 4),
        (rows(2, B, 6, axis=1),),
        "splits the batch axis in two",
        MOVE,
    ),
    "split into columns": (lambda x: x.reshape(4, B), (X,), "splits the batch axis in two", MOVE),
    "moved rows, split": (
        lambda x: x.reshape(-1)[jnp.argsort(x.reshape(-1))].reshape(B, 4),
        (X,),
        "splits rows that were moved",
        MOVE,
    ),
    "some rows": (lambda x: x[1:3], (X,), OUT, MOVE),
    "every other row": (lambda x: x[::2], (X,), OUT, MOVE),
    "every third row, and the last": (lambda x: jnp.concatenate([x[:4:3], x[4:]]), (X,), ANOTHER, MOVE),
    "some of several elements of a row": (lambda x: x.reshape(-1)[:4], (X,), SOME, MOVE),
    "a slice at an index of rows": (
        lambda x, i: lax.dynamic_slice(x, (i[0], 0), (1, 4)),
        (X, rows(B, most=3)),
        "combines a row with another one",
        SLOT,
    ),
    "a slice of two rows": (lambda x: lax.dynamic_slice(x, (1, 0), (2, 4)), (X,), SOME, MOVE),
    "the first row for all": (lambda x: x - x[:1], (X,), "combines a row with another one", SLOT),
    "the sum of two rows": (lambda x: x[0] + x[1], (X,), "combines a row with another one", SLOT),
    "the second row for all, by a number": (
        lambda x: x - lax.dynamic_slice(x, (1, 0), (1, 4)),
        (X,),
        "combines a row with another one",
        SLOT,
    ),
    "two rows exchanged": (lambda x: jnp.concatenate([x[:1], x[2:3], x[1:2], x[3:]]), (X,), ANOTHER, MOVE),
    "a row left out": (lambda x: jnp.concatenate([x[:1], x[2:]]), (X,), ANOTHER, MOVE),
    "the batch twice": (lambda x: jnp.concatenate([x, x]), (X,), ANOTHER, MOVE),
    "more copies of one row": (
        lambda x: jnp.concatenate([x[:1], x[:1], *(jnp.broadcast_to(x[k : k + 1], (2, 4)) for k in range(1, B))]),
        (X,),
        "joins batches",
        MOVE,
    ),
    "rows joined with what all share": (
        lambda x, w: jnp.concatenate([x, w[None]]),
        (X, shared(4)),
        "joins batches",
        MOVE,
    ),
    "several elements of each row joined": (
        lambda x: jnp.concatenate([x.reshape(-1), x.reshape(-1)]),
        (X,),
        "joins batches",
        MOVE,
    ),
    "sorted rows joined": (
        lambda x: jnp.concatenate([x[jnp.argsort(x)], x]),
        (rows(B),),
        "joins batches",
        MOVE,
    ),
    "stacked rows exchanged": (lambda x: jnp.stack([x[k] for k in (1, 0, 2, 3, 4)]), (X,), ANOTHER, MOVE),
    "stacked with slots' numbers": (lambda x: jnp.stack([x, spread(x)]), (X,), POSITION, SLOT),
    "columns joined with slots' numbers": (lambda x: jnp.concatenate([x, spread(x)], 1), (X,), POSITION, SLOT),
    "split and exchanged": (lambda x: jnp.concatenate(lax.split(x, (2, 3), 0)[::-1]), (X,), ANOTHER, MOVE),
    "padded rows": (lambda x: lax.pad(x, np.float32(0), ((0, 1, 0), (0, 0, 0))), (X,), "pads the batch", MOVE),
    "rows padded in between": (
        lambda x: lax.pad(x, np.float32(0), ((0, 0, 1), (0, 0, 0))),
        (X,),
        "pads the batch",
        MOVE,
    ),
    "repeated rows": (lambda x: lax.tile(x, (2, 1)), (X,), "repeats the batch", MOVE),
    "about the largest rows": (
        lambda x: lax.approx_max_k(x, 2, reduction_dimension=0)[0],
        (X,),
        "orders over the batch",
        MOVE,
    ),
    # Lookups.
    "smaller slices": (
        lambda x, i: lax.gather(
            x,
            i[:, None],
            lax.GatherDimensionNumbers(offset_dims=(0, 1), collapsed_slice_dims=(), start_index_map=(1,)),
            (B - 1, 2),
        ),
        (X, shared(3, most=3)),
        "reads rows at computed indices",
        MOVE,
    ),
    "a row at an index that all share": (
        lambda x, i: x[i],
        (X, shared(3, most=3)),
        "reads rows at computed indices",
        MOVE,
    ),
    "a row at an index of each row": (lambda x, i: x[i], (X, rows(B, most=3)), "reads rows at computed indices", MOVE),
    "columns at indices of each row": (
        lambda x, i: x[:, i],
        (X, rows(B, most=3)),
        "reads rows at computed indices",
        MOVE,
    ),
    "each row at an index of its slot": (
        lambda x: lax.gather(x, jnp.arange(B)[:, None] % 4, _BATCHED, (1, 1)),
        (X,),
        POSITION,
        SLOT,
    ),
    "each row at an index of another": (
        lambda x, i: lax.gather(x, i[:, :, None], _BATCHED, (1, 1)),
        (X, rows(B, B, axis=1, most=4)),
        "reads rows at computed indices",
        MOVE,
    ),
    "a table of each slot": (
        lambda i: lax.gather(jnp.arange(4.0 * B).reshape(B, 4), i[:, None], _BATCHED, (1, 1)),
        (rows(B, most=4),),
        "looks up values that depend on the position",
        MOVE,
    ),
    "its own number, and a column of its slot": (
        lambda x: x[jnp.arange(B), jnp.arange(B) % 4],
        (X,),
        Mixing.MOVE.value,
        MOVE,
    ),
    # Writes.
    "updated rows": (
        lambda x, y: lax.dynamic_update_slice(x, y, (1, 0)),
        (X, shared(2, 4)),
        "writes to some rows",
        MOVE,
    ),
    "columns updated at an index of slots": (
        lambda x: lax.dynamic_update_slice(x, spread(x)[:, :2], (0, 1)),
        (X,),
        POSITION,
        SLOT,
    ),
    "columns of what has slots' numbers": (
        lambda x: lax.dynamic_update_slice(spread(x), x[:, :2], (0, 1)),
        (X,),
        POSITION,
        SLOT,
    ),
    "a row written where another one was read": (
        lambda x: lax.fori_loop(
            0, B, lambda k, y: lax.dynamic_update_slice(y, lax.dynamic_slice(x, (k, 0), (1, 4)), (B - 1 - k, 0)), x
        ),
        (X,),
        "writes a row where another one belongs",
        MOVE,
    ),
    "a row written into numbers of slots": (
        lambda x: lax.dynamic_update_slice(spread(x), x[1:2], (1, 0)),
        (X,),
        "writes a row where another one belongs",
        MOVE,
    ),
    "a row set where another one was read": (
        lambda x: jnp.zeros_like(x).at[2].set(x[1]),
        (X,),
        "writes a row where another one belongs",
        MOVE,
    ),
    "a row set among numbers of slots": (
        lambda x: spread(x).at[1].set(x[1]),
        (X,),
        "writes a row where another one belongs",
        MOVE,
    ),
    "a row set as a column": (
        lambda x: jnp.zeros((4, B + 1)).at[:, 1].set(x[1]),
        (X,),
        "writes a row where another one belongs",
        MOVE,
    ),
    "rows added at indices of theirs": (
        lambda x, i: jnp.zeros((6, 4)).at[i].add(x),
        (X, rows(B, most=6)),
        "writes numbers of different rows into one array",
        MOVE,
    ),
    "rows set at indices of theirs": (
        lambda x, i: jnp.zeros((6, 4)).at[i].set(x),
        (X, rows(B, most=6)),
        "writes numbers of different rows into one array",
        MOVE,
    ),
    "columns set at indices of rows": (
        lambda x, i: x.at[:, i].set(7.0),
        (X, rows(B, most=4)),
        "writes numbers of different rows into one array",
        MOVE,
    ),
    "rows set at places that all share": (
        lambda x, y, i: x.at[i].set(y),
        (X, shared(2, 4), shared(2, most=4)),
        "writes numbers of different rows into one array",
        MOVE,
    ),
    "slots' numbers written into rows": (
        lambda x, i: x.at[:, i].set(jnp.arange(float(B))[:, None]),
        (X, shared(1, most=4)),
        "writes numbers of different rows into one array",
        MOVE,
    ),
    "rows written into slots' numbers": (
        lambda x, y, i: spread(x).at[:, i].set(y),
        (X, rows(B, 1), shared(1, most=4)),
        "writes numbers of different rows into one array",
        MOVE,
    ),
    "written at indices of slots": (
        lambda x, y: jax.vmap(lambda x, i, y: x.at[i].set(y))(x, jnp.arange(B) % 4, y),
        (X, rows(B)),
        "writes numbers of different rows into one array",
        MOVE,
    ),
    "smaller windows written": (
        lambda x, y, i: lax.scatter(
            x,
            i[:, None],
            y,
            lax.ScatterDimensionNumbers(
                update_window_dims=(0,), inserted_window_dims=(1,), scatter_dims_to_operand_dims=(1,)
            ),
        ),
        (X, shared(B - 1, 1), shared(1, most=4)),
        "writes numbers of different rows into one array",
        MOVE,
    ),
    "counts of columns": (
        lambda i: jnp.zeros(6, jnp.int32).at[i].add(2),
        (rows(B, most=6),),
        "writes numbers of different rows into one array",
        MOVE,
    ),
    # Products.
    "a product over rows": (lambda x, w: jnp.einsum("bi,bo->io", x, w), (X, shared(B, 3)), "adds over the batch", SUM),
    "a product over rows of the second": (
        lambda w, x: jnp.einsum("bi,bo->io", w, x),
        (shared(B, 3), X),
        "adds over the batch",
        SUM,
    ),
    "products with a weight of each slot": (
        lambda x: jnp.einsum("bi,bio->bo", x, jnp.arange(B * 24.0).reshape(B, 4, 6)),
        (X,),
        POSITION,
        SLOT,
    ),
    "products with a weight of each slot before": (
        lambda x: lax.dot_general(jnp.arange(B * 24.0).reshape(B, 6, 4), x, (((2,), (1,)), ((0,), (0,)))),
        (X,),
        POSITION,
        SLOT,
    ),
    "products of every row with every other": (lambda x: x @ x.T, (X,), "combines every row with every other", MOVE),
    "products of rows with rows of another axis": (
        lambda x, y: jnp.einsum("bti,tci->btc", x, y),
        (rows(B, 3, 4), rows(3, B, 4, axis=1)),
        "combines every row with every other",
        MOVE,
    ),
    "a convolution over rows": (
        lambda x, w: lax.conv_general_dilated(x[None, :, :2], w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")),
        (X, shared(3, 2, 4)),
        "not the convolution's batch",
        OTHER,
    ),
    "rows as channels": (
        lambda x, w: lax.conv_general_dilated(x[None], w, (1,), "SAME", dimension_numbers=("NCW", "OIW", "NCW")),
        (X, shared(3, B, 3)),
        "not the convolution's batch",
        OTHER,
    ),
    "rows as kernels": (
        lambda w, x: lax.conv_general_dilated(
            w[None], x[:, None], (1,), "SAME", dimension_numbers=("NCW", "OIW", "NCW")
        ),
        (shared(1, 6), X),
        "not the convolution's batch",
        OTHER,
    ),
    "rows as kernels for rows": (
        lambda x, w: lax.conv_general_dilated(
            x[:, None], w[:, None], (1,), "SAME", dimension_numbers=("NCW", "OIW", "NCW")
        ),
        (rows(B, 6), rows(B, 3)),
        "not the convolution's batch",
        OTHER,
    ),
    "groups of the batch": (
        lambda x, w: lax.conv_general_dilated(
            x[:, None], w, (1,), "SAME", dimension_numbers=("NCW", "OIW", "NCW"), batch_group_count=B
        ),
        (rows(B, 6), shared(B, 1, 3)),
        "not the convolution's batch",
        OTHER,
    ),
    "windows over rows": (
        lambda x: lax.reduce_window(x, -np.inf, lax.max, (2, 1), (1, 1), "VALID"),
        (X,),
        "has windows over the batch",
        MOVE,
    ),
    "sums of windows over rows": (
        lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 1), (1, 1), "VALID"),
        (X,),
        "has windows over the batch",
        SUM,
    ),
    "windows at every other row": (
        lambda x: lax.reduce_window(x, -np.inf, lax.max, (1, 1), (2, 1), "VALID"),
        (X,),
        "has windows over the batch",
        MOVE,
    ),
    "windows with padded rows": (
        lambda x: lax.reduce_window(x, -np.inf, lax.max, (1, 1), (1, 1), ((0, 1), (0, 0))),
        (X,),
        "has windows over the batch",
        MOVE,
    ),
    "windows over rows with gaps between": (
        lambda x: lax.reduce_window(x, -np.inf, lax.max, (1, 1), (1, 1), ((0, 0), (0, 0)), base_dilation=(2, 1)),
        (X,),
        "has windows over the batch",
        MOVE,
    ),
    # Linear algebra.
    "matrices with rows on their last axis but one": (
        lambda x: jnp.linalg.qr(x)[0],
        (rows(2, B, 3, axis=1),),
        "is not known",
        OTHER,
    ),
    "matrices with rows on their last axis": (
        lambda x: jnp.linalg.qr(x)[0],
        (rows(2, 7, B, axis=2),),
        "is not known",
        OTHER,
    ),
    "diagonals with rows along them": (
        lambda x, y: lax.linalg.tridiagonal_solve(x, x, x, y),
        (T, shared(4, B, 2)),
        "is not known",
        OTHER,
    ),
    "triangles of each slot": (
        lambda x: lax.linalg.triangular_solve(jnp.arange(B * 9.0).reshape(B, 3, 3), x, left_side=True),
        (rows(B, 3, 2),),
        POSITION,
        SLOT,
    ),
    # Loops and branches.
    "scan over rows with a carry": (
        lambda x: lax.scan(lambda s, x: (s + x, s), jnp.zeros(4), x)[1],
        (X,),
        "scans over the batch",
        MOVE,
    ),
    "scan over rows that sees all": (
        lambda x: lax.scan(lambda _, y: (None, y * x), None, x)[1],
        (X,),
        "scans over the batch",
        MOVE,
    ),
    "scan over tokens of rows": (lambda x: lax.map(jnp.sin, x.reshape(-1, 4)), (CUBE,), "scans over the batch", MOVE),
    "scan over rows with slots' numbers": (
        lambda x: lax.map(lambda s: s[0] * s[1], (x, jnp.arange(float(B)))),
        (X,),
        POSITION,
        SLOT,
    ),
    "scan that mixes": (
        lambda x: lax.scan(lambda s, x: (s + x.sum(0), s), jnp.zeros(4), x)[1],
        (MIDDLE,),
        "reduces over the batch",
        SUM,
    ),
    "a carry that has slots' numbers late": (_later, (X,), POSITION, SLOT),
    "a carry that has rows late": (_later_rows, (X,), "reduces over the batch", SUM),
    "trips until all are done": (
        lambda x: lax.while_loop(lambda x: (x < 9).any(), lambda x: x * x + 1, x),
        (X,),
        "reduces over the batch",
        MOVE,
    ),
    "trips of each row with another's carry": (
        lambda x: lax.while_loop(lambda s: s[0].sum() < 9, lambda s: (s[0] * s[0] + 1, s[1]), (x.reshape(-1), x.T))[0],
        (X,),
        "reduces over the batch",
        SUM,
    ),
    "a branch that has slots' numbers": (
        lambda x, w: lax.cond(w[0] > 0, lambda x: x, spread, x),
        (X, shared(1)),
        POSITION,
        SLOT,
    ),
    "branches with rows on other axes": (
        lambda x, w: lax.cond(
            w[0] > 0, lambda x: x[:, None] + jnp.zeros((B, B)), lambda x: x[None] + jnp.zeros((B, B)), x
        ),
        (rows(B), shared(1)),
        "has rows now on one axis, now on another",
        MOVE,
    ),
    "a branch that has another row": (
        lambda x, w: lax.cond(w[0] > 0, lambda x: x[0], lambda x: x[1], x),
        (X, shared(1)),
        "combines a row with another one",
        SLOT,
    ),
    "a branch that has one row alone": (
        lambda x, w: lax.cond(w[0] > 0, lambda x: x, lambda x: jnp.broadcast_to(x[1], x.shape), x),
        (X, shared(1)),
        "moves, orders or counts rows",
        MOVE,
    ),
    "a branch by a value of rows": (
        lambda x, i: lax.cond((i > 2).all(), lambda x: x, lambda x: -x, x),
        (X, rows(B, most=5)),
        "reduces over the batch",
        MOVE,
    ),
    "a branch by one row": (
        lambda x: lax.cond(x[1, 0] > 0, lambda x: x, lambda x: -x, x),
        (X,),
        "combines a row with another one",
        SLOT,
    ),
    "a branch by one row, of what all share": (
        lambda x, w: x + lax.cond(x[1, 0] > 0, lambda: w, lambda: -w)[None],
        (X, shared(4)),
        "combines a row with another one",
        SLOT,
    ),
    "a branch by one row, of another row": (
        lambda x: lax.cond(x[1, 0] > 0, lambda: x[2], lambda: -x[2]),
        (X,),
        "combines a row with another one",
        SLOT,
    ),
    "trips by one row": (
        lambda x: lax.while_loop(lambda s: s[0] < x[0, 1], lambda s: (s[0] + 1, s[1] * 2), (jnp.float32(0), x))[1],
        (X,),
        "combines a row with another one",
        SLOT,
    ),
    "trips by one row, counted": (
        lambda x: x + lax.while_loop(lambda k: k < x[0, 1], lambda k: k + 1, jnp.float32(0)),
        (X,),
        "combines a row with another one",
        SLOT,
    ),
    "the first row as every result": (
        lambda x: jnp.broadcast_to(x[:1], x.shape),
        (X,),
        "what belongs to one row",
        MOVE,
    ),
    "the last row as every result": (
        lambda x: jnp.broadcast_to(x[-1:], x.shape),
        (X,),
        "what belongs to one row",
        MOVE,
    ),
    "indices as a result": (
        lambda i: jnp.concatenate([jnp.arange(B)[:, None], i[:, None]], 1),
        (rows(B, most=3),),
        "what belongs to one row, or to its position",
        MOVE,
    ),
    "keys of slots": (
        lambda seeds: jax.vmap(lambda s, k: jax.random.bits(jax.random.fold_in(jax.random.key(s), k)))(
            seeds, jnp.arange(B)
        ),
        (rows(B, most=99),),
        POSITION,
        SLOT,
    ),
    "an operation for moved rows": (
        lambda x: ops.softmax(x.reshape(-1)[jnp.argsort(x.reshape(-1))][:, None]),
        (X,),
        "calls an operation for rows that were moved",
        MOVE,
    ),
    "an operation for all rows and one": (
        lambda x: ops.matmul(x, x[1:2]),
        (rows(B, 1),),
        "calls an operation for rows that were moved",
        MOVE,
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_rows_is_named(name: str) -> None:
    check_refused(*REFUSED[name])


# What all rows share ------------------------------------------------------------------------------------------------

W, SLOT_NUMBERS = shared(4), jnp.arange(float(B))


def _alike(w: Array) -> Array:
    return jnp.broadcast_to(w, (B, 4))


EQUAL: dict[str, Callable[[Array], Array]] = {
    "broadcast": _alike,
    "on single elements": lambda w: jnp.sin(_alike(w)) * _alike(w),
    "transposed": lambda w: jnp.broadcast_to(w[:, None], (4, B)).T,
    "reshaped": lambda w: jnp.broadcast_to(w[:, None], (B, 4, 1)).reshape(B, 1, 4).reshape(B, 4),
    "squeezed": lambda w: lax.squeeze(jnp.broadcast_to(w, (1, B, 4)), (0,)),
    "reduced": lambda w: jnp.broadcast_to(w[:, None], (B, 4, 3)).sum(2),
    "reduced over copies": lambda w: jnp.broadcast_to(w, (3, B, 4)).max(0),
    "sliced": lambda w: jnp.broadcast_to(w, (B + 2, 4))[1 : B + 1],
    "cut": lambda w: lax.dynamic_slice(jnp.broadcast_to(w, (B + 2, 4)), (1, 0), (B, 4)),
    "split": lambda w: lax.split(jnp.broadcast_to(w, (B + 2, 4)), (2, B), 0)[1],
    "padded columns": lambda w: lax.pad(_alike(w)[:, :3], np.float32(1), ((0, 0, 0), (1, 0, 0))),
    "tiled": lambda w: lax.tile(w[None], (B, 1)),
    "running along columns": lambda w: jnp.cumsum(_alike(w), 1),
    "sorted columns": lambda w: jnp.sort(_alike(w), 1),
    "joined columns": lambda w: jnp.concatenate([_alike(w)[:, :1], _alike(w)[:, 1:]], 1),
    "updated columns": lambda w: lax.dynamic_update_slice(_alike(w), 2 * _alike(w)[:, :2], (0, 1)),
    "looked up": lambda w: w[jnp.broadcast_to(jnp.asarray([2, 0, 1, 1]), (B, 4))],
    "looked up in each": lambda w: jnp.take_along_axis(
        _alike(w), jnp.broadcast_to(jnp.asarray([[3, 0, 1, 1]]), (B, 4)), 1
    ),
    "columns looked up": lambda w: _alike(w)[:, jnp.asarray([2, 0, 1, 1])],
    "products": lambda w: _alike(w) @ jnp.ones((4, 4)),
    "products from the right": lambda w: jnp.einsum("ij,bj->bi", jnp.ones((4, 4)), _alike(w)),
    "products in pairs": lambda w: jnp.einsum("bi,bij->bj", _alike(w), jnp.broadcast_to(w, (B, 4, 4))),
    "in a loop": lambda w: lax.fori_loop(0, 2, lambda _, y: y * 2, _alike(w)),
    "in a branch": lambda w: lax.cond(w[0] > 0, lambda: _alike(w), lambda: -_alike(w)),
}
NUMBERED: dict[str, Callable[[Array], Array]] = {
    "counted": lambda w: lax.broadcasted_iota(jnp.float32, (B, 4), 0),
    "broadcast": lambda w: jnp.broadcast_to(SLOT_NUMBERS[:, None], (B, 4)),
    "on single elements": lambda w: jnp.sin(_alike(w)) * lax.broadcasted_iota(jnp.float32, (B, 4), 0),
    "transposed": lambda w: jnp.broadcast_to(SLOT_NUMBERS, (4, B)).T,
    "reshaped": lambda w: jnp.arange(4.0 * B).reshape(B, 4),
    "squeezed": lambda w: lax.squeeze(jnp.broadcast_to(SLOT_NUMBERS[:, None], (1, B, 4)), (0,)),
    "reduced": lambda w: jnp.broadcast_to(SLOT_NUMBERS[:, None, None], (B, 4, 3)).sum(2),
    "sliced": lambda w: jnp.broadcast_to(jnp.arange(B + 2.0)[:, None], (B + 2, 4))[1 : B + 1],
    "cut": lambda w: lax.dynamic_slice(jnp.broadcast_to(jnp.arange(B + 2.0)[:, None], (B + 2, 4)), (1, 0), (B, 4)),
    "split": lambda w: lax.split(jnp.broadcast_to(jnp.arange(B + 2.0)[:, None], (B + 2, 4)), (2, B), 0)[1],
    "padded": lambda w: lax.pad(jnp.zeros((B - 1, 4)), np.float32(1), ((1, 0, 0), (0, 0, 0))),
    "padded in between": lambda w: lax.pad(jnp.zeros((3, 4)), np.float32(1), ((0, 0, 1), (0, 0, 0))),
    "tiled": lambda w: lax.tile(jnp.broadcast_to(SLOT_NUMBERS[:, None], (B, 2)), (1, 2)),
    "running": lambda w: jnp.cumsum(_alike(w), 0),
    "running products": lambda w: jnp.cumprod(_alike(w), 0),
    "joined": lambda w: jnp.concatenate([jnp.zeros((2, 4)), jnp.ones((B - 2, 4))]),
    "joined with numbers": lambda w: jnp.concatenate(
        [_alike(w)[:, :1], jnp.broadcast_to(SLOT_NUMBERS[:, None], (B, 3))], 1
    ),
    "updated in part": lambda w: lax.dynamic_update_slice(jnp.zeros((B, 4)), jnp.ones((2, 4)), (0, 0)),
    "updated with numbers": lambda w: lax.dynamic_update_slice(
        jnp.zeros((B, 4)), jnp.broadcast_to(SLOT_NUMBERS[:, None], (B, 2)), (0, 1)
    ),
    "numbers updated": lambda w: lax.dynamic_update_slice(
        jnp.broadcast_to(SLOT_NUMBERS[:, None], (B, 4)), jnp.zeros((B, 2)), (0, 1)
    ),
    "looked up at numbers": lambda w: jnp.broadcast_to(w[jnp.arange(B) % 4][:, None], (B, 4)),
    "looked up in numbers": lambda w: jnp.take_along_axis(
        jnp.arange(4.0 * B).reshape(B, 4), jnp.broadcast_to(jnp.asarray([[3, 0, 1, 1]]), (B, 4)), 1
    ),
    "columns of numbers looked up": lambda w: jnp.arange(4.0 * B).reshape(B, 4)[:, jnp.asarray([2, 0, 1, 1])],
    "products": lambda w: jnp.arange(4.0 * B).reshape(B, 4) @ jnp.ones((4, 4)),
    "products from the right": lambda w: jnp.einsum("ij,bj->bi", jnp.ones((4, 4)), jnp.arange(4.0 * B).reshape(B, 4)),
    "products in pairs": lambda w: jnp.einsum("bi,bij->bj", jnp.arange(4.0 * B).reshape(B, 4), jnp.ones((B, 4, 4))),
    "products in pairs with numbers": lambda w: jnp.einsum(
        "bi,bij->bj", _alike(w), jnp.broadcast_to(SLOT_NUMBERS[:, None, None], (B, 4, 4))
    ),
    "selected": lambda w: jnp.where(SLOT_NUMBERS[:, None] < 2, _alike(w), 0.0),
    "drawn": lambda w: jax.random.normal(jax.random.key(0), (B, 4)),
    "written": lambda w: jnp.zeros((B, 4)).at[1].set(w),
    "in a loop": lambda w: lax.fori_loop(0, 2, lambda _, y: y + SLOT_NUMBERS[:, None], _alike(w)),
    "in a branch": lambda w: lax.cond(w[0] > 0, lambda: _alike(w), lambda: jnp.arange(4.0 * B).reshape(B, 4)),
    "stacked by a scan": lambda w: lax.scan(lambda k, _: (k + 1, k * w), 0.0, length=B)[1],
}


@pytest.mark.parametrize("name", EQUAL)
def test_numbers_that_are_equal_for_all_rows_may_meet_them(name: str) -> None:
    check_accepted(lambda x, w: x + EQUAL[name](w), (X, W), WHOLE)


@pytest.mark.parametrize("name", NUMBERED)
def test_numbers_that_differ_from_row_to_row_may_not_meet_them(name: str) -> None:
    check_refused(lambda x, w: x + NUMBERED[name](w), (X, W), POSITION, SLOT)


# Sorts --------------------------------------------------------------------------------------------------------------

FLAT = rows(B)


def _loop(x: Array, step: Callable[[Array], Array]) -> Array:
    return lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, step(s[1])), (0, x))[1]


def _scan(x: Array, step: Callable[[Array], Array]) -> Array:
    return lax.scan(lambda s, _: (step(s), None), x, length=2)[0]


SORTED: dict[str, tuple[Callable[..., Any], Any]] = {
    "put back by the inverse": (lambda x: x[(p := jnp.argsort(x))][jnp.argsort(p)], True),
    "put back by a scatter": (lambda x: jnp.zeros_like(x).at[(p := jnp.argsort(x))].set(x[p]), True),
    "sorted by what is computed twice": (
        lambda x: x[jnp.argsort(jnp.sin(x))][jnp.argsort(jnp.argsort(jnp.sin(x)))],
        True,
    ),
    "put back twice": (lambda x: x[(p := jnp.argsort(x))][(q := jnp.argsort(p))][q], False),
    "put back by another sort": (lambda x: x[jnp.argsort(x)][jnp.argsort(jnp.argsort(-x))], False),
    "put back by a sort that is not stable": (
        lambda x: x[jnp.argsort(x)][jnp.argsort(jnp.argsort(x, stable=False))],
        False,
    ),
    "put back by other keys of a loop": (
        lambda x: x[jnp.argsort(_loop(x, jnp.sin))][jnp.argsort(jnp.argsort(_loop(x, jnp.cos)))],
        False,
    ),
    "put back by other keys of a scan": (
        lambda x: x[jnp.argsort(_scan(x, jnp.sin))][jnp.argsort(jnp.argsort(_scan(x, jnp.cos)))],
        False,
    ),
    "put back by another power": (lambda x: x[jnp.argsort(x**2)][jnp.argsort(jnp.argsort(x**3))], False),
    "put back by another number": (lambda x: x[jnp.argsort(x + 1)][jnp.argsort(jnp.argsort(x * 0 + 2))], False),
    "a sort of a sort's numbers": (lambda x: jnp.argsort(jnp.argsort(x)), False),
    "sorted numbers": (lambda x: jnp.sort(x), False),
    "two keys, and one that orders back": (
        lambda x: x[lax.sort((jnp.floor(x), x, jnp.arange(B)), num_keys=2)[2]][jnp.argsort(jnp.argsort(jnp.floor(x)))],
        False,
    ),
    "written where half of the sorted numbers point": (
        lambda x: jnp.zeros_like(x).at[jnp.argsort(x) // 2].set(x),
        False,
    ),
}


@pytest.mark.parametrize("name", SORTED)
def test_sorted_rows_return_by_the_inverse_of_the_same_sort(name: str) -> None:
    fn, returns = SORTED[name]
    if returns:
        check_accepted(fn, (FLAT,), WHOLE)
        _, findings = traced(fn, (FLAT,), may_return=False)
        assert findings[0].mixing is MOVE
    else:
        assert traced(fn, (FLAT,))[1][0].mixing is MOVE


STAYING: dict[str, tuple[Callable[..., Any], tuple[Given, ...], str]] = {
    "joined rows": (lambda x: jnp.concatenate([x[:1], x[1:]]), (X,), SOME),
    "stacked rows": (lambda x: jnp.stack([x[k] for k in range(B)]), (X,), SOME),
    "unstacked rows": (lambda x: jnp.stack(jnp.unstack(x)), (X,), SOME),
    "split rows": (lambda x: jnp.concatenate(lax.split(x, (2, 3), 0)), (X,), SOME),
    "reversed rows": (lambda x: x[::-1], (X,), SOME),
    "a row of a number": (lambda x: lax.dynamic_slice(x, (1, 0), (1, 4)), (X,), SOME),
    "its own number": (lambda x, i: x[jnp.arange(B), i], (X, rows(B, most=4)), POSITION),
    "written by its own number": (
        lambda x, i: x.at[jnp.arange(B), i].set(7.0),
        (X, rows(B, most=4)),
        POSITION,
    ),
    "counts": (
        lambda i: jnp.zeros(6, jnp.int32).at[i].add(1),
        (rows(B, most=6),),
        "writes numbers of different rows into one array",
    ),
    "counts by one-hot numbers": (
        lambda i: jax.nn.one_hot(i, 6, dtype=jnp.int32).sum(0),
        (rows(B, most=6),),
        "reduces over the batch",
    ),
    "trips of each row": (
        lambda x: jax.vmap(lambda x: lax.while_loop(lambda x: x.sum() < 9, lambda x: x * x + 1, x))(x),
        (X,),
        "loops until every row is done",
    ),
    "an operation": (ops.softmax, (X,), "calls softmax of detjax.ops for the whole batch"),
}


@pytest.mark.parametrize("name", STAYING)
def test_where_rows_may_not_leave_their_positions_nothing_returns_them(name: str) -> None:
    fn, given, message = STAYING[name]
    _, findings = traced(fn, given, may_return=False)
    assert message in findings[0].what, findings[0]


def test_counts_are_not_results() -> None:
    for fn in (lambda i: jnp.zeros(6, jnp.int32).at[i].add(1), lambda i: jax.nn.one_hot(i, 6, dtype=jnp.int32).sum(0)):
        check_refused(fn, (rows(B, most=6),), "orders or counts rows of the batch", MOVE)


# Devices ------------------------------------------------------------------------------------------------------------

COLLECTIVES: dict[str, tuple[Callable[[Array], Any], Rows | str]] = {
    "psum": (lambda x: lax.psum(x, "d"), Rows(1)),
    "pmean": (lambda x: lax.pmean(x, "d"), Rows(1)),
    "pmax": (lambda x: lax.pmax(x, "d"), Rows(1)),
    "pmin": (lambda x: lax.pmin(x, "d"), Rows(1)),
    "ppermute": (lambda x: lax.ppermute(x, "d", [(0, 1), (1, 0)]), Rows(1)),
    "gathered in front": (lambda x: lax.all_gather(x, "d", axis=0), Rows(2)),
    "gathered in rows' place": (lambda x: lax.all_gather(x, "d", axis=1), Rows(2)),
    "gathered behind": (lambda x: lax.all_gather(x, "d", axis=2), Rows(1)),
    "gathered columns": (lambda x: lax.all_gather(x, "d", axis=2, tiled=True), Rows(1)),
    "gathered rows": (lambda x: lax.all_gather(x, "d", axis=1, tiled=True), "joins batches"),
    "scattered columns": (lambda x: lax.psum_scatter(x, "d", scatter_dimension=2, tiled=True), Rows(1)),
    "scattered in front": (lambda x: lax.psum_scatter(x[:2], "d", scatter_dimension=0), Rows(0)),
    "scattered behind": (lambda x: lax.psum_scatter(x[:, :, :2], "d", scatter_dimension=2), Rows(1)),
    "scattered rows": (
        lambda x: lax.psum_scatter(x.reshape(3, -1), "d", scatter_dimension=1, tiled=True),
        "scatters the batch over devices",
    ),
    "exchanged columns": (lambda x: lax.all_to_all(x, "d", 2, 2, tiled=True), Rows(1)),
    "exchanged rows": (lambda x: lax.all_to_all(x, "d", 2, 1, tiled=True), "splits the batch over devices"),
    "rows split": (lambda x: lax.all_to_all(x.reshape(3, -1), "d", 1, 0, tiled=True), "splits the batch over devices"),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_devices_with_the_same_rows_may_exchange_them(name: str) -> None:
    fn, expected = COLLECTIVES[name]
    for others in (frozenset(), frozenset("m")):
        places, findings = traced(fn, (MIDDLE,), sharded=others)
        if isinstance(expected, str):
            assert expected in findings[0].what and findings[0].mixing is MOVE
        else:
            assert (places, findings) == ([expected], [])
    for different in (frozenset("d"), frozenset("dm"), None):
        _, findings = traced(fn, (MIDDLE,), sharded=different)
        assert findings[0].mixing is Mixing.DEVICES and "along 'd'" in findings[0].what


def test_a_sum_over_two_axes_of_devices_names_both() -> None:
    _, findings = traced(lambda x: lax.psum(x, ("m", "d")), (X,), sharded=frozenset("m"))
    assert "along 'd', 'm'" in findings[0].what


def _on_a_mesh(devices: int, spec: PartitionSpec, fn: Callable[[Array], Array]) -> Callable[[Array], Array]:
    mesh = AbstractMesh((devices, 1), ("rows", "columns"), axis_types=(AxisType.Auto, AxisType.Auto))
    return jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)


def test_a_mesh_within_a_function_may_not_divide_the_batch() -> None:
    ten = PartitionSpec("rows")
    assert traced(_on_a_mesh(1, ten, jnp.sin), (X,)) == ([WHOLE], [])
    assert traced(_on_a_mesh(5, PartitionSpec("columns"), jnp.sin), (X,)) == ([WHOLE], [])
    assert traced(_on_a_mesh(2, PartitionSpec(None, "rows"), jnp.sin), (X,)) == ([WHOLE], [])
    for spec in (ten, PartitionSpec(("columns", "rows"))):
        assert traced(_on_a_mesh(5, spec, jnp.sin), (X,))[1][0].what == "shards the batch"


def test_axes_of_a_mesh_within_a_function_are_its_own_until_it_ends() -> None:
    inside = _on_a_mesh(2, PartitionSpec(None, "rows"), lambda x: lax.psum(x, "rows"))
    assert traced(inside, (X,), sharded=frozenset(("rows",)))[1] == []
    after = lambda x: lax.psum(_on_a_mesh(1, PartitionSpec(), jnp.sin)(x), "d")  # noqa: E731
    assert traced(after, (X,), sharded=frozenset("d"))[1][0].mixing is Mixing.DEVICES
