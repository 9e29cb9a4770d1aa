"""Gradients that continue a sum: microbatches and padding are schedules, and the sum equals one call over all rows."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax import ops
from detjax.contract import WEIGHT_GRADIENT_TOKENS
from detjax.operands.accumulated_weight import AccumulatedWeight
from detjax.operands.rounding import rounded
from detjax.ops.token_logprobs import CHUNK
from tests.ops import references
from tests.ops.cases import at
from tests.support.bits import assert_same_bits, same_bits
from tests.support.unchecked import unchecked

D, N, HEADS, WIDTH, VOCABULARY = 33, 47, 4, 32, 41
TOKENS, HALF = 96, 48
"""Every test takes one of these numbers of tokens, so that each operation has two programs for all of them."""

ROPE = ops.RotaryEmbedding(WIDTH, 10_000.0)

type Arrays = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """An operation `fn(rows, weights)` whose weights may be `AccumulatedWeight`s.

    `rows` and `weights` are the shapes of both, without the axis of tokens; rows called `tokens` are ids. `reference`
    is the operation in plain `jax.numpy`, for float64.
    """

    fn: Callable[[Arrays, Arrays], Any]
    rows: dict[str, tuple[int, ...]]
    weights: dict[str, tuple[int, ...]]
    reference: Callable[[Arrays, Arrays], Any] | None = None

    def drawn(self, count: int, dtype: Any, seed: int = 0) -> tuple[Arrays, Arrays]:
        """Rows and weights, NumPy arrays."""
        random = np.random.default_rng(seed)

        def array(name: str, *shape: int) -> np.ndarray:
            if name == "tokens":
                return random.integers(0, VOCABULARY, shape).astype(np.int32)
            if name == "positions":
                return random.integers(0, 100, shape).astype(np.int32)
            return random.standard_normal(shape).astype(jnp.dtype(dtype))

        rows = {name: array(name, count, *shape) for name, shape in self.rows.items()}
        return rows, {name: array("weight", *shape) for name, shape in self.weights.items()}

    def cotangents(self, count: int, rows: Arrays, weights: Arrays) -> Any:
        """Gradients of the result, NumPy arrays that do not depend on how many rows follow."""
        random = np.random.default_rng(9)
        out = jax.eval_shape(self.fn, rows, weights)
        return jax.tree.map(lambda y: random.standard_normal((count, *y.shape[1:])).astype(y.dtype), out)


def _qk_rope(rows: Arrays, weights: Arrays) -> Any:
    return ops.qk_rope(rows["qkv"], rows["positions"], ROPE, heads=3, kv_heads=1, norm_eps=1e-6, **weights)


def _qk_rope_append_kv(rows: Arrays, weights: Arrays) -> Any:
    """Queries, and the keys and values that were written. Each 16 tokens are a request with a page of its own."""
    requests, length = len(rows["qkv"]) // 16, jnp.full(len(rows["qkv"]) // 16, 16, jnp.int32)
    table, start = jnp.arange(requests, dtype=jnp.int32)[:, None], jnp.asarray(rows["positions"])[::16]
    queries = ops.Queries(table, start, start + length, length)
    kv = ops.KVPages.empty(requests, 1, WIDTH, rows["qkv"].dtype)
    qkv = jnp.asarray(rows["qkv"]).reshape(requests, 16, 5, WIDTH)
    q, kv = ops.qk_rope_append_kv(qkv, kv, queries, ROPE, norm_eps=1e-6, **weights)
    slots = start[:, None] + jnp.arange(16, dtype=jnp.int32)[None]
    written = tuple(jnp.take_along_axis(x, slots[:, None, :, None], axis=2).swapaxes(1, 2) for x in kv.numbers)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (q, *written))


def _qk_rope_with_offset(rows: Arrays, weights: Arrays) -> Any:
    norms = {"norm_eps": 1e-6, "norm_offset": 1.0, **weights}
    return ops.qk_rope(rows["qkv"], rows["positions"], ROPE, heads=3, kv_heads=1, **norms)


def _head(rows: Arrays, weights: Arrays, soft_cap: float | None = None) -> jax.Array:
    return ops.token_logprobs(rows["x"], weights["head"], rows["tokens"], soft_cap=soft_cap, chunk=32)


def _reference_head(rows: Arrays, weights: Arrays, soft_cap: float | None = None) -> jax.Array:
    logits = rows["x"] @ weights["head"].T
    logprobs = references.log_softmax(logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap))
    return jnp.take_along_axis(logprobs, rows["tokens"][:, None], axis=1)[:, 0]


def _reference_qk_rope(rows: Arrays, weights: Arrays, offset: float = 0.0) -> Any:
    turning, _ = references.frequencies(WIDTH, 10_000.0)
    q, k = rows["qkv"][:, :3], rows["qkv"][:, 3:4]
    norm = functools.partial(references.rms_norm, eps=1e-6, weight_offset=offset)
    normalized = (norm(x, weights[name]) for x, name in ((q, "q_norm"), (k, "k_norm")))
    return tuple(references.rope(x, rows["positions"], turning) for x in normalized)


X = {"x": (D,)}
NORMS = {"q_norm": (WIDTH,), "k_norm": (WIDTH,)}
CASES = {
    "matmul": Case(lambda rows, w: ops.matmul(rows["x"], w["w"]), X, {"w": (D, N)}, lambda rows, w: rows["x"] @ w["w"]),
    "matmul nk, bias and residual": Case(
        lambda rows, w: ops.matmul(rows["x"], w["w"], layout="nk", bias=w["bias"], residual=rows["residual"]),
        X | {"residual": (N,)},
        {"w": (N, D), "bias": (N,)},
        lambda rows, w: references.matmul(rows["x"], w["w"], w["bias"], rows["residual"], layout="nk"),
    ),
    "matmul gated": Case(
        lambda rows, w: ops.matmul(rows["x"], w["w"], layout="nk", bias=w["bias"], gated=True, activation="silu"),
        X,
        {"w": (2, N, D), "bias": (2, N)},
        lambda rows, w: references.matmul(rows["x"], w["w"], w["bias"], layout="nk", gated=True, activation="silu"),
    ),
    "rms_norm": Case(
        lambda rows, w: ops.rms_norm(rows["x"], w["scale"], eps=1e-6, weight_offset=1.0),
        X,
        {"scale": (D,)},
        lambda rows, w: references.rms_norm(rows["x"], w["scale"], eps=1e-6, weight_offset=1.0),
    ),
    "rms_norm with a residual": Case(
        lambda rows, w: ops.rms_norm(rows["x"], w["scale"], eps=1e-6, residual=rows["residual"]),
        X | {"residual": (D,)},
        {"scale": (D,)},
        lambda rows, w: references.rms_norm(rows["x"], w["scale"], rows["residual"], eps=1e-6),
    ),
    "embed": Case(
        lambda rows, w: ops.embed(rows["tokens"], w["table"]),
        {"tokens": ()},
        {"table": (VOCABULARY, D)},
        lambda rows, w: w["table"][rows["tokens"]],
    ),
    "qk_rope": Case(_qk_rope, {"qkv": (HEADS, WIDTH), "positions": ()}, NORMS, _reference_qk_rope),
    "qk_rope with an offset": Case(
        _qk_rope_with_offset,
        {"qkv": (HEADS, WIDTH), "positions": ()},
        NORMS,
        functools.partial(_reference_qk_rope, offset=1.0),
    ),
    "qk_rope_append_kv": Case(_qk_rope_append_kv, {"qkv": (5, WIDTH), "positions": ()}, NORMS),
    "token_logprobs": Case(_head, X | {"tokens": ()}, {"head": (VOCABULARY, D)}, _reference_head),
    "token_logprobs with a soft cap": Case(
        functools.partial(_head, soft_cap=3.0),
        X | {"tokens": ()},
        {"head": (VOCABULARY, D)},
        functools.partial(_reference_head, soft_cap=3.0),
    ),
}
VARIANTS = ("qk_rope with an offset", "token_logprobs with a soft cap")
"""Cases whose sums are added by the code of others."""

every_case = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly) if name in VARIANTS else name for name in CASES]
)


def accumulated(weights: Arrays, sums: Arrays) -> Arrays:
    """Each weight with its sum; a table's is one over lookups."""
    return {
        name: AccumulatedWeight(jnp.asarray(weight), **{"lookups" if name == "table" else "products": sums[name]})
        for name, weight in weights.items()
    }


def sums_of(weights: Arrays, number: float) -> Arrays:
    return {name: np.full(weight.shape, number, np.float32) for name, weight in weights.items()}


def _next(case: Case, rows: Arrays, weights: Arrays, sums: Arrays, dy: Any) -> Arrays:
    return jax.vjp(lambda sums: case.fn(rows, accumulated(weights, sums)), sums)[1](dy)[0]


def _ordinary(case: Case, rows: Arrays, weights: Arrays, dy: Any) -> Arrays:
    return jax.vjp(lambda weights: case.fn(rows, weights), weights)[1](dy)[0]


PROGRAMS = {name: detjax.jit(functools.partial(_next, case)) for name, case in CASES.items()}


def next_sums(name: str, rows: Arrays, weights: Arrays, sums: Arrays, dy: Any) -> Arrays:
    return PROGRAMS[name](*jax.tree.map(jnp.asarray, (rows, weights, sums, dy)))


def given(name: str, dtype: str = "float32", tokens: int = TOKENS) -> tuple[Arrays, Arrays, Any]:
    rows, weights = CASES[name].drawn(tokens, dtype)
    return rows, weights, CASES[name].cotangents(tokens, rows, weights)


def in_pieces(name: str, rows: Arrays, weights: Arrays, sums: Arrays, dy: Any, bounds: Sequence[int]) -> Arrays:
    for first, end in itertools.pairwise(bounds):
        sums = next_sums(name, at(rows, slice(first, end)), weights, sums, at(dy, slice(first, end)))
    return sums


def padded(rows: Arrays, dy: Any, place: int, count: int) -> tuple[Arrays, Any]:
    """Inserts rows of arbitrary numbers into both at a place; their gradients are zeros."""

    def with_rows(x: np.ndarray, new: np.ndarray) -> np.ndarray:
        return np.concatenate([x[:place], new, x[place:]])

    others = jax.tree.map(lambda x: np.concatenate([x[::-1]] * 2)[:count], rows)
    zeros = jax.tree.map(lambda x: np.zeros((count, *x.shape[1:]), x.dtype), dy)
    return jax.tree.map(with_rows, rows, others), jax.tree.map(with_rows, dy, zeros)


QUARTERS = (0, 16, 32, HALF, TOKENS)


@pytest.mark.parametrize(
    ("dtype", "bounds"),
    [
        ("float32", (0, HALF, TOKENS)),
        *(pytest.param(dtype, QUARTERS, marks=pytest.mark.nightly) for dtype in ("float32", "bfloat16")),
    ],
)
@every_case
def test_pieces_one_after_another_give_the_sum_of_all_tokens(name: str, dtype: str, bounds: tuple[int, ...]) -> None:
    rows, weights, dy = given(name, dtype)
    start = sums_of(weights, 0.1)
    together = next_sums(name, rows, weights, start, dy)
    assert_same_bits(in_pieces(name, rows, weights, start, dy, bounds), together)


@every_case
def test_tokens_whose_gradients_are_zeros_do_not_change_a_sum(name: str) -> None:
    rows, weights, dy = given(name, tokens=HALF)
    start = sums_of(weights, 0.1)
    together = next_sums(name, rows, weights, start, dy)
    for place in (0, 32, HALF):
        more, more_dy = padded(rows, dy, place, TOKENS - HALF)
        assert_same_bits(next_sums(name, more, weights, start, more_dy), together)


# The negative controls.


@every_case
def test_a_sum_moves_where_the_steps_of_tokens_do(name: str) -> None:
    if name == "qk_rope_append_kv":
        return  # its requests have 16 tokens here, so no other number of tokens can come between
    rows, weights, dy = given(name)
    # Half a step, so that shorter steps would not move.
    count = WEIGHT_GRADIENT_TOKENS // 2
    rows, dy = at((rows, dy), slice(TOKENS - count))
    start = sums_of(weights, 0.1)
    behind, before = (
        next_sums(name, more, weights, start, more_dy)
        for more, more_dy in (padded(rows, dy, place, count) for place in (TOKENS - count, HALF - count))
    )
    # An embedding adds one token at a time.
    assert same_bits(before, behind) == (name == "embed")


@every_case
def test_a_sum_depends_on_the_order_of_its_pieces(name: str) -> None:
    rows, weights, dy = given(name)
    start = sums_of(weights, 0.1)
    order = np.r_[HALF:TOKENS, 0:HALF]
    assert not same_bits(
        next_sums(name, at(rows, order), weights, start, at(dy, order)), next_sums(name, rows, weights, start, dy)
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["matmul gated", "rms_norm", "qk_rope", "token_logprobs"])
def test_whole_gradients_that_are_added_as_one_number_depend_on_where_microbatches_begin(name: str) -> None:
    rows, weights, dy = given(name)
    start = sums_of(weights, 0.1)
    with detjax.use_backend("stock"):
        together = next_sums(name, rows, weights, start, dy)
        assert not same_bits(in_pieces(name, rows, weights, start, dy, (0, HALF, TOKENS)), together)


# What a sum is.


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@every_case
def test_the_sum_from_zero_is_the_ordinary_gradient_before_its_rounding(name: str, dtype: str) -> None:
    rows, weights, dy = given(name, dtype, HALF)
    sums = next_sums(name, rows, weights, sums_of(weights, 0.0), dy)
    arrays = jax.tree.map(jnp.asarray, (rows, weights, dy))
    ordinary = detjax.jit(functools.partial(_ordinary, CASES[name]))(*arrays)
    assert_same_bits({key: rounded(x, dtype) for key, x in sums.items()}, ordinary)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.reference is not None])
def test_the_next_sum_is_the_sum_and_the_gradient_in_float64(name: str) -> None:
    rows, weights, dy = given(name, tokens=HALF)
    result = next_sums(name, rows, weights, sums_of(weights, 3.0), dy)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        as_float64 = functools.partial(jax.tree.map, lambda x: x.astype("float64") if x.dtype == np.float32 else x)
        reference = dataclasses.replace(CASES[name], fn=CASES[name].reference)
        expected = jax.jit(functools.partial(_ordinary, reference))(*map(as_float64, (rows, weights, dy)))
    for key, total in result.items():
        np.testing.assert_allclose(np.asarray(total) - 3, expected[key], rtol=1e-4, atol=1e-4, err_msg=key)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["matmul gated", "rms_norm", "embed", "qk_rope", "token_logprobs"])
def test_under_vmap_each_example_has_the_sum_it_has_alone(name: str) -> None:
    rows, weights, dy = given(name)
    start = sums_of(weights, 0.1)
    pieces = [at((rows, dy), slice(first, first + HALF)) for first in (0, HALF)]
    both = [jnp.stack(x) for x in zip(*map(jax.tree.leaves, pieces), strict=True)]
    rows_of_both, dy_of_both = jax.tree.unflatten(jax.tree.structure(pieces[0]), both)

    def one(rows: Arrays, dy: Any) -> Arrays:
        return _next(CASES[name], rows, jax.tree.map(jnp.asarray, weights), start, dy)

    result = detjax.jit(jax.vmap(one))(rows_of_both, dy_of_both)
    for index, piece in enumerate(pieces):
        assert_same_bits(at(result, index), next_sums(name, piece[0], weights, start, piece[1]))


def test_sums_of_single_weights_may_be_missing() -> None:
    rows, weights, dy = given("matmul nk, bias and residual")
    rows, weights, dy = jax.tree.map(jnp.asarray, (rows, weights, dy))
    start = sums_of(weights, 0.0)

    def gradients(bias: jax.Array, total: jax.Array) -> tuple[jax.Array, jax.Array]:
        def fn(bias: jax.Array, total: jax.Array) -> jax.Array:
            w = AccumulatedWeight(weights["w"], total)
            return ops.matmul(rows["x"], w, layout="nk", bias=bias, residual=rows["residual"])

        return jax.vjp(fn, bias, total)[1](dy)

    expected = next_sums("matmul nk, bias and residual", rows, weights, start, dy)
    result = detjax.jit(gradients)(weights["bias"], start["w"])
    assert_same_bits(result, (expected["bias"], expected["w"]))


def test_a_table_that_is_embedding_and_head_has_a_sum_for_each() -> None:
    rows, weights, dy = given("token_logprobs", tokens=HALF)
    rows, dy = jax.tree.map(jnp.asarray, (rows, dy))
    table, start = jnp.asarray(weights["head"]), sums_of(weights, 0.1)["head"]

    def both(products: jax.Array, lookups: jax.Array) -> jax.Array:
        weight = AccumulatedWeight(table, products, lookups)
        return ops.token_logprobs(ops.embed(rows["tokens"], weight), weight, rows["tokens"])

    products, lookups = detjax.jit(lambda *sums: jax.vjp(both, *sums)[1](dy))(start, start + 1)
    hidden = ops.embed(rows["tokens"], table)
    alone = {"x": hidden, "tokens": rows["tokens"]}
    assert_same_bits(products, next_sums("token_logprobs", alone, weights, {"head": start}, dy)["head"])
    dhidden = detjax.jit(lambda x: jax.vjp(lambda x: ops.token_logprobs(x, table, rows["tokens"]), x)[1](dy)[0])(hidden)
    embedded = next_sums("embed", {"tokens": rows["tokens"]}, {"table": table}, {"table": start + 1}, dhidden)
    assert_same_bits(lookups, embedded["table"])


@pytest.mark.parametrize(
    ("tokens", "chunks"),
    [(33, (16,)), *(pytest.param(n, (16, 48, CHUNK), marks=pytest.mark.nightly) for n in (1, 17, 33, 96, 100))],
)
def test_no_chunk_of_the_logprobs_of_tokens_changes_a_bit(tokens: int, chunks: tuple[int, ...]) -> None:
    weights = given("token_logprobs")[1]
    random = np.random.default_rng(3)
    x, ids = random.standard_normal((tokens, D)).astype("float32"), random.integers(0, VOCABULARY, tokens)
    dy, start = random.standard_normal(tokens).astype("float32"), np.full((VOCABULARY, D), 0.1, np.float32)
    arrays = jax.tree.map(jnp.asarray, (x, weights["head"], ids.astype(np.int32), dy))

    def in_steps(x: jax.Array, head: AccumulatedWeight, ids: jax.Array) -> jax.Array:
        logits = ops.matmul(x, head, layout="nk", out_dtype=jnp.float32)
        return jnp.take_along_axis(ops.log_softmax(logits), ids[:, None], axis=1)[:, 0]

    def results(fn: Callable[..., jax.Array]) -> Any:
        def program(x: jax.Array, head: jax.Array, ids: jax.Array, dy: jax.Array) -> Any:
            y, pullback = jax.vjp(lambda x, total: fn(x, AccumulatedWeight(head, total), ids), x, start)
            return y, pullback(dy)

        return detjax.jit(program)(*arrays)

    expected = results(in_steps)
    for chunk in chunks:
        assert_same_bits(results(functools.partial(ops.token_logprobs, chunk=chunk)), expected)


def test_bad_arguments_of_token_logprobs_are_refused() -> None:
    hidden, head, tokens = jnp.ones((4, 8)), jnp.ones((6, 8)), jnp.zeros(4, jnp.int32)
    op = unchecked(ops.token_logprobs)
    for chunk in (0, -16, 8, 24):
        with pytest.raises(ValueError, match=rf"token_logprobs: chunk is {chunk}; accepted: positive multiples of 16"):
            ops.token_logprobs(hidden, head, tokens, chunk=chunk)
    with pytest.raises(TypeError, match="token_logprobs: head has dtype bfloat16"):
        op(hidden, head.astype("bfloat16"), tokens)
    with pytest.raises(TypeError, match="token_logprobs: tokens"):
        op(hidden, head, jnp.zeros(4))
    with pytest.raises(ValueError, match=r"token_logprobs: tokens has shape \(3,\); accepted: \(4,\)"):
        op(hidden, head, tokens[:3])
    with pytest.raises(ValueError, match=r"token_logprobs: head has shape \(6, 7\); accepted: \(6, 8\)"):
        op(hidden, head[:, :7], tokens)
    with pytest.raises(ValueError, match=r"token_logprobs: hidden has shape \(0, 8\)"):
        op(hidden[:0], head, tokens[:0])


def test_parts_of_an_accumulated_weight_are_refused() -> None:
    weight = AccumulatedWeight(jnp.ones((4, 3), "bfloat16"), jnp.zeros((4, 3)))
    assert weight[...] is weight
    assert (weight.shape, weight.dtype) == ((4, 3), jnp.bfloat16)
    with pytest.raises(TypeError, match=r"AccumulatedWeight: index 0; accepted: \.\.\."):
        unchecked(AccumulatedWeight.__getitem__)(weight, 0)
