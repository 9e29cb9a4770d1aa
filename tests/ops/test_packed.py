"""Packed queries: decodes and prefills of one call have the bits of each request alone, when written and attended."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detjax import ops
from detjax.contract import KV_BLOCK
from tests.support.bits import assert_same_bits

HEADS, KV_HEADS, WIDTH, COLUMNS = 4, 2, 16, 3
EMBEDDING = ops.RotaryEmbedding(WIDTH, 10_000.0)
STARTS = np.array([140, 0, 5, 120, 0, 0, 30], np.int32)
COUNTS = np.array([1, 0, 1, 20, 3, 0, 9], np.int32)
DECODES, ROWS = 3, 48
"""Three requests decode, one of them absent; four prefill, one of them without queries."""


def drawn(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def page_table() -> np.ndarray:
    pages = len(STARTS) * COLUMNS
    return np.random.default_rng(1).permutation(pages).reshape(-1, COLUMNS).astype(np.int32)


def pages() -> ops.KVPages:
    shape = len(STARTS) * COLUMNS, KV_HEADS, KV_BLOCK, WIDTH
    return ops.KVPages(jnp.asarray(drawn(2, *shape)), jnp.asarray(drawn(3, *shape)))


def step(qkv: Any, kv: ops.KVPages, queries: ops.Queries) -> tuple[jax.Array, ops.KVPages]:
    q, kv = ops.qk_rope_append_kv(qkv, kv, queries, EMBEDDING)
    return ops.attention(q, kv, queries), kv


def first_rows() -> np.ndarray:
    """The row of each request's first query."""
    prefills = -(-COUNTS[DECODES:] // 8) * 8
    return np.concatenate([np.arange(DECODES), DECODES + np.cumsum(prefills) - prefills])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_each_request_has_the_bits_it_has_alone(quantization: Any) -> None:
    kv = pages()
    if quantization is not None:
        kv = ops.KVPages(*(ops.quantize_kv(x, quantization) for x in kv.numbers))
    qkv, table = drawn(4, DECODES + ROWS, HEADS + 2 * KV_HEADS, WIDTH), page_table()
    queries = ops.Queries.packed(table, STARTS, COUNTS, decodes=DECODES, rows=ROWS)
    together, written = step(jnp.asarray(qkv), kv, jax.tree.map(jnp.asarray, queries))
    for index, (start, count, row) in enumerate(zip(STARTS, COUNTS, first_rows(), strict=True)):
        integers = (x[index : index + 1] for x in (table, STARTS, STARTS + COUNTS, COUNTS))
        queries_alone = ops.Queries(*map(jnp.asarray, integers))
        if count:
            alone, kv_alone = step(jnp.asarray(qkv[None, row : row + count]), kv, queries_alone)
            assert_same_bits(together[row : row + count], alone[0])
        else:
            kv_alone = kv
        for new, expected in zip(jax.tree.leaves(written), jax.tree.leaves(kv_alone), strict=True):
            assert_same_bits(new[table[index]], expected[table[index]])
        assert start + count <= COLUMNS * KV_BLOCK


def test_rows_tell_their_request_and_position() -> None:
    queries = ops.Queries.packed(page_table(), STARTS, COUNTS, decodes=DECODES, rows=ROWS)
    assert queries.first_row is not None and queries.rows is not None
    np.testing.assert_array_equal(queries.first_row, [0, 24, 32, 32])
    np.testing.assert_array_equal(queries.length, STARTS + COUNTS)
    expected = {0: (0, 140), 2: (2, 5)} | {3 + t: (3, 120 + t) for t in range(20)}
    expected |= {27 + t: (4, t) for t in range(3)} | {35 + t: (6, 30 + t) for t in range(9)}
    for row in range(DECODES + ROWS):
        assert bool(queries.rows.present[row]) == (row in expected)
        if row in expected:
            assert (int(queries.rows.request[row]), int(queries.rows.position[row])) == expected[row]


def test_rows_that_do_not_suffice_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Queries.packed: 40 rows for prefills of \[20, 3, 0, 9\] queries; accepted"):
        ops.Queries.packed(page_table(), STARTS, COUNTS, decodes=DECODES, rows=40)
