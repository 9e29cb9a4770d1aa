"""Packed queries have the gradients of rectangular ones, bit for bit: queries, keys, values and weights."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax import ops
from detjax.contract import KV_BLOCK, QUERY_UNIT, WEIGHT_GRADIENT_TOKENS
from detjax.operands.accumulated_weight import AccumulatedWeight
from detjax.operands.numerics import ceil_div, round_up
from tests.support.bits import assert_same_bits

WIDTH = 16
ROPE = ops.RotaryEmbedding(WIDTH, 10_000.0)
LENGTHS = (1, 15, 0, 16, 17, 130)
UNITS = tuple(round_up(length, WEIGHT_GRADIENT_TOKENS) for length in LENGTHS)
"""Tokens of each request and what fills it up to whole steps of a weight's gradient; the third request has none."""

TOKENS = max(UNITS)
SPARE = 24
"""Rows at the end that belong to nobody."""

COLUMNS = ceil_div(TOKENS, KV_BLOCK)


@dataclasses.dataclass(frozen=True)
class Shape:
    """Heads, and the options of attention."""

    heads: int
    kv_heads: int
    options: dict[str, Any]
    sinks: bool = False
    dtype: str = "float32"
    starts: tuple[int, ...] = (0,) * len(LENGTHS)

    def drawn(self, *shape: int, seed: int) -> np.ndarray:
        return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(jnp.dtype(self.dtype))


SHAPES = {
    "groups of 2, bfloat16, later positions": Shape(4, 2, {}, dtype="bfloat16", starts=(5, 0, 100, 121, 7, 64)),
    "groups of 1, window": Shape(2, 2, {"window": 20}),
    "groups of 4": Shape(4, 1, {}),
    "soft cap, sinks and slopes": Shape(2, 1, {"soft_cap": 3.0, "alibi_slopes": (0.5, 0.25)}, sinks=True),
}


def page_table() -> np.ndarray:
    return np.random.default_rng(1).permutation(len(LENGTHS) * (COLUMNS + 1)).reshape(len(LENGTHS), -1).astype(np.int32)


def rectangular(x: np.ndarray, first: Sequence[int], counts: Sequence[int]) -> jax.Array:
    """Reshapes packed rows to `[B, T, ...]`, with zeros after the tokens of each request."""
    out = np.zeros((len(counts), TOKENS, *x.shape[1:]), x.dtype)
    for request, (row, count) in enumerate(zip(first, counts, strict=True)):
        out[request, :count] = x[row : row + count]
    return jnp.asarray(out)


def requests_rows(x: Any, counts: Sequence[int], first: Sequence[int] | None = None) -> list[np.ndarray]:
    """The rows of each request: of rectangular rows, or of packed ones that begin at `first`."""
    x = np.asarray(x)
    if first is None:
        return [x[request, :count] for request, count in enumerate(counts)]
    return [x[row : row + count] for row, count in zip(first, counts, strict=True)]


def pages(shape: Shape) -> ops.KVPages:
    numbers = shape.drawn(page_table().size, shape.kv_heads, KV_BLOCK, WIDTH, seed=3)
    return ops.KVPages(jnp.asarray(numbers), jnp.asarray(numbers[::-1].copy()))


def queries(shape: Shape, counts: Sequence[int], rows: int) -> tuple[ops.Queries, ops.Queries]:
    """Packed queries, and rectangular ones."""
    table, start, count = page_table(), np.array(shape.starts, np.int32), np.array(counts, np.int32)
    in_one_row = ops.Queries.packed(table, start, count, decodes=0, rows=rows)
    return jax.tree.map(jnp.asarray, (in_one_row, ops.Queries(table, start, start + count, count)))


def attend(shape: Shape, q: jax.Array, kv: ops.KVPages, queries: ops.Queries, sinks: Any) -> jax.Array:
    return ops.attention(q, kv, queries, sinks=sinks, **shape.options)


def whole_step(shape: Shape, queries: ops.Queries, qkv: Any, kv: ops.KVPages, sums: Any, sinks: Any, dy: Any) -> Any:
    """The result, and the gradients of the projection, of the pages, of the sinks and of the norms' weights."""

    def fn(qkv: Any, kv: ops.KVPages, sums: Any, sinks: Any) -> tuple[jax.Array, ops.KVPages]:
        weights = zip(("q_norm", "k_norm"), sums, strict=True)
        norms = {name: AccumulatedWeight(total.astype(shape.dtype), total) for name, total in weights}
        q, written = ops.qk_rope_append_kv(qkv, kv, queries, ROPE, norm_eps=1e-6, **norms)
        return attend(shape, q, written, queries, sinks), written

    (y, written), pullback = jax.vjp(fn, qkv, kv, sums, sinks)
    return y, pullback((dy, jax.tree.map(lambda x: jnp.ones_like(x) / 8, written)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", SHAPES)
def test_sequences_in_one_row_have_the_gradients_of_sequences_in_rows_of_their_own(name: str) -> None:
    shape, rows = SHAPES[name], sum(UNITS) + SPARE
    first = np.cumsum((0, *UNITS[:-1]))
    qkv = shape.drawn(rows, shape.heads + 2 * shape.kv_heads, WIDTH, seed=1)
    dy = np.zeros((rows, shape.heads, WIDTH), qkv.dtype)
    for row, length in zip(first, LENGTHS, strict=True):
        dy[row : row + length] = shape.drawn(length, shape.heads, WIDTH, seed=2)
    sums = tuple(jnp.asarray(shape.drawn(WIDTH, seed=seed), jnp.float32) for seed in (4, 5))
    sinks = jnp.asarray(shape.drawn(shape.heads, seed=6)) if shape.sinks else None
    in_one_row, in_rows = queries(shape, UNITS, rows)
    program = detjax.jit(functools.partial(whole_step, shape))
    y, (dqkv, *others) = program(in_one_row, jnp.asarray(qkv), pages(shape), sums, sinks, jnp.asarray(dy))
    rectangles = (rectangular(x, first, UNITS) for x in (qkv, dy))
    alone, alone_dy = rectangles
    y_alone, (dqkv_alone, *others_alone) = program(in_rows, alone, pages(shape), sums, sinks, alone_dy)
    result = [requests_rows(x, UNITS, first) for x in (y, dqkv)], others
    assert_same_bits(result, ([requests_rows(x, UNITS) for x in (y_alone, dqkv_alone)], others_alone))
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in jax.tree.leaves(result))
    assert all((np.asarray(x) != 0).any() for x in jax.tree.leaves(others))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["soft cap, sinks and slopes", "groups of 4"])
def test_attention_gives_the_gradients_of_each_request_whatever_stands_in_rows_of_nobody(name: str) -> None:
    shape, rows = SHAPES[name], sum(round_up(length, QUERY_UNIT) for length in LENGTHS) + SPARE
    sinks = jnp.asarray(shape.drawn(shape.heads, seed=6)) if shape.sinks else None
    in_one_row, in_rows = queries(shape, LENGTHS, rows)
    first = np.asarray(in_one_row.first_row)
    q, dy = np.full((2, rows, shape.heads, WIDTH), np.nan, np.float32)
    for row, length in zip(first, LENGTHS, strict=True):
        q[row : row + length] = shape.drawn(length, shape.heads, WIDTH, seed=1)
        dy[row : row + length] = shape.drawn(length, shape.heads, WIDTH, seed=2)

    @detjax.jit
    def gradients(q: jax.Array, kv: ops.KVPages, queries: ops.Queries, sinks: Any, dy: jax.Array) -> Any:
        return jax.vjp(lambda q, kv, sinks: attend(shape, q, kv, queries, sinks), q, kv, sinks)[1](dy)

    dq, *others = gradients(jnp.asarray(q), pages(shape), in_one_row, sinks, jnp.asarray(dy))
    alone, alone_dy = (rectangular(x, first, LENGTHS) for x in (q, dy))
    dq_alone, *others_alone = gradients(alone, pages(shape), in_rows, sinks, alone_dy)
    assert_same_bits(requests_rows(dq, LENGTHS, first), requests_rows(dq_alone, LENGTHS))
    assert_same_bits(others, others_alone)
    assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(others))


def test_gradients_through_quantized_pages_are_refused() -> None:
    shape = SHAPES["groups of 4"]
    rows = sum(round_up(length, QUERY_UNIT) for length in LENGTHS)
    q = jnp.asarray(shape.drawn(rows, shape.heads, WIDTH, seed=1))
    kv = ops.KVPages(*(ops.quantize_kv(x, "int8") for x in pages(shape).numbers))
    in_one_row, in_rows = queries(shape, LENGTHS, rows)
    for one, asked in ((q, in_one_row), (rectangular(np.asarray(q), (0,) * 6, LENGTHS), in_rows)):
        with pytest.raises(
            NotImplementedError, match=r"attention: gradients through pages that are quantized \(int8\)"
        ):
            jax.grad(lambda q, asked=asked: attend(shape, q, kv, asked, None).sum())(one)
